"""Tensor Core instructions of the mma.sync kind, and what feeds them: ldmatrix, cp.async, 16-byte copies, counters.

A warp multiplies blocks of 16 rows by 16 columns by 16 of K, held in registers as fragments. `Fragments` describes how one
generation's instruction lays them out over the lanes (PTX ISA, "Warp-level matrix fragment" figures), so that one kernel body
serves mma.m8n8k4 (sm_70), m16n8k8 (sm_75) and m16n8k16 (sm_80 and later).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tccompile.kernels.ptx.atoms import ATOMS, Atom
from tccompile.kernels.ptx.core import f32, i32, instruction, packed, u32, u64, unpacked, void

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit address in shared memory of a `cuda.shared.array`."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        function = ir.FunctionType(I32, [I64])
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return builder.call(ir.InlineAsm(function, text, "=r,l", side_effect=False), [builder.ptrtoint(data, I64)])

    return u32(array), codegen


# --- Copies of 16 bytes ----------------------------------------------------------------------------------------------

cp_async = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, u32, u64, i32)
"""Copies $2 = 16 bytes to shared memory when it gets to it, or writes 16 zero bytes and reads nothing for $2 = 0."""


@cache
def cp_async_with(line: int, once: bool) -> Any:
    """The same; `line`: the 128 or 256 bytes around them are to come to L2, or 0; `once`: L2 is to give them up before others."""
    ahead = f".L2::{line}B" if line else ""
    if not once:
        return instruction(f"cp.async.cg.shared.global{ahead} [$0], [$1], 16, $2;", void, u32, u64, i32)
    body = "{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0;"
    body += f" cp.async.cg.shared.global.L2::cache_hint{ahead} [$0], [$1], 16, $2, p; }}"
    return instruction(body, void, u32, u64, i32)


cp_async_commit = instruction("cp.async.commit_group;", void)


@cache
def cp_async_wait(pending: int) -> Any:
    """Waits until at most `pending` of this thread's groups of copies are under way."""
    return instruction(f"cp.async.wait_group {pending};", void)


load_chunk = instruction(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
    (u32, u32, u32, u32),
    u64,
    i32,
)
"""Four words from global memory, or zeros and no access where the last parameter is 0."""

store_chunk = instruction("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", void, u32, u32, u32, u32, u32)


@cache
def store_shared_words(n: int) -> Any:
    """The device function (address, n = 2 or 4 words) that writes them to shared memory."""
    return instruction(f"st.shared.v{n}.b32 [$0], {{{', '.join(f'${i + 1}' for i in range(n))}}};", void, u32, *(u32,) * n)


halves = instruction(
    "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }", u32, f32, f32, pure=True
)
"""Two float32 rounded to a word of halves, the first in its lower half."""

divide = instruction("div.u32 $0, $1, $2;", i32, i32, i32, pure=True)
"""Numbers that are not negative."""


# --- Counting blocks -------------------------------------------------------------------------------------------------

fence_device = instruction("membar.gl;", void)
"""What this thread wrote before is seen by every thread of the GPU before what it writes afterwards."""

count_up = instruction("atom.global.add.u32 $0, [$1], 1;", u32, u64)
"""Adds one to a counter in global memory and gives what it was."""

count_up_in_order = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", u32, u64)
"""The same, after all that this block wrote before the last barrier and before what it reads after the next: sm_70 and newer."""

store_word = instruction("st.global.b32 [$0], $1;", void, u64, u32)


# --- Fragments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fragments:
    """How one instruction spreads a 16×16 block over a warp's lanes.

    Shared memory holds rows of A (and of B: its columns) as chunks of 8 halves. For step k a lane reads chunk 2*k + half of a
    row (both chunks of the row without ldmatrix): `a` and `b` give (row, half) for a lane. Of the accumulators it has four
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


FRAGMENTS = {
    "mma.m8n8k4": Fragments(False, 2, _quads_a, _quads_b, _quads_acc),
    "mma.m16n8k8": Fragments(True, 8, _warp_a, _warp_b, _warp_acc),
    "mma.m16n8k16": Fragments(True, 8, _warp_a, _warp_b, _warp_acc),
}


def _asm(builder: ir.IRBuilder, text: str, constraints: str, result: ir.Type, args: list, effect: bool) -> Any:
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), args)


def _chunks(builder: ir.IRBuilder, fragments: Fragments, address: Any, offset: int, turned: bool = False) -> list:
    """Four registers: a 16×16 block of halves, as the instruction takes it; `turned`, of chunks of rows instead of K."""
    words = ir.LiteralStructType([I32] * 4)
    matrices = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if turned else "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    name = matrices if fragments.ldmatrix else "ld.shared.v4.b32"
    text = f"{name} {{$0, $1, $2, $3}}, [$4+{offset}];"
    return unpacked(builder, _asm(builder, text, "=r,=r,=r,=r,r,~{memory}", words, [address], True), 4)


def mma(builder: ir.IRBuilder, atom: Atom, acc: list, a: list, b: list) -> list:
    """One instruction: the accumulators plus a @ bᵀ. It stays where all of the warp's lanes run it together."""
    assert (len(a), len(b), len(acc)) == (atom.words_a, atom.words_b, atom.words_acc)
    n = len(acc)
    names = [f"${i}" for i in range(2 * n + len(a) + len(b))]
    d, rest = ", ".join(names[:n]), names[n:]
    text = f"{atom.text()} {{{d}}}, {{{', '.join(rest[: len(a)])}}}, "
    text += f"{{{', '.join(rest[len(a) : len(a) + len(b)])}}}, {{{d}}};"
    constraints = ",".join(["=f"] * n + ["r"] * (len(a) + len(b)) + [str(i) for i in range(n)])
    args = [*a, *b, *acc]
    function = ir.FunctionType(ir.LiteralStructType([F32] * n), [v.type for v in args])
    out = builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), args, attrs=("convergent",))
    return unpacked(builder, out, n)


def _multiply(builder: ir.IRBuilder, instruction: str, acc: list, a: list, b: list) -> list:
    """acc += a @ bᵀ for one 16×16×16 block: eight accumulators; a and b four words each."""
    atom = ATOMS[instruction]
    if atom.threads == 8:  # words of K lie one after the other
        return along_k(builder, atom, acc, a, b)
    return [x for half in range(2)  # columns 0-7 and 8-15
            for x in along_k(builder, atom, acc[4 * half : 4 * half + 4], a, b[2 * half : 2 * half + 2])]  # fmt: skip


def along_k(builder: ir.IRBuilder, atom: Atom, acc: list, a: list, b: list) -> list:
    """acc += a @ bᵀ over as much of K as the words of a and b have, an instruction for each part of it."""
    for words_a, words_b in zip(batched(a, atom.words_a), batched(b, atom.words_b), strict=True):
        acc = mma(builder, atom, acc, words_a, words_b)
    return acc


def batched(words: list, n: int) -> list[list]:
    """n words at a time."""
    return [words[i : i + n] for i in range(0, len(words), n)]


_A, _B = ["$8", "$9", "$10", "$11"], ["$12", "$13"]


@cache
def warp_multiply(instruction_: str) -> Any:
    """The device function (acc, a, b) → acc of one 16×8×16 product in registers: four float32, four words, two words.

    Of K a lane t of four has words 0 and 1 of a (rows g and g + 8) and 0 of b, then words 2 and 3, and 1.
    """
    atom, text, acc = ATOMS[instruction_], "", "$4, $5, $6, $7"
    for a, b in zip(batched(_A, atom.words_a), batched(_B, atom.words_b), strict=True):
        text += f"{atom.text()} {{$0, $1, $2, $3}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{acc}}};"
        acc = "$0, $1, $2, $3"
    return instruction(text, (f32,) * 4, *(f32,) * 4, *(u32,) * 6, pure=True)


@cache
def multiply_fragment(name: str) -> Any:
    """The device function of one instruction of a warp: four accumulators, the words of a and those of b → accumulators."""
    atom = ATOMS[name]
    a, b = atom.words_a, atom.words_b
    words = [f"${i}" for i in range(8, 8 + a + b)]
    text = f"{atom.text()} {{$0, $1, $2, $3}}, {{{', '.join(words[:a])}}}, "
    text += f"{{{', '.join(words[a:])}}}, {{$4, $5, $6, $7}};"
    return instruction(text, (f32,) * 4, *(f32,) * 4, *(u32,) * (a + b), pure=True)


@cache
def take(n: int) -> Any:
    """The device function (words, a, b) → each of n words & a & b."""
    kind = types.UniTuple(u32, n)

    @intrinsic
    def mask(typingctx, words, a, b):
        def codegen(context, builder, sig, args):
            text = "lop3.b32 $0, $1, $2, $3, 0x80;"
            masked = [_asm(builder, text, "=r,r,r,r", I32, [w, *args[1:]], False) for w in unpacked(builder, args[0], n)]
            return packed(builder, masked)

        return kind(kind, i32, i32), codegen

    return mask


@cache
def multiply_diagonal(instruction: str, tiles: int) -> Any:
    """The device function (acc, a, b) → acc plus `tiles` products of 16 rows by 8 columns, over one or two times 8 of K.

    acc: of row g, then of row g + 8, two numbers for each tile. a: for each 8 of K a word for each tile of row g, then of row
    g + 8. b: for each 8 of K a word for each tile.
    """
    kind = types.UniTuple(f32, 4 * tiles)

    @intrinsic
    def multiply(typingctx, acc, a, b):
        taps = b.count // tiles

        def codegen(context, builder, sig, args):
            values, left, right = (unpacked(builder, pack, t.count) for pack, t in zip(args, (acc, a, b), strict=True))
            for t in range(tiles):
                at = [2 * t, 2 * t + 1, 2 * tiles + 2 * t, 2 * tiles + 2 * t + 1]
                ours = [values[i] for i in at]
                rows = [left[i] for i in range(t, len(left), tiles)]
                columns = [right[i] for i in range(t, len(right), tiles)]
                atom = ATOMS[instruction if taps == 2 else "mma.m16n8k8"]
                ours = along_k(builder, atom, ours, rows, columns)
                for i, v in zip(at, ours, strict=True):
                    values[i] = v
            return packed(builder, values)

        return kind(acc, a, b), codegen

    return multiply


@cache
def multiply_sparse(taps: int) -> Any:
    """The device function (acc, a, b, which) → acc plus a 16×8 product over 8 · taps of K, taps 2 or 4, of a sparse left operand.

    Of every four neighbours of K in a row of A two may differ from zero, at the places that `which` names, in ascending order, by
    two bits each: here all rows of a lane's quad, and all fours of K, have them at the same places (PTX ISA, "Sparse matrix
    storage"). acc: of row g columns 2t and 2t + 1, then of row g + 8. a: those two of the t-th four of K in rows g and g + 8,
    then of the fours after the first 16 of K. b: for each 8 of K numbers 2t and 2t + 1 of column g.
    """
    words, numbers = types.UniTuple(u32, taps), types.UniTuple(f32, 4)
    names = [f"${i}" for i in range(2 * taps + 8)]
    a, b, c = (", ".join(names[at : at + n]) for at, n in ((4, taps), (4 + taps, taps), (4 + 2 * taps, 4)))
    atom = ATOMS[f"mma.sp.m16n8k{8 * taps}"]
    assert (atom.words_a, atom.words_b, atom.words_acc) == (taps, taps, 4)
    text = f"{atom.text()} {{$0, $1, $2, $3}}, {{{a}}}, {{{b}}}, {{{c}}}, ${2 * taps + 8}, 0x0;"
    constraints = ",".join(["=f"] * 4 + ["r"] * (2 * taps) + ["f"] * 4 + ["r"])

    @intrinsic
    def multiply(typingctx, acc, a, b, which):
        def codegen(context, builder, sig, args):
            acc, a, b = (unpacked(builder, pack, n) for pack, n in zip(args[:3], (4, taps, taps), strict=True))
            given = [*a, *b, *acc, args[3]]
            function = ir.FunctionType(ir.LiteralStructType([F32] * 4), [v.type for v in given])
            asm = ir.InlineAsm(function, text, constraints, side_effect=False)
            return packed(builder, unpacked(builder, builder.call(asm, given, attrs=("convergent",)), 4))

        return numbers(numbers, words, words, i32), codegen

    return multiply


@cache
def multiply_stage(instruction: str, mi: int, nj: int, bk: int, a_turned: int = 0, b_turned: int = 0) -> Any:
    """The device function acc, a, b → acc that adds a warp's product of one stage: mi×nj blocks of 16×16, K = bk.

    acc: mi*nj*8 float32, block (i, j) first at 8*(i*nj + j). a, b: this lane's addresses in shared memory, of the warp's first
    row and of chunk `half`; a row is bk halves, and its chunk c lies at c ^ swizzle(row): xor with 32*step walks K. Fragments
    are read one step before they are multiplied.

    a_turned, b_turned: of an operand that lies in lines of K, the bytes of a line; the address is that of the lane's line in the
    first step, in the chunk of rows that `half` says, xor with 32*i goes to block i. Lanes take the other operand's places.
    """
    fragments, pitch, steps = FRAGMENTS[instruction], 2 * bk, bk // 16
    count = mi * nj * 8
    ty = types.UniTuple(f32, count)

    def read(builder: ir.IRBuilder, base: Any, step: int, blocks: int, turned: int) -> list[list]:
        if turned:
            at = [builder.xor(base, ir.Constant(I32, 32 * i)) if i else base for i in range(blocks)]
            return [_chunks(builder, fragments, a, step * 16 * turned, True) for a in at]
        chunks = [32 * step] if fragments.ldmatrix else [32 * step, 32 * step + 16]
        at = [builder.xor(base, ir.Constant(I32, c)) if c else base for c in chunks]
        return [[w for a in at for w in _chunks(builder, fragments, a, i * 16 * pitch)] for i in range(blocks)]

    @intrinsic
    def multiply(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            ready = read(builder, args[1], 0, mi, a_turned), read(builder, args[2], 0, nj, b_turned)
            for step in range(steps):
                left, right = ready
                if step + 1 < steps:
                    ready = read(builder, args[1], step + 1, mi, a_turned), read(builder, args[2], step + 1, nj, b_turned)
                for i in range(mi):
                    for j in range(nj):
                        at = 8 * (i * nj + j)
                        values[at : at + 8] = _multiply(builder, instruction, values[at : at + 8], left[i], right[j])
            return packed(builder, values)

        return ty(ty, u32, u32), codegen

    return multiply


@cache
def zeros(count: int) -> Any:
    """The device function () → count float32 zeros."""
    ty = types.UniTuple(f32, count)

    @intrinsic
    def zero(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(F32, count), [ir.Constant(F32, 0.0)] * count)

        return ty(), codegen

    return zero


@cache
def spill_block(instruction: str, mi: int, nj: int, pitch: int) -> Any:
    """The device function (acc, address, i) that writes block row i to shared memory, as 16 rows of `pitch` floats.

    address: of this lane's first pair; i may be a variable (the registers are chosen by branches).
    """
    fragments = FRAGMENTS[instruction]
    ty = types.UniTuple(f32, mi * nj * 8)

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
                            text = f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};"
                            _asm(builder, text, "r,f,f,~{memory}", ir.VoidType(), [args[1], *pair], True)
            return context.get_dummy_value()

        return void(ty, u32, i32), codegen

    return spill


load_floats = instruction("ld.shared.v4.f32 {$0, $1, $2, $3}, [$8]; ld.shared.v4.f32 {$4, $5, $6, $7}, [$8+16];", (f32,) * 8, u32)
"""Eight floats from shared memory."""


@cache
def store_partial(count: int, threads: int) -> Any:
    """The device function (acc, address) that writes a thread's accumulators to global memory, four at a time.

    address: of the block's tile plus 16 bytes a thread; the tile is count*threads floats.
    """
    ty = types.UniTuple(f32, count)

    @intrinsic
    def store(typingctx, acc, address):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            for k in range(0, count, 4):
                text = f"st.global.v4.f32 [$0+{4 * k * threads}], {{$1, $2, $3, $4}};"
                _asm(builder, text, "l,f,f,f,f,~{memory}", ir.VoidType(), [args[1], *values[k : k + 4]], True)
            return context.get_dummy_value()

        return void(ty, u64), codegen

    return store


@cache
def add_partial(count: int, threads: int) -> Any:
    """The device function acc, address → acc plus what `store_partial` wrote there, read through L2."""
    ty = types.UniTuple(f32, count)

    @intrinsic
    def add(typingctx, acc, address):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            quad = ir.LiteralStructType([F32] * 4)
            read: list = []
            for k in range(0, count, 4):
                text = f"ld.global.cg.v4.f32 {{$0, $1, $2, $3}}, [$4+{4 * k * threads}];"
                out = _asm(builder, text, "=f,=f,=f,=f,l,~{memory}", quad, [args[1]], True)
                read += unpacked(builder, out, 4)
            return packed(builder, [builder.fadd(v, r) for v, r in zip(values, read, strict=True)])

        return ty(ty, u64), codegen

    return add


# --- Attention -------------------------------------------------------------------------------------------------------


@cache
def load_rows(instruction: str, steps: int) -> Any:
    """The device function address → a warp's 16 rows of the left operand, `steps` times 16 halves of K: 4·steps words.

    address: where this lane reads, as `Fragments.a` says, of rows without swizzle.
    """
    ty = types.UniTuple(u32, 4 * steps)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            blocks = [_chunks(builder, FRAGMENTS[instruction], args[0], 32 * step) for step in range(steps)]
            return packed(builder, [word for block in blocks for word in block])

        return ty(u32), codegen

    return load


@cache
def multiply_rows(instruction: str, steps: int, nj: int, pitch: int) -> Any:
    """The device function rows, b → 16×16·nj products of what `load_rows` gave with b's rows, over K = 16·steps.

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
                    right = _chunks(builder, FRAGMENTS[instruction], args[1], j * 16 * pitch + 32 * step)
                    values[8 * j : 8 * j + 8] = _multiply(
                        builder, instruction, values[8 * j : 8 * j + 8], left[4 * step : 4 * step + 4], right
                    )
            return packed(builder, values)

        return acc(ty, u32), codegen

    return multiply


@cache
def multiply_columns(instruction: str, steps: int, nj: int, pitch: int) -> Any:
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
                    right = unpacked(builder, _asm(builder, text, "=r,=r,=r,=r,r,~{memory}", words, [args[2]], True), 4)
                    values[8 * j : 8 * j + 8] = _multiply(
                        builder, instruction, values[8 * j : 8 * j + 8], left[4 * step : 4 * step + 4], right
                    )
            return packed(builder, values)

        return kind(kind, ty, u32), codegen

    return multiply
