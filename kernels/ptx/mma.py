"""Instructions that kernels of mma.sync are made of: the products, cp.async, 16-byte copies, counters, parts of sums."""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.ptx.atoms import ATOMS, Atom
from tccompile.kernels.ptx.core import f32, i32, instruction, intrinsic, ir, packed, since, types, u32, u64, unpacked, void
from tccompile.kernels.ptx.memory import WITH_FLOAT8

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

WIDEN = {
    "e5m2": "{ .reg .b32 t; shl.b32 t, $2, 8; and.b32 $0, t, 0xff00ff00; and.b32 $1, $2, 0xff00ff00; }",
    "e4m3": "{ .reg .b32 m, n, s; mov.b32 s, 0x5c005c00;"
    " and.b32 m, $2, 0x007f007f; shl.b32 m, m, 7; add.u32 n, m, 0x00800080; and.b32 n, n, 0x40004000; or.b32 m, m, n;"
    " and.b32 n, $2, 0x00800080; shl.b32 n, n, 8; or.b32 m, m, n; mul.rn.f16x2 $0, m, s;"
    " and.b32 m, $2, 0x7f007f00; shr.u32 m, m, 1; add.u32 n, m, 0x00800080; and.b32 n, n, 0x40004000; or.b32 m, m, n;"
    " and.b32 n, $2, 0x80008000; or.b32 m, m, n; mul.rn.f16x2 $1, m, s; }",
}
"""A word of four floats of 8 bits as two of halves, numbers 0 and 2, then 1 and 3. One of e5m2 is the upper byte of a half. Where
e4m3's digits lie in a half they mean 2^-8 times as much, but for the last ones, which get the exponent of NaN. From sm_89 on
instructions convert numbers 0 and 1, then 2 and 3."""


def widened(builder: ir.IRBuilder, kind: str, word: Any) -> list:
    """The two words of halves that one of four floats of 8 bits becomes."""
    text = WIDEN[kind]
    if since(WITH_FLOAT8):
        text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $2; cvt.rn.f16x2.{kind}x2 $0, l; cvt.rn.f16x2.{kind}x2 $1, h; }}"
    return unpacked(builder, asm(builder, text, "=&r,=r,r", ir.LiteralStructType([I32] * 2), [word], False), 2)


@cache
def widen(kind: str) -> Any:
    """The device function word → two words: see `WIDEN`."""
    ty = types.UniTuple(u32, 2)

    @intrinsic
    def both(typingctx, word):
        def codegen(context, builder, sig, args):
            return packed(builder, widened(builder, kind, args[0]))

        return ty(u32), codegen

    return both


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


# --- Products --------------------------------------------------------------------------------------------------------


def asm(builder: ir.IRBuilder, text: str, constraints: str, result: ir.Type, args: list, effect: bool) -> Any:
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), args)


SUMS = {"f32": (f32, F32, "f"), "s32": (i32, I32, "r")}
"""What accumulators are, by the type that an atom says of them: Numba's type, LLVM's, and the kind of register."""

Kinds = tuple[str | None, str | None]
"""Types of a and of b where an atom's row stands for several, else None."""


def mma(builder: ir.IRBuilder, atom: Atom, acc: list, a: list, b: list, kinds: Kinds = (None, None)) -> list:
    """One instruction: the accumulators plus a @ bᵀ. It stays where all of the warp's lanes run it together."""
    assert (len(a), len(b), len(acc)) == (atom.words_a, atom.words_b, atom.words_acc)
    n, (_, number, register) = len(acc), SUMS[atom.acc]
    names = [f"${i}" for i in range(2 * n + len(a) + len(b))]
    d, rest = ", ".join(names[:n]), names[n:]
    text = f"{atom.text(a=kinds[0], b=kinds[1])} {{{d}}}, {{{', '.join(rest[: len(a)])}}}, "
    text += f"{{{', '.join(rest[len(a) : len(a) + len(b)])}}}, {{{d}}};"
    constraints = ",".join([f"={register}"] * n + ["r"] * (len(a) + len(b)) + [str(i) for i in range(n)])
    args = [*a, *b, *acc]
    function = ir.FunctionType(ir.LiteralStructType([number] * n), [v.type for v in args])
    out = builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), args, attrs=("convergent",))
    return unpacked(builder, out, n)


def along_k(builder: ir.IRBuilder, atom: Atom, acc: list, a: list, b: list, kinds: Kinds = (None, None)) -> list:
    """acc += a @ bᵀ over as much of K as the words of a and b have, an instruction for each part of it."""
    for words_a, words_b in zip(batched(a, atom.words_a), batched(b, atom.words_b), strict=True):
        acc = mma(builder, atom, acc, words_a, words_b, kinds)
    return acc


def batched(words: list, n: int) -> list[list]:
    """n words at a time."""
    return [words[i : i + n] for i in range(0, len(words), n)]


_A, _B = ["$8", "$9", "$10", "$11"], ["$12", "$13"]


@cache
def warp_multiply(name: str, a: str | None = None, b: str | None = None) -> Any:
    """The device function (acc, a, b) → acc of the 16 rows and 8 columns that a warp multiplies 32 bytes of each of: four sums,
    four words, two words.

    Of K a lane t of four has words 0 and 1 of a (rows g and g + 8) and 0 of b, then words 2 and 3, and 1.
    name  the atom's; a, b: types of the operands, where its row stands for several
    """
    atom = ATOMS[name]
    text, acc, kind = "", "$4, $5, $6, $7", SUMS[atom.acc][0]
    for of_a, of_b in zip(batched(_A, atom.words_a), batched(_B, atom.words_b), strict=True):
        text += f"{atom.text(a=a, b=b)} {{$0, $1, $2, $3}}, {{{', '.join(of_a)}}}, {{{', '.join(of_b)}}}, {{{acc}}};"
        acc = "$0, $1, $2, $3"
    return instruction(text, (kind,) * 4, *(kind,) * 4, *(u32,) * 6, pure=True)


@cache
def warp_multiply_sparse(name: str, a: str, b: str) -> Any:
    """The device function (acc, a, b, which) → acc of one mma.sp of 8 bits: four sums, four words each, a word of places.

    A lane t of four has fours 2t and 2t + 1 of the first 32 of K of a's rows g and g + 8, two numbers each, and then of the last
    32; of b's column g it has the t-th four of every 16 of K. `which`: as `multiply_sparse` has it, the same for all fours.
    """
    atom = ATOMS[name]
    kind = SUMS[atom.acc][0]
    text = (
        f"{atom.text(a=a, b=b)} {{$0, $1, $2, $3}}, {{$8, $9, $10, $11}}, {{$12, $13, $14, $15}}, {{$4, $5, $6, $7}}, $16, 0x0;"
    )
    return instruction(text, (kind,) * 4, *(kind,) * 4, *(u32,) * 8, i32, pure=True)


@cache
def multiply_fragment(name: str) -> Any:
    """The device function of one instruction of a warp: four accumulators, the words of a and those of b → accumulators.

    name  the atom's, of 16 rows by 8 columns. Where its row stands for several types, it multiplies those that the row names: s8,
          not u8
    """
    atom = ATOMS[name]
    a, b, acc = atom.words_a, atom.words_b, SUMS[atom.acc][0]
    words = [f"${i}" for i in range(8, 8 + a + b)]
    text = f"{atom.text()} {{$0, $1, $2, $3}}, {{{', '.join(words[:a])}}}, "
    text += f"{{{', '.join(words[a:])}}}, {{$4, $5, $6, $7}};"
    return instruction(text, (acc,) * 4, *(acc,) * 4, *(u32,) * (a + b), pure=True)


@cache
def take(n: int) -> Any:
    """The device function (words, a, b) → each of n words & a & b."""
    kind = types.UniTuple(u32, n)

    @intrinsic
    def mask(typingctx, words, a, b):
        def codegen(context, builder, sig, args):
            text = "lop3.b32 $0, $1, $2, $3, 0x80;"
            masked = [asm(builder, text, "=r,r,r,r", I32, [w, *args[1:]], False) for w in unpacked(builder, args[0], n)]
            return packed(builder, masked)

        return kind(kind, i32, i32), codegen

    return mask


@cache
def multiply_diagonal(atom: Atom, tiles: int) -> Any:
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
                ours = along_k(builder, atom if taps == 2 else ATOMS["mma.m16n8k8"], ours, rows, columns)
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
def zeros(count: int, acc: str = "f32") -> Any:
    """The device function () → count zeros of a type of `SUMS`."""
    kind, number, _ = SUMS[acc]
    ty = types.UniTuple(kind, count)

    @intrinsic
    def zero(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(number, count), [ir.Constant(number, 0)] * count)

        return ty(), codegen

    return zero


@cache
def taken(compute: DType, n: int) -> Any:
    """The device function tuple of n int32 sums → the same as `memory.load_sums` gives them."""
    exact = compute is DType.I64
    assert exact or compute is DType.F32
    ty = types.UniTuple(types.int64 if exact else f32, n)

    @intrinsic
    def convert(typingctx, sums):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], n)
            return packed(builder, [builder.sext(v, I64) if exact else builder.sitofp(v, F32) for v in values])

        return ty(types.UniTuple(i32, n)), codegen

    return convert


load_floats = instruction("ld.shared.v4.f32 {$0, $1, $2, $3}, [$8]; ld.shared.v4.f32 {$4, $5, $6, $7}, [$8+16];", (f32,) * 8, u32)
"""Eight floats from shared memory."""


@cache
def store_partial(count: int, threads: int, acc: str = "f32") -> Any:
    """The device function (sums, address) that writes a thread's accumulators to global memory, four at a time.

    address: of the block's tile plus 16 bytes a thread; the tile is count*threads numbers of a type of `SUMS`.
    """
    kind, _, register = SUMS[acc]
    ty = types.UniTuple(kind, count)

    @intrinsic
    def store(typingctx, sums, address):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            for k in range(0, count, 4):
                text = f"st.global.v4.{acc} [$0+{4 * k * threads}], {{$1, $2, $3, $4}};"
                asm(builder, text, f"l{f',{register}' * 4},~{{memory}}", ir.VoidType(), [args[1], *values[k : k + 4]], True)
            return context.get_dummy_value()

        return void(ty, u64), codegen

    return store


@cache
def add_partial(count: int, threads: int, acc: str = "f32") -> Any:
    """The device function sums, address → sums plus what `store_partial` wrote there, read through L2."""
    kind, number, register = SUMS[acc]
    ty = types.UniTuple(kind, count)

    @intrinsic
    def add_to(typingctx, sums, address):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            quad, add = ir.LiteralStructType([number] * 4), builder.fadd if acc == "f32" else builder.add
            read: list = []
            for k in range(0, count, 4):
                text = f"ld.global.cg.v4.{acc} {{$0, $1, $2, $3}}, [$4+{4 * k * threads}];"
                out = asm(builder, text, f"{f'={register},' * 4}l,~{{memory}}", quad, [args[1]], True)
                read += unpacked(builder, out, 4)
            return packed(builder, [add(v, r) for v, r in zip(values, read, strict=True)])

        return ty(ty, u64), codegen

    return add_to
