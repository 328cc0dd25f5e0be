"""What a rewrite is, and the few operations on a graph that rewrites are written in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.load.constants import Weight, derived, held, literal
from tccompile.load.nodes import new_name

Applied = dict[str, dict[str, None]]
"""What rewrites did: of each, by its equation, the names of the nodes that computed what was replaced."""


@dataclass(frozen=True)
class Rewrite:
    """An equation between pieces of a graph, applied from left to right.

    equation  what is replaced by what; its name
    ops       the operators of the node that computes the left side's result
    match     finds the left side that ends at a node: whatever `check` and `apply` need to know of it, or None
    check     why the equation does not hold, or must not be used, for this match; None if it may be applied
    apply     puts the right side in its place: it writes the same output tensor, so that names of outputs stay
    """

    equation: str
    ops: tuple[str, ...]
    match: Callable[[gs.Node], Any]
    check: Callable[[Editor, Any], str | None]
    apply: Callable[[Editor, Any], None]


def itself(node: gs.Node) -> gs.Node:
    """The match of a left side that is a single node."""
    return node


class Editor:
    """Changes a graph, and keeps what was `applied`. New tensors and nodes get names of their own, the same on every run."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.applied: Applied = {}
        self.taken = set(graph.tensors()) | {n.name for n in graph.nodes}
        self.outputs = {id(t) for t in graph.outputs}
        self.inputs = {id(t) for t in graph.inputs}
        self.kept: dict[Any, Any] = {}  # what rewrites remember from one match to the next

    def name(self, like: str) -> str:
        return new_name(like, self.taken)

    def named(self, weight: Weight, like: str) -> Weight:
        """The weight under a new name."""
        weight.name = self.name(like)
        return weight

    def add(
        self, op: str, inputs: Iterable[gs.Tensor], like: gs.Node, shape: Iterable[int] | None = None,
        into: gs.Tensor | None = None, **attrs: Any,
    ) -> gs.Tensor:  # fmt: skip
        """Adds a node that writes the tensor `into`, in place of what wrote it, or a new one of `shape` and `like`'s type.

        `like` is the node that it replaces or helps to replace. The one that writes `into` takes its name, so that people find
        it in their model; the others have names under it.
        """
        name = name_of(like)
        if into is None:
            name = self.name(f"{name}/{op}")
            into = gs.Variable(name, dtype=like.outputs[0].dtype, shape=list(shape or ()))
        else:
            for old in list(into.inputs):
                old.outputs.clear()
        self.graph.nodes.append(gs.Node(op, name, dict(attrs), list(inputs), [into]))
        return into

    def note(self, equation: str, name: str) -> None:
        """A rewrite has been applied to the node of this name."""
        self.applied.setdefault(equation, {})[name] = None

    def is_output(self, tensor: gs.Tensor) -> bool:
        """Whether it is an output of the model."""
        return id(tensor) in self.outputs

    def only_use(self, tensor: gs.Tensor) -> bool:
        """Whether a single node reads the tensor, once, and it is not an output of the model."""
        return len(tensor.outputs) == 1 and id(tensor) not in self.outputs

    def may_vanish(self, x: gs.Tensor, y: gs.Tensor) -> bool:
        """Whether `redirect(x, y)` is possible: not where an input or two outputs of the model would become one tensor."""
        return id(y) not in self.outputs or (isinstance(x, gs.Variable) and not {id(x)} & (self.inputs | self.outputs))

    def redirect(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Makes x and y the same tensor: readers of y read x, unless y is an output, whose name stays."""
        for old in list(y.inputs):
            old.outputs.clear()
        if id(y) in self.outputs:
            (producer,) = x.inputs
            producer.outputs[next(i for i, t in enumerate(producer.outputs) if t is x)] = y
            x, y = y, x
        for reader in list(y.outputs):
            for i, t in enumerate(reader.inputs):
                if t is y:
                    reader.inputs[i] = x


def name_of(node: gs.Node) -> str:
    return node.name or next((t.name for t in node.outputs if t.name), "")


def producer(tensor: gs.Tensor, *ops: str) -> gs.Node | None:
    """The node that writes the tensor, if it is one of these standard ops."""
    if isinstance(tensor, gs.Constant) or len(tensor.inputs) != 1:
        return None
    node = tensor.inputs[0]
    return node if node.op in ops and node.domain in (None, "", "ai.onnx") else None


def operand(node: gs.Node, i: int) -> gs.Tensor | None:
    """Input i, or None if it is left out."""
    return node.inputs[i] if i < len(node.inputs) and node.inputs[i].name else None


def constant(tensor: gs.Tensor | None) -> gs.Constant | None:
    return tensor if isinstance(tensor, gs.Constant) else None


def scalar(tensor: gs.Tensor | None) -> float | None:
    """The value of a constant of one element."""
    if not isinstance(tensor, gs.Constant) or math.prod(tensor.shape) != 1:
        return None
    return float(np.asarray(tensor.values).item())


def ints(tensor: gs.Tensor | None) -> tuple[int, ...] | None:
    """The values of a constant vector of integers."""
    return tuple(np.asarray(tensor.values).reshape(-1).tolist()) if isinstance(tensor, gs.Constant) else None


def rank(tensor: gs.Tensor) -> int:
    return len(tensor.shape)


def is_float(tensor: gs.Tensor) -> bool:
    """Of a type that NumPy has: bf16, which only a model's own inputs and outputs have, is none."""
    return not isinstance(tensor.dtype, int) and np.dtype(tensor.dtype).kind == "f"


def past_casts(t: gs.Tensor, passed: list[gs.Tensor] | None = None) -> gs.Tensor:
    """What the tensor was before casts between floats: in fp16 models, softmax and squares for a norm are in a wider type.

    passed  takes what every cast on the way reads
    """
    while (node := producer(t, "Cast")) is not None and is_float(t) and is_float(node.inputs[0]):
        t = node.inputs[0]
        if passed is not None:
            passed.append(t)
    return t


def calculate(fn: str, *args: Weight | np.ndarray, **attributes: Any) -> Weight:
    """`derived` in at least float32: constants are rounded to fp16 once, by `rounded`, after all arithmetic."""
    wide = [derived("", "cast", a, dtype="float32") if np.dtype(a.dtype) == np.float16 else a for a in args]
    with np.errstate(all="ignore"):
        return derived("", fn, *wide, **attributes)


def rounded(weight: Weight, dtype: Any) -> Weight:
    """The weight in this type."""
    if np.dtype(weight.dtype) == np.dtype(dtype):
        return weight
    with np.errstate(all="ignore"):
        return derived("", "cast", weight, dtype=np.dtype(dtype).name)


def reshaped(weight: Weight, *shape: int) -> Weight:
    return derived("", "reshape", weight, shape=shape)


def finite(*weights: Weight) -> bool:
    """Whether no weight is an infinity or a NaN: then none takes its place when a plan's weights are replaced (`refit/`)."""
    return all(bool(np.isfinite(held(w)).all()) for w in weights)


def shape_constant(edit: Editor, shape: Iterable[int], like: gs.Node) -> Weight:
    return literal(edit.name(f"{name_of(like)}/shape"), tuple(shape), np.int64)
