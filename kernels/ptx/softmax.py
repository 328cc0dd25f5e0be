"""The arithmetic of online softmax on a Tensor Core's accumulators, and their way into the next product as its left operand.

Accumulators are those of mma.m16n8 and of wgmma: of each group of 8 columns a thread holds four, columns 2q and 2q + 1 (q = lane
mod 4) of row r = lane / 4 and the same of row r + 8. Everything here takes both rows at once: x0 is of row r, x1 of row r + 8.
The four threads of a row are neighbours.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.ptx.core import f32, i32, instruction, intrinsic, ir, packed, types, u32, u64, unpacked

F32, I32 = ir.FloatType(), ir.IntType(32)

exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", f32, f32, pure=True)
"""2 to the power x; 0 for -inf."""

_neighbour = {n: instruction(f"shfl.sync.bfly.b32 $0, $1, {n}, 0x1f, 0xffffffff;", f32, f32) for n in (1, 2)}


def _pure(builder: ir.IRBuilder, text: str, constraints: str, result: ir.Type, args: list) -> Any:
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), args)


def _maximum(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return _pure(builder, "max.f32 $0, $1, $2;", "=f,f,f", F32, [a, b])


def _row(i: int) -> int:
    """Which of a thread's two rows accumulator i belongs to."""
    return i % 4 // 2


any_of_warp = instruction(
    "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }", i32, i32
)
"""Whether the number is not 0 in any lane."""


@cache
def highest(groups: int) -> Any:
    """highest(acc, x0, x1): the greatest of x and this thread's accumulators, for each row."""
    ty = types.UniTuple(f32, 4 * groups)
    pair = types.UniTuple(f32, 2)

    @intrinsic
    def found(typingctx, acc, x0, x1):
        def codegen(context, builder, sig, args):
            values, best = unpacked(builder, args[0], 4 * groups), [args[1], args[2]]
            for i, v in enumerate(values):
                best[_row(i)] = _maximum(builder, best[_row(i)], v)
            return packed(builder, best)

        return pair(ty, f32, f32), codegen

    return found


def row_maximum() -> Any:
    """The device function x → the greatest x of a row's four threads."""
    from tccompile.kernels.ptx.core import inline

    one, two = _neighbour[1], _neighbour[2]

    @inline
    def reduced(x):
        x = max(x, one(x))
        return max(x, two(x))

    return reduced


row_first = instruction("shfl.sync.idx.b32 $0, $1, 0, 0x1c1f, 0xffffffff;", f32, f32)
"""What the first of a row's four threads has."""


def row_sum() -> Any:
    """The device function x → the sum of a row's four threads."""
    from tccompile.kernels.ptx.core import inline

    one, two = _neighbour[1], _neighbour[2]

    @inline
    def reduced(x):
        x = x + one(x)
        return x + two(x)

    return reduced


def _power(builder: ir.IRBuilder, x: Any) -> Any:
    return _pure(builder, "ex2.approx.ftz.f32 $0, $1;", "=f,f", F32, [x])


ARITHMETIC = (
    "{ .reg .f32 x, n, r; .reg .b32 e, f; max.f32 x, $1, 0fC2F00000; add.rn.f32 n, x, 0f4B400000; sub.rn.f32 r, n, 0f4B400000;"
    " sub.rn.f32 r, x, r; fma.rn.f32 x, r, 0f3E742508, 0f3F341469; fma.rn.f32 x, x, r, 0f3F800E82;"
    " mov.b32 e, n; shl.b32 e, e, 23; mov.b32 f, x; add.s32 e, e, f; mov.b32 $0, e; }"
)
"""2^x, 2e-3 off at most, for x from -120 on: a parabola of what x is beyond a whole number, which raises its exponent."""


def _power_by_arithmetic(builder: ir.IRBuilder, x: Any) -> Any:
    return _pure(builder, ARITHMETIC, "=f,f", F32, [x])


@cache
def exponentials(groups: int, arithmetic: int = 0) -> Any:
    """exponentials(acc, scale, b0, b1): (2^(acc * scale - b), its sum in this thread for row r, and for row r + 8).

    arithmetic  of 16 powers so many are computed by multiplications and additions, to 2e-3, instead of the one slow instruction
    """
    ty = types.UniTuple(f32, 4 * groups)
    result = types.Tuple((ty, f32, f32))

    @intrinsic
    def computed(typingctx, acc, scale, b0, b1):
        def codegen(context, builder, sig, args):
            values, scale = unpacked(builder, args[0], 4 * groups), args[1]
            low = [builder.fsub(ir.Constant(F32, -0.0), b) for b in args[2:]]
            sums: list = [None, None]
            for i, v in enumerate(values):
                power = builder.fma(v, scale, low[_row(i)])
                by_arithmetic = (i + 1) * arithmetic // 16 > i * arithmetic // 16
                values[i] = (_power_by_arithmetic if by_arithmetic else _power)(builder, power)
                before = sums[_row(i)]
                sums[_row(i)] = values[i] if before is None else builder.fadd(before, values[i])
            return context.make_tuple(builder, sig.return_type, [packed(builder, values), *sums])

        return result(ty, f32, f32, f32), codegen

    return computed


@cache
def halves(groups: int, kind: str = "f16", packed_conversion: bool = True) -> Any:
    """halves(acc): words of two f16 or bf16; 4k … 4k + 3 are m16n8k16's (and wgmma's) left operand of columns 16k … 16k + 15.

    `packed_conversion` of two floats at once is an instruction of sm_80 and later.
    """
    text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    if not packed_conversion:
        assert kind == "f16"
        text = "{ .reg .b16 a, b; cvt.rn.f16.f32 a, $1; cvt.rn.f16.f32 b, $2; mov.b32 $0, {a, b}; }"

    @intrinsic
    def words(typingctx, acc):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], 4 * groups)
            pairs = (values[i : i + 2] for i in range(0, len(values), 2))
            return packed(builder, [_pure(builder, text, "=r,f,f", I32, pair) for pair in pairs])

        return types.UniTuple(u32, 2 * groups)(types.UniTuple(f32, 4 * groups)), codegen

    return words


@cache
def bytes_of(groups: int) -> Any:
    """bytes_of(acc): words of four E4M3 each; 4k … 4k + 3 are the left operand of wgmma of columns 32k … 32k + 31, in another
    order. Of each 16 columns a thread has 2q, 2q + 1, 8 + 2q and 9 + 2q, which are 4q … 4q + 3 of the operand."""
    text = "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"

    @intrinsic
    def words(typingctx, acc):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], 4 * groups)
            fours = [values[i : i + 2] + values[i + 4 : i + 6] for g in range(0, len(values), 8) for i in (g, g + 2)]
            return packed(builder, [_pure(builder, text, "=r,f,f,f,f", I32, four) for four in fours])

        return types.UniTuple(u32, groups)(types.UniTuple(f32, 4 * groups)), codegen

    return words


@cache
def largest_reached(words: int) -> Any:
    """largest_reached(words): not 0 if a number of E4M3 in the words, of which none is negative, is 256 or more, or NaN."""
    carry, top = (ir.Constant(I32, n) for n in (0x08080808, 0x80808080))

    @intrinsic
    def reached(typingctx, given):
        def codegen(context, builder, sig, args):
            sums = [builder.add(w, carry) for w in unpacked(builder, args[0], words)]
            return builder.and_(reduce(builder.or_, sums), top)

        return i32(types.UniTuple(u32, words)), codegen

    return reached


@cache
def leading(count: int, taken: int) -> Any:
    """leading(values): the first `taken` of `count`."""

    @intrinsic
    def first(typingctx, values):
        def codegen(context, builder, sig, args):
            return packed(builder, unpacked(builder, args[0], count)[:taken])

        return types.UniTuple(f32, taken)(types.UniTuple(f32, count)), codegen

    return first


@cache
def scaled(groups: int) -> Any:
    """scaled(acc, a0, a1): each row's accumulators times a."""
    ty = types.UniTuple(f32, 4 * groups)

    @intrinsic
    def product(typingctx, acc, a0, a1):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], 4 * groups)
            return packed(builder, [builder.fmul(v, args[1 + _row(i)]) for i, v in enumerate(values)])

        return ty(ty, f32, f32), codegen

    return product


@cache
def below(groups: int) -> Any:
    """below(acc, x0, x1): each row's accumulators minus x."""
    ty = types.UniTuple(f32, 4 * groups)

    @intrinsic
    def difference(typingctx, acc, x0, x1):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], 4 * groups)
            return packed(builder, [builder.fsub(v, args[1 + _row(i)]) for i, v in enumerate(values)])

        return ty(ty, f32, f32), codegen

    return difference


@cache
def cut(groups: int) -> Any:
    """cut(acc, column, end0, end1): -inf in place of columns at and beyond a row's end; `column` is this thread's first."""
    ty = types.UniTuple(f32, 4 * groups)

    @intrinsic
    def chosen(typingctx, acc, column, end0, end1):
        def codegen(context, builder, sig, args):
            values, lowest = unpacked(builder, args[0], 4 * groups), ir.Constant(F32, float("-inf"))
            left = [builder.sub(end, args[1]) for end in args[2:]]
            for i, v in enumerate(values):
                inside = builder.icmp_signed(">", left[_row(i)], ir.Constant(I32, i // 4 * 8 + i % 2))
                values[i] = builder.select(inside, v, lowest)
            return packed(builder, values)

        return ty(ty, i32, i32, i32), codegen

    return chosen


# --- Masks -------------------------------------------------------------------------------------------------------------


def mask_words(kind: DType, own_rows: bool) -> int:
    """Words that a thread reads of a mask for each group of 8 columns: two elements of one row, or of both of its rows."""
    return (2 if kind is DType.F32 else 1) * (2 if own_rows else 1)


@cache
def read_mask(groups: int, kind: DType, own_rows: bool, guarded: bool) -> Any:
    """read_mask(at0, at1, left): the words of a mask of floats or bools for this thread's accumulators, two columns at a time.

    at0, at1  addresses of row r's and row r + 8's elements of this thread's first column; only at0 counts if all rows share one
    left      if `guarded`, columns from there on that exist: for pairs beyond, which are not read, zeros come
    """
    each = 2 if kind is DType.F32 else 1
    outs = ", ".join(f"${i}" for i in range(each))
    load = {DType.F32: f"ld.global.v2.b32 {{{outs}}}", DType.F16: f"ld.global.b32 {outs}", DType.BOOL: f"ld.global.u16 {outs}"}[
        kind
    ]
    constraints = ",".join([*["=&r"] * each, "l", "r", "~{memory}"])
    word = ir.LiteralStructType([I32] * each) if each > 1 else I32
    function = ir.FunctionType(word, [ir.IntType(64), I32])
    result = types.UniTuple(u32, groups * mask_words(kind, own_rows))

    @intrinsic
    def read(typingctx, at0, at1, left):
        def codegen(context, builder, sig, args):
            words: list = []
            for group in range(groups):
                for at in args[: 2 if own_rows else 1]:
                    text = f"{load}, [${each}+{8 * group * kind.size}];"
                    if guarded:
                        # A load by predicate alone would keep what was in its registers before alive around the loop.
                        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(each))
                        text = f"{{ .reg .pred p; setp.gt.s32 p, ${each + 1}, {8 * group}; {zeros} @p {text} }}"
                    out = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), [at, args[2]])
                    words += unpacked(builder, out, each) if each > 1 else [out]
            return packed(builder, words)

        return result(u64, u64, i32), codegen

    return read


@cache
def masked(groups: int, kind: DType, own_rows: bool) -> Any:
    """masked(acc, words, scale): accumulators times `scale` plus what `read_mask` gave; or, by bools, as they are or -inf."""
    ty = types.UniTuple(f32, 4 * groups)
    rows = 2 if own_rows else 1
    each = mask_words(kind, own_rows) // rows
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"

    @intrinsic
    def computed(typingctx, acc, words, scale):
        def codegen(context, builder, sig, args):
            values, words = unpacked(builder, args[0], 4 * groups), unpacked(builder, args[1], groups * rows * each)
            pair = ir.LiteralStructType([F32] * 2)
            for group in range(groups):
                for row in range(rows):
                    own = words[(group * rows + row) * each :][:each]
                    if kind is DType.F32:
                        added = [builder.bitcast(w, F32) for w in own]
                    elif kind is DType.F16:
                        added = unpacked(builder, _pure(builder, text, "=f,=f,r", pair, own), 2)
                    else:
                        low = builder.and_(own[0], ir.Constant(I32, 0xFF))
                        seen = [builder.icmp_unsigned(">", w, ir.Constant(I32, limit)) for w, limit in ((low, 0), (own[0], 0xFF))]
                    for i in (4 * group + 2 * r + c for r in ([row] if own_rows else [0, 1]) for c in (0, 1)):
                        if kind is DType.BOOL:
                            values[i] = builder.select(seen[i % 2], values[i], ir.Constant(F32, float("-inf")))
                        else:
                            values[i] = builder.fma(values[i], args[2], added[i % 2])
            return packed(builder, values)

        return ty(ty, types.UniTuple(u32, groups * rows * each), f32), codegen

    return computed
