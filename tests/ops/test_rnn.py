"""Recurrent layers against ONNX Runtime: cells, directions, activations, states, lengths, layouts, every output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tccompile.errors import PlanError, UnsupportedError
from tccompile.ir.expr import ACC, Epilogue, call
from tccompile.ir.expr import load as loaded
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Gemm, Rnn
from tccompile.ir.ops.rnn import GATES
from tccompile.ir.reference import evaluate
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tests.networks import feeds, reference, relative_error
from tests.ops.common import Net, agrees

T, N, FEATURES, H = 7, 3, 5, 6


def layer(
    op: str,
    states: str = "",
    lengths: Any = None,
    constant: bool = True,
    peepholes: bool = False,
    bias: bool = True,
    **attrs: Any,
) -> Net:
    """One layer with all its outputs; `states` says how the initial ones are given: "", "constant" or "input"."""
    d = 2 if attrs.get("direction") == "bidirectional" else 1
    first = attrs.get("layout", 0) == 1
    rows = GATES[op.lower()] * H
    shapes = {"x": (N, T, FEATURES) if first else (T, N, FEATURES)}
    weights = {"w": (d, rows, FEATURES), "r": (d, rows, H), **({"b": (d, 2 * rows)} if bias else {})}
    state = (N, d, H) if first else (d, N, H)
    given = {"h": state, **({"c": state} if op == "LSTM" else {})}
    shapes |= {} if constant else weights
    shapes |= given if states == "input" else {}
    net = Net(opset=22, **shapes)
    args = ["x", *(net.normal(*s, scale=0.5) if constant else name for name, s in weights.items())]
    args += [None] * (4 - len(args))
    if isinstance(lengths, str):
        net.inputs.append(helper.make_tensor_value_info(lengths, TensorProto.INT32, (N,)))
    args.append(lengths if lengths is None or isinstance(lengths, str) else np.array(lengths, np.int32))
    args += [None if not states else net.normal(*s) if states == "constant" else name for name, s in given.items()]
    args += [net.normal(d, 3 * H)] if peepholes else []
    outputs = net(op, *args, outputs=3 if op == "LSTM" else 2, hidden_size=H, **attrs)
    return net.out(*outputs)


CELLS = ("RNN", "GRU", "LSTM")
BOTH = "bidirectional"


@pytest.mark.parametrize("states", ["", "constant", "input"])
@pytest.mark.parametrize("direction", ["forward", "reverse", BOTH])
@pytest.mark.parametrize("op", CELLS)
def test_directions_and_states(op: str, direction: str, states: str) -> None:
    program = agrees(layer(op, states, direction=direction))
    (rnn,) = (x for x in program.ops if isinstance(x, Rnn))
    assert sum(isinstance(x, Gemm) for x in program.ops) == 1
    assert rnn.r in program.constants and program.tensors[rnn.r].shape == (len(rnn.backward), GATES[rnn.cell], H, H)


@pytest.mark.parametrize("op", CELLS)
def test_batch_first(op: str) -> None:
    """ONNX Runtime has no layout 1: what it gives for layout 0 is transposed."""
    nets = [layer(op, "input", direction=BOTH, layout=k).model() for k in (0, 1)]
    for old, new in zip(nets[0].graph.initializer, nets[1].graph.initializer, strict=True):
        assert old == new
    swap = {n: (1, 0, 2) for n in ("x", "h", "c")}
    inputs = feeds(nets[1], 0)
    want = reference(nets[0], {name: value.transpose(swap[name]) for name, value in inputs.items()})
    got = evaluate(lower(load(nets[1])), inputs, sources(nets[1]))
    for i, (name, value) in enumerate(want.items()):
        assert relative_error(got[name], value.transpose((1, 0, 2) if i else (2, 0, 1, 3))) <= 1e-5


@pytest.mark.parametrize("lengths", ["lengths", (T, 3, 1), (T,) * N, (2, 0, T)])
@pytest.mark.parametrize("op", CELLS)
def test_lengths(op: str, lengths: Any) -> None:
    net = layer(op, "constant", lengths, direction=BOTH)
    program = agrees(net, {"lengths": np.array([2, T, 4], np.int32)} if lengths == "lengths" else None)
    (rnn,) = (x for x in program.ops if isinstance(x, Rnn))
    assert (rnn.lengths is None) == (lengths == (T,) * N)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("reset_after", [0, 1])
def test_gru_resets_before_or_after_the_product(reset_after: int, constant: bool, bias: bool) -> None:
    agrees(layer("GRU", "constant", constant=constant, bias=bias, direction=BOTH, linear_before_reset=reset_after))


@pytest.mark.parametrize("op", ["RNN", "LSTM"])
def test_weights_that_are_computed(op: str) -> None:
    agrees(layer(op, constant=False, direction=BOTH))


@pytest.mark.parametrize("coupled", [0, 1])
@pytest.mark.parametrize("peepholes", [True, False])
def test_lstm_variants(peepholes: bool, coupled: int) -> None:
    agrees(layer("LSTM", "constant", (4, T, 2), peepholes=peepholes, direction=BOTH, input_forget=coupled))


@pytest.mark.parametrize("op", CELLS)
def test_clip(op: str) -> None:
    agrees(layer(op, "constant", clip=0.3, direction=BOTH, linear_before_reset=1) if op == "GRU" else layer(op, clip=0.3))


NAMES = ("Relu", "Softsign", "Softplus", "LeakyRelu", "ThresholdedRelu", "Elu", "HardSigmoid", "Affine", "ScaledTanh")
OWN = ("ThresholdedRelu", "Affine", "ScaledTanh")
"""Whose defaults ONNX Runtime takes to be zero; ONNX says those of the operators, or nothing."""


@pytest.mark.parametrize(("name", "given"), [(n, g) for n in NAMES for g in (True, False) if g or n not in OWN])
def test_activations(name: str, given: bool) -> None:
    parameters = {"activation_alpha": [0.3], "activation_beta": [0.6]} if given else {}
    agrees(layer("RNN", activations=[name], **parameters))


def test_an_activation_without_its_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"n0.*Affine has no activation_alpha.*give"):
        lower(load(layer("RNN", activations=["Affine"]).model()))


def test_each_direction_has_its_activations() -> None:
    names = ["HardSigmoid", "Tanh", "Softsign", "Sigmoid", "LeakyRelu", "Tanh"]
    program = agrees(layer("LSTM", direction=BOTH, activations=names, activation_alpha=[0.4, 0.1], activation_beta=[0.3]))
    (rnn,) = (x for x in program.ops if isinstance(x, Rnn))
    assert rnn.functions[0] != rnn.functions[1]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"n0.*Gelu.*use one of relu, tanh"):
        lower(load(layer("RNN", activations=["Gelu"]).model()))


@pytest.mark.parametrize(
    "change",
    [
        {"cell": "gru"},
        {"cell": "net"},
        {"backward": (False, False)},
        {"functions": ((ACC,),)},
        {"functions": ((ACC, ACC, loaded(0)),)},
        {"clip": -1.0},
        {"h": "x"},
        {"r": "b"},
        {"b": "x"},
        {"lengths": "x"},
        {"y": "x"},
        {"epilogue": Epilogue(call("relu", ACC))},
    ],
)
def test_a_plan_with_another_layer_than_its_tensors_is_refused(change: dict[str, Any]) -> None:
    program = lower(load(layer("LSTM", "constant").model()))
    check_program(program)
    at = next(i for i, op in enumerate(program.ops) if isinstance(op, Rnn))
    ops = (*program.ops[:at], replace(program.ops[at], **change), *program.ops[at + 1 :])
    with pytest.raises(PlanError):
        check_program(replace(program, ops=ops))


def test_a_constant_sequence() -> None:
    net = Net(x=(3, 1, 2, 4))
    weights = net.normal(1, 12, 5), net.normal(1, 12, 4)
    y, _ = net("GRU", net.normal(3, 2, 5), *weights, outputs=2, hidden_size=4, activations=["Relu", "Tanh"])
    agrees(net.out(net("Add", "x", y)))
