"""Normalization of channels-last images whose pixels are split between blocks: statistics first, then every element.

Each thread follows the mean and the sum of squared deviations of 8 channels (Welford, 1962); threads, blocks and the channels of
a group are merged pairwise (Chan, Golub and LeVeque, 1979), so that nothing cancels however far the mean is from zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

from tccompile.arch import Arch, Feature
from tccompile.ir.extent import ceil_div, greatest, least
from tccompile.ir.ops import Norm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import Loops, is_vector_type, loops, power, refusal, unravel, unravel_args, vectors
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, KernelText, TextKernel, indented, intrinsic, parameters

LANES = 8
THREADS = 256
RECORD = 2 * LANES * 4
"""Bytes of the means and the squared deviations (or scales) of a vector of channels."""


class NormSplit(TextKernel):
    """Norm over all pixels of (N, C, …) images with channels innermost, for each channel or group of channels."""

    name = "norm_split"
    realises = Norm

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Norm)
        groups = groups_of(op)
        if groups and (whole := lcm(program.tensors[op.x].shape[1] // groups, LANES)) > THREADS * LANES:
            return f"whole groups in whole vectors are {whole} channels, more channels than a block merges, {THREADS * LANES}"
        return refusal_of(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Norm)
        x = program.tensors[op.x]
        pixels = prod(x.shape[2:])
        vectors_, threads = _tile(op, program)
        blocks = x.shape[0] * ceil_div(x.padded[1], vectors_ * LANES)
        most = max(1, pixels // (4 * threads))
        yield {"splits": min(max(1, ceil_div(4 * arch.sms, max(blocks, 1))), most, 1024)}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Norm)
        x = program.tensors[op.x]
        vectors_, threads = _tile(op, program)
        blocks = config["splits"] * x.shape[0] * ceil_div(x.padded[1], vectors_ * LANES)
        waves = max(1.0, blocks / (arch.sms * 4))
        steps = ceil_div(prod(x.shape[2:]), threads * config["splits"])
        own = measured(arch).norm_split
        read = prod(x.padded) * x.dtype.size / (arch.gbps * own.read_bytes)
        first = max(read, waves * (own.item_us + own.step_us * steps))
        return 2 * measured(arch).launch_us + own.start_us + own.moving * (first + traffic_us(op, program, arch))

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Norm)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if 0 in y.padded or not prod(x.shape):
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, LANES)
        vectors_, threads = _tile(op, program)
        n, channels, pixels = x.shape[0], x.shape[1], prod(x.shape[2:])
        groups = groups_of(op)
        share = channels // groups if groups else 1
        tiles = ceil_div(max(x.padded[1], y.padded[1]), vectors_ * LANES)
        chunk = ceil_div(pixels, config["splits"])
        splits = ceil_div(pixels, chunk)
        walk = pixels_of(op, program)
        parts = n * splits * tiles * vectors_ * RECORD
        tail = (walk.depth, walk.args)
        statistics = Launch(
            code(self.name, phase="statistics", x=x.dtype.value, depth=tail[0], grouped=share > 1),
            grid=(splits, tiles, n),
            block=vectors_ * threads,
            args=(
                *(Ptr(op.x), Scratch(), Scratch(parts), Counters(), F32(op.eps)),
                *map(I32, (vectors_, threads, pixels, chunk, x.strides[0], x.padded[1], channels, share)),
                *tail[1],
            ),
        )
        lanes = power(min(epilogue.lane_groups(op, program, frame), 32))
        rows = THREADS // lanes
        step = rows * least(  # pixels of a block
            8, greatest(1, ceil_div(pixels * n * ceil_div(channels, LANES), THREADS * 4 * arch.sms))
        )
        apply = Launch(
            code(self.name, phase="apply", x=x.dtype.value, depth=tail[0], epilogue=spec.params),
            grid=(ceil_div(pixels, step), ceil_div(epilogue.lane_groups(op, program, frame), lanes), n),
            block=THREADS,
            args=(
                *(Ptr(op.x), Scratch(parts)),
                *map(I32, (lanes, pixels, step, x.strides[0], x.padded[1], tiles * vectors_)),
                *tail[1],
                *spec.args,
            ),
        )
        return Work((statistics, apply), scratch=parts + n * tiles * vectors_ * RECORD, counters=4 * n * tiles)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        x, depth = DType(params["x"]), params["depth"]
        scope: dict[str, Called] = {
            "read": intrinsic("ptx.memory.load", x, LANES, True, "global.nc"),
            "inner": unravel(depth),
            "get8": intrinsic("ptx.memory.load", DType.F32, LANES),
        }
        if params["phase"] == "apply":
            stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
            scope["store"] = stored.function
            signature = {
                **parameters("address", "x, stats"),
                **parameters("int", "V, K, step, xn, present, vectors"),
                "wk": unravel_args(depth),
                "e": stored.kinds,
            }
            return KernelText(signature, apply_lines(x), scope, THREADS)
        scope |= {
            "put8": intrinsic("ptx.memory.store", DType.F32, LANES),
            "put": intrinsic("ptx.memory.store", DType.F32),
            "last_to_arrive": intrinsic("parts.split.last_to_arrive", arch.has(Feature.FENCES)),
        }
        signature = {
            **parameters("address", "x, parts, stats, counters"),
            "eps": "float",
            **parameters("int", "V, T, K, chunk, xn, present, channels, share"),
            "wk": unravel_args(depth),
        }
        return KernelText(signature, Statistics(x, params["grouped"]).lines(), scope, THREADS)


def refusal_of(op: Norm, program: Program) -> str | None:
    """Why it is no norm over all pixels of images whose channels are innermost, or None."""
    x = program.tensors[op.x]
    if not op.centred:
        return "it does not take out the mean"
    spatial = set(range(2, x.rank))
    if not spatial or set(op.axes) not in ((spatial,) if op.groups else (spatial, {1, *spatial})):
        return "it does not reduce all pixels of each image"
    if not (is_vector_type(x) and vectors(x, 1, LANES)):
        return f"{op.x}'s channels do not lie in aligned vectors of {LANES} float16 or float32"
    if x.shape[0] > 65535:
        return f"it has {x.shape[0]} images; a grid has 65535 layers"
    frame = epilogue.frame_of(op, program)
    if frame[-1] != 1:
        return f"the channels of {op.y} are not innermost"
    return refusal(op, program, frame)


def groups_of(op: Norm) -> int:
    """Groups of channels that are reduced together; 0 if each channel is by itself."""
    return op.groups or int(1 in op.axes)


def _tile(op: Norm, program: Program) -> tuple[int, int]:
    """Vectors of channels that a block reads of a pixel (whole groups), and threads that share each vector (a power of 2)."""
    x, groups = program.tensors[op.x], groups_of(op)
    whole = lcm(x.shape[1] // groups, LANES) // LANES if groups else 1
    wanted = min(8, ceil_div(x.padded[1], LANES))
    vectors_ = whole * max(1, wanted // whole)
    return vectors_, power(THREADS // vectors_ + 1) // 2


def pixels_of(op: Norm, program: Program) -> Loops:
    """The loops over an image's pixels."""
    x = program.tensors[op.x]
    return loops(x.shape[2:], x.strides[2:])


def _merge(other: str, means: list[str], squares: list[str]) -> list[str]:
    """Text that merges the statistics of `other` elements into the thread's own: n elements, means a, squared deviations b."""
    lines = [
        f"total = n + {other}",
        f"part = select(total > f32(0), {other} / maximum(total, f32(1)), f32(0))",
        "weight = n * part",
    ]
    for i, (mean, square) in enumerate(zip(means, squares, strict=True)):
        lines += [f"d = {mean} - a{i}", f"a{i} += d * part", f"b{i} += {square} + d * d * weight"]
    return [*lines, "n = total"]


def _listed(form: str) -> str:
    """A name or an expression for each lane, whose number `#` stands for."""
    return ", ".join(form.replace("#", str(i)) for i in range(LANES))


IN_FLIGHT = 4
"""Pixels that a thread reads at once."""


@dataclass(frozen=True)
class Statistics:
    """Writes the text of the first launch. Block: pixels split * chunk … of image n, V vectors of channels; thread (t, g): every
    T-th pixel of vector g. Of each of its 8 channels it has the mean, a0 …, and the sum of squared deviations, b0 …, of n pixels.

    x        x's type
    grouped  whether a group has several channels
    """

    x: DType
    grouped: bool

    def lines(self) -> list[str]:
        return [
            *self._places(),
            *self._own_pixels(),
            *self._over_threads(),
            *self._put_part(),
            "if last_to_arrive(u64(counters + (i64(image) * i64(tiles) + i64(tile)) * i64(4)), splits):",
            *indented([*self._own_parts(), *self._over_threads(), *(self._of_groups() if self.grouped else self._of_channels())]),
        ]

    def _places(self) -> list[str]:
        return [
            "tid, split, tile, image = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)",
            "splits, tiles = i32(cuda.gridDim.x), i32(cuda.gridDim.y)",
            "t = tid // V",
            "g = tid - t * V",
            "c = (tile * V + g) * i32(8)",
            f"mean = cuda.shared.array({THREADS * LANES}, f32)",
            f"square = cuda.shared.array({THREADS * LANES}, f32)",
            f"count = cuda.shared.array({THREADS}, f32)",
            f"base = x + (i64(image) * i64(xn) + i64(c)) * i64({self.x.size})",
            "end = min(K, (split + i32(1)) * chunk)",
        ]

    def _nothing_yet(self) -> list[str]:
        return [*(f"a{i} = f32(0)" for i in range(LANES)), *(f"b{i} = f32(0)" for i in range(LANES)), "n = f32(0)"]

    def _own_pixels(self) -> list[str]:
        """One by one, so that each is taken from a mean of those before it."""
        lines = [*self._nothing_yet(), "k = split * chunk + t", "while k < end:"]
        for u in range(IN_FLIGHT):
            at = f"base + inner(k{u}, wk) * i64({self.x.size})"
            lines += [
                f"    k{u} = k + i32({u}) * T",
                f"    {_listed(f'v{u}_#')} = read({at}, i32(k{u} < end and c < present))",
            ]
        for u in range(IN_FLIGHT):
            lines += [f"    if k{u} < end:", "        n += f32(1)", "        share_n = quick_div(f32(1), n)"]
            for i in range(LANES):
                value = f"v{u}_{i}"
                lines += [f"        d = {value} - a{i}", f"        a{i} += d * share_n", f"        b{i} += d * ({value} - a{i})"]
        return [*lines, f"    k += i32({IN_FLIGHT}) * T"]

    def _over_threads(self) -> list[str]:
        """Those of a vector's threads, by halves, through shared memory; thread t = 0 ends up with all of them."""
        keep = [
            *(f"mean[{i * THREADS} + tid] = a{i}" for i in range(LANES)),
            *(f"square[{i * THREADS} + tid] = b{i}" for i in range(LANES)),
            "count[tid] = n",
        ]
        means, squares = ([f"{name}[{i * THREADS} + o]" for i in range(LANES)] for name in ("mean", "square"))
        return [
            *keep,
            "cuda.syncthreads()",
            "half = T >> i32(1)",
            "while half > 0:",
            "    if t < half:",
            "        o = tid + half * V",
            *indented(indented([*_merge("count[o]", means, squares), *keep])),
            "    cuda.syncthreads()",
            "    half = half >> i32(1)",
        ]

    def _put_part(self) -> list[str]:
        """The block's: (N, splits, vectors, 2, 8)."""
        return [
            "width = tiles * V",
            "vector = tile * V + g",
            f"images = parts + i64(image) * i64(splits) * i64(width) * i64({RECORD})",
            "if t == 0:",
            f"    at = images + (i64(split) * i64(width) + i64(vector)) * i64({RECORD})",
            f"    put8(at, {_listed('a#')})",
            f"    put8(at + i64({4 * LANES}), {_listed('b#')})",
        ]

    def _own_parts(self) -> list[str]:
        """Every T-th block's."""
        return [
            *self._nothing_yet(),
            "s = t",
            "while s < splits:",
            f"    at = images + (i64(s) * i64(width) + i64(vector)) * i64({RECORD})",
            f"    {_listed('p#')} = get8(at)",
            f"    {_listed('q#')} = get8(at + i64({4 * LANES}))",
            "    many = f32(min(chunk, K - s * chunk))",
            *indented(_merge("many", [f"p{i}" for i in range(LANES)], [f"q{i}" for i in range(LANES)])),
            "    s += T",
        ]

    def _record(self, vector: str) -> str:
        """Where means and scales of a vector of the tile go: (N, vectors, 2, 8)."""
        return f"stats + (i64(image) * i64(width) + i64(tile * V)) * i64({RECORD}) + i64({vector}) * i64({RECORD})"

    def _of_channels(self) -> list[str]:
        return [
            "if t == 0:",
            f"    at = {self._record('g')}",
            f"    put8(at, {_listed('a#')})",
            f"    put8(at + i64({4 * LANES}), {_listed('f32(1) / sqrt(b# / f32(K) + eps)')})",
        ]

    def _of_groups(self) -> list[str]:
        """Of a group's channels, first … first + share - 1 of the tile, each of which writes the group's own."""
        place = f"(j & i32(7)) * i32({THREADS}) + (j >> i32(3))"
        return [
            "i = tid",
            "while i < V * i32(8):",
            "    first = i // share * share",
            "    total = f32(0)",
            "    if tile * V * i32(8) + first + share <= channels:",
            "        for j in range(first, first + share):",
            f"            total += mean[{place}]",
            "        total = total / f32(share)",
            "        spread = f32(0)",
            "        for j in range(first, first + share):",
            f"            d = mean[{place}] - total",
            f"            spread += square[{place}] + f32(K) * d * d",
            f"        at = {self._record('i >> i32(3)')} + i64(i & i32(7)) * i64(4)",
            "        put(at, total)",
            f"        put(at + i64({4 * LANES}), f32(1) / sqrt(spread / (f32(K) * f32(share)) + eps))",
            "    i += i32(cuda.blockDim.x)",
        ]


def apply_lines(x: DType) -> list[str]:
    """Block: `step` pixels of an image, V vectors; thread (t, g): pixels t, t + 256 / V … of vector g.

    Blocks go through x from its end, whose statistics were the last, so that some of it still lies in the L2 cache.
    """
    lanes = range(LANES)
    results = ", ".join(f"(v{i} - a{i}) * b{i}" for i in lanes)
    return [
        "tid, image = i32(cuda.threadIdx.x), i32(cuda.gridDim.z) - i32(1) - i32(cuda.blockIdx.z)",
        "block = i32(cuda.gridDim.x) - i32(1) - i32(cuda.blockIdx.x)",
        "t = tid // V",
        "vector = i32(cuda.blockIdx.y) * V + (tid - t * V)",
        "c = vector * i32(8)",
        f"at = stats + (i64(image) * i64(vectors) + i64(min(vector, vectors - 1))) * i64({RECORD})",
        f"{', '.join(f'a{i}' for i in lanes)} = get8(at)",
        f"{', '.join(f'b{i}' for i in lanes)} = get8(at + i64({4 * LANES}))",
        f"base = x + (i64(image) * i64(xn) + i64(c)) * i64({x.size})",
        "k = block * step + t",
        "end = min(K, (block + i32(1)) * step)",
        "while k < end:",
        f"    {', '.join(f'v{i}' for i in lanes)} = read(base + inner(k, wk) * i64({x.size}), i32(c < present))",
        f"    store(({results}), image * K + k, c, e)",
        f"    k += i32({THREADS}) // V",
    ]
