"""Normalization of channels-last images that shared memory holds: one launch, x is read once.

A team of blocks takes an image (or a few vectors of channels of one): each block copies its share of the pixels to shared memory,
passes on the statistics of each channel, merges those of the whole team, and writes its pixels from there. What it does not
hold is read a second time, last pixels first, as they were the last to come to the L2 cache.

Large images are for teams of as many blocks as there are multiprocessors, which pass on statistics through memory and must run
at once. Where there are many images, teams are clusters of a few small blocks: several of a multiprocessor's belong to different
teams, so that some read and some write while others wait for each other, and a cluster that is done makes room for the next.

Each thread sums up what 8 channels of its pixels deviate by from an origin, and the squares of that (the shifted sums of Chan,
Golub and LeVeque, 1983). The origin is the median of three pixels' values in the group's first channel, the same for all blocks:
as these are some of the data, little cancels however far the mean is from zero, and sums of threads, blocks and channels are
merged by adding them up, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm, prod

from tccompile.arch import Arch
from tccompile.ir.expr import walk
from tccompile.ir.ops import Norm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import power, unravel, unravel_args
from tccompile.kernels.norm_split import LANES, groups_of, pixels_of, refusal_of
from tccompile.kernels.spec import F32, I32, LAUNCH_US, Config, Counters, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import DeviceText, KernelText, Scope, TextKernel, intrinsic, parameters

RECORD = 8
"""Bytes of what blocks pass on of a group: the sums of deviations and of their squares."""

PARTS = 4
"""Groups of copies to shared memory: the first are summed up while the last are on their way."""

BATCH = 9
"""Pairs of other blocks' records that a thread reads at once from memory."""

AT_ONCE = 4
"""Sums in shared memory that a thread reads at once."""

ORIGINS = ((3, 7), (8, 29), (13, 53))
"""Pixels of an origin: so many sixteenths of them and so many more, away from an image's edge."""

TEAMS = (1, 2, 4, 8, 16, 32)
"""Teams that are no clusters, where there are not as many as items."""

WHOLE = 64
"""Vectors of a pixel's channels that a block reads at most: all of them where that is enough."""

CLUSTER = 8
"""Blocks of a cluster. Of 4 they were slower on an H200."""


CHEAP = {"acc", "load", "const", "cast", "add", "sub", "mul", "neg", "min", "max", "relu"}
"""What an epilogue takes next to no time for."""


class NormTeam(TextKernel):
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

        def wide(*most: int) -> dict[int, None]:
            return dict.fromkeys(whole * max(1, min(m, -(-x.padded[1] // LANES)) // whole) for m in most)

        def shares(vectors: int, threads: int, cluster: int, teams: int) -> tuple[Config, _Shares]:
            config = _config(vectors, threads, cluster, teams)
            return config, _shares(op, program, config, arch)

        for vectors, threads in ((v, t) for v in wide(8, 16, WHOLE) for t in (256, 512) if v <= t):
            items = shares(vectors, threads, 0, 1)[1].items
            for teams in sorted({n for n in (items, *TEAMS) if n <= items and n <= arch.sms and items <= 8 * n}):
                config, s = shares(vectors, threads, 0, teams)
                if s.held >= min(s.threads, s.chunk) and 3 * s.held > s.chunk and s.vectors * s.threads % 32 == 0:
                    yield config
        if not arch.tma:
            return
        for vectors, threads in ((v, t) for v in wide(4, 8) for t in (128, 256, 512) if v <= t):
            config, s = shares(vectors, threads, CLUSTER, 0)
            if s.held and s.held >= s.chunk >= s.threads and s.vectors * s.threads % 32 == 0:
                yield config

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        """What comes one after the other, all traffic, and what is read again, from L2; as measured on an H200."""
        assert isinstance(op, Norm)
        x, s = program.tensors[op.x], _shares(op, program, config, arch)
        size, traffic = prod(x.padded) * x.dtype.size, traffic_us(op, program, arch)
        pixels = ceil(s.chunk / s.threads)  # of a thread
        costly = sum(e.fn not in CHEAP for e in walk(op.epilogue.expr))
        if config["cluster"]:
            resident = resident_of(s.smem, config["threads"], arch)
            rounds = ceil(s.items * s.blocks / (0.9 * arch.sms * resident))
            together = min(resident, ceil(s.items * s.blocks / arch.sms))
            spread = min(1.0, 2 * s.blocks * s.items / arch.sms)
            each = 2.1 + 1.75 * max(0.0, s.vectors * s.threads / 384 - 1 / 3) ** 0.5 + pixels * (0.05 + 0.11 * costly)
            return LAUNCH_US + 1.2 * traffic / spread + rounds * each / together**0.5
        again = 0.55 * (512 / config["threads"]) * size * (1 - min(1.0, s.held / s.chunk)) / (arch.gbps * 1e3)
        moved = 0.85 * (traffic + again) / min(1.0, 2 * s.blocks * s.teams / arch.sms)
        if s.held < s.chunk:  # pieces of pixels are read twice from more places
            moved *= 1 + 0.16 / s.vectors
        if s.tiles > 1 and size > 24 << 20:  # pieces of pixels, from memory
            moved *= 1 + 1.15 / s.vectors
        if s.tiles > s.teams == 1:  # by the same blocks one after the other
            moved *= 1.06
        waits = ceil(s.items / s.teams) * (4.9 + 0.9 * (config["threads"] / 256 - 1) + pixels * (0.06 + 0.17 * costly))
        return LAUNCH_US + waits + moved

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Norm)
        x, y = program.tensors[op.x], program.tensors[op.y]
        if 0 in y.padded or not prod(x.shape):
            return Work(())
        frame = epilogue.frame_of(op, program)
        spec = epilogue.describe(op, program, frame, LANES)
        groups, s, walk = groups_of(op), _shares(op, program, config, arch), pixels_of(op, program)
        share = x.shape[1] // groups if groups else 1
        row = x.padded[1] * x.dtype.size
        launch = Launch(
            code(
                self.name,
                x=x.dtype.value,
                depth=walk.depth,
                grouped=share > 1,
                threads=config["threads"],
                cluster=config["cluster"],
                line=min(256, power(row // 2 + 1)) if s.tiles > 1 and row >= 128 and arch.cp_async else 0,
                rows=_rows(spec),
                streamed=_streamed(op, program, arch),
                epilogue=spec.params,
            ),
            grid=(s.blocks * s.teams, 1, 1),
            block=s.vectors * s.threads,
            args=(
                *(Ptr(op.x), Scratch(), Counters(), F32(op.eps)),
                *map(I32, (s.vectors, s.threads, prod(x.shape[2:]), s.blocks, s.items, s.tiles, s.held)),
                *map(I32, (x.strides[0], x.padded[1], share, s.lanes)),
                *walk.args,
                *spec.args,
            ),
            smem=s.smem,
            cooperative=not config["cluster"],
        )
        passed_on = 0 if config["cluster"] else s.items * s.groups * -(-s.blocks // 2) * 2 * RECORD
        return Work((launch,), scratch=passed_on, counters=8 * s.items)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        x, depth, cluster, rows = DType(params["x"]), params["depth"], params["cluster"], params["rows"]
        space = "global.cs" if params["streamed"] else "global"
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]), rows, space=space)
        words = LANES * x.size // 4
        scope = {
            "read_words": intrinsic("ptx.memory.load_words", words, "global.nc"),
            "held_words": intrinsic("ptx.memory.load_words", words, "shared"),
            "element": intrinsic("ptx.memory.load", x, 1, True, "global.nc"),
            "deviations": intrinsic("ptx.memory.deviations", x, LANES),
            "scaled": intrinsic("ptx.memory.scaled", x, LANES),
            "inner": unravel(depth),
            "get4": intrinsic("ptx.memory.load", DType.F32, 4, True, "global.cg"),
            "put2": intrinsic("ptx.memory.store", DType.F32, 2),
            "own": intrinsic("ptx.memory.load", DType.F32, 1, False, "shared"),
            "own8": intrinsic("ptx.memory.load", DType.F32, LANES, False, "shared"),
            "keep": intrinsic("ptx.memory.store", DType.F32, 1, False, "shared"),
            "keep8": intrinsic("ptx.memory.store", DType.F32, LANES, False, "shared"),
            "shuffle": intrinsic("ptx.simt.shuffle"),
            "quotient": intrinsic("ptx.mma.divide"),
            "shared_address": intrinsic("ptx.mma.shared_address"),
            "store": stored.function,
            "ahead": stored.ahead,
            **_meeting(bool(cluster), arch),
            **_copies(arch, params["line"], bool(params["streamed"])),
        }
        signature = {
            **parameters("address", "x, statistics, counters"),
            "eps": "float",
            **parameters("int", "V, T, K, blocks, items, tiles, held, xn, present, share, lanes"),
            "wk": unravel_args(depth),
            "e": stored.kinds,
        }
        threads = params["threads"]
        together = max(1, (512 if rows == 4 else 256) // threads) if cluster else 1  # as far as registers last
        text = lines(x, depth, params["grouped"], bool(cluster), rows)
        return KernelText(signature, text, scope, threads, together, cluster or 1)


def _config(vectors: int, threads: int, cluster: int, teams: int) -> Config:
    """vectors of channels of an item, threads of a block, blocks of a cluster (0: the team is not one), teams that work at once
    (0: as many as there is room for)."""
    return {"vectors": vectors, "threads": threads, "cluster": cluster, "teams": teams}


@dataclass(frozen=True)
class _Shares:
    """How the work is shared out.

    vectors, threads  of 8 channels that a block reads of a pixel (whole groups), and threads of each (a power of 2)
    tiles, items      blocks of channels of an image, and of all images
    blocks, teams     of a team, and teams that there are
    chunk, held       pixels of a block; those that shared memory has room for
    groups, lanes     of channels of an item, and neighbouring threads that add up a group's sums (a power of 2)
    smem              bytes of shared memory
    """

    vectors: int
    threads: int
    tiles: int
    items: int
    blocks: int
    teams: int
    chunk: int
    held: int
    groups: int
    lanes: int
    smem: int


def _shares(op: Norm, program: Program, config: Config, arch: Arch) -> _Shares:
    """Teams that are no clusters have as many blocks as there are multiprocessors, as far as all threads have pixels."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    wide, pixels = config["vectors"], max(1, prod(x.shape[2:]))
    threads = power(config["threads"] // wide + 1) // 2
    tiles = -(-max(x.padded[1], y.padded[1]) // (wide * LANES))
    items = x.shape[0] * tiles
    teams = config["teams"] or items
    blocks = config["cluster"] or max(1, min(-(-pixels // threads), arch.sms // max(teams, 1)))
    chunk = -(-pixels // blocks)
    turn = threads * wide * LANES * x.dtype.size  # bytes of a pixel for each thread
    beside = 4 * _beside(wide, threads)
    turns = max(0, min((arch.smem_block - beside) // turn, max(1, -(-chunk // threads))))
    groups = wide * LANES // (x.shape[1] // op.groups if op.groups else 1)
    lanes = min(32, power(wide * threads // groups + 1) // 2) if wide * threads % 32 == 0 else 1  # in warps of all threads
    return _Shares(
        wide, threads, tiles, items, blocks, teams, chunk, turns * threads, groups, max(1, lanes), beside + turns * turn
    )


def resident_of(smem: int, threads: int, arch: Arch) -> int:
    """Blocks of clusters that a multiprocessor has room for: in shared memory, in threads, and in registers, 128 a thread."""
    return min(arch.smem_sm // (smem + 1024), arch.threads_sm // threads, 512 // threads)


def _beside(wide: int, threads: int) -> int:
    """Numbers in shared memory beside x: sums of each thread, of some of these, and of each group; see `lines`."""
    return 2 * LANES * wide * (threads + max(1, threads // 8)) + 5 * LANES * wide


def _rows(spec: epilogue.EpilogueSpec) -> int:
    """Pixels that are stored at once: fewer where the epilogue needs many registers."""
    plain = spec.form.y.mode == "vector" and len(spec.form.loads) <= 2 and not spec.form.loads_by_row
    return 4 if plain else 2


def _streamed(op: Norm, program: Program, arch: Arch) -> bool:
    """Whether L2 should not keep y, nor what is copied of x: they are too large for others to find them there."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    return prod(x.padded) * x.dtype.size + prod(y.padded) * y.dtype.size > arch.l2 * 2**20


def _meeting(cluster: bool, arch: Arch) -> Scope:
    """How the blocks of a team meet: `arrive` with what they pass on, `await_all`, `done` with what others passed on, `leave`;
    and `theirs`, a number in the shared memory of another block of the cluster."""
    if cluster:
        arrive, wait = intrinsic("ptx.hopper.cluster_arrive_at"), intrinsic("ptx.hopper.cluster_wait_at")
        theirs = intrinsic("ptx.hopper.load_cluster_f32")
        return {"arrive": arrive, "await_all": wait, "done": arrive, "leave": wait, "theirs": theirs}
    return {
        "arrive": intrinsic("ptx.exchange.arrive", arch.cp_async),
        "await_all": intrinsic("ptx.exchange.await_all", arch.cp_async),
        "done": DeviceText("done", "counters, tid", ["pass"], {}),
        "leave": intrinsic("ptx.exchange.leave"),
    }


def _copies(arch: Arch, line: int, once: bool) -> Scope:
    """`copy` of 16 bytes to shared memory, `commit` of a group of copies, and `landed0` …: a wait for each group.

    line: bytes around them that are to come to L2 at the same time, for other teams, or 0. once: L2 is to give up what is copied
    before others, such as the pixels that are read twice.
    """
    if arch.cp_async:
        waits = {f"landed{i}": intrinsic("ptx.mma.cp_async_wait", PARTS - 1 - i) for i in range(PARTS)}
        return {
            "copy": intrinsic("ptx.mma.cp_async_with", line, once), "commit": intrinsic("ptx.mma.cp_async_commit"), **waits,
        }  # fmt: skip
    at_once = ["a, b, c, d = load_chunk(address, inside)", "store_chunk(slot, a, b, c, d)"]
    chunks = {"load_chunk": intrinsic("ptx.mma.load_chunk"), "store_chunk": intrinsic("ptx.mma.store_chunk")}
    nothing = DeviceText("nothing", "", ["pass"], {})
    copy = DeviceText("copy_at_once", "slot, address, inside", at_once, chunks)
    return {"copy": copy, "commit": nothing, **{f"landed{i}": nothing for i in range(PARTS)}}


def lines(x: DType, depth: int, grouped: bool, cluster: bool, rows: int) -> list[str]:
    """The kernel's text. Thread (t, g) of T × V: pixels first, first + T … of its block's, up to `end`, and vector g.

    Of its pixels those below `kept` are in shared memory, the others are read twice.
    Shared memory, in rows of W = 8 V floats, one for each channel: from P on sums of deviations, a row for each t, and as many of
    squares; from A on those of T / subs rows of these together, subs rows, and as many; from O, M and R on a row of origins, of
    means and of scales; from E on sums of groups, two rows, for the others of the cluster. Then x: vectors at `slots` and steps
    of it, for k < kept. Sums of a group are added up by `lanes` threads of a warp.
    """
    lanes, each_row, size = range(LANES), range(rows), x.size

    def indented(lines: list[str], levels: int = 1) -> list[str]:
        return ["    " * levels + line for line in lines]

    def address(k: str) -> str:
        offset = f"i64({k}) * i64(wk[0])" if depth == 1 else f"inner({k}, wk)"
        return f"base + {offset} * i64({size})"

    def fetch(words: str, k: str, inside: str) -> str:
        return f"{words} = read_words({address(k)}, i32({inside}))"

    copies = [
        "k, part, slot = first, i32(0), slots",
        f"while part < {PARTS}:",
        "    part = i32(part + 1)",
        "    stop = i32(min(kept, i32(begin + part * quarter)))",
        "    while k < stop:",
        f"        at = {address('k')}",
        *(f"        copy(i32(slot + {b}), at + i64({b}), bytes_inside)" for b in range(0, LANES * size, 16)),
        "        k = i32(k + T)",
        "        slot = i32(slot + step)",
        "    commit()",
    ]

    def stream(far: str, body: list[str]) -> list[str]:
        """Text that reads `rows` pixels k, k + T … from memory, as w0 …, those at `far` meanwhile, and goes on with these."""

        def ahead(k: str) -> list[str]:
            lines = []
            for r in each_row:
                at = f"k{r} = i32({k} + i32({r}) * T)"
                lines += [at, fetch(f"next{r}", f"max(k{r}, i32(0))", f"i32(kept <= k{r} and k{r} < end) & inside")]
            return lines

        return [
            *ahead("k"),
            "while k >= kept and k < end:",
            *(f"    w{r} = next{r}" for r in each_row),
            f"    far = i32({far})",
            *indented([*ahead("far"), *body]),
            "    k = far",
        ]

    def added(first: str, step: str, limit: str, place: str) -> list[str]:
        """Text that adds up the sums at `place` of {r}, for r = first, first + step …, some at a time: s1 and s2."""
        text = [f"r = {first}", f"while r < {limit}:"]
        for u in range(AT_ONCE):
            text += [f"    r{u} = i32(r + i32({u}) * {step})", f"    at = i32({place.format(r=f'min(r{u}, i32({limit} - 1))')})"]
            text += [f"    a{u}, b{u} = own(at), own(i32(at + far))"]
        for u in range(AT_ONCE):
            inside = f"r{u} < {limit}"
            text += [f"    s1 += select({inside}, a{u}, f32(0))", f"    s2 += select({inside}, b{u}, f32(0))"]
        return [*text, f"    r = i32(r + i32({AT_ONCE}) * {step})"]

    together = [  # of `lanes` neighbours
        "half = lanes >> i32(1)",
        "while half > 0:",
        "    o1 = shuffle(s1, half)",
        "    o2 = shuffle(s2, half)",
        "    s1, s2, half = s1 + o1, s2 + o2, half >> i32(1)",
    ]
    pixels = [f"i64(min(i32(K - 1), i32((K >> 4) * i32({m}) + i32({o}))))" for m, o in ORIGINS]
    offsets = [f"{p} * i64(wk[0])" if depth == 1 else f"inner(i32({p}), wk)" for p in pixels]
    asked = [
        "at = i32(quotient(ch, share) * share) if share > 1 else ch",
        "there = i32(ch < W and i32(i32(item - image * tiles) * W + at) < present)",
        *(f"e{i} = element(start + ({o} + i64(at)) * i64({size}), there)" for i, o in enumerate(offsets)),
    ]
    load = [  # origins are asked for first: behind the pixels they would come last; each is the median of three
        "ch = tid",
        *asked,
        "if t == 0:",
        "    ahead(c, e)",
        *copies,
        "while ch < W:",
        "    keep(i32(O + ch * 4), maximum(minimum(e0, e1), minimum(maximum(e0, e1), e2)))",
        "    ch = i32(ch + threads)",
        "    if ch < W:",
        *indented(asked, 2),
        "cuda.syncthreads()",
    ]
    statistics = [
        "part = i32(0)",
        f"h, sums = own8(i32(O + g * 32)), ({'f32(0), ' * 2 * LANES})",
        f"while part < {PARTS}:",
        *(line for p in range(PARTS) for line in (f"    if part == {p}:", f"        landed{p}()")),
        "    k, slot = i32(first + part * quarter), i32(slots + part * quarter_bytes)",
        "    part = i32(part + 1)",
        "    stop = i32(min(kept, i32(begin + part * quarter)))",
        "    while k < stop:",
        "        two = i32(k + T < stop)",
        "        a, b = held_words(slot, i32(1)), held_words(i32(slot + step), two)",
        "        sums = deviations(sums, h, a)",
        "        if two != 0:",
        "            sums = deviations(sums, h, b)",
        "        k = i32(k + 2 * T)",
        "        slot = i32(slot + 2 * step)",
    ]
    if not cluster:  # a cluster holds all of them
        taken_up = [(f"if k + i32({r}) * T < end:", f"    sums = deviations(sums, h, w{r})") for r in each_row]
        statistics += ["k = i32(kept + t)", *stream(f"k + i32({rows}) * T", [line for pair in taken_up for line in pair])]
    if grouped:
        of_rows = added("i32(0)", "i32(1)", "subs", "A + ({r} * W + group * share + i) * 4")
        of_group = ["i = lane", "while i < share and in_group != 0:", *indented(of_rows), "    i = i32(i + lanes)"]
    else:
        of_group = ["if in_group != 0:", *indented(added("lane", "lanes", "subs", "A + ({r} * W + group) * 4"))]
    # Of the block: sums of threads, of some rows of threads' and of all, for each channel, and those of groups.
    lane_sums = [", ".join(f"sums[{i + first}]" for i in lanes) for first in (0, LANES)]
    record = "statistics + ((i64(item) * i64(G) + i64(group)) * i64(pairs) * i64(2) + i64({})) * i64(8)"
    pass_on = ["keep(i32(E + group * 4), s1)", "keep(i32(E + (W + group) * 4), s2)"]
    block_statistics = [
        f"keep8(i32(P + tid * 32), {lane_sums[0]})",
        f"keep8(i32(P + (threads + tid) * 32), {lane_sums[1]})",
        "cuda.syncthreads()",
        "ch, far = own_ch, i32(threads * 32)",
        "while ch < W:",
        "    s1, s2 = f32(0), f32(0)",
        *indented(added("sub", "subs", "T", "P + ({r} * W + ch) * 4")),
        "    at = i32(A + (sub * W + ch) * 4)",
        "    keep(at, s1)",
        "    keep(i32(at + subs * W * 4), s2)",
        "    ch = i32(ch + threads)",
        "cuda.syncthreads()",
        "first_group, far = i32(0), i32(subs * W * 4)",
        "while first_group < G:",
        "    group = i32(first_group + own_group)",
        "    in_group = i32(own_group < at_once and group < G)",
        "    s1, s2 = f32(0), f32(0)",
        *indented(of_group),
        *indented(together),
        "    if lane == 0 and in_group != 0:",
        *indented(pass_on if cluster else [f"put2({record.format('block')}, s1, s2)"], 2),
        "    first_group = i32(first_group + at_once)",
    ]
    if cluster:
        taken = [
            "while i < B and in_group != 0:",
            "    s1 += theirs(i32(E + group * 4), i)",
            "    s2 += theirs(i32(E + (W + group) * 4), i)",
            "    i = i32(i + lanes)",
        ]
    else:
        taken = [f"at = {record.format('0')}", "while i < pairs and in_group != 0:"]
        for u in range(BATCH):
            taken += [f"    r{u} = i32(i + i32({u}) * lanes)"]
            taken += [f"    a{u}, b{u}, c{u}, d{u} = get4(at + i64(r{u}) * i64(16), i32(r{u} < pairs))"]
        for u in range(BATCH):
            other = f"i32(2 * r{u} + 1) < B"  # a number of blocks may be odd
            taken += [f"    s1 += a{u} + select({other}, c{u}, f32(0))", f"    s2 += b{u} + select({other}, d{u}, f32(0))"]
        taken += [f"    i = i32(i + i32({BATCH}) * lanes)"]
    known = [
        "origin = own(i32(O + ch * 4))",
        "keep(i32(M + ch * 4), origin + d)",
        "keep(i32(R + ch * 4), scale)",
    ]
    whole = [
        "first_group, inverse = i32(0), f32(1) / (f32(K) * f32(share))",
        "while first_group < G:",
        "    group = i32(first_group + own_group)",
        "    in_group = i32(own_group < at_once and group < G)",
        "    s1, s2 = f32(0), f32(0)",
        "    i = lane",
        *indented([*taken, *together]),
        "    d = s1 * inverse",
        "    scale = f32(1) / sqrt(maximum(s2 - s1 * d, f32(0)) * inverse + eps)",
        "    i = lane",
        "    while i < share and in_group != 0:",
        "        ch = i32(group * share + i)",
        *indented(known, 2),
        "        i = i32(i + lanes)",
        "    first_group = i32(first_group + at_once)",
        "done(counter, tid)",
        "cuda.syncthreads()",
    ]

    def write(words: str, limit: str) -> str:
        results = " + ".join(f"scaled({words.format(r=r)}, means, scales)" for r in each_row)
        return f"store({results}, i32(image * K + k), T, i32(image * K + {limit}), c, e)"

    apply = ["means, scales = own8(i32(M + g * 32)), own8(i32(R + g * 32))"]
    if not cluster:
        apply += [
            "k = i32(kept + t)",
            f"k = i32(k + (quotient(i32(max(end - k, i32(0)) + {rows} * T - 1), i32({rows} * T)) - 1) * {rows} * T)",  # the last
            *stream(f"k - i32({rows}) * T", [write("w{r}", "end")]),
        ]
    held = "held_words(i32(slot + i32({r}) * step), i32(k + i32({r}) * T < kept))"
    apply += [
        "k, slot = first, slots",
        "while k < kept:",
        f"    {write(held, 'kept')}",
        f"    k = i32(k + i32({rows}) * T)",
        f"    slot = i32(slot + i32({rows}) * step)",
    ]
    return [
        "tid, block, grid = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)",
        "shared = cuda.shared.array(0, f32)",
        "threads, W = i32(T * V), i32(V * 8)",
        "t = quotient(tid, V)",
        "g = i32(tid - t * V)",
        "subs = i32(max(i32(1), T >> 3))",
        "sub = quotient(tid, W) if T >= 8 else i32(0)",
        "own_ch = i32(tid - sub * W) if sub < subs else W",
        "G, at_once = quotient(W, share), quotient(threads, lanes)",
        "own_group = quotient(tid, lanes)",
        "lane = i32(tid - own_group * lanes)",
        "P = i32(shared_address(shared))",
        "A = i32(P + threads * 64)",
        "O = i32(A + subs * W * 8)",
        "M = i32(O + W * 4)",
        "R = i32(M + W * 4)",
        "E = i32(R + W * 4)",
        f"slots = i32(E + W * 8 + tid * {LANES * size})",
        f"step = i32(threads * {LANES * size})",
        # Its share of an item's pixels. A GPU that runs fewer blocks has smaller teams, or teams that take more items.
        "B = i32(min(blocks, grid))",
        "pairs = i32(B + 1) >> 1",
        "team, teams = quotient(block, B), quotient(grid, B)",
        "block = i32(block - team * B)",
        "chunk = quotient(i32(K + B - 1), B)",
        "begin = i32(min(K, i32(block * chunk)))",
        "end = i32(min(K, i32(begin + chunk)))",
        "kept = i32(min(end, i32(begin + held)))",
        f"quarter = quotient(i32(held + {PARTS} * T - 1), i32({PARTS} * T))",  # of what shared memory has room for
        "quarter, quarter_bytes = i32(quarter * T), i32(quarter * step)",
        "first = i32(begin + t)",
        "item = team if team < teams else items",
        "while item < items:",
        "    image = quotient(item, tiles)",
        "    c = i32(((item - image * tiles) * V + g) * 8)",
        f"    base = x + (i64(image) * i64(xn) + i64(c)) * i64({size})",
        f"    start = x + (i64(image) * i64(xn) + i64(item - image * tiles) * i64(W)) * i64({size})",
        "    inside = i32(c < present)",
        "    bytes_inside = i32(inside << 4)",
        "    counter = counters + i64(item) * i64(8)",
        *indented([*load, *statistics, *block_statistics]),
        "    arrive(counter, tid)",
        "    await_all(counter, B, tid)",
        *indented([*whole, *apply]),
        "    leave(counter, B, tid)",
        "    item = i32(item + teams)",
    ]
