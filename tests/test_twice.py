"""Norms whose results are stored in bytes beside halves: when they are, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tccompile.fuse import fuse
from tccompile.fuse.twice import store_twice
from tccompile.ir.memory import lifetimes
from tccompile.ir.ops import Norm
from tccompile.ir.program import Program, earlier
from tccompile.ir.reference import evaluate
from tccompile.ir.verify import verify
from tccompile.layout import lay_out
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.plan.file import read_plan
from tccompile.precision.formats import precision
from tccompile.rewrites import rewrite
from tccompile.runtime.session import Session
from tests.networks import feeds, reference, relative_error
from tests.rewrites.common import Net
from tests.tiers import thorough

KINDS = {
    "bytes and halves": 1,
    "with a zero point": 1,
    "bytes alone": 0,
    "halves alone": 0,
    "bytes of a part": 0,
    "channels of an image": 0,
    "bytes at two scales": 1,
    "bytes of the first row": 0,
}
"""Models with a norm, by what reads it, and how many norms store twice."""


def model(kind: str):
    """A norm whose result a product reads in bytes, and a sum in halves."""
    net = Net(opset=21, x=(2, 32, 5, 5) if kind == "channels of an image" else (3, 7, 32))
    if kind == "channels of an image":
        y = net("InstanceNormalization", "x", net.normal(32), net.normal(32))
        y = net("Reshape", net("Transpose", y, perm=[0, 2, 3, 1]), np.array([50, 32]))
    else:
        y = net("LayerNormalization", "x", net.normal(32), net.normal(32), axis=-1)
    zero = np.uint8(117) if kind == "with a zero point" else np.int8(0)

    def product(x: str, scale: float) -> str:
        quantized = (np.float32(scale), zero)
        x = net("DequantizeLinear", net("QuantizeLinear", x, *quantized), *quantized)
        w = net.rng.integers(-127, 128, (32, 32)).astype(np.int8)
        return net("MatMul", x, net("DequantizeLinear", w, np.float32(0.01), np.int8(0)))

    if kind == "halves alone":
        return net.out(net("Add", y, net("MatMul", y, net.normal(32, 32)))).model()
    if kind == "bytes of a part":
        part = net("Slice", y, np.array([1]), np.array([5]), np.array([1]))
        return net.out(net("Add", part, product(part, 0.04))).out(net("Relu", y)).model()
    if kind == "bytes of the first row":
        return net.out(product(net("Gather", y, np.array(0), axis=1), 0.04)).out(net("Relu", y)).model()
    out = product(y, 0.04)
    if kind == "bytes at two scales":
        out = net("Add", out, product(y, 0.03))
    return net.out(out if kind == "bytes alone" else net("Add", y, out)).model()


def laid_out(m) -> Program:
    return lay_out(precision(fuse(lower(rewrite(load(m)))), "fp16", {}, ()))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_store_twice(kind: str) -> None:
    m = model(kind)
    before = laid_out(m)
    after = store_twice(before)
    verify(after)
    twice = [op for op in after.ops if op.also is not None]
    assert len(twice) == KINDS[kind] == len(before.ops) - len(after.ops)
    assert all(isinstance(op, Norm) for op in twice)
    given = feeds(m, 3)
    was, now = (evaluate(p, given, sources(m), stored=True) for p in (before, after))
    assert all(np.array_equal(was[name], now[name]) for name in before.outputs)
    for op in twice:
        assert after.writer()[op.also.y] is op
        here = after.ops.index(op)
        readers = [i for i, other in enumerate(after.ops) if op.also.y in other.inputs]
        assert lifetimes(after)[op.also.y] == (here, max(readers))
        assert all(earlier(after)[i] >> here & 1 for i in readers)


@thorough
def test_a_plan_of_theirs_runs(tmp_path: Path) -> None:
    m = model("with a zero point")
    compile_model(m, Options(({},), ("sm_75",), precision="fp16", jobs=1)).save(tmp_path / "m.plan")
    plan = read_plan(tmp_path / "m.plan")
    (entry,) = plan.entries
    (number,) = (i for i, op in enumerate(entry.program.ops) if op.also is not None)
    (step,) = (section.steps[number] for section in entry.sections if section.arch == "sm_75")
    assert step.kernel == "norm" and len(step.launches) == 1 and "stores uint8 too" in step.reason
    given = feeds(m, 3)
    with Session(plan, device="cpu") as session:
        (got,) = session.run(None, given)
    assert relative_error(got, *reference(m, given).values()) < 2e-3
