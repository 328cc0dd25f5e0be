"""What a warp does in kernels/conv_patch.py: fragments of mma.sync from quads of 4 halves, or 8 integers of 8 bits, in shared
memory.

Lane (g, t) of 8 × 4 has of every 4 quads of K quad t, of pixels g and g + 8, and of column g: its first word is the fragment's
first half of K, the other the second (PTX ISA, "Matrix Fragments for mma.m16n8k16", and for m16n8k32), for both operands alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.ptx.atoms import Atom
from tccompile.kernels.ptx.core import cuda, i32, inline, intrinsic, ir, packed, types, u32, unpacked
from tccompile.kernels.ptx.mma import SUMS, Kinds, along_k, shared_address

I32 = ir.IntType(32)


def _load(builder: ir.IRBuilder, words: int, address: Any, offset: int) -> list:
    """2 or 4 words of shared memory."""
    function = ir.FunctionType(ir.LiteralStructType([I32] * words), [I32])
    names = ", ".join(f"${i}" for i in range(words))
    text = f"ld.shared.v{words}.b32 {{{names}}}, [${words}+{offset}];"
    asm = ir.InlineAsm(function, text, ",".join(["=r"] * words + ["r", "~{memory}"]), side_effect=True)
    return unpacked(builder, builder.call(asm, [address]), words)


@inline
def base():
    """The first address of the block's dynamic shared memory that is a multiple of 16."""
    return i32((shared_address(cuda.shared.array(0, types.uint8)) + u32(15)) & u32(0xFFFFFFF0))


@cache
def places(offsets: tuple[tuple[int, int, int, int], ...]) -> Any:
    """The device function (base, t) → base + offsets[j][t] for each j."""
    ty = types.UniTuple(i32, len(offsets))

    @intrinsic
    def found(typingctx, base, t):
        def codegen(context, builder, sig, args):
            base, t = args
            is_lane = [builder.icmp_signed("==", t, ir.Constant(I32, i)) for i in range(3)]
            out = []
            for of_lanes in offsets:
                value = ir.Constant(I32, of_lanes[3])
                for test, offset in zip(is_lane, of_lanes, strict=False):
                    value = builder.select(test, ir.Constant(I32, offset), value)
                out.append(builder.add(base, value))
            return packed(builder, out)

        return ty(i32, i32), codegen

    return found


@cache
def pixels(mi: int, half: int) -> Any:
    """The device function address → the 4·mi words of 16·mi pixels: quads at `address` and every `half` bytes from there."""
    ty = types.UniTuple(u32, 4 * mi)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            out = []
            for i in range(mi):
                near, far = (_load(builder, 2, args[0], (2 * i + row) * half) for row in range(2))
                out += [near[0], far[0], near[1], far[1]]
            return packed(builder, out)

        return ty(i32), codegen

    return load


@cache
def weights(blocks: int) -> Any:
    """The device function address → the 2·blocks words of as many blocks of 8 columns, two of which lie side by side."""
    ty, each = types.UniTuple(u32, 2 * blocks), 2 * min(blocks, 2)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            loads = [_load(builder, each, args[0], 128 * at) for at in range(0, 2 * blocks, each)]
            return packed(builder, [word for words in loads for word in words])

        return ty(i32), codegen

    return load


@cache
def keep(words: int) -> Any:
    """The device function (words, inside) → the words, or zeros where `inside` is 0."""
    ty = types.UniTuple(u32, words)

    @intrinsic
    def kept(typingctx, given, inside):
        def codegen(context, builder, sig, args):
            test = builder.icmp_signed("!=", args[1], ir.Constant(I32, 0))
            zero = ir.Constant(I32, 0)
            return packed(builder, [builder.select(test, word, zero) for word in unpacked(builder, args[0], words)])

        return ty(ty, i32), codegen

    return kept


@cache
def multiply(atom: Atom, mi: int, groups: int, blocks: int, kinds: Kinds = (None, None)) -> Any:
    """The device function acc, pixels, weights → acc plus the products of one step of 4 quads of K, by mma.m16n8k16, m16n8k8, or
    of integers m16n8k32, whose types are `kinds`.

    acc: of sixteen i of pixels and group of `blocks` column blocks, one after the other, the lane's columns 2t and 2t + 1 of each
    block of pixel g, then of pixel g + 8.
    """
    count, lanes = 4 * mi * groups * blocks, 2 * blocks
    ty, left, right = (
        types.UniTuple(SUMS[atom.acc][0], count),
        types.UniTuple(u32, 4 * mi),
        types.UniTuple(u32, 2 * groups * blocks),
    )

    @intrinsic
    def multiplied(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            a, b = unpacked(builder, args[1], 4 * mi), unpacked(builder, args[2], 2 * groups * blocks)
            for number in range(groups * blocks):
                group, block = divmod(number, blocks)
                w = b[2 * number : 2 * number + 2]
                for i in range(mi):
                    first = (i * groups + group) * 2 * lanes + 2 * block
                    at = [first, first + 1, first + lanes, first + lanes + 1]
                    own = along_k(builder, atom, [values[k] for k in at], a[4 * i : 4 * i + 4], w, kinds)
                    for k, value in zip(at, own, strict=True):
                        values[k] = value
            return packed(builder, values)

        return ty(ty, left, right), codegen

    return multiplied
