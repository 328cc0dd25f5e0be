"""Loads and stores of one to eight neighbouring elements of any storage type, converted from and to the compute types.

`load(dtype, n)` is a device function address → value (n = 1) or tuple of n values; `store(dtype, n)` one of (address,
values…). Values are float32 for the float types and int64 for the others (bool: 0 or 1); `load_floats` gives bytes as float32.
Each is one block of inline PTX with accesses as wide as n elements allow, 16 bytes at most; the address must be a multiple of
the width. `guarded` adds a last int32 parameter: if it is 0, nothing is accessed (a load then gives zeros).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.ptx.core import f32, i32, instruction, of_tuples, types, u32, u64, void

i64 = types.int64

SPACES = ("global", "global.nc", "global.cg", "global.cs", "shared")
"""State spaces: an address in shared memory is 32 bits, one in global memory 64. cg: what other blocks write, from L2; cs: what
nobody asks for soon, the first to be given up by the caches."""


@cache
def load(dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    """The device function that reads n elements of `dtype`."""
    value = f32 if dtype.is_float else i64
    address = f"${n}"
    body, chunks = [], _chunks(dtype.size, n)
    for at, width, word in chunks:
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
            body += unpack(dtype, name, [f"${first + j}" for j in range(per_word)])
    params = (_address(space), i32) if guarded else (_address(space),)
    return instruction(_block(body, f"${n + 1}" if guarded else ""), value if n == 1 else (value,) * n, *params)


@cache
def load_floats(dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    """The same of integers of 8 bits as float32: a byte below 2^23's digits is one plus that, by two instructions."""
    address, body = f"${n}", [".reg .b32 t; .reg .f32 u;"]
    for at, width, word in _chunks(1, n):
        names = [f"w{at}_{k}" for k in range(width // word)]
        vector, target = _braces(names)
        body.append(f".reg .b{8 * max(word, 2)} {', '.join(names)};")
        if guarded:
            body += [f"mov.b{8 * max(word, 2)} {name}, 0;" for name in names]
        kind = f"b{8 * word}" if word > 1 else "u8"
        body.append(f"{'@p ' if guarded else ''}ld.{space}{vector}.{kind} {target}, [{address}+{at}];")
        for k, name in enumerate(names):
            body += _bytes_to_floats(dtype, name, word, [f"${at + k * word + j}" for j in range(word)])
    params = (_address(space), i32) if guarded else (_address(space),)
    return instruction(_block(body, f"${n + 1}" if guarded else ""), f32 if n == 1 else (f32,) * n, *params)


def _bytes_to_floats(dtype: DType, word: str, size: int, out: list[str]) -> list[str]:
    """Convert the `size` bytes of a register; signed ones by way of what they are more than -128."""
    lines, signed = [], dtype is DType.I8
    if size < 4:
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


store_word = instruction("st.shared.b32 [$0], $1;", void, u32, u32)


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
def load_words(words: int, space: str = "global") -> Any:
    """The device function (address, inside) → tuple of 1, 2, 4 or 8 words as they lie in memory, for `floats` when needed."""
    body = []
    for at in range(0, words, 4):
        names = [f"${k}" for k in range(at, min(words, at + 4))]
        vector, target = _braces(names)
        body += [f"mov.b32 {name}, 0;" for name in names]
        body.append(f"@p ld.{space}{vector}.b32 {target}, [${words}+{4 * at}];")
    return instruction(_block(body, f"${words + 1}"), (u32,) * words, _address(space), i32)


@cache
def floats(dtype: DType, n: int) -> Any:
    """The device function (words…) → tuple of n float32, of a float type of 2 or 4 bytes."""
    words = n * dtype.size // 4
    per_word = n // words
    body = []
    for k in range(words):
        body += [f".reg .b32 w{k};", f"mov.b32 w{k}, ${n + k};"]
        body += unpack(dtype, f"w{k}", [f"${k * per_word + j}" for j in range(per_word)])
    return instruction(_block(body, ""), (f32,) * n, *(u32,) * words, pure=True)


@cache
def anew(words: int) -> Any:
    """The device function (words…, zero) → the same words, if zero is 0, of which the compiler does not know that they are."""
    changed = " ".join(f"xor.b32 ${i}, ${words + i}, ${2 * words};" for i in range(words))
    return instruction(changed, (u32,) * words, *(u32,) * words, i32, pure=True)


@cache
def deviations(dtype: DType, n: int) -> Any:
    """The device function (sums, origins, words) → sums: n of deviations of the elements in words, then n of their squares."""
    values = n * dtype.size // 4
    body = [".reg .f32 d;"]
    for i, d in _unpacked(dtype, n, 5 * n, body):
        body += [f"sub.f32 d, {d}, ${4 * n + i};", f"add.f32 ${i}, ${2 * n + i}, d;", f"fma.rn.f32 ${n + i}, d, d, ${3 * n + i};"]
    return of_tuples(_block(body, ""), (f32, 2 * n), (f32, 2 * n), (f32, n), (u32, values))


@cache
def scaled(dtype: DType, n: int) -> Any:
    """The device function (words, means, scales) → the n elements in words, less their means, times their scales."""
    values = n * dtype.size // 4
    body = [".reg .f32 d;"]
    for i, d in _unpacked(dtype, n, n, body):
        body += [f"sub.f32 d, {d}, ${n + values + i};", f"mul.f32 ${i}, d, ${2 * n + values + i};"]
    return of_tuples(_block(body, ""), (f32, n), (u32, values), (f32, n), (f32, n))


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
def store(dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    """The device function that writes n elements of `dtype`. Integers keep their low bits: saturate them before."""
    value = f32 if dtype.is_float else i64
    body = []
    for at, width, word in _chunks(dtype.size, n):
        names = [f"w{at}_{k}" for k in range(width // word)]
        vector, source = _braces(names)
        body.append(f".reg .b{8 * max(word, 2)} {', '.join(names)};")
        per_word = word // dtype.size
        for k, name in enumerate(names):
            first = at // dtype.size + k * per_word
            body += pack(dtype, name, [f"${1 + first + j}" for j in range(per_word)])
        kind = f"b{8 * word}" if word > 1 else "u8"
        body.append(f"{'@p ' if guarded else ''}st.{space}{vector}.{kind} [$0+{at}], {source};")
    params = (_address(space), *(value,) * n, *((i32,) if guarded else ()))
    return instruction(_block(body, f"${n + 1}" if guarded else ""), void, *params)


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


def pack(dtype: DType, word: str, values: list[str]) -> list[str]:
    """Convert compute values to storage and join them in the register `word`."""
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
