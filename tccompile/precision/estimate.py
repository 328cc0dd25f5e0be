"""Ranges without running the network: mean, variance and bounds of every tensor, from the weights.

For each channel of a tensor (a place along the innermost axis of its memory) three things are carried from op to op: a mean and
a variance, as if elements were independent, and an interval that no input of the model can make it leave. Sums have the sums
of means and variances, exactly; what is not linear is evaluated at random elements, drawn from the channels' distributions, with
the functions that the reference has. So a network of 2 TFLOP takes a second: what counts is the number of weights.

Moments go through layers as in Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
2010, section 4.2, here with the weights themselves in place of their variance; intervals as in R. E. Moore, "Interval
Analysis", 1966.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tccompile.ir import weights
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import Atom, Coord, Element, Expr, Greatest, Index, Least, Quotient, Remainder, View, coord, load
from tccompile.ir.extent import Shape, round_up
from tccompile.ir.moments import CHANNELS, SAMPLE, Moments
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage, store, to_storage
from tccompile.ir.types import DType
from tccompile.precision.ranges import Spread

ELEMENTS = 1 << 13
"""Elements of a tensor at which an op is evaluated, at least; if it has more channels, all of them, up to CHANNELS."""

LARGEST = float(np.finfo(np.float32).max)

RELATED = 8.0
"""A product of two activations is taken to be off from that of independent ones by this part of the most that it can be."""


def estimated(program: Program, sources: Mapping[str, np.ndarray]) -> dict[str, Spread]:
    """The values of each float tensor that is computed, by the one that owns the storage; inputs of mean 0, and positive."""
    found: dict[str, Spread] = {}
    known = _Constants(program, sources)
    runs = [_Run(program, known, positive) for positive in (False, True)]
    with np.errstate(all="ignore"):
        for op in program.ops:
            t = program.tensors[op.y]
            for run in runs:
                values, bound = run.step(op)
                if t.dtype.is_float and t.size:
                    spread = found.setdefault(t.storage, Spread(estimated=True, bound=0.0))
                    spread.add(values)
                    spread.bound = max(spread.bound, bound)
            known.forget()
    return found


class _Constants:
    """The values of the constants that an op reads, and what both runs compute from them."""

    def __init__(self, program: Program, sources: Mapping[str, np.ndarray]):
        self.program, self.sources = program, sources
        self.memory: dict[str, np.ndarray] = {}
        self.sums: dict[str, tuple[np.ndarray, ...]] = {}

    def forget(self) -> None:
        self.memory.clear()
        self.sums.clear()

    def values(self, name: str) -> np.ndarray:
        values, dtype = weights.evaluate(self.program.constants[name], self.sources), self.program.tensors[name].dtype
        return from_storage(to_storage(values, dtype), dtype)

    def storage(self, owner: str) -> np.ndarray:
        """What lies in the constant's memory, in the type that expressions compute in."""
        if owner not in self.memory:
            t, values = self.program.tensors[owner], self.values(owner)
            self.memory[owner] = np.zeros(max(t.span, 1), values.dtype)
            if t.size:
                store(self.memory[owner], t, values)
        return self.memory[owner]

    def summed(self, w: str) -> tuple[np.ndarray, ...]:
        """Of weights (O, K, …): the sums over taps, of squares, of what is positive and of what is negative, each (O, K)."""
        if w not in self.sums:
            values = self.values(w).astype(np.float64)
            taps = tuple(range(2, values.ndim))
            parts = (values, np.square(values), np.maximum(values, 0), np.minimum(values, 0))
            self.sums[w] = tuple(p.sum(taps) if taps else p for p in parts)
        return self.sums[w]


class _Channels:
    """What was written to a tensor's memory, by the place along its innermost axis: counts and sums of moments; bounds of all."""

    def __init__(self, extent: int):
        self.count, self.mean, self.square = (np.zeros(extent) for _ in range(3))
        self.low, self.high = math.inf, -math.inf

    def add(self, places: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        extent, finite = len(self.count), np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        self.count += np.bincount(places, minlength=extent)
        self.mean += np.bincount(places, finite, extent)
        self.square += np.bincount(places, np.square(finite), extent)
        self.low, self.high = min(self.low, low), max(self.high, high)

    def at(self, places: np.ndarray) -> Moments:
        count = np.maximum(self.count[places], 1)
        mean = self.mean[places] / count
        return Moments(mean, np.maximum(self.square[places] / count - np.square(mean), 0), self.low, self.high)


class _Run:
    """One pass over the program, for inputs of one kind."""

    def __init__(self, program: Program, constants: _Constants, positive: bool):
        self.program, self.constants = program, constants
        self.memory: dict[str, _Channels] = {}
        self.salt = 0
        for name in program.inputs:
            t = program.tensors[name]
            known = self.memory[name] = _Channels(self.extent(name))
            mean, square, known.low, known.high = (0.8 * positive, 1.0, -math.inf, math.inf)
            if not t.dtype.is_float:  # as `feeds.seeded`
                mean, square, known.low, known.high = (127.5, 255**2 / 3, 0, 255) if t.dtype is DType.U8 else (0.5, 0.5, 0, 1)
            known.count += 1
            known.mean += mean
            known.square += square

    # --- memory ---

    def extent(self, owner: str) -> int:
        t = self.program.tensors[owner]
        return t.padded[t.inner] if t.inner is not None and t.padded[t.inner] <= CHANNELS else 1

    def address(self, name: str, index: Sequence[np.ndarray]) -> np.ndarray:
        t = self.program.tensors[name]
        out = np.asarray(t.offset)
        for i, n, s in zip(index, t.shape, t.strides, strict=True):
            out = out + np.clip(i, 0, max(n - 1, 0)) * s
        return out

    def moments(self, name: str, index: Sequence[np.ndarray]) -> Moments:
        """Of the tensor's elements at an index, an array for each axis."""
        owner, address = self.program.tensors[name].storage, self.address(name, index)
        if owner in self.program.constants:
            values = self.constants.storage(owner)
            exact = values[address].astype(np.float64)
            return Moments(exact, np.zeros_like(exact), float(values.min()), float(values.max()))
        return self.memory[owner].at(address % self.extent(owner))

    def values(self, name: str, index: Sequence[np.ndarray]) -> np.ndarray:
        """Random values of the tensor's elements at an index, the same whenever one is read."""
        owner, address = self.program.tensors[name].storage, self.address(name, index)
        if owner in self.program.constants:
            return self.constants.storage(owner)[address]
        m = self.memory[owner].at(address % self.extent(owner))
        dtype = self.program.tensors[name].dtype.compute
        bits = _hash(address.astype(np.uint64) + (np.uint64(zlib.crc32(owner.encode())) << np.uint64(32)))
        if dtype is DType.BOOL:
            return (bits >> np.uint64(11)) * 2.0**-53 < m.mean
        values = m.drawn(_normal(bits))
        return np.rint(values).astype(np.int64) if dtype is DType.I64 else values.astype(np.float32)

    def bits(self, shape: Shape) -> np.ndarray:
        """New random bits."""
        self.salt += 1
        return _hash(np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(self.salt << 32)).reshape(shape)

    def random(self, shape: Shape, below: int) -> np.ndarray:
        """Random integers from 0 on."""
        return (self.bits(shape) % np.uint64(max(below, 1))).astype(np.int64)

    # --- ops ---

    def step(self, op: Op) -> tuple[np.ndarray, float]:
        """Some values of the op's result, and the bound of their magnitudes, after they were noted."""
        t, shape = self.program.tensors[op.y], self.program.op_shape(op)
        if 0 in shape:
            return np.empty(0, np.float32), 0.0
        axis = 1 if op.epilogue.shuffle > 1 else t.inner
        channels = 1 if axis is None or shape[axis] > CHANNELS else shape[axis]
        n = round_up(ELEMENTS, channels)
        at = [np.arange(n) % channels if a == axis and channels > 1 else self.random((n,), e) for a, e in enumerate(shape)]

        acc, ends = None, (-math.inf, math.inf)
        m = op.moments(self, at)
        if m is not None:
            acc, ends = m.drawn(self.noise((n,))).astype(op.epilogue.expr.dtype.numpy), (m.low, m.high)
            if op.takes_epilogue:
                acc = acc.astype(np.float32)
        read = [self.view(v, at, n) for v in op.epilogue.loads]
        lines = tuple(View(str(i), (coord(0),)) for i in range(len(read)))
        values = evaluate_expr(op.epilogue.expr, lines, {str(i): v for i, (v, _, _) in enumerate(read)}, (n,), acc)
        values = np.broadcast_to(values, (n,))
        low, high = _interval(op.epilogue.expr, [(a, b) for _, a, b in read], ends)

        if (b := op.epilogue.shuffle) > 1:
            image, c, p, q = at
            block, left = np.divmod(c, shape[1] // (b * b))
            at = [image, left, p * b + block // b, q * b + block % b]
        known = self.memory.setdefault(t.storage, _Channels(self.extent(t.storage)))
        known.add(np.broadcast_to(self.address(op.y, at) % self.extent(t.storage), (n,)), values, low, high)
        return values, max(-low, high)

    def view(self, view: View, at: list[np.ndarray], n: int) -> tuple[np.ndarray, float, float]:
        """What it reads for n elements of a result, and between what bounds that is."""
        index = [np.broadcast_to(self.index(i, at, n), (n,)) for i in view.index]
        values, m = self.values(view.tensor, index), self.moments(view.tensor, index)
        low, high = m.low, m.high
        for r in view.valid:
            i = self.index(r.index, at, n)
            values = np.where((i >= r.low) & (i < r.high), values, np.asarray(view.fill, values.dtype))
            low, high = min(low, view.fill), max(high, view.fill)
        return np.broadcast_to(values, (n,)), low, high

    def index(self, index: Index, at: list[np.ndarray], n: int) -> np.ndarray:
        """`Index.evaluate` at some coordinates; what it reads from a tensor is any place on the axis."""

        def value(atom: Atom) -> np.ndarray:
            match atom:
                case Coord(axis):
                    return at[axis]
                case Quotient(inner, k):
                    return self.index(inner, at, n) // k
                case Remainder(inner, k):
                    return self.index(inner, at, n) % k
                case Least(a, b):
                    return np.minimum(self.index(a, at, n), self.index(b, at, n))
                case Greatest(a, b):
                    return np.maximum(self.index(a, at, n), self.index(b, at, n))
                case Element(_, _, extent):
                    return self.random((n,), extent)

        return sum((k * value(atom) for atom, k in index.terms), np.asarray(index.constant))

    # --- what ops ask for, see `Known` ---

    def shape(self, name: str) -> Shape:
        return self.program.tensors[name].shape

    def constant(self, name: str) -> np.ndarray:
        return self.constants.values(name)

    def noise(self, shape: Shape) -> np.ndarray:
        return _normal(self.bits(shape))

    def bounds(self, expr: Expr, acc: Interval) -> Interval:
        return _interval(expr, [], acc)

    def along(self, name: str, axis: int, most: int = CHANNELS) -> Moments:
        """Of the elements at each place of the axis, or so many of them at most, wherever else they lie."""
        shape = self.program.tensors[name].shape
        lanes = (min(shape[axis], most), 16)
        places = np.arange(lanes[0]) * max(shape[axis] // max(lanes[0], 1), 1)
        index = [places[:, None] if a == axis else self.random(lanes, n) for a, n in enumerate(shape)]
        return self.moments(name, [np.broadcast_to(i, lanes) for i in index]).mixed()

    def window(self, name: str, at: Sequence[np.ndarray], axes: tuple[int, ...], groups: int = 0) -> list[np.ndarray]:
        """Where some of those elements lie, one more axis, that a reduction over `axes` takes together."""
        shape, lanes = self.shape(name), (at[0].size, SAMPLE)
        index = [self.random(lanes, n) if a in axes else np.broadcast_to(at[a][:, None], lanes) for a, n in enumerate(shape)]
        if groups:
            width = shape[1] // groups
            index[1] = index[1] // width * width + self.random(lanes, width)
        return index

    def product(self, a: str, k: int, w: str, wk: int, terms: int, groups: int = 1) -> Moments:
        """Of sums of so many terms: a's elements along axis k times those of w along axis wk.

        For each of w's first axis if w is constant, (O, K, …); of any if it is computed, or differs from one matrix to the next.
        """
        if w not in self.program.constants or wk != 1:
            x, y = self.along(a, k), self.along(w, wk)
            if x.mean.shape != y.mean.shape:  # a convolution in groups
                x, y = x.mixed(), y.mixed()
            many = terms / max(x.mean.size, 1)
            mean, rms = x.mean * y.mean, np.sqrt(x.square * y.square)
            bound = x.bound * y.bound * terms if x.bound and y.bound else 0.0
            # Computed from the same inputs they are not independent: keys and values of linear attention add up in one direction.
            var = (np.square(rms) - np.square(mean)).sum() * many + np.square(rms.sum() * many / RELATED)
            return Moments(mean.sum() * many, var, 0.0 if x.low >= 0 and y.low >= 0 else -bound, bound)
        return self.weighted(self.along(a, k, self.program.tensors[a].shape[k]), w, groups)

    def weighted(self, x: Moments, w: str, groups: int = 1) -> Moments:
        """Of the sums of K elements, or as many for each of the groups, times constant weights (O, K, …), for each O."""
        first, second, up, down = self.constants.summed(w)
        o = len(first)

        def times(matrix: np.ndarray, by: np.ndarray) -> np.ndarray:
            return (matrix.reshape(groups, o // groups, -1) @ by.reshape(groups, -1, 1)).reshape(o)

        low, high = -math.inf, math.inf
        if math.isfinite(x.bound):
            up, down, x = up.sum(1), down.sum(1), x.with_zero()  # beyond the edges are zeros
            low, high = float((up * x.low + down * x.high).min()), float((up * x.high + down * x.low).max())
        return Moments(times(first, x.mean), times(second, x.var), low, high)


def _hash(x: np.ndarray) -> np.ndarray:
    """Random bits by number: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(bits: np.ndarray) -> np.ndarray:
    """Numbers of mean 0 and variance 1, within ±3.5, as those of `feeds.seeded`."""
    total: np.ndarray = sum((bits >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48))  # type: ignore[assignment]
    return (total - 2 * 0xFFFF) / math.sqrt((2**32 - 1) / 3)


# --- Intervals -------------------------------------------------------------------------------------------------------

RISING = (
    "relu", "exp", "expm1", "sigmoid", "tanh", "erf", "log", "log1p", "sqrt", "atan", "asinh", "sinh", "floor", "ceil", "round",
    "softplus", "softsign", "elu", "selu", "celu", "hard_sigmoid", "leaky_relu", "scaled_tanh",
)  # fmt: skip
"""Functions that grow with their first argument if their parameters are positive."""

DIP = {"silu": 0.2785, "gelu": 0.17, "gelu_tanh": 0.1701, "mish": 0.3089, "hard_swish": 0.375}
"""How far below 0 functions go that lie between -this and x; they are at most x, or 0."""

Interval = tuple[float, float]


def _interval(expr: Expr, loads: Sequence[Interval], acc: Interval) -> Interval:
    """Between what bounds an expression is, when its leaves are between theirs."""
    memo: dict[int, Interval] = {}

    def of(e: Expr) -> Interval:
        if id(e) not in memo:
            low, high = compute(e)
            memo[id(e)] = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
        return memo[id(e)]

    def compute(e: Expr) -> Interval:
        match e.fn:
            case "acc":
                return acc
            case "const":
                return float(e.value), float(e.value)  # type: ignore[arg-type]
            case "load":
                return loads[e.value]  # type: ignore[index]
        if e.dtype is DType.BOOL:
            return 0.0, 1.0
        given = [of(a) for a in e.args]
        (a, b), (c, d) = given[0], given[-1]
        match e.fn:
            case "cast":
                return a, b
            case "neg":
                return -b, -a
            case "abs":
                return max(a, -b, 0.0), max(-a, b)
            case "add":
                return a + c, b + d
            case "sub":
                return a - d, b - c
            case "mul" if e.args[0] == e.args[1]:
                return max(a, -b, 0.0) ** 2, max(-a, b) ** 2
            case "mul":
                ends = [u * v if u and v else 0.0 for u in (a, b) for v in (c, d)]
                return min(ends), max(ends)
            case "div" if c > 0 or d < 0:
                ends = [u / v for u in (a, b) for v in (c, d)]
                return (-math.inf, math.inf) if any(map(math.isnan, ends)) else (min(ends), max(ends))
            case "min":
                return min(a, c), min(b, d)
            case "max":
                return max(a, c), max(b, d)
            case "where":
                return min(given[1][0], c), max(given[1][1], d)
            case "sin" | "cos" | "sign":
                return -1.0, 1.0
        if e.fn in DIP:
            return max(min(a, 0.0), -DIP[e.fn]), max(b, 0.0)
        if e.fn in RISING and all(x.fn == "const" and x.value >= 0 for x in e.args[1:]):  # type: ignore[operator]
            same, both = replace(e, args=(load(0), *e.args[1:])), np.array([a, b], np.float32)
            low, high = map(float, evaluate_expr(same, (View("x", (coord(0),)),), {"x": both}, (2,)))
            return low - 1e-6 * abs(low), high + 1e-6 * abs(high)
        return -math.inf, math.inf

    with np.errstate(all="ignore"):
        return of(expr)
