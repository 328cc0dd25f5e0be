"""What a node of Microsoft's domains becomes: standard nodes, made one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.helper
from onnx import numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.ir.extent import Shape
from tccompile.load.valid import attributes, invalid, title

if TYPE_CHECKING:
    from tccompile.load.types import Type

MICROSOFT = "com.microsoft"
FLOAT = onnx.TensorProto.FLOAT
MOST_INPUTS = 24
MOST_ROWS = 2**22


class Nodes:
    """The nodes that a node becomes, which are visited as if the model had them."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = node
        self.nodes: list[onnx.NodeProto] = []

    def add(self, op: str, inputs: Sequence[str], y: str = "", domain: str = "", **attributes: Any) -> str:
        """The name of what one more node computes."""
        y = y or self.fresh()
        self.nodes.append(self._made(op, inputs, [y], domain, attributes))
        return y

    def add_many(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> list[str]:
        """One more node of several outputs, whose names it gives; these are given where they are not ""."""
        names = [y or f"{self.fresh()}/{i}" for i, y in enumerate(outputs)]
        self.nodes.append(self._made(op, inputs, names, domain, attributes))
        return names

    def _made(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str, attributes: Any) -> onnx.NodeProto:
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        return onnx.helper.make_node(op, inputs, outputs, self.node.name or self.fresh(), domain=domain, **attributes)

    def fresh(self) -> str:
        """A name that no other tensor has."""
        return f"{next(y for y in self.node.output if y)}/{self.node.op_type} {len(self.nodes)}"


class Parts(Nodes):
    """A node with what is known of it, and the standard nodes that it stands for.

    inputs      the names of its inputs, "" where one is left out, and after the last
    outputs     the same of its outputs
    attributes  their values by name, strings as such
    block       how many channels a block of `blocked` has, if that is known
    """

    def __init__(
        self, node: onnx.NodeProto, types: Mapping[str, Type], values: Callable[[str], np.ndarray | None], block: int | None
    ) -> None:
        super().__init__(node)
        self.types = types
        self.values = values
        self.block = block
        self.inputs = [*node.input, *[""] * MOST_INPUTS]
        self.outputs = [*node.output, *[""] * 4]
        self.attributes = attributes(node)

    # --- what is known

    def shape(self, i: int) -> Shape:
        """Of input i, which must be there."""
        if not self.inputs[i]:
            raise invalid(self.node, f"its input {i} is left out; the operator cannot do without")
        return self.types[self.inputs[i]].shape

    def dtype(self, i: int) -> np.dtype:
        """Of input i, which is there."""
        return self.types[self.inputs[i]].dtype

    def value(self, i: int, what: str) -> np.ndarray:
        """The values of input i, which must be a constant."""
        values = self.values(self.inputs[i])
        if values is None:
            raise self.refused(f"its {what} ({self.inputs[i]}) is computed when the model runs", "make it a constant")
        return values

    def need(self, holds: bool, why: str) -> None:
        """Raises ModelError unless what the operator asks for holds."""
        if not holds:
            raise invalid(self.node, why)

    def need_shape(self, i: int, what: str, *allowed: Shape) -> None:
        """Input i, which is called `what`, must have one of these shapes if it is there."""
        if self.inputs[i] and self.shape(i) not in allowed:
            wanted = " or ".join("×".join(map(str, shape)) or "a scalar" for shape in allowed)
            raise invalid(self.node, f"its {what} is {'×'.join(map(str, self.shape(i))) or 'a scalar'}; it must be {wanted}")

    def refused(self, why: str, way_out: str) -> UnsupportedError:
        """The error about something that the operator can do and that is not done here."""
        return UnsupportedError(f"{title(self.node)} is not supported: {why}; {way_out}")

    def only(self, *numbers: int) -> None:
        """Refuses the use of any output but the first and these, which training asks for."""
        for i, name in enumerate(self.node.output[1:], 1):
            if name and i not in numbers:
                raise self.refused(f"its output {i} ({name}) is used", "leave the output away: training alone needs it")

    # --- what it becomes

    def constant(self, values: Any) -> str:
        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(values), "values"))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def counted(self, count: int, first: int = 0, dtype: type = np.int64) -> str:
        """first, first + 1, … so many of them: by a node, which a plan for a range of sizes may keep."""
        if count > MOST_ROWS:
            raise self.refused(f"it has {count} rows or keys", f"at most {MOST_ROWS} are supported")
        return self.add("Range", [self.constant(np.array(n, dtype)) for n in (first, first + count, 1)])

    def number(self, value: float, like: str) -> str:
        """A number in the type of another tensor."""
        return self.add("CastLike", [self.constant(np.float32(value)), like])

    def reshaped(self, x: str, *shape: int, y: str = "") -> str:
        return self.add("Reshape", [x, self.integers(*shape)], y)

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        return self.add_many("Split", [x, self.integers(*sizes)], [""] * len(sizes), axis=axis)

    def sliced(self, x: str, axis: int, start: int, end: int, y: str = "") -> str:
        return self.add("Slice", [x, self.integers(start), self.integers(end), self.integers(axis)], y)

    def channels_first(self, x: str, rank: int) -> str:
        return self.add("Transpose", [x], perm=[0, rank - 1, *range(1, rank - 1)])

    def channels_last(self, x: str, rank: int, y: str = "") -> str:
        return self.add("Transpose", [x], y, perm=[0, *range(2, rank), 1])

    def activated(self, x: str, name: str, parameters: Mapping[str, float], y: str = "") -> str:
        """ACTIVATIONS[name](x), with those of the parameters that it has; no activation is the identity."""
        if name and name not in ACTIVATIONS:
            raise self.refused(f"its activation is {name!r}", f"use {', '.join(ACTIVATIONS)}, or a node of its own")
        known: dict[str, Any] = {key: float(value) for key, value in parameters.items() if key in ACTIVATIONS.get(name, ())}
        if name == "Clip":
            bounds = [self.number(known[key], x) if key in known else "" for key in ("min", "max")]
            return self.add("Clip", [x, *bounds], y)
        return self.add(name or "Identity", [x], y, **known)


ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "Gelu": (),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}
"""Activations that are part of another operator, by what their parameters are called, in the order in which they are listed."""

Operator = Callable[[Parts], None]
"""Adds the nodes that compute the outputs."""
