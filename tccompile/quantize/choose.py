"""Which activations are stored in bytes: those that save most time for the error that they make, within a bound.

What an activation saves is what the steps that read it are estimated to take without bytes and with them, at all shapes that the
model is built for. So for any price of error each activation decides for itself, and the price is as low as the bound allows.
What comes of it is run beside float32: estimates say which activation is worth more than which, and not how many of them are
within the bound. Where there is nothing to run it on, they say that, too, and are no better than they were in earlier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.quantize.calibration import Chosen
from tccompile.quantize.insert import Rounded, dequantize_of, quantize_of
from tccompile.quantize.known import ALL, FLOATS, OPERANDS, Activation, Known, Measure, made, measurements, predicted, stored
from tccompile.quantize.smooth import smoothed

Steps = Sequence[tuple[Collection[str], float]]
"""The names of each step's nodes, and its time in microseconds."""

Times = Callable[[gs.Graph], Steps]
"""Estimates the steps of a graph."""

Error = Callable[[Mapping[str, int]], float]
"""What outputs are off by with activations stored in these ways."""

TRIES = 10
"""How often a choice is run beside float32, at most."""

GUESSES = 2
"""How often the number of activations in bytes is guessed by estimates and what was measured; after that it is halved between one
that is within the bound and one that is not."""

FINE = 16
"""How close these get, as a share of all activations that are worth it."""

SPARE = 0.95
"""The share of the bound that a guess aims at."""

LESS = 0.98
"""The share of a model's time that bytes must leave at most: estimates are no more exact."""


@dataclass(frozen=True)
class Timed:
    """An activation, and what the steps that read it take for each way to store it, in microseconds."""

    activation: Activation
    times: tuple[float, float, float]

    @property
    def name(self) -> str:
        return self.activation.name

    def cost(self, way: int, price: float) -> float:
        """What storing it in this way takes at a price of error."""
        return self.times[way] + price * self.activation.squares[way]

    @property
    def worth(self) -> float:
        """The price of error up to which it is worth it to be stored in bytes."""
        ways, saved, squares = self.activation.ways, self.times[FLOATS], self.activation.squares
        return max(((saved - self.times[way]) / max(squares[way], 1e-30) for way in ways if way), default=0.0)


class Entries:
    """A model's graphs at all shapes that it is built for, smoothed, and what their steps are estimated to take together."""

    def __init__(self, graphs: Sequence[gs.Graph], times: Times) -> None:
        self._graphs, self._times, self._weights = graphs, times, Rounded()

    def steps(self, activations: Sequence[Activation] = (), choice: Mapping[str, int] | None = None) -> Steps:
        how = stored(activations, choice or {a.name: FLOATS for a in activations})
        return [*chain.from_iterable(self._times(made(graph, *how, self._weights)) for graph in self._graphs)]

    def time(self, activations: Sequence[Activation], choice: Mapping[str, int]) -> float:
        return sum(time for _, time in self.steps(activations, choice))


def choose(
    known: Known, graphs: Sequence[gs.Graph], bound: float, times: Times, measure: Measure | None
) -> tuple[Chosen, tuple[tuple[float, float], ...]]:
    """What is worth it in bytes, such that no output is off by more than the bound; and what was tried for it (`Known.tried`).

    graphs   the model's at all shapes that it is built for, rewritten; known, of products that are in all of them
    measure  runs a choice; None if there is nothing to run it on
    """
    entries = Entries([smoothed(graph, known.smooth) for graph in graphs], times)
    floats = entries.steps()
    found, in_floats = _faster(known, entries, floats), sum(time for _, time in floats)
    activations, tried = [*(t.activation for t in found), *known.added], list[tuple[float, float]]()

    def error(choice: Mapping[str, int]) -> float:
        if measure is None:
            return _estimated(known, activations, choice)
        measured = measure.error(*stored(activations, choice))
        tried.append((predicted(activations, choice), measured))
        return measured

    whole, off = within(found, bound, error)
    choice, took = _fastest(found, whole, in_floats, entries)
    if choice != whole:
        off = error(choice) if any(choice.values()) else 0.0
        if not off <= bound:  # fewer bytes may be worse, where errors of some made up for those of others
            choice, off, took = dict.fromkeys(choice, FLOATS), 0.0, in_floats
    if any(choice.values()):
        choice, off, took = _with_sums(known.added, activations, (choice, off, took), bound, entries, error)
    reasons = dict(known.floats)
    for t in found:
        for layer in t.activation.layers if not choice[t.name] else ():
            slow = whole[t.name] or t.worth <= 0
            reasons[layer] = "bytes are estimated to be no faster" if slow else "the error would be above the bound"
    tensors, names = stored(activations, choice)
    smooth = {name: f for name, f in known.smooth.items() if name in tensors}
    runs, held = (0, 0) if measure is None else (measure.runs, measure.held)
    return Chosen(tensors, smooth, names, reasons, off, runs, held, (in_floats, took)), measurements(tried)


def _estimated(known: Known, activations: Sequence[Activation], choice: Mapping[str, int]) -> float:
    """What outputs are off by, if estimates are as far off as the farthest of what was tried."""
    return predicted(activations, choice) * max((off / said for said, off in known.tried if said > 0), default=1.0)


def _faster(known: Known, entries: Entries, floats: Steps) -> list[Timed]:
    """The activations each for itself, or tied where what lies between them only moves numbers, if that is estimated to be
    faster."""
    alone = timed(joined(known.alone, floats), entries, floats)
    if not known.tied:
        return alone
    tied = timed(joined(known.tied, floats), entries, floats)
    took = [entries.time([t.activation for t in found], _at(found, 0.0)) for found in (alone, tied)]
    return alone if took[0] <= took[1] else tied


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
    ways = tuple(sorted({way for a in members for way in a.ways}))
    own = [[way if way in a.ways else OPERANDS for a in members] for way in (FLOATS, OPERANDS, ALL)]
    hows = [{n: t for a, way in zip(members, w, strict=True) for n, t in a.how[way].items()} for w in own]
    squares = [sum(a.squares[way] for a, way in zip(members, w, strict=True)) for w in own]
    layers = tuple(name for a in members for name in a.layers)
    return Activation(members[0].name, layers, (hows[0], hows[1], hows[2]), ways, (squares[0], squares[1], squares[2]))


def timed(activations: Sequence[Activation], entries: Entries, floats: Steps) -> list[Timed]:
    """The activations with estimates of what their steps take for each way to store them."""
    by_way = [share_out(floats, activations, FLOATS)]
    for way in (OPERANDS, ALL):
        choice = {a.name: way if way in a.ways else OPERANDS for a in activations}
        by_way.append(share_out(entries.steps(activations, choice), activations, way))
    return [Timed(a, (by_way[0][a.name], by_way[1][a.name], by_way[2][a.name])) for a in activations]


def share_out(steps: Steps, activations: Sequence[Activation], way: int) -> dict[str, float]:
    """Each step's time as that of the activations which it multiplies, or else quantizes or reads: by their names."""
    times = dict.fromkeys((a.name for a in activations), 0.0)
    multiplies = {layer: a.name for a in activations for layer in a.layers}
    multiplies |= {f"{layer}/{op}": name for layer, name in multiplies.items() for op in ("ConvInteger", "MatMulInteger")}
    stores = {node: a.name for a in activations for t in a.how[way] for node in (quantize_of(t), dequantize_of(t))}
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


def _with_sums(
    added: Sequence[Activation],
    activations: Sequence[Activation],
    best: tuple[dict[str, int], float, float],
    bound: float,
    entries: Entries,
    error: Error,
) -> tuple[dict[str, int], float, float]:
    """A choice, its error and its time, with those results in bytes too that are only added to others, if that is faster and
    within the bound: all of them, or the half or the quarter of them by which outputs move least, and so on."""
    choice, _, took = best
    names = list[str]()
    for a in sorted(added, key=lambda a: a.squares[ALL]):
        if (time := entries.time(activations, {**choice, **dict.fromkeys(names, ALL), a.name: ALL})) < took:
            names, took = [*names, a.name], time
    while names:
        some = choice | dict.fromkeys(names, ALL)
        off = error(some)
        if off <= bound:
            return some, off, entries.time(activations, some)
        names = names[: len(names) // 2]
    return best


def within(found: Sequence[Timed], bound: float, error: Error) -> tuple[dict[str, int], float]:
    """How each activation is stored, and the error of the outputs, which is within the bound.

    Estimates say in which order activations are worth it, and guess how many are within the bound; runs find that out.
    """
    activations = [t.activation for t in found]
    prices = sorted((t.worth for t in found if t.worth > 0), reverse=True)
    few, many = 0, len(prices) + 1  # so many are within the bound, and so many are not
    best = dict.fromkeys((t.name for t in found), FLOATS), 0.0
    tried = len(prices)
    for attempt in range(TRIES):
        if many - few <= max(len(prices) // FINE, 1) and attempt:
            break
        choice = _at(found, prices[tried] if tried < len(prices) else 0.0)
        if not any(choice.values()):
            break
        measured = error(choice)
        if measured <= bound:
            few, best = tried, (choice, measured)
        else:
            many = tried
        tried = (few + many) // 2
        if attempt < GUESSES and np.isfinite(measured) and few == 0:
            guess = sum(map(bool, select(found, SPARE * bound * predicted(activations, choice) / measured).values()))
            tried = min(max(guess, 1), many - 1)
    return best


def select(found: Sequence[Timed], bound: float) -> dict[str, int]:
    """How each is stored for the least time, such that the errors add up to no more than the bound: at a price of error."""
    activations = [t.activation for t in found]

    def fits(price: float) -> bool:
        return predicted(activations, _at(found, price)) <= bound

    if fits(0.0):
        return _at(found, 0.0)
    low, high = 0.0, 1.0
    while not fits(high) and high < 1e30:
        low, high = high, 4 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return _at(found, high)


def _at(found: Sequence[Timed], price: float) -> dict[str, int]:
    """How each is stored at a price of error."""
    return {t.name: min(t.activation.ways, key=lambda way: (t.cost(way, price), way)) for t in found}
