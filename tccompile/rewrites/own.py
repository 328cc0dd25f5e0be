"""Rewrites of the user's own: a pattern of operators, and what takes its place.

    tc.rewrite("x * tanh(x) => acme::Glow(x)", lambda op, x: op.Mul(x, op.Tanh(x)), lambda op, x: op("acme::Glow", x))

Both sides are functions of `op` and of tensors of any kind. `op.Mul(a, b, …)` is a node of the standard's, `op("acme::Glow", …)`
one of any domain, each with attributes by name; a number stands for a constant of one element. On the left side, a node of Add,
Mul and the like matches with its inputs in either order, attributes that are given must be the node's, and what the pattern
computes on its way must have no other reader. Types and shapes of the right side follow from its operators.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx.shape_inference
import onnx_graphsurgeon as gs

from tccompile.custom.files import Rewriting, added
from tccompile.custom.operators import STANDARD, Operator, Shaped, blamed_on_user, place_of
from tccompile.errors import OperatorError, TccompileError
from tccompile.load.constants import literal
from tccompile.load.custom import attributes_of
from tccompile.load.opset import UNIFORM
from tccompile.load.types import static_type
from tccompile.rewrites.rule import Editor, Rewrite, name_of, scalar

COMMUTATIVE = ("Add", "And", "Equal", "Max", "Min", "Mul", "Or", "Sum", "Xor")


@dataclass(frozen=True)
class Node:
    """A node of a side: its operator, what it reads (nodes, names of tensors or numbers), and its attributes."""

    domain: str
    op: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """Any tensor, by the name of the side's parameter."""

    name: str


class _Ops:
    """What a side calls `op`."""

    def __call__(self, name: str, *inputs: Any, **attributes: Any) -> Node:
        domain, separator, op = name.rpartition("::")
        wrong = next((x for x in inputs if not isinstance(x, Node | Tensor | int | float)), None)
        if wrong is not None:
            raise TypeError(f"{name} of {wrong!r}: nodes read tensors, nodes and numbers")
        return Node(domain if separator else "", op, inputs, attributes)

    def __getattr__(self, name: str) -> Callable[..., Node]:
        return lambda *inputs, **attributes: self(name, *inputs, **attributes)


@dataclass(frozen=True, eq=False)
class OwnRewrite(Rewriting):
    """A rewrite of the user's own; `rule` as the house applies it."""

    equation: str
    left: Callable[..., Any]
    right: Callable[..., Any]
    check: Callable[..., str | None] | None

    @property
    def rule(self) -> Rewrite:
        pattern = self._side(self.left)
        return Rewrite(self.equation, (pattern.op,), lambda node: self._match(pattern, node), self._check, self._apply)

    def _side(self, side: Callable[..., Any]) -> Node:
        names = list(inspect.signature(side).parameters)[1:]
        with blamed_on_user(side, self.equation):
            made = side(_Ops(), **{name: Tensor(name) for name in names})
        if not isinstance(made, Node):
            raise OperatorError(f"{place_of(side)}{self.equation}: a side is a node, as op.Mul(x, y), and not {made!r}")
        return made

    def _match(self, pattern: Node, node: gs.Node) -> tuple[gs.Node, dict[str, gs.Tensor], list[gs.Tensor]] | None:
        """The node, its tensors by the pattern's names, and what is computed between."""
        for found, inner in _matches(pattern, node, {}, []):
            return node, found, inner
        return None

    def _check(self, edit: Editor, found: Any) -> str | None:
        node, tensors, inner = found
        if len([t for t in node.outputs if t.name]) > 1:
            return "its node has several outputs"
        if not all(edit.only_use(t) for t in inner):
            return "what it computes on its way is read by others, too"
        if self.check is None:
            return None
        names = list(inspect.signature(self.check).parameters)
        if unknown := [name for name in names if name not in tensors]:
            raise OperatorError(
                f"{place_of(self.check)}{self.equation}: the left side has no {unknown[0]!r}, which check asks for"
            )
        with blamed_on_user(self.check, self.equation):
            return self.check(*(_seen(tensors[name]) for name in names))

    def _apply(self, edit: Editor, found: Any) -> None:
        node, tensors, _ = found
        names = list(inspect.signature(self.right).parameters)[1:]
        if unknown := [name for name in names if name not in tensors]:
            raise OperatorError(f"{place_of(self.right)}{self.equation}: the right side has {unknown[0]!r}, the left one has not")
        _Right(self, edit, node, tensors).add(self._side(self.right), node.outputs[0])


def rewrite(
    equation: str, left: Callable[..., Any], right: Callable[..., Any], check: Callable[..., str | None] | None = None
) -> OwnRewrite:
    """A rewrite of a pattern of your own in models' graphs, which comes before all others.

    equation     its name, as "x * tanh(x) => acme::Glow(x)"
    left, right  functions of `op` and of tensors, which give the last node of either side
    check        a function of some of the tensors (`shape`, `dtype`) that gives the reason why it does not hold, or None

    Raises OperatorError where `left` is no pattern of nodes.
    """
    made = OwnRewrite(equation, left, right, check)
    made._side(left)
    return made


def _seen(t: gs.Tensor) -> Shaped:
    return Shaped(tuple(t.shape), np.dtype(t.dtype).name)


def apply_own(edit: Editor) -> None:
    """Apply the user's rewrites to each node of the graph once, the first that holds."""
    rules = [one.rule for one in added().rewrites]
    for node in list(edit.graph.nodes) if rules else ():
        for rule in rules:
            if node.op not in rule.ops or not node.outputs:
                continue
            found = rule.match(node)
            if found is not None and rule.check(edit, found) is None:
                name = name_of(node)
                rule.apply(edit, found)
                edit.note(rule.equation, name)
                break


# --- The left side -----------------------------------------------------------------------------------------------------


def _matches(pattern: Node, node: gs.Node, known: dict[str, gs.Tensor], inner: list[gs.Tensor]) -> Any:
    """Ways in which a node is what a pattern says: tensors by name, and what is computed between."""
    domain = "" if node.domain in (None, "ai.onnx") else node.domain
    given = [t for t in node.inputs if t.name or isinstance(t, gs.Constant)]
    if (domain, node.op, len(given)) != (pattern.domain, pattern.op, len(pattern.inputs)):
        return
    if not all(_alike(node.attrs.get(name), value) for name, value in pattern.attributes.items()):
        return
    turned = node.op in COMMUTATIVE and not domain and len(given) == 2
    for inputs in (given, given[::-1]) if turned else (given,):
        yield from _all_match(list(zip(pattern.inputs, inputs, strict=True)), known, inner)


def _all_match(pairs: list[tuple[Any, gs.Tensor]], known: dict[str, gs.Tensor], inner: list[gs.Tensor]) -> Any:
    if not pairs:
        yield known, inner
        return
    (part, tensor), *rest = pairs
    for found, between in _of_tensor(part, tensor, known, inner):
        yield from _all_match(rest, found, between)


def _of_tensor(part: Any, tensor: gs.Tensor, known: dict[str, gs.Tensor], inner: list[gs.Tensor]) -> Any:
    if isinstance(part, Tensor):
        if known.get(part.name, tensor) is tensor:
            yield {**known, part.name: tensor}, inner
    elif isinstance(part, Node):
        if not isinstance(tensor, gs.Constant) and len(tensor.inputs) == 1:
            yield from _matches(part, tensor.inputs[0], known, [*inner, tensor])
    elif (number := scalar(tensor)) is not None and math.isclose(number, part, rel_tol=1e-6):
        yield known, inner


def _alike(given: Any, asked: Any) -> bool:
    given = tuple(given) if isinstance(given, list) else given
    asked = tuple(asked) if isinstance(asked, list) else asked
    if isinstance(given, float) and isinstance(asked, int | float):
        return math.isclose(given, asked, rel_tol=1e-6)
    return bool(given == asked)


# --- The right side ----------------------------------------------------------------------------------------------------


class _Right:
    """Adds the nodes of a right side to a graph."""

    def __init__(self, rewriting: OwnRewrite, edit: Editor, node: gs.Node, tensors: Mapping[str, gs.Tensor]) -> None:
        self.rewriting, self.edit, self.node, self.tensors = rewriting, edit, node, tensors

    def add(self, part: Node, into: gs.Tensor | None = None) -> gs.Tensor:
        inputs = [self._input(x, part) for x in part.inputs]
        said = self._type(part, inputs)
        if into is not None:
            old = _seen(into)
            if (said.shape, said.dtype) != (old.shape, old.dtype):
                raise self._wrong(f"its right side is {said.dtype} {said.shape}, and its left side {old.dtype} {old.shape}")
        y = self.edit.add(part.op, inputs, self.node, said.shape, into, **part.attributes)
        made = y.inputs[0]
        made.domain = part.domain or None
        y.dtype = np.dtype(said.dtype)
        return y

    def _input(self, x: Any, reader: Node) -> gs.Tensor:
        if isinstance(x, Node):
            return self.add(x)
        if isinstance(x, Tensor):
            return self.tensors[x.name]
        like = next((self.tensors[t.name] for t in reader.inputs if isinstance(t, Tensor)), self.node.outputs[0])
        return literal(self.edit.name(f"{name_of(self.node)}/number"), x, like.dtype)

    def _type(self, part: Node, inputs: list[gs.Tensor]) -> Shaped:
        operator = added().find(part.domain, part.op)
        try:
            if operator is not None:
                return self._of_own(operator, part, inputs)
            if part.domain not in STANDARD:
                raise self._wrong(f"nobody says what {part.domain}::{part.op} is: @tc.op does, in a file that is given, too")
            return _inferred(part, inputs)
        except TccompileError:
            raise
        except Exception as error:
            raise self._wrong(f"{part.op}: {error}") from error

    def _of_own(self, operator: Operator, part: Node, inputs: list[gs.Tensor]) -> Shaped:
        attributes = attributes_of(operator, part.attributes, self.rewriting.equation)
        return operator.shapes(operator.bound([_seen(t) for t in inputs], attributes))[0]

    def _wrong(self, what: str) -> OperatorError:
        return OperatorError(f"{place_of(self.rewriting.right)}{self.rewriting.equation} at node {name_of(self.node)!r}: {what}")


def _inferred(part: Node, inputs: list[gs.Tensor]) -> Shaped:
    """The type of a standard node's first output, by ONNX's own rules."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = onnx.helper.make_node(part.op, names, ["y"], **part.attributes)
    schema = onnx.defs.get_schema(part.op, UNIFORM)
    kinds = {
        name: onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape)
        for name, t in zip(names, inputs, strict=True)
    }
    values = {
        name: onnx.numpy_helper.from_array(np.asarray(t.values), name)
        for name, t in zip(names, inputs, strict=True)
        if isinstance(t, gs.Constant) and math.prod(t.shape) <= 64 and np.dtype(t.dtype).kind == "i"
    }
    found = onnx.shape_inference.infer_node_outputs(schema, node, kinds, values)
    made = static_type(found["y"])
    if made is None:
        raise ValueError("its shape does not follow from those of its inputs")
    return Shaped(made.shape, made.dtype.name)
