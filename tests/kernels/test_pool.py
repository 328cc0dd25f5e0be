"""Pooling, simulated and compiled."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Pool
from tccompile.ir.types import DType
from tccompile.kernels.pool import PoolKernel
from tests.gpu.cases import pool, program_of
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough, usually

KERNEL = PoolKernel()
HOPPER = ARCHS["sm_90a"]


@pytest.mark.parametrize("case", cases_of(Pool))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


@pytest.mark.parametrize(
    "how",
    [
        {"x": (1, 9, 6, 7), "kind": "mean", "window": (2, 2), "ep": "bias", "to": "output"},
        {"x": (1, 9, 6, 7), "kind": "max", "window": (3, 2), "pad": 1, "to": "slice"},
        {"x": (1, 6, 9, 8), "kind": "mean", "window": (6, 5), "pad": 2, "count_pads": True, "dtype": DType.F32},
        {"x": (1, 3, 7, 7), "kind": "mean", "window": (3, 3), "pad": 1, "order": (0, 1, 2, 3), "dtype": DType.F32},
        {"x": (2, 10, 9), "kind": "mean", "window": (3,), "stride": 2, "pad": 1, "end_pad": 2},
        {"x": (1, 4, 3, 3), "kind": "max", "window": (2, 2), "stride": 2, "end_pad": 1, "dilation": 1},
        {"x": (1, 3, 18, 20), "kind": "max", "window": (2, 17)},  # too wide to unroll
    ],
    ids=str,
)
def test_other_values(how: dict) -> None:
    check(KERNEL, pool("pool", **how))


@pytest.mark.parametrize(
    ("dtype", "how"),
    usually(
        [
            (kind, how)
            for how in ({"window": (3, 3), "pad": 1}, {"window": (2, 17), "stride": 2})
            for kind in (DType.I8, DType.U8)
        ],
        0,
    ),
)
def test_maxima_of_bytes_are_those_of_words(dtype: DType, how: dict) -> None:
    program = pool("pool", (1, 24, 9, 18), "max", dtype=dtype, **how)
    (op,) = program.ops
    (config,) = KERNEL.configs(op, program, HOPPER)
    assert ("words", True) in KERNEL.work(op, program, config, HOPPER).launches[0].code.params
    check(KERNEL, program)
    check(KERNEL, program, arch=HOPPER, run=machine.run)


@pytest.mark.parametrize("channels", [32, pytest.param(48, marks=thorough)])
def test_maxima_of_sixteen_bytes_are_stored_as_two_vectors(channels: int) -> None:
    program = pool("pool", (1, channels, 5, 7), "max", dtype=DType.U8, window=(3, 3), pad=1)
    (op,) = program.ops
    assert [config["lanes"] for config in KERNEL.configs(op, program, HOPPER)] == [8, 16]
    check(KERNEL, program, {"lanes": 16}, arch=HOPPER, run=machine.run)


@pytest.mark.parametrize("how", [{"window": (1, 1), "pad": 1}, {"window": (2, 2), "dilation": 3, "pad": 2}], ids=str)
def test_windows_that_may_be_outside_are_compared_as_floats(how: dict) -> None:
    program = pool("pool", (1, 8, 4, 4), "max", dtype=DType.U8, **how)
    (op,) = program.ops
    (config,) = KERNEL.configs(op, program, ARCH)
    assert ("words", False) in KERNEL.work(op, program, config, ARCH).launches[0].code.params
    check(KERNEL, program)


def test_a_window_outside_gives_minus_infinity() -> None:
    """A maximum of nothing: windows of one element in the padding"""
    program = pool("pool", (1, 8, 4, 4), "max", (1, 1), pad=1)
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    (config,) = KERNEL.configs(op, program, ARCH)
    y = simulator.run(KERNEL.work(op, program, config, ARCH), program, values, op.y, ARCH).result()
    assert (y[:, :, 0] == -np.inf).all() and (y[:, :, 1:-1, 1:-1] == values["x"]).all()


def test_channels_in_vectors_where_they_lie_so() -> None:
    def lanes(**how) -> int:
        program = pool("pool", (1, 20, 9, 9), "max", (3, 3), **how)
        (config,) = KERNEL.configs(program.ops[0], program, ARCH)
        return config["lanes"]  # type: ignore[return-value]

    assert lanes() == 8
    assert lanes(order=(0, 1, 2, 3)) == 1


@thorough
@pytest.mark.parametrize("arch", APART)
@pytest.mark.parametrize("dtype", [DType.F16, DType.I8])
def test_compiles(arch: str, dtype: DType) -> None:
    kind = "mean" if dtype.is_float else "max"
    program = pool("pool", (1, 24, 9, 9), kind, (5, 2), pad=1, ep="bias relu", dtype=dtype)
    (op,) = program.ops
    (config,) = KERNEL.configs(op, program, ARCHS[arch])
    (launch,) = KERNEL.work(op, program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
