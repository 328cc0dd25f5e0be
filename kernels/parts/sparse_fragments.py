"""Fragments of mma.sp: products of 2:4 weights, of which two of every four neighbours along K are there, with whole operands.

The sparse operand is the left one, so weights are, and results lie turned over: a block is 16 columns of the tile, which are rows
of weights, by 16 of its rows. A stage has 128 bytes of K of each row of the tile, 64 of each column's values and their places,
which lie as `tccompile.ir.sparse` says: words of the 32 lanes for each 16 columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.device_math import at
from tccompile.kernels.parts.blocks import LINE
from tccompile.kernels.parts.fragments import STEP, WARP, chunks_of
from tccompile.kernels.parts.part import Part, part
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.atoms import BITS, Atom
from tccompile.kernels.ptx.core import i32, inline, intrinsic, ir, packed, types, u32, u64, unpacked, void
from tccompile.kernels.ptx.mma import SUMS, asm

I32 = ir.IntType(32)

DEPTH = 128
"""Bytes of K of a stage."""

VALUES = DEPTH // 2
"""Of these, bytes of values."""

LANES = 32


def place_bytes(atom: Atom) -> int:
    """Bytes of places of a column in a stage: four bits for every four of K."""
    return DEPTH // BITS[atom.a]


@cache
def multiply_stage(atom: Atom, mi: int, nj: int, kinds: tuple[str | None, str | None]) -> Any:
    """The device function acc, a, b, places → acc that adds a warp's product of one stage: mi×nj blocks of 16 rows by 16 columns.

    acc: mi*nj*8 of the atom's sums, block (i, j) first at 8*(i*nj + j). a, b: as `fragments.multiply_stage` has them, b's rows of
    `VALUES` bytes, read as a left operand. places: the address of the lane's first word. kinds: types of x and of w
    """
    count, steps, each = mi * nj * 8, DEPTH // (2 * STEP), place_bytes(atom) // 8
    kind, number, register = SUMS[atom.acc]
    ty = types.UniTuple(kind, count)
    outs = ", ".join(f"${i}" for i in range(4))
    a, b, c = (", ".join(f"${i}" for i in range(at, at + 4)) for at in (4, 8, 12))
    selected = f"{atom.text(a=kinds[1], b=kinds[0])} {{{outs}}}, {{{a}}}, {{{b}}}, {{{c}}}, $16, "
    constraints = ",".join([f"={register}"] * 4 + ["r"] * 8 + [register] * 4 + ["r"])

    def words_of(builder: ir.IRBuilder, places: Any, j: int) -> list:
        """A word for each step; of halves one has those of both, of two lanes each."""
        outs, where = ", ".join(f"${i}" for i in range(each)), f"[${each}+{j * LANES * 4 * each}]"
        text = f"ld.shared.v2.b32 {{{outs}}}, {where};" if each > 1 else f"ld.shared.b32 {outs}, {where};"
        word = ir.LiteralStructType([I32] * each) if each > 1 else I32
        found = asm(builder, text, ",".join(["=r"] * each + ["r", "~{memory}"]), word, [places], True)
        return unpacked(builder, found, each) if each > 1 else [found] * steps

    def read(builder: ir.IRBuilder, base: Any, distance: int, pitch: int, blocks: int) -> list[list]:
        first = builder.xor(base, ir.Constant(I32, distance)) if distance else base
        return [chunks_of(builder, WARP, first, i * 16 * pitch) for i in range(blocks)]

    def both(builder: ir.IRBuilder, left: Any, right: Any, step: int) -> tuple[list, list]:
        near, far = (read(builder, left, 2 * STEP * step + STEP * k, DEPTH, mi) for k in range(2))
        rows = [[[*n[2 * h : 2 * h + 2], *f[2 * h : 2 * h + 2]] for h in range(2)] for n, f in zip(near, far, strict=True)]
        return rows, read(builder, right, STEP * step, VALUES, nj)

    @intrinsic
    def multiply(typingctx, acc, a, b, places):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            which = [words_of(builder, args[3], j) for j in range(nj)]
            ready = both(builder, args[1], args[2], 0)
            for step in range(steps):
                rows, columns = ready
                if step + 1 < steps:
                    ready = both(builder, args[1], args[2], step + 1)
                text = selected + f"0x{step if each == 1 else 0};"
                for i in range(mi):
                    for j in range(nj):
                        for h in range(2):
                            n = 8 * (i * nj + j) + 4 * h
                            given = [*columns[j], *rows[i][h], *values[n : n + 4], which[j][step]]
                            done = asm(builder, text, constraints, ir.LiteralStructType([number] * 4), given, False)
                            values[n : n + 4] = unpacked(builder, done, 4)
            return packed(builder, values)

        return ty(ty, u32, u32, u32), codegen

    return multiply


@cache
def spill_block(atom: Atom, mi: int, nj: int, pitch: int) -> Any:
    """The device function (acc, address, i) that writes block row i to shared memory, turned back, as 16 rows of `pitch` numbers.

    address: of this lane's first number, as `held` says; i may be a variable.
    """
    kind, _, register = SUMS[atom.acc]
    ty = types.UniTuple(kind, mi * nj * 8)

    @intrinsic
    def spill(typingctx, acc, address, i):
        def codegen(context, builder, sig, args):
            for row in range(mi):
                with builder.if_then(builder.icmp_signed("==", args[2], ir.Constant(I32, row))):
                    for k in range(8 * nj):
                        j, h, lower, e = k // 8, k // 4 % 2, k // 2 % 2, k % 2
                        text = f"st.shared.{atom.acc} [$0+{4 * ((8 * h + e) * pitch + 16 * j + 8 * lower)}], $1;"
                        number = builder.extract_value(args[0], 8 * row * nj + k)
                        asm(builder, text, f"r,{register},~{{memory}}", ir.VoidType(), [args[1], number], True)
            return context.get_dummy_value()

        return void(ty, u32, i32), codegen

    return spill


def held(lane):
    """Row and column of a lane's first number."""
    return lane % 4 * 2, lane // 4


@cache
def no_places() -> Part:
    """`places` of operands that have none."""

    @inline
    def fetch(address, n0, here, tid, to, matrices):
        pass

    @inline
    def reads(base, lane, first):
        return base

    return part(fetch=fetch, reads=reads)


@cache
def places(atom: Atom, bn: int, elements: int, offset: int) -> Part:
    """How the places of a stage's `bn` columns come to shared memory, `offset` bytes behind its begin; a chunk of K has so many
    elements.

    fetch(address, n0, here, tid, to, matrices)   asks for a thread's chunk of the step at `here`, if it has one; to: the stage
    reads(base, lane, first)                      where in the first stage a lane's words lie, from 16 times `first` columns on
    """
    each = place_bytes(atom) // 8
    of_16 = LANES * 4 * each // 16
    count, whole = bn // 16 * of_16, DEPTH // 16

    @inline
    def fetch(address, n0, here, tid, to, matrices):
        if tid < count:
            group = i32(i32(n0 // 16) + tid // of_16)
            step = i32(here[LINE] // (elements * whole))
            first = i32(i32(i32(i32(group >> 2) * i32(matrices.w_row // (VALUES // 16)) + step) * 4 + (group & 3)) * of_16)
            mma.cp_async(u32(to + u32(offset + tid * 16)), u64(at(address, i32(first + tid % of_16), 16)), i32(16))

    @inline
    def reads(base, lane, first):
        return base + u32(offset + (first * LANES + lane) * (4 * each))

    return part(fetch=fetch, reads=reads)
