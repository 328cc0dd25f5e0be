"""The benchmark of memory-bound kernels: what its cases are, and how bytes are counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.ir.reference import compute
from tccompile.ir.verify import verify
from tccompile.schedule.choose import candidates
from tests.bench import bandwidth
from tests.bench.bandwidth import KERNEL, cases
from tests.networks import relative_error


def test_every_case_has_candidates() -> None:
    for c in cases():
        found = {r.kernel.name for r in candidates(c.op, c.program, ARCHS["sm_90a"])}
        assert KERNEL.get(c.group, next(iter(found))) in found
        names = set(c.program.tensors) - set(c.program.constants) - {c.op.y}
        verify(c.program.__class__((), (), c.program.tensors, {**c.program.constants, **dict.fromkeys(names)}, (c.op,)))


def test_bytes_are_those_of_each_tensor_once() -> None:
    known = {c.name: c.bytes for c in cases()}
    assert known["1×4096×25088"] == 2 * (25088 + 4096 * 25088 + 4096) + 4 * 4096  # and the bias in fp32
    assert known["65536×1024"] == 2 * 65536 * (1024 + 8)  # of rows, the mean's with its padding
    assert known["32×112²×32, 3×3"] == 2 * (2 * 32 * 112**2 * 32 + 9 * 32) + 4 * 32


@pytest.mark.parametrize(
    "made", [bandwidth.norm((3, 24), (1,)), bandwidth.norm((2, 64, 3, 3), (2, 3), 32)], ids=["layer", "group"]
)
def test_norms_are_what_they_say(made) -> None:
    op, program = made
    rng = np.random.default_rng(0)
    x = rng.standard_normal(program.tensors["x"].shape).astype(np.float32)
    scale, shift = rng.standard_normal((2, x.shape[1])).astype(np.float32)
    parts = x.reshape(len(x), op.groups or 1, -1)
    expected = (parts - parts.mean(2, keepdims=True)) / np.sqrt(parts.var(2, keepdims=True) + 1e-5)
    channels = (1, -1, *[1] * (x.ndim - 2))
    expected = expected.reshape(x.shape) * scale.reshape(channels) + shift.reshape(channels)
    assert relative_error(compute(op, program, {"x": x, "scale": scale, "shift": shift}), expected) < 1e-6


def test_means_divide_by_what_they_add() -> None:
    op, program = bandwidth.mean((4, 40), (1,))
    assert math.isclose(float(compute(op, program, {"x": np.full((4, 40), 3, np.float32)})[0, 0]), 3.0, rel_tol=1e-6)
