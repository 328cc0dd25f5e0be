"""Several ops in one launch on a GPU, beside the same network one op after the other on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.runtime.session import Session
from tests.kernels.test_pair_sm90 import bottlenecks
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
