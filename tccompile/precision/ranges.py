"""What values the tensors of a program take, from running it in float32: where fp16 would overflow or lose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from tccompile.ir import weights
from tccompile.ir.expr import Expr
from tccompile.ir.extent import round_up
from tccompile.ir.ops import Attention, Conv, Gemm, Op, Rnn
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate, rounded_before
from tccompile.precision.powers import powers_of
from tccompile.precision.sensitivity import Need, Sensitivity
from tccompile.refit.held import spread

if TYPE_CHECKING:
    from tccompile.load.model import Opened

LONG, TOO_LONG = 40e9, 300e9
"""Floating-point operations of a run: NumPy does some 10 to 40 billion a second. See `smaller`."""

MANY, TOO_MANY, TOO_LARGE = 1 << 25, 1 << 27, 1 << 28
"""Elements that all ops write, of which NumPy computes, rounds and compares some 20 million a second; and those of one tensor,
for which a run takes some GiB, and which are not run through."""

USUAL = 4
"""Parts of an expression, of which so many more take as long again."""

STEP, TOO_MANY_STEPS = 1 << 10, 1 << 15
"""Elements that a time step of a recurrent layer counts as, beside its own; and so many steps are not run through."""

TURNS = 16
"""Iterations of a loop that are looked at."""

SAMPLE = 1 << 15
"""Elements of a tensor that are looked at one by one: its largest is sought among all."""


@dataclass
class Spread:
    """Magnitudes of a tensor's finite values: the largest, and a sample of those that are not 0.

    spread     for constant operands: how far the norms for each input channel are apart, those that are not 0
    estimated  from the weights, not from running the network (estimate.py)
    bound      what no input can make it exceed
    need       why it must be stored in fp32, whatever its range
    share      what storing it in fp16 moves the outputs by, relative to them
    apart      for the weights of products whose output channels are of very different sizes: what holds them all
    """

    largest: float = 0.0
    sample: list[np.ndarray] = field(default_factory=list)
    spread: float = np.inf
    estimated: bool = False
    bound: float = np.inf
    need: Need | None = None
    share: float = 0.0
    apart: Apart | None = None
    _loss: float | None = None

    def add(self, values: np.ndarray) -> None:
        flat = values.ravel("K")  # memory order: no copy of a transposed array
        some = np.abs(flat[:: flat.size // SAMPLE | 1])  # odd: channels, by which memory repeats itself, are mostly even
        high, low = (float(flat.max()), float(flat.min())) if flat.size else (0.0, 0.0)
        if not np.isfinite(high - low):  # an infinity or a NaN among them: its neighbours still count
            finite = flat[np.isfinite(flat)]
            high, low = (float(finite.max()), float(finite.min())) if finite.size else (0.0, 0.0)
        self.largest = max(self.largest, high, -low)
        self.sample.append(some[np.isfinite(some) & (some > 0)].astype(np.float32))
        self._loss = None

    def merge(self, other: Spread) -> None:
        """Add what was added to another one."""
        self.largest, self._loss = max(self.largest, other.largest), None
        self.sample += other.sample

    @property
    def magnitudes(self) -> np.ndarray:
        if len(self.sample) > 1:
            self.sample = [np.concatenate(self.sample)]
        return self.sample[0] if self.sample else np.empty(0, np.float32)

    @property
    def loss(self) -> float:
        """That of storing the sample in fp16, which the programs of all of a range's sizes ask for."""
        if self._loss is None:
            self._loss = loss(self.magnitudes)
        return self._loss


def loss(v: np.ndarray) -> float:
    """The relative error of fp16 storage: ‖fp16(v) - v‖ / ‖v‖."""
    if not v.size:
        return 0.0
    exact = v.astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = v.astype(np.float16).astype(np.float64)
    return float(np.sqrt(np.square(rounded - exact).sum() / np.square(exact).sum()))  # not BLAS: its threads cost more than this


class Apart(NamedTuple):
    """Powers of two, one for each output channel, and what weights times these are."""

    powers: np.ndarray
    values: Spread


def activations(
    program: Program,
    runs: Iterable[Mapping[str, np.ndarray]],
    sources: Mapping[str, np.ndarray],
    progress: Callable[[], object] = lambda: None,
    bytes_count: bool = True,
) -> dict[str, Spread]:
    """The values of each float tensor that is computed, over runs with these inputs, by the tensor that owns the storage.

    progress  called after each op of each run; bytes_count: see `Sensitivity`
    """
    found: dict[str, Spread] = {}
    program = rounded_before(program, sources)
    sensitivity, lock = Sensitivity(program, bytes_count), Lock()

    def run(feeds: Mapping[str, np.ndarray]) -> tuple[dict[str, Spread], Sensitivity]:
        spreads, own = dict[str, Spread](), Sensitivity(program, bytes_count)

        def watch(op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
            if program.tensors[op.y].dtype.is_float:
                spreads.setdefault(program.tensors[op.y].storage, Spread()).add(y)
            own.observe(op, values, acc, y)
            with lock:
                progress()

        with np.errstate(all="ignore"):
            evaluate(program, feeds, sources, watch, turns=TURNS)
        return spreads, own

    for spreads, own in _some_at_once(run, runs, _written(program) <= MANY):
        for owner, values in spreads.items():
            found.setdefault(owner, Spread()).merge(values)
        sensitivity.merge(own)
    with np.errstate(all="ignore"):
        for owner, bound in _bounds(program).items():
            if owner in found:
                found[owner].bound = bound
        for owner, need in sensitivity.needs().items():
            found[owner].need = need
        for owner, share in sensitivity.shares().items():
            if owner in found:
                found[owner].share = share
    return found


T = TypeVar("T")
R = TypeVar("R")


def _some_at_once(run: Callable[[T], R], runs: Iterable[T], at_once: bool) -> Iterator[R]:
    """What each run gives, in order; `at_once`: two at a time, which NumPy lets on two cores. Each takes memory of its own."""
    if not at_once:
        yield from map(run, runs)
        return
    with ThreadPoolExecutor(2) as threads:
        yield from [begun.result() for begun in [threads.submit(copy_context().run, run, feeds) for feeds in runs]]


def _bounds(program: Program) -> dict[str, float]:
    """What no input can make a tensor exceed, as what it stands for is saturated; by the tensor that owns the storage."""
    out: dict[str, float] = {}
    for op in program.ops:
        limits, t = _limits(op.epilogue.expr), program.tensors[op.y]
        bound = math.inf if limits is None else max(map(abs, limits))
        out[t.storage] = max(out.get(t.storage, 0.0), bound)
    return out


def _limits(e: Expr) -> tuple[float, float] | None:
    """The least and the greatest value of what is saturated, shifted and scaled by constants; None of others."""
    if e.fn not in ("cast", "saturate", "add", "sub", "mul") or any(a.fn != "const" for a in e.args[1:]):
        return None
    by = [float(a.value) for a in e.args[1:]]  # type: ignore[arg-type]
    if e.fn == "saturate":
        return by[0], by[1]
    if (limits := _limits(e.args[0])) is None or e.fn == "cast":
        return limits
    how = {"add": float.__add__, "sub": float.__sub__, "mul": float.__mul__}[e.fn]
    first, last = how(limits[0], *by), how(limits[1], *by)
    return min(first, last), max(first, last)


def operands(program: Program, sources: Mapping[str, np.ndarray]) -> dict[str, Spread]:
    """The values of each constant that Tensor Cores may multiply."""
    found: dict[str, Spread] = {}
    products = {op.operands[1] for op in program.ops if isinstance(op, Conv | Gemm)}
    for name in dict.fromkeys(name for op in program.ops for name in op.multiplied):
        if name in program.constants:
            values = weights.evaluate(program.constants[name], sources)
            found[name] = _of(values)
            rows = name in products and values.ndim > 1 and values.dtype.kind == "f"
            if rows and (powers := powers_of(values)) is not None:
                along = powers.reshape(-1, *[1] * (values.ndim - 1))
                found[name].apart = Apart(powers, _of(np.ldexp(values, along)))
    return found


def _of(values: np.ndarray) -> Spread:
    """The spread of a constant operand."""
    out = Spread()
    out.add(values)
    if values.ndim > 1:
        out.spread = spread(values)
    return out


def rooms(program: Program, found: Mapping[str, Spread]) -> dict[str, float]:
    """What magnitudes constants may have without results becoming larger than twice what they were: those that are added to them.

    In memory, as scaled as the result is; of a constant that is added to several, the smallest.
    """
    out: dict[str, float] = {}
    for op in program.ops:
        owner = program.tensors[op.y].storage
        if owner not in found:
            continue
        scale = program.storage[owner].scale if owner in program.storage else 1.0
        for i in _added(op.epilogue.expr):
            name = op.epilogue.loads[i].tensor
            if name in program.constants:
                out[name] = min(out.get(name, math.inf), found[owner].largest * scale)
    used = [name for op in program.ops for name in op.inputs if name in out]
    return {name: room for name, room in out.items() if used.count(name) == 1}


def _added(expr: Expr) -> set[int]:
    """The views that an expression adds to something computed, such that no constant multiplies the sum."""

    def computed(e: Expr) -> bool:
        return e.fn in ("acc", "load") or any(map(computed, e.args))

    if expr.fn in ("add", "sub") and all(map(computed, expr.args)):
        return {int(a.value) for a in expr.args if a.fn == "load" and a.value is not None}.union(*map(_added, expr.args))
    if expr.fn in ("mul", "div", "pow") and not all(map(computed, expr.args)):
        return set()
    return set().union(*map(_added, expr.args))


def is_long(program: Program) -> bool:
    """Whether a run takes more than a few seconds."""
    return _share(program) < 0.5


def _share(program: Program) -> float:
    """The part of a run that takes a second or two."""
    written = _written(program) + STEP * _time_steps(program)
    return min(LONG / 2 / max(total_flops(program), 1), MANY / 2 / max(written, 1))


def why_too_long(program: Program) -> str | None:
    """Why a program is not run on the CPU to measure it: what that would take. None if it may be."""
    if largest(program) > TOO_LARGE:
        return f"running it would make a tensor of {largest(program) / 1e6:.0f} million elements"
    if _time_steps(program) > TOO_MANY_STEPS:
        return f"running it would be {_time_steps(program)} time steps, one after another"
    if total_flops(program) > TOO_LONG:
        return f"running it would be {total_flops(program) / 1e9:.0f} GFLOP on the CPU"
    if _written(program) > TOO_MANY:
        return f"running it would write {_written(program) / 1e6:.0f} million elements on the CPU"
    return None


def _written(program: Program) -> int:
    """Elements that all ops write, and read at places that are computed, each as often as its expression is long."""

    def turns(op: Op) -> int:
        return max(_parts(op.epilogue.expr) // USUAL, 1) + sum(len(v.tensors) > 1 for v in op.views)

    return sum(math.prod(program.op_shape(op)) * turns(op) for op in program.ops)


def _parts(expr: Expr) -> int:
    """How many different parts an expression has."""
    found: dict[int, Expr] = {}
    todo = [expr]
    while todo:
        e = todo.pop()
        if id(e) not in found:
            found[id(e)] = e
            todo += e.args
    return len(found)


def smaller(model: Opened, program: Program) -> tuple[Opened, dict[str, tuple[int, ...]]]:
    """The model for fewer or smaller images, and the shapes of its inputs, such that it is not long, or only a little.

    Where all inputs have the same first extent, that is how many there are; images are inputs of rank 4. Tensors have the same
    names in both; a network that flattens images may not take other sizes.
    """
    share = _share(program)
    given = {name: program.tensors[name].shape for name in program.inputs}
    batches = {shape[0] for shape in given.values() if len(shape) > 1}
    batch = batches.pop() if len(batches) == 1 and all(given.values()) else 1
    fewer = max(int(batch * share), 1)
    factor = min(share * batch / fewer, 1.0) ** 0.5
    shapes = {}
    for name in (value.name for value in model.proto.graph.input if value.name in given):
        first, *rest = given[name] or (0,)
        if len(rest) == 3 and fewer == 1:
            rest = [rest[0], *(_fewer(n, factor) for n in rest[1:])]
        shapes[name] = (fewer if first == batch else first, *rest) if given[name] else ()
    return resized(model, shapes), shapes


def resized(model: Opened, shapes: Mapping[str, tuple[int, ...]]) -> Opened:
    """The model with inputs of these shapes, and nothing said of the shapes of what comes of them."""
    proto = deepcopy(model.proto)
    for value in proto.graph.input:
        if value.name in shapes:
            for dim, extent in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dim.dim_value = extent
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    return replace(model, proto=proto)


def _fewer(pixels: int, factor: float) -> int:
    """Rows or columns of a smaller image, rounded up to what networks with several scales take; a small one stays."""
    fewer = max(int(pixels * factor), 1)
    step = next((n for n in (32, 8) if pixels % n == 0 and pixels >= 8 * n), 1)
    return pixels if pixels < 64 else round_up(fewer, step)


def _time_steps(program: Program) -> int:
    """Of recurrent layers, which NumPy takes one after the other."""
    return sum(math.prod(program.op_shape(op)[:2]) for op in program.ops if isinstance(op, Rnn))


def total_flops(program: Program) -> int:
    return sum(map(program.flops, program.ops))


def largest(program: Program) -> int:
    """Elements of the largest tensor that a run makes: one of the program's, or a head's scores."""
    heads = (op for op in program.ops if isinstance(op, Attention))
    scores = [program.tensors[op.q].shape[2] * program.tensors[op.k].shape[2] for op in heads]
    made = (t.size for t in program.tensors.values() if t.storage not in program.constants)
    return max((*scores, *made), default=0)
