"""Axes whose extent the data decide: how many boxes are kept, how many elements are not zero.

Every such axis has a bound, which is its extent from here on, and a count: a tensor of one int64 that the model computes. Its
elements are the first ones; those beyond are what element 0 of the operator that began it would give, or anything. Nodes that
keep elements apart go on as they are. Those that mix along such an axis get elements that do not matter in the place of those
beyond (`counted/`), or are refused. The model's outputs say by `Counted` what a session cuts, and by which count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.helper

from tccompile.errors import UnsupportedError, UsageError
from tccompile.ir.extent import not_alike
from tccompile.load import contrib
from tccompile.load.constants import Weight, held, literal
from tccompile.load.nodes import all_nodes, reads
from tccompile.load.types import Type
from tccompile.load.valid import title

OWN = "tccompile"
"""The domain of what the standard has no operators for.

Choice    condition, a, b → a or b, while a graph is folded: of extents that differ the one that it says
Pick      condition, a, b → a or b, of which the other one need not be computed: see `ir/branches.py`
GatherEach  x (n, …), indices (n, …) → of each row of x its elements at that row's indices along an axis
Guard     indices, condition → these indices, while a graph is folded: 0 if the condition is not true
Places    x (n,) → (limit + 1,): see `ir.ops.Places`
Suppress  boxes, scores, order, all of them → booleans: see `ir.ops.Suppress`
Counted   x, counts → x, an output of the model; attributes have an axis, a limit and a node for each count
"""

MOVES = ("Cast", "Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that only move what they read."""

BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64

SMALL = 64
"""Elements of a tensor that may be a shape."""


@dataclass(frozen=True)
class Size:
    """An extent that the data decide: the tensor that says it, what it is at most, and the node that it begins at.

    limited  it is the user's word that it is no more
    """

    count: str
    limit: int
    node: str
    limited: bool = False


@dataclass(frozen=True)
class Rest:
    """What is left of a number beside an extent that the data decide."""

    whole: int
    size: Size


Number = int | Size
Axes = dict[int, Size]


class Folding(Protocol):
    """What is asked of who folds a graph."""

    graph: onnx.GraphProto
    kept: list[onnx.NodeProto]
    types: dict[str, Type]
    constants: dict[str, Weight]
    alias: dict[str, str]

    def visit(self, node: onnx.NodeProto) -> None: ...
    def infer(self, node: onnx.NodeProto) -> None: ...
    def type_of(self, name: str, node: onnx.NodeProto) -> Type: ...
    def resolved(self, name: str) -> str: ...
    def set_constant(self, name: str, weight: Weight) -> None: ...
    def values(self, name: str) -> np.ndarray | None: ...


Rule = Callable[["Sizes", onnx.NodeProto], bool]
"""Notes the axes of a node's results and gives False, replaces the node and gives True, or raises why it is refused."""


@dataclass(frozen=True)
class Rules:
    """By operator: where such axes begin, and by which inputs; what it does to them; operators that become others that have
    rules; what numbers a node makes of numbers; and which inputs hold sizes that may be computed."""

    counts: Mapping[str, tuple[Rule, tuple[int, ...]]]
    along: Mapping[str, Rule]
    split_up: Collection[str]
    numbers: Callable[[Sizes, onnx.NodeProto], np.ndarray | None]
    late: Mapping[str, tuple[int, ...]]


class Sizes:
    """What is known of such axes while a graph is folded, and the nodes that handle them."""

    def __init__(self, folder: Folding, rules: Rules, limits: Mapping[str, int]) -> None:
        self.folder, self.rules, self.limits = folder, rules, limits
        self.axes: dict[str, Axes] = {}
        self.numbers: dict[str, np.ndarray] = {}
        """What tensors hold that are shapes, or parts of them."""
        self.made: dict[tuple[Any, ...], Any] = {}
        self.safe: set[str] = set()
        """Indices that are those of elements, also where they are not there."""
        self.limited: list[Size] = []
        self.asked: set[str | None] = set()
        self.node = onnx.NodeProto()
        self.makers: dict[str, onnx.NodeProto] = {}
        self.seen = 0

    def visit(self, node: onnx.NodeProto) -> bool:
        """Notes the axes of what the node makes: True if it has been replaced, False if it is to be handled as others are."""
        if node.domain == OWN and node.op_type in self.rules.counts:
            return self._by(self.rules.counts[node.op_type][0], node)
        if node.domain == OWN:
            self.folder.kept.append(node)
            return True
        if node.domain not in ("", "ai.onnx"):
            return self._refused_inside(node, node.domain in contrib.DOMAINS or node.domain.startswith(f"{OWN}."))
        if node.op_type in self.rules.counts:
            made, deciding = self.rules.counts[node.op_type]
            if not all(node.input[i] in self.folder.constants for i in deciding):
                return self._by(made, node)
        if any(node.input[i : i + 1] and self.is_late(node.input[i]) for i in self.rules.late.get(node.op_type, ())):
            return self._by(self.rules.along[node.op_type], node)
        if not self.axes and not self.numbers:
            return False
        if (found := self.rules.numbers(self, node)) is not None:
            if all(isinstance(n, int) for n in found.flat):
                return self._known(node, found)
            self.numbers[node.output[0]] = found
        if (rule := self.rules.along.get(node.op_type)) is not None:
            counted = [x for x in node.input if x in self.axes]
            moved = counted if node.op_type != "Gather" else node.input[:1]  # indices that are safe read what need not be
            if node.op_type in MOVES and all(x in self.safe for x in moved):
                self.safe.update(node.output)
            return (bool(counted) or any(x in self.numbers for x in node.input)) and self._by(rule, node)
        return node.op_type not in ("If", "Loop", "Scan") and self._refused_inside(node, node.op_type in self.rules.split_up)

    def _known(self, node: onnx.NodeProto, numbers: np.ndarray) -> bool:
        """The node makes numbers that do not depend on the data after all."""
        self.folder.infer(node)
        made = self.folder.types.pop(node.output[0])
        self.folder.set_constant(node.output[0], literal("", numbers.astype(made.dtype).reshape(made.shape)))
        return True

    def _refused_inside(self, node: onnx.NodeProto, split_up: bool) -> bool:
        """Raises for what reads such an axis and has no rule; not for what becomes other nodes, which are looked at then."""
        inputs = set(node.input) if split_up else ()
        for name in reads(node):
            if name in self.axes and name not in inputs:
                self.node = node
                raise self.refuse(name, next(iter(self.axes[name])))
        return False

    def _by(self, rule: Rule, node: onnx.NodeProto) -> bool:
        before, self.node = self.node, node
        try:
            done = rule(self, node)
        finally:
            self.node = before
        return done

    # --- what is known

    @cached_property
    def names(self) -> set[str]:
        """Those of the model's tensors, of which some are yet to be made."""
        return {name for node in all_nodes(self.folder.graph.node) for name in (*node.input, *node.output)}

    def is_late(self, name: str) -> bool:
        """Whether a tensor is computed of the data, and not of how much there is of something."""
        return bool(name) and name not in self.folder.constants and name not in self.numbers

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that a tensor is computed by, among those that are kept."""
        for node in self.folder.kept[self.seen :]:
            self.makers.update(dict.fromkeys(node.output, node))
        self.seen = len(self.folder.kept)
        return self.makers.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.folder.type_of(name, self.node).shape

    def elem(self, name: str) -> int:
        return self.folder.type_of(name, self.node).elem

    def of(self, name: str) -> Axes:
        return self.axes.get(name, {})

    def numbers_in(self, name: str) -> np.ndarray | None:
        """What a tensor holds that may be a shape, an array of `Number`s and `Rest`s, if that is known."""
        if name in self.numbers:
            return self.numbers[name]
        weight = self.folder.constants.get(name)
        if weight is None or held(weight).size > SMALL or held(weight).dtype.kind not in "biu":
            return None
        values = np.empty(weight.shape, object)
        values.reshape(-1)[:] = [int(v) for v in weight.values.reshape(-1)]
        return values

    def number(self, name: str) -> tuple[Number, ...] | None:
        """The same one after the other, if there is no `Rest`."""
        found = self.numbers_in(name)
        return None if found is None or any(isinstance(n, Rest) for n in found.flat) else tuple(found.flat)

    def integers(self, i: int, default: Sequence[int] | None = None) -> list[int] | None:
        """The constant integers of the node's input i."""
        if i >= len(self.node.input) or not self.node.input[i]:
            return None if default is None else list(default)
        found = self.number(self.node.input[i])
        if found is None or not all(isinstance(n, int) for n in found):
            return None
        return [int(n) for n in found]  # type: ignore[arg-type]

    def attribute(self, name: str, default: Any = None) -> Any:
        return next((onnx.helper.get_attribute_value(a) for a in self.node.attribute if a.name == name), default)

    def says(self, y: str, axes: Mapping[int, Size]) -> bool:
        """Notes the axes of a result; the node is handled as others are."""
        if y and axes:
            self.axes[y] = dict(axes)
        return False

    def axis_of(self, name: str, size: Size) -> int:
        return next(axis for axis, found in self.of(name).items() if found == size)

    def refuse(self, name: str, axis: int, why: str = "") -> UnsupportedError:
        """The error that names the node and the axis."""
        size = self.axes[name][axis]
        reason = why or f"{self.node.op_type} along or across it is not supported"
        return UnsupportedError(
            f"{title(self.node)}: how much there is along axis {axis} of {name!r} is known only when the model runs, since "
            f"{size.node} decides it, and {reason}: end the model before this node, and compute the rest in the application"
        )

    # --- nodes

    def add(self, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """A node of our own, which is folded at once: the name of its first result."""
        return self.add_all(op, inputs, 1, domain, **attributes)[0]

    def add_all(self, op: str, inputs: Sequence[str], outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        base = next(iter(self.node.output), "") or self.node.name
        names = [self.fresh(f"{base}/{op}") for _ in range(outputs)]
        node = onnx.helper.make_node(op, inputs, names, self.node.name or base, domain=domain, **attributes)
        before = self.node
        self.folder.visit(node)
        self.node = before
        return [self.folder.resolved(name) for name in names]

    def own(self, op: str, inputs: Sequence[str], made: Type, **attributes: Any) -> str:
        """A node of the domain OWN, whose type no rule of ONNX's gives."""
        (name,) = self.add_all(op, inputs, 1, OWN, **attributes)
        self.folder.types[name] = made
        return name

    def fresh(self, base: str) -> str:
        """A name that no tensor has."""
        number, name = self.made.get(("name", base), 0), ""
        while not name or name in self.names or name in self.folder.types or name in self.folder.constants:
            name, number = f"{base}{number or ''}", number + 1
        self.made["name", base] = number
        return name

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """The name of a constant. Equal ones are one, but for extents in a range, which are equal at some sizes only."""
        array = np.asarray(values, dtype)
        key = "constant", array.dtype.str, array.shape, array.tobytes()
        if key not in self.made or not (not_alike() or np.abs(array).max(initial=0) <= 1):
            self.made[key] = self.fresh("sizes")
            self.folder.set_constant(self.made[key], literal("", array))
        return str(self.made[key])

    def as_count(self, flag: str) -> str:
        """One integer, which is 1 if a boolean is true, and 0 if it is not."""
        return self.add("Reshape", [self.add("Cast", [flag], to=INT64), self.constant([1])])

    def one_of(self, condition: str, both: Sequence[str], branch: str) -> str:
        """One of two tensors of one type, by a condition; if `branch` is a name, the other one need not be computed."""
        if not branch:
            return self.add("Where", [condition, *both])
        return self.own("Pick", [condition, *both], self.folder.type_of(both[0], self.node), branch=branch)

    def instead(self, op: str, inputs: Sequence[str], **attributes: Any) -> bool:
        """The node becomes another one, with the same results, which is handled as others are."""
        node = onnx.helper.make_node(op, inputs, list(self.node.output), self.node.name, **attributes)
        self.folder.visit(node)
        return True

    # --- sizes

    def limit(self) -> int | None:
        """How much the user says that this node finds at most."""
        name = next((n for n in (self.node.name, *self.node.output) if n in self.limits), None)
        self.asked.add(name)
        return None if name is None else self.limits[name]

    def size(self, count: str, limit: int, limited: bool = False) -> Size:
        """An axis that begins at this node."""
        made = Size(count, limit, title(self.node), limited)
        self.limited += [made] if limited else []
        return made

    def combined(self, fn: str, a: Number, b: Number) -> Number:
        """A number made of two: "Add", "Sub" (not below 0), "Mul", "Div", "Min" or "Max"."""
        of: Any = {
            "Add": lambda x, y: x + y, "Sub": lambda x, y: x - y, "Mul": lambda x, y: x * y,
            "Div": lambda x, y: x // y, "Min": min, "Max": max,
        }[fn]  # fmt: skip
        if isinstance(a, int) and isinstance(b, int):
            return int(of(a, b))
        if fn == "Min" and isinstance(a, Size) and isinstance(b, Size):
            a, b = sorted((a, b), key=lambda size: size.count)
        elif fn in ("Min", "Max", "Add", "Mul") and isinstance(a, int):
            a, b = b, a
        if a == b and fn in ("Min", "Max"):
            return a
        if isinstance(a, Size) and isinstance(b, int):
            neutral = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}.get(fn)
            if b == neutral or (fn == "Min" and b >= a.limit) or (fn == "Max" and b <= 0):
                return a
        key = (fn, *(n.count if isinstance(n, Size) else n for n in (a, b)))
        if key not in self.made:
            most = [n.limit if isinstance(n, Size) else n for n in (a, b)]
            limit = of(*most) if fn != "Sub" or isinstance(b, int) else most[0]
            inputs = [n.count if isinstance(n, Size) else self.constant([n]) for n in (a, b)]
            count = self.add(fn, inputs)
            if fn == "Sub":
                count = self.add("Max", [count, self.constant([0])])
            node = next(n.node for n in (a, b) if isinstance(n, Size))
            self.made[key] = Size(count, max(limit, 0), node)
            self.made["parts", count] = (fn, a, b)
        return self.made[key]  # type: ignore[no-any-return]

    def rest(self, whole: int, size: Number) -> Rest | None:
        """What is left of a number that is no less than an extent can be."""
        return Rest(whole, size) if isinstance(size, Size) and size.limit <= whole else None

    def inside(self, size: Size, extent: int, after: int = 0) -> str:
        """Booleans along an axis, with so many axes of one element after it: which of its elements there are."""
        key = "inside", size.count, extent, after
        if key not in self.made:
            places = self.constant(np.arange(extent).reshape(extent, *[1] * after))
            self.made[key] = self.add("Less", [places, size.count])
            self.axes[self.made[key]] = {0: size}
        return str(self.made[key])

    def masked(self, name: str, axis: int, fill: Any) -> str:
        """The tensor with a number in the place of what is not there along an axis, which has its bound's extent now."""
        shape, dtype = self.shape(name), self.folder.type_of(name, self.node).dtype
        inside = self.inside(self.axes[name][axis], shape[axis], len(shape) - 1 - axis)
        y = self.add("Where", [inside, name, self.constant(fill, dtype)])
        others = {a: size for a, size in self.of(y).items() if a != axis}
        self.axes.pop(y, None)
        self.says(y, others)
        return y

    @contextmanager
    def as_bounds(self, *names: str) -> Iterator[None]:
        """Tensors whose axes have their bounds for extents, for nodes that go on elements that are not there as well."""
        before = {name: self.axes.pop(name) for name in names if name in self.axes}
        yield
        self.axes.update(before)

    # --- the end

    def finish(self) -> None:
        """Says of the model's outputs what a session cuts. Raises UsageError for limits of what finds nothing."""
        folder = self.folder
        for name in self.limits:
            if name not in self.asked:
                said = f"--limit {name}={self.limits[name]}"
                raise UsageError(f"{said}: no node of this name has a result whose extent the data decide")
        for i, name in enumerate(v.name for v in folder.graph.output):
            found = {a: size for a, size in self.of(folder.resolved(name)).items()}
            cuts = [(axis, size) for axis, size in found.items()] + [(-1, size) for size in self.limited if not i]
            if not cuts:
                continue
            target, bound = folder.resolved(name), self.fresh(f"{name}/bound")
            if target == name:
                self._renamed(name, bound)
                target = bound
            made = folder.constants[target] if target in folder.constants else folder.types[target]
            elem = made.elem if isinstance(made, Type) else onnx.helper.np_dtype_to_tensor_dtype(made.dtype)
            folder.alias.pop(name, None)
            folder.constants.pop(name, None)
            folder.types[name] = Type(elem, made.shape)
            folder.kept.append(
                onnx.helper.make_node(
                    "Counted", [target, *(size.count for _, size in cuts)], [name], f"{name}/counted", domain=OWN,
                    axes=[axis for axis, _ in cuts], limits=[size.limit for _, size in cuts],
                    nodes=[size.node for _, size in cuts],
                )
            )  # fmt: skip

    def _renamed(self, name: str, to: str) -> None:
        """A tensor gets another name, so that an output of the model can have its own."""
        folder = self.folder
        for node in folder.kept:
            node.input[:] = [to if x == name else x for x in node.input]
            node.output[:] = [to if y == name else y for y in node.output]
        folder.alias.update({old: to for old, new in folder.alias.items() if new == name})
        self.says(to, self.of(name))
        if name in folder.types:
            folder.types[to] = folder.types.pop(name)
        else:
            folder.constants[to] = folder.constants.pop(name)
