"""Max and mean over windows of images and signals, on every generation: a thread computes the channels of one vector.

Windows of up to 16 elements are unrolled, so that all their loads are in flight at once; of larger ones, the rows are.
Maxima of bytes are those of words, of which each 16 bits are compared at once: see `memory.larger_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, divides
from tccompile.ir.ops import Op, Pool
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, Parameters, divider, split, tuple_of
from tccompile.kernels.loops import LIMIT, refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Work, code, traffic_us
from tccompile.kernels.text import Intrinsic, KernelText, TextKernel, indented, intrinsic

THREADS = 128
UNROLLED = 16
"""Elements of the largest window, or row of a window, whose loop is unrolled."""

STORED = 8
"""Channels of a vector that is stored at once, at most."""

MANY = 16
"""Channels of a thread that compares words: a vector of as many bytes as a load takes."""


class PoolKernel(TextKernel):
    """Pool in any layout; fast where channels lie in aligned vectors of 8."""

    name = "pool"
    realises = Pool

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Pool)
        frame = epilogue.frame_of(op, program)
        threads = _rows(op, program) * epilogue.lane_groups(op, program, frame, _lanes(op, program))
        if threads >= LIMIT - THREADS:
            return f"it takes {threads} threads; they are counted in 31 bits"
        return refusal(op, program, frame)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Pool)
        yield {"lanes": _lanes(op, program)}
        if _by_words(op, program) and _vectors(program.tensors[op.x], MANY):
            yield {"lanes": MANY}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Pool)
        taps = math.prod(op.window)
        reads = math.prod(program.op_shape(op)) * taps
        own = measured(arch).pool
        tap = own.tap_of_many if config["lanes"] == MANY else own.tap_of_bytes if _by_words(op, program) else own.tap
        issue = reads * tap / (arch.fp32_tflops * 1e6 / 2)
        waits = own.wait_us * (1 if taps <= UNROLLED else op.window[0] if op.window[-1] <= UNROLLED else taps / own.at_once)
        return measured(arch).launch_us + max(traffic_us(op, program, arch), issue, waits)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Pool)
        x, lanes = program.tensors[op.x], int(config["lanes"])  # type: ignore[arg-type]
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, min(lanes, STORED))
        groups = epilogue.lane_groups(op, program, frame, lanes)
        shape, rows = program.op_shape(op), _rows(op, program)
        if not math.prod(shape):
            return Work(())
        order = tuple(a for a in frame if a is not None)  # rows, outermost first, then the lanes
        window, strides, dilations = _pair(op.window, 1), _pair(op.strides, 1), _pair(op.dilations, 1)
        pads, ends = _pair(op.pads, 0), _pair(op.end_pads, 0)
        extents, steps = _image(x.shape, 1)[2:], _image(x.strides, 0)
        unrolled = tuple(w if math.prod(window[a:]) <= UNROLLED else 0 for a, w in enumerate(window))
        numbers = [rows * groups]
        by_group = lanes > 1 or x.strides[order[-1]] == 1  # neighbouring threads: neighbouring groups of lanes, else rows
        fast = groups if by_group else rows
        for d in (fast, *(shape[a] for a in order[1:-1])):
            numbers += [d, *divider(d)]
        numbers += [shape[1], *steps]
        for a in (0, 1):
            low, high = (-pads[a], extents[a] + ends[a]) if op.count_pads else (0, extents[a])
            numbers += [strides[a], pads[a], dilations[a], extents[a], low, high]
        numbers += window
        params = code(
            self.name, kind=op.kind, x=x.dtype.value, vector=_vectors(x, lanes), words=_by_words(op, program), lanes=lanes,
            window=unrolled, tail=order[-1] == 1 and groups * lanes > (x.padded[1] if lanes > 1 else shape[1]), by_group=by_group,
            order=order, epilogue=spec.params,
        )  # fmt: skip
        args = (Ptr(op.x), *map(I32, numbers), *spec.args)
        return Work((Launch(params, (ceil_div(rows * groups, THREADS), 1, 1), THREADS, args),))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        stored = epilogue.source(epilogue.Form.decoded(params.pop("epilogue")))
        return _Writer(_Shape(**params), stored).text()


@dataclass(frozen=True)
class _Shape:
    """What the text depends on: a code's parameters, but for the epilogue's.

    kind      "max" or "mean"
    x         the name of x's type
    vector    whether a thread reads its lanes by one access, not each by its own
    words     whether it compares the bytes of words
    lanes     channels that a thread computes
    window    extents of the window along H and W; 0 for an axis that a loop goes along
    tail      whether the last group of lanes has some that x does not have
    by_group  whether neighbouring threads compute neighbouring groups of lanes of a row, not the same group of neighbouring rows
    order     the axes of the rows, outermost first, then that of the lanes
    """

    kind: str
    x: str
    vector: bool
    words: bool
    lanes: int
    window: tuple[int, int]
    tail: bool
    by_group: bool
    order: tuple[int, ...]


class _Writer:
    """Writes the kernel's text, and takes the launch's arguments in the order in which `work` gives them.

    axes    for H and W the names of stride, padding, dilation, extent, and of the first and the last place that counts for a mean
    sizes   the names of the window's extents
    starts  the names of the places where the window begins
    where   the address of the channels at H = W = 0
    """

    def __init__(self, shape: _Shape, stored: epilogue.Source) -> None:
        self.shape, self.stored, self.x = shape, stored, DType(shape.x)
        self.taken, self.out = Parameters(), Lines()
        self.acc = [f"s{i}" for i in range(shape.lanes)]
        self.count = shape.lanes // 4  # words

    def text(self) -> KernelText:
        shape, taken, out = self.shape, self.taken, self.out
        base, total = taken.take("address"), taken.take()
        fast, inner = taken.divider(), [taken.divider() for _ in shape.order[1:-1]]
        self.channels, *self.steps = (taken.take() for _ in range(5))
        self.axes = [[taken.take() for _ in range(6)] for _ in range(2)]
        self.sizes = taken.take(), taken.take()
        slow, quick = split(out, "t", [fast])
        m, group = (slow, quick) if shape.by_group else (quick, slow)
        self.c = out.let(f"i32({group} * {shape.lanes})")
        self._place(base, dict(zip(shape.order, [*split(out, m, inner), self.c], strict=True)))
        body = [
            *out.lines,
            *self._window(),
            *(self._mean() if shape.kind == "mean" else []),
            *(self._largest() if shape.words else []),
        ]
        for first in range(0, shape.lanes, STORED):
            c = f"i32({self.c} + {first})" if first else self.c
            body.append(f"store(({''.join(f'{s}, ' for s in self.acc[first : first + STORED])}), {m}, {c}, e)")
        lines = [f"t = i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)", f"if t < {total}:", *indented(body)]
        scope = {"load": self._load(), "store": self.stored.function}
        if shape.words:
            scope |= {name: intrinsic(f"ptx.memory.{name}", self.x) for name in ("larger_bytes", "largest_bytes")}
        return KernelText({**taken.signature, "e": self.stored.kinds}, lines, scope, THREADS)

    def _load(self) -> Intrinsic:
        shape = self.shape
        if shape.words:
            return intrinsic("ptx.memory.load_words", self.count, "global", 0 if self.x is DType.U8 else 0x80808080)
        return intrinsic(
            f"ptx.memory.{'load' if self.x.is_float else 'load_floats'}", self.x, shape.lanes if shape.vector else 1, True
        )

    def _place(self, base: str, coordinates: dict[int, str]) -> None:
        """Where the window of the result with these coordinates begins."""
        out, steps, size = self.out, self.steps, self.x.size
        axes = (0, 1, 2, 3) if len(self.shape.order) == 4 else (0, 1, -1, 2)
        n, channel, p, q = (coordinates.get(a, "i32(0)") for a in axes)
        self.where = out.let(f"{base} + i64({n}) * (i64({steps[0]}) * {size}) + i64({channel}) * (i64({steps[1]}) * {size})")
        self.starts = [out.let(f"i32({at} * {self.axes[a][0]} - {self.axes[a][1]})") for a, at in enumerate((p, q))]

    def _window(self) -> list[str]:
        """The maximum or the sum of the window's elements."""
        window = self.shape.window
        first = "f32(-inf)" if self.shape.kind == "max" else "f32(0)"
        body = [f"{s} = {first}" for s in self.acc]
        if self.shape.words:
            body = [f"{self._words('h')} = load({self.where}, i32(0))", *(f"l{k} = h{k}" for k in range(self.count))]
        if window[0]:
            return body + [line for r in range(window[0]) for s in range(window[1]) for line in self._tap(str(r), str(s))]
        body.append(f"for r in range({self.sizes[0]}):")
        if window[1]:
            return body + indented([line for s in range(window[1]) for line in self._tap("r", str(s))])
        return [*body, f"    for s in range({self.sizes[1]}):", *indented(self._tap("r", "s"), 2)]

    def _tap(self, r: str, s: str) -> list[str]:
        """Adds element (r, s) of the window."""
        shape, axes, steps, size = self.shape, self.axes, self.steps, self.x.size
        step = "maximum({s}, select(inside != 0, {v}, f32(-inf)))" if shape.kind == "max" else "{s} + {v}"
        lines = [f"h = i32({self.starts[0]} + {r} * {axes[0][2]})", f"w = i32({self.starts[1]} + {s} * {axes[1][2]})"]
        lines.append(f"inside = within(h, 0, {axes[0][3]}) & within(w, 0, {axes[1][3]})")
        lines.append(f"at = {self.where} + i64(h) * (i64({steps[2]}) * {size}) + i64(w) * (i64({steps[3]}) * {size})")
        if shape.words:
            lines.append(f"{self._words('x')} = load(at, inside)")
            return lines + [f"h{k}, l{k} = larger_bytes(h{k}, l{k}, x{k})" for k in range(self.count)]
        for i in range(1 if shape.vector else shape.lanes):
            element = f" + i64({i}) * (i64({steps[1]}) * {size})" if i else ""
            guard = f" & within(i32({self.c} + {i}), 0, {self.channels})" if shape.tail else ""
            lines.append(f"x{i} = load(at{element}, inside{guard})")
        for i, acc in enumerate(self.acc):
            value = f"x0[{i}]" if shape.vector else f"x{i}"
            lines.append(f"{acc} = " + step.format(s=acc, v=value))
        return lines

    def _words(self, name: str) -> str:
        return tuple_of([f"{name}{k}" for k in range(self.count)])

    def _largest(self) -> list[str]:
        """The largest bytes as float32."""
        fours = (self.acc[4 * k : 4 * k + 4] for k in range(self.count))
        return [f"{', '.join(four)} = largest_bytes(h{k}, l{k})" for k, four in enumerate(fours)]

    def _mean(self) -> list[str]:
        """Divides the sums by the number of elements that count."""
        body = []
        for a in (0, 1):
            start, (_, _, dilation, _, low, high) = self.starts[a], self.axes[a]
            body.append(f"count{a} = i32(0)")
            body.append(f"for k in range({self.sizes[a]}):")
            body.append(f"    count{a} = i32(count{a} + within(i32({start} + k * {dilation}), {low}, {high}))")
        return [*body, "count = f32(count0 * count1)", *(f"{s} = {s} / count" for s in self.acc)]


def _rows(op: Op, program: Program) -> int:
    lane = epilogue.frame_of(op, program)[-1]
    return math.prod(n for a, n in enumerate(program.op_shape(op)) if a != lane)


def _lanes(op: Op, program: Program) -> int:
    """8 channels a thread where x has them in vectors, else one."""
    assert isinstance(op, Pool)
    return 8 if epilogue.frame_of(op, program)[-1] == 1 and _vectors(program.tensors[op.x], 8) else 1


def _by_words(op: Pool, program: Program) -> bool:
    """Whether bytes are compared word by word: where each window has an element of x, and so a maximum that is a byte."""
    x, lanes = program.tensors[op.x], _lanes(op, program)
    if op.kind != "max" or x.dtype not in (DType.I8, DType.U8) or not _vectors(x, lanes):
        return False
    shape = program.op_shape(op)[2:]
    axes = zip(op.window, op.strides, op.pads, op.dilations, x.shape[2:], shape, strict=True)
    return all(d == 1 and p < w and (n - 1) * s - p < extent for w, s, p, d, extent, n in axes)


def _vectors(x: Tensor, lanes: int) -> bool:
    """Whether all groups of lanes of x are aligned vectors of its padded channels."""
    width = min(16, lanes * x.dtype.size)
    others = [s for a, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)) if a != 1 and n > 1]
    aligned = all(divides(width, n * x.dtype.size) for n in (x.offset, *others))
    return lanes > 1 and x.strides[1] == 1 and divides(lanes, x.padded[1]) and aligned


def _image(values: tuple[int, ...], row: int) -> tuple[int, ...]:
    """(N, C, H, W) of a tuple for an image, or for a signal, whose H is `row`."""
    return values if len(values) == 4 else (*values[:2], row, values[2])


def _pair(values: tuple[int, ...], row: int) -> tuple[int, ...]:
    return values if len(values) == 2 else (row, *values)
