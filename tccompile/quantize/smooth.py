"""Channels of an activation made alike in size: what writes them divides, and the weights that read them multiply.

y = w · x = (w · f) · (x / f) with a factor f for each channel, which goes into constants on both sides: a norm's scale and bias,
or the weights and bias of the product before, past functions for which f(x · a) = f(x) · a. So a few channels that are far
larger than the others take no bits from these (G. Xiao et al., "SmoothQuant", 2023; M. Nagel et al., "Data-free quantization",
2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.load.constants import Weight
from tccompile.quantize.grid import LARGEST
from tccompile.quantize.observe import Values
from tccompile.quantize.products import Layer, layers
from tccompile.rewrites.rule import Editor, calculate, constant, operand, rank

SHARES = (0.25, 0.5, 0.75, 1.0)
"""How much of the channels' differences may go to the weights."""

WORTH = 0.8
"""What smoothing must leave of the error's square."""

DEAD = 2.0**-16
"""The share of the largest weights, or values, up to which others count as that large: what is always zero has no size."""

HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu", "Identity", "MaxPool", "Flatten")
"""Functions that commute with a positive factor of each channel, whose axis stays where it is."""


@dataclass(frozen=True)
class Divided:
    """A constant that is to be divided: an operand of a node, and which of its axes the channels go along."""

    node: gs.Node
    operand: int
    axis: int


def factors(graph: gs.Graph, seen: Mapping[str, Values]) -> dict[str, np.ndarray]:
    """For activations of a rewritten graph that it is worth it for, by name, what their channels are divided by."""
    found = {}
    outputs = {id(t) for t in graph.outputs}
    for name, own in _by_activation(graph).items():
        if name in seen and _divided(own, outputs) is not None:
            best = _best(seen[name], own)
            if best is not None:
                found[name] = best
    return found


def smoothed(graph: gs.Graph, by: Mapping[str, np.ndarray]) -> gs.Graph:
    """A copy of the graph in which channels of these activations are divided, and all else stays what it was.

    Raises InputError for those that cannot be divided by so many factors.
    """
    graph = graph.copy()
    edit, outputs = Editor(graph), {id(t) for t in graph.outputs}
    for name, own in _by_activation(graph).items():
        if name not in by:
            continue
        f = by[name].astype(np.float32)
        divided = _divided(own, outputs)
        if divided is None or len(f) != own[0].x.shape[own[0].channels]:
            raise InputError(f"the calibration is of another model: the channels of {name!r} cannot be divided in this one")
        for d in divided:
            _scale(edit, d.node, d.operand, d.axis, 1 / f)
        for layer in own:
            _scale(edit, layer.node, 1, layer.terms, f)
    return graph


def _divided(own: Sequence[Layer], outputs: set[int]) -> list[Divided] | None:
    """The constants to be divided for an activation that these layers read; None if it has other readers, or others write it."""
    x = own[0].x
    whole = all(layer.weights.shape[layer.terms] == x.shape[layer.channels] for layer in own)  # in no groups
    along = {layer.channels for layer in own}
    return sources(own[0], outputs) if whole and len(x.outputs) == len(own) and len(along) == 1 else None


def _by_activation(graph: gs.Graph) -> dict[str, list[Layer]]:
    out: dict[str, list[Layer]] = {}
    for layer in layers(graph)[0]:
        out.setdefault(layer.x.name, []).append(layer)
    return out


def _scale(edit: Editor, node: gs.Node, i: int, axis: int, by: np.ndarray) -> None:
    weight: Weight = node.inputs[i]
    along = tuple(-1 if a == axis % max(rank(weight), 1) else 1 for a in range(rank(weight)))
    node.inputs[i] = edit.named(calculate("mul", weight, by.reshape(along)), f"{weight.name}/smoothed")


def sources(layer: Layer, outputs: set[int]) -> list[Divided] | None:
    """The constants that the channels of a layer's activation are multiplied or increased by; None if there are others.

    outputs  the numbers of the model's outputs
    """
    found: list[Divided] = []
    t = layer.x
    while id(t) not in outputs:
        node = t.inputs[0] if len(t.inputs) == 1 else None
        if node is None or len(node.outputs) != 1 or (t is not layer.x and len(t.outputs) != 1):
            return None
        ends, begins = _ends(node, t, layer), _passes(node, t, layer)
        if ends is not None:
            return [*found, *ends]
        if begins is None:
            return None
        t, more = begins
        found += more
    return None


def _ends(node: gs.Node, t: gs.Tensor, layer: Layer) -> list[Divided] | None:
    """The constants of a node whose results are sums or norms that a factor of each channel goes into."""
    channels = layer.channels
    if node.op in ("Conv", "Gemm", "MatMul") and isinstance(node.inputs[1], Weight):
        if (node.op == "Conv") != (layer.node.op == "Conv") or (node.op == "MatMul" and rank(node.inputs[1]) != 2):
            return None
        if node.op == "Gemm" and {node.attrs.get(k, 1.0) for k in ("alpha", "beta")} != {1.0}:
            return None
        axis = 0 if node.op == "Conv" or node.attrs.get("transB", 0) else 1
        bias = operand(node, 2) if node.op != "MatMul" else None
        if bias is not None and not (isinstance(bias, Weight) and bias.shape and bias.shape[-1] == t.shape[channels]):
            return None
        return [Divided(node, 1, axis), *([Divided(node, 2, rank(bias) - 1)] if bias is not None else [])]
    if node.op in ("LayerNormalization", "RMSNormalization"):
        last = node.attrs.get("axis", -1) % rank(t) == rank(t) - 1 == channels
        given = [i for i in (1, 2) if operand(node, i) is not None]
        if last and 1 in given and all(isinstance(node.inputs[i], Weight) for i in given):
            return [Divided(node, i, 0) for i in given]
    return None


def _passes(node: gs.Node, t: gs.Tensor, layer: Layer) -> tuple[gs.Tensor, list[Divided]] | None:
    """What a node reads that passes a factor on, and its own constants that are to be divided, too."""
    if node.op in HOMOGENEOUS:
        x = node.inputs[0]
        return (x, []) if rank(x) == rank(t) and x.shape[layer.channels] == t.shape[layer.channels] else None
    if node.op not in ("Add", "Mul"):
        return None
    for i in (0, 1):
        w, x = node.inputs[i], node.inputs[1 - i]
        if isinstance(w, Weight) and constant(x) is None and rank(x) == rank(t):
            axis = layer.channels - (rank(t) - rank(w))
            if axis < 0 or w.shape[axis] != t.shape[layer.channels]:
                return None
            # A factor stays one of what it multiplies: only one side is divided
            return x, [Divided(node, i, axis)] if node.op == "Add" else []
    return None


def _best(values: Values, own: Sequence[Layer]) -> np.ndarray | None:
    """The factors of least error, if they leave little enough of it."""
    rows = [layer.by_term() for layer in own]  # (columns, terms, taps)
    most = np.maximum(values.magnitudes, np.median(values.magnitudes))  # few inputs do not show how large a small one may get
    weight = np.max([np.abs(r).max((0, 2)) for r in rows], axis=0)
    weight, most = (np.maximum(sizes, sizes.max() * DEAD) for sizes in (weight, most))
    if not (0 < most.max() < LARGEST and 0 < weight.max() < LARGEST):
        return None

    def error(f: np.ndarray) -> float:
        """The square of what rounding adds to results, up to a factor."""
        step = (most / f).max()
        by_activation = step**2 * sum(np.square(r * f[:, None], dtype=np.float64).sum() for r in rows)
        squares = values.mean_squares / f**2
        by_weights = sum(np.square(np.abs(r * f[:, None]).max((1, 2)), dtype=np.float64).sum() * r.shape[2] for r in rows)
        return float(by_activation + by_weights * squares.sum())

    plain = error(np.ones_like(most))
    tried = [(error(f), f) for f in _tried(most, weight)]
    least, f = min(tried, key=lambda pair: pair[0])
    return f if least < WORTH * plain else None


def _tried(most: np.ndarray, weight: np.ndarray) -> Iterator[np.ndarray]:
    for share in SHARES:
        f = most**share / weight ** (1 - share)
        yield np.exp2(np.rint(np.log2(f / np.exp(np.log(f).mean()))))  # powers of two: exact in any format
