"""Two products of vectors in one launch: y = epilogue(f(x @ wᵀ + b) @ vᵀ), where launches are most of what the products cost.

A block computes all hidden units of one vector, and of its results 64. So no block waits for another; the first weights are
read once a block, from the L2 cache. A warp follows `rows` rows of w; a lane takes every 32nd vector of 8 elements, `turns` of
each row at once. Of v, whose rows are short, eight threads share a row; their first vectors are asked for before the first
product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.ir.expr import Expr
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Mlp, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import Lines, decode, encode
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, Value, Work, code
from tccompile.kernels.text import Called, KernelText, TextKernel, indented, intrinsic, parameters

WARPS = 16
THREADS = 32 * WARPS
VECTOR = 8
RESULTS = 64
"""Results of a block."""

SHARING = THREADS // RESULTS
"""Threads that share a row of v."""

UNDER_WAY = 20
"""Vectors that a thread asks for at once, of w and x: as many as it has registers for."""

HIDDEN = 256
"""The most hidden units."""

FRAME = (0, 2, 3, 1)
"""Rows and lanes of its result, as the epilogue takes them: one pixel's channels."""

ADDRESSES, NUMBERS = "x, w, v, b", "channels, chunks, units, v_chunks, columns, results, x_row, x_step, w_row, v_row"


class MlpKernel(TextKernel):
    """Every Mlp of at most HIDDEN hidden units, in float32."""

    name = "mlp"
    realises = Mlp

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Mlp)
        for name in op.operands:
            if (t := program.tensors[name]).dtype not in (DType.F16, DType.BF16, DType.F32):
                return f"{name} is {t.dtype.value}; it multiplies float16, bfloat16 and float32"
        for name in (op.w, op.v):
            t = program.tensors[name]
            if t.strides[1] != 1 or any(n % VECTOR for n in (t.padded[1], t.strides[0], t.offset)):
                return f"rows of {name} are not whole vectors of {VECTOR} elements"
        if (units := program.tensors[op.w].shape[0]) > HIDDEN:
            return f"it has {units} hidden units; it takes {HIDDEN} at most"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        yield {}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Mlp)
        w, y = program.tensors[op.w], program.tensors[op.y]
        waves = ceil_div(y.shape[0] * ceil_div(y.padded[1], RESULTS), arch.sms)
        own = measured(arch).mlp
        each = own.start_us + w.span * w.dtype.size / own.l2_bytes
        return measured(arch).launch_us + waves * each

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Mlp)
        x, w, v = (program.tensors[name] for name in (op.x, op.w, op.v))
        images = program.op_shape(op)[0]
        units, channels = w.shape[:2]
        chunks, v_chunks = ceil_div(channels, VECTOR), ceil_div(units, VECTOR)
        share = min(4, ceil_div(units, WARPS))  # rows of a warp
        groups = epilogue.lane_groups(op, program, FRAME)
        if images * groups == 0:
            return Work(())
        step = x.strides[1] if channels > 1 else 1
        rows = [0 if images == 1 else x.strides[0], x.offset]
        whole = step == 1 and x.padded[1] >= chunks * VECTOR and not any(n % VECTOR for n in rows)
        spec = epilogue.describe(op, program, FRAME, VECTOR)
        numbers = (channels, chunks, units, v_chunks, v.shape[0], groups * VECTOR, rows[0], step, w.strides[0], v.strides[0])
        launch = Launch(
            code(
                self.name,
                x=x.dtype.value,
                w=w.dtype.value,
                v=v.dtype.value,
                bias=program.tensors[op.b].dtype.value if op.b else "",
                whole=whole,
                rows=share,
                turns=min(5, UNDER_WAY // (share + 1), ceil_div(chunks, 32)),
                hidden=encode(op.hidden),
                epilogue=spec.params,
            ),
            grid=(ceil_div(groups * VECTOR, RESULTS), images, 1),
            block=THREADS,
            args=(Ptr(op.x), Ptr(op.w), Ptr(op.v), Ptr(op.b or op.w), *map(I32, numbers), *spec.args),
        )
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]))
        scope: dict[str, Called] = {
            "store": stored.function,
            "shuffle": intrinsic("ptx.simt.shuffle"),
            "dot": intrinsic("ptx.simt.dot", VECTOR),
            "read_one": intrinsic("ptx.memory.load", DType(params["x"]), 1, True, "global.nc"),
            "read_bias": intrinsic("ptx.memory.load", DType(params["bias"] or "float32"), 1, True, "global.nc"),
        }
        for name in ("x", "w", "v"):
            dtype = DType(params[name])
            scope[f"read_{name}"] = intrinsic("ptx.memory.load_words", VECTOR * dtype.size // 4, "global.nc")
            scope[f"unpack_{name}"] = intrinsic("ptx.memory.floats", dtype, VECTOR)
        signature = {**parameters("address", ADDRESSES), **parameters("int", NUMBERS), "e": stored.kinds}
        x, w, v = (DType(params[name]) for name in ("x", "w", "v"))
        bias = DType(params["bias"]) if params["bias"] else None
        writer = Writer(x, w, v, params["rows"], params["turns"], params["whole"], bias, decode(params["hidden"]))
        return KernelText(signature, writer.lines(), scope, THREADS)


@dataclass(frozen=True)
class Writer:
    """Writes the kernel's text. Block: results blockIdx.x * RESULTS … of vector blockIdx.y.

    x, w, v  their types
    rows     of w that a warp takes at once
    turns    pieces of a row that a lane reads at once
    whole    whether x is read by pieces, too, or one by one
    bias     b's type, if there is one
    hidden   what becomes of a sum of the first product
    """

    x: DType
    w: DType
    v: DType
    rows: int
    turns: int
    whole: bool
    bias: DType | None
    hidden: Expr

    def lines(self) -> list[str]:
        return [*self._places(), *self._hidden_units(), "cuda.syncthreads()", *self._own_result(), *self._stored()]

    def _places(self) -> list[str]:
        """And the first weights of the second product, which need not wait for the first."""
        size = self.v.size
        return [
            "tid, image = i32(cuda.threadIdx.x), i32(cuda.blockIdx.y)",
            "lane, warp = tid & i32(31), tid >> i32(5)",
            f"hidden = cuda.shared.array({HIDDEN + VECTOR}, f32)",
            f"found = cuda.shared.array({RESULTS}, f32)",
            f"first = i32(cuda.blockIdx.x * {RESULTS})",
            f"own, part = i32(first + tid // i32({SHARING})), tid % i32({SHARING})",
            f"v_from = v + i64(own) * (i64(v_row) * i64({size}))",
            "v_end = v_chunks if own < columns else i32(0)",
            f"ahead = read_v(v_from + i64(part) * i64({VECTOR * size}), i32(part < v_end))",
            f"x_from = x + i64(image) * (i64(x_row) * i64({self.x.size}))",
            f"if tid < i32({VECTOR}):",
            "    hidden[units + tid] = f32(0)",  # the rest of the last vector, times zeros
        ]

    def _hidden_units(self) -> list[str]:
        """All of them, since every result needs all: a warp takes `rows` at once, a0 … are its lanes' parts of their sums."""
        return [
            f"row = warp * i32({self.rows})",
            "while row < units:",
            *indented(self._biases()),
            "    k = lane",
            "    while k < chunks:",
            *indented(indented(self._products())),
            *indented([*self._over_lanes(), "if lane == 0:", *indented(self._keep())]),
            f"    row = i32(row + i32({WARPS * self.rows}))",
        ]

    def _biases(self) -> list[str]:
        out = []
        for r in range(self.rows):
            bias = "f32(0)"
            if self.bias:
                bias = f"read_bias(b + i64(row + i32({r})) * i64({self.bias.size}), lane == 0 and end{r} > 0)"
            out += [
                f"w{r} = w + i64(row + i32({r})) * (i64(w_row) * i64({self.w.size}))",
                f"end{r} = chunks if row + i32({r}) < units else i32(0)",
                f"a{r} = {bias}",
            ]
        return out

    def _products(self) -> list[str]:
        rows, out = range(self.rows), []
        for u in range(self.turns):
            out.append(f"k{u} = i32(k + i32({32 * u}))")
            out += [f"p{u}_{r} = read_w(w{r} + i64(k{u}) * i64({VECTOR * self.w.size}), i32(k{u} < end{r}))" for r in rows]
            out += self._read_x(u)
        for u in range(self.turns):
            one = ", ".join(f"x{u}_{i}" for i in range(VECTOR))
            out.append(f"xs = unpack_x({_words(f'x{u}', self.x)})" if self.whole else f"xs = ({one})")
            out += [f"a{r} = dot(a{r}, unpack_w({_words(f'p{u}_{r}', self.w)}), xs)" for r in rows]
        return [*out, f"k = i32(k + i32({32 * self.turns}))"]

    def _read_x(self, u: int) -> list[str]:
        size, out = self.x.size, []
        if self.whole:
            return [f"x{u} = read_x(x_from + i64(k{u}) * i64({VECTOR * size}), i32(k{u} < chunks))"]
        for i in range(VECTOR):
            at = f"i32(k{u} * i32({VECTOR}) + i32({i}))"
            out.append(f"x{u}_{i} = read_one(x_from + i64({at}) * (i64(x_step) * i64({size})), {at} < channels)")
        return out

    def _over_lanes(self) -> list[str]:
        pairs = [(half, r) for half in (16, 8, 4, 2, 1) for r in range(self.rows)]
        return [line for half, r in pairs for line in (f"other = shuffle(a{r}, i32({half}))", f"a{r} = a{r} + other")]

    def _keep(self) -> list[str]:
        out = []
        for r in range(self.rows):
            text = Lines()
            text.lines.append(f"z = a{r}")
            result = text.value(self.hidden, lambda e: "z")
            out += [*text.lines, f"if end{r} > 0:", f"    hidden[row + i32({r})] = {result}"]
        return out

    def _own_result(self) -> list[str]:
        """A result of the second product by SHARING threads."""
        out = [
            "total, k = f32(0), part",
            "while k < v_end:",
            f"    at = k * i32({VECTOR})",
            f"    hs = ({', '.join(f'hidden[at + i32({i})]' for i in range(VECTOR))})",
            f"    total = dot(total, unpack_v({_words('ahead', self.v)}), hs)",
            f"    k = i32(k + i32({SHARING}))",
            f"    ahead = read_v(v_from + i64(k) * i64({VECTOR * self.v.size}), i32(k < v_end))",
        ]
        half = SHARING // 2
        while half:
            out += [f"other = shuffle(total, i32({half}))", "total = total + other"]
            half //= 2
        return out

    def _stored(self) -> list[str]:
        """By vectors, through shared memory."""
        return [
            "if part == 0:",
            f"    found[tid // i32({SHARING})] = total",
            "cuda.syncthreads()",
            f"at = tid * i32({VECTOR})",
            f"if tid < i32({RESULTS // VECTOR}) and first + at < results:",
            f"    store(({', '.join(f'found[at + i32({i})]' for i in range(VECTOR))}), image, i32(first + at), e)",
        ]


def _words(name: str, dtype: DType) -> str:
    """Those of a vector, as arguments."""
    return ", ".join(f"{name}[{k}]" for k in range(VECTOR * dtype.size // 4))
