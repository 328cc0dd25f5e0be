"""Matrix products of few rows with weights that are integers of 4 or 8 bits, whose time is that of reading these once.

The weights lie as a warp reads them (`ir/packed.py`): of a tile of 16 rows and 128 of K every lane has 16 bytes, or four times as
many, side by side with those of its neighbours. Integers become numbers in registers by a few operations on their bits, less what
stands for 0: exactly. Sums of a block are multiplied by its scale in float32, so that no weight is ever rounded. As in `gemv.py`,
the warps of a block have other tiles (`across`) or other parts of K (`along`), and K is split between blocks.

plain         float32 multiply-adds; a lane has a quarter of the products of its two rows, which four lanes add up at the end
Tensor Cores  a tile is an mma's 16 rows, the rows of x its columns; a lane's integers become the halves of its fragments

`stages` chunks of 128 of K are under way at a time. Weights are constants, so they are asked for before the grids ahead have
ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tccompile.arch import Arch, Feature
from tccompile.ir import packed
from tccompile.ir.extent import Extent, ceil_div, most, round_up
from tccompile.ir.forms import Packed
from tccompile.ir.ops import Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.gemv import LANES, THREADS, WARPS, added, stored
from tccompile.kernels.implicit_gemm import MOST_SCRATCH, Problem, describe, unaligned
from tccompile.kernels.ptx.atoms import warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Counters, Launch, Ptr, Scratch, Value, Work, code
from tccompile.kernels.text import Called, KernelText, TextKernel, indented, intrinsic, parameters


def stages_of(form: Packed) -> tuple[int, ...]:
    """For how many chunks' words there is room in registers."""
    return (2, 3) if form.bits == 4 and packed.per(form.block) < 8 else (2,)


ADDRESSES = "values, scales, zeros, x, scratch, counters"
NUMBERS = "few, tiles, chunks, each, limit, x_row, stored, groups, scaled, span_m, span_s, zero, row_batch"


def form_of(op: Op, program: Program) -> Packed | None:
    """The integers that an op's weights are made of, if they are known."""
    forms = program.forms.get(op.b, ()) if isinstance(op, Gemm) else ()
    return next((form for form in forms if isinstance(form, Packed)), None)


class _Packed(TextKernel):
    """A Gemm of few rows with weights in their packed form."""

    realises: type[Op] = Gemm
    reads_integers = True
    most: int
    kinds: tuple[DType, ...]

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        form = form_of(op, program)
        if form is None:
            return "its weights are not known as integers of 4 or 8 bits in blocks"
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if problem.rows > self.most:
            return f"it has {problem.rows} rows; integers are read as they are for {self.most} rows at most"
        if self.tensor_cores and warp_atom(arch) is None:
            return f"{arch.name} has no Tensor Core instruction with 16 rows and 8 columns"
        if problem.x.dtype not in self.kinds:
            return f"{problem.x.name} is {problem.x.dtype.value}; it multiplies {' or '.join(k.value for k in self.kinds)}"
        if not problem.k_major[0] or not problem.linear:
            return f"rows of {problem.x.name} do not lie one behind the other"
        return unaligned(problem)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        ranked: list[tuple[float, Config]] = []
        form = form_of(op, program)
        assert form is not None
        for across in (1, 2, 4, 8):
            for wanted in (1, 2, 3, 4, 6, 8, 12, 16, 24):
                for stages in stages_of(form):
                    config: Config = {"across": across, "splits": _Shares(op, program, across, wanted).splits, "stages": stages}
                    shares = _Shares(op, program, across, wanted)
                    fits = wanted == 1 or (shares.scratch(self.rows(shares)) <= MOST_SCRATCH and shares.turns > 0)
                    if fits and wanted <= max(1, shares.chunks // shares.along) and config not in [c for _, c in ranked]:
                        ranked.append((self.cost(op, program, config, arch), config))
        ranked.sort(key=lambda r: r[0])
        yield from (config for _, config in ranked[:8])

    def rows(self, shares: _Shares) -> int:
        """Rows of x as the code has them: room for the most that there are at any size."""
        few = most(shares.problem.rows)
        return round_up(few, 8) if self.tensor_cores else 1 << (few - 1).bit_length()

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        own, shares = measured(arch).gemv_packed, _of(op, program, config)
        form, stages = shares.form, int(config["stages"])  # type: ignore[call-overload]
        padded = self.rows(shares)
        blocks = ceil_div(shares.tiles, shares.across) * shares.splits
        slots = arch.sms * resident(padded, self.tensor_cores)
        moved = sum(program.tensors[name].nbytes for name in form.tensors)
        of_turn = WARPS * moved / (shares.tiles * shares.chunks)  # bytes that a block asks for
        waits = own.crowded_us if slots > arch.sms else own.alone_us
        work = 0.0 if self.tensor_cores else WARPS * packed.TILE * packed.CHUNK * (2 + 3 * padded) / (arch.fp32_tflops * 1e6 / 3)

        def wave(together: int) -> float:
            """All turns of so many blocks at once; a loop's last turns may be none of theirs."""
            turn = max(
                together * of_turn / (arch.gbps * 0.95e3), waits * (own.two_stages if stages == 2 else 1.0), together * work
            )
            return round_up(shares.turns, stages) * turn

        full, rest = divmod(blocks, slots)
        longest = full * wave(slots) + (wave(rest) if rest else 0.0) + (ceil_div(blocks, slots) - 1) * own.next_us
        finish = 0.0
        if shares.splits > 1:
            part = shares.across * packed.TILE * padded * 4
            finish = measured(arch).reduce_us + shares.splits * part / 150e3 + blocks * part / (arch.gbps * 0.7e3)
        return measured(arch).launch_us + own.start_us + longest + finish

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        shares = _of(op, program, config)
        problem, form, few = shares.problem, shares.form, self.rows(shares)
        if problem.rows * problem.stored == 0:
            return Work(())
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), LANES)
        blocks = ceil_div(shares.tiles, shares.across)
        groups = program.tensors[form.scales].shape[1]
        numbers = [problem.rows, shares.tiles, shares.chunks, shares.each, round_up(problem.channels, 8), problem.x_pixel[2]]
        numbers += [problem.stored, ceil_div(problem.stored, LANES), groups, *divider(packed.span(form.block)), form.zero, 0]
        made = code(
            self.name,
            x=problem.x.dtype.value,
            scales=program.tensors[form.scales].dtype.value,
            bits=form.bits,
            per=packed.per(form.block),
            zeros=bool(form.zeros),
            few=few,
            across=shares.across,
            stages=config["stages"],
            swapped=False,
            split=shares.splits > 1,
            epilogue=spec.params,
        )
        addresses = Ptr(form.tensor), Ptr(form.scales), Ptr(form.zeros or form.scales), Ptr(problem.x.name), Scratch(), Counters()
        grid = (blocks, shares.splits, 1)
        launch = Launch(made, grid, THREADS, (*addresses, *map(I32, numbers), *spec.args))
        if shares.splits == 1:
            return Work((launch,))
        return Work((launch,), shares.scratch(few), blocks * 4)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        made = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
        early, x, scales, bits, per = arch.has(Feature.EARLY_START), DType(params["x"]), *_kinds(params)
        space = "global" if early else "global.nc"  # ptxas moves the latter ahead of the wait for the grids before
        unit = 4 if per == 8 else 8
        scope: dict[str, Called] = {
            "store": made.function,
            "read_part": intrinsic("ptx.memory.load", DType.F32),
            "store_part": intrinsic("ptx.memory.store", DType.F32),
            "last_to_arrive": intrinsic("parts.split.last_to_arrive", arch.has(Feature.FENCES)),
            "read_values": intrinsic("ptx.memory.load_words", 4, space),
            "read_scales": intrinsic("ptx.memory.load_words", per * scales.size // 4, space),
            "read_x": intrinsic("ptx.memory.load_words", unit * x.size // 4, space),
            "wait_for_earlier_grids": intrinsic("ptx.hopper.wait_for_earlier_grids"),
            "let_later_grids_start": intrinsic("ptx.hopper.let_later_grids_start"),
        }
        if params["zeros"]:
            scope["read_zeros"] = intrinsic("ptx.memory.load_words", max(per, packed.ZEROS) // 4, space)
        if self.tensor_cores:
            atom = warp_atom(arch)
            assert atom is not None
            columns = params["few"] // 8
            scope["multiply"] = intrinsic("ptx.packed.multiply_chunk", atom.name, bits, per, scales, params["zeros"], columns)
        else:
            scope["multiply"] = intrinsic("ptx.packed.multiply_part", bits, 8 // unit, x, params["few"])
            scope["unpack_scales"] = intrinsic("ptx.memory.floats", scales, per)
            scope["shuffle"] = intrinsic("ptx.simt.shuffle")
        text = _Text(self.tensor_cores, params, early)
        signature = {**parameters("address", ADDRESSES), **parameters("int", NUMBERS), "e": made.kinds}
        blocks = resident(params["few"], self.tensor_cores)
        return KernelText(signature, text.lines(), scope, THREADS, blocks)


def _kinds(params: dict[str, Value]) -> tuple[DType, int, int]:
    return DType(params["scales"]), params["bits"], params["per"]  # type: ignore[return-value]


def resident(few: int, tensor_cores: bool) -> int:
    """Blocks that a multiprocessor holds: as many as have registers for what is under way."""
    return 1 if few > 8 or (few > 2 and not tensor_cores) else 2


class _Shares:
    """How a product is shared out: tiles and chunks of the weights, and which a block has.

    across, along  warps of a block that have other tiles, or other chunks
    splits, each   parts of K, and chunks of one
    turns          chunks of a warp
    """

    def __init__(self, op: Op, program: Program, across: int, splits: int) -> None:
        problem, form = describe(op, program), form_of(op, program)
        assert isinstance(problem, Problem) and form is not None
        self.problem, self.form, self.across, self.along = problem, form, across, WARPS // across
        self.tiles, self.chunks, _ = program.tensors[form.tensor].shape
        self.each = ceil_div(self.chunks, splits)
        self.splits = ceil_div(self.chunks, self.each)
        self.turns = ceil_div(self.each, self.along)

    def scratch(self, few: int) -> Extent:
        """Bytes of the parts of sums."""
        return ceil_div(self.tiles, self.across) * self.splits * self.across * packed.TILE * few * 4


def _of(op: Op, program: Program, config: Config) -> _Shares:
    return _Shares(op, program, config["across"], config["splits"])  # type: ignore[arg-type]


class _Text:
    """The kernel's source.

    Block: tiles blockIdx.x * across …, chunks blockIdx.y * each … . Results of a block lie in shared memory as (along, row, row
    of x). Lane (g, t) has rows g and g + 8 of the warp's tile, which are called 0 and 1, and of the rows of x with Tensor Cores
    g, and g + 8, and else all.
    """

    def __init__(self, tensor_cores: bool, params: dict[str, Value], early: bool) -> None:
        self.tensor_cores, self.params, self.early = tensor_cores, params, early
        self.scales, self.bits, self.per = _kinds(params)
        self.x, self.few, self.across, self.stages = DType(params["x"]), params["few"], params["across"], params["stages"]
        self.zeros = params["zeros"]
        self.unit = 4 if self.per == 8 else 8  # neighbours along K that a lane has
        self.columns = self.few // 8 if tensor_cores else self.few  # of what rows of x a lane reads
        self.near = tensor_cores or self.few * self.x.size <= 4  # whether registers hold two chunks' rows of x
        self.sums = 4 * self.columns if tensor_cores else 2 * self.few
        self.vectors = self.bits // 4  # of each row and chunk
        self.chunk = packed.TILE * packed.CHUNK * self.bits // 8

    def lines(self) -> list[str]:
        along, rows = WARPS // self.across, self.across * packed.TILE
        row_bytes = self.per * self.scales.size
        out = [
            "tid, tile, part = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)",
            "batch = i32(0)",
            f"shared = cuda.shared.array({along * rows * self.few}, f32)",
            "lane, warp = tid & i32(31), tid >> i32(5)",
            "g, t = lane >> i32(2), lane & i32(3)",
            f"own = i32(tile * i32({self.across}) + warp % i32({self.across}))",
            f"first = i32(part * each + warp // i32({self.across}))",
            "end = min(chunks, i32((part + i32(1)) * each)) if own < tiles else i32(0)",
            f"s = values + i64(own) * i64(chunks) * i64({self.chunk}) + i64(lane * i32(16))",
            f"c_row = scales + i64(own) * i64(scaled) * i64({packed.TILE * row_bytes}) + i64(g * i32({row_bytes}))",
        ]
        if self.zeros:
            room = max(self.per, packed.ZEROS)
            out.append(f"n_row = zeros + i64(own) * i64(scaled) * i64({packed.TILE * room}) + i64(g * i32({room}))")
        halves, floats = "i32(zero * i32(65537) + i32(0x64006400))", "f32(i32(8388608) + zero)"
        out.append(f"stood = {halves if self.tensor_cores else floats}")
        out.append(f"past = min(limit, i32(end * i32({packed.CHUNK})))")
        for b in range(self.columns):
            row = f"g + i32({8 * b})" if self.tensor_cores else f"i32({b})"
            out.append(f"x{b} = x + i64({row}) * (i64(x_row) * i64({self.x.size}))")
            out.append(f"past{b} = past if {row} < few else i32(0)")
        out += [f"a{i} = f32(0)" for i in range(self.sums)]
        for stage in range(self.stages - 1):
            out += self.read(stage, f"i32(first + i32({stage * along}))")
        out += ["wait_for_earlier_grids()", "let_later_grids_start()"] if self.early else []
        out += self.read_x(0, "first", range(4)) if self.near else []
        out.append("while first < end:")
        for stage in range(self.stages):
            # Loads come in the order in which they are asked for: rows of x, which are near, ahead of weights of later turns
            near, ahead = stage + 1, stage + self.stages - 1
            out += indented(self.read_x(near % self.stages, f"i32(first + i32({near * along}))", range(4))) if self.near else []
            out += indented(self.read(ahead % self.stages, f"i32(first + i32({ahead * along}))"))
            out += indented(self.multiply(stage, f"i32(first + i32({stage * along}))"))
        out.append(f"    first = i32(first + i32({self.stages * along}))")
        return [*out, *self.kept(), *added(self.params, along, rows, self.few), *stored(self.params, rows, self.few)]

    def read(self, stage: int, at: str) -> list[str]:
        """Ask for a chunk, if it is the warp's: nothing but zeros else."""
        room, size = max(self.per, packed.ZEROS), self.scales.size * self.per
        out = [f"k = {at}", "ok = i32(k < end)", "group = i64(divide(k, span_m, span_s))"]
        for v in range(2 * self.vectors):
            names = ", ".join(f"v{stage}_{4 * v + i}" for i in range(4))
            out.append(f"{names} = read_values(s + i64(k) * i64({self.chunk}) + i64({512 * v}), ok)")
        for r in range(2):
            out.append(f"c{stage}_{r} = read_scales(c_row + group * i64({packed.TILE * size}) + i64({8 * r * size}), ok)")
            if self.zeros:
                out.append(f"n{stage}_{r} = read_zeros(n_row + group * i64({packed.TILE * room}) + i64({8 * r * room}), ok)")
        return out

    def read_x(self, stage: int, at: str, js: Iterable[int]) -> list[str]:
        """Ask for what some of a chunk's 32 of K are multiplied by, in vectors of as many neighbours as a lane has."""
        out = [f"k = i32({at} * i32({packed.CHUNK}) + t * i32({self.unit}))"]
        for j, h in ((j, h) for j in js for h in range(8 // self.unit)):
            out.append(f"at_x = i32(k + i32({32 * j + 16 * h}))")
            for b in range(self.columns):
                out.append(f"x{stage}_{b}_{j}_{h} = read_x(x{b} + i64(at_x) * i64({self.x.size}), i32(at_x < past{b}))")
        return out

    def multiply(self, stage: int, at: str) -> list[str]:
        """A chunk's products."""
        if self.tensor_cores:
            return [self.by_tensor_cores(stage)]
        read = ([] if self.near else self.read_x(stage, at, [j]) for j in range(4))
        return [line for j, x in enumerate(read) for line in (*x, *self.by_cuda_cores(stage, j))]

    def words_of_x(self, stage: int, b: int, js: Iterable[int]) -> str:
        return " + ".join(f"x{stage}_{b}_{j}_{h}" for j in js for h in range(8 // self.unit))

    def by_tensor_cores(self, stage: int) -> str:
        sums = ", ".join(f"a{i}" for i in range(self.sums))
        words = ", ".join(f"v{stage}_{i}" for i in range(8 * self.vectors))
        zeros = f"n{stage}_0 + n{stage}_1" if self.zeros else "(stood,)"
        x = " + ".join(self.words_of_x(stage, b, range(4)) for b in range(self.columns))
        return f"{sums} = multiply(({sums}), ({words}), c{stage}_0 + c{stage}_1, {zeros}, {x})"

    def by_cuda_cores(self, stage: int, j: int) -> list[str]:
        """32 of K: 8 numbers of each of a lane's two rows, of one block or of two."""
        block = packed.CHUNK // self.per
        blocks = [32 * j // block] if block > 16 else [2 * j, 2 * j + 1]
        out, own = [], range(2)
        for r in own:
            words = ", ".join(f"c{stage}_{r}[{i}]" for i in range(self.scales.size * self.per // 4))
            out.append(f"f{r} = unpack_scales({words})")
        factors = ", ".join(f"f{r}[{b}]" for r in own for b in blocks)
        stood = ["stood"] * 2 * len(blocks)
        if self.zeros:
            of_bytes = [(f"n{stage}_{r}[{b // 4}]", 8 * (b % 4)) for r in own for b in blocks]
            stood = [f"f32(i32(8388608) + i32(({word} >> {bit}) & 255))" for word, bit in of_bytes]
        first = [4 * r + j if self.bits == 4 else 4 * (j // 2 * 2 + r) + j % 2 * 2 for r in own]
        words = ", ".join(f"v{stage}_{f + i}" for f in first for i in range(self.vectors))
        sums = ", ".join(f"a{i}" for i in range(self.sums))
        x = " + ".join(self.words_of_x(stage, b, [j]) for b in range(self.columns))
        return [*out, f"{sums} = multiply(({sums}), ({words}), ({factors}), ({', '.join(stood)}), {x})"]

    def kept(self) -> list[str]:
        """The warp's sums, to shared memory."""
        out = [f"to = i32((warp * i32({packed.TILE}) + g) * i32({self.few}))"]
        if self.tensor_cores:
            for b in range(self.columns):
                for i in range(4):
                    out.append(f"shared[to + i32({i // 2 * 8 * self.few + 8 * b + i % 2}) + t * i32(2)] = a{4 * b + i}")
            return out
        for half in (2, 1):
            for i in range(2 * self.few):
                out += [f"other = shuffle(a{i}, i32({half}))", f"a{i} = a{i} + other"]
        out.append("if t == 0:")
        of_rows = [(r * 8 * self.few + b, r * self.few + b) for r in range(2) for b in range(self.few)]
        return out + [f"    shared[to + i32({place})] = a{i}" for place, i in of_rows]


class GemvPacked(_Packed):
    """Of at most 8 rows, on any generation."""

    name = "gemv_packed"
    most = 8
    kinds = (DType.F16, DType.BF16, DType.F32)


class GemvPackedMma(_Packed):
    """Of at most 16 rows of halves, from sm_75 on."""

    name = "gemv_packed_mma"
    tensor_cores = True
    most = 16
    kinds = (DType.F16,)


PACKED = (GemvPackedMma(), GemvPacked())
