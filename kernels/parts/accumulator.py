"""What multiplies the stages of a ring and holds the sums: wgmma, with the sums in registers."""

from __future__ import annotations

from tccompile.kernels.parts.operands import Operand
from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.ring import Ring
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx.core import i32, inline, u64

OFFSETS = 0x3FFFF
"""The bits of a shared address that say where in its block it lies; those above say which block of the cluster."""


class Accumulator(Part):
    """The sums of 64 rows of a warpgroup by all columns, in fp32: one tuple in each thread's registers.

    zero()                                   the tuple before the first stage is multiplied
    operands(base, warp)                     where the operands of a warp's warpgroup lie in the ring's first stage
    multiply(acc, operands, slot, k, first)  the sums with those of the ring's stage `slot`, multiplied from here on: stage k of a
                                             tile's, which replaces what `acc` holds if it is the `first` one
    wait_last(), wait()                      until all stages but the one begun last have been multiplied, or all
    """

    def __init__(self, atom: str, left: Operand, right: Operand, ring: Ring) -> None:
        super().__init__()
        steps = tuple(zip(left.steps, right.steps, strict=True))
        multiplied = hw.multiply(right.extent, steps, (left.k_major, right.k_major), atom)
        left_half, right_half = hw.descriptor(*left.layout), hw.descriptor(*right.layout)
        left_at, group_bytes, right_at = ring.first + left.at, left.group_bytes, ring.first + right.at
        stage_units = ring.stage_bytes >> 4

        @inline
        def operands(base, warp):
            a = left_half | u64((base + left_at + (warp >> 2) * group_bytes & OFFSETS) >> 4)
            b = right_half | u64((base + right_at & OFFSETS) >> 4)
            return a, b

        @inline
        def multiply(acc, operands, slot, k, first):
            at = u64(slot * stage_units)
            return multiplied(acc, operands[0] + at, operands[1] + at, i32(k - first))

        self.zero, self.operands, self.multiply = hw.accumulators(right.extent), operands, multiply
        self.wait_last, self.wait = hw.wgmma_wait_last, hw.wgmma_wait_all
