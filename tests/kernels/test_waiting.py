"""Kernels that start while earlier ones still run: all of them wait before they touch what those may read or write."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from tccompile.arch import ARCHS
from tccompile.ir.ops import Gemm, Op
from tccompile.ir.program import Program
from tccompile.kernels import KERNELS, kernel
from tccompile.kernels.spec import Kernel
from tests.gpu.cases import program_of
from tests.kernels import machine
from tests.kernels.memory import Memory
from tests.tiers import usually

ARCH = ARCHS["sm_90a"]

SLOW = (
    "attention", "attention_mma", "attention_sm90", "conv_gemv_mma", "conv_mma", "conv_patch", "conv_simt", "conv_sm90",
    "conv_stem", "conv_thin", "depthwise_bytes", "depthwise_bytes_sm90", "depthwise_mma", "depthwise_sm90", "gemm_mma",
    "gemv_mma", "gemv_packed", "gemv_packed_mma", "norm_split", "norm_team", "rnn_mma", "rnn_simt", "suppress",
)  # fmt: skip
"""Those that take long to compile, and wait where all kernels do that say nothing of it, or where gemm_sm90 and conv_halo do."""

AHEAD = (
    "conv_sm90", "gemm_sm90", "conv_halo", "conv_stem", "depthwise_bytes", "depthwise_bytes_sm90", "depthwise_sm90",
    "gemv_packed", "gemv_packed_mma",
)  # fmt: skip
"""Kernels that read constant weights before they wait."""


CASES = {
    **dict.fromkeys(("conv_sm90", "conv_mma", "conv_patch", "conv_halo"), "conv_unpadded"),
    **dict.fromkeys(("gemm_sm90", "gemm_mma", "gemm_simt", "gemm_thin", "gemv", "gemv_mma"), "gemm_of_one"),
    **dict.fromkeys(("gemv_packed", "gemv_packed_mma"), "packed_row"),
    **dict.fromkeys(("conv_simt", "conv_direct", "depthwise"), "conv_of_one"),
    **dict.fromkeys(("attention", "attention_mma", "attention_sm90"), "attention_small"),
    **dict.fromkeys(("norm", "norm_split", "norm_team"), "norm_of_one"),
    **dict.fromkeys(("conv_thin", "conv_gemv"), "conv_squeeze"),
    **dict.fromkeys(("depthwise_bytes", "depthwise_bytes_sm90"), "depthwise_bytes_7x7"),
    "conv_gemv_mma": "conv_residual_output", "conv_stem": "conv_plain_fp16",
    "depthwise_mma": "depthwise_7x7", "depthwise_sm90": "depthwise_tail", "mlp": "mlp_small", "reduce": "sum_of_one",
    "softmax": "softmax_of_one", "pointwise": "integers", "pool": "mean_pool_of_one", "resize": "resize_fp32",
    "rnn_mma": "gru_before", "rnn_simt": "rnn_fp32", "cumulate": "cumsum_integers", "scan": "cumsum_integers",
    "carry": "carry", "places": "places", "suppress": "suppress", "top_k": "top_k_integers", "sort": "top_k_all",
    "scatter": "scatter_integers", "trees": "trees_of_one", "custom": "custom_optional",
}  # fmt: skip
"""For every kernel, the smallest case that it takes."""


def weights(op: Op) -> set[str]:
    """What of an op's operands is constant in a network: filters and matrices, not what other layers compute."""
    return {op.b} if isinstance(op, Gemm) else {getattr(op, field) for field in ("w", "r") if hasattr(op, field)}


def biases(op: Op, program: Program) -> set[str]:
    """And of what its epilogue adds or multiplies by."""
    loads = op.epilogue.loads if hasattr(op, "epilogue") else ()
    return {load.tensor for load in loads if len(program.tensors[load.tensor].shape) == 1}


def touched_ahead(kernel: Kernel, program: Program, constants: set[str]) -> set[str]:
    """What the kernel's first and last blocks read before they wait, if only `constants` are known before the plan runs.

    The machine fails where it is something else, or is written, or where no thread waits.
    """
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    known = {name: recipe for name, recipe in program.constants.items() if name in constants}
    program = replace(program, constants=known)
    (op,) = program.ops
    work = kernel.work(op, program, next(iter(kernel.configs(op, program, ARCH))), ARCH)
    memory = Memory(program, values, op.y, work.scratch, work.counters)
    names = {at // machine.SPACE: name for name, at in memory.base.items()}
    found = set()
    assert work.launches
    for launch in work.launches:
        blocks = machine.Machine(launch, machine.ptx_of(launch.code, ARCH), memory, early=True)
        for number in {0, math.prod(launch.grid) - 1}:
            blocks.run_block(number, until_waited=True)
        found |= {names[k] for k in blocks.ahead}
    return found


@pytest.mark.parametrize("name", usually((k.name for k in KERNELS), *(k.name for k in KERNELS if k.name not in SLOW)))
def test_only_weights_are_read_before_waiting(name: str) -> None:
    program = program_of(CASES[name])
    own = weights(program.ops[0])
    if kernel(name).reads_integers:
        own = {part for form in program.forms_of(program.ops[0]) for part in form.tensors}
    ahead = touched_ahead(kernel(name), program, own | biases(program.ops[0], program))
    assert ahead >= own if name in AHEAD else not ahead
    if not kernel(name).reads_integers:  # which are constants always
        assert touched_ahead(kernel(name), program, set()) == set()


@pytest.mark.parametrize("text", ["", "\tgriddepcontrol.wait;\n"], ids=["never", "late"])
def test_what_is_touched_too_early_is_found(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The test of the test: no wait, and one behind the first load"""
    right = machine.ptx_of

    def wrong(*args: Any) -> str:
        without = right(*args).replace("\tgriddepcontrol.wait;\n", "")
        return re.sub(r"(?m)^\tld\.global.*\n", lambda m: m[0] + text, without, count=1)

    monkeypatch.setattr(machine, "ptx_of", wrong)
    with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait: ld\.global"):
        touched_ahead(kernel("pointwise"), program_of(CASES["pointwise"]), set())
