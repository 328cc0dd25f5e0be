"""Which activations are stored in bytes, and in which: those that save most time for the error that they make, within a bound.

What an activation saves is what the steps that read it are estimated to take without bytes and with them, at all shapes and on
all generations that the model is built for. One program serves all generations, and each of them counts as much as the others:
its times are shares of what the model takes there in floats. So for any price of error each activation decides for itself,
between floats and each of the formats, and the price is as low as the bound allows.
What comes of it is run beside float32: estimates say which activation is worth more than which, and not how many of them are
within the bound. Where there is nothing to run it on, they say that, too, and are no better than they were in earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.quantize.calibration import Chosen, Cost
from tccompile.quantize.changes import Change, Steps, changes, gains, worth_most
from tccompile.quantize.insert import Rounded, dequantize_of, quantize_of
from tccompile.quantize.known import (
    ALL,
    FLOAT8_ALL,
    FLOAT8_OPERANDS,
    FLOATS,
    FORMATS,
    OPERANDS,
    WAYS,
    Activation,
    Known,
    Measure,
    Off,
    Tried,
    estimated,
    made,
    measurements,
    predicted,
    predicted_by_format,
    stored,
    whole_runs,
)
from tccompile.quantize.smooth import smoothed
from tccompile.rewrites.quantized import moves

Times = Callable[[gs.Graph], Mapping[str, Steps]]
"""Estimates the steps of a graph on each generation."""

Error = Callable[[Mapping[str, int]], float]
"""What outputs are off by with activations stored in these ways."""

WITHOUT_ALL = {ALL: OPERANDS, FLOAT8_ALL: FLOAT8_OPERANDS}
"""How an activation is stored whose other readers do not read bytes, where those of others do."""

TRIES = 10
"""How often a choice is run beside float32, at most."""

GUESSES = 2
"""How often the number of activations in bytes is guessed by estimates and what was measured; after that it is halved between one
that is within the bound and one that is not."""

FINE = 64
"""How close these get, as a share of all activations that are worth it."""

ROUNDS = 3
"""How often each activation is tried otherwise."""

DEARER, PRICES = 2, 2
"""What an error costs as many times as much, and how many prices are tried, where changes at the least price of it are beyond the
bound: a choice that lies at the bound may still change what saves little for what saves more."""

SPARE = 0.95
"""The share of the bound that a guess aims at."""

LESS = 0.98
"""The share of a model's time that bytes must leave at most: estimates are no more exact."""

SURE = 0.85
"""The share of what an activation takes in integers that it must take at most in floats of 8 bits, whose error is three times as
large: estimates of both formats are off beside each other by 5 %, their standard deviation for 137 convolutions on an H200, and
this is three of these. What 0.86 was estimated for brought nothing, and a decoder with one such layer took 1.17 times as long."""

WORTH = 0.06
"""The share of a model's time that must be saved for the whole error that is allowed, and for a part of it, that part: as much as
estimates of two formats are off beside each other, one of which makes a far larger error."""


@dataclass(frozen=True)
class Timed:
    """An activation, and what the steps that read it take for each way to store it, in microseconds."""

    activation: Activation
    times: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.activation.name

    @property
    def sure(self) -> Timed:
        """The same, in floats of 8 bits only where they are surely faster than what is more exact, if integers may be."""
        others, squares = [way for way in self.activation.ways if way not in FORMATS["fp8"]], self.activation.squares
        if others == [FLOATS]:
            return self

        def surely(way: int) -> bool:
            return all(self.times[way] < SURE * self.times[o] for o in others if squares[o] < squares[way])

        ways = tuple(way for way in self.activation.ways if way in others or surely(way))
        return replace(self, activation=replace(self.activation, ways=ways))

    def cost(self, way: int, price: float) -> float:
        """What storing it in this way takes at a price of error."""
        return self.times[way] + price * self.activation.squares[way]

    @property
    def prices(self) -> list[float]:
        """The prices of error below which it is stored in another way, one that is faster and less exact: the highest first."""
        times, squares, at, found = self.times, self.activation.squares, FLOATS, list[float]()
        while True:
            faster = [way for way in self.activation.ways if times[way] < times[at]]
            if not faster:
                return found
            price = {way: (times[at] - times[way]) / max(squares[way] - squares[at], 1e-30) for way in faster}
            at = max(faster, key=lambda way: (price[way], -times[way]))
            found.append(price[at])

    def why_not(self, bound: float, least: float) -> str:
        """Why it is in floats, with errors up to the bound and at a price of them of at least so much."""
        if not self.prices:
            return SLOWER
        error = min(self.activation.squares[way] for way in self.activation.ways if way)
        return BEYOND if any(price > least for price in self.prices) or error > bound**2 else DEAR


SLOWER = "bytes are estimated to be no faster"
BEYOND = "the error would be above the bound"
DEAR = "bytes are estimated to save too little for the error that they make"
"""Why a product that might be in bytes is not."""


class Entries:
    """A model's graphs at all shapes that it is built for, smoothed, and what their steps are estimated to take together.

    floats  what all of them take in floats, on each generation; elsewhere times are such that these are all alike
    makers  the names of the nodes that make tensors, by the tensors' names; beside: of those that make or read them
    """

    def __init__(self, graphs: Sequence[gs.Graph], times: Times) -> None:
        self._graphs, self._times, self._weights = graphs, times, Rounded()
        self.beside: dict[str, set[str]] = {}
        for node in (node for graph in graphs for node in graph.nodes):
            for t in (*node.inputs, *node.outputs):
                self.beside.setdefault(t.name, set()).add(node.name)
        self.makers = dict[str, tuple[str, ...]]()
        for node in chain.from_iterable(graph.nodes for graph in graphs):
            before = (name for x in moves(node) or () for name in self.makers.get(x.name, ()))
            self.makers |= dict.fromkeys((t.name for t in node.outputs), tuple(dict.fromkeys((node.name, *before))))
        self.floats = self.times((), {})
        mean = sum(self.floats.values()) / len(self.floats)
        self._scales = {arch: mean / total if total else 1.0 for arch, total in self.floats.items()}

    def steps(self, activations: Sequence[Activation] = (), choice: Mapping[str, int] | None = None) -> Steps:
        """All steps, at all shapes and of all generations."""
        found = self._steps(activations, choice or {})
        return [(nodes, time * self._scales[arch] / len(found)) for arch, own in found.items() for nodes, time in own]

    def time(self, activations: Sequence[Activation], choice: Mapping[str, int]) -> float:
        return sum(time for _, time in self.steps(activations, choice))

    def times(self, activations: Sequence[Activation], choice: Mapping[str, int]) -> dict[str, float]:
        """What all of them take on each generation, in microseconds."""
        return {arch: sum(time for _, time in own) for arch, own in self._steps(activations, choice).items()}

    def _steps(self, activations: Sequence[Activation], choice: Mapping[str, int]) -> dict[str, Steps]:
        how = stored(activations, choice)
        by_graph = [self._times(made(graph, *how, self._weights)) for graph in self._graphs]
        return {arch: [*chain.from_iterable(own[arch] for own in by_graph)] for arch in by_graph[0]}


def choose(
    known: Known, graphs: Sequence[gs.Graph], bound: float, times: Times, measure: Measure | None
) -> tuple[Chosen, tuple[Tried, ...]]:
    """What is worth it in bytes, such that no output is off by more than the bound; and what was tried for it (`Known.tried`).

    graphs   the model's at all shapes that it is built for, rewritten; known, of products that are in all of them
    measure  runs a choice; None if there is nothing to run it on
    """
    entries = Entries([smoothed(graph, known.smooth) for graph in graphs], times)
    floats = entries.steps()
    in_floats = sum(time for _, time in floats)
    relative = measure is None or measure.metric is None  # a bound in other terms says nothing of the errors' squares
    allowed = bound / min((t.off / t.said for t in whole_runs(known.tried)), default=1.0)  # by estimates
    least = WORTH * in_floats / allowed**2 if relative else 0.0
    every = _faster(known, entries, floats, least)
    found = [t.sure for t in every]
    activations, tried = [*(t.activation for t in found), *known.added], dict[Tried, None]()

    def off(choice: Mapping[str, int]) -> Off:
        if measure is None or not any(choice.values()):
            said = estimated(known.tried, *predicted_by_format(activations, choice))
            return Off(said, said)
        measured = measure.of(*stored(activations, choice), bound)
        tried[Tried(*predicted_by_format(activations, choice), measured.expected)] = None
        return measured

    def error(choice: Mapping[str, int]) -> float:
        return off(choice).counts

    if measure is not None:
        measure.expect(TRIES)
    whole, _ = within(found, bound, error, least)
    whole = exchanged(found, whole, least, bound, entries, error)
    choice, took = _fastest(found, whole, in_floats, entries)
    if choice != whole and not error(choice) <= bound:  # fewer bytes may be worse, where errors of some made up for others'
        choice, took = dict.fromkeys(choice, FLOATS), in_floats
    if any(choice.values()):
        choice = _with_sums(known.added, activations, (choice, took), bound, entries, error)
    reasons = dict(known.floats)
    for t in found:
        for layer in t.activation.layers if not choice[t.name] else ():
            reasons[layer] = SLOWER if whole[t.name] else t.why_not(allowed, least)
    tensors, names = stored(activations, choice)
    runs, held = (0, 0) if measure is None else (measure.runs(tensors, names), measure.held)
    after = entries.times(activations, choice)
    chosen = Chosen(
        tensors,
        {name: f for name, f in known.smooth.items() if name in tensors},
        names,
        tuple(name for a in activations if choice.get(a.name) in FORMATS["fp8"] for name in a.layers),
        reasons,
        off(choice),
        runs,
        held,
        {arch: (before, after[arch]) for arch, before in entries.floats.items()},
        costs(known.tried, every),
    )
    return chosen, measurements([*tried])


def costs(tried: Sequence[Tried], found: Sequence[Timed]) -> tuple[Cost, ...]:
    """What each format would cost and save everywhere, and for each activation, the largest error first."""
    own, whole = list[Cost](), list[Cost]()
    for name, ways in FORMATS.items():
        usable = [(t, [way for way in t.activation.ways if way in ways]) for t in found]
        choice = {t.name: min(own_ways, key=lambda way, t=t: t.times[way]) for t, own_ways in usable if own_ways}  # type: ignore[misc]
        some = [t for t in found if t.name in choice]

        def cost(of: Sequence[Timed], name: str = name, choice: Mapping[str, int] = choice) -> Cost:
            activations = [t.activation for t in of]
            error = estimated(tried, *predicted_by_format(activations, choice))
            saves = sum(t.times[FLOATS] - t.times[choice[t.name]] for t in of)
            return Cost(tuple(layer for a in activations for layer in a.layers), name, error, saves)

        own += [cost([t]) for t in some]
        whole += [cost(some)] if some else []
    return *whole, *sorted(own, key=lambda c: (-c.error, c.layers, c.format))


def _faster(known: Known, entries: Entries, floats: Steps, least: float) -> list[Timed]:
    """The activations each for itself, or tied where what lies between them only moves numbers, if that is estimated to be
    faster at the least price of error."""
    alone = timed(joined(known.alone, floats), entries, floats, known.added)
    if not known.tied:
        return alone
    tied = timed(joined(known.tied, floats), entries, floats, known.added)
    sums = {a.name: way for a in known.added for way in a.ways[1:2]}

    def took(found: list[Timed]) -> float:
        activations, choice = [*(t.activation for t in found), *known.added], _at([t.sure for t in found], least)
        return min(entries.time(activations, choice | more) for more in ({}, sums)[: 1 + bool(sums)])

    return alone if took(alone) <= took(tied) else tied


def joined(activations: Sequence[Activation], floats: Steps) -> list[Activation]:
    """The activations, those as one whose products are one step in floats: two that are two steps in bytes lose that step."""
    owner = {layer: a.name for a in activations for layer in a.layers}
    group = {a.name: [a] for a in activations}
    for nodes, _ in floats:
        first, *rest = dict.fromkeys(owner[n] for n in nodes if n in owner) or (None,)
        for name in rest:
            one, other = group[first], group[name]  # type: ignore[index]
            if one is not other:
                one += other
                group |= {a.name: one for a in other}
    return [_as_one(members) for name, members in group.items() if members[0].name == name]


def _as_one(members: Sequence[Activation]) -> Activation:
    if len(members) == 1:
        return members[0]
    own = {way: [way if way in a.ways else WITHOUT_ALL.get(way, way) for a in members] for way in WAYS}
    ways = tuple(w for w in WAYS if all(o in a.ways for o, a in zip(own[w], members, strict=True)) and w in own[w])
    hows = [{n: t for a, w in zip(members, own[way], strict=True) for n, t in a.how[w].items()} for way in WAYS]
    squares = [sum(a.squares[w] for a, w in zip(members, own[way], strict=True)) for way in WAYS]
    layers = tuple(name for a in members for name in a.layers)
    return Activation(members[0].name, layers, tuple(hows), ways, tuple(squares))


def timed(activations: Sequence[Activation], entries: Entries, floats: Steps, added: Sequence[Activation] = ()) -> list[Timed]:
    """The activations with estimates of what their steps take for each way to store them. Results that are only added to others
    are then stored in the same way, where they may be: what makes such a one, and the sum, may be one launch."""
    by_way = [share_out(floats, activations, dict.fromkeys((a.name for a in activations), FLOATS), entries.makers)]
    for way in WAYS[1:]:
        likely = {a.name: next((w for w in (way, WITHOUT_ALL.get(way)) if w in a.ways), FLOATS) for a in activations}
        some = any(way in a.ways for a in activations)
        sums = {a.name: way for a in added if way in a.ways}
        steps = entries.steps([*activations, *added], likely | sums) if some else ()
        by_way.append(share_out(steps, activations, likely, entries.makers) if some else by_way[0])
    return [Timed(a, tuple(times[a.name] for times in by_way)) for a in activations]


def share_out(
    steps: Steps, activations: Sequence[Activation], choice: Mapping[str, int], makers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Each step's time as that of the activations which it multiplies, or else makes, quantizes or reads: by their names.

    makers  the nodes that make each tensor, by its name: a norm, say, takes its time whether it stores bytes or floats
    """
    times = dict.fromkeys((a.name for a in activations), 0.0)
    multiplies = {layer: a.name for a in activations for layer in a.layers}
    multiplies |= {f"{layer}/{op}": name for layer, name in multiplies.items() for op in ("ConvInteger", "MatMulInteger")}
    stores = {node: a.name for a in activations for t in a.how[choice[a.name]] for node in (quantize_of(t), dequantize_of(t))}
    stores |= {node: a.name for a in activations for how in a.how for t in how for node in makers.get(t, ())}
    for nodes, time in steps:
        owners = {multiplies[n] for n in nodes if n in multiplies} or {stores[n] for n in nodes if n in stores}
        for name in owners:
            times[name] += time / len(owners)
    return times


def _fastest(
    found: Sequence[Timed], choice: Mapping[str, int], in_floats: float, entries: Entries
) -> tuple[dict[str, int], float]:
    """All of what was chosen, or the half, the quarter or the eighth of it that saves most, whichever makes the model fastest:
    what one activation saves depends on others. And its time; nothing is chosen where that would save too little."""
    saved = {t.name: t.times[FLOATS] - t.times[choice[t.name]] for t in found if choice[t.name]}
    order = sorted(saved, key=lambda name: -saved[name])
    best, least, limit = dict.fromkeys(choice, FLOATS), in_floats, LESS * in_floats
    for count in dict.fromkeys(len(order) >> k for k in range(4)):
        some = {name: way if name in order[:count] else FLOATS for name, way in choice.items()}
        took = entries.time([t.activation for t in found], some) if count else in_floats
        if took < min(least, limit):
            best, least = some, took
    return best, least


def exchanged(
    found: Sequence[Timed], choice: dict[str, int], least: float, bound: float, entries: Entries, error: Error
) -> dict[str, int]:
    """A choice with single activations stored otherwise, as often as that makes the model faster and the error is within the
    bound."""
    activations = [t.activation for t in found]
    fastest = {t.name: min(t.activation.ways, key=lambda way: t.times[way] if way else math.inf) for t in found}
    for _ in range(ROUNDS if any(choice.values()) else 0):
        before = entries.steps(activations, choice)
        every = changes(activations, choice, fastest, before, entries.beside)
        gained = gains(every, choice, before, partial(entries.steps, activations))
        took = sum(time for _, time in before)
        for price in dict.fromkeys(least * DEARER**k for k in range(PRICES)):
            tried = choice | _worth(found, choice, gained, price)
            if tried == choice or entries.time(activations, tried) >= took:
                return choice
            if error(tried) <= bound:
                break
        else:
            return choice
        choice = tried
    return choice


def _worth(
    found: Sequence[Timed], choice: Mapping[str, int], gained: Sequence[tuple[Change, float]], price: float
) -> dict[str, int]:
    """The changes of a choice that are worth most at a price of error, of those that may be made at once."""
    squares = {t.name: t.activation.squares for t in found}
    costs = (price * (squares[c.name][c.way] - squares[c.name][choice[c.name]]) for c, _ in gained)
    return worth_most([(c, less - cost) for (c, less), cost in zip(gained, costs, strict=True)])


def _with_sums(
    added: Sequence[Activation],
    activations: Sequence[Activation],
    best: tuple[dict[str, int], float],
    bound: float,
    entries: Entries,
    error: Error,
) -> dict[str, int]:
    """A choice, whose time is given, with those results in bytes too that are only added to others, if that is faster and within
    the bound: all of them, or the half or the quarter of them by which outputs move least, and so on."""
    choice, took = best
    more = dict[str, int]()
    for a in sorted(added, key=lambda a: min((a.squares[way] for way in a.ways if way), default=0.0)):
        for way in a.ways[1:]:
            if (time := entries.time(activations, {**choice, **more, a.name: way})) < took:
                more[a.name], took = way, time
    while more:
        some = choice | more
        if error(some) <= bound:
            return some
        more = {name: more[name] for name in [*more][: len(more) // 2]}
    return choice


def within(found: Sequence[Timed], bound: float, error: Error, least: float = 0.0) -> tuple[dict[str, int], float]:
    """How each activation is stored, and the error of the outputs, which is within the bound; at a price of it, at least.

    Estimates say in which order activations are worth it, and guess how many are within the bound; runs find that out.
    """
    activations = [t.activation for t in found]
    prices = sorted((price for t in found for price in t.prices if price > least), reverse=True)
    few, many = 0, len(prices) + 1  # so many changes are within the bound, and so many are not
    best = dict.fromkeys((t.name for t in found), FLOATS), 0.0
    tried = len(prices)
    for attempt in range(TRIES):
        if many - few <= max(len(prices) // FINE, 1) and attempt:
            break
        choice = _at(found, prices[tried] if tried < len(prices) else least)
        if not any(choice.values()):
            break
        measured = error(choice)
        if measured <= bound:
            few, best = tried, (choice, measured)
        else:
            many = tried
        tried = (few + many) // 2
        if attempt < GUESSES and np.isfinite(measured) and few == 0:
            price = _price(found, SPARE * bound * predicted(activations, choice) / measured)
            tried = min(max(sum(p > price for p in prices), 1), many - 1)
    return best


def select(found: Sequence[Timed], bound: float) -> dict[str, int]:
    """How each is stored for the least time, such that the errors add up to no more than the bound."""
    return _at(found, _price(found, bound))


def _price(found: Sequence[Timed], bound: float) -> float:
    """The least price of error at which estimates have the errors add up to no more than the bound."""
    activations = [t.activation for t in found]

    def fits(price: float) -> bool:
        return predicted(activations, _at(found, price)) <= bound

    if fits(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not fits(high) and high < 1e30:
        low, high = high, 4 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _at(found: Sequence[Timed], price: float) -> dict[str, int]:
    """How each is stored at a price of error."""
    return {t.name: min(t.activation.ways, key=lambda way: (t.cost(way, price), t.activation.squares[way])) for t in found}
