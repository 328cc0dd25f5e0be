"""Matrix products of many rows with a short K and few columns, whose time is that of reading rows and storing results.

Every warp has all of the weights in registers, as fragments of mma.sync, and goes through 16 rows at a time, which come from
memory as fragments: nothing passes through shared memory, and nothing is waited for but loads. Both operands may permute K alike,
so lane t of four takes 8 neighbouring bytes, 8t … of every 32; and columns may come in any order, so the columns of a lane's
sums are `lanes` neighbours, which it stores at once.

A warp has `groups` of 16 rows under way, and asks for the next ones before it multiplies these. Where the weights of all columns
are more than its registers hold, blocks side by side have a share of the columns each, and read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div, hint, least, round_up
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_sm90_cost import slots_of
from tccompile.kernels.implicit_gemm import OPERANDS, Problem, describe, unfit
from tccompile.kernels.parts.operands import STEP
from tccompile.kernels.ptx.atoms import FROM, warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, indented, intrinsic, parameters

TYPES = (DType.F16, DType.BF16, DType.I8, DType.U8, *FLOAT8)
"""What it multiplies."""

WARPS = 4
THREADS = 32 * WARPS

ROWS = 16
"""Of a product."""

PIECE = 8
"""Bytes that a lane reads at once."""

MOST_WEIGHTS = 48
"""Registers for weights."""

MOST_ACROSS = 4
"""Times 4 · lanes columns: what an epilogue reads by column stays in registers, too."""

MOST_SHARES = 2
"""Of the columns: so often rows are read. With 3 to 8 of them others were faster in 8 of 10 layers on an H200."""

PROMOTED = 4
"""Steps of K whose rough sums are made by themselves: see `Atom.rough`."""


@dataclass(frozen=True)
class Shape:
    """What a warp multiplies at once.

    steps   of 32 bytes of K; half, whether only half of the last one is there
    lanes   neighbouring columns that a lane stores
    across  how many times 4 · lanes columns a warp has
    groups  of 16 rows that are read together
    shares  how many times as many columns there are, at most
    """

    steps: int
    half: bool
    lanes: int
    across: int
    groups: int
    shares: int = 1

    @property
    def tiles(self) -> int:
        """Products of 8 columns in 4 · lanes of them."""
        return self.lanes // 2

    @property
    def weights(self) -> int:
        """Registers of a warp's weights."""
        return 2 * self.steps * self.tiles * self.across

    def resident(self, loads: int) -> int:
        """Blocks of a multiprocessor that have registers: for weights, rows of two turns, sums, what an epilogue loads, and what
        else a thread needs."""
        registers = self.weights + 8 * self.groups * self.steps + 4 * self.tiles + (2 + loads * self.across) * self.lanes + 56
        return next((n for n in (8, 6, 5, 4, 3) if registers <= 65536 // (THREADS * n)), 2)


def shape_of(problem: Problem, groups: int) -> Shape:
    """The shape of a problem whose K and columns are known."""
    depth = round_up(problem.channels * problem.x.dtype.size, 16)
    lanes = next((n for n in (2, 4) if problem.stored <= 4 * n), 8)
    steps, columns = ceil_div(depth, STEP), ceil_div(problem.stored, 4 * lanes)
    most = max(1, min(MOST_ACROSS, MOST_WEIGHTS // (steps * lanes)))
    shares = ceil_div(columns, most)
    return Shape(steps, depth % STEP > 0, lanes, ceil_div(columns, shares), groups, shares)


class GemmThin(TextKernel):
    """Gemm of many rows, a K of a few hundred bytes at most and few columns: fp16 from sm_75 on, bf16 and integers of 8 bits from
    sm_80, floats of 8 bits from sm_89."""

    name = "gemm_thin"
    realises: type[Op] = Gemm
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        problem = describe(op, program)
        if isinstance(problem, str):
            return problem
        if reason := unfit(problem, TYPES):
            return reason
        atom = warp_atom(arch, OPERANDS[problem.x.dtype], OPERANDS[problem.w.dtype])
        if atom is None or (atom.m, atom.n) != (ROWS, 8):
            return f"{arch.name} has no product of 16 rows and 32 bytes of {problem.x.dtype.value}"
        if not problem.linear:
            return "it gathers its rows from an image"
        if problem.batches != 1:
            return f"it has {problem.batches} batches; it takes one product"
        if not all(problem.k_major):
            return f"{problem.x.name} or {problem.w.name} is transposed; neighbours along K are read at once"
        if 0 in (problem.rows, problem.columns, problem.channels):
            return "an extent is 0"
        shape = shape_of(problem, 1)
        if shape.weights > MOST_WEIGHTS or shape.shares > MOST_SHARES:
            return f"its K of {problem.channels} by {problem.stored} columns are more weights than a warp has registers for"
        if epilogue.describe(op, program, epilogue.frame_of(op, program), shape.lanes).form.y.mode != "vector":
            return f"{shape.lanes} columns of {problem.y.name} are not stored at once where they are neighbours in memory"
        if problem.rows >= 1 << 29 or problem.x.span * problem.x.dtype.size // PIECE >= 1 << 31:
            return f"{problem.x.name} has {problem.rows} rows; it counts 2**29 of them, and pieces of 8 bytes in 31 bits"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        for groups in (1, 2, 4):
            if groups == 1 or groups * shape_of(problem, groups).steps <= 4:
                yield {"groups": groups}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        own, shape = measured(arch).gemm_thin, shape_of(problem, int(config["groups"]))  # type: ignore[arg-type]
        loads = len(epilogue.describe(op, program, epilogue.frame_of(op, program), shape.lanes).form.loads)
        slots = own.functions * slots_of(op.epilogue.expr, problem.y.dtype, arch)
        rows, warps = hint(problem.rows) * shape.shares, arch.sms * shape.resident(loads) * WARPS
        turns = ceil_div(rows, ROWS * shape.groups * warps)
        # Instructions for 16 rows: to ask for them, and of each 4 · lanes columns products and what becomes of two rows' results
        each = 20 + 10 * shape.steps + shape.across * (shape.tiles * shape.steps + 2 * shape.lanes * (4 + loads + slots) + 20)
        issue = ceil_div(rows, ROWS) * each / (arch.sms * own.issue * measured(arch).cycles_us)
        moving = max(own.moving * traffic_us(op, program, arch), issue)
        ready = own.ready_us + own.weight_us * shape.weights + own.across_us * (shape.across - 1)
        both = max(moving, ready) + own.exposed * min(moving, ready)
        return own.start_us + both + own.turn_us * turns + own.first_us * shape.groups / turns

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        problem = describe(op, program)
        assert isinstance(problem, Problem)
        shape = shape_of(problem, int(config["groups"]))  # type: ignore[arg-type]
        x, w = problem.x, problem.w
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), shape.lanes)
        turns, resident = ceil_div(problem.rows, ROWS * shape.groups * WARPS), shape.resident(len(spec.form.loads))
        numbers = (
            problem.rows,
            problem.columns,
            problem.x_pixel[2] * x.dtype.size // PIECE,
            problem.w_column * w.dtype.size // PIECE,
        )
        launch = Launch(
            code(
                self.name,
                x=x.dtype.value,
                w=w.dtype.value,
                steps=shape.steps,
                half=shape.half,
                lanes=shape.lanes,
                across=shape.across,
                groups=shape.groups,
                **({"shares": shape.shares} if shape.shares > 1 else {}),
                epilogue=spec.params,
            ),
            grid=(least(turns, ceil_div(arch.sms * resident, shape.shares)), shape.shares, 1),
            block=THREADS,
            args=(Ptr(x.name), Ptr(w.name), *map(I32, numbers), *spec.args),
        )
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        form = epilogue.Form.decoded(params["epilogue"])
        stored = epilogue.source(form, 2)
        x, w = DType(params["x"]), DType(params["w"])
        atom = warp_atom(arch, OPERANDS[x], OPERANDS[w])
        assert atom is not None
        scope = {
            "store": stored.function,
            "read": intrinsic("ptx.memory.load_words", 2, "global.nc"),
            "multiply": intrinsic("ptx.mma.warp_multiply", atom.name, OPERANDS[x], OPERANDS[w]),
        }
        shape = Shape(*(params.get(name, 1) for name in ("steps", "half", "lanes", "across", "groups", "shares")))
        signature = {**parameters("address", "x, w"), **parameters("int", "rows, columns, x_row, w_row"), "e": stored.kinds}
        sums = "f32" if atom.acc == "f32" else "i32"
        taken = "i64" if form.taken is DType.I64 else "f32"
        if sums == "i32" and taken == "f32" and shape.steps * STEP * 255 * 128 < 1 << 22:
            sums, scope["float_from"] = "from", intrinsic("ptx.simt.float_from")
        text = Writer(shape, sums, taken, atom.rough).lines()
        return KernelText(signature, text, scope, THREADS, shape.resident(len(form.loads)))


@dataclass(frozen=True)
class Writer:
    """Writes the kernel's text. Lane (g, t) has rows g and g + 8 of 16, and columns 4 · lanes · q + lanes · t and on of them.

    shape  what the text depends on
    sums   the type of the instruction's sums, as text; "from" for integers added to `atoms.FROM`: to convert others takes
           the unit that a sigmoid takes
    taken  the type that the epilogue takes
    rough  whether sums are promoted (`Atom.rough`)
    """

    shape: Shape
    sums: str
    taken: str
    rough: bool

    def lines(self) -> list[str]:
        """Rows are read one turn ahead, so the loop's text holds two turns."""
        shape = self.shape
        out = [*self._places(), *self._weights(), *self._read(0, "at"), "while at < rows:"]
        for turn in range(2):
            out += indented(self._read(1 - turn, "i32(at + stride)"))
            for i in range(shape.groups):
                out.append(f"    m = i32(at + g + i32({ROWS * i}))")
                for q in range(shape.across):
                    out += indented(self._multiply(turn, i, q))
            out.append("    at = i32(at + stride)")
        return out

    @property
    def _first(self) -> str:
        """The block's first column, where blocks share them."""
        return "first + " if self.shape.shares > 1 else ""

    def _inside(self, s: int, row: str) -> str:
        """Whether the lane's part of step s is there, if the row is: of the last step perhaps half."""
        if s < self.shape.steps - 1:
            return row
        return f"{row} & {'i32(t < i32(2))' if self.shape.half else 'i32(1)'}"

    def _places(self) -> list[str]:
        shape, stride = self.shape, ROWS * self.shape.groups
        out = [
            "tid = i32(cuda.threadIdx.x)",
            "lane, warp = tid & i32(31), tid >> i32(5)",
            "g, t = lane >> i32(2), lane & i32(3)",
            f"at = i32((i32(cuda.blockIdx.x) * i32({WARPS}) + warp) * i32({stride}))",
            f"stride = i32(i32(cuda.gridDim.x) * i32({WARPS * stride}))",
        ]
        if self._first:
            out.append(f"first = i32(i32(cuda.blockIdx.y) * i32({4 * shape.lanes * shape.across}))")
        return out

    def _weights(self) -> list[str]:
        """All of the block's, which registers keep."""
        shape, out = self.shape, []
        for q in range(shape.across):
            for j in range(shape.tiles):
                of_tile = 4 * shape.lanes * q + 2 * j
                out += [
                    f"n = i32({self._first}(g >> i32(1)) * i32({shape.lanes}) + (g & i32(1)) + i32({of_tile}))",
                    f"line = w + (i64(n) * i64(w_row) + i64(t)) * i64({PIECE})",
                    "inside = i32(n < columns)",
                ]
                for s in range(shape.steps):
                    words = f"b{q}_{j}_{s}_0, b{q}_{j}_{s}_1"
                    out.append(f"{words} = read(line + i64({STEP * s}), {self._inside(s, 'inside')})")
        return out

    def _read(self, turn: int, at: str) -> list[str]:
        out = []
        for i in range(self.shape.groups):
            for r in range(2):
                out += [
                    f"m = i32({at} + g + i32({ROWS * i + 8 * r}))",
                    "inside = i32(m < rows)",
                    f"line = x + (i64(m) * i64(x_row) + i64(t)) * i64({PIECE})",
                ]
                for s in range(self.shape.steps):
                    words = f"v{turn}_{i}_{s}_{r}_0, v{turn}_{i}_{s}_{r}_1"
                    out.append(f"{words} = read(line + i64({STEP * s}), {self._inside(s, 'inside')})")
        return out

    def _multiply(self, turn: int, i: int, q: int) -> list[str]:
        shape = self.shape
        out = [line for j in range(shape.tiles) for line in self._sum(turn, i, q, j)]
        convert = "float_from" if self.sums == "from" else self.taken
        values = [f"{convert}(a{j}_{2 * r + k})" for r in range(2) for j in range(shape.tiles) for k in range(2)]
        c = f"i32({self._first}t * i32({shape.lanes}) + i32({4 * shape.lanes * q}))"
        return [*out, "if m < rows:", f"    store(({', '.join(values)}), m, i32(8), rows, {c}, e)"]

    def _sum(self, turn: int, i: int, q: int, j: int) -> list[str]:
        """Tile j's, over all steps; where they are rough, every PROMOTED steps are added up by themselves."""
        out, last = [], self.shape.steps - 1
        acc, part = (", ".join(f"{name}{k}" for k in range(4)) for name in (f"a{j}_", "p"))
        for s in range(last + 1):
            fresh = s % PROMOTED == 0 if self.rough else s == 0
            name = part if self.rough and s >= PROMOTED else acc
            zero = f"i32({FROM})" if self.sums == "from" else f"{self.sums}(0)"
            given = ", ".join([zero] * 4) if fresh else name
            words = [f"v{turn}_{i}_{s}_{r}_{k}" for k in range(2) for r in range(2)]
            out.append(f"{name} = multiply({given}, {', '.join(words)}, b{q}_{j}_{s}_0, b{q}_{j}_{s}_1)")
            if name == part and (s == last or (s + 1) % PROMOTED == 0):
                out += [f"a{j}_{k} += p{k}" for k in range(4)]
        return out


class ConvThin(GemmThin):
    """The same for a 1×1 convolution, whose rows are pixels."""

    name = "conv_thin"
    realises: type[Op] = Conv


THIN = ConvThin(), GemmThin()
