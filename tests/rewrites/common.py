"""Small models for rewrites: build, rewrite, compare with ONNX Runtime, count what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from tccompile.ir.weights import evaluate
from tccompile.load.constants import recipe_of
from tccompile.load.model import load, sources
from tccompile.rewrites import rewrite
from tests.networks import feeds, reference, relative_error


class Net:
    """A model under construction: `n = Net(x=(1, 3, 8, 8)); n.out(n("Relu", "x"))`. Arrays become initializers."""

    def __init__(self, opset: int = 23, dtype: Any = np.float32, seed: int = 0, **inputs: Any) -> None:
        self.opset, self.dtype, self.rng = opset, np.dtype(dtype), np.random.default_rng(seed)
        typed = {n: s if s and isinstance(s[0], type) else (self.dtype, s) for n, s in inputs.items()}
        elem = helper.np_dtype_to_tensor_dtype
        self.inputs = [helper.make_tensor_value_info(n, elem(np.dtype(t)), s) for n, (t, s) in typed.items()]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.outputs: list[str] = []

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(self.rng.standard_normal(shape) * scale, self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return np.asarray(self.rng.uniform(0.5, 1.5, shape), self.dtype)

    def __call__(self, op: str, *args: Any, outputs: int = 1, **attrs: Any) -> Any:
        names = []
        for a in args:
            if a is not None and not isinstance(a, str):
                self.weights.append(numpy_helper.from_array(np.asarray(a), f"w{len(self.weights)}"))
                a = self.weights[-1].name
            names.append(a or "")
        ys = [f"t{len(self.nodes)}_{i}" if i else f"t{len(self.nodes)}" for i in range(outputs)]
        domain = attrs.pop("domain", "")
        self.nodes.append(helper.make_node(op, names, ys, f"n{len(self.nodes)}", domain=domain, **attrs))
        return ys[0] if outputs == 1 else ys

    def out(self, *names: str) -> Net:
        self.outputs += names
        return self

    def model(self) -> onnx.ModelProto:
        outputs = [helper.make_empty_tensor_value_info(y) for y in self.outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, outputs, self.weights)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8 if self.opset < 19 else 11
        )
        known = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        del model.graph.output[:]
        elem = helper.np_dtype_to_tensor_dtype(self.dtype)
        for y in known.graph.output:
            model.graph.output.append(y if y.type.ByteSize() else helper.make_tensor_value_info(y.name, elem, None))
        return model


def check_recipes(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Every constant's recipe gives its values from the model's own weights, in its own type."""
    weights = sources(model)
    for name, tensor in graph.tensors().items():
        if isinstance(tensor, gs.Constant):
            values = evaluate(recipe_of(tensor), weights)
            assert values.dtype == tensor.values.dtype and values.shape == tensor.values.shape, name
            np.testing.assert_array_equal(values, tensor.values, err_msg=name)


def check_same(graph: gs.Graph, model: onnx.ModelProto, tolerance: float, seed: int = 1, **inputs: np.ndarray) -> None:
    """The graph is legal ONNX and computes what the model does, by ONNX Runtime."""
    exported = gs.export_onnx(graph)
    onnx.checker.check_model(exported, full_check=True)
    given = feeds(model, seed) | inputs
    expected, found = reference(model, given), reference(exported, given)
    assert list(expected) == list(found)
    for name, ref in expected.items():
        assert found[name].dtype == ref.dtype
        error = relative_error(found[name], ref)
        assert error <= tolerance, f"{name}: {error}"


def check(
    net: Net | onnx.ModelProto, left: Mapping[str, int] | None, tolerance: float | None = None, **inputs: np.ndarray
) -> gs.Graph:
    """Rewrites the model; `left` is how many nodes of each op must be left, if that matters. Gives the graph."""
    model = net.model() if isinstance(net, Net) else net
    graph = load(model)
    rewrite(graph)
    assert left is None or Counter(n.op for n in graph.nodes) == Counter(left), "\n".join(map(str, graph.nodes))
    if tolerance is None:
        half = any(t.dtype == np.float16 for t in graph.inputs)
        tolerance = 3e-3 if half else 3e-6
    check_recipes(graph, model)
    check_same(graph, model, tolerance, **inputs)
    return graph
