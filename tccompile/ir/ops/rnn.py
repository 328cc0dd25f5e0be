"""Recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import Epilogue, Expr
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import Integers, OneOf, Op, Ref, Weights

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""By the cell of an Rnn."""


@dataclass(frozen=True, kw_only=True)
class Rnn(Op):
    """y = the hidden state after each step, and then the last state: of T steps, N sequences, D directions and H units.

    A step computes, from the hidden state h of the step before, one pre-activation a for each of G gates,
    a = x + h @ rᵀ, and from those the next state, with functions f, g and k (the model's f, g and h), σ meaning f:

        rnn   (G = 1)            h = f(a)
        gru   (G = 3: z, r, n)   h = (1 - σ(z)) g(n) + σ(z) h, with n = x + (σ(r) h) @ rᵀ, or, with `reset_after`,
                                 n = x + σ(r) (h @ rᵀ + b)
        lstm  (G = 4: i, o, f, c)  c = σ(f + p₂ c) c + σ(i + p₀ c) g(c'), then h = σ(o + p₁ c) k(c)

    x        (T, N, D·G·H): the inputs' part of the pre-activations, biases included
    r        (D, G, H, H): the recurrent weights; r[d, g, j] are those of unit j
    b        (D, H), or None: a bias of n that is reset with the hidden state; p, (D, 3, H), or None: the peepholes
    h, c     (D, N, H), or None for zeros: the state before the first step
    lengths  (N,), or None: how many of the T steps each sequence has. Beyond them y is zero, and the state stays; of a sequence
             without steps the last state is zero, as in ONNX Runtime
    y        (T + 1, D, N, H), for lstm (T + 2, D, N, H): row t is h after step t, row T is the last h, row T + 1 the last c
    backward   for each direction, whether a sequence is read from its end
    functions  for each direction, the functions as expressions of `acc`: f; f and g; or f, g and k
    clip       pre-activations are clipped to ±clip; infinity for none
    coupled    an LSTM's forget gate is 1 - its input gate

    It has no epilogue.
    """

    x: Ref
    r: Weights
    cell: Annotated[str, OneOf("rnn", "gru", "lstm")]
    backward: tuple[bool, ...]
    functions: tuple[tuple[Expr, ...], ...]
    b: Ref | None = None
    p: Ref | None = None
    h: Ref | None = None
    c: Ref | None = None
    lengths: Integers | None = None
    clip: float = math.inf
    reset_after: bool = False
    coupled: bool = False

    takes_epilogue = False

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        x, d = shapes[self.x], len(self.backward)
        yield len(x) == 3 and len(y) == 4 and len(shapes[self.r]) == 4 and self.epilogue == Epilogue()
        gates, n, h = GATES[self.cell], x[1], shapes[self.r][-1]
        yield d in (1, 2) and shapes[self.r] == (d, gates, h, h) and x[2] == d * gates * h
        yield y == (x[0] + 1 + (self.cell == "lstm"), d, n, h)
        yield all(name is None or shapes[name] == (d, n, h) for name in (self.h, self.c))
        yield (self.b is None or shapes[self.b] == (d, h)) and (self.p is None or shapes[self.p] == (d, 3, h))
        yield self.lengths is None or shapes[self.lengths] == (n,)
        yield len(self.functions) == d and all(len(f) == {"rnn": 1, "gru": 2, "lstm": 3}[self.cell] for f in self.functions)
        yield self.clip > 0

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """One step after the other."""
        directions, n, units = shape[1:]
        if 0 in shape:
            return np.zeros(shape, np.float32)
        x = values[self.x].astype(np.float32, copy=False)
        steps = len(x)
        x = x.reshape(steps, n, directions, GATES[self.cell], units)
        lengths = np.full(n, steps) if self.lengths is None else np.clip(values[self.lengths], 0, steps)
        y = np.zeros(shape, np.float32)
        everyone = np.arange(n)
        for d, backward in enumerate(self.backward):
            h, c = (np.zeros((n, units), np.float32) if s is None else values[s][d].astype(np.float32) for s in (self.h, self.c))
            for s in range(steps):
                active = s < lengths
                t = np.where(active & backward, lengths - 1 - s, s)
                new_h, new_c = self._step(d, x[t, everyone, d].swapaxes(0, 1), h, c, values)
                h, c = np.where(active[:, None], new_h, h), np.where(active[:, None], new_c, c)
                y[t[active], d, active] = h[active]
            there = (lengths > 0)[:, None]
            y[steps, d] = np.where(there, h, 0)
            if self.cell == "lstm":
                y[steps + 1, d] = np.where(there, c, 0)
        return y

    def _step(
        self, d: int, x: np.ndarray, h: np.ndarray, c: np.ndarray, values: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next hidden state and cell of direction `d`: x (G, N, H), h and c (N, H)."""

        def function(k: int, a: np.ndarray) -> np.ndarray:
            return _applied(self.functions[d][k], a if math.isinf(self.clip) else np.clip(a, -self.clip, self.clip))

        r = values[self.r][d].astype(np.float32, copy=False)
        if self.cell == "rnn":
            return function(0, x[0] + h @ r[0].T), c
        if self.cell == "gru":
            z, reset = (function(0, x[g] + h @ r[g].T) for g in (0, 1))
            if self.reset_after:
                bias = 0 if self.b is None else values[self.b][d]
                new = function(1, x[2] + reset * (h @ r[2].T + bias))
            else:
                new = function(1, x[2] + (reset * h) @ r[2].T)
            return (1 - z) * new + z * h, c
        i, o, f, cell = x + h @ r.swapaxes(1, 2)
        peep = np.zeros((3, 1), np.float32) if self.p is None else values[self.p][d].astype(np.float32)
        i = function(0, i + peep[0] * c)
        f = 1 - i if self.coupled else function(0, f + peep[2] * c)
        c = f * c + i * function(1, cell)
        return function(0, o + peep[1] * c) * _applied(self.functions[d][2], c), c

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        return 2 * math.prod((*shapes[self.x][:2], *shapes[self.r]))

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        saturating = all(f.fn in ("sigmoid", "tanh") for of_one in self.functions for f in of_one)
        steps = known.shape(self.x)[0]  # by each of which an LSTM's cell grows by one at most
        bound = float(steps if self.cell == "lstm" else 1) if saturating and self.h is None and self.c is None else math.inf
        return Moments(np.zeros(at[0].shape), np.ones(at[0].shape), -bound, bound)


def _applied(function: Expr, a: np.ndarray) -> np.ndarray:
    """An expression of `acc`."""
    y = evaluate_expr(function, (), {}, a.shape, a)
    return y if y.shape == a.shape else np.broadcast_to(y, a.shape)  # which takes longer than a small step
