"""Several ops in one launch on a GPU, beside the same network one op after the other on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.runtime.session import Session
from tccompile.sizes import Size
from tests.kernels.test_expand_sm90 import in_one_launch
from tests.kernels.test_pair_sm90 import bottlenecks
from tests.kernels.test_prologue_sm90 import dense_layer
from tests.kernels.test_squeeze_excite import gated
from tests.networks import relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 37])
def test_products_in_one_launch(gpu, monkeypatch: pytest.MonkeyPatch, images: int, request: pytest.FixtureRequest) -> None:
    """Tiles that end inside an image; more of them than a block has; the same from run to run."""
    if gpu.cc != (9, 0) or request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here, for sm_90a")
    from tccompile.kernels.pair_sm90 import PairSm90

    monkeypatch.setattr(PairSm90, "cost", lambda *_: 0.01)
    plan = compile_model(bottlenecks(images), Options(archs=("sm_90a",), precision="fp16"))
    (section,) = (s for s in plan.entries[0].sections if s.arch == "sm_90a")
    assert sum(step.within >= 0 for step in section.steps) == 3
    x = np.random.default_rng(0).standard_normal((images, 8, 9, 9)).astype(np.float32)
    session = Session(plan, "gpu")
    (first,), (again,) = session.run(None, {"x": x}), session.run(None, {"x": x})
    assert np.array_equal(first, again)
    assert relative_error(first, Session(plan, "cpu").run(None, {"x": x})[0]) <= 2e-3


@pytest.mark.gpu
def test_products_in_one_launch_over_a_range(gpu, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One plan, whose launches follow from how many images there are."""
    if gpu.cc != (9, 0) or request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here, for sm_90a")
    from tccompile.kernels.pair_sm90 import PairSm90

    monkeypatch.setattr(PairSm90, "cost", lambda *_: 0.01)
    ranges = {"batch": Size("batch", 1, 40)}
    plan = compile_model(bottlenecks("batch"), Options(archs=("sm_90a",), precision="fp16", ranges=ranges))
    assert all(sum(step.within >= 0 for step in family.entry.sections[0].steps) == 3 for family in plan.families)
    on_gpu, on_cpu = Session(plan, "gpu"), Session(plan, "cpu")
    for images in (40, 1, 2, 23, 39):
        x = np.random.default_rng(images).standard_normal((images, 8, 9, 9)).astype(np.float32)
        assert relative_error(on_gpu.run(None, {"x": x})[0], on_cpu.run(None, {"x": x})[0]) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 37])
@pytest.mark.parametrize("halves", [False, True])
def test_a_norm_and_the_product_behind_it(gpu, monkeypatch: pytest.MonkeyPatch, halves: bool, images: int, request) -> None:
    if gpu.cc != (9, 0) or request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here, for sm_90a")
    from tccompile.kernels.prologue_sm90 import PrologueSm90

    monkeypatch.setattr(PrologueSm90, "cost", lambda *_: 0.01)
    plan = compile_model(dense_layer(halves, images), Options(archs=("sm_90a",), precision="fp16"))
    (section,) = (s for s in plan.entries[0].sections if s.arch == "sm_90a")
    assert sum(step.within >= 0 for step in section.steps) == 1
    x = np.random.default_rng(0).standard_normal((images, 16, 9, 9)).astype(np.float32)
    session = Session(plan, "gpu")
    (first,), (again,) = session.run(None, {"x": x}), session.run(None, {"x": x})
    assert np.array_equal(first, again)
    assert relative_error(first, Session(plan, "cpu").run(None, {"x": x})[0]) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 33])
def test_squeeze_and_excitation_in_one_launch(
    gpu, monkeypatch: pytest.MonkeyPatch, images: int, request: pytest.FixtureRequest
) -> None:
    """Clusters of several shapes, beside one op after the other on the CPU; the same from run to run."""
    if gpu.cc != (9, 0) or request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here, for sm_90a")
    from tccompile.kernels.squeeze_excite import SqueezeExcite

    x = np.random.default_rng(0).standard_normal((images, 32, 15, 13)).astype(np.float32)
    configs = [(1, 4, 256), (2, 2, 512), (4, 1, 512), (1, 1, 512)]
    for config in (dict(zip(("across", "along", "threads"), c, strict=True)) for c in configs):
        monkeypatch.setattr(SqueezeExcite, "cost", lambda self, ops, program, c, arch, own=config: 0.01 if c == own else 1e3)
        plan = compile_model(gated(images), Options(archs=("sm_90a",), precision="fp16"))
        (section,) = (s for s in plan.entries[0].sections if s.arch == "sm_90a")
        assert any(step.kernel == "squeeze_excite" and dict(step.config) == config for step in section.steps)
        session = Session(plan, "gpu")
        (first,), (again,) = session.run(None, {"x": x}), session.run(None, {"x": x})
        assert np.array_equal(first, again)
        assert relative_error(first, Session(plan, "cpu").run(None, {"x": x})[0]) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 37])
def test_pixels_are_made_where_a_depthwise_convolution_reads_them(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: int, request: pytest.FixtureRequest
) -> None:
    """Boxes that end beyond images; the same from run to run. Engines may round a half to another byte."""
    if gpu.cc != (9, 0) or request.config.getoption("--plans") is not None:
        pytest.skip("it is compiled here, for sm_90a")
    plan = in_one_launch(monkeypatch, tmp_path, images)
    assert sum(step.within >= 0 for step in plan.entries[0].sections[0].steps) == 1
    x = np.random.default_rng(0).standard_normal((images, 3, 56, 56)).astype(np.float32)
    session = Session(plan, "gpu")
    (first,), (again,) = session.run(None, {"x": x}), session.run(None, {"x": x})
    assert np.array_equal(first, again)
    assert relative_error(first, Session(plan, "cpu").run(None, {"x": x})[0]) <= 5e-3
