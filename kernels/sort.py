"""Where the k largest or smallest elements of each line lie, by sorting, on every generation.

An element is a record of 64 bits: its order, and below it its place, so that no two are equal and the lesser of equal elements
is the first. Blocks sort tiles of a line in shared memory, by a bitonic network. Then launches merge `fan` sorted runs at once:
`fan` neighbouring threads look one record up in the runs of its group, and their sum is its place in the merged run, of which no
more than k records are kept. Nothing depends on timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import Extent, ceil_div, hint
from tccompile.ir.ops import Op, TopK
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, Parameters, split
from tccompile.kernels.lines import THREADS, address, dividers, outermost_first, padding_filled, refusal, take_dividers
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Scratch, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, indented, intrinsic

TILES = (128, 512, 2048)
"""Records that a block sorts: two for each of its threads."""

FANS = (2, 8, 32)
"""Runs that are merged at once."""

PLACES = 31
"""Bits of a record that say where the element lies."""

LAST = 2**63 - 1
"""A record that comes after all others."""

LIMIT = 2**30
"""Elements that a tensor may have, and threads that a launch may."""


class SortKernel(TextKernel):
    """Every TopK of floats, or of integers of up to 32 bits."""

    name = "sort"
    realises = TopK

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, TopK)
        x = program.tensors[op.x]
        if not x.dtype.is_float and x.dtype.size > 4:
            return f"{op.x} is {x.dtype.value}: a record of 64 bits has no room for the place beside it"
        if x.size > LIMIT:
            return f"{op.x} has {x.size} elements; they are counted in 30 bits"
        return refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, TopK)
        n = hint(program.tensors[op.x].shape[op.axis])
        for tile in TILES:
            if n <= tile:
                yield {"tile": tile}
                return
            for fan in FANS:
                if all(p.threads <= LIMIT for p in _passes(op, program, tile, fan)):
                    yield {"tile": tile, "fan": fan}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, TopK)
        x, y, tile, rate = program.tensors[op.x], program.tensors[op.y], config["tile"], measured(arch)
        lines, levels = hint(x.size) // max(hint(x.shape[op.axis]), 1), tile.bit_length() - 1
        resident = min(arch.threads_sm * 2 // tile, 16)
        blocks = lines * ceil_div(x.shape[op.axis], tile)
        together = min(resident, ceil_div(blocks, arch.sms))
        stage = max(measured(arch).order.stage_us, together * tile * measured(arch).order.exchange / (128 * rate.cycles_us))
        total = traffic_us(op, program, arch) + ceil_div(blocks, arch.sms * resident) * levels * (levels + 1) / 2 * stage
        passes = _passes(op, program, tile, config.get("fan", 2))
        for p in passes:  # each step of a search waits for a cache
            waves = max(1.0, hint(p.threads) / (arch.sms * arch.threads_sm))
            total += hint(p.kept).bit_length() * measured(arch).order.search_us * waves
        return total + rate.launch_us * (1 + len(passes) + (y.padded != y.shape))

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, TopK)
        x, y, tile = program.tensors[op.x], program.tensors[op.y], config["tile"]
        first = padding_filled(op, program, const(0, DType.I64), arch)
        if not y.size:
            return Work(first)
        fan = config.get("fan", 2)
        passes = _passes(op, program, tile, fan)
        rows = outermost_first([a for a in range(x.rank) if a != op.axis], x)
        n, k = x.shape[op.axis], y.shape[op.axis]
        tiles, kept = ceil_div(n, tile), min(k, tile)
        size = 8 * (x.size // n) * max((p.runs * p.kept for p in passes), default=0)
        params = {"x": x.dtype.value, "y": y.dtype.value, "rows": len(rows), "largest": op.largest, "tile": tile}
        args: list[Arg] = [I32(n), I32(kept), *dividers([*(x.shape[a] for a in rows), tiles])]
        args += [Ptr(x.name), *(I32(x.strides[a]) for a in (*rows, op.axis)), *_target(y, rows, op.axis, not passes, 0)]
        sort = code(self.name, phase="sort", last=not passes, **params)
        launches = [Launch(sort, (x.size // n * tiles, 1, 1), tile // 2, tuple(args))]
        for i, p in enumerate(passes):
            last = p is passes[-1]
            extents = [*(x.shape[a] for a in rows)] if last else [x.size // n]
            params = {"rows": len(extents), "fan": fan, "y": y.dtype.value}
            args = [*map(I32, (p.threads, n, p.span, p.kept, p.keeps, p.kept.bit_length(), ceil_div(p.runs, fan)))]
            args += [*dividers([1, p.kept]), *dividers([*extents, p.runs]), Scratch(size * (i % 2))]
            args += _target(y, rows, op.axis, last, size * (1 - i % 2))
            merge = code(self.name, phase="merge", last=last, **params)
            launches.append(Launch(merge, (ceil_div(p.threads, THREADS), 1, 1), THREADS, tuple(args)))
        return Work((*first, *launches), scratch=size * min(len(passes), 2))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        phase = params.pop("phase")
        return _sorting(**params) if phase == "sort" else _merging(**params)


class _Pass:
    """A launch that merges runs of each line: how many there are, of how many elements, and how many records each has."""

    def __init__(self, lines: Extent, runs: Extent, span: Extent, k: Extent, fan: int) -> None:
        self.runs, self.span = runs, span
        self.kept, self.keeps = min(span, k), min(span * fan, k)
        self.threads = lines * runs * self.kept * fan


def _passes(op: TopK, program: Program, tile: int, fan: int) -> list[_Pass]:
    x, k = program.tensors[op.x], program.tensors[op.y].shape[op.axis]
    n, out = x.shape[op.axis], []
    span: Extent = tile
    while span < n:
        out.append(_Pass(x.size // n, ceil_div(n, span), span, k, fan))
        span *= fan
    return out


def _target(y: Tensor, rows: list[int], axis: int, last: bool, scratch: Extent) -> list[Arg]:
    """Where a launch writes: y, or the workspace."""
    return [Ptr(y.name), *(I32(y.strides[a]) for a in (*rows, axis))] if last else [Scratch(scratch)]


def _stored(last: bool, y: DType, target: str, row: list[str], steps: list[str], at: str, run: str) -> str:
    """Text that writes `record`: to the workspace at a place of a run, or its place to y."""
    if not last:
        return f"keep({target} + ({run} + i64({at})) * 8, record)"
    terms = "".join(f" + i64({d}) * (i64({s}) * {y.size})" for d, s in zip([*row, at], steps, strict=True))
    return f"put({target}{terms}, record & i64({2**PLACES - 1}))"


def _ordered(dtype: DType, largest: bool) -> list[str]:
    """Text that makes `key`, a number of 33 bits, of `value`: the less, the sooner it comes. Zeros are equal, and so are NaN."""
    lines = ["key = value"]
    if dtype.is_float:
        lines = [
            "bits = select(value == f32(0), i32(0), float_bits(value))",
            "bits = select(bits < i32(0), i32(bits ^ i32(2147483647)), bits)",
            "key = i64(select(isnan(value), i32(2147483647), bits))",
        ]
    return [*lines, "key = i64(-1) - key"] if largest else lines


def _sorting(x: str, y: str, rows: int, largest: bool, tile: int, last: bool) -> KernelText:
    """Block: a tile of a line, numbered by the `rows` other axes; two records a thread."""
    taken, out = Parameters(), Lines()
    given, stored = DType(x), DType(y)
    n, kept = taken.take(), taken.take()
    digits_of = take_dividers(taken, rows + 1)
    base, *steps = taken.take("address"), *(taken.take() for _ in range(rows + 1))
    target, *y_steps = taken.take("address"), *(taken.take() for _ in range((rows + 1) * last))
    *row, part = split(out, out.let("i32(cuda.blockIdx.x)"), digits_of)
    line = address(out, base, row, steps[:-1], given.size)
    lines = [f"shared = cuda.shared.array({tile}, i64)", "thread = i32(cuda.threadIdx.x)", *out.lines]
    for place in ("thread", f"i32(thread + {tile // 2})"):
        read = [f"value = get({line} + i64(at) * (i64({steps[-1]}) * {given.size}))", *_ordered(given, largest)]
        lines += [f"place = {place}", f"at = i32({part} * {tile} + place)", f"record = i64({LAST})", f"if at < {n}:"]
        lines += [*indented(read), f"    record = key * i64({2**PLACES}) + i64(at)", "shared[place] = record"]
    lines += [
        "size = i32(2)",
        f"while size <= {tile}:",
        "    stride, partner = i32(size >> 1), i32(size - 1)",  # the second half of each run turned round
        "    while stride > 0:",
        "        cuda.syncthreads()",
        "        low = i32(2 * thread - (thread & i32(stride - 1)))",
        "        high = i32(low ^ partner)",
        "        a, b = shared[low], shared[high]",
        "        if a > b:",
        "            shared[low] = b",
        "            shared[high] = a",
        "        stride = i32(stride >> 1)",
        "        partner = stride",
        "    size = i32(size << 1)",
        "cuda.syncthreads()",
    ]
    for place in ("thread", f"i32(thread + {tile // 2})"):
        put = _stored(last, stored, target, row, y_steps, "place", f"i64(cuda.blockIdx.x) * i64({kept})")
        lines += [f"place = {place}", f"if place < {kept}:", "    record = i64(shared[place])", f"    {put}"]
    scope: dict[str, Called] = {"get": intrinsic("ptx.memory.load", given)}
    if given.is_float:
        scope["float_bits"] = intrinsic("ptx.memory.float_bits")
    return KernelText(taken.signature, lines, {**scope, **_writes(last, stored)}, tile // 2)


def _writes(last: bool, y: DType) -> dict[str, Called]:
    return {"put": intrinsic("ptx.memory.store", y)} if last else {"keep": intrinsic("ptx.memory.store", DType.I64)}


def _merging(y: str, rows: int, fan: int, last: bool) -> KernelText:
    """`fan` threads for each record of each run, of the lines that the `rows` other axes number."""
    taken, out = Parameters(), Lines()
    stored = DType(y)
    threads, n, span, kept, keeps, steps, groups = (taken.take() for _ in range(7))
    of_records, digits_of = take_dividers(taken, 2), take_dividers(taken, rows + 1)
    source = taken.take("address")
    target, *y_steps = taken.take("address"), *(taken.take() for _ in range((rows + 1) * last))
    thread = out.let(f"i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)")
    at = out.let(f"minimum({thread}, i32({threads} - 1))")
    lane, record = out.let(f"i32({at} & {fan - 1})"), out.let(f"i32({at} >> {int(math.log2(fan))})")
    whole, place = split(out, record, of_records)
    *row, run = split(out, whole, digits_of)
    other = out.let(f"i32({run} - ({run} & {fan - 1}) + {lane})")

    def there(of: str) -> str:
        """How many records of a run there are; none of one beyond the line."""
        return out.let(f"i32(maximum(minimum(i64({n}) - i64({of}) * i64({span}), i64({kept})), i64(0)))")

    own, end = there(run), there(other)
    first = out.let(f"{source} + (i64({whole}) - i64({run}) + i64({other})) * (i64({kept}) * 8)")
    group = f"(i64({row[0] if row else 0}) * i64({groups}) + i64({run} >> {int(math.log2(fan))})) * i64({keeps})"
    put = _stored(last, stored, target, row, y_steps, "position", group)
    lines = [
        *out.lines,
        f"record = get({source} + i64({record}) * 8)",
        f"low, high = i32(0), {end}",
        f"for step in range({steps}):",
        "    middle = i32((low + high) >> 1)",
        f"    found = peek({first} + i64(middle) * 8, i32(low < high))",
        "    before = (low < high) & (found < record)",
        "    high = select(before, high, middle)",
        "    low = select(before, i32(middle + 1), low)",
        "position = low",
    ]
    half = fan // 2
    while half:
        lines.append(f"position = i32(position + shuffle(position, i32({half})))")
        half //= 2
    lines.append(f"if ({thread} < {threads}) & ({lane} == 0) & ({place} < {own}) & (position < {keeps}):")
    scope: dict[str, Called] = {
        "get": intrinsic("ptx.memory.load", DType.I64),
        "peek": intrinsic("ptx.memory.load", DType.I64, 1, True),
        "shuffle": intrinsic("ptx.simt.shuffle_int"),
    }
    return KernelText(taken.signature, [*lines, f"    {put}"], {**scope, **_writes(last, stored)}, THREADS)
