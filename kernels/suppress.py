"""The greedy part of NonMaxSuppression, on every generation: a block for each class of each image.

A block takes 64 boxes at a time, the best first, four threads for each. They compare it with the boxes that are kept so far,
which lie in the workspace, and with those before it in the tile, as 64 bits. One thread goes through these bits. The block ends
when as many boxes are kept as are asked for, or where scores fall to `least`: what a frame takes depends on what is seen in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import Extent, ceil_div, hint
from tccompile.ir.ops import Op, Suppress
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.lines import THREADS, filled, refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Arg, Config, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import DeviceText, KernelText, TextKernel, indented, intrinsic, parameters

TILE = 64
"""Boxes that are decided at once."""

LANES = THREADS // TILE
"""Threads for each of them."""

BITS = TILE // LANES
"""Boxes of the tile that a thread compares with its own: bits of a word."""

SEEN = 0.1
"""Of the boxes that have a score above `least`, as the estimate takes it: of most frames it is fewer."""


class SuppressKernel(TextKernel):
    """Every Suppress."""

    name = "suppress"
    realises = Suppress

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Suppress)
        if not all(program.tensors[name].dtype.is_float for name in (op.boxes, op.scores)):
            return "its boxes or scores are no floats"
        return refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Suppress)
        n, classes, boxes = map(hint, program.tensors[op.y].shape)
        tiles = ceil_div(int(boxes * (1.0 if op.least is None else SEEN)), TILE)
        kept = min(op.most, tiles * TILE // 4)
        waves = max(1.0, n * classes * THREADS / (arch.sms * arch.threads_sm))
        compared = (kept / 2 / LANES + BITS) * 0.02  # µs: some 30 instructions, one waiting for the other
        return 2 * measured(arch).launch_us + traffic_us(op, program, arch) + waves * tiles * (compared + 2.0)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Suppress)
        y = program.tensors[op.y]
        first = filled(op, program, const(False, DType.BOOL), (), arch) if y.padded != y.shape else ()
        if not y.size:
            return Work(first)
        images, classes, count = y.shape
        room = min(op.most, count)
        inputs = [program.tensors[name] for name in (op.boxes, op.scores, op.order)]
        args: list[Arg] = [Ptr(t.name) for t in inputs]
        args += [Ptr(y.name), Scratch(), *map(I32, (classes, count, room))]
        args += [I32(s) for t in (*inputs, y) for s in t.strides]
        args += [F32(op.iou), F32(0.0 if op.least is None else op.least)]
        params: dict[str, Value] = {name: t.dtype.value for name, t in zip(("boxes", "scores", "order"), inputs, strict=True)}
        params |= {"y": y.dtype.value, "above": op.least is not None, "centred": op.centred}
        grid: tuple[Extent, Extent, Extent] = (images * classes, 1, 1)
        launch = Launch(code(self.name, **params), grid, THREADS, tuple(args))
        return Work((*first, launch), scratch=16 * images * classes * room)

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _text(**params)


STRIDES = "boxes_n, boxes_i, boxes_k, scores_n, scores_c, scores_i, order_n, order_c, order_i, y_n, y_c, y_i"


def _overlap() -> DeviceText:
    """The device function of two boxes and a limit → 1 if they have more than that of their union in common, and else 0.

    Products are rounded before they are added up, as on a CPU.
    """
    lines = [
        "wide = minimum(c0, c1) - maximum(a0, a1)",
        "high = minimum(d0, d1) - maximum(b0, b1)",
        "common = product(wide, high)",
        "first = product(c0 - a0, d0 - b0)",
        "second = product(c1 - a1, d1 - b1)",
        "union = first + second - common",
        "sound = (wide > f32(0)) & (high > f32(0)) & (common > f32(0)) & (first > f32(0)) & (second > f32(0)) & (union > f32(0))",
        "share = common / select(sound, union, f32(1))",
        "return select(sound & (share > limit), i32(1), i32(0))",
    ]
    scope = {"product": intrinsic("ptx.simt.product")}
    return DeviceText("overlap", "a0, b0, c0, d0, a1, b1, c1, d1, limit", lines, scope)


def _box(boxes: DType, centred: bool) -> list[str]:
    """Text that reads the box `which`: its least coordinates a and b, and its greatest c and d."""
    lines = [f"place = boxes + i64(image) * (i64(boxes_n) * {boxes.size}) + i64(which) * (i64(boxes_i) * {boxes.size})"]
    lines += [f"v{k} = coordinate(place + {k} * (i64(boxes_k) * {boxes.size}))" for k in range(4)]
    if centred:
        return [*lines, "wide, high = v2 / f32(2), v3 / f32(2)", "a, b, c, d = v0 - wide, v1 - high, v0 + wide, v1 + high"]
    return [*lines, "a, b, c, d = minimum(v0, v2), minimum(v1, v3), maximum(v0, v2), maximum(v1, v3)"]


def _text(boxes: str, scores: str, order: str, y: str, above: bool, centred: bool) -> KernelText:
    """Block: class blockIdx.x % classes of image blockIdx.x / classes."""
    types = {name: DType(value) for name, value in (("boxes", boxes), ("scores", scores), ("order", order), ("y", y))}
    line = {
        name: f"{name} + i64(image) * (i64({name}_n) * {types[name].size}) + i64(part) * (i64({name}_c) * {types[name].size})"
        for name in ("scores", "order", "y")
    }
    each = {name: f"(i64({name}_i) * {types[name].size})" for name in line}
    candidate = "inside & (score > least)" if above else "inside"
    beyond = "score <= least" if above else "boolean(0)"
    lines = [
        f"corner = cuda.shared.array({4 * TILE}, f32)",
        f"found = cuda.shared.array({(LANES + 2) * TILE + 2}, i32)",  # bits, whether it may be kept, its place, how many, go on
        "t, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
        "image = i32(block // classes)",
        "part = i32(block - image * classes)",
        f"i, lane = i32(t // {LANES}), i32(t % {LANES})",
        *(f"{name}_line = {text}" for name, text in line.items()),
        "list = kept + i64(block) * (i64(room) * 16)",
        "first, many, going = i32(0), i32(0), i32(1)",
        "while (first < count) & (going != 0):",
        *indented(_tile(types["boxes"], each, centred, candidate, beyond)),
        "at = i32(first + t)",
        "while at < count:",
        f"    put(y_line + i64(at) * {each['y']}, i64(0))",
        f"    at = i32(at + {THREADS})",
    ]
    scope = {
        "coordinate": intrinsic("ptx.memory.load", types["boxes"]),
        "score_at": intrinsic("ptx.memory.load", types["scores"], 1, True),
        "box_at": intrinsic("ptx.memory.load", types["order"], 1, True),
        "put": intrinsic("ptx.memory.store", types["y"]),
        "keep": intrinsic("ptx.memory.store", DType.F32, 4),
        "read": intrinsic("ptx.memory.load", DType.F32, 4, True),
        "shuffle": intrinsic("ptx.simt.shuffle_int"),
        "overlap": _overlap(),
    }
    signature = {
        **parameters("address", "boxes, scores, order, y, kept"),
        **parameters("int", f"classes, count, room, {STRIDES}"),
        **parameters("float", "limit, least"),
    }
    return KernelText(signature, lines, scope, THREADS)


def _tile(boxes: DType, each: dict[str, str], centred: bool, candidate: str, beyond: str) -> list[str]:
    """Text that decides about 64 boxes from `first` on."""
    may, place = LANES * TILE, (LANES + 1) * TILE
    state = (LANES + 2) * TILE
    return [
        "at = i32(first + i)",
        "inside = at < count",
        f"score = score_at(scores_line + i64(at) * {each['scores']}, i32(inside))",
        f"which = box_at(order_line + i64(at) * {each['order']}, i32(inside))",
        "which = maximum(minimum(which, i64(count) - 1), i64(0))",
        *_box(boxes, centred),
        "if lane == 0:",
        *(f"    corner[{k * TILE} + i] = {name}" for k, name in enumerate("abcd")),
        "hit, k = i32(0), i32(0)",
        "while k < many:",
        "    other = i32(k + lane)",
        "    e, f, g, h = read(list + i64(other) * 16, i32(other < many))",
        "    hit = i32(hit | overlap(e, f, g, h, a, b, c, d, limit))",
        f"    k = i32(k + {LANES})",
        *(f"hit = i32(hit | shuffle(hit, i32({1 << n})))" for n in range(LANES.bit_length() - 1)),
        "cuda.syncthreads()",
        "bits = i32(0)",
        f"for step in range({BITS}):",
        f"    j = i32(lane * {BITS} + step)",
        f"    e, f, g, h = corner[j], corner[{TILE} + j], corner[{2 * TILE} + j], corner[{3 * TILE} + j]",
        "    over = overlap(e, f, g, h, a, b, c, d, limit)",
        "    bits = i32(bits | (select(j < i, over, i32(0)) << i32(step)))",
        f"found[i * {LANES} + lane] = bits",
        "if lane == 0:",
        f"    found[{may} + i] = select(({candidate}) & (hit == 0), i32(1), i32(0))",
        f"if t == {THREADS - 1}:",
        f"    found[{state + 1}] = select(inside & (({beyond}) == boolean(0)), i32(1), i32(0))",
        "cuda.syncthreads()",
        "if t == 0:",
        *(f"    taken{n} = i32(0)" for n in range(LANES)),
        *(line for n in range(LANES) for line in indented(_decided(n, may, place))),
        f"    found[{state}] = many",
        "cuda.syncthreads()",
        f"many = i32(found[{state}])",
        f"going = select(many < room, i32(found[{state + 1}]), i32(0))",
        f"place_of = i32(found[{place} + i])",
        "if (lane == 0) & inside:",
        f"    put(y_line + i64(at) * {each['y']}, select(place_of >= 0, i64(1), i64(0)))",
        "    if place_of >= 0:",
        "        keep(list + i64(place_of) * 16, a, b, c, d)",
        f"first = i32(first + {TILE})",
        "cuda.syncthreads()",
    ]


def _decided(word: int, may: int, place: int) -> list[str]:
    """Text that goes through the boxes of one word: a box is kept if none before it is that covers it."""
    covered = " | ".join(f"(found[j * {LANES} + {n}] & taken{n})" for n in range(LANES))
    return [
        f"for step in range({BITS}):",
        f"    j = i32({word * BITS} + step)",
        f"    fits = (found[{may} + j] != 0) & (({covered}) == 0) & (many < room)",
        f"    found[{place} + j] = select(fits, many, i32(-1))",
        f"    taken{word} = i32(taken{word} | (select(fits, i32(1), i32(0)) << i32(step)))",
        "    many = i32(many + select(fits, i32(1), i32(0)))",
    ]
