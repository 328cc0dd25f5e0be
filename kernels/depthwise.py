"""Depthwise convolution of channels-last images: each thread computes 8 channels of some neighbouring pixels of a row.

A depthwise convolution does few operations a byte, so it is a matter of bandwidth (a large batch) or of latency (a batch of
one): the input is read in 16-byte vectors, and a thread reads what its pixels share once.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import device, entry, is_vector_type, refusal, vectors
from tccompile.kernels.spec import I32, LAUNCH_US, Config, Function, Kernel, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.program import Conv, Op, Program, Tensor

LANES = 8
THREADS = 128


class Depthwise(Kernel):
    """Conv with as many groups as input and output channels, NHWC or NWC, in fp16 or fp32."""

    name = "depthwise"
    realises = Conv

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        x, w = program.tensors[op.x], program.tensors[op.w]
        if not op.groups == x.shape[1] == w.shape[0]:
            return "it is no depthwise convolution: groups, input channels and output channels differ"
        if not (is_vector_type(x) and is_vector_type(w)):
            return f"its input is {x.dtype.value} and its weights {w.dtype.value}; both must be float16 or float32"
        if not vectors(x, 1, LANES):
            return "its input's channels do not lie in aligned vectors of 8"
        if not vectors(w, 0, LANES):
            return "its weights' channels do not lie in aligned vectors of 8"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield from ({"pixels": pixels} for pixels in (1, 2, 4))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        pixels = config["pixels"]
        n, c, p, q = _image(program.op_shape(op))
        r, s = _filter(program.tensors[op.w])
        threads = n * p * -(-q // pixels) * -(-c // LANES)
        shared = _unrolled(op, program) is not None
        columns = (pixels - 1) * op.strides[-1] + s if shared else pixels * s  # input vectors that a thread reads per filter row
        # Instructions: a vector costs about 12 to address, load and convert; a multiply-add one a lane.
        instructions = r * (12 * (columns + s) + LANES * pixels * s) + 60 + 20 * pixels
        issue = threads * instructions / (arch.fp32_tflops * 1e6 / 5)  # measured: 5 slots of a multiply-add each
        latency = 0.4 + 0.0014 * instructions  # measured where one wave of blocks does all
        moved = traffic_us(op, program, arch)
        longest = max(moved, issue, latency)
        return LAUNCH_US + longest + 0.1 * (moved + issue + latency - longest)  # they do not overlap wholly

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        pixels = config["pixels"]
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, LANES)
        n, _, p, q = _image(program.op_shape(op))
        _, _, height, width = _image(x.shape)
        xn, xh, xw = _image_strides(x)
        r, s = _filter(w)
        wr, ws = (w.strides[2] if w.rank == 4 else 0), w.strides[-1]
        groups = -(-max(y.padded[1], program.op_shape(op)[1]) // LANES)
        tiles = -(-q // pixels)
        sh, sw = _pair(op.strides, 1)
        ph, pw = _pair(op.pads, 0)
        dh, dw = _pair(op.dilations, 1)
        total = n * p * tiles * groups
        unrolled = _unrolled(op, program) or (0, 0)
        numbers = (
            total,
            groups,
            tiles,
            p,
            q,
            height,
            width,
            xn,
            xh,
            xw,
            wr,
            ws,
            r,
            s,
            sh,
            sw,
            ph,
            pw,
            dh,
            dw,
            min(x.padded[1], w.padded[0]),
        )
        launch = Launch(
            code(
                "depthwise",
                x=x.dtype.value,
                w=w.dtype.value,
                pixels=pixels,
                size=unrolled[0],
                stride=unrolled[1],
                epilogue=spec.params,
            ),
            grid=(-(-total // THREADS), 1, 1),
            block=THREADS,
            args=(Ptr(op.x), Ptr(op.w), *map(I32, numbers), *spec.args),
        )
        return Work((launch,))

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba.cuda import types

        from tccompile.kernels.ptx.memory import load

        x, w = DType(params["x"]), DType(params["w"])
        store, extra = epilogue.build(params["epilogue"])
        read_x = load(x, LANES, guarded=True, space="global.nc")
        read_w = load(w, LANES, guarded=True, space="global.nc")
        lines = _body(params["pixels"], params["size"], params["stride"], x.size, w.size)
        body = device("depthwise", PARAMS, lines, store=store, read_x=read_x, read_w=read_w)
        fixed = (types.int64,) * 2 + (types.int32,) * (PARAMS.count(",") - 2)
        return Function(entry(body, len(fixed), len(extra)), types.void(*fixed, *extra), THREADS)


PARAMS = "x, w, total, groups, tiles, P, Q, H, W, xn, xh, xw, wr, ws, R, S, sh, sw, ph, pw, dh, dw, padded, e"


def _unrolled(op: Conv, program: Program) -> tuple[int, int] | None:
    """Filter size and stride along W, if there is unrolled code for them that shares what neighbouring pixels read."""
    r, s = _filter(program.tensors[op.w])
    common = s in (3, 5, 7) and r in (1, s) and op.strides[-1] in (1, 2) and op.dilations[-1] == 1
    return (s, op.strides[-1]) if common else None


def _pair(spatial: tuple[int, ...], default: int) -> tuple[int, int]:
    """(along H, along W), of one or two numbers."""
    return (default, *spatial)[-2:]  # type: ignore[return-value]


def _image(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(N, C, H, W) of a shape of rank 3 or 4."""
    return (*shape[:2], *_pair(shape[2:], 1))  # type: ignore[return-value]


def _image_strides(t: Tensor) -> tuple[int, int, int]:
    """Strides of N, H and W, in elements."""
    return (t.strides[0], *_pair(t.strides[2:], 0))


def _filter(w: Tensor) -> tuple[int, int]:
    return _pair(w.shape[2:], 1)


def _body(pixels: int, size: int, stride: int, x_bytes: int, w_bytes: int) -> list[str]:
    """The kernel's source. With `size` the S loop is unrolled, and the pixels share the columns that they read.

    x: (N, H, W, C), w: (R, S, C); thread: 8 channels from c of pixels (n, p, q0 … q0 + pixels - 1).
    """
    lanes = range(LANES)
    acc = [[f"a{i}_{k}" for k in lanes] for i in range(pixels)]
    weight = lambda s: ", ".join(f"w{s}_{k}" for k in lanes)  # noqa: E731
    column = ", ".join(f"v{k}" for k in lanes)
    lines = [
        "t = i32(cuda.blockIdx.x) * i32(cuda.blockDim.x) + i32(cuda.threadIdx.x)",
        "if t >= total:",
        "    return",
        "pixel = t // groups",
        "c = (t - pixel * groups) * i32(8)",
        "row = pixel // tiles",
        f"q0 = (pixel - row * tiles) * i32({pixels})",
        "n = row // P",
        "p = row - n * P",
        "inside = c < padded",  # y may be padded further than x and w
        f"base = x + (i64(n) * i64(xn) + i64(c)) * i64({x_bytes})",
        f"filters = w + i64(c) * i64({w_bytes})",
        "h0 = p * sh - ph",
        "x0 = q0 * sw - pw",
        *(f"{a} = f32(0.0)" for row in acc for a in row),
        "for r in range(R):",
        "    h = h0 + r * dh",
        "    present = inside and h >= 0 and h < H",
        f"    line = base + i64(h) * i64(xh) * i64({x_bytes})",
        f"    taps = filters + i64(r) * i64(wr) * i64({w_bytes})",
    ]

    def read(at: str, indent: str) -> list[str]:
        address = f"line + i64(j) * i64(xw) * i64({x_bytes})"
        return [f"{indent}j = {at}", f"{indent}{column} = read_x({address}, i32(present and j >= 0 and j < W))"]

    def multiply(i: int, s: int | str, indent: str) -> list[str]:
        return [f"{indent}{acc[i][k]} += v{k} * w{s}_{k}" for k in lanes]

    if size:
        for s in range(size):
            address = f"taps + i64({s}) * i64(ws) * i64({w_bytes})"
            lines.append(f"    {weight(s)} = read_w({address}, i32(inside))")
        for j in range((pixels - 1) * stride + size):
            lines += read(f"x0 + i32({j})", "    ")
            for i in range(pixels):
                if 0 <= j - i * stride < size:
                    lines += multiply(i, j - i * stride, "    ")
    else:
        lines += [
            "    for s in range(S):",
            f"        {weight(0)} = read_w(taps + i64(s) * i64(ws) * i64({w_bytes}), i32(inside))",
        ]
        for i in range(pixels):
            lines += read(f"x0 + s * dw + i32({i}) * sw", "        ")
            lines += multiply(i, 0, "        ")
    lines.append("m = row * Q + q0")
    for i in range(pixels):
        lines += [f"if q0 + i32({i}) < Q:", f"    store(({', '.join(acc[i])}), m + i32({i}), c, e)"]
    return lines
