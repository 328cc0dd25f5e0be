"""Floats of 8 bits: loads and stores, and products of them, as compiled, run thread by thread: wgmma, mma.sync, CUDA cores."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.ir.expr import call, identity_view, load
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.pointwise import PointwiseKernel
from tests.gpu.cases import Builder, pointwise
from tests.kernels import machine
from tests.tiers import usually

F32, E4M3, E5M2 = DType.F32, *FLOAT8


def converted(x: np.ndarray, source: DType, to: DType, arch: str, columns: int) -> np.ndarray:
    """What is stored as one type, in another one, negated by a kernel: rows of vectors, or of elements by themselves."""

    def make(b: Builder):
        b.values("x", np.zeros((x.size // columns, columns)), source, pad=1)
        b.result((x.size // columns, columns), to)
        return call("neg", load(0)), (identity_view("x", 2),)

    program, kernel = pointwise("float8", make), PointwiseKernel()
    (op,) = program.ops
    config = next(kernel.configs(op, program, ARCHS[arch]))
    given = {"x": x.reshape(-1, columns)}
    memory = machine.run(kernel.work(op, program, config, ARCHS[arch]), program, given, "y", ARCHS[arch])
    memory.check_written()
    y = program.tensors["y"]
    return elements(memory.buffers[memory.base["y"] // (1 << 33)], y).ravel()


@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("arch", usually(["sm_61", "sm_89"], "sm_89"))
@pytest.mark.parametrize("dtype", FLOAT8)
def test_conversions_of_every_number(dtype: DType, arch: str, columns: int) -> None:
    """By instructions for pairs of them, and by arithmetic before there were such."""
    every = np.resize(np.arange(256, dtype=np.uint8), 280)
    numbers = from_storage(every, dtype)
    np.testing.assert_array_equal(converted(every, dtype, F32, arch, columns), -numbers)
    finite = np.unique(numbers[np.isfinite(numbers)])
    halfway = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([finite, halfway, *beside, [1e30, -1e9, 1e-30, np.inf, -np.inf, np.nan, 0.0, -0.0]]).astype(np.float32)
    x = np.resize(x, -(-x.size // 40) * 40)
    np.testing.assert_array_equal(converted(x, F32, dtype, arch, columns), to_storage(-x, dtype))
