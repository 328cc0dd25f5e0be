"""Operators with kernels in plans for ranges: their extents are arguments, so one code takes all sizes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tccompile
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session
from tests.custom.common import OPERATORS
from tests.custom.operators import spread_numpy
from tests.networks import relative_error
from tests.tiers import thorough


@thorough
def test_a_kernel_takes_all_sizes_of_a_range() -> None:
    """With two outputs behind one another, working memory, and a grid that the size decides."""
    w = np.random.default_rng(0).standard_normal((12, 70)).astype(np.float32)
    node = helper.make_node("Spread", ["x", "w"], ["y", "most"], "spread", domain="test", steps=[1, 2], scale=0.5)
    x, *results = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["n", 12]), ("y", None), ("most", None))
    )
    graph = helper.make_graph([node], "g", [x], results, [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("test", 1)], ir_version=9)
    made = tccompile.compile(model, archs=["sm_75"], precision="fp32", ops=[OPERATORS], ranges={"n": (2, 9)})
    plan = from_bytes(to_bytes(made))
    session = Session(plan, "cpu", ops=[OPERATORS])
    for n in (2, 5, 9):
        values = np.random.default_rng(n).standard_normal((n, 12)).astype(np.float32)
        for got, want in zip(session.run(None, {"x": values}), spread_numpy(values, w, (1, 2), 0.5), strict=True):
            assert got.shape == want.shape and relative_error(got, want) < 1e-6
    sizes = [(family, n) for family in plan.families for n in range(family.sizes[0].low, family.sizes[0].high + 1)]
    assert len(sizes) >= 4
    launched = {n: family.at((n,)).sections[0].steps[0].launches[-1].grid for family, n in sizes}
    assert launched == {n: (n, 1, 1) for _, n in sizes}
