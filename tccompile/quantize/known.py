"""What is known of a network's activations in bytes, whatever shapes and GPU it is built for: from runs in float32.

What an activation's bytes move the outputs by is what they move it by, times a measured gain; and so of weights, by way of what
they are multiplied to. Such errors add up as squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.ir.metric import relative_error
from tccompile.lower.graph import lower
from tccompile.precision.metric import Metric
from tccompile.quantize.grid import LARGEST, Grid, grid_of, rounded, weight_error
from tccompile.quantize.insert import Rounded, Tensor, quantized
from tccompile.quantize.margin import expected
from tccompile.quantize.marks import marks
from tccompile.quantize.observe import WATCHED, Observed, Values, observe, outputs
from tccompile.quantize.products import (
    IN_FLOATS,
    MEANS,
    OPS,
    Attended,
    Layer,
    attentions,
    gating,
    is_gate,
    layers,
    products,
)
from tccompile.quantize.smooth import factors, smoothed
from tccompile.quantize.ticks import Ticks
from tccompile.quantize.ties import begins, ties
from tccompile.rewrites import tidy
from tccompile.rewrites.quantized import moves
from tccompile.rewrites.rule import rank

Feeds = Mapping[str, np.ndarray]

Progress = Callable[[int, int], None]
"""Called with how many runs of the network are done, and about how many there are."""

FLOATS, OPERANDS, ALL, FLOAT8_OPERANDS, FLOAT8_ALL = WAYS = range(5)
"""Who reads an activation's bytes: nobody, the products that read it, or all that read it; integers, and then floats."""

FORMATS = {"int8": (OPERANDS, ALL), "fp8": (FLOAT8_OPERANDS, FLOAT8_ALL)}
"""The ways to store an activation by what the bytes are."""

TESTED = 8
"""Runs that a choice is measured on, at most, the last ones: errors differ from input to input by far more than one from those
that are new. Of all runs up to a quarter are held back from calibration for that."""

OPEN = 32
"""The same of a choice that is within the bound on those, while new inputs may be beyond: 8 runs that are alike say of new ones
that they are up to 1.5 times as far off, and 32 that they are up to 1.2 times."""

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Attention", "LayerNormalization", "InstanceNormalization",
         "GroupNormalization", "Softmax", "GRU", "LSTM", "RNN", "Resize")  # fmt: skip
"""Operators that do not read bytes but by way of floats that are stored for them."""

WEIGHTS_OFF = 2.6e-2
"""What attention is off by whose weights are rounded to E4M3, relative to it, where values average to nothing."""

NAMED = "--fp32 names it"
"""Why a product is not in bytes that the user wants in fp32."""

GATES = "it makes numbers for channels from their means, which one launch does in floats"
"""Why a product of a squeeze and excitation is not in bytes."""

NOT_FINITE = "its input is not finite, or too large to be squared"
"""Why a product is not in bytes whose input has no scale."""

ELSEWHERE = "the model has it at some shapes only"
"""Why a product is not in bytes that other shapes do not have, or have as another."""


@dataclass(frozen=True)
class Activation:
    """A tensor that products read, or several that are chosen as one; or one that only sums read.

    layers   the names of the products
    how      as it would be stored in each of `WAYS`: what is, by name
    ways     those that are possible
    squares  of what the outputs move by, for each way
    """

    name: str
    layers: tuple[str, ...]
    how: tuple[Mapping[str, Tensor], ...]
    ways: tuple[int, ...]
    squares: tuple[float, ...]


@dataclass(frozen=True)
class Tried:
    """How far estimates have the outputs off by what is in integers, and in floats of 8 bits; and how far they were."""

    int8: float
    fp8: float
    off: float

    @property
    def said(self) -> float:
        return math.hypot(self.int8, self.fp8)


@dataclass(frozen=True)
class Known:
    """What runs of a network have shown.

    alone   its activations each for itself, and `tied`, those with one scale as one where that is possible, else none
    added   what no product reads: results of products that only sums with results of others read, and what is joined of results
            and read by ops of single elements
    smooth  what the channels of activations are divided by, by name
    floats  products that are not in bytes, whatever they take, and why
    long    products that are not in integers, and why; `no_float8`: those that are not in floats of 8 bits
    tried   what was run in bytes
    weights by which other weights are told, for each product
    """

    alone: tuple[Activation, ...]
    tied: tuple[Activation, ...]
    added: tuple[Activation, ...]
    smooth: Mapping[str, np.ndarray]
    floats: Mapping[str, str]
    long: Mapping[str, str]
    no_float8: Mapping[str, str]
    tried: tuple[Tried, ...]
    weights: Mapping[str, float] = field(default_factory=dict)

    def within(self, graphs: Sequence[gs.Graph], fp32: Collection[str], formats: Collection[str]) -> Known:
        """The part of it that all these graphs have, in these formats, without the products that are to be in fp32, by names or
        patterns.

        Raises InputError if it is of another model.
        """
        found = [(products(graph), graph.tensors()) for graph in graphs]
        names = [name for a in self.alone for name in a.layers]
        out = {name: GATES for name in set.union(*map(gating, graphs)).intersection(names)}
        out |= {name: NAMED for name in names if named(name, fp32)}
        for a in (*self.alone, *self.tied):
            for name in a.layers:
                if not all(name in there and _fits(there[name], tensors, a) for there, tensors in found):
                    out.setdefault(name, ELSEWHERE)
        if names and all(out.get(name) == ELSEWHERE for name in names):
            raise InputError(f"the calibration is of another model: this one has no product {min(names)!r} that it could be for")
        for format, others in (("fp8", self.long), ("int8", self.no_float8)):
            out |= {} if format in formats else {name: why for name, why in others.items() if name not in out}
        alone, tied = (
            tuple(self._in(b, formats) for a in part if (b := _without(a, out)) is not None) for part in (self.alone, self.tied)
        )
        added = tuple(self._in(a, formats) for a in self.added)
        return replace(self, alone=alone, tied=tied, added=added, floats={**self.floats, **out})

    def _in(self, a: Activation, formats: Collection[str]) -> Activation:
        """The activation as it may be stored in these formats: in those in which all of its products may be."""
        without = {"int8": self.long, "fp8": self.no_float8}
        usable = [f for f in formats if not any(name in without[f] for name in a.layers)]
        ways = {FLOATS, *(way for f in usable for way in FORMATS[f])}
        return replace(a, ways=tuple(way for way in a.ways if way in ways))


def named(node: str, patterns: Collection[str]) -> bool:
    """Whether a node has one of these names, which may be patterns as for files."""
    return any(fnmatchcase(node, pattern) for pattern in patterns)


def _fits(layer: Layer | Attended, tensors: Mapping[str, gs.Tensor], a: Activation) -> bool:
    stored = [(a.how[way].get(name), tensors[name].shape[axis]) for way in a.ways if way for name, axis in layer.reads.items()]
    return all(t is not None and len(t.means) == channels for t, channels in stored)


def _without(a: Activation, out: Collection[str]) -> Activation | None:
    """The activation without these layers, which read floats then; None if no others are left."""
    left = tuple(name for name in a.layers if name not in out)
    if len(left) == len(a.layers):
        return a
    return replace(a, layers=left, ways=tuple(way for way in a.ways if way not in (ALL, FLOAT8_ALL))) if left else None


def find(
    graph: gs.Graph,
    runs: Sequence[Feeds],
    sources: Mapping[str, np.ndarray],
    progress: Progress,
    formats: Collection[str] = ("int8",),
    metric: Metric | None = None,
) -> tuple[Known, Measure]:
    """What there is to know of a rewritten graph, which stays as it is, from running it on inputs; and what measures choices.

    runs     inputs, of which a part is held back; sources, the model's weights by name
    formats  those in which everything is run, to see how far off estimates are; what is known is of all
    metric   measures choices in place of the relative error
    """
    program, ticks, marked = lower(graph), Ticks(progress), marks(graph)
    seen = runs[: len(runs) - held(len(runs))]
    first = seen[:WATCHED]
    ticks.expect(len(program.ops) * (len(seen) + WATCHED + len(tested(runs)) * (1 + len(formats))))
    begun = observe(program, first, sources, _channels(layers(graph)[0]), ticks.tick)
    smooth = factors(graph, begun.values)
    graph = smoothed(graph, smooth)
    found, floats = layers(graph)
    attended, refused = attentions(graph, {layer.x.name for layer in found})
    added = [*_added(graph), *_gated(graph)]
    wanted = _moved_with(graph) | {name: 1 for name in added} | _channels(found) | _channels(attended)
    observed = observe(lower(graph), seen, sources, wanted, ticks.tick, begun.gains)
    by_name = _by_name(found, observed, floats)
    alone = [_activation(graph, name, own, observed, ticks) for name, own in by_name.items()]
    alone += [a for one in attended if (a := _attention(one, observed, refused)) is not None]
    tied, left, joined = [], {a.name: a for a in alone}, list[Activation]()
    for members in ties(graph, observed.values, HEAVY):
        operands = [left.pop(t.name) for t in members if t.name in left]
        if operands:
            tied.append(_tied(members, operands, [layer for a in operands for layer in by_name[a.name]], observed))
        elif any(n.op == "Concat" for t in members for n in t.inputs) and all(_is_usable(observed, t.name) for t in members):
            joined.append(_joined(members, observed))
    long = {layer.name: why for layer in found if (why := layer.not_in_integers) is not None}
    long |= {one.name: IN_FLOATS for one in attended}
    no_float8 = {layer.name: why for layer in found if (why := layer.not_in_float8) is not None}
    smooth = {name: f for name, f in smooth.items() if name in by_name}
    others = (*left.values(), *tied) if tied else ()
    sums = tuple(_sum(observed, name) for name in added if _is_usable(observed, name))
    known = Known(tuple(alone), others, (*sums, *joined), smooth, floats | refused, long, no_float8, (), marked)
    measure = Measure(graph, runs, sources, metric, ticks)
    tried = list[Tried]()
    for name in formats:
        some = known.within([graph], (), (name,)).alone
        whole = {a.name: max(a.ways) for a in some}
        if any(whole.values()):
            tried.append(Tried(*predicted_by_format(some, whole), measure.of(*stored(some, whole)).expected))
    return replace(known, tried=measurements(tried)), measure


def held(count: int) -> int:
    """How many of so many sets of inputs are held back from calibration: the last ones."""
    return max(min(count // 4, TESTED), 1) if count > 1 else 0


def tested(runs: Sequence[Feeds], most: int = TESTED) -> Sequence[Feeds]:
    """The runs that a choice is measured on."""
    return runs[-most:]


@dataclass(frozen=True)
class Off:
    """What outputs are off by.

    largest   the relative error of any output and set of inputs
    expected  the one that new inputs are expected to stay within
    own       what the user's own metric says of it, if there is one
    """

    largest: float
    expected: float
    own: float | None = None

    @property
    def counts(self) -> float:
        """What is held to the bound."""
        return self.expected if self.own is None else self.own


class Measure:
    """Runs a graph, whose channels are smoothed, with some in bytes beside float32.

    held   how many sets of inputs were held back from calibration, of those that it is run on
    ticks  counts ops that are run, and weights that are rounded
    """

    def __init__(
        self,
        graph: gs.Graph,
        runs: Sequence[Feeds],
        sources: Mapping[str, np.ndarray],
        metric: Metric | None,
        ticks: Ticks,
    ) -> None:
        self._graph, self._test, self._sources, self.metric, self.ticks = graph, tested(runs), sources, metric, ticks
        self._more = tested(runs, OPEN)[: -len(self._test)]
        self._weights, self._ops = Rounded(ticks), len(lower(graph).ops)
        self._exact = self._outputs(graph, self._test)
        self._known: dict[Hashable, tuple[Off, int]] = {}
        self.held = held(len(runs))

    def expect(self, times: int) -> None:
        """So many choices may be run."""
        self.ticks.expect(times * self._ops * len(self._test))

    def of(self, tensors: Mapping[str, Tensor], names: Collection[str], bound: float = math.inf) -> Off:
        """What outputs are off by with these tensors in bytes and these layers multiplying them, by more runs where some leave it
        open whether new inputs are within the bound."""
        what = _stored_so(tensors, names)
        if what not in self._known:
            graph = made(self._graph, tensors, names, self._weights)
            got = self._outputs(graph, self._test)
            errors = _errors(got, self._exact)
            own = None if self.metric is None else self.metric(got, self._exact, self._test)
            if self._more and own is None and max(errors) <= bound < expected(errors):
                errors += _errors(self._outputs(graph, self._more), self._exact_of_more)
            self._known[what] = Off(float(np.max(errors)), expected(errors), own), len(errors)
        return self._known[what][0]

    def runs(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> int:
        """How many sets of inputs a choice was run on, or one would be."""
        return self._known.get(_stored_so(tensors, names), (None, len(self._test)))[1]

    @cached_property
    def _exact_of_more(self) -> list[dict]:
        return self._outputs(self._graph, self._more)

    def _outputs(self, graph: gs.Graph, runs: Sequence[Feeds]) -> list[dict]:
        return outputs(lower(graph), runs, self._sources, self._weights.kept, self.ticks.tick)


def _stored_so(tensors: Mapping[str, Tensor], names: Collection[str]) -> Hashable:
    """What tells choices apart."""
    return frozenset(names), frozenset((name, t.shared, t.grid) for name, t in tensors.items())


def _errors(got: Sequence[Mapping], exact: Sequence[Mapping]) -> list[float]:
    """What outputs are off by in each run."""
    return [max((relative_error(o[n], e[n]) for n in e), default=0.0) for o, e in zip(got, exact, strict=True)]


def made(graph: gs.Graph, tensors: Mapping[str, Tensor], names: Collection[str], weights: Rounded | None = None) -> gs.Graph:
    """A copy of the graph with these tensors in bytes, and these layers multiplying them.

    weights  those that were rounded before; more are added
    """
    graph = quantized(graph, tensors, names, weights)
    tidy(graph)
    return graph


def stored(activations: Sequence[Activation], choice: Mapping[str, int]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors in bytes, and the names of the layers that multiply them. What is not in the choice is in floats."""
    chosen = [a for a in activations if choice.get(a.name)]
    tensors = {name: how for a in chosen for name, how in a.how[choice[a.name]].items()}
    return tensors, tuple(name for a in chosen for name in a.layers)


def predicted(activations: Sequence[Activation], choice: Mapping[str, int]) -> float:
    """How far the outputs are off by estimates."""
    return math.hypot(*predicted_by_format(activations, choice))


def predicted_by_format(activations: Sequence[Activation], choice: Mapping[str, int]) -> tuple[float, float]:
    """The same, by what is in integers and by what is in floats of 8 bits."""
    ways = {a.name: choice.get(a.name, FLOATS) for a in activations}
    int8, fp8 = (sum(a.squares[ways[a.name]] for a in activations if ways[a.name] in FORMATS[f]) for f in ("int8", "fp8"))
    return math.sqrt(int8), math.sqrt(fp8)


def estimated(tried: Sequence[Tried], int8: float, fp8: float) -> float:
    """What outputs are off by that estimates have off by so much: each format's are taken to be as far off as the farthest of it
    that was tried, and of both together as the farthest of these."""

    def farthest(some: Sequence[Tried]) -> float | None:
        return max((t.off / t.said for t in some if t.said > 0), default=None)

    every = farthest(tried) or 1.0
    of_int8, of_fp8 = farthest([t for t in tried if not t.fp8]) or every, farthest([t for t in tried if not t.int8]) or every

    def together(a: float, b: float) -> float:
        return math.hypot(of_int8 * a, of_fp8 * b)

    mixed = max((t.off / together(t.int8, t.fp8) for t in tried if t.int8 and t.fp8), default=1.0) if int8 and fp8 else 1.0
    return together(int8, fp8) * max(mixed, 1.0)


def whole_runs(tried: Sequence[Tried]) -> list[Tried]:
    """Those of everything in one format, the first that was run of each. By these alone the next choice is what the first was,
    made before there were others."""
    some = [t for t in tried if t.said > 0 and t.off > 0]
    return [*[t for t in some if not t.fp8][:1], *[t for t in some if not t.int8][:1]]


def _channels(found: Sequence[Layer | Attended]) -> dict[str, int]:
    """Which axis of each operand its channels go along: as the first product has it that reads it."""
    return {name: axis for layer in reversed(found) for name, axis in layer.reads.items()}


def _moved_with(graph: gs.Graph) -> dict[str, int]:
    """What may be tied, by name, and an axis of it."""
    tensors = [t for node in graph.nodes for t in ((*moves(node), *node.outputs) if moves(node) else ())]  # type: ignore[misc]
    return {t.name: min(1, rank(t) - 1) for t in tensors if rank(t)}


def _by_name(found: Sequence[Layer], observed: Observed, floats: dict[str, str]) -> dict[str, list[Layer]]:
    """The layers by what they read; those whose operand is not known go to `floats`."""
    by_name: dict[str, list[Layer]] = {}
    for layer in found:
        values = observed.values.get(layer.x.name)
        if values is not None and values.channels != layer.channels:
            floats[layer.name] = "it reads along another axis what another product has in bytes"
        elif _is_usable(observed, layer.x.name):
            by_name.setdefault(layer.x.name, []).append(layer)
        elif values is not None and values.low == values.high == 0:
            floats[layer.name] = "its input is zero in all that it was calibrated with"
        else:
            floats[layer.name] = NOT_FINITE
    return by_name


def _is_usable(observed: Observed, name: str) -> bool:
    values = observed.values.get(name)
    return values is not None and 0 < max(values.high, -values.low) < LARGEST


def _added(graph: gs.Graph) -> list[str]:
    """Results of products that only sums with results of others read: one of two is stored, to be read by the other's product."""
    outside, found = {id(t) for t in graph.outputs}, dict[str, gs.Tensor]()
    for node in graph.nodes:
        if node.op == "Add" and all(len(t.inputs) == 1 and t.inputs[0].op in OPS for t in node.inputs):
            ends = [t for t in node.inputs if id(t) not in outside and np.dtype(t.dtype) == np.float32 and rank(t) > 1]
            found |= {t.name: t for t in ends if all(reader.op == "Add" for reader in t.outputs)}
    return [*found]


def _gated(graph: gs.Graph) -> list[str]:
    """Images that only their own means read, and products with a number for each channel, as squeeze and excitation has it."""
    outside, found = {id(t) for t in graph.outputs}, list[str]()
    for node in graph.nodes:
        for t in node.outputs:
            shape = t.shape or ()
            if id(t) in outside or len(shape) != 4 or np.dtype(t.dtype) != np.float32:
                continue
            means = [reader for reader in t.outputs if reader.op in MEANS]
            gates = [reader for reader in t.outputs if reader.op == "Mul" and any(is_gate(x) for x in reader.inputs)]
            if means and gates and len(means) + len(gates) == len(t.outputs):
                found.append(t.name)
    return found


def _sum(observed: Observed, name: str) -> Activation:
    values = observed.values[name]
    how, squares = list[Mapping[str, Tensor]]([{}]), [0.0]
    for float8 in (False, True):
        one = Tensor(grid_of(values.likely(float8), float8), values.means, shared=True, tied=True)
        how += [{}, {name: one}]
        squares += [0.0, (_gain(observed, name) * _rounding(values, one.grid)) ** 2]
    return Activation(name, (), tuple(how), (FLOATS, ALL, FLOAT8_ALL), tuple(squares))


def _joined(members: list[gs.Tensor], observed: Observed) -> Activation:
    """What only ops of single elements read, as one with what it is joined of."""
    seen = [observed.values[t.name] for t in members]
    sample, how, squares = np.concatenate([v.likely() for v in seen]), list[Mapping[str, Tensor]]([{}]), [0.0]
    for float8 in (False, True):
        grid = grid_of(sample, float8)
        how += [{}, {t.name: Tensor(grid, v.means, shared=True, tied=True) for t, v in zip(members, seen, strict=True)}]
        moved = ((_gain(observed, t.name) * _rounding(observed.values[t.name], grid)) ** 2 for t in begins(members))
        squares += [0.0, sum(moved)]
    return Activation(members[0].name, (), tuple(how), (FLOATS, ALL, FLOAT8_ALL), tuple(squares))


def _activation(graph: gs.Graph, name: str, own: list[Layer], observed: Observed, ticks: Ticks) -> Activation:
    values, gains = observed.values[name], [_gain(observed, layer.node.outputs[0].name) for layer in own]
    how, squares = list[Mapping[str, Tensor]]([{}]), [0.0]
    for float8 in (False, True):
        one = Tensor(grid_of(values.likely(float8), float8, any(layer.depthwise for layer in own)), values.means, shared=True)
        how += [{name: replace(one, shared=False)}, {name: one}]
        rounded = [(g, layer.rows()) for g, layer in zip(gains, own, strict=True)]
        by_weights = sum((g * weight_error(rows, float8, ticks.rounded)) ** 2 for g, rows in rounded)
        rounding = _rounding(values, one.grid) ** 2
        as_operand = sum(g**2 for g in gains) * rounding
        whole = _gain(observed, name) ** 2 * rounding
        squares += [by_weights + as_operand, by_weights + max(whole, as_operand)]
    ways = tuple(WAYS) if _may_share(graph, own) else (FLOATS, OPERANDS, FLOAT8_OPERANDS)
    return Activation(name, _names(own), tuple(how), ways, tuple(squares))


def _attention(one: Attended, observed: Observed, refused: dict[str, str]) -> Activation | None:
    """An attention's operands as one; None where they have no scales, which goes to `refused`."""
    if not all(_is_usable(observed, name) for name in one.reads):
        refused[one.name] = NOT_FINITE
        return None
    how, moved = dict[str, Tensor](), (_gain(observed, one.node.outputs[0].name) * WEIGHTS_OFF) ** 2
    for name in one.reads:
        values = observed.values[name]
        how[name] = Tensor(grid_of(values.likely(float8=True), float8=True), values.means, shared=False)
        moved += (_gain(observed, name) * _rounding(values, how[name].grid)) ** 2
    ways = [how if way == FLOAT8_OPERANDS else {} for way in WAYS]
    squares = tuple(moved if way == FLOAT8_OPERANDS else 0.0 for way in WAYS)
    return Activation(next(iter(one.reads)), (one.name,), tuple(ways), (FLOATS, FLOAT8_OPERANDS), squares)


def _tied(members: list[gs.Tensor], operands: list[Activation], own: list[Layer], observed: Observed) -> Activation:
    """Several as one: with one grid where all that reads them reads bytes, and each with its own where only products do."""
    seen = [observed.values[t.name] for t in members]
    how, squares = list[Mapping[str, Tensor]]([{}]), [0.0]
    for way in (OPERANDS, FLOAT8_OPERANDS):
        sample = np.concatenate([v.likely(way == FLOAT8_OPERANDS) for v in seen])
        grid = grid_of(sample, way == FLOAT8_OPERANDS, any(layer.depthwise for layer in own))
        moved = sum((_gain(observed, t.name) * _rounding(observed.values[t.name], grid)) ** 2 for t in begins(members))
        alone = sum(a.squares[way] for a in operands)
        apart = {name: t for a in operands for name, t in a.how[way].items()}
        by_operands = 0.0
        for layer in own:
            rounding = _rounding(observed.values[layer.x.name], apart[layer.x.name].grid)
            by_operands += (_gain(observed, layer.node.outputs[0].name) * rounding) ** 2
        how += [apart, {t.name: Tensor(grid, v.means, shared=True, tied=True) for t, v in zip(members, seen, strict=True)}]
        squares += [alone, max(alone - by_operands, 0.0) + moved]
    return Activation(operands[0].name, _names(own), tuple(how), tuple(WAYS), tuple(squares))


def _rounding(values: Values, grid: Grid) -> float:
    """What rounding moves an activation by, relative to it, in the run where that is most: a step that large values need may be
    most of what small ones are."""
    return max((relative_error(rounded(x, grid), x) for x in values.sample if x.any()), default=grid.error)


def measurements(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """Estimates and what was measured, where outputs were finite."""
    return tuple(t for t in tried if np.isfinite(t.off))


def _gain(observed: Observed, name: str) -> float:
    """What the outputs move by for what a tensor moves by; that of one that nothing is known of is 1."""
    gain = observed.gains.get(name, 1.0)
    return gain if gain < LARGEST else LARGEST


def _names(own: Sequence[Layer]) -> tuple[str, ...]:
    return tuple(layer.name for layer in own)


def _may_share(graph: gs.Graph, own: Sequence[Layer]) -> bool:
    """Whether all that reads the layers' activation may read bytes as well."""
    x, products = own[0].x, {id(layer.node) for layer in own}
    others = [node for node in x.outputs if id(node) not in products]
    return not any(t is x for t in (*graph.outputs, *graph.inputs)) and not any(n.op in HEAVY for n in others)
