"""The kernel that looks for infinities and NaN: its PTX as it is shipped, run thread by thread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit import finite as made_by
from tccompile.ir.program import Program
from tccompile.ir.storage import to_storage
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.kernels import finite as kernel
from tccompile.kernels.spec import I32, Launch, Ptr, code
from tccompile.runtime.finite import ENTRY, EXPONENTS, KINDS, PTX, THREADS
from tests.kernels.machine import Machine
from tests.kernels.memory import SPACE, Memory

FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def is_found(values: np.ndarray, dtype: DType, blocks: int = 2) -> bool:
    """What the kernel says of an array."""
    x, flag = dense("x", values.shape, dtype, pad=1), dense("flag", (1,), DType.I32, pad=1)
    program = Program(("x",), ("flag",), {"x": x, "flag": flag}, {}, ())
    memory = Memory(program, {"x": to_storage(values, dtype), "flag": np.zeros(1, np.int32)}, "flag")
    low, high, pairs = EXPONENTS[dtype]
    numbers = [I32(n) for n in (x.nbytes // 16, x.nbytes % 16, low, high, pairs)]
    launch = Launch(code("finite"), (blocks, 1, 1), THREADS, (Ptr("x"), *numbers, Ptr("flag")))
    machine = Machine(launch, PTX.read_text(), memory, early=False)
    for block in range(blocks):
        machine.run_block(block)
    return bool(memory.buffers[memory.base["flag"] // SPACE].view(np.int32)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 1000, 9001])
def test_every_place_is_looked_at(dtype: DType, count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count).astype(np.float32)
    assert not is_found(values, dtype)
    for at in {0, count // 2, max(count - 2, 0), count - 1}:
        for wrong in (math.inf, -math.inf, math.nan):
            changed = values.copy()
            changed[at] = wrong
            assert is_found(changed, dtype), (at, wrong)


@pytest.mark.parametrize(("dtype", "largest"), [(DType.F16, 65504.0), (DType.BF16, 3.3895e38), (DType.F32, 3.4028234e38)])
def test_the_largest_and_the_smallest_numbers_are_numbers(dtype: DType, largest: float) -> None:
    values = np.array([largest, -largest, 0.0, -0.0, 6e-8, 1e-38, 1e-45] * 9, np.float32)
    assert not is_found(values, dtype)


def test_of_doubles_only_the_exponent_counts() -> None:
    """The lower word of a double may look like an infinity of 32 bits."""
    words = np.array([0x7FF00000, 0x3FF00000] * 5, np.uint32)
    assert not is_found(words.view(np.float64), DType.F64)


def test_the_shipped_code_is_that_of_the_kernel() -> None:
    from tccompile.emit.toolchain import versions

    assert (ENTRY.decode(), THREADS) == (kernel.NAME, kernel.THREADS) and len(KINDS) == 7
    if versions()["ptxas"].startswith("12.9") and versions()["numba-cuda"].startswith("0.30."):
        assert made_by.made() == PTX.read_text(), "python -m tccompile.emit.finite writes it"
    assert ARCHS["sm_61"].cc == min(a.cc for a in ARCHS.values())
