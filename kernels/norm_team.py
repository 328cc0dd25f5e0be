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

from tccompile.arch import Arch, Feature
from tccompile.ir.expr import walk
from tccompile.ir.extent import Extent, ceil_div, greatest, least
from tccompile.ir.ops import Norm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.loops import power, unravel, unravel_args
from tccompile.kernels.norm_split import LANES, groups_of, pixels_of, refusal_of
from tccompile.kernels.norm_team_text import PARTS, Writer
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import DeviceText, KernelText, Scope, TextKernel, intrinsic, parameters

RECORD = 8
"""Bytes of what blocks pass on of a group: the sums of deviations and of their squares."""

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
            return dict.fromkeys(whole * max(1, min(m, ceil_div(x.padded[1], LANES)) // whole) for m in most)

        def shares(vectors: int, threads: int, cluster: int, teams: int) -> tuple[Config, _Shares]:
            config = _config(vectors, threads, cluster, teams)
            return config, _shares(op, program, config, arch)

        for vectors, threads in ((v, t) for v in wide(8, 16, WHOLE) for t in (256, 512) if v <= t):
            items = shares(vectors, threads, 0, 1)[1].items
            for teams in sorted({n for n in (items, *TEAMS) if n <= items and n <= arch.sms and items <= 8 * n}):
                config, s = shares(vectors, threads, 0, teams)
                if s.held >= min(s.threads, s.chunk) and 3 * s.held > s.chunk and s.vectors * s.threads % 32 == 0:
                    yield config
        if not arch.has(Feature.CLUSTERS):
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
        pixels, own = ceil_div(s.chunk, s.threads), measured(arch).norm_team  # of a thread
        costly = sum(e.fn not in CHEAP for e in walk(op.epilogue.expr))
        if config["cluster"]:
            resident = resident_of(s.smem, config["threads"], arch)
            rounds = ceil(s.items * s.blocks / (0.9 * arch.sms * resident))
            together = min(resident, ceil_div(s.items * s.blocks, arch.sms))
            spread = min(1.0, 2 * s.blocks * s.items / arch.sms)
            more = max(0.0, s.vectors * s.threads / 384 - 1 / 3) ** 0.5
            each = own.cluster_us + own.cluster_more_us * more + pixels * (own.pixel_us + own.costly_us * costly)
            return measured(arch).launch_us + own.cluster_moving * traffic / spread + rounds * each / together**0.5
        again = own.rereading * (512 / config["threads"]) * size * (1 - min(1.0, s.held / s.chunk)) / (arch.gbps * 1e3)
        moved = own.moving * (traffic + again) / min(1.0, 2 * s.blocks * s.teams / arch.sms)
        if s.held < s.chunk:  # pieces of pixels are read twice from more places
            moved *= 1 + own.pieces / s.vectors
        if s.tiles > 1 and size > 24 << 20:  # pieces of pixels, from memory
            moved *= 1 + own.pieces_memory / s.vectors
        if s.tiles > s.teams == 1:  # by the same blocks one after the other
            moved *= own.in_turn
        one = own.team_us + own.team_more_us * (config["threads"] / 256 - 1)
        waits = ceil_div(s.items, s.teams) * (one + pixels * (own.team_pixel_us + own.team_costly_us * costly))
        return measured(arch).launch_us + waits + moved

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
                line=min(256, power(row // 2 + 1)) if s.tiles > 1 and row >= 128 and arch.has(Feature.ASYNC_COPIES) else 0,
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
        passed_on = 0 if config["cluster"] else s.items * s.groups * ceil_div(s.blocks, 2) * 2 * RECORD
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
        lines = Writer(x, depth, params["grouped"], bool(cluster), rows).lines()
        return KernelText(signature, lines, scope, threads, together, cluster or 1)


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
    items: Extent
    blocks: Extent
    teams: Extent
    chunk: Extent
    held: Extent
    groups: int
    lanes: int
    smem: Extent


def _shares(op: Norm, program: Program, config: Config, arch: Arch) -> _Shares:
    """Teams that are no clusters have as many blocks as there are multiprocessors, as far as all threads have pixels."""
    x, y = program.tensors[op.x], program.tensors[op.y]
    wide, pixels = config["vectors"], greatest(1, prod(x.shape[2:]))
    threads = power(config["threads"] // wide + 1) // 2
    tiles = ceil_div(max(x.padded[1], y.padded[1]), wide * LANES)
    items = x.shape[0] * tiles
    teams = config["teams"] or items
    blocks = config["cluster"] or greatest(1, least(ceil_div(pixels, threads), arch.sms // greatest(teams, 1)))
    chunk = ceil_div(pixels, blocks)
    turn = threads * wide * LANES * x.dtype.size  # bytes of a pixel for each thread
    beside = 4 * _beside(wide, threads)
    turns = greatest(0, least((arch.smem_block - beside) // turn, greatest(1, ceil_div(chunk, threads))))
    groups = wide * LANES // (x.shape[1] // op.groups if op.groups else 1)
    lanes = min(32, power(wide * threads // groups + 1) // 2) if wide * threads % 32 == 0 else 1  # in warps of all threads
    return _Shares(
        wide, threads, tiles, items, blocks, teams, chunk, turns * threads, groups, max(1, lanes), beside + turns * turn
    )


def resident_of(smem: int, threads: int, arch: Arch) -> int:
    """Blocks of clusters that a multiprocessor has room for: in shared memory, in threads, and in registers, 128 a thread."""
    return min(arch.smem_sm // (smem + 1024), arch.threads_sm // threads, 512 // threads)


def _beside(wide: int, threads: int) -> int:
    """Numbers in shared memory beside x: sums of each thread, of some of these, and of each group; see `norm_team_text`."""
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
        "arrive": intrinsic("ptx.exchange.arrive", arch.has(Feature.ASYNC_COPIES)),
        "await_all": intrinsic("ptx.exchange.await_all", arch.has(Feature.ASYNC_COPIES)),
        "done": DeviceText("done", "counters, tid", ["pass"], {}),
        "leave": intrinsic("ptx.exchange.leave"),
    }


def _copies(arch: Arch, line: int, once: bool) -> Scope:
    """`copy` of 16 bytes to shared memory, `commit` of a group of copies, and `landed0` …: a wait for each group.

    line: bytes around them that are to come to L2 at the same time, for other teams, or 0. once: L2 is to give up what is copied
    before others, such as the pixels that are read twice.
    """
    if arch.has(Feature.ASYNC_COPIES):
        waits = {f"landed{i}": intrinsic("ptx.mma.cp_async_wait", PARTS - 1 - i) for i in range(PARTS)}
        return {
            "copy": intrinsic("ptx.mma.cp_async_with", line, once), "commit": intrinsic("ptx.mma.cp_async_commit"), **waits,
        }  # fmt: skip
    at_once = ["a, b, c, d = load_chunk(address, inside)", "store_chunk(slot, a, b, c, d)"]
    chunks = {"load_chunk": intrinsic("ptx.mma.load_chunk"), "store_chunk": intrinsic("ptx.mma.store_chunk")}
    nothing = DeviceText("nothing", "", ["pass"], {})
    copy = DeviceText("copy_at_once", "slot, address, inside", at_once, chunks)
    return {"copy": copy, "commit": nothing, **{f"landed{i}": nothing for i in range(PARTS)}}
