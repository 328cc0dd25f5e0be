"""Recurrent layers, one step after the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tccompile.ir.expr import Expr, Shape
from tccompile.ir.program import GATES, Rnn
from tccompile.ir.reference.expressions import evaluate_expr


def rnn(op: Rnn, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """The states after each step and the last ones, (T + 1, D, N, H), or (T + 2, D, N, H) for lstm."""
    directions, n, units = shape[1:]
    if 0 in shape:
        return np.zeros(shape, np.float32)
    x = values[op.x].astype(np.float32, copy=False)
    steps = len(x)
    x = x.reshape(steps, n, directions, GATES[op.cell], units)
    lengths = np.full(n, steps) if op.lengths is None else np.clip(values[op.lengths], 0, steps)
    y = np.zeros(shape, np.float32)
    everyone = np.arange(n)
    for d, backward in enumerate(op.backward):
        h, c = (np.zeros((n, units), np.float32) if s is None else values[s][d].astype(np.float32) for s in (op.h, op.c))
        for s in range(steps):
            active = s < lengths
            t = np.where(active & backward, lengths - 1 - s, s)
            new_h, new_c = step(op, d, x[t, everyone, d].swapaxes(0, 1), h, c, values)
            h, c = np.where(active[:, None], new_h, h), np.where(active[:, None], new_c, c)
            y[t[active], d, active] = h[active]
        there = (lengths > 0)[:, None]
        y[steps, d] = np.where(there, h, 0)
        if op.cell == "lstm":
            y[steps + 1, d] = np.where(there, c, 0)
    return y


def step(
    op: Rnn, d: int, x: np.ndarray, h: np.ndarray, c: np.ndarray, values: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The next hidden state and cell of direction `d`: x (G, N, H), h and c (N, H)."""

    def function(k: int, a: np.ndarray) -> np.ndarray:
        return applied(op.functions[d][k], np.clip(a, -op.clip, op.clip))

    r = values[op.r][d].astype(np.float32, copy=False)
    if op.cell == "rnn":
        return function(0, x[0] + h @ r[0].T), c
    if op.cell == "gru":
        z, reset = (function(0, x[g] + h @ r[g].T) for g in (0, 1))
        if op.reset_after:
            bias = 0 if op.b is None else values[op.b][d]
            new = function(1, x[2] + reset * (h @ r[2].T + bias))
        else:
            new = function(1, x[2] + (reset * h) @ r[2].T)
        return (1 - z) * new + z * h, c
    i, o, f, cell = x + h @ r.swapaxes(1, 2)
    peep = np.zeros((3, 1), np.float32) if op.p is None else values[op.p][d].astype(np.float32)
    i = function(0, i + peep[0] * c)
    f = 1 - i if op.coupled else function(0, f + peep[2] * c)
    c = f * c + i * function(1, cell)
    return function(0, o + peep[1] * c) * applied(op.functions[d][2], c), c


def applied(function: Expr, a: np.ndarray) -> np.ndarray:
    """An expression of `acc`."""
    return np.broadcast_to(evaluate_expr(function, (), {}, a.shape, a), a.shape)
