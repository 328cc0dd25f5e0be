"""Products with weights that are integers of 4 or 8 bits, from the words that a lane has of them: see `ir/packed.py`.

An integer in the last digits of a float whose exponent makes them ones is that float plus it: 1024 of a half, 2^23 of a float32.
What stands for 0 is subtracted with that, which is exact. Words of 4 bits each hold neighbours 16 bits apart, so that two of them
become a word of halves at once. Sums of a block are multiplied by its scale in float32.

All of a chunk, or of 32 of K, is one text: a long text costs Numba as little as one line does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.ir import packed
from tccompile.ir.types import DType
from tccompile.kernels.ptx.atoms import ATOMS
from tccompile.kernels.ptx.core import f32, of_tuples, u32
from tccompile.kernels.ptx.memory import unpack


def words_of(number: int, dtype: DType) -> int:
    """Words of so many numbers, one at least."""
    return max(1, number * dtype.size // 4)


@cache
def multiply_chunk(atom: str, bits: int, per: int, scales: DType, zeros: bool, columns: int) -> Any:
    """The device function (sums, words, scales, zeros, x) → sums of a warp, with those of 128 of K, by Tensor Cores.

    sums    for each 8 rows of x four numbers, as an mma has them
    words   of the integers, vector by vector
    scales  of row g `per` scales, then of row g + 8
    zeros   the same as bytes; or else one word, of halves of 1024 plus the integer that stands for 0
    x       for each of the columns, of each 32 of K 8 halves
    """
    text = _Chunk(atom, bits, per, scales, zeros, columns)
    return of_tuples(text.text(), (f32, 4 * columns), *text.operands)


class _Chunk:
    def __init__(self, atom: str, bits: int, per: int, scales: DType, zeros: bool, columns: int) -> None:
        self.atom, self.bits, self.per, self.scales, self.zeros, self.columns = ATOMS[atom], bits, per, scales, zeros, columns
        n, self.of_scales, self.of_zeros = 4 * columns, words_of(per, scales), max(1, per // packed.ZEROS)
        counts = n, 2 * bits, 2 * self.of_scales, 2 * self.of_zeros if zeros else 1, 16 * columns
        self.operands = [(f32 if i == 0 else u32, count) for i, count in enumerate(counts)]
        self.first = [n + sum(counts[:i]) for i in range(len(counts))]

    def operand(self, which: int, i: int) -> str:
        return f"${self.first[which] + i}"

    def text(self) -> str:
        n = 4 * self.columns
        sums = [f"p{i}" for i in range(n)]
        lines = ["{ .reg .b32 t, k, c, base, z0, z1, y0, y1;", f".reg .f32 f0, f1, {', '.join(sums)};", ".reg .b16 h, other;"]
        lines.append(f".reg .b32 {', '.join(f'u{r}_{i}' for r in range(2) for i in range(4))};")
        lines += ["mov.b32 k, 0x2C002C00;", "mov.b32 base, 0x64006400;", "mov.b32 c, 0x63806380;"]
        lines += [f"mov.f32 ${i}, {self.operand(0, i)};" for i in range(n)]
        if not self.zeros:
            lines += [f"mov.b32 z{r}, {self.operand(3, 0)};" for r in range(2)]
            lines += [f"sub.f16x2 y{r}, c, z{r};" for r in range(2)]
        block = packed.CHUNK // self.per
        for at in range(0, packed.CHUNK, 16):
            if at % block == 0:
                lines += [f"mov.f32 {p}, 0f00000000;" for p in sums]
            if self.zeros and at % block == 0:
                lines += self.zero(at // block)
            if at % 32 == 0 or (self.zeros and block == 16):
                lines += self.numbers(at // 32)
            lines += self.products(at // 32, at % 32 // 16)
            if (at + 16) % block == 0:
                lines += self.scaled(at // block)
        return " ".join([*lines, "}"])

    def zero(self, block: int) -> list[str]:
        """Halves of what stands for 0 in a block: 1024 plus it, and for odd pairs of 4 bits, 960 less that."""
        lines = []
        for r in range(2):
            word = self.operand(3, r * self.of_zeros + block // 4)
            lines += [f"prmt.b32 z{r}, {word}, 0x64646464, {0x4040 + 0x101 * (block % 4)};", f"sub.f16x2 y{r}, c, z{r};"]
        return lines

    def numbers(self, j: int) -> list[str]:
        """Of the j-th 32 of K the numbers, in words of neighbours. Odd pairs of 4 bits come four bits higher: 1024 + 16 u, of
        which a sixteenth is 64 + u."""
        lines = []
        for r in range(2):
            if self.bits == 8:
                for i in range(4):
                    word = self.operand(1, 4 * (2 * (j // 2) + r) + 2 * (j % 2) + i // 2)
                    lines.append(f"prmt.b32 t, {word}, 0x64646464, {'0x4342' if i % 2 else '0x4140'};")
                    lines.append(f"sub.f16x2 u{r}_{i}, t, z{r};")
                continue
            word = self.operand(1, 4 * r + j)
            lines.append(f"shr.u32 t, {word}, 8;")
            for i, source in enumerate((word, word, "t", "t")):
                u = f"u{r}_{i}"
                lines.append(f"lop3.b32 {u}, {source}, {'0x00F000F0' if i % 2 else '0x000F000F'}, base, 0xEA;")
                lines.append(f"fma.rn.f16x2 {u}, {u}, k, y{r};" if i % 2 else f"sub.f16x2 {u}, {u}, z{r};")
        return lines

    def products(self, j: int, half: int) -> list[str]:
        lines = []
        for b in range(self.columns):
            p = ", ".join(f"p{4 * b + i}" for i in range(4))
            words = [(f"u0_{i}", f"u1_{i}", self.operand(4, 16 * b + 4 * j + i)) for i in (2 * half, 2 * half + 1)]
            for pair in [words] if self.atom.k == 16 else [[w] for w in words]:
                a = ", ".join(name for w in pair for name in w[:2])
                lines.append(f"{self.atom.text()} {{{p}}}, {{{a}}}, {{{', '.join(w[2] for w in pair)}}}, {{{p}}};")
        return lines

    def scaled(self, block: int) -> list[str]:
        lines = []
        for r in range(2):
            word = self.operand(2, r * self.of_scales + block * self.scales.size // 4)
            if self.scales is DType.F32:
                lines.append(f"mov.b32 f{r}, {word};")
            else:
                lines += [f"mov.b32 {{{'other, h' if block % 2 else 'h, other'}}}, {word};", f"cvt.f32.f16 f{r}, h;"]
        sums = [(4 * b + i, i // 2) for b in range(self.columns) for i in range(4)]
        return lines + [f"fma.rn.f32 ${i}, p{i}, f{r}, ${i};" for i, r in sums]


@cache
def multiply_part(bits: int, blocks: int, x: DType, few: int) -> Any:
    """The device function (sums, words, scales, zeros, x) → sums of a lane, with those of 8 of its numbers, by CUDA cores.

    sums    of row g for each row of x, then of row g + 8
    words   of the integers: of row g, then of row g + 8
    scales  the same, of each of the blocks, one or two, that the numbers are of; zeros: 2^23 plus what stands for 0
    x       of each of its rows 8 numbers
    """
    n, of_words, of_x = 2 * few, bits // 4, words_of(8, x)
    counts = n, 2 * of_words, 2 * blocks, 2 * blocks, of_x * few
    first = [n + sum(counts[:i]) for i in range(len(counts))]
    lines = ["{ .reg .b32 t; .reg .f32 " + ", ".join([f"u{r}_{i}" for r in range(2) for i in range(8)]) + ";"]
    lines += [f".reg .f32 p, {', '.join(f'x{i}' for i in range(8))};"]
    lines += [f"mov.f32 ${i}, ${first[0] + i};" for i in range(n)]
    for r in range(2):
        for i in range(8):
            word, zero = first[1] + r * of_words + i * bits // 32, first[3] + r * blocks + i * blocks // 8
            lines += _float_of(bits, i, f"${word}", f"u{r}_{i}", f"${zero}")
    for row in range(few):
        for w in range(of_x):
            each = 8 // of_x
            lines += [f".reg .b32 w{row}_{w};", f"mov.b32 w{row}_{w}, ${first[4] + row * of_x + w};"]
            lines += unpack(x, f"w{row}_{w}", [f"x{w * each + i}" for i in range(each)])
        for r in range(2):
            for b in range(blocks):
                own = range(b * 8 // blocks, (b + 1) * 8 // blocks)
                lines += [f"{'fma' if i > own[0] else 'mul'}.rn.f32 p, u{r}_{i}, x{i}{', p' * (i > own[0])};" for i in own]
                lines.append(f"fma.rn.f32 ${r * few + row}, p, ${first[2] + r * blocks + b}, ${r * few + row};")
    kinds = f32, u32, f32, f32, u32
    return of_tuples(" ".join([*lines, "}"]), (f32, n), *zip(kinds, counts, strict=True))


def _float_of(bits: int, i: int, word: str, u: str, zero: str) -> list[str]:
    """The i-th of 8 neighbours as float32."""
    if bits == 8:
        made = [f"prmt.b32 t, {word}, 0x4B000000, {0x7540 + i % 4};"]
    else:
        made = [f"shr.u32 t, {word}, {4 * packed.ORDER.index(i)};", "lop3.b32 t, t, 0xF, 0x4B000000, 0xEA;"]
    return [*made, f"mov.b32 {u}, t;", f"sub.rn.f32 {u}, {u}, {zero};"]
