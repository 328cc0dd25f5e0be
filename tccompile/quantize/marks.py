"""Which weights a calibration is of: a number for each product, by which a model of the same form with others is told."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.errors import InputError
from tccompile.load.constants import held
from tccompile.quantize.products import layers

SOME = 1 << 16
"""Weights of a product that are looked at, the first ones."""

MOVED = 0.05
"""Of the magnitude of weights, by how much they may differ: by the rounding of exporters, by a few more steps of training."""


def marks(graph: gs.Graph) -> dict[str, float]:
    """The weights of each product, projected on a wave."""
    return {name: float(_wave(len(w)) @ w) for name, w in _weights(graph).items()}


def check_weights(marked: Mapping[str, float], graph: gs.Graph) -> None:
    """Raises InputError if most products have other weights than those that were marked."""
    known = {name: w for name, w in _weights(graph).items() if name in marked}
    far = {name: MOVED * math.sqrt(0.5) * float(np.linalg.norm(w)) for name, w in known.items()}
    other = [name for name, w in known.items() if abs(_wave(len(w)) @ w - marked[name]) > far[name]]
    if 2 * len(other) > len(known):
        raise InputError(
            f"the calibration is of other weights: the model's differ in {len(other)} of {len(known)} products, as in "
            f"{other[0]!r}; delete the file, or name another, and give --calibrate DATA.npz"
        )


def _weights(graph: gs.Graph) -> dict[str, np.ndarray]:
    some = {layer.name: held(layer.weights).reshape(-1)[:SOME].astype(np.float64) for layer in layers(graph)[0]}
    return {name: w for name, w in some.items() if np.isfinite(w).all()}


def _wave(count: int) -> np.ndarray:
    return np.cos(np.arange(count))
