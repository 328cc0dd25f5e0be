"""Loads and stores of one to eight neighbouring elements of any storage type, converted from and to the compute types.

`load(dtype, n)` is a device function address → value (n = 1) or tuple of n values; `store(dtype, n)` one of (address,
values…). Values are float32 for the float types and int64 for the others (bool: 0 or 1); `load_floats` gives bytes as float32.
Each is one block of inline PTX with accesses as wide as n elements allow, 16 bytes at most; the address must be a multiple of
the width. `guarded` adds a last int32 parameter: if it is 0, nothing is accessed (a load then gives zeros).

Floats of 8 bits are converted by instructions of sm_89 and newer, two at a time, and by arithmetic before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.ptx.core import f32, i32, instruction, of_tuples, since, types, u32, u64, void

i64 = types.int64

SPACES = ("global", "global.nc", "global.cg", "global.cs", "shared")
"""State spaces: an address in shared memory is 32 bits, one in global memory 64. cg: what other blocks write, from L2; cs: what
nobody asks for soon, the first to be given up by the caches."""

PACKED = (7, 2)
"""The compute capability from which on an instruction saturates two integers to bytes, and packs them."""

WITH_FLOAT8 = (8, 9)
"""The first generation that converts floats of 8 bits."""


@cache
def load(dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    """The device function that reads n elements of `dtype`."""
    value = f32 if dtype.is_float else i64
    params = (_address(space), i32) if guarded else (_address(space),)
    return instruction(_made(dtype, lambda: _load(dtype, n, guarded, space, unpack)), value if n == 1 else (value,) * n, *params)


def _made(dtype: DType, text: Callable[[], str]) -> str | Callable[[], str]:
    """A text of conversions, which is the same for every generation unless they are of floats of 8 bits."""
    return text if dtype in FLOAT8 else text()


def _load(
    dtype: DType, n: int, guarded: bool, space: str, convert: Callable[[DType, str, list[str]], list[str]], head: str = ""
) -> str:
    """The text of a load, after declarations in `head`: `convert` has what makes values of a register's elements."""
    address, body = f"${n}", [head] if head else []
    for at, width, word in _chunks(dtype.size, n):
        names = [f"w{at}_{k}" for k in range(width // word)]
        vector, target = _braces(names)
        body.append(f".reg .b{8 * max(word, 2)} {', '.join(names)};")
        if guarded:
            body += [f"mov.b{8 * max(word, 2)} {name}, 0;" for name in names]
        kind = f"b{8 * word}" if word > 1 else "u8"
        body.append(f"{'@p ' if guarded else ''}ld.{space}{vector}.{kind} {target}, [{address}+{at}];")
        per_word = word // dtype.size
        for k, name in enumerate(names):
            first = at // dtype.size + k * per_word
            body += convert(dtype, name, [f"${first + j}" for j in range(per_word)])
    return _block(body, f"${n + 1}" if guarded else "")


@cache
def load_floats(dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    """The same of integers of 8 bits as float32: a byte below 2^23's digits is one plus that, by two instructions."""
    text = _load(dtype, n, guarded, space, _bytes_to_floats, ".reg .b32 t; .reg .f32 u;")
    return instruction(text, f32 if n == 1 else (f32,) * n, *((_address(space), i32) if guarded else (_address(space),)))


def _bytes_to_floats(dtype: DType, word: str, out: list[str]) -> list[str]:
    """Convert the bytes of a register; signed ones by way of what they are more than -128."""
    lines, signed = [], dtype is DType.I8
    if len(out) < 4:
        lines += [f".reg .b32 {word}w;", f"cvt.u32.u16 {word}w, {word};"]
        word = f"{word}w"
    if signed:
        lines.append(f"xor.b32 {word}, {word}, 0x80808080;")
    for j, o in enumerate(out):
        lines += [f"prmt.b32 t, {word}, 0x4B000000, 0x754{j};", "mov.b32 u, t;"]
        lines.append(f"sub.rn.f32 {o}, u, {'0f4B000080' if signed else '0f4B000000'};")
    return lines


@cache
def read_words(words: int, space: str = "global") -> Any:
    """The device function address → tuple of 2, 4 or 8 words as they lie in memory."""
    body = []
    for at in range(0, words, 4):
        vector, target = _braces([f"${k}" for k in range(at, min(words, at + 4))])
        body.append(f"ld.{space}{vector}.b32 {target}, [${words}+{4 * at}];")
    return instruction(" ".join(body), (u32,) * words, _address(space))


@cache
def load_bytes(n: int) -> Any:
    """The device function (address, inside) → the word of n = 1 or 4 bytes in global memory, zeros above; 0 if not inside."""
    assert n in (1, 4)
    kind = "u8" if n == 1 else "b32"
    return instruction(_block(["mov.b32 $0, 0;", f"@p ld.global.{kind} $0, [$1];"], "$2"), u32, u64, i32)


float_bits = instruction("mov.b32 $0, $1;", i32, f32, pure=True)
"""The bits of a float32."""

store_word = instruction("st.shared.b32 [$0], $1;", void, u32, u32)


@cache
def store_apart(apart: int) -> Any:
    """The device function (address, word) that writes two bytes of it to shared memory there, and the others so far behind."""
    text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; st.shared.b16 [$0], low; st.shared.b16 [$0+{apart}], high; }}"
    return instruction(text, void, u32, u32)


def _store_turned() -> str:
    body = [".reg .b32 a, b, c, d; .reg .b32 " + ", ".join(f"y{k}_{q}" for k in range(4) for q in range(4)) + ";"]
    for q in range(4):
        w0, w1, w2, w3 = (f"${1 + 4 * q + i}" for i in range(4))
        body += [f"prmt.b32 a, {w0}, {w1}, 0x5140;", f"prmt.b32 b, {w0}, {w1}, 0x7362;"]
        body += [f"prmt.b32 c, {w2}, {w3}, 0x5140;", f"prmt.b32 d, {w2}, {w3}, 0x7362;"]
        body += [f"prmt.b32 y0_{q}, a, c, 0x5410;", f"prmt.b32 y1_{q}, a, c, 0x7632;"]
        body += [f"prmt.b32 y2_{q}, b, d, 0x5410;", f"prmt.b32 y3_{q}, b, d, 0x7632;"]
    body += [f"st.shared.v4.b32 [$0+{16 * k}], {{y{k}_0, y{k}_1, y{k}_2, y{k}_3}};" for k in range(4)]
    return _block(body, "")


store_turned = instruction(_store_turned, void, u32, *(u32,) * 16)
"""(shared address, 16 words): writes the first bytes of all words side by side, then their second bytes, and so on: 64 bytes."""

copy_from_shared = instruction(
    "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; st.global.v4.b32 [$0], {a, b, c, d}; }", void, u64, u32
)
"""(address, shared address): 16 bytes to global memory."""


@cache
def load_sums(compute: DType, n: int) -> Any:
    """The device function address → n int32 in shared memory, exactly as int64, or each rounded to the nearest float32."""
    if compute is DType.I64:
        return load(DType.I32, n, space="shared")
    assert compute is DType.F32
    body, words = [], [f"w{k}" for k in range(n)]
    body.append(f".reg .b32 {', '.join(words)};")
    for at, width, _ in _chunks(4, n):
        vector, target = _braces(words[at // 4 : (at + width) // 4])
        body.append(f"ld.shared{vector}.b32 {target}, [${n}+{at}];")
    body += [f"cvt.rn.f32.s32 ${k}, {word};" for k, word in enumerate(words)]
    return instruction(_block(body, ""), f32 if n == 1 else (f32,) * n, u32)


prefetch = instruction("prefetch.global.L2 [$0];", void, u64)
"""The 32 bytes or more around an address are to come to the L2 cache."""


@cache
def load_words(words: int, space: str = "global", outside: int = 0) -> Any:
    """The device function (address, inside) → tuple of 1, 2, 4 or 8 words as they lie in memory, for `floats` when needed.

    outside  what each of them is if not inside
    """
    body = []
    for at in range(0, words, 4):
        names = [f"${k}" for k in range(at, min(words, at + 4))]
        vector, target = _braces(names)
        body += [f"mov.b32 {name}, {outside};" for name in names]
        body.append(f"@p ld.{space}{vector}.b32 {target}, [${words}+{4 * at}];")
    return instruction(_block(body, f"${words + 1}"), (u32,) * words, _address(space), i32)


@cache
def floats(dtype: DType, n: int) -> Any:
    """The device function (words…) → tuple of n float32, of a float type of up to 4 bytes or of integers of 8 bits."""
    words = n * dtype.size // 4
    per_word = n // words
    convert = unpack if dtype.is_float else _bytes_to_floats

    def text() -> str:
        body = [] if dtype.is_float else [".reg .b32 t; .reg .f32 u;"]
        for k in range(words):
            body += [f".reg .b32 w{k};", f"mov.b32 w{k}, ${n + k};"]
            body += convert(dtype, f"w{k}", [f"${k * per_word + j}" for j in range(per_word)])
        return _block(body, "")

    return instruction(_made(dtype, text), (f32,) * n, *(u32,) * words, pure=True)


PAIRS_ARE_COMPARED = (9, 0)
"""The first generation that compares 16 bits at a time by one instruction; before, it takes several."""


@cache
def larger_bytes(dtype: DType) -> Any:
    """The device function (high, low, word) → high, low, of the largest bytes so far, for `largest_bytes`.

    Two bytes are compared as one number of 16 bits, which goes by the higher one. So `high` has right what are the higher ones of
    words, and `low` what are the lower ones, turned round.
    """
    kind = "u" if dtype is DType.U8 else "s"

    def text() -> str:
        if since(PAIRS_ARE_COMPARED):
            larger = [f"max.{kind}16x2 ${i}, ${2 + i}, {word};" for i, word in enumerate(("$4", "t"))]
        else:
            wide = f"{kind}32"
            larger = [f"vmax2.{wide}.{wide}.{wide} ${i}, ${2 + i}, {word}, none;" for i, word in enumerate(("$4", "t"))]
            larger.insert(0, "mov.b32 none, 0;")
        return _block([".reg .b32 t, none;", "prmt.b32 t, $4, $4, 0x2301;", *larger], "")

    return instruction(text, (u32, u32), u32, u32, u32, pure=True)


@cache
def largest_bytes(dtype: DType) -> Any:
    """The device function (high, low) → the largest bytes as 4 float32: see `larger_bytes`."""
    body = [".reg .b32 t, w0; .reg .f32 u;", "prmt.b32 w0, $4, $5, 0x3715;"]
    return instruction(
        _block([*body, *_bytes_to_floats(dtype, "w0", [f"${i}" for i in range(4)])], ""), (f32,) * 4, u32, u32, pure=True
    )


@cache
def anew(words: int) -> Any:
    """The device function (words…, zero) → the same words, if zero is 0, of which the compiler does not know that they are."""
    changed = " ".join(f"xor.b32 ${i}, ${words + i}, ${2 * words};" for i in range(words))
    return instruction(changed, (u32,) * words, *(u32,) * words, i32, pure=True)


@cache
def deviations(dtype: DType, n: int) -> Any:
    """The device function (sums, origins, words) → sums: n of deviations of the elements in words, then n of their squares."""
    values = n * dtype.size // 4

    def text() -> str:
        body = [".reg .f32 d;"]
        for i, d in _unpacked(dtype, n, 5 * n, body):
            body += [f"sub.f32 d, {d}, ${4 * n + i};", f"add.f32 ${i}, ${2 * n + i}, d;"]
            body.append(f"fma.rn.f32 ${n + i}, d, d, ${3 * n + i};")
        return _block(body, "")

    return of_tuples(_made(dtype, text), (f32, 2 * n), (f32, 2 * n), (f32, n), (u32, values))


@cache
def scaled(dtype: DType, n: int) -> Any:
    """The device function (words, means, scales) → the n elements in words, less their means, times their scales."""
    values = n * dtype.size // 4

    def text() -> str:
        body = [".reg .f32 d;"]
        for i, d in _unpacked(dtype, n, n, body):
            body += [f"sub.f32 d, {d}, ${n + values + i};", f"mul.f32 ${i}, d, ${2 * n + values + i};"]
        return _block(body, "")

    return of_tuples(_made(dtype, text), (f32, n), (u32, values), (f32, n), (f32, n))


def _unpacked(dtype: DType, n: int, first: int, body: list[str]) -> list[tuple[int, str]]:
    """Adds the conversion of n elements, in operands from the first on, to the text; each one's number and register."""
    words = n * dtype.size // 4
    per_word = n // words
    names = [f"e{i}" for i in range(n)]
    body.append(f".reg .f32 {', '.join(names)};")
    for k in range(words):
        body += [f".reg .b32 w{k};", f"mov.b32 w{k}, ${first + k};"]
        body += unpack(dtype, f"w{k}", names[k * per_word : (k + 1) * per_word])
    return list(enumerate(names))


@cache
def store(
    dtype: DType, n: int = 1, guarded: bool = False, space: str = "global", rounds: bool = False, rectifies: bool = False
) -> Any:
    """The device function that writes n elements of `dtype`. Integers keep their low bits: saturate them before. Floats of 8 bits
    saturate; and so do bytes, two of them or more, that are given as float32 with `rounds`. With `rectifies`, floats of 8 bits go
    through ReLU first, where there are instructions for them."""
    value = f32 if dtype.is_float or rounds else i64
    params = (_address(space), *(value,) * n, *((i32,) if guarded else ()))

    def text() -> str:
        return _store(dtype, n, guarded, space, rounds, rectifies)

    return instruction(text if rounds else _made(dtype, text), void, *params)


def _store(dtype: DType, n: int, guarded: bool, space: str, rounds: bool, rectifies: bool) -> str:
    body, join = [], partial(pack, rectifies=rectifies) if not rounds else pack_rounded if since(PACKED) else _pack_clamped
    for at, width, word in _chunks(dtype.size, n):
        names = [f"w{at}_{k}" for k in range(width // word)]
        vector, source = _braces(names)
        body.append(f".reg .b{8 * max(word, 2)} {', '.join(names)};")
        per_word = word // dtype.size
        for k, name in enumerate(names):
            first = at // dtype.size + k * per_word
            values = [f"${1 + first + j}" for j in range(per_word)]
            body += join(dtype, name, values)
        kind = f"b{8 * word}" if word > 1 else "u8"
        body.append(f"{'@p ' if guarded else ''}st.{space}{vector}.{kind} [$0+{at}], {source};")
    return _block(body, f"${n + 1}" if guarded else "")


def _address(space: str) -> Any:
    assert space in SPACES
    return u32 if space == "shared" else u64


def _chunks(size: int, n: int) -> list[tuple[int, int, int]]:
    """How n elements are accessed: (byte offset, bytes, bytes of a register) of each instruction."""
    width = min(16, size * n)
    word = max(size, min(width, 4))
    return [(at, width, word) for at in range(0, size * n, width)]


def _braces(names: list[str]) -> tuple[str, str]:
    """The vector suffix and the operand."""
    return ("", names[0]) if len(names) == 1 else (f".v{len(names)}", "{" + ", ".join(names) + "}")


def _block(body: list[str], predicate: str) -> str:
    head = [".reg .pred p;", f"setp.ne.b32 p, {predicate}, 0;"] if predicate else []
    return "{ " + " ".join(head + body) + " }"


def unpack(dtype: DType, word: str, out: list[str]) -> list[str]:
    """Convert the elements in the register `word` to compute values."""
    halves = [f"{word}h{j}" for j in range(len(out))]
    declared = f".reg .b16 {', '.join(halves)};"
    if dtype is DType.F16:
        split = [declared, f"mov.b32 {{{halves[0]}, {halves[1]}}}, {word};"] if len(out) == 2 else []
        return split + [f"cvt.f32.f16 {o}, {h};" for o, h in zip(out, halves if len(out) == 2 else [word], strict=True)]
    if dtype is DType.BF16:  # the upper half of a float32
        split = [declared, f"mov.b32 {{{halves[0]}, {halves[1]}}}, {word};"] if len(out) == 2 else []
        return split + [f"mov.b32 {o}, {{0, {h}}};" for o, h in zip(out, halves if len(out) == 2 else [word], strict=True)]
    if dtype in FLOAT8:
        return _unpack_pairs(dtype, word, out) if since(WITH_FLOAT8) else _unpack_float8(dtype, word, out)
    if dtype is DType.F32:
        return [f"mov.b32 {out[0]}, {word};"]
    if dtype is DType.F64:
        return [f"cvt.rn.f32.f64 {out[0]}, {word};"]
    if dtype.size == 8:
        return [f"mov.b64 {out[0]}, {word};"]
    sign = "s" if dtype in (DType.I8, DType.I16, DType.I32) else "u"
    if dtype.size == 4:
        return [f"cvt.s64.{sign}32 {out[0]}, {word};"]
    bits = 8 * dtype.size
    if len(out) == 1:  # a register of 16 bits
        return [f"cvt.s64.{sign}{bits} {out[0]}, {word};"]
    fields = [f"{word}f{j}" for j in range(len(out))]
    lines = [f".reg .b32 {', '.join(fields)};"]
    if bits * len(out) == 16:  # a register of 16 bits
        lines += [f".reg .b32 {word}w;", f"cvt.u32.u16 {word}w, {word};"]
        word = f"{word}w"
    for j, (o, f) in enumerate(zip(out, fields, strict=True)):
        lines += [f"bfe.{sign}32 {f}, {word}, {bits * j}, {bits};", f"cvt.s64.{sign}32 {o}, {f};"]
    return lines


def pack(dtype: DType, word: str, values: list[str], rectifies: bool = False) -> list[str]:
    """Convert compute values to storage and join them in the register `word`; `rectifies`: as `store` has it."""
    halves = [f"{word}h{j}" for j in range(len(values))]
    if dtype is DType.F16:
        if len(values) == 1:
            return [f"cvt.rn.f16.f32 {word}, {values[0]};"]
        lines = [f".reg .b16 {', '.join(halves)};"]
        lines += [f"cvt.rn.f16.f32 {h}, {v};" for h, v in zip(halves, values, strict=True)]
        return [*lines, f"mov.b32 {word}, {{{halves[0]}, {halves[1]}}};"]
    if dtype is DType.BF16:
        lines = []
        for j, v in enumerate(values):  # round to nearest even: add 0x7fff and the lowest kept bit; a NaN becomes 0x7fff
            b, odd, q = f"{word}b{j}", f"{word}o{j}", f"{word}q{j}"
            lines += [f".reg .b32 {b}, {odd}; .reg .pred {q};", f"mov.b32 {b}, {v};", f"bfe.u32 {odd}, {b}, 16, 1;"]
            lines += [f"add.u32 {b}, {b}, {odd};", f"add.u32 {b}, {b}, 0x7fff;", f"shr.u32 {b}, {b}, 16;"]
            lines += [f"setp.nan.f32 {q}, {v}, {v};", f"selp.b32 {b}, 0x7fff, {b}, {q};"]
        if len(values) == 1:
            return [*lines, f"cvt.u16.u32 {word}, {word}b0;"]
        return [*lines, f"bfi.b32 {word}, {word}b1, {word}b0, 16, 16;"]
    if dtype in FLOAT8:
        assert since(WITH_FLOAT8) or not rectifies
        return _pack_pairs(dtype, word, values, rectifies) if since(WITH_FLOAT8) else _pack_float8(dtype, word, values)
    if dtype is DType.F32:
        return [f"mov.b32 {word}, {values[0]};"]
    if dtype is DType.F64:
        return [f"cvt.f64.f32 {word}, {values[0]};"]
    if dtype.size == 8:
        return [f"mov.b64 {word}, {values[0]};"]
    if dtype.size == 4:
        return [f"cvt.u32.u64 {word}, {values[0]};"]
    if len(values) == 1:
        return [f"cvt.u16.u64 {word}, {values[0]};"]
    bits = 8 * dtype.size
    fields = [f"{word}f{j}" for j in range(len(values))]
    lines = [f".reg .b32 {', '.join(fields)};"] + [f"cvt.u32.u64 {f}, {v};" for f, v in zip(fields, values, strict=True)]
    whole = f"{word}w" if bits * len(values) == 16 else word  # joined in 32 bits, if the register has 16
    lines += [f".reg .b32 {whole};"] if whole != word else []
    lines.append(f"mov.b32 {whole}, {fields[0]};")
    lines += [f"bfi.b32 {whole}, {f}, {whole}, {bits * j}, {bits};" for j, f in enumerate(fields) if j]
    return [*lines, f"cvt.u16.u32 {word}, {whole};"] if whole != word else lines


def pack_rounded(dtype: DType, word: str, values: list[str]) -> list[str]:
    """The same of two or four float32, rounded to integers and saturated to bytes: from sm_72 on one instruction for two."""
    fields, whole = [f"{word}f{j}" for j in range(len(values))], f"{word}w"
    lines = [f".reg .b32 {', '.join([*fields, whole])};", f"mov.b32 {whole}, 0;"]
    lines += [f"cvt.rni.s32.f32 {f}, {v};" for f, v in zip(fields, values, strict=True)]
    how = f"cvt.pack.sat.{dtype.value[0].replace('i', 's')}8.s32.b32"
    lines += [f"{how} {whole}, {fields[j + 1]}, {fields[j]}, {whole};" for j in range(len(values) - 2, -1, -2)]
    return [*lines, f"cvt.u16.u32 {word}, {whole};" if len(values) == 2 else f"mov.b32 {word}, {whole};"]


@cache
def rounded(dtype: DType) -> Any:
    """The device function of four float32 → a word of four bytes: `pack_rounded`."""
    text = _block([".reg .b32 word;", *pack_rounded(dtype, "word", ["$1", "$2", "$3", "$4"]), "mov.b32 $0, word;"], "")
    return instruction(text, i32, f32, f32, f32, f32, pure=True)


def _pack_clamped(dtype: DType, word: str, values: list[str]) -> list[str]:
    """The same before."""
    fields, whole = [f"{word}f{j}" for j in range(len(values))], f"{word}w"
    lines = [f".reg .b32 {', '.join([*fields, whole])};", f"mov.b32 {whole}, 0;"]
    for j, (f, v) in enumerate(zip(fields, values, strict=True)):
        lines += [f"cvt.rni.s32.f32 {f}, {v};", f"max.s32 {f}, {f}, {int(dtype.lowest)};"]
        lines += [f"min.s32 {f}, {f}, {int(dtype.largest)};", f"bfi.b32 {whole}, {f}, {whole}, {8 * j}, 8;"]
    return [*lines, f"cvt.u16.u32 {word}, {whole};" if len(values) == 2 else f"mov.b32 {word}, {whole};"]


# --- Floats of 8 bits --------------------------------------------------------------------------------------------------

PAIR = {DType.E4M3: "e4m3x2", DType.E5M2: "e5m2x2"}
"""What instructions call two of them."""


def _unpack_pairs(dtype: DType, word: str, out: list[str]) -> list[str]:
    """By way of halves, which hold all of their values. A register of 16 bits has one or two of them."""
    n = max(1, len(out) // 2)
    pairs, halves = [word] if n == 1 else [f"{word}p{k}" for k in range(n)], [f"{word}h{k}" for k in range(2 * n)]
    lines = [
        f".reg .b16 {', '.join([*halves, *(pairs if n > 1 else [])])};",
        f".reg .b32 {', '.join(f'{word}q{k}' for k in range(n))};",
    ]
    lines += [f"mov.b32 {{{', '.join(pairs)}}}, {word};"] if n > 1 else []
    for k, pair in enumerate(pairs):
        lines.append(f"cvt.rn.f16x2.{PAIR[dtype]} {word}q{k}, {pair};")
        lines.append(f"mov.b32 {{{halves[2 * k]}, {halves[2 * k + 1]}}}, {word}q{k};")
    return lines + [f"cvt.f32.f16 {o}, {h};" for o, h in zip(out, halves, strict=False)]


def _pack_pairs(dtype: DType, word: str, values: list[str], rectifies: bool) -> list[str]:
    """An instruction takes the pair's second first. One value alone has zeros above it."""
    how = f"cvt.rn.satfinite{'.relu' if rectifies else ''}.{PAIR[dtype]}.f32"
    rows = [values[k : k + 2] for k in range(0, len(values), 2)]
    pairs = [word] if len(rows) == 1 else [f"{word}p{k}" for k in range(len(rows))]
    lines = [f".reg .b16 {', '.join(pairs)};"] if len(rows) > 1 else []
    for pair, row in zip(pairs, rows, strict=True):
        lines.append(f"{how} {pair}, {row[1] if len(row) > 1 else '0f00000000'}, {row[0]};")
    return lines + ([f"mov.b32 {word}, {{{', '.join(pairs)}}};"] if len(rows) > 1 else [])


def _unpack_float8(dtype: DType, word: str, out: list[str]) -> list[str]:
    """One byte after the other, without instructions for it."""
    lines, whole = [], word
    if len(out) < 4:  # a register of 16 bits
        whole = f"{word}w"
        lines += [f".reg .b32 {whole};", f"cvt.u32.u16 {whole}, {word};"]
    for j, o in enumerate(out):
        b, m, h, q = (f"{word}{c}{j}" for c in "bmhq")
        lines += [f".reg .b32 {b}, {m}; .reg .b16 {h}; .reg .pred {q};", f"shl.b32 {b}, {whole}, {24 - 8 * j};"]
        if dtype is DType.E5M2:  # the upper byte of a half
            lines += [f"shr.u32 {b}, {b}, 24;", f"shl.b32 {b}, {b}, 8;", f"cvt.u16.u32 {h}, {b};", f"cvt.f32.f16 {o}, {h};"]
            continue
        # Exponent and fraction lie where a float32 has them, and its bias is larger by 120; only the last one is NaN.
        lines += [f"and.b32 {m}, {b}, 0x7F000000;", f"and.b32 {b}, {b}, 0x80000000;", f"setp.eq.u32 {q}, {m}, 0x7F000000;"]
        lines += [f"shr.u32 {m}, {m}, 4;", f"mul.f32 {m}, {m}, 0f7B800000;", f"selp.b32 {m}, 0x7FFFFFFF, {m}, {q};"]
        lines.append(f"or.b32 {o}, {m}, {b};")
    return lines


def _pack_float8(dtype: DType, word: str, values: list[str]) -> list[str]:
    """One value after the other, without instructions for it, as `ir.storage.to_storage` does."""
    dropped, normal = 24 - dtype.digits, dtype.least_normal
    magic, bias = _bits(normal * dtype.eps * 2.0**23), (_bits(normal) >> dropped) - (1 << dtype.digits - 1)
    lines: list[str] = []
    for j, v in enumerate(values):
        a, b, c, q = (f"{word}{c}{j}" for c in "abcq")
        lines += [
            f".reg .b32 {a}, {b}, {c}; .reg .pred {q};",
            f"abs.f32 {a}, {v};",
            f"min.f32 {a}, {a}, 0f{_bits(dtype.largest):08X};",
        ]
        lines += [f"bfe.u32 {b}, {a}, {dropped}, 1;", f"add.u32 {b}, {b}, {a};", f"add.u32 {b}, {b}, {(1 << dropped - 1) - 1};"]
        lines += [f"shr.u32 {b}, {b}, {dropped};", f"sub.u32 {b}, {b}, {bias};"]
        # Below the least normal number all are as far apart as float32 are at `magic`.
        lines += [
            f"setp.lt.f32 {q}, {a}, 0f{_bits(normal):08X};",
            f"add.f32 {c}, {a}, 0f{magic:08X};",
            f"sub.u32 {c}, {c}, {magic};",
        ]
        lines += [f"selp.b32 {b}, {c}, {b}, {q};", f"mov.b32 {c}, {v};", f"shr.u32 {c}, {c}, 24;", f"and.b32 {c}, {c}, 128;"]
        lines += [f"or.b32 {b}, {b}, {c};", f"setp.nan.f32 {q}, {v}, {v};", f"selp.b32 {b}, 0x7F, {b}, {q};"]
    if len(values) == 1:
        return [*lines, f"cvt.u16.u32 {word}, {word}b0;"]
    whole = f"{word}w" if len(values) == 2 else word  # joined in 32 bits, if the register has 16
    lines += [f".reg .b32 {whole};"] if whole != word else []
    lines.append(f"mov.b32 {whole}, {word}b0;")
    lines += [f"bfi.b32 {whole}, {word}b{j}, {whole}, {8 * j}, 8;" for j in range(1, len(values))]
    return [*lines, f"cvt.u16.u32 {word}, {whole};"] if whole != word else lines


def _bits(value: float) -> int:
    """Those of a float32."""
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found
