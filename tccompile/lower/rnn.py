"""Recurrent layers: the inputs' part of all steps as one matrix product, the recurrence as one Rnn."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, constant, coord, identity_view, load, reshape_view
from tccompile.ir.ops import Gemm, Rnn
from tccompile.ir.ops.rnn import GATES
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, transform
from tccompile.load.constants import recipe_of
from tccompile.lower.builder import Builder, Reads, shape_of

ACTIVATIONS: dict[str, tuple[str, tuple[tuple[str, float | None], ...]]] = {
    "relu": ("relu", ()),
    "tanh": ("tanh", ()),
    "sigmoid": ("sigmoid", ()),
    "softsign": ("softsign", ()),
    "softplus": ("softplus", ()),
    "leakyrelu": ("leaky_relu", (("alpha", 0.01),)),
    "thresholdedrelu": ("thresholded_relu", (("alpha", 1.0),)),
    "elu": ("elu", (("alpha", 1.0),)),
    "hardsigmoid": ("hard_sigmoid", (("alpha", 0.2), ("beta", 0.5))),
    "affine": ("affine", (("alpha", None), ("beta", None))),
    "scaledtanh": ("scaled_tanh", (("alpha", None), ("beta", None))),
}
"""ONNX's activations in lower case: the function of `expr.FUNCTIONS`, and its parameters with the defaults of ONNX's operators.

Affine and ScaledTanh are no operators, so theirs must be given.
"""

DEFAULTS = {"rnn": ("tanh",), "gru": ("sigmoid", "tanh"), "lstm": ("sigmoid", "tanh", "tanh")}


def rnn(node: gs.Node, b: Builder) -> None:
    """RNN, GRU and LSTM: (X, W, R, B, sequence_lens, initial_h, initial_c, P) → (Y, Y_h, Y_c)."""
    cell = node.op.lower()
    gates, batch_first = GATES[cell], bool(b.attr("layout", 0))
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[b.attr("direction", "forward")]
    x, w, r = node.inputs[:3]
    d, rows, features = shape_of(w)
    units = rows // gates
    n, steps = shape_of(x)[:2] if batch_first else shape_of(x)[1::-1]
    if min(steps, n, units) == 0:
        raise b.refuse(f"it has {steps} steps of {n} sequences and {units} units", "give every extent at least 1 element")
    reset_after = cell == "gru" and bool(b.attr("linear_before_reset", 0))
    bias, reset_bias = _biases(b, d, gates, units, reset_after)
    projected = b.emit(
        Gemm,
        b.new(f"{b.nodes[0]}/inputs", (steps, n, d * rows), order=(0, 1, 2)),
        a=_inputs(b, x, batch_first).name,
        b=_reshaped(b, w, (d * rows, features)).name,
        epilogue=Epilogue(call("add", ACC, load(0)), (View(bias.name, (coord(2),)),)) if bias else Epilogue(),
    )
    p = b.input(7)
    last = b.new(f"{b.nodes[0]}/states", (steps + 1 + (cell == "lstm"), d, n, units), order=(0, 2, 1, 3))
    b.emit(
        Rnn,
        last,
        x=projected.name,
        r=_reshaped(b, r, (d, gates, units, units)).name,
        cell=cell,
        backward=backward,
        functions=_functions(b, cell, d),
        b=reset_bias.name if reset_bias else None,
        p=_reshaped(b, p, (d, 3, units)).name if p is not None and cell == "lstm" else None,
        h=_state(b, 5, batch_first),
        c=_state(b, 6, batch_first) if cell == "lstm" else None,
        lengths=_lengths(b, steps),
        clip=float(b.attr("clip", 0.0)) or float("inf"),
        reset_after=reset_after,
        coupled=cell == "lstm" and bool(b.attr("input_forget", 0)),
    )
    _results(b, last, steps, batch_first)


def _results(b: Builder, states: Tensor, steps: int, batch_first: bool) -> None:
    """Y, the first `steps` rows of the states (T, D, N, H), and Y_h and Y_c, a row each; or with N before T and D."""
    rows = [coord(1 if batch_first else 0), constant(steps), constant(steps + 1)]
    for t, row in zip(b.node.outputs, rows, strict=False):
        if b.used(t):
            first = len(t.shape) - 3  # Y has an axis of steps
            sequence, direction = (0, 1 + first) if batch_first else (1 + first, first)
            view = View(states.name, (row, coord(direction), coord(sequence), coord(2 + first)))
            steps_axis = [1 if batch_first else 0] * first
            b.copy(view, b.result(t, (*steps_axis, sequence, direction, 2 + first)))


def _inputs(b: Builder, x: gs.Tensor, batch_first: bool) -> Tensor:
    """X as (T, N, features)."""
    if not batch_first:
        return b.matrix(x)
    n, steps, features = shape_of(x)
    source = b.value(x)
    y = b.new(f"{x.name}.steps", (steps, n, features), order=(0, 1, 2))
    return b.copy(View(source.name, (coord(1), coord(0), coord(2))), y)


def _reshaped(b: Builder, t: gs.Tensor, shape: tuple[int, ...]) -> Tensor:
    """`t` row-major in another shape."""
    order = tuple(range(len(shape)))
    if isinstance(t, gs.Constant):
        return b.constant(t.name, transform("reshape", recipe_of(t), shape=shape), shape, order=order)
    x = b.value(t)
    return b.copy(reshape_view(x.name, x.shape, shape), b.new(f"{t.name}.rows", shape, order=order))


def _biases(b: Builder, d: int, gates: int, units: int, reset_after: bool) -> tuple[Tensor | None, Tensor | None]:
    """B (D, 2·G·H), inputs' biases before the recurrent ones, as what is added to all pre-activations, (D·G·H,), and what
    is reset with the hidden state, (D, H)."""
    t = b.input(3)
    if t is None:
        return None, None
    rows = gates * units
    kept = rows - units if reset_after else rows  # rows of a direction whose two biases are added up
    if isinstance(t, gs.Constant):
        recipe = recipe_of(t)
        first, second = (
            transform("slice", recipe, starts=(0, start), ends=(None, start + rows), steps=(1, 1)) for start in (0, rows)
        )
        if reset_after:
            second = transform("mul", second, Literal((np.arange(rows) < kept).astype(np.float32)))
        both = transform("reshape", transform("add", first, second), shape=(d * rows,))
        bias = b.constant(f"{t.name}.both", both, (d * rows,))
        if not reset_after:
            return bias, None
        rest = transform("slice", recipe, starts=(0, rows + kept), ends=(None, 2 * rows), steps=(1, 1))
        return bias, b.constant(f"{t.name}.reset", rest, (d, units))
    x = b.value(t)
    reads = Reads(b, (d, rows))
    expr = reads.view(View(x.name, (coord(0), coord(1))))
    added = reads.view(View(x.name, (coord(0), coord(1) + rows)))
    if reset_after:
        mask = b.literal(f"{t.name}.added", (np.arange(rows) < kept).astype(np.float32))
        added = call("mul", added, reads.view(View(mask.name, (coord(1),))))
    pairs = b.compute(b.new(f"{t.name}.pairs", (d, rows)), call("add", expr, added), reads)
    bias = b.copy(reshape_view(pairs.name, (d, rows), (d * rows,)), b.new(f"{t.name}.both", (d * rows,)))
    if not reset_after:
        return bias, None
    return bias, b.copy(View(x.name, (coord(0), coord(1) + (rows + kept))), b.new(f"{t.name}.reset", (d, units)))


def _state(b: Builder, i: int, batch_first: bool) -> str | None:
    """An initial state as (D, N, H), or None for zeros."""
    t = b.input(i)
    if t is None or (isinstance(t, gs.Constant) and not np.any(t.values)):
        return None
    x = b.value(t)
    if not batch_first:
        return b.with_order(x, (0, 1, 2)).name
    n, d, units = shape_of(t)
    y = b.new(f"{t.name}.state", (d, n, units), order=(0, 1, 2))
    return b.copy(View(x.name, (coord(1), coord(0), coord(2))), y).name


def _lengths(b: Builder, steps: int) -> str | None:
    """The tensor of the sequences' lengths, or None where all have all steps."""
    t = b.input(4)
    if t is None or (isinstance(t, gs.Constant) and np.all(t.values == steps)):
        return None
    x = b.value(t)
    return b.copy(identity_view(x.name, 1), b.new(f"{t.name}.lengths", x.shape, DType.I32)).name


def _functions(b: Builder, cell: str, directions: int) -> tuple[tuple[Expr, ...], ...]:
    """Each direction's activations; their parameters are taken in turn from activation_alpha and activation_beta."""
    names = [str(name) for name in b.attr("activations") or DEFAULTS[cell] * directions]
    given = {"alpha": list(b.attr("activation_alpha") or ()), "beta": list(b.attr("activation_beta") or ())}
    each = len(DEFAULTS[cell])
    if len(names) != each * directions:
        raise b.refuse(f"it has {len(names)} activations, {', '.join(names)}", f"give {each} a direction")
    functions = []
    for name in names:
        if name.lower() not in ACTIVATIONS:
            raise b.refuse(f"the activation {name} is not supported", f"use one of {', '.join(ACTIVATIONS)}")
        fn, parameters = ACTIVATIONS[name.lower()]
        values = []
        for kind, default in parameters:
            value = given[kind].pop(0) if given[kind] else default
            if value is None:
                raise b.refuse(f"the activation {name} has no activation_{kind}", f"give its activation_{kind}")
            values.append(float(value))
        functions.append(call(fn, ACC, *values))
    return tuple(tuple(functions[each * i : each * (i + 1)]) for i in range(directions))
