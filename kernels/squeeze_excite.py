"""A squeeze and excitation in one launch: the mean of each channel of an image, two products of these, and the image times what
they give for each channel. The image is read once.

A cluster of blocks takes an image. Each block keeps its share in shared memory: some of the pixels, of some of the channels. The
first product is one of sums, so a block multiplies those of its own pixels and channels, and the cluster adds up what they give
for each hidden unit. Of the second product a block computes the results of its own channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tccompile.arch import KIB, Arch, Feature
from tccompile.ir.expr import ACC, Expr, View, call, cast, const, constant, coord, load, substitute, walk
from tccompile.ir.extent import Extent, Open, ceil_div, hint, round_up, same
from tccompile.ir.ops import Conv, Mlp, Op, Pointwise, Reduce
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels.codegen import coarse, decode, encode, lifted, unrounded
from tccompile.kernels.loops import vectors
from tccompile.kernels.rates import measured
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import F32, I32, Arg, Config, Function, Joint, Launch, Ptr, Value, Work, code, memory_us
from tccompile.kernels.squeeze_excite_text import BYTES, GROUP, VECTOR, Writer, lanes_of
from tccompile.kernels.text import compiled

CHAINS = [Reduce, Mlp], [Reduce, Conv, Conv]
"""What makes gates."""

IMAGES = (DType.F16, DType.BF16, DType.I8, DType.U8, DType.E4M3)
"""Types of what is read and written."""

WEIGHTS = (DType.F16, DType.BF16, DType.F32)

CLUSTERS = (8, 4, 2, 1)
"""Blocks of a cluster."""

HIDDEN = 256
"""The most hidden units."""

RESIDENT = {128: 8, 256: 4, 512: 2}
"""Threads of a block, and how many such blocks a multiprocessor has registers for."""

TOGETHER, SMS = {8: 15, 4: 30, 2: 66, 1: 132}, 132
"""Clusters of so many blocks, one on each multiprocessor, that run at once on an H200, and its multiprocessors."""

ROWS = 8
"""Rows of the first weights that a warp reads at once, at most."""

TOGETHER_READ = 64
"""Bytes that come from memory together."""


@dataclass(frozen=True)
class Unit:
    """What becomes of a product: of the sums by `weights`, the expression; its loads are of a number for each result."""

    weights: Tensor
    expr: Expr
    loads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Chain:
    """All that is computed: y = expr(x, gates), gates = second(first(scale · Σ x + shift)); shift for all pixels together.

    expr  of `acc`, an element of x as float32, and load 0, its channel's factor, which `second` gives; rounded to nothing yet
    """

    x: Tensor
    y: Tensor
    scale: float
    shift: float
    first: Unit
    second: Unit
    expr: Expr

    @property
    def pixels(self) -> Extent:
        return prod(self.x.shape[2:])

    @property
    def lanes(self) -> int:
        """Channels of a vector."""
        return lanes_of(self.x.dtype)

    @property
    def vectors(self) -> int:
        """Of channels."""
        return ceil_div(max(self.x.padded[1], self.y.padded[1]), self.lanes)


# --- What the ops say ------------------------------------------------------------------------------------------------


@remembered
def described(ops: Sequence[Op], program: Program) -> Chain | str:
    """What the ops compute, given in order; or why it is not computed in one launch."""
    mean, *products, last = ops
    assert isinstance(mean, Reduce)
    x, y = program.tensors[mean.x], program.tensors[last.y]
    if (reason := _layout(x, y)) is not None:
        return reason
    if mean.combine != "add" or mean.axes != (2, 3):
        return "it is no mean over all pixels"
    line = _line(mean, prod(x.shape[2:]))
    if line is None:
        return "its mean is not proportional to a sum"
    units = [unit for op in products for unit in _units(op, program)]
    if any(isinstance(unit, str) for unit in units):
        return next(unit for unit in units if isinstance(unit, str))
    expr = _expression(last, products[-1].y, program, x)
    if isinstance(expr, str):
        return expr
    first, second = units
    assert isinstance(first, Unit) and isinstance(second, Unit)
    expr, factor = factored(_stored(expr, y.dtype))
    return Chain(x, y, *line, first, replace(second, expr=substitute(factor, {GATE: second.expr})), expr)


GATE = Expr("gate", (), None, DType.F32)
"""Stands for a channel's gate while factors are looked for."""


def _stored(expr: Expr, dtype: DType) -> Expr:
    """What rounded to bytes and saturated is the expression: without what storing them does."""
    inside = expr.args[0] if expr.fn == "cast" and dtype in BYTES else expr
    if inside.fn == "saturate" and dtype in BYTES and [e.value for e in inside.args[1:]] == [dtype.lowest, dtype.largest]:
        x, *zero = inside.args[0].args if inside.args[0].fn == "add" else inside.args[:1]
        if x.fn == "round" and all(z.fn == "const" for z in zero):
            return call("add", x.args[0], *zero) if zero and zero[0].value else x.args[0]
    return unrounded(expr, dtype)


def factored(expr: Expr) -> tuple[Expr, Expr]:
    """An expression of an element and its channel's gate as one of the element and a factor, load 0; and that factor, which is of
    the gate: what an element is multiplied and divided by is the same for all of a channel."""
    found = next(
        (e for e in reversed(walk(expr)) if GATE in walk(e) and ACC in walk(e) and e.fn in ("mul", "div", "ratio")), None
    )
    if found is None:
        return substitute(expr, {GATE: load(0)}), GATE
    element, factor, scale = found, None, 1.0
    while element.fn in ("mul", "div", "ratio"):
        a, b = element.args
        if element.fn == "mul" and ACC in walk(b):
            a, b = b, a
        if ACC in walk(b):
            break
        if b.fn == "const":
            scale = scale * b.value if element.fn == "mul" else scale / b.value  # type: ignore[operator]
        else:
            factor = call(element.fn, factor or const(1.0), b) if factor or element.fn != "mul" else b
        element = a
    factor = factor if factor and scale == 1 else call("mul", factor or const(1.0), scale)
    whole = substitute(expr, {found: call("mul", element, load(0))})
    return (whole, factor) if GATE not in walk(whole) else (substitute(expr, {GATE: load(0)}), GATE)


def _layout(x: Tensor, y: Tensor) -> str | None:
    """Why an image is not read or written, by vectors of channels of pixels that lie one after the other; None if it is."""
    for t in (x, y):
        if t.dtype not in IMAGES or t.rank != 4:
            return f"{t.name} is {t.dtype.value} of rank {t.rank}; it takes images of {', '.join(kind.value for kind in IMAGES)}"
        if any(isinstance(n, Open) for n in (*t.shape[1:], *t.padded[1:])) or t.padded[2:] != t.shape[2:]:
            return f"pixels of {t.name} are padded, or not known in number"
        if not vectors(t, 1, lanes_of(x.dtype)) or t.strides[2] != t.shape[3] * t.strides[3]:
            return f"pixels of {t.name} do not lie one after the other, in whole vectors of {lanes_of(x.dtype)} channels"
    return None


def _line(mean: Reduce, pixels: Extent) -> tuple[float, float] | None:
    """A mean as a factor of a sum of elements, and what is added to that; None if it is not one."""
    before, behind = affine(mean.pre), affine(mean.epilogue.expr)
    if before is None or behind is None:
        return None
    return behind[0] * before[0], behind[0] * before[1] * pixels + behind[1]


def affine(expr: Expr) -> tuple[float, float] | None:
    """(a, b) of an expression that is a · acc + b; None if it is none."""
    if expr.fn == "acc":
        return 1.0, 0.0
    if expr.fn == "const":
        return 0.0, float(expr.value)  # type: ignore[arg-type]
    found = [affine(arg) for arg in expr.args]
    if not found or None in found:
        return None
    (a, b), *rest = found  # type: ignore[misc]
    if expr.fn == "cast":
        exact = expr.args[0].fn == "acc" or expr.args[0].dtype is expr.dtype
        return (a, b) if exact else None
    if expr.fn in ("add", "sub"):
        sign = 1 if expr.fn == "add" else -1
        return a + sign * rest[0][0], b + sign * rest[0][1]  # type: ignore[index]
    if expr.fn == "mul" and 0.0 in (a, rest[0][0]):  # type: ignore[index]
        c, d = rest[0]  # type: ignore[misc]
        return a * d + b * c, b * d
    if expr.fn in ("div", "ratio") and rest[0][0] == 0 and rest[0][1] != 0:  # type: ignore[index]
        return a / rest[0][1], b / rest[0][1]  # type: ignore[index]
    return None


def _units(op: Op, program: Program) -> list[Unit | str]:
    """The products of an op."""
    if isinstance(op, Mlp):
        bias = () if op.b is None else (View(op.b, (coord(1),)),)
        hidden = substitute(op.hidden, {ACC: call("add", ACC, load(0))}) if bias else op.hidden
        return [_unit(op.w, hidden, bias, program), _unit(op.v, op.epilogue.expr, op.epilogue.loads, program)]
    assert isinstance(op, Conv)
    if op.groups != 1 or any(op.pads) or op.epilogue.shuffle != 1:
        return [f"{op.y} is no product of a mean"]
    return [_unit(op.w, op.epilogue.expr, op.epilogue.loads, program)]


def _unit(name: str, expr: Expr, loads: Sequence[View], program: Program) -> Unit | str:
    w = program.tensors[name]
    if w.dtype not in WEIGHTS or w.strides[1] != 1 or any(n % GROUP for n in (w.padded[1], w.strides[0], w.offset)):
        return f"rows of {name} are not whole vectors of {GROUP} floats"
    read = [program.tensors[view.tensor] for view in loads]
    for view, t in zip(loads, read, strict=True):
        if view.index != (coord(1),) or view.valid or t.strides != (1,) or not t.dtype.is_float:
            return f"its epilogue reads {t.name}, which is no number for each channel"
    return Unit(w, expr, tuple(read))


def _expression(op: Op, gate: str, program: Program, x: Tensor) -> Expr | str:
    """What becomes of an element of x and its channel's gate, as `Chain.expr`."""
    views, expr = op.epilogue.loads, op.epilogue.expr
    shape = program.tensors[op.y].shape
    names = [view.tensor for view in views]
    if sorted(names) != sorted((x.name, gate)) or op.epilogue.shuffle != 1 or op.also is not None:
        return f"{op.y} is no product of {x.name} and {gate}"
    wanted = {x.name: range(4), gate: range(2)}
    for view in views:
        if view.valid or not all(_is_coordinate(view, a, a in wanted[view.tensor], shape) for a in range(4)):
            return f"{op.y} reads {view.tensor} elsewhere"
    if not program.tensors[gate].dtype.is_float:
        return f"{gate} is {program.tensors[gate].dtype.value}"
    image, gates = names.index(x.name), names.index(gate)
    element = load(image) if x.dtype.is_float else cast(load(image, DType.I64), DType.F32)
    found = substitute(expr, {element: ACC, load(gates): GATE})
    left = [e for e in walk(found) if e.fn == "load"]
    return f"{op.y} reads {x.name} as integers" if left or found.dtype not in (DType.F32, DType.I64) else found


def _is_coordinate(view: View, axis: int, moves: bool, shape: Sequence[Extent]) -> bool:
    """Whether an index goes along an axis of the result, or stays where it is."""
    if moves and view.index[axis] == coord(axis):
        return True
    return view.index[axis] == constant(0) and (not moves or same(shape[axis], 1))


# --- How it is shared out --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """How an image is shared out among a cluster's blocks, and a block's share among its threads.

    across, along  parts of the channels and of the pixels; one block each
    vectors, abreast  vectors of channels of a block, and threads of each
    subs           sums of threads that are added up side by side, of each channel
    pixels         that a thread keeps
    smem           bytes of shared memory
    """

    across: int
    along: int
    threads: int
    vectors: int
    abreast: int
    subs: int
    pixels: int
    smem: int

    @property
    def blocks(self) -> int:
        return self.across * self.along

    def resident(self, arch: Arch) -> int:
        """Blocks that a multiprocessor holds."""
        return min(arch.smem_sm // (self.smem + KIB), RESIDENT[self.threads])


def shares(chain: Chain, config: Config) -> Shares:
    across, along, threads = (config[name] for name in ("across", "along", "threads"))
    wide = ceil_div(chain.vectors, across)
    abreast = max(1, threads // wide)
    channels, pixels = chain.lanes * wide, ceil_div(ceil_div(chain.pixels, along), abreast)
    subs, units = max(1, threads // channels), chain.first.weights.shape[0]
    chunks = ceil_div(units, GROUP)
    numbers = chain.lanes * threads + channels * (subs + 2) + 2 * GROUP * chunks
    weights = channels * (units * chain.first.weights.dtype.size + GROUP * (chunks | 1) * chain.second.weights.dtype.size)
    return Shares(across, along, threads, wide, abreast, subs, pixels, 4 * numbers + weights + VECTOR * threads * pixels)


class SqueezeExcite(Joint):
    """A mean over images, two products of it, and the images times what they give, on sm_90 and newer."""

    name = "squeeze_excite"

    def groups(self, program: Program) -> Iterator[tuple[int, Sequence[int]]]:
        writers, readers = {op.y: i for i, op in enumerate(program.ops)}, dict[str, set[int]]()
        for i, op in enumerate(program.ops):
            for name in op.inputs:
                readers.setdefault(program.tensors[name].storage, set()).add(i)

        def maker(name: str, reader: int) -> int:
            """The op that makes a tensor that no other than the reader reads; -1 if there is none."""
            own = program.tensors[name].base is None and name not in program.outputs and readers.get(name) == {reader}
            return writers.get(name, -1) if own else -1

        def before(name: str, reader: int, products: int = 2) -> list[int]:
            """So many products that make a gate, at most, behind the mean that they are of."""
            made = maker(name, reader)
            op = program.ops[made] if made >= 0 else None
            if isinstance(op, Conv | Mlp) and products:
                return [*before(op.x, made, products - 1), made]
            return [made] if isinstance(op, Reduce) else []

        for last, op in enumerate(program.ops):
            for view in op.views if isinstance(op, Pointwise) else ():
                chain = before(view.tensor, last)
                kinds = [type(program.ops[i]) for i in chain]
                if kinds in CHAINS and program.ops[chain[0]].operands[0] in op.inputs:
                    yield last, (*chain, last)

    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None:
        if not arch.has(Feature.CLUSTERS):
            return f"{arch.name} has no clusters"
        found = described(tuple(ops), program)
        if isinstance(found, str):
            return found
        if found.first.weights.shape[0] > HIDDEN:
            return f"it has {found.first.weights.shape[0]} hidden units; it takes {HIDDEN} at most"
        if next(iter(self.configs(ops, program, arch)), None) is None:
            return f"the shared memory of a cluster does not hold an image of {found.x.name}"
        return None

    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]:
        chain = described(tuple(ops), program)
        assert isinstance(chain, Chain)
        for blocks in CLUSTERS:
            for across in (a for a in CLUSTERS if a <= blocks):
                for threads in RESIDENT:
                    config = {"across": across, "along": blocks // across, "threads": threads}
                    s = shares(chain, config)
                    fits = s.vectors <= threads and s.smem <= arch.smem_block
                    whole = (across - 1) * s.vectors < chain.vectors and (s.along - 1) * s.abreast < chain.pixels
                    if fits and whole:
                        yield config

    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float:
        """What comes one after the other in a block, and all traffic."""
        chain = described(tuple(ops), program)
        assert isinstance(chain, Chain)
        s, own = shares(chain, config), measured(arch).squeeze_excite
        images, moved = hint(chain.x.shape[0]), 0.0
        turns = ceil_div(images, int(TOGETHER[s.blocks] * arch.sms / SMS) * s.resident(arch))
        for t in (chain.x, chain.y):
            row = chain.lanes * s.vectors * t.dtype.size
            parts = round_up(row, TOGETHER_READ) / row if s.across > 1 else 1.0
            moved += own.moving * parts * memory_us([t], arch) / min(1.0, own.reach * images * s.blocks / arch.sms)
        weights = 2 * chain.first.weights.shape[0] * chain.lanes * s.vectors / s.threads * own.weight_us
        kept = own.pixel_us + (own.byte_us if chain.x.dtype.size == 1 else 0.0)
        each = own.turn_us + own.thread_us * s.threads + weights + kept * s.pixels * chain.lanes
        return measured(arch).launch_us - own.early_us + moved + each * turns

    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work:
        chain = described(tuple(ops), program)
        assert isinstance(chain, Chain)
        s, args = shares(chain, config), _Arguments(chain)
        x, y, first, second = chain.x, chain.y, chain.first.weights, chain.second.weights
        if 0 in y.padded:
            return Work(())
        units = first.shape[0]
        chunks = ceil_div(units, GROUP)
        launch = Launch(
            code(
                self.name, x=x.dtype.value, y=y.dtype.value, w=first.dtype.value, v=second.dtype.value,
                across=s.across, blocks=s.blocks, threads=s.threads, resident=RESIDENT[s.threads],
                rows=min(ROWS, ceil_div(units, s.threads // 32)), masked=y.padded[1] != y.shape[1],
                early=_early(chain, program), units=args.units, expr=encode(args.expr),
            ),
            grid=(x.shape[0] * s.blocks, 1, 1),
            block=s.threads,
            args=(
                *(Ptr(t.name) for t in (x, y, first, second)),
                *map(I32, (s.vectors, s.abreast, chain.pixels, s.subs, ceil_div(chain.pixels, s.along))),
                *map(I32, (x.strides[0], x.strides[3], y.strides[0], y.strides[3], x.padded[1], y.padded[1], x.shape[1])),
                *map(I32, (units, first.strides[0], first.padded[1], second.strides[0], second.shape[0], chunks)),
                *(F32(chain.scale), F32(chain.shift)),
                *args.args,
            ),
            smem=s.smem,
        )  # fmt: skip
        return Work((launch,))

    def build(self, arch: Arch, **params: Any) -> Function:
        return compiled(self.source(arch, **params))

    def source(self, arch: Arch, **params: Value) -> Any:
        """The kernel's text."""
        units = [(decode(expr), tuple(map(DType, kinds))) for expr, kinds in params["units"]]
        return Writer(params, units, decode(params["expr"])).text()


def _early(chain: Chain, program: Program) -> bool:
    """Whether a block copies weights before it waits for earlier grids: if they are known."""
    return all(w.name in program.constants for w in (chain.first.weights, chain.second.weights))


class _Arguments:
    """What the expressions take: they without constants, and the arguments of the launch."""

    def __init__(self, chain: Chain) -> None:
        self.args: list[Arg] = []
        self.units: tuple[Value, ...] = ()
        for unit in (chain.first, chain.second):
            expr, scalars = lifted(unit.expr)
            self.units += ((encode(expr), tuple(t.dtype.value for t in unit.loads)),)
            self.args += [*(Ptr(t.name) for t in unit.loads), *scalars]
        self.expr, scalars = lifted(coarse(chain.expr, chain.y.dtype))
        self.args += scalars
