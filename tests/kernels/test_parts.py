"""Parts of kernels that need no compiler: the layout of shared memory, and of operands in a stage."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import KIB
from tccompile.kernels.parts.layout import Region, SharedLayout, barriers, ring_barriers
from tccompile.kernels.parts.operands import BLOCK, ROW, Operand


def test_regions_lie_one_after_the_other_where_their_alignment_lets_them():
    layout = SharedLayout(Region("a", 20), Region("ring", 3000, KIB), *ring_barriers("ring", 3), Region("b", 1), barriers("c", 2))
    at = {name: layout[name] for name in ("a", "ring", "ring full", "ring empty", "b", "c")}
    assert at == {"a": 0, "ring": 1024, "ring full": 4024, "ring empty": 4048, "b": 4080, "c": 4088}
    assert layout.end == 4104 and layout.smem == 4104 + KIB


def test_a_region_over_another_takes_its_place_and_what_it_needs_more():
    layout = SharedLayout(Region("ring", 4096, KIB), Region("small", 100, over="ring"), Region("next", 8))
    assert (layout["small"], layout["next"], layout.end) == (0, 4096, 4104)
    layout = SharedLayout(Region("ring", 4096, KIB), Region("large", 5000, over="ring"), barriers("next", 1))
    assert (layout["large"], layout["next"]) == (0, 5000)


def test_regions_that_cannot_be_are_refused():
    for regions in (
        (Region("a", 8), Region("a", 8)),
        (Region("a", 8, 2 * KIB),),
        (Region("a", 8), Region("b", 8, 8), Region("c", 8, 1024, over="b")),
    ):
        with pytest.raises(AssertionError):
            SharedLayout(*regions)


def copied(operand: Operand) -> np.ndarray:
    """Where the copy engine puts the 16 bytes from each (row, byte of K) on, in boxes of `row_bytes` of K one after the other.

    It exchanges a row's 16 bytes by bits of the address: with those 7 and up, as far as the swizzle is wide.
    """
    rows, k = np.indices((operand.extent, operand.boxes * operand.row_bytes // 16)) * np.array([1, 16]).reshape(2, 1, 1)
    box, inside = np.divmod(k, operand.row_bytes)
    at = operand.box_bytes * box + rows * operand.row_bytes + inside
    return at ^ ((at >> 7 & operand.row_bytes // 16 - 1) << 4)


@pytest.mark.parametrize("kind", ["u8", "f16", "tf32"])
@pytest.mark.parametrize(("row_bytes", "boxes"), [(128, 1), (64, 1), (64, 2), (32, 1), (32, 4), (16, 8)])
def test_wgmma_finds_an_operand_where_it_was_copied(row_bytes, boxes, kind):
    """As descriptors are read: rows in groups of 8, at the stride; 16 bytes of K after the other, at the leading offset if they
    are not swizzled, else neighbours whose address is exchanged as the copy engine's. 16 bytes a row are not swizzled."""
    operand = Operand(64, 0, kind, row_bytes, boxes, True)
    swizzle, leading, stride = operand.layout
    assert operand.copied == 64 * boxes * row_bytes and operand.depth * operand.size == ROW
    where = copied(operand)
    for step, start in enumerate(operand.steps):
        for row in range(64):
            for half in range(2):
                inner = 16 if swizzle == 0 else swizzle
                at = start + row // 8 * stride + row % 8 * inner + half * (leading if swizzle == 0 else 16)
                at ^= (at >> 7 & (swizzle or 16) // 16 - 1) << 4
                assert at == where[row, 2 * step + half]
    assert len(operand.steps) * 32 == boxes * row_bytes


def test_operands_that_lie_along_their_rows_come_in_blocks_of_64():
    """Of 64 rows by 64 of K of 16 bits each: a wgmma's 16 of K are 16 lines of 128 bytes, and the next block lies behind."""
    operand = Operand(128, 0, "f16", ROW, 1, False)
    assert operand.box_bytes == BLOCK * 64 * 2 and operand.copied == 2 * operand.box_bytes
    assert operand.steps == tuple(16 * ROW * i for i in range(4)) and operand.layout == (128, operand.box_bytes, 8 * ROW)
