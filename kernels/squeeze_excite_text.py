"""The text of `squeeze_excite`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tccompile.ir.expr import Expr
from tccompile.ir.types import DType
from tccompile.kernels.codegen import Lines, Parameters
from tccompile.kernels.loops import exchange
from tccompile.kernels.spec import Value
from tccompile.kernels.text import Called, KernelText, indented, intrinsic, parameters

BYTES = DType.I8, DType.U8

VECTOR = 16
"""Bytes that are copied at once."""

GROUP = 8
"""Weights of a row that a thread multiplies at once."""

AT_ONCE = 4
"""Sums that a thread reads at once."""

NUMBERS = "V, T, K, S, chunk, xn, xp, yn, yp, x_padded, y_padded, channels, units, w_row, w_present, v_row, v_columns, v_chunks"

Unit = tuple[Expr, list[tuple[str, DType]], list[str]]
"""What becomes of a product: an expression, the addresses and types of what it reads, and the names of its constants."""


def lanes_of(dtype: DType) -> int:
    """Channels of a vector of an image."""
    return VECTOR // dtype.size


class Writer:
    """Writes the kernel's text. Thread (t, g) of T × V: pixels first, first + T … of its block's, and vector g of its channels.

    Shared memory, with W for each of the block's channels: numbers, from P on each thread's sums; from A on those of all, S
    rows; from M on means; from E on the block's part of the first product, and from H on hidden units, both to a multiple of 8;
    from G on gates. Then weights: from B on rows of the first ones, and from D on of the second ones, an odd number of eights
    apart, of which neighbours lie in other banks. Then x: vectors at `slots` and steps of it.
    """

    def __init__(self, params: Mapping[str, Value], units: Sequence[tuple[Expr, Sequence[DType]]], expr: Expr) -> None:
        self.p, self.expr = params, expr
        self.x, self.y, self.w, self.v = (DType(params[name]) for name in ("x", "y", "w", "v"))
        self.lanes, self.blocks = lanes_of(self.x), params["blocks"]
        self.more = Parameters("extra{}")
        self.first, self.second = (self._unit(*unit) for unit in units)
        self.scalars = self.more.scalars(expr)

    def _unit(self, expr: Expr, kinds: Sequence[DType]) -> Unit:
        addresses = [(self.more.take("address"), kind) for kind in kinds]
        return expr, addresses, self.more.scalars(expr)

    def text(self) -> KernelText:
        signature = {
            **parameters("address", "x, y, w, v"), **parameters("int", NUMBERS), **parameters("float", "scale, shift"),
            **self.more.signature,
        }  # fmt: skip
        return KernelText(signature, self.lines(), self._scope(), self.p["threads"], self.p["resident"], self.blocks)

    def _scope(self) -> dict[str, Called]:
        kinds = {kind for _, loads, _ in (self.first, self.second) for _, kind in loads}
        scope: dict[str, Called] = {
            f"read_{kind.value}": intrinsic("ptx.memory.load", kind, 1, True, "global.nc") for kind in kinds
        }
        for name, lanes in (("x", self.lanes), ("w", GROUP), ("v", GROUP)):
            dtype = getattr(self, name)
            scope[f"words_{name}"] = intrinsic("ptx.memory.read_words", lanes * dtype.size // 4, "shared")
            scope[f"unpack_{name}"] = intrinsic("ptx.memory.floats", dtype, lanes)
        for name, lanes in (("", 1), ("8", GROUP), ("_vector", self.lanes)):
            scope[f"own{name}"] = intrinsic("ptx.memory.load", DType.F32, lanes, False, "shared")
            scope[f"keep{name}"] = intrinsic("ptx.memory.store", DType.F32, lanes, False, "shared")
        rounds = (True,) if self.y in BYTES else ()
        return scope | {
            "put": intrinsic("ptx.memory.store", self.y, self.lanes, True, "global", *rounds),
            "copy": intrinsic("ptx.mma.cp_async_with", 0, False),
            "commit": intrinsic("ptx.mma.cp_async_commit"),
            "landed": intrinsic("ptx.mma.cp_async_wait", 0),
            "theirs": intrinsic("ptx.hopper.load_cluster_f32"),
            "arrive": intrinsic("ptx.hopper.cluster_arrive"),
            "await_all": intrinsic("ptx.hopper.cluster_wait"),
            "wait_for_earlier_grids": intrinsic("ptx.hopper.wait_for_earlier_grids"),
            "let_later_grids_start": intrinsic("ptx.hopper.let_later_grids_start"),
            "dot": intrinsic("ptx.simt.dot", GROUP),
            "shuffle": intrinsic("ptx.simt.shuffle"),
            "quotient": intrinsic("ptx.mma.divide"),
            "shared_address": intrinsic("ptx.mma.shared_address"),
        }

    def lines(self) -> list[str]:
        waits, weights = ["wait_for_earlier_grids()", "let_later_grids_start()"], self._weights()
        return [
            *self._places(),
            *([*weights, *waits] if self.p["early"] else [*waits, *weights]),
            *self._read(),
            *self._sums(),
            *self._means(),
            *self._parts(),
            *self._hidden(),
            *self._gates(),
            *self._results(),
            "await_all()",
        ]

    def _places(self) -> list[str]:
        across, threads, lanes = (self.p["across"], self.p["threads"], self.lanes)
        return [
            "tid, number = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)",
            "shared = cuda.shared.array(0, f32)",
            f"image, rank = number >> i32({self.blocks.bit_length() - 1}), number & i32({self.blocks - 1})",
            f"part, piece = rank >> i32({across.bit_length() - 1}), rank & i32({across - 1})",
            "lane, warp = tid & i32(31), tid >> i32(5)",
            "t = quotient(tid, V)",
            f"g, W = i32(tid - t * V), i32(V * {lanes})",
            "c0 = i32(piece * W)",
            f"c = i32(c0 + g * {lanes})",
            "begin = i32(part * chunk)",
            "end = select(t < T, i32(min(K, begin + chunk)), i32(0))",
            "first = i32(begin + t)",
            "P = i32(shared_address(shared))",
            f"A = i32(P + i32({threads * lanes * 4}))",
            "M = i32(A + W * S * 4)",
            "E = i32(M + W * 4)",
            f"H = i32(E + v_chunks * i32({GROUP * 4}))",
            f"G = i32(H + v_chunks * i32({GROUP * 4}))",
            "B = i32(G + W * 4)",
            f"D = i32(B + units * W * i32({self.w.size}))",
            "apart = v_chunks | i32(1)",
            f"slots = i32(D + W * apart * i32({GROUP * self.v.size}) + tid * i32({VECTOR}))",
        ]

    def _weights(self) -> list[str]:
        """The block's part of each row of the first weights, and its rows of the second ones."""
        threads, w, v = self.p["threads"], self.w.size, self.v.size
        return [
            f"u, line = tid, W >> i32({(VECTOR // w).bit_length() - 1})",
            "while u < units * line:",
            "    row = quotient(u, line)",
            f"    ch = i32(c0 + i32(u - row * line) * i32({VECTOR // w}))",
            "    inside = i32(i32(ch < w_present) << i32(4))",
            f"    copy(i32(B + u * {VECTOR}), w + (i64(row) * i64(w_row) + i64(ch)) * i64({w}), inside)",
            f"    u = i32(u + i32({threads}))",
            f"u, line = tid, v_chunks * i32({GROUP * v // VECTOR})",
            "while u < W * line:",
            "    row = quotient(u, line)",
            "    inside = i32(i32(c0 + row < v_columns) << i32(4))",
            f"    at = i32(u - row * line) * i32({VECTOR})",
            f"    from_v = v + i64(c0 + row) * (i64(v_row) * i64({v})) + i64(at)",
            f"    copy(i32(D + row * apart * i32({GROUP * v}) + at), from_v, inside)",
            f"    u = i32(u + i32({threads}))",
        ]

    def _read(self) -> list[str]:
        """All of the thread's pixels."""
        return [
            f"base = x + (i64(image) * i64(xn) + i64(c)) * i64({self.x.size})",
            "k, slot, inside = first, slots, i32(i32(c < x_padded) << i32(4))",
            "while k < end:",
            f"    copy(slot, base + i64(k) * (i64(xp) * i64({self.x.size})), inside)",
            f"    k, slot = i32(k + T), i32(slot + i32({VECTOR * self.p['threads']}))",
            "commit()",
            "landed()",
        ]

    def _values(self) -> str:
        """The elements of a vector in words."""
        return f"unpack_x({', '.join(f'words[{i}]' for i in range(VECTOR // 4))})"

    def _sums(self) -> list[str]:
        """Those of the thread, and of all of the block's threads."""
        threads, lanes = self.p["threads"], range(self.lanes)
        out = [
            *(f"s{i} = f32(0)" for i in lanes),
            "k, slot = first, slots",
            "while k < end:",
            "    words = words_x(slot)",
            f"    a = {self._values()}",
            *(f"    s{i} = s{i} + a[{i}]" for i in lanes),
            f"    k, slot = i32(k + T), i32(slot + i32({VECTOR * threads}))",
            f"keep_vector(i32(P + tid * i32({4 * self.lanes})), {', '.join(f's{i}' for i in lanes)})",
            "cuda.syncthreads()",
            "u = tid",
            "while u < W * S:",
            "    total, r, at = f32(0), quotient(u, W), i32(P + u * 4)",
            "    while r < T:",
        ]
        for k in range(AT_ONCE):
            out.append(f"        e{k} = own(select(i32(r + {k} * S) < T, i32(at + W * S * {4 * k}), at))")
        for k in range(AT_ONCE):
            out.append(f"        total = total + select(i32(r + {k} * S) < T, e{k}, f32(0))")
        return [
            *out,
            f"        r, at = i32(r + {AT_ONCE} * S), i32(at + W * S * {4 * AT_ONCE})",
            "    keep(i32(A + u * 4), total)",
            f"    u = i32(u + i32({threads}))",
            "cuda.syncthreads()",
        ]

    def _means(self) -> list[str]:
        """The block's part of each channel's mean."""
        return [
            "u = tid",
            "while u < W:",
            "    total, s = f32(0), i32(0)",
            "    while s < S:",
            "        total, s = total + own(i32(A + (u + W * s) * 4)), i32(s + 1)",
            "    keep(i32(M + u * 4), total * scale + select(part == i32(0), shift, f32(0)))",
            f"    u = i32(u + i32({self.p['threads']}))",
            "cuda.syncthreads()",
        ]

    def _parts(self) -> list[str]:
        """What the block's means give for each hidden unit. A row too many is multiplied as the last one is."""
        rows, warps, size = range(self.p["rows"]), self.p["threads"] // 32, self.w.size
        out = [f"row = i32(warp * i32({len(rows)}))", "while row < units:", *(f"    b{r} = f32(0)" for r in rows)]
        out += [f"    k = i32(lane * {GROUP})", "    while k < W:", "        ms = own8(i32(M + k * 4))"]
        for r in rows:
            out.append(f"        words = words_w(i32(B + (i32(min(units - 1, row + {r})) * W + k) * i32({size})))")
            words = ", ".join(f"words[{i}]" for i in range(GROUP * size // 4))
            out.append(f"        b{r} = dot(b{r}, unpack_w({words}), ms)")
        out.append(f"        k = i32(k + {32 * GROUP})")
        out += indented(exchange([f"b{r}" for r in rows], "{} + {}", 32, self.p["threads"]))
        out.append("    if lane == 0:")
        for r in rows:
            out += [f"        if row + i32({r}) < units:", f"            keep(i32(E + (row + i32({r})) * 4), b{r})"]
        return [*out, f"    row = i32(row + i32({warps * len(rows)}))"]

    def _value(self, unit: Unit, channel: str, known: str) -> tuple[list[str], str]:
        """The lines that compute what becomes of a sum z, and its name."""
        expr, loads, scalars = unit
        text = Lines(scalars)
        names = [text.let(f"read_{kind.value}({at} + i64({channel}) * i64({kind.size}), {known})") for at, kind in loads]
        result = text.value(expr, lambda e: "z" if e.fn == "acc" else names[e.value])  # type: ignore[index]
        return text.lines, result

    def _hidden(self) -> list[str]:
        """The hidden units, of the sums of all blocks of the cluster."""
        lines, result = self._value(self.first, "u", "i32(u < units)")
        return [
            "arrive()",
            "await_all()",
            "u = tid",
            "while u < v_chunks * 8:",
            "    z, at = f32(0), i32(E + i32(min(units - 1, u)) * 4)",
            *(f"    z = z + theirs(at, i32({b}))" for b in range(self.blocks)),
            *indented(lines),
            f"    keep(i32(H + u * 4), select(u < units, {result}, f32(0)))",
            f"    u = i32(u + i32({self.p['threads']}))",
            "arrive()",
            "cuda.syncthreads()",
        ]

    def _gates(self) -> list[str]:
        """What each of the block's channels is multiplied by."""
        size = self.v.size
        lines, result = self._value(self.second, "i32(c0 + u)", "i32(c0 + u < v_columns)")
        words = ", ".join(f"words[{i}]" for i in range(GROUP * size // 4))
        return [
            "u = tid",
            "while u < W:",
            "    k, z = i32(0), f32(0)",
            "    while k < v_chunks:",
            f"        words = words_v(i32(D + (u * apart + k) * i32({GROUP * size})))",
            f"        z = dot(z, unpack_v({words}), own8(i32(H + k * i32({GROUP * 4}))))",
            "        k = i32(k + i32(1))",
            *indented(lines),
            f"    keep(i32(G + u * 4), {result})",
            f"    u = i32(u + i32({self.p['threads']}))",
            "cuda.syncthreads()",
        ]

    def _results(self) -> list[str]:
        text = Lines(self.scalars)
        results = [self._result(text, f"a[{i}]", f"gates[{i}]") for i in range(self.lanes)]
        if self.p["masked"]:
            results = [text.let(f"select(c + i32({i}) < channels, {v}, f32(0))") for i, v in enumerate(results)]
        return [
            f"gates = own_vector(i32(G + g * i32({4 * self.lanes})))",
            f"to = y + (i64(image) * i64(yn) + i64(c)) * i64({self.y.size})",
            "k, slot, inside = first, slots, i32(c < y_padded)",
            "while k < end:",
            "    words = words_x(slot)",
            f"    a = {self._values()}",
            *indented(text.lines),
            f"    put(to + i64(k) * (i64(yp) * i64({self.y.size})), {', '.join(results)}, inside)",
            f"    k, slot = i32(k + T), i32(slot + i32({VECTOR * self.p['threads']}))",
        ]

    def _result(self, text: Lines, element: str, gate: str) -> str:
        """The name of a result, as the store takes it."""

        def leaf(e: Expr) -> str:
            return element if e.fn == "acc" else gate

        if self.y in BYTES and self.expr.dtype is DType.F32:  # the store rounds and saturates
            return text.value(self.expr, leaf)
        if self.y in BYTES:
            return text.unrounded(self.expr, leaf, self.y)
        return text.stored(text.value(self.expr, leaf), self.expr.dtype, self.y)
