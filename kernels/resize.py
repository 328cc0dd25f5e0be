"""Resampling by tables of indices and weights, along any axes and in any layout, on every generation.

A thread computes the lanes of one vector along y's innermost axis (one lane where x cannot be read so): the sum over the
taps of all resampled axes, each tap's weight the product of the axes' weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.ops import Op, Resize
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, Parameters, divider, execute, names, split, types_of
from tccompile.kernels.loops import LIMIT, refusal
from tccompile.kernels.spec import I32, LAUNCH_US, Arg, Config, Function, Kernel, Launch, Ptr, Work, code, traffic_us

THREADS = 128
UNROLLED = 16
"""Products of taps up to which the sum is unrolled."""


class ResizeKernel(Kernel):
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
        issue = reads * 4 / (arch.fp32_tflops * 1e6 / 2)
        return LAUNCH_US + max(traffic_us(op, program, arch), issue)

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
        return Work((Launch(params, (-(-total // THREADS), 1, 1), THREADS, (*args, *spec.args)),))

    def build(self, arch: Arch, **params: Any) -> Function:
        from numba.cuda import types

        store, extra = epilogue.build(params.pop("epilogue"))
        text, kinds, accesses = source(**params, extra=len(extra))
        kernel = execute(text, {**names(), **epilogue.memory_functions(accesses), "store": store}, "kernel")
        return Function(kernel, types.void(*types_of(kinds), *extra), THREADS)


def source(
    x: str, rank: int, axes: tuple[int, ...], lanes: int, taps: tuple[int, ...], vector: bool, extra: int
) -> tuple[str, list[str], epilogue.Accesses]:
    """The text of the kernel, the kinds of its parameters before the epilogue's, and the memory functions it calls.

    axes  the resampled ones, as places in the order of the rows and then the lanes; taps, of each, all 0 for loops
    """
    dtype = DType(x)
    size = dtype.size
    taken, out = Parameters(), Lines()
    base, total, group = taken.take("address"), taken.take(), taken.divider()
    inner = [taken.divider() for _ in range(rank - 2)]
    steps = [taken.take() for _ in range(rank)]
    last_lane = taken.take()
    tables = [[taken.take("address"), taken.take("address"), *(taken.take() for _ in range(5))] for _ in axes]
    parameters = [*(taken.name.format(i) for i in range(len(taken.kinds))), *(f"e{i}" for i in range(extra))]
    accesses: epilogue.Accesses = {
        "load": ("load", dtype, lanes if vector else 1, False),
        "load_index": ("load", DType.I32, 1, False),
        "load_weight": ("load", DType.F32, 1, False),
    }

    m, g = split(out, "t", [group])
    c = out.let(f"i32({g} * {lanes})")
    digits = split(out, m, inner) if rank > 1 else []
    # Groups in y's padding read what the last group reads: their values are not stored.
    coordinates = [*digits, out.let(f"minimum({c}, {last_lane})")]
    fixed = [f" + i64({at}) * (i64({steps[d]}) * {size})" for d, at in enumerate(coordinates) if d not in axes]
    where = out.let(base + "".join(fixed))
    entries = []  # of each axis: the addresses of the output element's rows in its two tables
    for d, (index, weights, i_row, _, w_row, _, _) in zip(axes, tables, strict=True):
        at = coordinates[d]
        entries.append(
            (out.let(f"{index} + i64({at}) * (i64({i_row}) * 4)"), out.let(f"{weights} + i64({at}) * (i64({w_row}) * 4)"))
        )
    acc = [f"s{i}" for i in range(lanes)]
    body = [*out.lines, *(f"{s} = f32(0)" for s in acc)]

    def tap(k: int, t: str) -> list[str]:
        """Lines that bring in tap t of axis k."""
        before = (where, None) if k == 0 else (f"at{k - 1}", f"w{k - 1}")
        _, _, _, i_step, _, w_step, _ = tables[k]
        index = f"load_index({entries[k][0]} + i64({t}) * (i64({i_step}) * 4))"
        lines = [
            f"at{k} = {before[0]} + {index} * (i64({steps[axes[k]]}) * {size})",
            f"w{k} = load_weight({entries[k][1]} + i64({t}) * (i64({w_step}) * 4))",
        ]
        return [*lines, f"w{k} = w{k} * {before[1]}"] if before[1] else lines

    def last() -> list[str]:
        k = len(axes) - 1
        lines = [f"x = load(at{k})"]
        return lines + [f"{s} = {s} + w{k} * x{f'[{i}]' if lanes > 1 else ''}" for i, s in enumerate(acc)]

    if all(taps):
        body += _nested(taps, 0, tap, last)
    else:
        indent = ""
        for k in range(len(axes)):
            body.append(f"{indent}for t{k} in range({tables[k][6]}):")
            indent += "    "
            body += [indent + line for line in tap(k, f"t{k}")]
        body += [indent + line for line in last()]
    results = "(" + "".join(f"{s}, " for s in acc) + ")"
    arguments = "(" + "".join(f"e{i}, " for i in range(extra)) + ")"
    body.append(f"store({results}, {m}, {c}, {arguments})")
    text = f"def kernel({', '.join(parameters)}):\n    t = i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)\n"
    text += f"    if t < {total}:\n" + "".join(f"        {line}\n" for line in body)
    return text, taken.kinds, accesses


def _nested(taps: tuple[int, ...], k: int, tap: Any, last: Any) -> list[str]:
    """The unrolled loops over the taps of axis k and those after it."""
    if k == len(taps):
        return last()
    return [line for t in range(taps[k]) for line in (*tap(k, str(t)), *_nested(taps, k + 1, tap, last))]


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
    aligned = all(n * x.dtype.size % width == 0 for n in (x.offset, *others))
    return x.strides[axis] == 1 and x.padded[axis] % lanes == 0 and aligned
