"""What the simulator says that instructions do: products of bytes, loads of bytes and of sums, addresses of shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tccompile.ir.types import DType
from tests.kernels.meanings import MEANINGS, product
from tests.kernels.memory import SharedMemory


@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_a_product_of_bytes(kind: str) -> None:
    """Fragments as PTX's "Matrix fragments for mma.m16n8k32" has them, for a lane at a time."""
    dtype = np.dtype({"s8": np.int8, "u8": np.uint8}[kind])
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    a, b = (rng.integers(info.min, info.max + 1, shape, dtype) for shape in ((16, 32), (32, 8)))
    c = rng.integers(-1000, 1000, (16, 8))
    asked, places = {}, {}
    for lane in range(32):
        g, t = divmod(lane, 4)
        places[lane] = [(row, 2 * t + k) for row in (g, g + 8) for k in range(2)]
        words = [a[row, k + 4 * t : k + 4 * t + 4] for k in (0, 16) for row in (g, g + 8)]
        words += [b[k + 4 * t : k + 4 * t + 4, g] for k in (0, 16)]
        asked[lane] = (*(int(c[at]) for at in places[lane]), *(int(np.array(w).view(np.int32)[0]) for w in words))
    expected = c + a.astype(np.int64) @ b.astype(np.int64)
    for lane, sums in product(asked, kind, "s32").items():
        assert list(sums) == [expected[at] for at in places[lane]]


def meaning(name: str, shared: SharedMemory, *how: Any) -> Any:
    """An intrinsic's, where global memory is the shared one too."""
    return MEANINGS[name](SimpleNamespace(shared=shared, memory=shared), *how)


def test_loads_of_bytes_and_sums() -> None:
    shared = SharedMemory(16, 64)
    shared.write(64, np.array([-2, 2**24 + 1, 3], np.int32))
    assert meaning("ptx.memory.load_sums", shared, DType.I64, 2)(64) == (-2, 2**24 + 1)
    assert meaning("ptx.memory.load_sums", shared, DType.F32, 2)(64) == (-2.0, float(2**24))
    assert meaning("ptx.memory.load_sums", shared, DType.I64, 1)(72) == 3
    assert [meaning("ptx.memory.load_bytes", shared, n)(64, 1) for n in (1, 4)] == [0xFE, 0xFFFFFFFE]
    assert meaning("ptx.memory.load_bytes", shared, 4)(0, 0) == 0


def test_only_memory_that_the_launch_asks_for_has_an_address() -> None:
    shared = SharedMemory(16, 64)
    address = meaning("ptx.mma.shared_address", shared)
    assert address(shared.content.view(np.float32)) == 64
    with pytest.raises(AssertionError, match="the address of an array"):
        address(np.zeros(4, np.float32))
