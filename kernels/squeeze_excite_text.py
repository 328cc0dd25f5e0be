"""The text of `squeeze_excite`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tccompile.ir.expr import Expr
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, Parameters
from tccompile.kernels.spec import Value
from tccompile.kernels.text import Called, KernelText, indented, intrinsic, parameters

BYTES = DType.I8, DType.U8

LANES = 8
"""Channels of a vector."""

AT_ONCE = 4
"""Sums that a thread reads at once."""

NUMBERS = "V, T, K, chunk, xn, xp, yn, yp, x_padded, y_padded, channels, units, w_row, w_present, v_row, v_columns, v_chunks"


class Writer:
    """Writes the kernel's text. Thread (t, g) of T × V: pixels first, first + T … of its block's, and vector g of its channels.

    Shared memory, in numbers of 4 bytes, W = 8 V for each of the block's channels: from P on each thread's sums; from A on those
    of all threads, `subs` rows; from M on means; from E on the block's part of the first product, and from H on hidden units,
    both to a multiple of 8; from G on gates.
    """

    def __init__(self, params: Mapping[str, Value], units: Sequence[tuple[Expr, Sequence[DType]]], expr: Expr) -> None:
        self.p, self.units, self.expr = params, units, expr
        self.x, self.y, self.w, self.v = (DType(params[name]) for name in ("x", "y", "w", "v"))
        self.blocks = params["across"] * params["along"]
        self.more = Parameters("extra{}")
        self.first, self.second = (self._unit(*unit) for unit in units)
        self.scalars = self.more.scalars(expr)

    def _unit(self, expr: Expr, kinds: Sequence[DType]) -> tuple[Expr, list[tuple[str, DType]], list[str]]:
        """A unit's expression, the addresses and types of what it reads, and its constants."""
        addresses = [(self.more.take("address"), kind) for kind in kinds]
        return expr, addresses, self.more.scalars(expr)

    def text(self) -> KernelText:
        signature = {
            **parameters("address", "x, y, w, v"), **parameters("int", NUMBERS), **parameters("float", "scale, shift"),
            **self.more.signature,
        }  # fmt: skip
        kept = self.p["pixels"] * self._words(self.x)
        resident = max(1, min(65536 // (self.p["threads"] * (48 + kept)), 2048 // self.p["threads"], 4))
        return KernelText(signature, self.lines(), self._scope(), self.p["threads"], resident, self.blocks)

    def _scope(self) -> dict[str, Called]:
        kinds = {kind for _, loads, _ in (self.first, self.second) for _, kind in loads}
        scope: dict[str, Called] = {
            f"read_{kind.value}": intrinsic("ptx.memory.load", kind, 1, True, "global.nc") for kind in kinds
        }
        for name in ("x", "w", "v"):
            dtype = getattr(self, name)
            scope[f"words_{name}"] = intrinsic("ptx.memory.load_words", self._words(dtype), "global.nc")
            scope[f"unpack_{name}"] = intrinsic("ptx.memory.floats", dtype, LANES)
        rounds = (True,) if self.y in BYTES else ()
        return scope | {
            "put": intrinsic("ptx.memory.store", self.y, LANES, True, "global", *rounds),
            "own": intrinsic("ptx.memory.load", DType.F32, 1, False, "shared"),
            "own8": intrinsic("ptx.memory.load", DType.F32, LANES, False, "shared"),
            "keep": intrinsic("ptx.memory.store", DType.F32, 1, False, "shared"),
            "keep8": intrinsic("ptx.memory.store", DType.F32, LANES, False, "shared"),
            "theirs": intrinsic("ptx.hopper.load_cluster_f32"),
            "arrive": intrinsic("ptx.hopper.cluster_arrive"),
            "await_all": intrinsic("ptx.hopper.cluster_wait"),
            "wait_for_earlier_grids": intrinsic("ptx.hopper.wait_for_earlier_grids"),
            "let_later_grids_start": intrinsic("ptx.hopper.let_later_grids_start"),
            "dot": intrinsic("ptx.simt.dot", LANES),
            "shuffle": intrinsic("ptx.simt.shuffle"),
            "quotient": intrinsic("ptx.mma.divide"),
            "shared_address": intrinsic("ptx.mma.shared_address"),
        }

    def lines(self) -> list[str]:
        waits, early = ["wait_for_earlier_grids()", "let_later_grids_start()"], self.p["early"]
        return [
            *self._places(),
            *([*self._ahead(), *waits] if early else waits),
            *self._read(),
            *self._sums(),
            *self._means(),
            *([] if early else self._ahead()),
            *self._parts(),
            *self._hidden(),
            *self._gates(),
            *self._results(),
            "await_all()",
        ]

    @staticmethod
    def _words(dtype: DType) -> int:
        return LANES * dtype.size // 4

    def _places(self) -> list[str]:
        across, threads, subs = (self.p[name] for name in ("across", "threads", "subs"))
        return [
            "tid, number = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
            "shared = cuda.shared.array(0, f32)",
            f"image, rank = number >> i32({self.blocks.bit_length() - 1}), number & i32({self.blocks - 1})",
            f"part, piece = rank >> i32({across.bit_length() - 1}), rank & i32({across - 1})",
            "lane, warp = tid & i32(31), tid >> i32(5)",
            "t = quotient(tid, V)",
            "g, W = i32(tid - t * V), i32(V * 8)",
            "c0 = i32(piece * W)",
            "c = i32(c0 + g * 8)",
            "begin = i32(part * chunk)",
            "end = select(t < T, i32(min(K, begin + chunk)), i32(0))",
            "first = i32(begin + t)",
            "P = i32(shared_address(shared))",
            f"A = i32(P + i32({threads * LANES * 4}))",
            f"M = i32(A + W * i32({4 * subs}))",
            "E = i32(M + W * 4)",
            f"H = i32(E + v_chunks * i32({LANES * 4}))",
            f"G = i32(H + v_chunks * i32({LANES * 4}))",
        ]

    def _read(self) -> list[str]:
        """All of the thread's pixels."""
        out = [
            f"base = x + (i64(image) * i64(xn) + i64(c)) * i64({self.x.size})",
            "stop = select(c < x_padded, end, i32(0))",
        ]
        for j in range(self.p["pixels"]):
            out.append(f"k{j} = i32(first + i32({j}) * T)")
            out.append(f"w{j} = words_x(base + i64(k{j}) * (i64(xp) * i64({self.x.size})), i32(k{j} < stop))")
        return out

    def _values(self, j: int) -> str:
        """The elements of pixel j."""
        return f"unpack_x({', '.join(f'w{j}[{i}]' for i in range(self._words(self.x)))})"

    def _sums(self) -> list[str]:
        """Those of the thread, and of all of the block's threads."""
        out = [f"a = {self._values(0)}", *(f"s{i} = a[{i}]" for i in range(LANES))]
        for j in range(1, self.p["pixels"]):
            out += [f"a = {self._values(j)}", *(f"s{i} = s{i} + a[{i}]" for i in range(LANES))]
        threads, subs = self.p["threads"], self.p["subs"]
        out += [
            f"keep8(i32(P + tid * i32({LANES * 4})), {', '.join(f's{i}' for i in range(LANES))})",
            "cuda.syncthreads()",
            "u = tid",
            f"while u < W * i32({subs}):",
            "    sub = quotient(u, W)",
            "    total, r, at = f32(0), sub, i32(P + u * 4)",
            "    while r < T:",
        ]
        for k in range(AT_ONCE):
            ahead = f"i32(r + i32({k * subs})) < T"
            out.append(f"        e{k} = own(select({ahead}, i32(at + W * i32({4 * k * subs})), at))")
        for k in range(AT_ONCE):
            out.append(f"        total = total + select(i32(r + i32({k * subs})) < T, e{k}, f32(0))")
        return [
            *out,
            f"        r, at = i32(r + i32({AT_ONCE * subs})), i32(at + W * i32({4 * AT_ONCE * subs}))",
            "    keep(i32(A + u * 4), total)",
            f"    u = i32(u + i32({threads}))",
            "cuda.syncthreads()",
        ]

    def _means(self) -> list[str]:
        """The block's part of each channel's mean."""
        return [
            "u = tid",
            "while u < W:",
            "    total = own(i32(A + u * 4))",
            *(f"    total = total + own(i32(A + (u + W * i32({s})) * 4))" for s in range(1, self.p["subs"])),
            "    keep(i32(M + u * 4), total * scale + select(part == i32(0), shift, f32(0)))",
            f"    u = i32(u + i32({self.p['threads']}))",
            "cuda.syncthreads()",
        ]

    def _ask_rows(self) -> list[str]:
        """Asks for the lane's vectors of some rows of the first weights."""
        out = ["ch = i32(c0 + k * 8)", "inside = i32(k < V) & i32(ch < w_present)"]
        for r in range(self.p["rows"]):
            at = f"w + (i64(row + i32({r})) * i64(w_row) + i64(ch)) * i64({self.w.size})"
            out.append(f"q{r} = words_w({at}, inside & i32(row + i32({r}) < units))")
        return out

    def _ahead(self) -> list[str]:
        """Asks for the first vectors of both products' weights."""
        return [f"row, k = i32(warp * i32({self.p['rows']})), lane", *self._ask_rows(), "u = tid", *self._ask()]

    def _parts(self) -> list[str]:
        """What the block's means give for each hidden unit."""
        rows, warps = range(self.p["rows"]), self.p["threads"] // 32
        out = ["while row < units:", *(f"    b{r} = f32(0)" for r in rows), "    k = lane", "    while k < V:"]
        out.append(f"        ms = own8(i32(M + k * i32({LANES * 4})))")
        for r in rows:
            words = ", ".join(f"q{r}[{i}]" for i in range(self._words(self.w)))
            out.append(f"        b{r} = dot(b{r}, unpack_w({words}), ms)")
        out += ["        k = i32(k + 32)", *indented(self._ask_rows(), 2)]
        for half in (16, 8, 4, 2, 1):
            for r in rows:
                out += [f"    other = shuffle(b{r}, i32({half}))", f"    b{r} = b{r} + other"]
        out.append("    if lane == 0:")
        for r in rows:
            out += [f"        if row + i32({r}) < units:", f"            keep(i32(E + (row + i32({r})) * 4), b{r})"]
        return [*out, f"    row, k = i32(row + i32({warps * len(rows)})), lane", *indented(self._ask_rows())]

    def _ask(self) -> list[str]:
        """Asks for the first of u's vectors of the second weights."""
        sharing = self.p["sharing"]
        return [
            f"own_ch, own_k = u >> i32({sharing.bit_length() - 1}), u & i32({sharing - 1})",
            "known = i32(own_ch < W) & i32(c0 + own_ch < v_columns)",
            f"v_from = v + i64(c0 + own_ch) * (i64(v_row) * i64({self.v.size}))",
            f"ahead = words_v(v_from + i64(own_k) * i64({LANES * self.v.size}), known & i32(own_k < v_chunks))",
        ]

    def _value(self, unit: tuple[Expr, list[tuple[str, DType]], list[str]], channel: str, known: str) -> tuple[list[str], str]:
        """The lines that compute what becomes of a sum z, and its name."""
        expr, loads, scalars = unit
        text = Lines(scalars)
        names = [text.let(f"read_{kind.value}({at} + i64({channel}) * i64({kind.size}), {known})") for at, kind in loads]
        result = text.value(expr, lambda e: "z" if e.fn == "acc" else names[e.value])  # type: ignore[index]
        return text.lines, result

    def _hidden(self) -> list[str]:
        """The hidden units, of the sums of all blocks of the cluster."""
        lines, result = self._value(self.first, "tid", "i32(tid < units)")
        return [
            "arrive()",
            "await_all()",
            "if tid < v_chunks * 8:",
            "    z = f32(0)",
            "    if tid < units:",
            *(f"        z = z + theirs(i32(E + tid * 4), i32({b}))" for b in range(self.blocks)),
            *indented(lines),
            f"    keep(i32(H + tid * 4), select(tid < units, {result}, f32(0)))",
            "arrive()",
            "cuda.syncthreads()",
        ]

    def _gates(self) -> list[str]:
        """What each of the block's channels is multiplied by. All lanes of a warp exchange sums."""
        sharing, size = self.p["sharing"], self.v.size
        lines, result = self._value(self.second, "i32(c0 + own_ch)", "known")
        words = ", ".join(f"ahead[{i}]" for i in range(self._words(self.v)))
        body = [
            "z = f32(0)",
            "while own_k < v_chunks:",
            f"    z = dot(z, unpack_v({words}), own8(i32(H + own_k * i32({LANES * 4}))))",
            f"    own_k = i32(own_k + i32({sharing}))",
            f"    ahead = words_v(v_from + i64(own_k) * i64({LANES * size}), known & i32(own_k < v_chunks))",
        ]
        half = sharing // 2
        while half:
            body += [f"other = shuffle(z, i32({half}))", "z = z + other"]
            half //= 2
        body += [
            f"if i32(u & i32({sharing - 1})) == 0 and own_ch < W:",
            *indented(lines),
            f"    keep(i32(G + own_ch * 4), {result})",
            f"u = i32(u + i32({self.p['threads']}))",
            *self._ask(),
        ]
        return ["u = tid", f"while i32(u & i32(-32)) < W * i32({sharing}):", *indented(body), "cuda.syncthreads()"]

    def _results(self) -> list[str]:
        text = Lines(self.scalars)
        out = [
            f"gates = own8(i32(G + g * i32({LANES * 4})))",
            f"to = y + (i64(image) * i64(yn) + i64(c)) * i64({self.y.size})",
            "stop = select(c < y_padded, end, i32(0))",
        ]
        for j in range(self.p["pixels"]):
            text.lines.append(f"a{j} = {self._values(j)}")
            results = [self._result(text, f"a{j}[{i}]", f"gates[{i}]") for i in range(LANES)]
            if self.p["masked"]:
                results = [text.let(f"select(c + i32({i}) < channels, {v}, f32(0))") for i, v in enumerate(results)]
            at = f"to + i64(k{j}) * (i64(yp) * i64({self.y.size}))"
            text.lines.append(f"put({at}, {', '.join(results)}, i32(k{j} < stop))")
        return [*out, *text.lines]

    def _result(self, text: Lines, element: str, gate: str) -> str:
        """The name of a result, as the store takes it."""

        def leaf(e: Expr) -> str:
            return element if e.fn == "acc" else gate

        if self.y in BYTES:
            return text.unrounded(self.expr, leaf, self.y)
        return text.stored(text.value(self.expr, leaf), self.expr.dtype, self.y)
