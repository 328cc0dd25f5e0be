"""Products of float32 on Tensor Cores: each operand as two bf16, of whose four products the three large ones are added up.

    x = h + l + e,   h = bf16(x),   l = bf16(x - h),   |e| <= 2^-18 |x|
    x·y = h·h' + h·l' + l·h' + (l·l' + e·y + …)

What is left out is at most 2^-16 of |x·y|. bf16 has float32's exponents, so that nothing overflows or vanishes which float32
holds, but for the last 2^-9 of its range; of an infinity l is NaN, and so is the result.

Tensor Cores cut off what their sums have no digits for, always toward zero, so that long sums of one sign drift. Here a sum of 16
terms is taken out after three products and added to the others by CUDA cores, which round to nearest (Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.parts.fragments import STEP, chunks_of, fragments_of
from tccompile.kernels.ptx.atoms import Atom
from tccompile.kernels.ptx.core import f32, intrinsic, ir, packed, types, u32, unpacked
from tccompile.kernels.ptx.mma import asm, mma

I32, F32 = ir.IntType(32), ir.FloatType()

DEPTH = 2 * STEP
"""Bytes of K that an instruction multiplies: 16 float32."""

SPLIT = (
    "{ .reg .b32 u; .reg .f32 a, b, v; mov.b32 a, $2; mov.b32 b, $3; cvt.rn.bf16x2.f32 $0, b, a;"
    " shl.b32 u, $0, 16; mov.b32 v, u; sub.rn.f32 a, a, v; and.b32 u, $0, 0xffff0000; mov.b32 v, u; sub.rn.f32 b, b, v;"
    " cvt.rn.bf16x2.f32 $1, b, a; }"
)
"""Two float32 to a word of two bf16 and a word of what these leave, rounded; the first of each in the lower half."""

PAIRS_A, PAIRS_B = ((0, 2), (1, 3), (4, 6), (5, 7)), (((0, 1), (4, 5)), ((2, 3), (6, 7)))
"""Which of the eight words of K that a lane has of a block's row become one word of the instruction's operand: chunks 0 and 1,
then 2 and 3. So K is in another order than in memory, the same for A and B. Of B, columns 0-7, then 8-15."""


def _split(builder: ir.IRBuilder, words: list, pairs: tuple[tuple[int, int], ...]) -> tuple[list, list]:
    """The words of the upper parts, and those of the lower parts."""
    both = ir.LiteralStructType([I32] * 2)
    done = [unpacked(builder, asm(builder, SPLIT, "=&r,=r,r,r", both, [words[p], words[q]], False), 2) for p, q in pairs]
    return [h for h, _ in done], [low for _, low in done]


@cache
def multiply_stage(atom: Atom, mi: int, nj: int, pitch: int) -> Any:
    """As `fragments.multiply_stage`, of operands of float32 that are K-major, by an atom of bf16."""
    assert (atom.a, atom.b, atom.k, pitch % DEPTH) == ("bf16", "bf16", 16, 0)
    fragments, count = fragments_of(atom), mi * nj * 8
    ty = types.UniTuple(f32, count)

    def read(builder: ir.IRBuilder, base: Any, step: int, block: int) -> list:
        """The eight words of a block's rows that a lane has, of a step of 16 float32."""
        at = [builder.xor(base, ir.Constant(I32, DEPTH * step + part)) for part in (0, STEP)]
        return [word for a in at for word in chunks_of(builder, fragments, a, block * 16 * pitch)]

    @intrinsic
    def multiply(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            values, zeros = unpacked(builder, args[0], count), [ir.Constant(F32, 0.0)] * 4
            for step in range(pitch // DEPTH):
                columns = [read(builder, args[2], step, j) for j in range(nj)]
                right = [_split(builder, words, pairs) for words in columns for pairs in PAIRS_B]
                for i in range(mi):
                    high, low = _split(builder, read(builder, args[1], step, i), PAIRS_A)
                    for n, (high_b, low_b) in enumerate(right):
                        part = mma(builder, atom, zeros, low, high_b)
                        part = mma(builder, atom, part, high, low_b)
                        part = mma(builder, atom, part, high, high_b)
                        at = 8 * i * nj + 4 * n
                        values[at : at + 4] = [builder.fadd(v, p) for v, p in zip(values[at : at + 4], part, strict=True)]
            return packed(builder, values)

        return ty(ty, u32, u32), codegen

    return multiply
