"""Resampling by tables of indices and weights, along any axes and in any layout, on every generation.

A thread computes the lanes of one vector along y's innermost axis (one lane where x cannot be read so): the sum over the
taps of all resampled axes, each tap's weight the product of the axes' weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, divides
from tccompile.ir.ops import Op, Resize
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, Parameters, divider, split
from tccompile.kernels.loops import LIMIT, refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, indented, intrinsic

THREADS = 128
UNROLLED = 16
"""Products of taps up to which the sum is unrolled."""


class ResizeKernel(TextKernel):
    """Resize of any number of axes."""

    name = "resize"
    realises = Resize

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Resize)
        if not program.tensors[op.x].dtype.is_float:
            return f"its input is {program.tensors[op.x].dtype.value}, and it reads floats"
        frame = epilogue.frame_of(op, program)
        threads = _rows(op, program) * epilogue.lane_groups(op, program, frame, _lanes(op, program))
        if threads >= LIMIT - THREADS:
            return f"it takes {threads} threads; they are counted in 31 bits"
        return refusal(op, program, frame)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {"lanes": _lanes(op, program)}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Resize)
        reads = math.prod(program.op_shape(op)) * math.prod(_taps(op, program))
        issue = reads * measured(arch).pool.tap / (arch.fp32_tflops * 1e6 / 2)
        return measured(arch).launch_us + max(traffic_us(op, program, arch), issue)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Resize)
        x, lanes, shape = program.tensors[op.x], int(config["lanes"]), program.op_shape(op)  # type: ignore[arg-type]
        if not math.prod(shape):
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, lanes)
        groups = epilogue.lane_groups(op, program, frame, lanes)
        total = _rows(op, program) * groups
        order = [a for a in frame if a is not None]  # rows, outermost first, then the lanes
        numbers = [total, groups, *divider(groups)]
        for axis in order[1:-1]:
            numbers += [shape[axis], *divider(shape[axis])]
        numbers += [x.strides[a] for a in order] + [(shape[order[-1]] - 1) // lanes * lanes]
        args: list[Arg] = [Ptr(op.x), *map(I32, numbers)]
        for index, weights in zip(op.index, op.weights, strict=True):
            i, w = program.tensors[index], program.tensors[weights]
            args += [Ptr(index), Ptr(weights), *map(I32, (*i.strides, *w.strides, i.shape[1]))]
        taps = _taps(op, program)
        params = code(
            self.name, x=x.dtype.value, rank=len(shape), axes=tuple(order.index(a) for a in op.axes), lanes=lanes,
            taps=taps if math.prod(taps) <= UNROLLED else (0,) * len(taps), vector=lanes > 1, epilogue=spec.params,
        )  # fmt: skip
        return Work((Launch(params, (ceil_div(total, THREADS), 1, 1), THREADS, (*args, *spec.args)),))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        stored = epilogue.source(epilogue.Form.decoded(params.pop("epilogue")))
        return _Writer(_Shape(**params), stored).text()


@dataclass(frozen=True)
class _Shape:
    """What the text depends on: a code's parameters, but for the epilogue's.

    x       the name of x's type
    rank    of the result
    axes    the resampled axes, as places in the order of the rows and then the lanes
    lanes   elements of the result that a thread computes
    taps    of each of those axes; all 0 where loops go along them
    vector  whether a thread reads its lanes by one access
    """

    x: str
    rank: int
    axes: tuple[int, ...]
    lanes: int
    taps: tuple[int, ...]
    vector: bool


class _Writer:
    """Writes the kernel's text, and takes the launch's arguments in the order in which `work` gives them.

    steps    the names of x's strides, in the order of the rows and then the lanes
    tables   for each resampled axis the names of: the addresses of its indices and weights; strides of the indices, by element of
             the result and by tap, and those of the weights; and taps
    entries  for each resampled axis the addresses of what its tables have for the thread's element
    where    the address in x of the element at index 0 along the resampled axes
    """

    def __init__(self, shape: _Shape, stored: epilogue.Source) -> None:
        self.shape, self.stored, self.x = shape, stored, DType(shape.x)
        self.taken, self.out = Parameters(), Lines()
        self.acc = [f"s{i}" for i in range(shape.lanes)]

    def text(self) -> KernelText:
        shape, taken, out = self.shape, self.taken, self.out
        base, total, group = taken.take("address"), taken.take(), taken.divider()
        inner = [taken.divider() for _ in range(shape.rank - 2)]
        self.steps = [taken.take() for _ in range(shape.rank)]
        last_lane = taken.take()
        self.tables = [[taken.take("address"), taken.take("address"), *(taken.take() for _ in range(5))] for _ in shape.axes]
        m, g = split(out, "t", [group])
        c = out.let(f"i32({g} * {shape.lanes})")
        digits = split(out, m, inner) if shape.rank > 1 else []
        # Groups in y's padding read what the last group reads: their values are not stored.
        self._place(base, [*digits, out.let(f"minimum({c}, {last_lane})")])
        body = [*out.lines, *(f"{s} = f32(0)" for s in self.acc), *(self._unrolled(0) if all(shape.taps) else self._looped())]
        body.append(f"store(({''.join(f'{s}, ' for s in self.acc)}), {m}, {c}, e)")
        lines = [f"t = i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)", f"if t < {total}:", *indented(body)]
        scope = {
            "load": intrinsic("ptx.memory.load", self.x, shape.lanes if shape.vector else 1),
            "load_index": intrinsic("ptx.memory.load", DType.I32),
            "load_weight": intrinsic("ptx.memory.load", DType.F32),
            "store": self.stored.function,
        }
        return KernelText({**taken.signature, "e": self.stored.kinds}, lines, scope, THREADS)

    def _place(self, base: str, coordinates: list[str]) -> None:
        out, size = self.out, self.x.size
        fixed = [
            f" + i64({at}) * (i64({self.steps[d]}) * {size})" for d, at in enumerate(coordinates) if d not in self.shape.axes
        ]
        self.where = out.let(base + "".join(fixed))
        self.entries = []
        for d, (index, weights, i_row, _, w_row, _, _) in zip(self.shape.axes, self.tables, strict=True):
            at = coordinates[d]
            i = out.let(f"{index} + i64({at}) * (i64({i_row}) * 4)")
            self.entries.append((i, out.let(f"{weights} + i64({at}) * (i64({w_row}) * 4)")))

    def _tap(self, k: int, t: str) -> list[str]:
        """The address and the weight with tap t of axis k, from those with the taps of the axes before it."""
        before = f"at{k - 1}" if k else self.where
        (indices, weights), (_, _, _, i_step, _, w_step, _) = self.entries[k], self.tables[k]
        index = f"load_index({indices} + i64({t}) * (i64({i_step}) * 4))"
        lines = [
            f"at{k} = {before} + {index} * (i64({self.steps[self.shape.axes[k]]}) * {self.x.size})",
            f"w{k} = load_weight({weights} + i64({t}) * (i64({w_step}) * 4))",
        ]
        return [*lines, f"w{k} = w{k} * w{k - 1}"] if k else lines

    def _sum(self) -> list[str]:
        """Adds the elements at the address, times the weight, once the taps of all axes are in them."""
        k = len(self.shape.axes) - 1
        lanes = [f"[{i}]" if self.shape.lanes > 1 else "" for i in range(self.shape.lanes)]
        return [f"x = load(at{k})", *(f"{s} = {s} + w{k} * x{lane}" for s, lane in zip(self.acc, lanes, strict=True))]

    def _unrolled(self, k: int) -> list[str]:
        """The taps of axis k and of those after it, one by one."""
        taps = self.shape.taps
        if k == len(taps):
            return self._sum()
        return [line for t in range(taps[k]) for line in (*self._tap(k, str(t)), *self._unrolled(k + 1))]

    def _looped(self) -> list[str]:
        lines = self._sum()
        for k in reversed(range(len(self.shape.axes))):
            lines = [f"for t{k} in range({self.tables[k][6]}):", *indented([*self._tap(k, f"t{k}"), *lines])]
        return lines


def _rows(op: Op, program: Program) -> int:
    shape = program.op_shape(op)
    lane = epilogue.frame_of(op, program)[-1]
    return math.prod(n for a, n in enumerate(shape) if a != lane)


def _taps(op: Resize, program: Program) -> tuple[int, ...]:
    return tuple(program.tensors[name].shape[1] for name in op.index)


def _lanes(op: Op, program: Program) -> int:
    """8 where the axis of the lanes is not resampled and x has it in aligned vectors, else one."""
    assert isinstance(op, Resize)
    lane = epilogue.frame_of(op, program)[-1]
    return 8 if lane not in op.axes and _vectors(program.tensors[op.x], lane, 8) else 1  # type: ignore[arg-type]


def _vectors(x: Tensor, axis: int, lanes: int) -> bool:
    width = min(16, lanes * x.dtype.size)
    others = [s for a, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)) if a != axis and n > 1]
    aligned = all(divides(width, n * x.dtype.size) for n in (x.offset, *others))
    return x.strides[axis] == 1 and divides(lanes, x.padded[axis]) and aligned
