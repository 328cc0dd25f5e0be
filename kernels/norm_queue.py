"""Normalization of channels-last images, their pixels split between blocks, in one launch whose second read of x is from L2.

Work is shared out in pieces, which blocks take one after the other from a queue (a counter): statistics of some pixels of an
item, an item being a few vectors of channels of one image; the merging of an item's statistics; the normalization of some of
its pixels. An item is normalized `ahead` items behind its statistics, piece by piece in turn with the statistics of a later
one: reads from memory and writes go on together, and x is read again while it still lies in the L2 cache. A piece waits only
for such as lie before it in the queue, and those have been taken by blocks that run: so no two blocks need run at once.

Each thread sums up 8 channels of its pixels, and their squares, from its first pixel's value on: as that is one of the data,
little cancels however far the mean is from zero. Means and squared deviations of threads and of pieces are merged in the same
way, from the mean of the first one on, and always in the same order (the shifted sums of Chan, Golub and LeVeque, 1983).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

from tccompile.arch import Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import device, entry, unravel, unravel_args
from tccompile.kernels.norm_split import LANES, groups_of, pixels_of, refusal_of
from tccompile.kernels.spec import (
    F32,
    I32,
    LAUNCH_US,
    Config,
    Counters,
    Function,
    Kernel,
    Launch,
    Ptr,
    Scratch,
    Value,
    Work,
    code,
    memory_us,
    traffic_us,
)
from tccompile.program import Norm, Op, Program

THREADS = 128

WIDEST = THREADS // LANES
"""Vectors of channels of an item, at most: each of its channels has a thread."""

BLOCKS = 5
"""Blocks of a multiprocessor; from sm_90 on all find room, with 96 registers a thread, which hold all of a turn's vectors."""

RECORD = 8
"""Bytes of what is passed on of a channel: of a piece its mean and its sum of squared deviations, in the end mean and scale."""

PITCH = THREADS + 4
"""Floats from one lane's sums of all threads to the next lane's in shared memory: 4 vectors by 8 lanes lie in 32 banks."""

COUNTER = 128
"""Bytes of a counter: each has a line of its own in L2, so that who waits for one does not slow down who counts in another."""

RECORDS = 32
"""Records of pieces that a thread reads at once."""

STATISTICS, MERGE, APPLY = 0, 1, 2
"""Kinds of pieces."""


class NormQueue(Kernel):
    """Norm over all pixels of (N, C, …) images with channels innermost, for each channel or group of channels."""

    name = "norm_queue"
    realises = Norm

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Norm)
        if _whole(op, program) > WIDEST:
            return f"its groups cannot be cut into items of {WIDEST * LANES} channels"
        return refusal_of(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """Items of up to 8 or 16 vectors, of 4 where such are large; pieces of 2 to 8 turns of a block, fewer where blocks would
        have none; 8 or 16 MiB ahead."""
        assert isinstance(op, Norm)
        seen = set()
        for most in (4, 8, WIDEST):
            wide = _width(op, program, most)
            one = _shares(op, program, {"vectors": wide, "turns": 1, "ahead": 1})
            if most == 4 and one.tiles > 1 and one.bytes < 8 << 20:
                continue
            for longest in (2, 4, 8):
                for reach in (8, 16):
                    turns = min(longest, max(1, one.items * one.pieces // (BLOCKS * arch.sms)))
                    ahead = max(1, min(one.items, -(-(reach << 20) // one.bytes)))
                    if (wide, turns, ahead) not in seen:
                        seen.add((wide, turns, ahead))
                        yield {"vectors": wide, "turns": turns, "ahead": ahead}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        """Estimated, and fitted to nothing: all traffic at nine tenths of a copy's bandwidth, x once more from memory where L2
        has lost it; or turns that wait for their loads. A tenth of what a block does beside its turns is not hidden."""
        assert isinstance(op, Norm)
        x, y, s = program.tensors[op.x], program.tensors[op.y], _shares(op, program, config)
        size, blocks = prod(x.padded) * x.dtype.size, BLOCKS * arch.sms
        piece = s.bytes / s.pieces
        between = (config["ahead"] * s.bytes + blocks * piece) * (1 if _streamed(op, program, arch) else 2)
        moved = traffic_us(op, program, arch) / 0.9
        if size > arch.l2 * 2**19 and s.tiles > 1 and s.vectors * LANES * x.dtype.size < 128:
            moved *= 1.3  # an H200 takes a third longer for rows of 64 bytes than for 128 (1×360×640×64)
        if min(between, 2 * size) > 0.75 * arch.l2 * 2**20:
            moved += memory_us([x], arch)
        busy = memory_us([x, y], arch) / size * piece * blocks / 2  # of a piece, where memory is the limit
        latency = s.items * (2 * s.pieces + 1) / blocks * max(0.0, 1.5 + 1.5 * config["turns"] - busy)
        beside = 0.06 * s.items * s.pieces / arch.sms
        return LAUNCH_US + 5.0 + beside + max(moved, latency + 2.0 * config["turns"])

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Norm)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if 0 in y.padded or not prod(x.shape):
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, LANES)
        groups, s, walk = groups_of(op), _shares(op, program, config), pixels_of(op, program)
        records = s.items * s.pieces * s.vectors * LANES * RECORD
        ahead = min(config["ahead"], s.items)
        pieces = s.items * (2 * s.pieces + 1)
        launch = Launch(
            code(
                self.name,
                x=x.dtype.value,
                depth=walk.depth,
                rows=_rows(spec),
                streamed=_streamed(op, program, arch),
                epilogue=spec.params,
            ),
            grid=(min(pieces, BLOCKS * arch.sms), 1, 1),
            block=s.vectors * s.threads,
            args=(
                *(Ptr(op.x), Scratch(), Scratch(records), Counters(), F32(op.eps)),
                *map(I32, (s.vectors, s.threads, prod(x.shape[2:]), s.chunk, s.pieces, s.items, s.tiles, ahead)),
                *map(I32, (x.strides[0], x.padded[1], x.shape[1] // groups if groups else 1)),
                *walk.args,
                *spec.args,
            ),
        )
        return Work((launch,), scratch=records + s.items * s.vectors * LANES * RECORD, counters=COUNTER * (2 + s.items))

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba.cuda import types

        from tccompile.kernels.ptx import atomics, exchange, memory, mma

        x, depth = DType(params["x"]), params["depth"]
        words = LANES * x.size // 4
        space = "global.cs" if params["streamed"] else "global"
        scope = {
            "read": memory.read_words(words, "global.nc"),
            "read_last": memory.read_words(words, "global.cs" if params["streamed"] else "global.nc"),
            "floats": memory.floats(x, LANES),
            "inner": unravel(depth),
            "get2": memory.load(DType.F32, 2, guarded=True, space="global.cg"),
            "get8": memory.load(DType.F32, LANES, space="global.cg"),
            "put": memory.store(DType.F32),
            "put2": memory.store(DType.F32, 2),
            "clear": memory.store(DType.I32),
            "atomic_add": atomics.atomic_add,
            "arrive": exchange.arrive(arch.cc >= (7, 0)),
            "await_count": exchange.await_count(arch.cc >= (7, 0)),
            "quotient": mma.divide,
        }
        put, extra = epilogue.build(params["epilogue"], params["rows"], space)
        body = device("norm_queue", f"{PARAMS}, wk, e", source(x, params["rows"]), store=put, **scope)
        fixed = (types.int64,) * 4 + (types.float32,) + (types.int32,) * (PARAMS.count(",") - 4)
        signature = types.void(*fixed, *(types.int32,) * unravel_args(depth), *extra)
        function = entry(body, len(fixed), unravel_args(depth), len(extra))
        return Function(function, signature, THREADS, BLOCKS if params["rows"] == 4 and arch.tma else 1)


PARAMS = "x, records, scales, counters, eps, V, T, K, chunk, pieces, items, tiles, ahead, xn, present, share"


ORDER = (
    "lead, paired = i32(ahead * (pieces + 1)), i32((items - ahead) * (2 * pieces + 1))",
    "if n < lead:",
    "    item = quotient(n, i32(pieces + 1))",
    "    piece = i32(n - item * (pieces + 1))",
    f"    kind = i32({MERGE}) if piece == pieces else i32({STATISTICS})",
    "elif n < lead + paired:",
    "    item = quotient(i32(n - lead), i32(2 * pieces + 1))",
    "    r = i32(n - lead - item * (2 * pieces + 1))",
    "    piece = i32(r >> 1)",
    "    if r == 2 * pieces:",
    f"        item, kind = i32(item + ahead), i32({MERGE})",
    "    elif r & 1:",
    f"        item, kind = i32(item + ahead), i32({STATISTICS})",
    "    else:",
    f"        kind = i32({APPLY})",
    "else:",
    "    r = i32(n - lead - paired)",
    "    item = quotient(r, pieces)",
    "    piece = i32(r - item * pieces)",
    f"    item, kind = i32(items - ahead + item), i32({APPLY})",
    f"if kind == {APPLY}:",  # what came to L2 last is read first
    "    piece = i32(pieces - 1 - piece)",
)
"""Text: the n-th of the queue as item, kind and piece. Statistics of `ahead` items, each with its merging; then in turn a piece
to normalize and one of statistics, `ahead` items on; then what is left to normalize."""


@dataclass(frozen=True)
class _Shares:
    """How the work is shared out.

    vectors, threads  of 8 channels that a block reads of a pixel (whole groups), and threads of each
    tiles, items      blocks of channels of an image, and of all images
    chunk, pieces     pixels of a piece, and pieces of an item
    bytes             of an item
    """

    vectors: int
    threads: int
    tiles: int
    items: int
    chunk: int
    pieces: int
    bytes: int


def _rows(spec: epilogue.EpilogueSpec) -> int:
    """Pixels that are stored at once: 4 where the epilogue needs few registers, which leaves room for all of `BLOCKS`."""
    _, _, (_, mode, *_), sources, _ = spec.params
    plain = mode == "vector" and len(sources) <= 2 and all(how == "none" for _, _, how in sources)
    return 4 if plain else 2


def _whole(op: Norm, program: Program) -> int:
    """The least number of vectors that hold whole groups."""
    groups = groups_of(op)
    return lcm(program.tensors[op.x].shape[1] // groups, LANES) // LANES if groups else 1


def _width(op: Norm, program: Program, most: int) -> int:
    """Vectors of an item: of whole groups, `most` or as few as half, such that the fewest lie beyond the last channel."""
    x, y, whole = program.tensors[op.x], program.tensors[op.y], _whole(op, program)
    total = -(-max(x.padded[1], y.padded[1]) // LANES)
    widths = [w for w in range(whole, min(most, total + whole - 1) + 1, whole) if 2 * w >= min(most, total)]
    return min(widths, key=lambda w: (-(-total // w) * w, -w), default=whole)


def _shares(op: Norm, program: Program, config: Config) -> _Shares:
    x, y = program.tensors[op.x], program.tensors[op.y]
    wide, pixels = config["vectors"], max(1, prod(x.shape[2:]))
    threads = THREADS // wide
    tiles = -(-max(x.padded[1], y.padded[1]) // (wide * LANES))
    chunk = config["turns"] * threads * batch(x.dtype)
    return _Shares(
        wide, threads, tiles, x.shape[0] * tiles, chunk, -(-pixels // chunk), max(1, pixels * wide * LANES * x.dtype.size)
    )


def _streamed(op: Norm, program: Program, arch: Arch) -> bool:
    """Whether L2 is to keep neither y nor, once it is normalized, x: they are too large for others to find them there."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    return prod(x.padded) * x.dtype.size + prod(y.padded) * y.dtype.size > arch.l2 * 2**20


def batch(x: DType) -> int:
    """Vectors that a thread has on their way from memory: 32 registers of them."""
    return 16 // x.size


def source(x: DType, rows: int) -> list[str]:
    """The kernel's text. Thread (t, g) of T × V: pixels begin + t, begin + t + T … of a piece's, up to `end`, and vector g.

    Where channels are merged, each of the item's W has `subs` threads, (sub, tid mod W), whose sums meet in `parts`.
    rows  pixels that are stored at once: divides `batch(x)`
    """
    lanes, each = range(LANES), range(batch(x))

    def values(name: str) -> str:
        return ", ".join(f"{name}{i}" for i in lanes)

    def words(u: int) -> str:
        return ", ".join(f"w{u}_{i}" for i in range(LANES * x.size // 4))

    def indented(lines: list[str], levels: int = 1) -> list[str]:
        return ["    " * levels + line for line in lines]

    def fetch(read: str) -> list[str]:
        """A thread's next vectors; a pixel that is not there is that at `own` once more."""
        lines = []
        for u in each:
            lines += [
                f"k{u} = i32(k + i32({u}) * T)",
                f"{words(u)} = {read}(base + inner(select(k{u} < end, k{u}, own), wk) * i64({x.size}))",
            ]
        return lines

    piece = [
        *ORDER,
        "image = quotient(item, tiles)",
        "c = i32((item - image * tiles) * W + g * 8)",
        f"base = x + (i64(image) * i64(xn) + i64(min(c, i32(present - 8)))) * i64({x.size})",
        "begin = i32(piece * chunk)",
        "end = i32(min(K, i32(begin + chunk)))",
    ]

    counter = f"counters + (i64(item) + i64(2)) * i64({COUNTER})"
    record = f"record = records + (i64(item) * i64(pieces) * i64(W) + i64(ch)) * i64({RECORD})"
    scale = f"scale = scales + (i64(item) * i64(W) + i64({{}} * 8)) * i64({RECORD})"  # means of a vector's channels, then scales

    def total(n: str) -> list[str]:
        """Text for thread ch < W: from sums of deviations from `ref`, and of their squares, of all `subs` to mean and square."""
        return [
            "s1, s2, r, o = f32(0), f32(0), i32(0), tid",
            "while r < subs:",
            "    s1 += parts[o]",
            f"    s2 += parts[{THREADS} + o]",
            "    r, o = i32(r + 1), i32(o + W)",
            f"d = s1 / {n}",
            "mean = ref + d",
            "square = maximum(s2 - s1 * d, f32(0))",
        ]

    keep = ["parts[tid] = s1", f"parts[{THREADS} + tid] = s2"]

    def add(many: str, mean: str, square: str) -> list[str]:
        """A record of `many` pixels: deviations from `ref`, and their squares."""
        return [f"d = {mean} - ref", f"s1 += {many} * d", f"s2 += {square} + {many} * d * d"]

    statistics = [
        "own = i32(begin + t)",
        "own = select(own < end, own, begin)",
        f"{words(0)} = read(base + inner(own, wk) * i64({x.size}))",
        f"{values('h')} = floats({words(0)})",
        *(f"{name}{i} = f32(0)" for name in "sq" for i in lanes),
        "k = i32(begin + t)",
        "while k < end:",
        *indented(fetch("read")),
    ]
    for u in each:
        statistics.append(f"    {values('v')} = floats({words(u)})")
        for i in lanes:
            statistics += [f"    d = v{i} - h{i}", f"    s{i} += d", f"    q{i} += d * d"]
    statistics += [
        f"    k = i32(k + i32({batch(x)}) * T)",
        # Pixels of a thread: `full`, and one more of the first `extra`.
        "full = quotient(i32(end - begin), T)",
        "extra = i32(end - begin - full * T)",
        "part = f32(1) / maximum(f32(full + i32(t < extra)), f32(1))",
        *(f"sums[i32({i * PITCH} + tid)] = h{i} + s{i} * part" for i in lanes),
        *(f"sums[i32({(LANES + i) * PITCH} + tid)] = maximum(q{i} - s{i} * s{i} * part, f32(0))" for i in lanes),
        "cuda.syncthreads()",
        f"o = i32((ch & 7) * {PITCH} + (ch >> 3))",
        "ref = sums[o]",
        "if sub < subs:",
        "    s1, s2, r, o = f32(0), f32(0), sub, i32(o + sub * V)",
        "    while r < T:",
        "        many = f32(full + i32(r < extra))",
        *indented(add("many", "sums[o]", f"sums[i32({LANES * PITCH} + o)]"), 2),
        "        r, o = i32(r + subs), i32(o + subs * V)",
        *indented(keep),
        "cuda.syncthreads()",
        "if tid < W:",
        *indented(total("f32(end - begin)")),
        f"    {record}",
        f"    put2(record + i64(piece) * i64(W) * i64({RECORD}), mean, square)",
    ]
    merge = [
        f"await_count({counter}, pieces, tid)",
        record,
        "ref, square = get2(record, i32(1))",
        "if sub < subs:",
        "    s1, s2, r, final = f32(0), f32(0), sub, i32(pieces - 1)",
        "    many, rest = f32(chunk), f32(i32(K - final * chunk))",  # pixels of a piece, and of the last one
        f"    step = i64(W) * i64({RECORD})",
        "    at, step = record + i64(sub) * step, i64(subs) * step",
        "    while r < pieces:",
    ]
    for u in range(RECORDS):
        merge += [
            f"        r{u} = i32(r + i32({u}) * subs)",
            f"        m{u}, q{u} = get2(at, i32(r{u} < pieces))",
            "        at = at + step",
        ]
    for u in range(RECORDS):
        merge += [
            f"        weight = select(r{u} < final, many, select(r{u} == final, rest, f32(0)))",
            *indented(add("weight", f"m{u}", f"q{u}"), 2),
        ]

    def channels(*lines: str) -> list[str]:
        return ["    j = own", "    while j < own + share:", *indented([*lines], 2), "        j = i32(j + 1)"]

    merge += [
        f"        r = i32(r + i32({RECORDS}) * subs)",
        *indented(keep),
        "cuda.syncthreads()",
        "if tid < W:",
        *indented(total("f32(K)")),
        "    sums[tid] = mean",
        f"    sums[{THREADS} + tid] = square",
        "cuda.syncthreads()",
        "if tid < W:",
        "    own = i32(quotient(tid, share) * share)",  # the group's first channel
        "    mean, square = f32(0), f32(0)",
        *channels("mean += sums[j]"),
        "    mean = mean / f32(share)",
        *channels("d = sums[j] - mean", f"square += sums[{THREADS} + j] + f32(K) * d * d"),
        "    square = f32(1) / sqrt(square / (f32(K) * f32(share)) + eps)",
        f"    {scale.format('(tid >> 3)')}",
        "    put(scale + i64(tid & 7) * i64(4), mean)",
        "    put(scale + i64(tid & 7) * i64(4) + i64(32), square)",
    ]
    apply = [
        *(f"{name}{i} = f32(0)" for name in "ab" for i in lanes),
        "k, turn, own = i32(begin + t), begin, begin",
        "while turn < end:",
        *indented(fetch("read_last")),
        "    if turn == begin:",
        f"        await_count({counter}, i32(pieces + 1), tid)",
        f"        {scale.format('g')}",
        f"        {values('a')} = get8(scale)",
        f"        {values('b')} = get8(scale + i64(32))",
    ]
    for u in range(0, batch(x), rows):
        results = []
        apply.append(f"    if k{u} < end:")
        for r in range(u, u + rows):
            apply.append(f"        {', '.join(f'v{r}_{i}' for i in lanes)} = floats({words(r)})")
            results += [f"(v{r}_{i} - a{i}) * b{i}" for i in lanes]
        apply.append(f"        store(({', '.join(results)}), i32(image * K + k{u}), T, i32(image * K + end), c, e)")
    apply += [f"    k = i32(k + i32({batch(x)}) * T)", f"    turn = i32(turn + i32({batch(x)}) * T)"]
    return [
        "tid = i32(cuda.threadIdx.x)",
        f"sums = cuda.shared.array({2 * LANES * PITCH}, f32)",
        f"parts = cuda.shared.array({2 * THREADS}, f32)",
        "taken = cuda.shared.array(2, i32)",
        "t = quotient(tid, V)",
        "g = i32(tid - t * V)",
        "W, subs = i32(V * 8), i32(T >> 3)",
        "sub = quotient(tid, W)",
        "ch = i32(tid - sub * W)",
        "last = i32(items * (2 * pieces + 1))",
        "if tid == 0:",
        "    taken[0] = atomic_add(counters, i32(1))",
        "cuda.syncthreads()",
        "n, other = taken[0], i32(1)",
        "while n < last:",
        "    following = i32(0)",  # asked for now, known when this piece is done
        "    if tid == 0:",
        "        following = atomic_add(counters, i32(1))",
        *indented(piece),
        f"    if kind == {STATISTICS}:",
        *indented(statistics, 2),
        f"    elif kind == {MERGE}:",
        *indented(merge, 2),
        "    else:",
        *indented(apply, 2),
        "    if tid == 0:",
        "        taken[other] = following",
        "    cuda.syncthreads()",
        "    n, other = taken[other], i32(1 - other)",
        f"    if tid == 0 and kind != {APPLY}:",
        f"        arrive({counter})",
        # The last block to end clears the counters: nobody waits any more.
        "cuda.syncthreads()",
        "if tid == 0:",
        f"    taken[0] = atomic_add(counters + i64({COUNTER}), i32(1))",
        "cuda.syncthreads()",
        "if taken[0] == i32(cuda.gridDim.x) - 1:",
        "    i = tid",
        "    while i < items + 2:",
        f"        clear(counters + i64(i) * i64({COUNTER}), i64(0))",
        "        i = i32(i + T * V)",
    ]
