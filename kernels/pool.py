"""Max and mean over windows of images and signals, on every generation: a thread computes the channels of one vector.

Windows of up to 16 elements are unrolled, so that all their loads are in flight at once; of larger ones, the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.ops import Op, Pool
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, Parameters, divider, execute, names, split, types_of
from tccompile.kernels.loops import LIMIT, refusal
from tccompile.kernels.spec import I32, LAUNCH_US, Config, Function, Kernel, Launch, Ptr, Work, code, traffic_us

THREADS = 128
UNROLLED = 16
"""Elements of the largest window, or row of a window, whose loop is unrolled."""


class PoolKernel(Kernel):
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
        yield {"lanes": _lanes(op, program)}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Pool)
        taps = math.prod(op.window)
        reads = math.prod(program.op_shape(op)) * taps
        # A tap costs about four instructions a lane; and a thread with a large window waits for each row of it in turn.
        issue = reads * 4 / (arch.fp32_tflops * 1e6 / 2)
        waits = 0.6 * (1 if taps <= UNROLLED else op.window[0] if op.window[-1] <= UNROLLED else taps / 4)
        return LAUNCH_US + max(traffic_us(op, program, arch), issue, waits)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Pool)
        x, lanes = program.tensors[op.x], int(config["lanes"])  # type: ignore[arg-type]
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, lanes)
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
            self.name, kind=op.kind, x=x.dtype.value, vector=_vectors(x, lanes), lanes=lanes, window=unrolled,
            tail=order[-1] == 1 and groups * lanes > (x.padded[1] if lanes > 1 else shape[1]), by_group=by_group, order=order,
            epilogue=spec.params,
        )  # fmt: skip
        args = (Ptr(op.x), *map(I32, numbers), *spec.args)
        return Work((Launch(params, (-(-rows * groups // THREADS), 1, 1), THREADS, args),))

    def build(self, arch: Arch, **params: Any) -> Function:
        from numba.cuda import types

        store, extra = epilogue.build(params.pop("epilogue"))
        text, kinds, accesses = source(**params, extra=len(extra))
        kernel = execute(text, {**names(), **epilogue.memory_functions(accesses), "store": store}, "kernel")
        return Function(kernel, types.void(*types_of(kinds), *extra), THREADS)


def source(
    kind: str,
    x: str,
    vector: bool,
    lanes: int,
    window: tuple[int, int],
    tail: bool,
    by_group: bool,
    order: tuple[int, ...],
    extra: int,
) -> tuple[str, list[str], epilogue.Accesses]:
    """The text of the kernel, the kinds of its parameters before the epilogue's, and the memory functions it calls.

    order  the axes of the rows, outermost first, then that of the lanes
    """
    dtype = DType(x)
    taken, out = Parameters(), Lines()
    base, total = taken.take("address"), taken.take()
    fast, inner = taken.divider(), [taken.divider() for _ in order[1:-1]]
    channels, *steps = (taken.take() for _ in range(5))
    axes = [[taken.take() for _ in range(6)] for _ in range(2)]  # stride, pad, dilation, extent, low, high
    sizes = taken.take(), taken.take()
    parameters = [*(taken.name.format(i) for i in range(len(taken.kinds))), *(f"e{i}" for i in range(extra))]

    slow, quick = split(out, "t", [fast])
    m, group = (slow, quick) if by_group else (quick, slow)
    c = out.let(f"i32({group} * {lanes})")
    coordinates = dict(zip(order, [*split(out, m, inner), c], strict=True))
    n, channel, p, q = (coordinates.get(a, "i32(0)") for a in ((0, 1, 2, 3) if len(order) == 4 else (0, 1, -1, 2)))
    where = out.let(f"{base} + i64({n}) * (i64({steps[0]}) * {dtype.size}) + i64({channel}) * (i64({steps[1]}) * {dtype.size})")
    starts = [out.let(f"i32({at} * {axes[a][0]} - {axes[a][1]})") for a, at in enumerate((p, q))]
    head = list(out.lines)

    guards = [f" & within(i32({c} + {i}), 0, {channels})" if tail else "" for i in range(lanes)]
    elements = [""] if vector else [f" + i64({i}) * (i64({steps[1]}) * {dtype.size})" if i else "" for i in range(lanes)]
    accesses: epilogue.Accesses = {"load": ("load", dtype, lanes if vector else 1, True)}
    acc = [f"s{i}" for i in range(lanes)]
    first = "f32(-inf)" if kind == "max" else "f32(0)"
    step = "maximum({s}, select(inside != 0, {v}, f32(-inf)))" if kind == "max" else "{s} + {v}"

    def tap(r: str, s: str) -> list[str]:
        """Lines that add element (r, s) of the window."""
        lines = [f"h = i32({starts[0]} + {r} * {axes[0][2]})", f"w = i32({starts[1]} + {s} * {axes[1][2]})"]
        lines.append(f"inside = within(h, 0, {axes[0][3]}) & within(w, 0, {axes[1][3]})")
        lines.append(f"at = {where} + i64(h) * (i64({steps[2]}) * {dtype.size}) + i64(w) * (i64({steps[3]}) * {dtype.size})")
        for i, (element, guard) in enumerate(zip(elements, guards, strict=False)):
            lines.append(f"x{i} = load(at{element}, inside{guard})")
        for i, s in enumerate(acc):
            value = f"x0[{i}]" if vector else f"x{i}"
            lines.append(f"{s} = " + step.format(s=s, v=value if dtype.is_float else f"to_float({value})"))
        return lines

    body = [f"{s} = {first}" for s in acc]
    if window[0]:
        for r in range(window[0]):
            for s in range(window[1]):
                body += tap(str(r), str(s))
    else:
        body.append(f"for r in range({sizes[0]}):")
        if window[1]:
            body += [f"    {line}" for s in range(window[1]) for line in tap("r", str(s))]
        else:
            body.append(f"    for s in range({sizes[1]}):")
            body += [f"        {line}" for line in tap("r", "s")]
    if kind == "mean":
        for a in (0, 1):
            body.append(f"count{a} = i32(0)")
            body.append(f"for k in range({sizes[a]}):")
            inside = f"within(i32({starts[a]} + k * {axes[a][2]}), {axes[a][4]}, {axes[a][5]})"
            body.append(f"    count{a} = i32(count{a} + {inside})")
        body.append("count = f32(count0 * count1)")
        body += [f"{s} = {s} / count" for s in acc]
    tuple_of = "(" + "".join(f"{s}, " for s in acc) + ")"
    arguments = "(" + "".join(f"e{i}, " for i in range(extra)) + ")"
    body.append(f"store({tuple_of}, {m}, {c}, {arguments})")
    text = f"def kernel({', '.join(parameters)}):\n    t = i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)\n"
    text += f"    if t < {total}:\n" + "".join(f"        {line}\n" for line in (*head, *body))
    return text, taken.kinds, accesses


def _rows(op: Op, program: Program) -> int:
    lane = epilogue.frame_of(op, program)[-1]
    return math.prod(n for a, n in enumerate(program.op_shape(op)) if a != lane)


def _lanes(op: Op, program: Program) -> int:
    """8 channels a thread where x has them in vectors, else one."""
    assert isinstance(op, Pool)
    return 8 if epilogue.frame_of(op, program)[-1] == 1 and _vectors(program.tensors[op.x], 8) else 1


def _vectors(x: Tensor, lanes: int) -> bool:
    """Whether all groups of lanes of x are aligned vectors of its padded channels."""
    width = min(16, lanes * x.dtype.size)
    others = [s for a, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)) if a != 1 and n > 1]
    aligned = all(n * x.dtype.size % width == 0 for n in (x.offset, *others))
    return lanes > 1 and x.strides[1] == 1 and x.padded[1] % lanes == 0 and aligned


def _image(values: tuple[int, ...], row: int) -> tuple[int, ...]:
    """(N, C, H, W) of a tuple for an image, or for a signal, whose H is `row`."""
    return values if len(values) == 4 else (*values[:2], row, values[2])


def _pair(values: tuple[int, ...], row: int) -> tuple[int, ...]:
    return values if len(values) == 2 else (row, *values)
