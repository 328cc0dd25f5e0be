"""The inner loops of a matrix product on CUDA cores, unrolled."""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.kernels.ptx.atoms import Atom
from tccompile.kernels.ptx.core import f32, i32, inline, instruction, intrinsic, ir, types, u32, void
from tccompile.kernels.ptx.mma import SUMS

I32, F32 = ir.IntType(32), ir.FloatType()


shuffle = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", f32, f32, i32)
"""shuffle(value, mask): the value of the lane whose number differs from this one's by `mask`. All lanes of the warp take part."""

shuffle_int = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", i32, i32, i32)
"""The same of integers."""

ballot = instruction("{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }", i32, i32)
"""ballot(value): a bit for each lane of the warp, set where its value is not 0. All lanes take part."""

count_bits = instruction("popc.b32 $0, $1;", i32, i32, pure=True)
"""How many bits are set."""

permute = instruction("prmt.b32 $0, $1, $2, $3;", i32, i32, i32, i32, pure=True)
"""permute(a, b, pick): of a's bytes, 0 to 3, and b's, 4 to 7, those that the last four hexadecimal digits of `pick` number."""

shifted = instruction("shl.b32 $0, $1, $2;", i32, i32, i32, pure=True)
"""shifted(a, n): a · 2^n in 32 bits, so 0 where n is 32."""

float_from = instruction("{ .reg .f32 x; mov.b32 x, $1; add.rn.f32 $0, x, 0fCB400000; }", f32, i32, pure=True)
"""float_from(sum): the float of an integer that was added to `atoms.FROM`. Takes half the cycles of a conversion."""

product = instruction("mul.rn.f32 $0, $1, $2;", f32, f32, f32, pure=True)
"""a times b, rounded before anything is added to it."""


@cache
def dot(n: int) -> Any:
    """The device function (acc, a, b) → acc plus the products of two tuples of n float32, added one after the other."""
    ty = types.UniTuple(f32, n)

    @intrinsic
    def add(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            value = args[0]
            for i in range(n):
                value = builder.fma(*(builder.extract_value(t, i) for t in args[1:]), value)
            return value

        return f32(f32, ty, ty), codegen

    return add


@cache
def multiply_add(n: int) -> Any:
    """The device function (acc, a, b) → the tuple of acc[i] + a[i] * b[i], n float32."""
    ty = types.UniTuple(f32, n)

    @intrinsic
    def add(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            out = args[0]
            for i in range(n):
                acc, x, y = (builder.extract_value(t, i) for t in args)
                out = builder.insert_value(out, builder.fma(x, y, acc), i)
            return out

        return ty(ty, ty, ty), codegen

    return add


@cache
def fetch(load: Any, n: int) -> Any:
    """The device function (array, at, address, ok) that keeps the n values of a guarded `memory.load` in array[at …]."""
    if n == 1:

        @inline
        def keep(array, at, address, ok):
            array[at] = load(address, ok)

        return keep

    @inline
    def keep_all(array, at, address, ok):
        values = load(address, ok)
        for j in range(n):
            array[at + j] = values[j]

    return keep_all


def as_tuple(load: Any, n: int) -> Any:
    """`memory.load` as a function that gives a tuple for one value too."""
    if n > 1:
        return load

    @inline
    def one(address):
        return (load(address),)

    return one


def _asm(builder: ir.IRBuilder, text: str, constraints: str, result: ir.Type, args: list, effect: bool = True) -> Any:
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), args)


def _product(builder: ir.IRBuilder, atom: Atom, kinds: tuple[str, str], a: Any, b: Any, acc: Any) -> Any:
    """acc plus a times b, a word each."""
    if atom.acc == "f32":
        return builder.fma(a, b, acc)
    return _asm(builder, f"{atom.text(a=kinds[0], b=kinds[1])} $0, $1, $2, $3;", "=r,r,r,r", I32, [a, b, acc], False)


@cache
def multiply_step(atom: Atom, kinds: tuple[str, str], rows: int, columns: int, bk: int, lie: tuple[int, int, int, int]) -> Any:
    """The device function acc, a, b → acc that adds a thread's rows×columns products over bk words of K.

    acc: rows*columns numbers of the atom's type, row-major. a, b: addresses in shared memory of the thread's first row and column
    at the step's first word of K. lie: words to the next one of a and of b, and threads along rows and columns; the next group of
    four rows (columns) is four times as many words on. kinds: types of a and of b, of those that the atom takes.
    """
    number, word, register = SUMS[atom.acc]
    ty, (a_pitch, b_pitch, threads_m, threads_n) = types.UniTuple(number, rows * columns), lie
    read = "f32" if atom.acc == "f32" else "b32"

    @intrinsic
    def multiply(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            values = [builder.extract_value(args[0], i) for i in range(rows * columns)]
            quad = ir.LiteralStructType([word] * 4)

            def load(address: Any, n: int, threads: int, first: int) -> list:
                out: list = []
                for group in range(n // 4):
                    text = f"ld.shared.v4.{read} {{$0, $1, $2, $3}}, [$4+{4 * (first + group * 4 * threads)}];"
                    four = _asm(builder, text, f"{f'={register},' * 4}r,~{{memory}}", quad, [address])
                    out += [builder.extract_value(four, i) for i in range(4)]
                return out

            for k in range(bk):
                left = load(args[1], rows, threads_m, k * a_pitch)
                right = load(args[2], columns, threads_n, k * b_pitch)
                for i in range(rows):
                    for j in range(columns):
                        at = i * columns + j
                        values[at] = _product(builder, atom, kinds, left[i], right[j], values[at])
            out = ir.Constant(ir.ArrayType(word, rows * columns), ir.Undefined)
            for i, v in enumerate(values):
                out = builder.insert_value(out, v, i)
            return out

        return ty(ty, u32, u32), codegen

    return multiply


@cache
def spill_row(rows: int, columns: int, threads_n: int, kind: str) -> Any:
    """The device function (acc, address, i) that writes row i of a thread's results to shared memory; i may be a variable.

    address: of the thread's first column; the next group of four lies 4*threads_n numbers on. kind: their type, of `mma.SUMS`.
    """
    number, _, register = SUMS[kind]
    ty = types.UniTuple(number, rows * columns)

    @intrinsic
    def spill(typingctx, acc, address, i):
        def codegen(context, builder, sig, args):
            for row in range(rows):
                with builder.if_then(builder.icmp_signed("==", args[2], ir.Constant(I32, row))):
                    for group in range(columns // 4):
                        at = row * columns + group * 4
                        four = [builder.extract_value(args[0], at + e) for e in range(4)]
                        text = f"st.shared.v4.{kind} [$0+{16 * group * threads_n}], {{$1, $2, $3, $4}};"
                        _asm(builder, text, f"r{f',{register}' * 4},~{{memory}}", ir.VoidType(), [args[1], *four])
            return context.get_dummy_value()

        return void(ty, u32, i32), codegen

    return spill
