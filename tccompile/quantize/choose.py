"""Which activations are stored in bytes: those that save most time for the error that they make, within a bound.

What an activation's bytes move the outputs by is what they move it by, times a measured gain; and so of weights, by way of what
they are multiplied to. Such errors add up as squares. What an activation saves is what the steps that read it are estimated to
take without bytes and with them. So for any price of error each activation decides for itself, and the price is as low as the
bound allows. What comes of it is run beside float32: estimates say which activation is worth more than which, and not how many of
them are within the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.metric import relative_error
from tccompile.lower.graph import lower
from tccompile.quantize.calibration import NAMED, Calibration, named
from tccompile.quantize.grid import LARGEST, grid_of, rounded, weight_error
from tccompile.quantize.insert import Tensor, dequantize_of, quantize_of, quantized
from tccompile.quantize.observe import WATCHED, Observed, observe, outputs
from tccompile.quantize.products import Layer, layers
from tccompile.quantize.smooth import factors, smoothed
from tccompile.quantize.ties import begins, ties
from tccompile.rewrites import tidy
from tccompile.rewrites.quantized import moves
from tccompile.rewrites.rule import rank

Feeds = Mapping[str, np.ndarray]

Times = Callable[[gs.Graph], Sequence[tuple[Collection[str], float]]]
"""Estimates the steps of a graph: of each, the names of its nodes, and its time in microseconds."""

Progress = Callable[[int, int], None]
"""Called with how many runs of the network are done, and about how many there are."""

FLOATS, OPERANDS, ALL = range(3)
"""Who reads an activation's bytes: nobody, the products that read it, or all that read it."""

TRIES = 10
"""How often a choice is run beside float32, at most."""

GUESSES = 2
"""How often the number of activations in bytes is guessed by estimates and what was measured; after that it is halved between one
that is within the bound and one that is not."""

FINE = 16
"""How close these get, as a share of all activations that are worth it."""

SPARE = 0.95
"""The share of the bound that a guess aims at."""

LESS = 0.99
"""The share of a model's time that bytes must leave at most: estimates are no more exact."""

TESTED = 8
"""Runs that a choice is measured on, at most, the last ones: errors differ from input to input by far more than one from those
that are new. Of all runs up to a quarter are held back from calibration for that."""

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Attention", "LayerNormalization", "InstanceNormalization",
         "GroupNormalization", "Softmax", "GRU", "LSTM", "RNN", "Resize")  # fmt: skip
"""Operators that do not read bytes but by way of floats that are stored for them."""


@dataclass
class Activation:
    """A tensor that products read, or several that are tied: the layers, and for each way to store it, what moves the outputs and
    what it takes.

    how      as it would be stored in each way: what is, by name
    ways     those that are possible
    squares  of what the outputs move by, for each way
    times    of the steps that read it, in microseconds, for each way
    """

    name: str
    layers: list[Layer]
    how: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
    ways: tuple[int, ...]
    squares: list[float]
    times: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


def choose(
    graph: gs.Graph,
    runs: Sequence[Feeds],
    sources: Mapping[str, np.ndarray],
    bound: float,
    times: Times,
    progress: Progress,
    fp32: Collection[str] = (),
    float8: bool = False,
) -> Calibration:
    """What is worth it in bytes, such that no output is off by more than the bound on inputs of which some are held back.

    graph  rewritten; it stays as it is
    runs   inputs, of which a part is held back; sources, the model's weights by name
    fp32   nodes that are not to be in bytes, by names or patterns
    float8 whether bytes are floats
    """
    program = lower(graph)
    held = max(min(len(runs) // 4, TESTED), 1) if len(runs) > 1 else 0
    seen, test = runs[: len(runs) - held], tested(runs)
    first, total = seen[:WATCHED], len(program.ops) * (len(seen) + WATCHED)
    begun = observe(program, first, sources, {a.x.name: a.channels for a in layers(graph)[0]}, lambda done: progress(done, total))
    smooth = factors(graph, begun.values)
    graph = smoothed(graph, smooth)
    found, floats = layers(graph)
    found, floats = [x for x in found if not named(x.name, fp32)], floats | {x.name: NAMED for x in found if named(x.name, fp32)}
    ran = len(program.ops) * len(first)
    wanted = _moved_with(graph) | {a.x.name: a.channels for a in found}
    observed = observe(lower(graph), seen, sources, wanted, lambda done: progress(ran + done, total), begun.gains)
    activations, in_floats = _faster(graph, _activations(graph, found, observed, floats, float8), observed, times)
    exact = outputs(program, test, sources)

    def error(made: gs.Graph) -> float:
        got = outputs(lower(made), test, sources)
        return max(relative_error(o[n], e[n]) for o, e in zip(got, exact, strict=True) for n in e)

    whole, measured = within(graph, activations, bound, error)
    choice, took = _fastest(graph, activations, whole, in_floats, times)
    if choice != whole:
        measured = error(_made(graph, activations, choice)) if any(choice.values()) else 0.0
        if measured > bound:  # fewer bytes may be worse, where errors of some made up for those of others
            choice, measured, took = dict.fromkeys(choice, FLOATS), 0.0, in_floats
    for a in activations:
        for layer in a.layers if not choice[a.name] else ():
            slow = whole[a.name] or min(a.times[way] for way in a.ways if way) >= a.times[FLOATS]
            floats[layer.name] = "bytes are estimated to be no faster" if slow else "the error would be above the bound"
    tensors, names = _stored(activations, choice)
    smooth = {name: f for name, f in smooth.items() if name in tensors}
    return Calibration(tensors, smooth, names, floats, measured, len(test), held, (in_floats, took))


def _moved_with(graph: gs.Graph) -> dict[str, int]:
    """What may be tied, by name, and an axis of it."""
    tensors = [t for node in graph.nodes for t in ((*moves(node), *node.outputs) if moves(node) else ())]  # type: ignore[misc]
    return {t.name: min(1, rank(t) - 1) for t in tensors if rank(t)}


def _fastest(
    graph: gs.Graph, activations: Sequence[Activation], choice: Mapping[str, int], in_floats: float, times: Times
) -> tuple[dict[str, int], float]:
    """All of what was chosen, or the half, the quarter or the eighth of it that saves most, whichever makes the graph fastest:
    what one activation saves depends on others. And the graph's time; nothing is chosen where that would save too little."""
    saved = {a.name: a.times[FLOATS] - a.times[choice[a.name]] for a in activations if choice[a.name]}
    order = sorted(saved, key=lambda name: -saved[name])
    best, least, limit = dict.fromkeys(choice, FLOATS), in_floats, LESS * in_floats
    for count in dict.fromkeys(len(order) >> k for k in range(4)):
        some = {name: way if name in order[:count] else FLOATS for name, way in choice.items()}
        took = sum(t for _, t in times(_made(graph, activations, some))) if count else in_floats
        if took < min(least, limit):
            best, least = some, took
    return best, least


def tested(runs: Sequence[Feeds]) -> Sequence[Feeds]:
    """The runs that a choice is measured on."""
    return runs[-TESTED:]


def _activations(
    graph: gs.Graph, found: Sequence[Layer], observed: Observed, floats: dict[str, str], float8: bool
) -> list[Activation]:
    """What the layers read, with what its bytes move the outputs by; layers whose operand is not known go to `floats`."""
    by_name: dict[str, list[Layer]] = {}
    for layer in found:
        values = observed.values.get(layer.x.name)
        if values is not None and 0 < max(values.high, -values.low) < LARGEST:
            by_name.setdefault(layer.x.name, []).append(layer)
        elif values is not None and values.low == values.high == 0:
            floats[layer.name] = "its input is zero in all that it was calibrated with"
        else:
            floats[layer.name] = "its input is not finite, or too large to be squared"
    return [_activation(graph, name, own, observed, float8) for name, own in by_name.items()]


def _faster(graph: gs.Graph, alone: list[Activation], observed: Observed, times: Times) -> tuple[list[Activation], float]:
    """The activations each for itself, or tied where what lies between them only moves numbers, if that is estimated to be
    faster; with their times. And what the graph takes in floats."""
    in_floats = _timed(graph, alone, times)
    tied, left = [], {a.name: replace(a, times=[0.0, 0.0, 0.0]) for a in alone}
    for members in ties(graph, observed.values, HEAVY):
        operands = [left.pop(t.name) for t in members if t.name in left]
        if operands:
            tied.append(_tied(members, operands, observed))
    if not tied:
        return alone, in_floats
    together = [*left.values(), *tied]
    _timed(graph, together, times)
    took = [sum(t for _, t in times(_made(graph, found, _at(found, 0.0)))) for found in (alone, together)]
    return (alone if took[0] <= took[1] else together), in_floats


def _activation(graph: gs.Graph, name: str, own: list[Layer], observed: Observed, float8: bool) -> Activation:
    values = observed.values[name]
    how = Tensor(grid_of(values.all(), float8), values.means, shared=True)
    gains = [observed.gains.get(layer.node.outputs[0].name, 1.0) for layer in own]
    by_weights = sum((g * weight_error(layer.rows(), float8)) ** 2 for g, layer in zip(gains, own, strict=True))
    as_operand = sum(g**2 for g in gains) * how.grid.error**2
    whole = observed.gains.get(name, 1.0) ** 2 * how.grid.error**2
    ways = (FLOATS, OPERANDS, ALL) if _may_share(graph, own) else (FLOATS, OPERANDS)
    squares = [0.0, by_weights + as_operand, by_weights + max(whole, as_operand)]
    return Activation(name, own, ({}, {name: replace(how, shared=False)}, {name: how}), ways, squares)


def _tied(members: list[gs.Tensor], operands: list[Activation], observed: Observed) -> Activation:
    """Several as one: with one grid where all that reads them reads bytes, and each with its own where only products do."""
    seen = [observed.values[t.name] for t in members]
    float8 = any(t.grid.float8 for a in operands for t in a.how[OPERANDS].values())
    grid = grid_of(np.concatenate([v.all() for v in seen]), float8)
    how = {t.name: Tensor(grid, v.means, shared=True, tied=True) for t, v in zip(members, seen, strict=True)}
    moved = 0.0
    for t in begins(members):
        sample = observed.values[t.name].all()
        moved += (observed.gains.get(t.name, 1.0) * relative_error(rounded(sample, grid), sample)) ** 2
    alone = sum(a.squares[OPERANDS] for a in operands)
    by_weights = alone - sum(
        (observed.gains.get(layer.node.outputs[0].name, 1.0) * a.how[OPERANDS][a.name].grid.error) ** 2
        for a in operands
        for layer in a.layers
    )
    own = {name: t for a in operands for name, t in a.how[OPERANDS].items()}
    layers_ = [layer for a in operands for layer in a.layers]
    return Activation(operands[0].name, layers_, ({}, own, how), (FLOATS, OPERANDS, ALL), [0.0, alone, by_weights + moved])


def _may_share(graph: gs.Graph, own: Sequence[Layer]) -> bool:
    """Whether all that reads the layers' activation may read bytes as well."""
    x, products = own[0].x, {id(layer.node) for layer in own}
    others = [node for node in x.outputs if id(node) not in products]
    return not any(t is x for t in (*graph.outputs, *graph.inputs)) and not any(n.op in HEAVY for n in others)


def _timed(graph: gs.Graph, activations: Sequence[Activation], times: Times) -> float:
    """Estimate what each activation's steps take for each way to store it; and the whole graph in floats."""
    steps = times(graph)
    share_out(steps, activations, FLOATS)
    for way in (OPERANDS, ALL):
        choice = {a.name: way if way in a.ways else OPERANDS for a in activations}
        share_out(times(_made(graph, activations, choice)), activations, way)
    return sum(time for _, time in steps)


def share_out(steps: Sequence[tuple[Collection[str], float]], activations: Sequence[Activation], way: int) -> None:
    """Add each step's time to those of the activations which it multiplies, or else quantizes or reads."""
    multiplies = {layer.name: a for a in activations for layer in a.layers}
    multiplies |= {f"{name}/{op}": a for name, a in multiplies.items() for op in ("ConvInteger", "MatMulInteger")}
    stores = {name: a for a in activations for t in a.how[way] for name in (quantize_of(t), dequantize_of(t))}
    for nodes, time in steps:
        found = [multiplies[n] for n in nodes if n in multiplies] or [stores[n] for n in nodes if n in stores]
        owners = {a.name: a for a in found}.values()
        for a in owners:
            a.times[way] += time / len(owners)


def _stored(activations: Sequence[Activation], choice: Mapping[str, int]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The activations in bytes, and the names of the layers that multiply them."""
    stored = [a for a in activations if choice[a.name]]
    tensors = {name: how for a in stored for name, how in a.how[choice[a.name]].items()}
    return tensors, tuple(layer.name for a in stored for layer in a.layers)


def _made(graph: gs.Graph, activations: Sequence[Activation], choice: Mapping[str, int]) -> gs.Graph:
    """A copy of the graph with activations stored as chosen."""
    made = quantized(graph, *_stored(activations, choice))
    tidy(made)
    return made


def within(
    graph: gs.Graph, activations: Sequence[Activation], bound: float, error: Callable[[gs.Graph], float]
) -> tuple[dict[str, int], float]:
    """How each activation is stored, and the error of the outputs, which is within the bound.

    Estimates say in which order activations are worth it, and guess how many are within the bound; runs find that out.
    """
    prices = sorted((p for a in activations if (p := _worth(a)) > 0), reverse=True)
    few, many = 0, len(prices) + 1  # so many are within the bound, and so many are not
    best = dict.fromkeys((a.name for a in activations), FLOATS), 0.0
    tried = len(prices)
    for attempt in range(TRIES):
        if many - few <= max(len(prices) // FINE, 1) and attempt:
            break
        choice = _at(activations, prices[tried] if tried < len(prices) else 0.0)
        if not any(choice.values()):
            break
        measured, predicted = error(_made(graph, activations, choice)), _predicted(activations, choice)
        if measured <= bound:
            few, best = tried, (choice, measured)
        else:
            many = tried
        tried = (few + many) // 2
        if attempt < GUESSES and np.isfinite(measured) and few == 0:
            guess = sum(map(bool, select(activations, SPARE * bound * predicted / measured).values()))
            tried = min(max(guess, 1), many - 1)
    return best


def _worth(a: Activation) -> float:
    """The price of error up to which an activation is worth it to be stored in bytes."""
    return max(((a.times[FLOATS] - a.times[way]) / max(a.squares[way], 1e-30) for way in a.ways if way), default=0.0)


def _predicted(activations: Sequence[Activation], choice: Mapping[str, int]) -> float:
    return float(np.sqrt(sum(a.squares[choice[a.name]] for a in activations)))


def select(activations: Sequence[Activation], bound: float) -> dict[str, int]:
    """How each is stored for the least time, such that the errors add up to no more than the bound: at a price of error."""

    def fits(price: float) -> bool:
        return _predicted(activations, _at(activations, price)) <= bound

    if fits(0.0):
        return _at(activations, 0.0)
    low, high = 0.0, 1.0
    while not fits(high) and high < 1e30:
        low, high = high, 4 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return _at(activations, high)


def _at(activations: Sequence[Activation], price: float) -> dict[str, int]:
    """How each is stored at a price of error."""
    costs = {a.name: {way: (a.times[way] + price * a.squares[way], way) for way in a.ways} for a in activations}
    return {name: min(cost, key=cost.__getitem__) for name, cost in costs.items()}
