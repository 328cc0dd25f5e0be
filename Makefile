# make demo and make test set up their own environment; they need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start processes by the dozen, which would each compile the sources again
unexport PYTHONDONTWRITEBYTECODE

# Each core has a process of its own, where further threads of NumPy would wait for work and keep the others from theirs
test test-all: export OPENBLAS_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all doors fuzz site check extents gpu-test backend-test bench bench-models kernels reference dump clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1: /p' $(MAKEFILE_LIST)

demo: $(READY)  ## compile a small network, run it on a photograph, show the result
	$(BIN)/python docs/examples/superres/demo.py

test: $(READY)  ## what a change usually breaks: every stage, every kernel in some config; tests of a GPU if there is one
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile -m "not thorough"

test-all: $(READY)  ## the tests that make test leaves out: every generation, more sizes, layouts and networks
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile -m thorough

DOORS := .venv-doors
doors:  ## tests of what takes PyTorch, Ray, OpenSSF's signatures or NVIDIA's server, in environments of their own
	$(PYTHON) -m venv $(DOORS)
	$(DOORS)/bin/python -m pip install --quiet 'torch==2.13.0'
	$(DOORS)/bin/python -m pip install --quiet --editable '.[dev,torch,sign,ray]'
	$(DOORS)/bin/python -m pytest tests/doors tests/test_guide.py
	$(DOORS)/bin/python -m tests.doors.triton_plans out/triton
	$(PYTHON) -m venv $(DOORS)-triton
	$(DOORS)-triton/bin/python -m pip install --quiet --editable . nvidia-pytriton 'tritonclient[all]' 'numpy<2' pytest
	TCCOMPILE_TRITON_PLANS=$(CURDIR)/out/triton $(DOORS)-triton/bin/python -m pytest --noconftest tests/doors/test_triton.py

fuzz: $(READY)  ## 100,000 changed plans and as many models: none may be taken wrongly
	$(BIN)/python -m tests.fuzz.plans
	$(BIN)/python -m tests.fuzz.models

SITE := .venv-docs
site:  ## the pages of docs as a site in out/site, links checked; Sphinx has an environment of its own
	test -x $(SITE)/bin/sphinx-build || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet '.[docs]'
	$(SITE)/bin/sphinx-build -W --keep-going -q -b html -d out/doctrees docs out/site

check: $(READY)  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

extents: $(READY)  ## where code relies on sizes being plain integers, as types see it
	-$(BIN)/mypy --cache-dir .mypy_cache/open --shadow-file tccompile/ir/extent.py tests/open_extent.py

gpu-test: $(READY)  ## every kernel in every config against its reference, on a GPU
	$(BIN)/python -m pytest tests/gpu --all

backend-test: $(READY)  ## ONNX's node cases on a GPU, in fp32
	$(BIN)/python -m tests.backend --device CUDA --jobs 8

kernels: $(READY)  ## compile every config of every kernel for every generation
	$(BIN)/python -m tests.gpu.build out/kernels --all --arch all

bench-models: $(READY)  ## whole networks on a GPU beside PyTorch, and ONNX Runtime's CUDA provider if it is installed; needs PyTorch
	$(BIN)/python -m tests.bench.networks --peers eager,compiled,onnxruntime

bench: $(READY)  ## whole networks, single and recurrent layers, bandwidth on a GPU: the tables of docs/benchmarks; needs PyTorch
	$(BIN)/python -m tests.bench.networks
	$(BIN)/python -m tests.bench.layers
	$(BIN)/python -m tests.bench.recurrent
	$(BIN)/python -m tests.bench.bandwidth
	$(BIN)/python -m tests.bench.tensor_cores
	$(BIN)/python -m tests.bench.single_precision
	$(BIN)/python -m tests.bench.bytes
	$(BIN)/python -m tests.bench.float8
	$(BIN)/python -m tests.bench.attention8
	$(BIN)/python -m tests.bench.convolutions8
	$(BIN)/python -m tests.bench.sparse
	$(BIN)/python -m tests.bench.quantized

reference: $(READY)  ## the pages of docs/reference, from what the code says
	$(BIN)/python -m tests.reference

dump: $(READY)  ## every stage of compiling MODEL, as files in out/
	mkdir -p out
	$(BIN)/tccompile $(MODEL) -o out/model.plan --dump out/

clean:
	rm -rf $(VENV) out build *.egg-info
