"""Normalization of channels-last images that fit the shared memory of all multiprocessors together: one launch, x is read once.

A team of blocks takes an image (or a few vectors of channels of one): each block copies its share of the pixels to shared memory,
passes on the statistics of each channel, merges those of the whole team, and writes its pixels from shared memory. What
does not fit there is read a second time, last pixels first, as they were the last to come to the L2 cache.

Each thread sums up 8 channels of its pixels, and their squares, from the first pixel's value on: as that is one of the data,
little cancels however far the mean is from zero. The sums of threads and of blocks are merged in the same way, from the mean of
the first one on, and always in the same order (the shifted sums of Chan, Golub and LeVeque, 1983).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod

from tccompile.arch import Arch
from tccompile.expr import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import device, entry, power, unravel, unravel_args
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
    traffic_us,
)
from tccompile.program import Norm, Op, Program

RECORD = 8
"""Bytes of what blocks pass on of a channel: the mean, and the sum of squared deviations."""

PARTS = 4
"""Groups of copies to shared memory: the first are summed up while the last are on their way."""

BATCH = 8
"""Records of other blocks that a thread reads at once."""

AHEAD = 4
"""Vectors of a thread that are on their way from memory, of those that shared memory does not hold."""


class NormTeam(Kernel):
    """Norm over all pixels of (N, C, …) images with channels innermost, for each channel or group of channels."""

    name = "norm_team"
    realises = Norm

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Norm)
        reason = refusal_of(op, program)
        if reason is None and not any(True for _ in self.configs(op, program, arch)):
            return "its images do not fit the shared memory of all multiprocessors, or its groups a block"
        return reason

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Norm)
        x, groups = program.tensors[op.x], groups_of(op)
        whole = lcm(x.shape[1] // groups, LANES) // LANES if groups else 1
        for wide in dict.fromkeys(whole * max(1, min(most, -(-x.padded[1] // LANES)) // whole) for most in (4, 8)):
            for threads in (256, 512):
                config = {"vectors": wide, "threads": threads}
                s = _shares(op, program, config, arch) if wide <= threads else None
                if s and s.items <= arch.sms and s.held >= min(s.threads, s.chunk) and 3 * s.held > s.chunk:
                    yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        """Fitted to times on an H200: what comes one after the other, all traffic, and rows of memory that are read in parts."""
        assert isinstance(op, Norm)
        x, s = program.tensors[op.x], _shares(op, program, config, arch)
        size = prod(x.padded) * x.dtype.size
        again = size * (1 - s.held / s.chunk) / (arch.gbps * config["threads"])
        moved = (traffic_us(op, program, arch) + again) / min(1.0, 2 * s.blocks * s.items / arch.sms)
        parts = s.tiles > 1 and size > 24 << 20
        return LAUNCH_US + 6.0 + 1.5 * (config["threads"] / 256 - 1) + moved * (1.3 if parts else 1.0)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Norm)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if 0 in y.padded or not prod(x.shape):
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, LANES)
        groups, s, walk = groups_of(op), _shares(op, program, config, arch), pixels_of(op, program)
        share = x.shape[1] // groups if groups else 1
        launch = Launch(
            code(
                self.name,
                x=x.dtype.value,
                depth=walk.depth,
                grouped=share > 1,
                threads=config["threads"],
                epilogue=spec.params,
            ),
            grid=(s.blocks * s.items, 1, 1),
            block=s.vectors * s.threads,
            args=(
                *(Ptr(op.x), Scratch(), Counters(), F32(op.eps)),
                *map(I32, (s.vectors, s.threads, prod(x.shape[2:]), s.blocks, s.items, s.tiles, s.held)),
                *map(I32, (x.strides[0], x.padded[1], share)),
                *walk.args,
                *spec.args,
            ),
            smem=4 * _own(s.vectors, s.threads) + s.held * s.vectors * LANES * x.dtype.size,
            cooperative=True,
        )
        return Work((launch,), scratch=s.items * s.blocks * s.vectors * LANES * RECORD, counters=8 * s.items)

    def build(self, arch: Arch, **params: Value) -> Function:
        from numba.cuda import types

        from tccompile.kernels.ptx import exchange, memory, mma

        x, depth = DType(params["x"]), params["depth"]
        scope = {
            "read_words": memory.load_words(LANES * x.size // 4, space="global.nc"),
            "floats": memory.floats(x, LANES),
            "held_values": memory.load(x, LANES, guarded=True, space="shared"),
            "inner": unravel(depth),
            "get": memory.load(DType.F32, guarded=True, space="global.cg"),
            "put": memory.store(DType.F32),
            "arrive": exchange.arrive,
            "await_all": exchange.await_all,
            "leave": exchange.leave,
            "quotient": mma.divide,
            "shared_address": mma.shared_address,
            **_copies(arch),
        }
        put, extra = epilogue.build(params["epilogue"])
        text = source(x, params["grouped"])
        body = device("norm_team", f"{PARAMS}, wk, e", text, store=put, **scope)
        fixed = (types.int64,) * 3 + (types.float32,) + (types.int32,) * (PARAMS.count(",") - 3)
        signature = types.void(*fixed, *(types.int32,) * unravel_args(depth), *extra)
        return Function(entry(body, len(fixed), unravel_args(depth), len(extra)), signature, params["threads"])


PARAMS = "x, statistics, counters, eps, V, T, K, blocks, items, tiles, held, xn, present, share"


@dataclass(frozen=True)
class _Shares:
    """How the work is shared out.

    vectors, threads  of 8 channels that a block reads of a pixel (whole groups), and threads of each (a power of 2)
    tiles, items      blocks of channels of an image, and all there are, one for each team
    blocks            of a team
    chunk, held       pixels of a block, and those of them in shared memory
    """

    vectors: int
    threads: int
    tiles: int
    items: int
    blocks: int
    chunk: int
    held: int


def _shares(op: Norm, program: Program, config: Config, arch: Arch) -> _Shares:
    """As many blocks as there are multiprocessors, as far as all threads have pixels."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    wide, pixels = config["vectors"], max(1, prod(x.shape[2:]))
    threads = power(config["threads"] // wide + 1) // 2
    tiles = -(-max(x.padded[1], y.padded[1]) // (wide * LANES))
    items = x.shape[0] * tiles
    blocks = max(1, min(-(-pixels // threads), arch.sms // max(items, 1)))
    chunk = -(-pixels // blocks)
    room = (arch.smem_block - 4 * _own(wide, threads)) // (wide * LANES * x.dtype.size)
    return _Shares(wide, threads, tiles, items, blocks, chunk, max(0, min(room, chunk)))


def _own(wide: int, threads: int) -> int:
    """Numbers in shared memory beside x: statistics of each thread, and of each channel by some of the threads; see `source`."""
    return 16 * (wide * threads + 8) + 2 * wide * max(8, threads) + 16 * wide


def _copies(arch: Arch) -> dict[str, object]:
    """`copy` of 16 bytes to shared memory, `commit` of a group of copies, and `landed0` …: a wait for each group."""
    from tccompile.kernels.device_math import inline
    from tccompile.kernels.ptx import mma

    if arch.cp_async:
        size = mma.cp_async

        @inline
        def copy(slot, address, inside):
            size(slot, address, inside << 4)

        waits = {f"landed{i}": mma.cp_async_wait(PARTS - 1 - i) for i in range(PARTS)}
        return {"copy": copy, "commit": mma.cp_async_commit, **waits}
    load_chunk, store_chunk = mma.load_chunk, mma.store_chunk

    @inline
    def copy_at_once(slot, address, inside):
        a, b, c, d = load_chunk(address, inside)
        store_chunk(slot, a, b, c, d)

    @inline
    def nothing():
        pass

    return {"copy": copy_at_once, "commit": nothing, **{f"landed{i}": nothing for i in range(PARTS)}}


def source(x: DType, grouped: bool) -> list[str]:
    """The kernel's text. Thread (t, g) of T × V: pixels first, first + T … of its block's, up to `end`, and vector g.

    Shared memory, in floats: means of 8 lanes by thread, 8 rows of `pitch`; squared deviations likewise, from Q on; then by
    channel (i of vector g: i * V + g, of W), from S1 and S2 on, sums of means and of squared deviations, over a part of the
    records by each of `subs` threads; from F on means, and from F + W on squared deviations, and scales in the end. Then x:
    vectors at `slots` and steps of it, for k < kept.
    """
    lanes, size = range(LANES), x.size

    def each(text: str) -> list[str]:
        return [text.format(i=i) for i in lanes]

    def values(name: str) -> str:
        return ", ".join(each(name + "{i}"))

    def indented(lines: list[str], levels: int = 1) -> list[str]:
        return ["    " * levels + line for line in lines]

    address = f"base + inner({{}}, wk) * i64({size})"

    load = [
        "k, part, slot = first, i32(0), slots",
        f"while part < {PARTS}:",
        "    part = i32(part + 1)",
        "    stop = i32(min(kept, i32(begin + part * quarter)))",
        "    while k < stop:",
        f"        at = {address.format('k')}",
        *(f"        copy(i32(slot + {b}), at + i64({b}), inside)" for b in range(0, LANES * size, 16)),
        "        k = i32(k + T)",
        "        slot = i32(slot + step)",
        "    commit()",
    ]

    def stream(limit: str, step: str, body: list[str]) -> list[str]:
        """Text that reads vectors k, k ± T … from memory, each a few turns before `body` takes it as v, up to the limit."""
        words = [", ".join(f"w{u}_{i}" for i in range(LANES * size // 4)) for u in range(AHEAD)]

        def fetch(u: int) -> str:
            return f"{words[u]} = read_words({address.format('max(far, i32(0))')}, i32(far {limit}) & inside)"

        return [
            *(line for u in range(AHEAD) for line in (f"far = i32(k {step} i32({u}) * T)", fetch(u))),
            f"while k {limit}:",
            f"    {values('v')} = floats({words[0]})",
            *(f"    {now} = {later}" for now, later in pairwise(words)),
            f"    far = i32(k {step} i32({AHEAD}) * T)",
            f"    {fetch(AHEAD - 1)}",
            *indented(body),
            f"    k = i32(k {step} T)",
        ]

    def add(many: str, mean: str, square: str) -> list[str]:
        """A record of `many` pixels: sums of deviations from `ref`, which is the first record's mean, and of their squares."""
        return [f"d = {mean} - ref", f"s1 += {many} * d", f"s2 += {square} + {many} * d * d"]

    def merged(records: list[str], n: str, ref: list[str], then: list[str]) -> list[str]:
        """Each channel: its `subs` threads add up records, the first of them what these have; mean and square are known then."""
        return [
            "ch = own_ch",
            "while ch < W:",
            "    s1, s2 = f32(0), f32(0)",
            *indented(records),
            "    o = i32(sub * W + ch)",
            "    shared[S1 + o] = s1",
            "    shared[S2 + o] = s2",
            "    ch = i32(ch + threads)",
            "cuda.syncthreads()",
            "ch = tid",
            "while ch < W:",
            "    s1, s2, r, o = f32(0), f32(0), i32(0), ch",
            "    while r < subs:",
            "        s1 += shared[S1 + o]",
            "        s2 += shared[S2 + o]",
            "        r, o = i32(r + 1), i32(o + W)",
            *indented(ref),
            f"    d = s1 / {n}",
            "    mean = ref + d",
            "    square = maximum(s2 - s1 * d, f32(0))",
            *indented(then),
            "    ch = i32(ch + threads)",
        ]

    sums = [line for i in lanes for line in (f"d = v{i} - h{i}", f"s{i} += d", f"q{i} += d * d")]
    statistics = [
        f"{values('h')} = {', '.join(['f32(0)'] * LANES)}",
        *each("s{i} = f32(0)"),
        *each("q{i} = f32(0)"),
        "k, part, slot = first, i32(0), slots",
        f"while part < {PARTS}:",
        *(line for p in range(PARTS) for line in (f"    if part == {p}:", f"        landed{p}()")),
        "    if part == 0:",
        f"        {values('h')} = held_values(slot, i32(first < kept))",
        "    part = i32(part + 1)",
        "    stop = i32(min(kept, i32(begin + part * quarter)))",
        "    while k < stop:",
        f"        {values('v')} = held_values(slot, i32(1))",
        *indented(sums, 2),
        "        k = i32(k + T)",
        "        slot = i32(slot + step)",
        *stream("< end", "+", sums),
        "part_n = f32(1) / maximum(f32(full + i32(t < extra)), f32(1))",
        *each("shared[i32({i} * pitch + tid)] = h{i} + s{i} * part_n"),
        *each("shared[i32(Q + {i} * pitch + tid)] = maximum(q{i} - s{i} * s{i} * part_n, f32(0))"),
        "cuda.syncthreads()",
    ]
    of_threads = [
        "i = quotient(ch, V)",
        "o = i32(i * pitch + (ch - i * V))",
        "ref = shared[o]",
        "r, o = sub, i32(o + sub * V)",
        "while r < T:",
        *indented(add("f32(full + i32(r < extra))", "shared[o]", "shared[Q + o]")),
        "    r, o = i32(r + subs), i32(o + subs * V)",
    ]
    record = "statistics + ((i64(item) * i64(B) + i64({})) * i64(W) * i64(2) + i64(ch)) * i64(4)"
    block_statistics = merged(
        of_threads,
        "maximum(f32(end - begin), f32(1))",
        ["i = quotient(ch, V)", "ref = shared[i32(i * pitch + (ch - i * V))]"],
        [f"at = {record.format('block')}", "put(at, mean)", "put(at + i64(W) * i64(4), square)"],
    )
    of_blocks = [
        f"ref = get({record.format('0')}, i32(1))",
        "if sub == 0:",
        "    shared[F + ch] = ref",
        "r = sub",
        "while r < B:",
    ]
    for u in range(BATCH):
        of_blocks += [
            f"    r{u} = i32(r + {u} * subs)",
            f"    at = {record.format(f'r{u}')}",
            f"    m{u} = get(at, i32(r{u} < B))",
            f"    q{u} = get(at + i64(W) * i64(4), i32(r{u} < B))",
        ]
    for u in range(BATCH):
        of_blocks += [f"    many = f32(max(i32(0), min(chunk, i32(K - r{u} * chunk))))", *indented(add("many", f"m{u}", f"q{u}"))]
    of_blocks += [f"    r = i32(r + {BATCH} * subs)"]
    spread = "square" if grouped else "f32(1) / sqrt(square / f32(K) + eps)"
    whole = merged(of_blocks, "f32(K)", ["ref = shared[F + ch]"], ["shared[F + ch] = mean", f"shared[F + W + ch] = {spread}"])
    whole += ["cuda.syncthreads()"]
    if grouped:  # a thread has a group of the tile

        def channels(*lines: str) -> list[str]:
            at = "        o = i32(F + (j & 7) * V + (j >> 3))"
            return ["    j = i32(i * share)", "    while j < last:", at, *indented([*lines], 2), "        j = i32(j + 1)"]

        whole += [
            "i = tid",
            "while i * share < W:",
            "    last = i32(i * share + share)",
            "    mean, square = f32(0), f32(0)",
            *channels("mean += shared[o]"),
            "    mean = mean / f32(share)",
            *channels("d = shared[o] - mean", "square += shared[W + o] + f32(K) * d * d"),
            "    square = f32(1) / sqrt(square / (f32(K) * f32(share)) + eps)",
            *channels("shared[o] = mean", "shared[W + o] = square"),
            "    i = i32(i + threads)",
            "cuda.syncthreads()",
        ]
    write = f"store(({', '.join(f'(v{i} - a{i}) * b{i}' for i in lanes)}), i32(image * K + k), c, e)"
    apply = [
        *each("a{i} = shared[i32(F + {i} * V + g)]"),
        *each("b{i} = shared[i32(F + W + {i} * V + g)]"),
        "k = i32(first + (full + i32(t < extra) - 1) * T)",
        "low = i32(max(kept, first))",
        *stream(">= low", "-", [write]),
        "k, slot = first, slots",
        "while k < kept:",
        f"    {values('v')} = held_values(slot, i32(1))",
        f"    {write}",
        "    k = i32(k + T)",
        "    slot = i32(slot + step)",
    ]
    return [
        "tid, block, grid = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)",
        "shared = cuda.shared.array(0, f32)",
        "threads, W = i32(T * V), i32(V * 8)",
        "t = quotient(tid, V)",
        "g = i32(tid - t * V)",
        "subs = i32(max(i32(1), T >> 3))",
        "sub = quotient(tid, W) if T >= 8 else i32(0)",
        "own_ch = i32(tid - sub * W)",
        "pitch = i32(threads + 8)",
        "Q, S1 = i32(8 * pitch), i32(16 * pitch)",
        "S2 = i32(S1 + subs * W)",
        "F = i32(S2 + subs * W)",
        f"slots = i32(shared_address(shared) + (F + 2 * W) * 4 + tid * {LANES * size})",
        f"step = i32(threads * {LANES * size})",
        # Its share of an item's pixels. A GPU that runs fewer blocks has smaller teams, or teams that take more items.
        "B = i32(min(blocks, grid))",
        "team, teams = quotient(block, B), quotient(grid, B)",
        "block = i32(block - team * B)",
        "chunk = quotient(i32(K + B - 1), B)",
        "begin = i32(min(K, i32(block * chunk)))",
        "end = i32(min(K, i32(begin + chunk)))",
        "kept = i32(min(end, i32(begin + held)))",
        f"quarter = i32(quotient(i32(held + {PARTS} * T - 1), i32({PARTS} * T)) * T)",
        "first = i32(begin + t)",
        "full = quotient(i32(end - begin), T)",
        "extra = i32(end - begin - full * T)",
        "item = team if team < teams else items",
        "while item < items:",
        "    image = quotient(item, tiles)",
        "    c = i32(((item - image * tiles) * V + g) * 8)",
        f"    base = x + (i64(image) * i64(xn) + i64(c)) * i64({size})",
        "    inside = i32(c < present)",
        "    counter = counters + i64(item) * i64(8)",
        *indented([*load, *statistics, *block_statistics]),
        "    arrive(counter, tid)",
        "    await_all(counter, B, tid)",
        *indented([*whole, *apply]),
        "    leave(counter, B, tid)",
        "    item = i32(item + teams)",
    ]
