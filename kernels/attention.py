"""Attention in plain float32 arithmetic: any float type, head size, layout and mask, on every generation.

A block computes 32 rows of one head, and up to 128 columns of its result. It walks k and v 32 rows at a time and keeps, for
each row, the highest score so far, the sum of the exponentials over it, and the weighted sum of v's rows ("online softmax",
Milakov and Gimelshein, 2018): when a higher score comes, both sums are scaled down.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Arg, Config, Launch, Ptr, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, intrinsic, parameters

ROWS = 32
"""Rows of q, of k, and elements of a head that are in shared memory at once."""

COLUMNS = 128
"""Columns of the result that a block computes."""

LANES, THREADS, PITCH = 4, 256, ROWS + 1


class AttentionKernel(TextKernel):
    """Every Attention of floats."""

    name = "attention"
    realises = Attention

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Attention)
        for name in (op.q, op.k, op.v):
            if not program.tensors[name].dtype.is_float:
                return f"{name} is {program.tensors[name].dtype.value}, which is no float type"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Attention)
        shape, n = program.op_shape(op), program.tensors[op.k].shape[2]
        depth = program.tensors[op.q].shape[3] * ceil_div(shape[3], COLUMNS) + shape[3]
        flops = 2.0 * prod(shape[:3]) * n * depth
        own = measured(arch).attention
        steps = ceil_div(n, ROWS) * (ceil_div(program.tensors[op.q].shape[3], ROWS) + ceil_div(min(shape[3], COLUMNS), ROWS))
        return (
            measured(arch).launch_us
            + traffic_us(op, program, arch)
            + max(own.step_us * steps, flops / (arch.fp32_tflops * 1e6 * own.rate))
        )

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Attention)
        heads, rows, _ = op_extents(op, program)
        y = program.tensors[op.y]
        if 0 in y.padded:
            return Work(())
        stored = epilogue.describe(op, program, epilogue.frame_of(op, program), LANES)
        kinds = tuple(program.tensors[n].dtype.value for n in (op.q, op.k, op.v))
        mask = "none" if op.mask is None else program.tensors[op.mask].dtype.value
        tiles = ceil_div(rows, ROWS)
        launch = Launch(
            code(self.name, types=kinds, mask=mask, causal=op.causal is not None, epilogue=stored.params),
            (tiles * heads, ceil_div(y.padded[3], COLUMNS), 1),
            THREADS,
            (*arguments(op, program, tiles), *stored.args),
        )
        return Work((launch,))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        stored = epilogue.source(epilogue.Form.decoded(params.pop("epilogue")))
        return _text(stored=stored, **params)


def op_extents(op: Attention, program: Program) -> tuple[int, int, int]:
    """(heads of all batches, rows of q, rows of k)"""
    b, h, m, _ = program.op_shape(op)
    return b * h, m, program.tensors[op.k].shape[2]


def arguments(op: Attention, program: Program, tiles: int) -> tuple[Arg, ...]:
    """What the kernels of Attention take ahead of the epilogue's: addresses, the integers of INTEGERS, strides, and the scale.

    Strides (batch, head, row, element) are in elements, those of a mask 0 along axes that it does not have.
    """
    q, k, v = (program.tensors[n] for n in (op.q, op.k, op.v))
    pointers = [Ptr(op.q), Ptr(op.k), Ptr(op.v)]
    strides = [*q.strides, *k.strides, *v.strides]
    if op.mask is not None:
        mask = program.tensors[op.mask]
        pointers.append(Ptr(op.mask))
        strides += [s if n > 1 else 0 for n, s in zip(mask.shape, mask.strides, strict=True)]
    integers = (tiles, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], op.causal or 0)
    return (*pointers, *map(I32, integers), *map(I32, strides), F32(op.scale))


INTEGERS = ("tiles", "heads", "share", "M", "N", "D", "E", "ahead")
"""Tiles of a head's rows, heads of a batch, how many share a head of k, extents, and how far ahead a causal row sees."""


def _text(types: Any, mask: str, causal: bool, stored: epilogue.Source) -> KernelText:
    """The kernel for q, k and v of these types, and a mask of this one, or "none"."""
    scope: dict[str, Called] = {
        f"read_{name}": intrinsic("ptx.memory.load", DType(kind), 1, True) for name, kind in zip("qkv", types, strict=True)
    }
    scope["store"] = stored.function
    tensors = ["q", "k", "v", *(["mask"] if mask != "none" else [])]
    if mask != "none":
        scope["read_mask"] = intrinsic("ptx.memory.load", DType(mask), 1, True)
    strides = [f"{t}_{axis}" for t in tensors for axis in ("b", "h", "r", "e")]
    signature = {
        **parameters("address", ", ".join(tensors)),
        **parameters("int", ", ".join([*INTEGERS, *strides])),
        "scale": "float",
        "e": stored.kinds,
    }
    sizes = {name: DType(kind).size for name, kind in zip("qkv", types, strict=True)}
    step = [*_scores(mask, sizes), *_weights(), *_values(sizes), f"n = n + i32({ROWS})"]
    lines = [*_beginning(mask, causal, sizes), "n = i32(0)", "while n < last:", *(f"    {line}" for line in step), *_results()]
    return KernelText(signature, lines, scope, THREADS)


FOUR = range(LANES)
"""What a thread has of each 32×32 elements: scores of every eighth column, neighbouring columns of the result."""

PARTS = range(COLUMNS // ROWS)
"""Of the result's columns, so many at a time."""

AT = {name: i * ROWS * PITCH for i, name in enumerate("qksv")}
"""Where q, k, the scores or their weights, and v begin in shared memory."""


def _beginning(mask: str, causal: bool, sizes: dict[str, int]) -> list[str]:
    """A block's place, a thread's row, r of the block's, and the columns c + 8j or 4c + j that it has there."""
    lines = [
        "tid, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
        f"shared = cuda.shared.array({4 * ROWS * PITCH}, f32)",
        "head = block // tiles",
        f"m0 = (block - head * tiles) * {ROWS}",
        "b = head // heads",
        "h = head - b * heads",
        "g = h // share",
        "r, c = tid >> 3, tid & 7",
        "m = m0 + r",
        f"first = i32(cuda.blockIdx.y) * {COLUMNS}",
    ]
    for t, head in (("q", "h"), ("k", "g"), ("v", "g")):
        lines.append(f"{t}_at = {t} + (i64(b) * i64({t}_b) + i64({head}) * i64({t}_h)) * {sizes[t]}")
    if mask != "none":
        at = "i64(b) * i64(mask_b) + i64(h) * i64(mask_h) + i64(m) * i64(mask_r)"
        lines.append(f"mask_at = mask + ({at}) * {DType(mask).size}")
    return [
        *lines,
        f"end = {'min(N, m + ahead + 1)' if causal else 'N'}",  # what this row sees
        f"last = {f'min(N, min(M, m0 + {ROWS}) + ahead)' if causal else 'N'}",  # what any row of the block sees
        "highest, total = f32(-inf), f32(0)",
        *(f"y{i} = f32(0)" for i in range(len(PARTS) * LANES)),
    ]


def _fetch(name: str, size: int, row: str, rows: str, column: str, columns: str) -> list[str]:
    """32×32 elements into shared memory, four a thread."""
    return [
        f"row, column = {row} + r, {column} + c * i32(4)",
        f"at, step = {name}_at + i64(row) * (i64({name}_r) * {size}), i64({name}_e) * {size}",
        *(f"ok{i} = i32(row < {rows} and column + {i} < {columns})" for i in FOUR),
        *(f"shared[{AT[name] + i} + r * {PITCH} + c * 4] = read_{name}(at + i64(column + {i}) * step, ok{i})" for i in FOUR),
    ]


def _scores(mask: str, sizes: dict[str, int]) -> list[str]:
    """Scores of 32 rows of k, with the mask, in registers and in shared memory; -inf for what a row does not see."""
    scores, seen = [f"s{j} * scale" for j in FOUR], [f"n{j} < end" for j in FOUR]
    masked: list[str] = []
    if mask != "none":
        size = DType(mask).size
        masked += [f"k{j} = read_mask(mask_at + i64(n{j}) * (i64(mask_e) * {size}), i32(n{j} < N and m < M))" for j in FOUR]
        if mask == "bool":
            seen = [f"n{j} < end and k{j} != i64(0)" for j in FOUR]
        else:
            scores = [f"s{j} * scale + k{j}" for j in FOUR]
    return [
        *(f"s{j} = f32(0)" for j in FOUR),
        "d = i32(0)",
        "while d < D:",
        *(f"    {line}" for line in _fetch("q", sizes["q"], "m0", "M", "d", "D")),
        *(f"    {line}" for line in _fetch("k", sizes["k"], "n", "N", "d", "D")),
        "    cuda.syncthreads()",
        "    i = i32(0)",
        f"    while i < {ROWS}:",
        f"        x = shared[{AT['q']} + r * {PITCH} + i]",
        *(f"        s{j} = s{j} + x * shared[{AT['k']} + (c + {8 * j}) * {PITCH} + i]" for j in FOUR),
        "        i = i + i32(1)",
        "    cuda.syncthreads()",
        f"    d = d + i32({ROWS})",
        *(f"n{j} = n + c + i32({8 * j})" for j in FOUR),
        *masked,
        *(f"s{j} = select({seen[j]}, {scores[j]}, f32(-inf))" for j in FOUR),
        *(f"shared[{AT['s']} + r * {PITCH} + c + {8 * j}] = s{j}" for j in FOUR),
        "cuda.syncthreads()",
    ]


def _weights() -> list[str]:
    """Weights in the place of scores, and their sum; earlier sums scaled down to the highest score."""
    return [
        "before, i = highest, i32(0)",
        f"while i < {ROWS}:",
        f"    highest = maximum(highest, shared[{AT['s']} + r * {PITCH} + i])",
        "    i = i + i32(1)",
        "base = select(highest == f32(-inf), f32(0), highest)",
        "shrink = exp(before - base)",
        "cuda.syncthreads()",
        *(f"shared[{AT['s']} + r * {PITCH} + c + {8 * j}] = exp(s{j} - base)" for j in FOUR),
        "total = total * shrink",
        *(f"y{i} = y{i} * shrink" for i in range(len(PARTS) * LANES)),
        "cuda.syncthreads()",
        "i = i32(0)",
        f"while i < {ROWS}:",
        f"    total = total + shared[{AT['s']} + r * {PITCH} + i]",
        "    i = i + i32(1)",
    ]


def _values(sizes: dict[str, int]) -> list[str]:
    """Weights times rows of v, 32 columns at a time."""
    lines = []
    for part in PARTS:
        lines += [
            f"if first + {part * ROWS} < E:",
            *(f"    {line}" for line in _fetch("v", sizes["v"], "n", "N", f"first + i32({part * ROWS})", "E")),
            "    cuda.syncthreads()",
            "    i = i32(0)",
            f"    while i < {ROWS}:",
            f"        x = shared[{AT['s']} + r * {PITCH} + i]",
            *(
                f"        y{LANES * part + j} = y{LANES * part + j} + x * shared[{AT['v']} + i * {PITCH} + c * 4 + {j}]"
                for j in FOUR
            ),
            "        i = i + i32(1)",
            "    cuda.syncthreads()",
        ]
    return lines


def _results() -> list[str]:
    lines = ["inverse = f32(1) / select(total == f32(0), f32(1), total)", "if m < M:"]
    for part in PARTS:
        values = ", ".join(f"y{LANES * part + j} * inverse" for j in FOUR)
        lines.append(f"    store(({values}), i32(head * M + m), i32(first + i32({part * ROWS}) + c * i32(4)), e)")
    return lines
