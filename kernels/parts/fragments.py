"""Fragments of mma.sync: how an instruction's operands lie over a warp's lanes, their loads from shared memory, products of them.

A warp multiplies blocks of 16 rows by 16 columns by 32 bytes of K (16 halves, 32 numbers of 8 bits), whatever the instruction's
own shape is, so that one kernel body serves all of them. Where sums are rough (`Atom.rough`), those of a stage are made by
themselves and added to the others by CUDA cores, which takes twice the registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tccompile.kernels.ptx.atoms import Atom
from tccompile.kernels.ptx.core import f32, i32, intrinsic, ir, packed, types, u32, unpacked, void
from tccompile.kernels.ptx.mma import SUMS, Kinds, along_k, asm, widened

I32, F32 = ir.IntType(32), ir.FloatType()

STEP = 32
"""Bytes of K of one block: two chunks."""


@dataclass(frozen=True)
class Fragments:
    """How instructions spread a block over a warp's lanes.

    Shared memory holds rows of A (and of B: its columns) as chunks of 16 bytes. For block k of K a lane reads chunk 2*k + half of
    a row (both chunks of the row without ldmatrix): `a` and `b` give (row, half) for a lane. Of the accumulators it has four
    pairs of neighbouring columns: pair t lies in row + (t % 2) * row_step and column + (t // 2) * 8; `acc` gives (row, column).
    """

    ldmatrix: bool
    row_step: int
    a: Callable[[Any], tuple[Any, Any]]
    b: Callable[[Any], tuple[Any, Any]]
    acc: Callable[[Any], tuple[Any, Any]]


def _warp_a(lane):
    return lane % 16, lane // 16


def _warp_b(lane):
    return lane % 8 + lane // 16 * 8, lane // 8 % 2


def _warp_acc(lane):
    return lane // 4, lane % 4 * 2


# mma.m8n8k4 is four products at once, one for each quad-pair (lanes 4q … 4q+3 and 4q+16 … 4q+19). Quad-pairs are given rows
# and columns such that eight neighbouring lanes read different banks: rows 4*(q % 2) and 8 more, columns 4*(q // 2) and 8 more.
def _quads_a(lane):
    return lane % 8 + lane // 16 * 8, 0


def _quads_b(lane):
    return lane % 4 + lane // 8 % 2 * 4 + lane // 16 * 8, 0


def _quads_acc(lane):
    return lane % 2 + lane // 4 % 2 * 4 + lane // 16 * 8, lane // 2 % 2 * 2 + lane // 8 % 2 * 4


QUADS = Fragments(False, 2, _quads_a, _quads_b, _quads_acc)
WARP = Fragments(True, 8, _warp_a, _warp_b, _warp_acc)


def fragments_of(atom: Atom) -> Fragments:
    """Those of an instruction of a quad-pair or of a warp."""
    assert atom.threads in (8, 32), f"{atom.name} is no instruction of a warp"
    return QUADS if atom.threads == 8 else WARP


def chunks_of(builder: ir.IRBuilder, fragments: Fragments, address: Any, offset: int, turned: bool = False) -> list:
    """Four registers: 16 rows by 32 bytes of K, as the instruction takes them; `turned`, of chunks of rows instead of K."""
    words = ir.LiteralStructType([I32] * 4)
    matrices = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if turned else "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    name = matrices if fragments.ldmatrix else "ld.shared.v4.b32"
    text = f"{name} {{$0, $1, $2, $3}}, [$4+{offset}];"
    return unpacked(builder, asm(builder, text, "=r,=r,=r,=r,r,~{memory}", words, [address], True), 4)


def _widened(builder: ir.IRBuilder, kind: str, words: list, of_a: bool) -> list:
    """A block's words of floats of 8 bits as twice as many of halves, as instructions take them. K is in another order then, the
    same for both operands."""
    pairs = [widened(builder, kind, w) for w in words]
    if of_a:  # of 8 rows and of the 8 below
        return [pair[k] for i in range(0, len(pairs), 2) for k in range(2) for pair in pairs[i : i + 2]]
    return [word for pair in pairs for word in pair]


def _multiply(builder: ir.IRBuilder, atom: Atom, acc: list, a: list, b: list, kinds: Kinds = (None, None)) -> list:
    """acc += a @ bᵀ for one block of 16 rows, 16 columns and 32 bytes of K: eight accumulators; a and b four words each, or eight
    that these were widened to."""
    of_half = len(b) // 2
    if atom.threads == 8:  # words of K lie one after the other
        return along_k(builder, atom, acc, a, b)
    if atom.m == 8:  # rows 0-7 and 8-15 of each half of the columns; words of a are those of both, chunk after chunk
        return [x for half in range(2) for eight in range(2)
                for x in along_k(builder, atom, acc[4 * half + 2 * eight : 4 * half + 2 * eight + 2], a[eight::2],
                                 b[2 * half : 2 * half + 2], kinds)]  # fmt: skip
    return [x for half in range(2)  # columns 0-7 and 8-15
            for x in along_k(builder, atom, acc[4 * half : 4 * half + 4], a, b[of_half * half :][:of_half], kinds)]  # fmt: skip


@cache
def multiply_stage(
    atom: Atom, mi: int, nj: int, pitch: int, a_turned: int = 0, b_turned: int = 0, kinds: Kinds = (None, None)
) -> Any:
    """The device function acc, a, b → acc that adds a warp's product of one stage: mi×nj blocks of 16×16, K of `pitch` bytes.

    acc: mi*nj*8 of the atom's sums, block (i, j) first at 8*(i*nj + j). a, b: this lane's addresses in shared memory, of the
    warp's first row and of chunk `half`; a row has `pitch` bytes, and its chunk c lies at c ^ swizzle(row): xor with 32*step
    walks K.
    Fragments are read one step before they are multiplied.

    a_turned, b_turned: of an operand that lies in lines of K, the bytes of a line; the address is that of the lane's line in the
    first step, in the chunk of rows that `half` says, xor with 32*i goes to block i. Lanes take the other operand's places.

    kinds: types of the operands where the atom's row stands for several, or where it takes halves that floats of 8 bits become
    """
    fragments, steps = fragments_of(atom), pitch // STEP
    wide = kinds if atom.a == "f16" else (None, None)
    kinds = (None, None) if atom.a == "f16" else kinds
    count = mi * nj * 8
    ty = types.UniTuple(SUMS[atom.acc][0], count)

    def read(
        builder: ir.IRBuilder, base: Any, step: int, blocks: int, turned: int, widened: str | None, of_a: bool
    ) -> list[list]:
        found = read_words(builder, base, step, blocks, turned)
        return [_widened(builder, widened, words, of_a and fragments.ldmatrix) for words in found] if widened else found

    def read_words(builder: ir.IRBuilder, base: Any, step: int, blocks: int, turned: int) -> list[list]:
        if turned:
            at = [builder.xor(base, ir.Constant(I32, 32 * i)) if i else base for i in range(blocks)]
            return [chunks_of(builder, fragments, a, step * 16 * turned, True) for a in at]
        chunks = [32 * step] if fragments.ldmatrix else [32 * step, 32 * step + 16]
        at = [builder.xor(base, ir.Constant(I32, c)) if c else base for c in chunks]
        return [[w for a in at for w in chunks_of(builder, fragments, a, i * 16 * pitch)] for i in range(blocks)]

    @intrinsic
    def multiply(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            before = unpacked(builder, args[0], count)
            values = [ir.Constant(F32, 0.0)] * count if atom.rough else before
            sides = (args[1], mi, a_turned, wide[0], True), (args[2], nj, b_turned, wide[1], False)
            ready = [read(builder, at, 0, *how) for at, *how in sides]
            for step in range(steps):
                left, right = ready
                if step + 1 < steps:
                    ready = [read(builder, at, step + 1, *how) for at, *how in sides]
                for i in range(mi):
                    for j in range(nj):
                        at = 8 * (i * nj + j)
                        values[at : at + 8] = _multiply(builder, atom, values[at : at + 8], left[i], right[j], kinds)
            if atom.rough:
                values = [builder.fadd(x, y) for x, y in zip(before, values, strict=True)]
            return packed(builder, values)

        return ty(ty, u32, u32), codegen

    return multiply


@cache
def spill_block(atom: Atom, mi: int, nj: int, pitch: int) -> Any:
    """The device function (acc, address, i) that writes block row i to shared memory, as 16 rows of `pitch` numbers.

    address: of this lane's first pair; i may be a variable (the registers are chosen by branches).
    """
    fragments, (kind, _, register) = fragments_of(atom), SUMS[atom.acc]
    ty = types.UniTuple(kind, mi * nj * 8)

    @intrinsic
    def spill(typingctx, acc, address, i):
        def codegen(context, builder, sig, args):
            for row in range(mi):
                with builder.if_then(builder.icmp_signed("==", args[2], ir.Constant(I32, row))):
                    for j in range(nj):
                        for t in range(4):
                            offset = 4 * (t % 2 * fragments.row_step * pitch + j * 16 + t // 2 * 8)
                            at = 8 * (row * nj + j) + 2 * t
                            pair = [builder.extract_value(args[0], at + e) for e in range(2)]
                            text = f"st.shared.v2.{atom.acc} [$0+{offset}], {{$1, $2}};"
                            asm(builder, text, f"r,{register},{register},~{{memory}}", ir.VoidType(), [args[1], *pair], True)
            return context.get_dummy_value()

        return void(ty, u32, i32), codegen

    return spill


@cache
def load_rows(atom: Atom, steps: int) -> Any:
    """The device function address → a warp's 16 rows of the left operand, `steps` times 32 bytes of K: 4·steps words.

    address: where this lane reads, as `Fragments.a` says, of rows without swizzle.
    """
    ty = types.UniTuple(u32, 4 * steps)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            blocks = [chunks_of(builder, fragments_of(atom), args[0], 32 * step) for step in range(steps)]
            return packed(builder, [word for block in blocks for word in block])

        return ty(u32), codegen

    return load


@cache
def multiply_rows(atom: Atom, steps: int, nj: int, pitch: int) -> Any:
    """The device function rows, b → 16×16·nj products of what `load_rows` gave with b's rows, over K of 32·steps bytes.

    b: where this lane reads, as `Fragments.b` says, of rows `pitch` bytes apart, without swizzle.
    """
    ty, acc = types.UniTuple(u32, 4 * steps), types.UniTuple(f32, 8 * nj)

    @intrinsic
    def multiply(typingctx, rows, b):
        def codegen(context, builder, sig, args):
            left = unpacked(builder, args[0], 4 * steps)
            values = [ir.Constant(F32, 0.0)] * (8 * nj)
            for step in range(steps):
                for j in range(nj):
                    right = chunks_of(builder, fragments_of(atom), args[1], j * 16 * pitch + 32 * step)
                    values[8 * j : 8 * j + 8] = _multiply(
                        builder, atom, values[8 * j : 8 * j + 8], left[4 * step : 4 * step + 4], right
                    )
            return packed(builder, values)

        return acc(ty, u32), codegen

    return multiply


@cache
def multiply_columns(atom: Atom, steps: int, nj: int, pitch: int) -> Any:
    """The device function acc, rows, b → acc plus the product of `rows` (as of `load_rows`) with b, whose rows are K.

    b: where this lane reads, as `Fragments.a` says, of rows `pitch` bytes apart, without swizzle; they are transposed on the way.
    """
    ty, kind = types.UniTuple(u32, 4 * steps), types.UniTuple(f32, 8 * nj)
    transposed = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"

    @intrinsic
    def multiply(typingctx, acc, rows, b):
        def codegen(context, builder, sig, args):
            values, left = unpacked(builder, args[0], 8 * nj), unpacked(builder, args[1], 4 * steps)
            words = ir.LiteralStructType([I32] * 4)
            for step in range(steps):
                for j in range(nj):
                    text = f"{transposed} {{$0, $1, $2, $3}}, [$4+{step * 16 * pitch + 32 * j}];"
                    right = unpacked(builder, asm(builder, text, "=r,=r,=r,=r,r,~{memory}", words, [args[2]], True), 4)
                    values[8 * j : 8 * j + 8] = _multiply(
                        builder, atom, values[8 * j : 8 * j + 8], left[4 * step : 4 * step + 4], right
                    )
            return packed(builder, values)

        return kind(kind, ty, u32), codegen

    return multiply
