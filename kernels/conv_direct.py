"""Grouped convolution by CUDA cores, of any group size, layout and alignment: each thread computes channels × pixels.

The channels of a thread belong to one group, so they share what it reads of the input; the pixels share the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import BYTES
from tccompile.kernels.loops import refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters

THREADS = 128


class ConvDirect(TextKernel):
    """Every Conv of floats, or of bytes by floats or each by its own int8, whose output can be stored in rows of channels."""

    name = "conv_direct"
    realises = Conv

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        x, w = (program.tensors[name] for name in op.operands)
        own_filters = w.shape[1] == 1 and x.dtype in BYTES and w.dtype is DType.I8
        for t in (x, w):
            if not (t.dtype.is_float or (t is x and t.dtype in BYTES) or own_filters):
                return f"{t.name} is {t.dtype.value}, which is no float type"
        if own_filters and epilogue.describe(op, program, epilogue.frame_of(op, program)).form.taken is not DType.F32:
            return "its sums are stored as integers"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield from ({"pixels": pixels} for pixels in (1, 4))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        w = program.tensors[op.w]
        lanes, vector = _lanes(op, program), _vector(op, program)
        pixels = config["pixels"]
        threads = _rows(op, program) / pixels * ceil_div(w.shape[0], lanes)
        taps = w.size / w.shape[0] / vector
        own = measured(arch).conv_direct
        load = own.vector_float8 if program.tensors[op.x].dtype in FLOAT8 else own.vector
        instructions = taps * (load * (pixels + lanes) + pixels * lanes * vector) + own.setup
        issue = threads * instructions / (arch.fp32_tflops * 1e6 / own.slots)
        latency = taps * (own.tap_us + own.more_us * pixels * lanes * vector)
        return measured(arch).launch_us + max(traffic_us(op, program, arch), issue, latency)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        rows, lanes, vector, pixels = _rows(op, program), _lanes(op, program), _vector(op, program), config["pixels"]
        if 0 in y.padded:
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, lanes)
        shape = program.op_shape(op)
        q = shape[-1]
        p = shape[2] if len(shape) == 4 else 1
        groups = epilogue.lane_groups(op, program, frame, lanes)
        across = min(1 << (groups - 1).bit_length(), 8)  # lane groups of a block; its other threads take other pixels
        height, width = _pair(x.shape[2:], 1)
        r, s = _pair(w.shape[2:], 1)
        numbers = (
            *(across, rows, w.shape[0], w.shape[0] // op.groups, w.shape[1]),
            *(p, *divider(p), q, *divider(q), height, width, r, s),
            *(x.strides[0], x.strides[1], *_pair(x.strides[2:], 0)),
            *(w.strides[0], w.strides[1], *_pair(w.strides[2:], 0)),
            *_pair(op.strides, 1),
            *_pair(op.pads, 0),
            *_pair(op.dilations, 1),
        )
        tile = THREADS // across * pixels
        launch = Launch(
            code(self.name, x=x.dtype.value, w=w.dtype.value, lanes=lanes, vector=vector, pixels=pixels, epilogue=spec.params),
            grid=(ceil_div(rows, tile), ceil_div(groups, across), 1),
            block=THREADS,
            args=(Ptr(op.x), Ptr(op.w), *map(I32, numbers), *spec.args),
        )
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        x, w, vector = DType(params["x"]), DType(params["w"]), params["vector"]
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
        scope = {
            "store": stored.function,
            "read_x": intrinsic("ptx.memory.load" if x.is_float else "ptx.memory.load_floats", x, vector, True, "global.nc"),
            "read_w": intrinsic("ptx.memory.load" if w.is_float else "ptx.memory.load_floats", w, vector, False, "global.nc"),
        }
        signature = {**parameters("address", "x, w"), **parameters("int", f"{SIZES}, {STEPS}"), "e": stored.kinds}
        return KernelText(signature, _body(params["lanes"], vector, params["pixels"], x.size, w.size), scope, THREADS)


SIZES = "across, rows, O, outputs, inputs, P, P1, P2, Q, Q1, Q2, H, W, R, S"
STEPS = "xn, xc, xh, xw, wo, wc, wr, ws, sh, sw, ph, pw, dh, dw"


def _pair(spatial: tuple[int, ...], default: int) -> tuple[int, int]:
    """(along H, along W), of one or two numbers."""
    return (default, *spatial)[-2:]  # type: ignore[return-value]


def _rows(op: Conv, program: Program) -> int:
    shape = program.op_shape(op)
    return shape[0] * shape[-1] * (shape[2] if len(shape) == 4 else 1)


def _lanes(op: Conv, program: Program) -> int:
    """Channels of a thread: all of one group."""
    outputs = program.tensors[op.w].shape[0] // op.groups
    return next(n for n in (8, 4, 2, 1) if outputs % n == 0)


def _vector(op: Conv, program: Program) -> int:
    """Input channels that are read at once: neighbours in x and in w, all of one group, at aligned addresses."""
    x, w = program.tensors[op.x], program.tensors[op.w]
    inputs = w.shape[1]
    for n in (8, 4, 2):
        if inputs % n == 0 and x.strides[1] == 1 and w.strides[1] == 1 and _aligned(x, n) and _aligned(w, n):
            return n
    return 1


def _aligned(t: Tensor, n: int) -> bool:
    return all(s % n == 0 for s in (t.offset, *(t.strides[a] for a in range(t.rank) if a != 1 and t.shape[a] > 1)))


def _body(lanes: int, vector: int, pixels: int, x_bytes: int, w_bytes: int) -> list[str]:
    """Thread: channels c … c + lanes - 1 of rows m, m + step, … (neighbouring threads take neighbouring rows)."""
    lines = [
        "tid = i32(cuda.threadIdx.x)",
        "slot = tid // across",
        f"step = i32({THREADS}) // across",
        f"m0 = i32(cuda.blockIdx.x) * step * i32({pixels}) + slot",
        f"c = (i32(cuda.blockIdx.y) * across + tid - slot * across) * i32({lanes})",
        "inside = c < O",  # else they are padding
        "group = c // outputs",
        f"filters = w + i64(c) * i64(wo) * i64({w_bytes})",
        f"next_x, next_w = i64(xc) * i64({vector * x_bytes}), i64(wc) * i64({vector * w_bytes})",
        f"images = x + i64(group) * i64(inputs) * i64(xc) * i64({x_bytes})",
    ]
    for i in range(pixels):
        lines += [
            f"m{i} = m0 + i32({i}) * step",
            f"row{i} = i32(divide(m{i}, Q1, Q2))",
            f"n{i} = i32(divide(row{i}, P1, P2))",
            f"h{i} = (row{i} - n{i} * P) * sh - ph",
            f"w{i} = (m{i} - row{i} * Q) * sw - pw",
            f"base{i} = images + i64(n{i}) * i64(xn) * i64({x_bytes})",
            *(f"a{i}_{k} = f32(0)" for k in range(lanes)),
        ]
    lines += ["if inside:", "    for r in range(R):", "        for s in range(S):"]
    deep = []
    for i in range(pixels):
        deep += [
            f"y{i}, x{i} = h{i} + i32(r) * dh, w{i} + i32(s) * dw",
            f"ok{i} = i32(m{i} < rows and y{i} >= 0 and y{i} < H and x{i} >= 0 and x{i} < W)",
            f"at{i} = base{i} + (i64(y{i}) * i64(xh) + i64(x{i}) * i64(xw)) * i64({x_bytes})",
        ]
    deep += [f"taps = filters + (i64(r) * i64(wr) + i64(s) * i64(ws)) * i64({w_bytes})", "ci = i32(0)", "while ci < inputs:"]
    for i in range(pixels):
        names = ", ".join(f"v{i}_{j}" for j in range(vector))
        deep.append(f"    {names} = read_x(at{i}, ok{i})")
        deep.append(f"    at{i} += next_x")
    for k in range(lanes):
        names = ", ".join(f"f{j}" for j in range(vector))
        deep.append(f"    {names} = read_w(taps + i64(wo) * i64({k * w_bytes}))")
        deep += [f"    a{i}_{k} += v{i}_{j} * f{j}" for j in range(vector) for i in range(pixels)]
    deep += ["    taps += next_w", f"    ci += i32({vector})"]
    lines += [f"            {line}" for line in deep]
    for i in range(pixels):
        results = ", ".join(f"a{i}_{k}" for k in range(lanes))
        lines += [f"if m{i} < rows:", f"    store(({results},), m{i}, c, e)"]
    return lines
