"""Pointwise ops on every generation: elementwise expressions, and everything that only moves data.

A thread computes `lanes` neighbouring elements of y, along the axis in which y is contiguous. These groups are numbered by
a few dimensions: y's axes, merged where every access keeps one stride, and the groups of lanes. A thread's number is taken
apart by multiplications with reciprocals. Which dimension neighbouring threads share out is chosen for coalescing: the lanes,
or for a transpose the axis in which the input is contiguous, so that a warp reads whole lines and each thread writes 16 to
32 bytes. (One group a thread: 2 or 4 were up to a quarter slower on an H200, which this way reads and writes 3.9 TB/s.)

A load is an address that is linear in the dimensions, plus terms that are not (quotients, remainders, minima, maxima, indices
that are read from a tensor):

same    the same element for all lanes
vector  neighbours in memory, accesses of up to 16 bytes
each    an address, and perhaps a condition, for each lane

A transpose of one input (of floats, with both axes long) can go through shared memory instead, in tiles of 64 by 64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import (
    Atom,
    Coord,
    Element,
    Expr,
    Greatest,
    Index,
    Least,
    Quotient,
    Range,
    Remainder,
    View,
    parts,
    substitute,
    walk,
)
from tccompile.ir.extent import Extent, Shape, ceil_div, divides, greatest, least, round_up, same
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels.codegen import (
    COMPUTE,
    Lines,
    Parameters,
    coarse,
    constant,
    decode,
    divider,
    encode,
    lifted,
    split,
    unrounded,
)
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Value, Work, code, traffic_us
from tccompile.kernels.text import Intrinsic, KernelText, TextKernel, indented, intrinsic

THREADS = 256
TILE = 64
LIMIT = 2**31 - 2**20
"""Bound of everything that is computed in 32 bits; the slack is for the last block's threads."""


# --- Description: dimensions and accesses ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """A view as an address: elements from the tensor's first one."""

    tensor: Tensor
    strides: Shape  # by axis of y: of its coordinate
    offset: Extent
    terms: tuple[tuple[Atom, Extent], ...]  # what is not linear
    valid: tuple[Range, ...]
    fill: float
    highest: Extent  # no valid element lies beyond it when the lane's coordinate is 0


def _load(program: Program, view: View, shape: Shape, lane: int | None) -> _Load:
    tensor = program.tensors[view.tensor]
    total: dict[Atom, Extent] = {}
    offset: Extent = 0
    highest: Extent = 0
    still = tuple(1 if a == lane else n for a, n in enumerate(shape))
    for index, stride, extent in zip(view.index, tensor.strides, tensor.shape, strict=True):
        offset += index.constant * stride
        highest += greatest(0, least(index.bounds(still)[1], extent - 1)) * stride
        for atom, k in index.terms:
            total[atom] = total.get(atom, 0) + k * stride
    strides: list[Extent] = [0] * len(shape)
    terms = []
    for atom, k in total.items():
        if isinstance(atom, Coord):
            strides[atom.axis] = k if shape[atom.axis] > 1 else 0
        elif k:
            terms.append((atom, k))
    return _Load(tensor, tuple(strides), offset, tuple(terms), view.valid, view.fill, highest)


def _axes(index: Index) -> set[int]:
    """The axes whose coordinates occur in an index."""
    return set().union(*(_atom_axes(atom) for atom, _ in index.terms))


def _atom_axes(atom: Atom) -> set[int]:
    return {atom.axis} if isinstance(atom, Coord) else set().union(*map(_axes, parts(atom)))


@dataclass(frozen=True)
class _Plan:
    """Everything that does not depend on the number of lanes.

    dims   extents and axes of the dimensions of the rows, outermost first; the lanes are the last one
    extent, padded  of the lanes' dimension
    place  of a `Placed`
    """

    y: Tensor
    shape: Shape
    loads: tuple[_Load, ...]
    dims: tuple[tuple[Extent, tuple[int, ...]], ...]
    padded: Extent
    place: Index | None = None

    @property
    def lane(self) -> tuple[int, ...]:
        return self.dims[-1][1]

    @property
    def extent(self) -> Extent:
        return self.dims[-1][0]

    def stride(self, strides: Shape, dim: int) -> Extent:
        axes = self.dims[dim][1]
        return strides[axes[-1]] if axes else 0


def _plan(op: Op, program: Program) -> _Plan:
    y = program.tensors[op.y]
    shape = y.shape
    lane = y.inner if y.inner is not None else (len(shape) - 1 if shape else None)
    loads = tuple(_load(program, view, shape, lane) for view in op.epilogue.loads)
    alone: set[int] = set()  # axes whose coordinates are needed by themselves
    for load in loads:
        alone |= set().union(*(_atom_axes(atom) for atom, _ in load.terms), *(_axes(r.index) for r in load.valid))
    accesses = [y.strides, *(load.strides for load in loads)]
    rows = sorted((a for a in range(len(shape)) if a != lane and shape[a] > 1), key=lambda a: -y.strides[a])
    dims: list[tuple[Extent, tuple[int, ...]]] = []
    for axis in [*rows, *([lane] if lane is not None else [])]:
        last = dims[-1][1] if dims else ()
        joins = bool(last) and not {axis, *last} & alone and same(y.padded[axis], shape[axis])
        if joins and all(same(s[last[-1]], s[axis] * shape[axis]) for s in accesses):
            dims[-1] = (dims[-1][0] * shape[axis], (*last, axis))
        else:
            dims.append((shape[axis], (axis,)))
    if not dims:
        dims = [(1, ())]
    padded = dims[-1][0] if lane is None or len(dims[-1][1]) > 1 else y.padded[lane]
    return _Plan(y, shape, loads, tuple(dims), padded, op.place if isinstance(op, Placed) else None)


def _aligned(tensor: Tensor, lanes: int, steps: list[Extent]) -> bool:
    """Whether all multiples of the steps (elements) keep groups of lanes at multiples of their size, at most 16 bytes."""
    width = min(16, lanes * tensor.dtype.size)
    return all(divides(width, n * tensor.dtype.size) for n in (tensor.offset, *steps))


def _modes(plan: _Plan, lanes: int) -> tuple[str, list[str]]:
    """How y is stored, and how each load reads: see the module's text."""
    last = len(plan.dims) - 1
    y_steps = [plan.stride(plan.y.strides, d) for d in range(last)] + ([plan.y.strides[0]] if plan.place else [])
    vector = plan.stride(plan.y.strides, last) == 1 or plan.padded == 1
    whole = vector and divides(lanes, plan.padded) and _aligned(plan.y, lanes, y_steps)
    store = "vector" if whole else "strided" if divides(lanes, plan.padded) else "guarded"
    reach = round_up(plan.padded, lanes)
    modes = []
    for load in plan.loads:
        varies = set().union(*(_atom_axes(a) for a, _ in load.terms), *(_axes(r.index) for r in load.valid)) & set(plan.lane)
        step = plan.stride(load.strides, last)
        steps = [plan.stride(load.strides, d) for d in range(last)] + [k for _, k in load.terms] + [load.offset]
        covered = same(reach, plan.extent) or same(greatest(load.highest + reach, load.tensor.span), load.tensor.span)
        if not varies and not step:
            modes.append("same")
        elif not varies and step == 1 and covered and _aligned(load.tensor, lanes, steps):
            modes.append("vector")
        else:
            modes.append("each")
    return store, modes


def _fastest(plan: _Plan, modes: list[str]) -> int:
    """The dimension that neighbouring threads share out: the lanes' (the last), or for transposes the input's."""
    last = len(plan.dims) - 1
    weight: list[Extent] = [0] * len(plan.dims)
    for load, mode in zip(plan.loads, modes, strict=True):
        if mode != "each" or plan.stride(load.strides, last) == 1:
            continue
        for d in range(last):
            if plan.stride(load.strides, d) == 1:
                weight[d] += load.tensor.size * load.tensor.dtype.size
    best = max(range(len(plan.dims)), key=lambda d: (weight[d], d))
    return best if weight[best] else last


# --- Arguments and parameters ----------------------------------------------------------------------------------------


class _Arguments:
    """Structure as nested tuples (`encode…` results), numbers as arguments in the order in which the code takes them."""

    def __init__(self, plan: _Plan, lanes: int, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.args: list[Arg] = []
        reach = round_up(plan.padded, lanes)
        lane = plan.lane
        self.shape = tuple(reach if lane == (a,) else n for a, n in enumerate(plan.shape))
        self.dim = {axes[0]: d for d, (_, axes) in enumerate(plan.dims) if len(axes) == 1}

    def integer(self, value: Extent) -> None:
        assert -(2**31) <= value < 2**31
        self.args.append(I32(value))

    def index(self, index: Index) -> Value:
        self.integer(index.constant)
        terms = []
        for atom, k in index.terms:
            if isinstance(atom, Coord) and atom.axis not in self.dim:
                continue  # an axis of extent 1
            self.integer(k)
            terms.append(self.atom(atom))
        return tuple(terms)

    def atom(self, atom: Atom) -> Value:
        match atom:
            case Coord(axis):
                return ("coord", self.dim[axis])
            case Quotient(index, d) | Remainder(index, d):
                # The code divides numbers that are not negative: add a multiple of the divisor, and take it off again.
                lift = greatest(0, -(index.bounds(self.shape)[0] // d))
                inner = self.index(index + lift * d)
                for value in (d, *divider(d), lift):
                    self.integer(value)
                return ("quotient" if isinstance(atom, Quotient) else "remainder", inner)
            case Least(a, b) | Greatest(a, b):
                return ("minimum" if isinstance(atom, Least) else "maximum", self.index(a), self.index(b))
            case Element(name, _, extent):
                tensor = self.tensors[name]
                self.args.append(Ptr(name))
                where = self.index(_address(atom, tensor))
                self.integer(tensor.span - 1)
                self.integer(extent)
                return ("element", tensor.dtype.value, where)


def _address(element: Element, tensor: Tensor) -> Index:
    """Where an element lies, in elements of its tensor from the first one."""
    return sum((i * stride for i, stride in zip(element.index, tensor.strides, strict=True)), Index())


def _largest(plan: _Plan, tensors: Mapping[str, Tensor]) -> Extent:
    """The largest number that the code computes in 32 bits."""
    found = [s for load in plan.loads for s in (load.offset, *load.strides, *(k for _, k in load.terms))]

    def note(index: Index) -> None:
        found.extend(index.bounds(plan.shape))
        for atom, _ in index.terms:
            if isinstance(atom, Element):
                found.append(tensors[atom.tensor].span)
                note(_address(atom, tensors[atom.tensor]))
            else:
                for inner in parts(atom):
                    note(inner)

    for load in plan.loads:
        for atom, _ in load.terms:
            note(Index(((atom, 1),)))
        for r in load.valid:
            note(r.index)
    rows: Extent = 1
    for extent, _ in plan.dims[:-1]:
        rows *= extent
    found += [*plan.y.strides, rows * plan.padded]
    return greatest(reduce(greatest, found), -reduce(least, found))


def _pairs(plan: _Plan, lanes: int) -> Iterator[tuple[_Load, str]]:
    """Each load and its mode."""
    return zip(plan.loads, _modes(plan, lanes)[1], strict=True)


def _transposed(plan: _Plan, expr: Expr) -> int | None:
    """The dimension in which the one input is contiguous, if the op is a transpose that is worth tiles; else None."""
    if len(plan.loads) != 1 or expr.dtype is not DType.F32 or not plan.y.dtype.is_float:
        return None
    (load,), last = plan.loads, len(plan.dims) - 1
    if load.terms or load.valid or not load.tensor.dtype.is_float or plan.stride(load.strides, last) == 1:
        return None
    contiguous = [d for d in range(last) if plan.stride(load.strides, d) == 1]
    unit = plan.stride(plan.y.strides, last) == 1
    if not contiguous or not unit or plan.extent < TILE // 2 or plan.dims[contiguous[0]][0] < TILE // 2:
        return None
    return contiguous[0]


def _lanes(plan: _Plan) -> list[int]:
    """How many elements a thread may store at once, the most first; with fewer, rich expressions take fewer registers."""
    return [n for n in (8, 4, 2, 1) if n == 1 or _modes(plan, n)[0] == "vector"]


@dataclass(frozen=True, kw_only=True)
class Placed(Pointwise):
    """A Pointwise whose result is a row of a tensor along its first axis, `place`, which need not be known; in the program it is
    the first one."""

    place: Index


class PointwiseKernel(TextKernel):
    """y = expr over views, in any layout and type."""

    name = "pointwise"
    realises = Pointwise

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        plan = _plan(op, program)
        for axis, (n, padded) in enumerate(zip(plan.shape, plan.y.padded, strict=True)):
            if not same(n, padded) and axis not in plan.lane:
                return f"y is padded along axis {axis}, which is not its innermost one"
        largest = _largest(plan, program.tensors)
        return f"it computes indices in 32 bits, and one reaches {largest}" if largest > LIMIT else None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        plan = _plan(op, program)
        if _transposed(plan, op.epilogue.expr) is not None:
            yield {"tile": TILE}
        yield from ({"lanes": n} for n in _lanes(plan))

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        return "tile" not in config or _transposed(_plan(op, program), op.epilogue.expr) is not None

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        own, launch, traffic = measured(arch).pointwise, measured(arch).launch_us, traffic_us(op, program, arch)
        if "tile" in config:
            return launch + own.transposing * traffic
        plan, lanes = _plan(op, program), int(config["lanes"])  # type: ignore[arg-type]
        if lanes < _lanes(plan)[0]:
            return launch + own.narrow * traffic
        scattered = plan.padded > lanes > 1 and any(mode == "each" and load.tensor.size for load, mode in _pairs(plan, lanes))
        return launch + (own.scattered if scattered else 1.0) * traffic

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        plan = _plan(op, program)
        if not plan.y.size:
            return Work(())
        if "tile" in config:
            dim = _transposed(plan, op.epilogue.expr)
            assert dim is not None
            params, args, blocks = _described_tiles(plan, program, op.epilogue.expr, dim)
        else:
            params, args, total = _described(plan, program, op.epilogue.expr, int(config["lanes"]))  # type: ignore[arg-type]
            blocks = ceil_div(total, THREADS)
        return Work((Launch(code(self.name, **params), (blocks, 1, 1), THREADS, args),))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _tiles(**params) if "dims" in params else _groups(**params)


def _described(plan: _Plan, program: Program, expr: Expr, lanes: int) -> tuple[dict[str, Value], tuple[Arg, ...], Extent]:
    """The parameters of `build`, the launch's arguments, and how many groups of lanes there are."""
    store, modes = _modes(plan, lanes)
    last = len(plan.dims) - 1
    fastest = _fastest(plan, modes)
    order = [d for d in range(last + 1) if d != fastest] + [fastest]  # outermost first
    groups = ceil_div(plan.padded, lanes)
    extents = [groups if d == last else plan.dims[d][0] for d in order]
    total: Extent = 1
    for n in extents:
        total *= n
    out = _Arguments(plan, lanes, program.tensors)
    out.integer(total)
    for n in extents[1:]:
        for value in (n, *divider(n)):
            out.integer(value)
    out.integer(plan.extent)
    out.integer(plan.padded)

    def linear(strides: Shape) -> tuple[int, ...]:
        used = tuple(d for d in range(last) if plan.stride(strides, d))
        for d in used:
            out.integer(plan.stride(strides, d))
        return used

    out.args.append(Ptr(plan.y.name))
    target = (plan.y.dtype.value, store, linear(plan.y.strides), not same(plan.padded, plan.extent))
    out.integer(plan.stride(plan.y.strides, last))
    loads: list[Value] = []
    for load, mode in zip(plan.loads, modes, strict=True):
        # An address is never given outside the tensor: an index that begins there has its offset as a number.
        shifted = not 0 <= load.offset < load.tensor.span
        out.args.append(Ptr(load.tensor.name, 0 if shifted else load.offset * load.tensor.dtype.size))
        if shifted:
            out.integer(load.offset)
        used = linear(load.strides)
        out.integer(plan.stride(load.strides, last))
        terms = []
        for atom, k in load.terms:
            out.integer(k)
            terms.append(out.atom(atom))
        valid = []
        for r in load.valid:
            valid.append(out.index(r.index))
            out.integer(r.low)
            out.integer(r.high)
        tail = mode == "each" and not same(round_up(plan.padded, lanes), plan.extent)
        loads.append((load.tensor.dtype.value, mode, used, tuple(terms), tuple(valid), str(load.fill), tail, shifted))
    expr, scalars = lifted(coarse(unrounded(expr, plan.y.dtype), plan.y.dtype))
    params: dict[str, Value] = {
        "lanes": lanes,
        "order": tuple(order),
        "target": target,
        "loads": tuple(loads),
        "expr": encode(expr),
    }
    if plan.place is not None:
        out.integer(plan.y.strides[0])
        params["place"] = out.index(plan.place)
    return params, (*out.args, *scalars), total


def _described_tiles(plan: _Plan, program: Program, expr: Expr, dim: int) -> tuple[dict[str, Value], tuple[Arg, ...], Extent]:
    """The same for tiles of dimension `dim` and the lanes: the last result is how many tiles there are."""
    (load,), last, y = plan.loads, len(plan.dims) - 1, plan.y
    rest = [d for d in range(last) if d != dim]
    extents = [*(plan.dims[d][0] for d in rest), ceil_div(plan.dims[dim][0], TILE), ceil_div(plan.padded, TILE)]
    out = _Arguments(plan, 1, program.tensors)
    for n in extents[1:]:
        for value in (n, *divider(n)):
            out.integer(value)
    for value in (plan.dims[dim][0], plan.extent, plan.padded):
        out.integer(value)
    for tensor, strides, offset, across in ((load.tensor, load.strides, load.offset, last), (y, y.strides, 0, dim)):
        out.args.append(Ptr(tensor.name, offset * tensor.dtype.size))
        for d in (across, *rest):
            out.integer(plan.stride(strides, d))
    steps = [plan.stride(load.strides, d) for d in (last, *rest)]
    wide = divides(8, plan.dims[dim][0]) and _aligned(load.tensor, 8, [*steps, load.offset])
    expr, scalars = lifted(coarse(unrounded(expr, plan.y.dtype), plan.y.dtype))
    params: dict[str, Value] = {
        "dims": len(extents), "x": load.tensor.dtype.value, "y": y.dtype.value, "reads": 8 if wide else 1,
        "writes": 8 if _modes(plan, 8)[0] == "vector" else 1, "mask": not same(plan.padded, plan.extent), "expr": encode(expr),
    }  # fmt: skip
    total: Extent = 1
    for n in extents:
        total *= n
    return params, (*out.args, *scalars), total


# --- The code --------------------------------------------------------------------------------------------------------


Accesses = dict[str, Intrinsic]
"""The functions by which a text reads and writes memory, by the names that it calls them."""


def _groups(lanes: int, order: Any, target: Any, loads: Any, expr: Any, place: Any = None) -> KernelText:
    taken, out = Parameters(), Lines()
    expression = decode(expr)
    y_kind, store, y_used, mask = target
    y_type = DType(y_kind)
    put = intrinsic("ptx.memory.store", y_type, lanes if store == "vector" else 1, store == "guarded")
    accesses: Accesses = {"put": put}
    last = len(order) - 1

    total = taken.take()
    inner = [taken.divider() for _ in order[1:]]
    extent, padded = taken.take(), taken.take()
    y = (taken.take("address"), [taken.take() for _ in y_used], taken.take())
    described = [_taken_of(k, load, lanes, taken, accesses) for k, load in enumerate(loads)]
    row = (taken.take(), _named_index(place, taken, accesses)) if place is not None else None
    out.scalars = taken.scalars(expression)

    thread = out.let(f"i32(cuda.blockIdx.x * {THREADS} + cuda.threadIdx.x)")
    digits = [""] * len(order)
    for d, digit in zip(order, split(out, thread, inner), strict=True):
        digits[d] = digit
    first = digits[last] if lanes == 1 else out.let(f"i32({digits[last]} * {lanes})")

    def read(loads: Iterable[int]) -> dict[int, list[str]]:
        return {k: _read(out, described[k], digits, first, lanes, extent) for k in loads}

    lazy = _lazy(expression, {k for k, (_, mode, _, terms, *_) in enumerate(loads) if mode == "each" or terms})
    if lazy is None:
        values, left = read(range(len(described))), expression
    else:
        values, left = _read_lazily(out, lazy, read, lanes)
    results = []
    for i in range(lanes):
        value = out.value(left, lambda e, i=i: values[e.value][i])  # type: ignore[misc]
        value = out.stored(value, expression.dtype, y_type)
        zero = "f32(0)" if y_type.is_float else "i64(0)"
        results.append(out.let(f"select({_lane(first, i)} < {extent}, {value}, {zero})") if mask else value)
    address, steps, step = y
    rows = [f" + i64({digits[d]}) * (i64({s}) * {y_type.size})" for d, s in zip(y_used, steps, strict=True)]
    if row is not None:
        rows.append(f" + i64({_index(out, row[1], digits)}) * (i64({row[0]}) * {y_type.size})")
    base = out.let(address + "".join(rows))
    if store == "vector":
        out.lines.append(f"put({base} + i64({first}) * {y_type.size}, {', '.join(results)})")
    else:
        for i, r in enumerate(results):
            guard = f", {_lane(first, i)} < {padded}" if store == "guarded" else ""
            out.lines.append(f"put({base} + i64({_lane(first, i)}) * (i64({step}) * {y_type.size}), {r}{guard})")
    lines = [out.lines[0], f"if {thread} < {total}:", *indented(out.lines[1:])]
    return KernelText(taken.signature, lines, accesses, THREADS)


def _taken_of(k: int, load: Any, lanes: int, taken: Parameters, accesses: Accesses) -> tuple[Any, ...]:
    """What `_read` takes of a load: its function, and its arguments by the names that they are taken by."""
    kind, mode, used, terms, valid, fill, tail, shifted = load
    dtype = DType(kind)
    base = taken.take("address")
    if shifted:
        base = f"{base} + i64({taken.take()}) * {dtype.size}"
    steps, step = [taken.take() for _ in used], taken.take()
    atoms = []
    for atom in terms:
        factor = taken.take()
        atoms.append((factor, _named(atom, taken, accesses)))
    ranges = [(_named_index(index, taken, accesses), taken.take(), taken.take()) for index in valid]
    guarded = bool(ranges) or tail
    accesses[f"load{k}"] = intrinsic("ptx.memory.load", dtype, lanes if mode == "vector" else 1, guarded)
    return f"load{k}", dtype, mode, used, base, steps, step, atoms, ranges, fill, tail


@dataclass(frozen=True)
class _Lazy:
    """What only matters where conditions hold: its value, and the expression in which it is the load INSIDE."""

    conditions: tuple[Expr, ...]
    inside: Expr
    left: Expr


INSIDE = 1 << 20
"""The number of a load that stands for a value."""

RARE = 3
"""Loads of each lane by itself, or at computed places, of as many of which it is worth asking whether any lane needs them."""


def _lazy(expr: Expr, dear: Collection[int]) -> _Lazy | None:
    """What need not be computed where an expression's outermost conditions do not hold, if that saves loads that are dear."""
    conditions, inside, others = list[Expr](), expr, set[int]()
    while inside.fn == "where":
        condition, inside, other = inside.args
        conditions.append(condition)
        others |= _loads_of(condition) | _loads_of(other)
    saved = (_loads_of(inside) - others).intersection(dear)
    if not conditions or len(saved) < RARE or inside.dtype is DType.BOOL or any(c.dtype is not DType.BOOL for c in conditions):
        return None
    return _Lazy(tuple(conditions), inside, substitute(expr, {inside: Expr("load", (), INSIDE, inside.dtype)}))


def _loads_of(expr: Expr) -> set[int]:
    return {int(e.value) for e in walk(expr) if e.fn == "load"}  # type: ignore[arg-type]


def _read_lazily(
    out: Lines, lazy: _Lazy, read: Callable[[Iterable[int]], dict[int, list[str]]], lanes: int
) -> tuple[dict[int, list[str]], Expr]:
    """The values of all loads that are left, and the expression of them."""
    early = set().union(*map(_loads_of, lazy.conditions), _loads_of(lazy.left) - {INSIDE})
    values, needed = read(sorted(early)), list[str]()
    for i in range(lanes):
        for condition in lazy.conditions:
            held = out.value(condition, lambda e, i=i: values[e.value][i])  # type: ignore[misc]
            needed.append(out.let(f"select({held}, i32(1), i32(0))"))
    rows = [" & ".join(dict.fromkeys(needed[i : i + len(lazy.conditions)])) for i in range(0, len(needed), len(lazy.conditions))]
    some = out.let(" | ".join(f"({row})" for row in dict.fromkeys(rows)))
    kept = [f"kept{i}" for i in range(lanes)]
    out.lines += [f"{name} = {COMPUTE[lazy.inside.dtype]}(0)" for name in kept]
    with out.block(f"if {some} != 0:"):
        inner = values | read(sorted(_loads_of(lazy.inside) - early))
        for i, name in enumerate(kept):
            value = out.value(lazy.inside, lambda e, i=i: inner[e.value][i])  # type: ignore[misc]
            out.lines.append(f"{name} = {value}")
    return values | {INSIDE: kept}, lazy.left


def _lane(first: str, i: int) -> str:
    return f"i32({first} + {i})" if i else first


def _read(out: Lines, described: Any, digits: list[str], first: str, lanes: int, extent: str) -> list[str]:
    """The values of one load in each lane, in the compute type."""
    name, dtype, mode, used, base, steps, step, atoms, ranges, fill, tail = described

    def address(coordinates: list[str]) -> str:
        parts = [f" + i64({coordinates[d]}) * (i64({s}) * {dtype.size})" for d, s in zip(used, steps, strict=True)]
        parts += [f" + i64({_atom(out, atom, coordinates)}) * (i64({k}) * {dtype.size})" for k, atom in atoms]
        return out.let(base + "".join(parts))

    def condition(coordinates: list[str]) -> str | None:
        tests = [f"within({_index(out, index, coordinates)}, {low}, {high})" for index, low, high in ranges]
        if tail:
            tests.append(f"within({coordinates[-1]}, 0, {extent})")
        return out.let(" & ".join(tests)) if tests else None

    def filled(value: str, test: str | None) -> str:
        value = out.loaded(value, dtype)
        if not ranges or float(fill) == 0:
            return value
        return out.let(f"select({test} != 0, {value}, {constant(float(fill), dtype.compute)})")

    if mode != "each":
        coordinates = [*digits[:-1], first]
        test = condition(coordinates)
        lane = f" + i64({first}) * {dtype.size}" if mode == "vector" else ""
        group = out.let(f"{name}({address(coordinates)}{lane}{f', {test}' if test else ''})")
        if mode == "same" or lanes == 1:
            return [filled(group, test)] * lanes
        return [filled(out.let(f"{group}[{i}]"), test) for i in range(lanes)]
    values = []
    for i in range(lanes):
        coordinates = [*digits[:-1], out.let(_lane(first, i)) if i else first]
        test = condition(coordinates)
        where = f"{address(coordinates)} + i64({coordinates[-1]}) * (i64({step}) * {dtype.size})"
        values.append(filled(out.let(f"{name}({where}{f', {test}' if test else ''})"), test))
    return values


def _named_index(terms: Any, taken: Parameters, accesses: Accesses) -> tuple:
    """An encoded index with the names of its numbers: (constant, ((factor, atom), …))"""
    offset = taken.take()
    named = []
    for atom in terms:
        factor = taken.take()
        named.append((factor, _named(atom, taken, accesses)))
    return offset, tuple(named)


def _named(atom: Any, taken: Parameters, accesses: Accesses) -> tuple:
    match atom:
        case ("coord", dim):
            return ("coord", dim)
        case ("quotient" | "remainder" as kind, index):
            inner = _named_index(index, taken, accesses)
            return (kind, inner, *(taken.take() for _ in range(4)))
        case ("element", kind, index):
            accesses[f"element_{kind}"] = intrinsic("ptx.memory.load", DType(kind))
            base = taken.take("address")
            return ("element", kind, base, _named_index(index, taken, accesses), taken.take(), taken.take())
        case (kind, a, b):
            return (kind, _named_index(a, taken, accesses), _named_index(b, taken, accesses))
    raise AssertionError(atom)


def _index(out: Lines, index: Any, coordinates: list[str]) -> str:
    offset, terms = index
    parts = [f" + {_atom(out, atom, coordinates)} * {k}" for k, atom in terms]
    return out.let(f"i32({offset}{''.join(parts)})")


def _atom(out: Lines, atom: Any, coordinates: list[str]) -> str:
    match atom:
        case ("coord", dim):
            return coordinates[dim]
        case ("quotient", index, _, multiplier, shift, lift):
            return out.let(f"i32(divide({_index(out, index, coordinates)}, {multiplier}, {shift}) - {lift})")
        case ("remainder", index, d, multiplier, shift, _):
            n = _index(out, index, coordinates)
            return out.let(f"i32({n} - divide({n}, {multiplier}, {shift}) * {d})")
        case ("element", kind, base, index, last, extent):
            # Clamped twice: neither a lane beyond the last one nor what the tensor holds leads outside of memory.
            where = out.let(f"maximum(minimum({_index(out, index, coordinates)}, {last}), i32(0))")
            value = out.let(f"element_{kind}({base} + i64({where}) * {DType(kind).size})")
            value = out.let(f"select({value} < i64(0), {value} + i64({extent}), {value})")
            return out.let(f"i32(maximum(minimum({value}, i64({extent}) - i64(1)), i64(0)))")
        case (kind, a, b):
            return out.let(f"{kind}({_index(out, a, coordinates)}, {_index(out, b, coordinates)})")
    raise AssertionError(atom)


def _tiles(dims: int, x: str, y: str, reads: int, writes: int, mask: bool, expr: Any) -> KernelText:
    """A transpose through shared memory: one tile a block.

    dims    dimensions of the tiles: those of neither axis, then the tiles along x's axis, then those along y's
    reads, writes  elements of an access, along x's axis and along y's
    """
    x_type, y_type, expression = DType(x), DType(y), decode(expr)
    taken, out = Parameters(), Lines()
    inner = [taken.divider() for _ in range(dims - 1)]
    length, extent, padded = taken.take(), taken.take(), taken.take()
    x_base, x_steps = taken.take("address"), [taken.take() for _ in range(dims - 1)]
    y_base, y_steps = taken.take("address"), [taken.take() for _ in range(dims - 1)]
    out.scalars = taken.scalars(expression)
    *rest, x_tile, y_tile = split(out, out.let("i32(cuda.blockIdx.x)"), inner)
    thread = out.let("i32(cuda.threadIdx.x)")
    x_first, y_first = out.let(f"i32({x_tile} * {TILE})"), out.let(f"i32({y_tile} * {TILE})")
    x_base = out.let(
        x_base + "".join(f" + i64({d}) * (i64({s}) * {x_type.size})" for d, s in zip(rest, x_steps[1:], strict=True))
    )
    y_base = out.let(
        y_base + "".join(f" + i64({d}) * (i64({s}) * {y_type.size})" for d, s in zip(rest, y_steps[1:], strict=True))
    )
    accesses: Accesses = {
        "load": intrinsic("ptx.memory.load", x_type, reads, True),
        "put": intrinsic("ptx.memory.store", y_type, writes, True),
    }

    # Read along x's axis, neighbouring threads neighbouring groups. Value (i, j) of the tile, i along x's axis and j along
    # y's, lies at j * (TILE + 1) + i: both ways the banks differ.
    along = TILE // reads
    i, j = out.let(f"i32({thread} % {along} * {reads})"), out.let(f"i32({thread} // {along})")
    groups = []
    for k in range(TILE * TILE // (reads * THREADS)):
        row = out.let(f"i32({j} + {k * THREADS // along})")
        inside = f"within(i32({x_first} + {i}), 0, {length}) & within(i32({y_first} + {row}), 0, {extent})"
        where = f"{x_base} + i64({y_first} + {row}) * (i64({x_steps[0]}) * {x_type.size}) + i64({x_first} + {i}) * {x_type.size}"
        groups.append((row, out.let(f"load({where}, {inside})")))
    for row, group in groups:
        for n in range(reads):
            read = out.let(f"{group}[{n}]") if reads > 1 else group
            value = out.value(expression, lambda e, read=read: read)  # type: ignore[misc]
            if mask:
                value = out.let(f"select({y_first} + {row} < {extent}, {value}, f32(0))")
            out.lines.append(f"tile[{row} * {TILE + 1} + {i} + {n}] = {value}")
    out.lines.append("cuda.syncthreads()")
    along = TILE // writes
    j, i = out.let(f"i32({thread} % {along} * {writes})"), out.let(f"i32({thread} // {along})")
    for k in range(TILE * TILE // (writes * THREADS)):
        row = out.let(f"i32({i} + {k * THREADS // along})")
        values = [f"tile[({j} + {n}) * {TILE + 1} + {row}]" for n in range(writes)]
        inside = f"within(i32({x_first} + {row}), 0, {length}) & within(i32({y_first} + {j}), 0, {padded})"
        where = f"{y_base} + i64({x_first} + {row}) * (i64({y_steps[0]}) * {y_type.size}) + i64({y_first} + {j}) * {y_type.size}"
        out.lines.append(f"put({where}, {', '.join(values)}, {inside})")
    shared = f"tile = cuda.shared.array({TILE * (TILE + 1)}, f32)"
    return KernelText(taken.signature, [shared, *out.lines], accesses, THREADS)
