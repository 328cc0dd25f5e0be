"""One pass over a graph whose input shapes are known: infers every shape, and folds away whatever does not depend on inputs.

Shapes are static, so `Shape` is a constant at once, and all arithmetic on shapes folds with it. Types come from ONNX's own
rules, one node at a time; values from NumPy or ONNX's reference evaluator.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.parser
import onnx.reference
import onnx.shape_inference

from tccompile.custom.files import added
from tccompile.errors import ModelError, UnsupportedError, blamed_on
from tccompile.ir.extent import ceil_div
from tccompile.ir.metadata import part
from tccompile.ir.weights import SMALL
from tccompile.load import classical, contrib, custom
from tccompile.load.constants import Weight, held, literal, remembered
from tccompile.load.counted.rules import sizes
from tccompile.load.late import is_late, note, note_all
from tccompile.load.narrow import wide
from tccompile.load.nodes import (
    LARGE,
    constant_node,
    first_line,
    reads,
    rename_inputs,
    subgraphs,
)
from tccompile.load.opset import UNIFORM, Scope, upgrade_nodes
from tccompile.load.sizes import OWN
from tccompile.load.types import Type, static_type
from tccompile.load.unroll import Unroller
from tccompile.load.valid import DECIDES, Shapes, attributes, invalid, title, wrong_attribute, wrong_shapes, wrong_type
from tccompile.load.values import TRANSFORMED, attribute, reference

log = logging.getLogger(__name__)

MAX_NODES = 2**20
MAX_BYTES = 2**40  # of one tensor
MAX_PARTS = 2**14  # tensors that one is split into
MAX_EXTENT = 2**31
LARGE_VIEW = 2**29  # the same for one that takes no memory as long as nothing is done with it
ROOM = 2**30  # bytes that all folded constants may take together, beside 32 times what the model's own take

RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
WORK = 2**32  # elements that folding may read and make, beside 64 times the model's own
PER_ELEMENT = 16  # multiplications of floats in a product that take no longer than an element elsewhere
GATHERED = 64  # elements elsewhere that take no longer than one of a convolution's windows, which the evaluator gathers

LEFT = {
    "Attention", "AveragePool", "Col2Im", "ConvInteger", "ConvTranspose", "DeformConv", "Dropout", "GRU", "GridSample",
    "LRN", "LSTM", "LpNormalization", "LpPool", "MaxPool", "MaxRoiPool", "QLinearConv", "RNN", "RoiAlign", "TfIdfVectorizer",
}  # fmt: skip
"""Operators that do not fold: ONNX's reference evaluator takes no magnitudes for LpNormalization, ignores attributes of recurrent
layers, and the time that TfIdfVectorizer takes is an attribute's to choose. So it is of windows and samples, or their memory."""

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
MOVES = (
    "Concat", "DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip

LIKE_INPUT = ("GroupNormalization", "MeanVarianceNormalization")  # the operators that have no rule for their output's type
FUNCTIONS = {
    "BlackmanWindow", "CausalConvWithState", "CenterCropPad", "DynamicQuantizeLinear", "HammingWindow",
    "HannWindow", "LinearAttention", "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "Range",
    "RotaryEmbedding", "SoftmaxCrossEntropyLoss", "SwiGLU",
}  # fmt: skip
"""Operators that are taken apart, as the standard defines them, where they do not fold."""

ORDERED = {"ArgMax", "ArgMin", "Hardmax", "TopK"}
"""Ops in which ONNX's evaluator has another place for NaN than ONNX Runtime."""

ANY_AXIS = {"ConcatFromSequence", "DequantizeLinear", "Flatten", "OneHot", "QuantizeLinear", "SequenceAt", "SplitToSequence"}
"""Operators whose axis may be beyond those of their first input, or means nothing for a scalar."""

SEQUENCE_PLACES = {"SequenceAt": 1, "SequenceErase": 1, "SequenceInsert": 2}
"""Operators of sequences, and which of their inputs is a place in one."""

COUNTED = {"NonZero", "Unique"}
"""Operators that make as many elements as there are of some kind in their data."""

CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}


def _read_by(graph: onnx.GraphProto) -> set[str]:
    """The names that nodes read, those of graphs inside them too, and the graph's outputs."""
    inner = (name for node in graph.node for part in subgraphs(node) for name in _read_by(part))
    return {*(name for node in graph.node for name in node.input), *(v.name for v in graph.output), *inner}


def _factors(graph: onnx.GraphProto) -> set[str]:
    """The results of dequantized bytes that products take whose other operand is quantized, too, or what only moves such: they
    multiply integers."""
    made = {y: node for node in graph.node if node.domain in ("", "ai.onnx", *contrib.DOMAINS) for y in node.output}

    def quantized(name: str) -> str | None:
        node = made.get(name)
        if node is not None and node.op_type == "Transpose" and node.input:
            node = made.get(node.input[0])
        return node.output[0] if node is not None and node.op_type == "DequantizeLinear" else None

    moved: set[str] = set()  # nodes are in topological order
    for node in graph.node:
        if node.op_type in MOVES and node.input:
            read = node.input if node.op_type == "Concat" else node.input[:1]
            if all(quantized(name) or name in moved for name in read):
                moved.update(node.output)
    found: set[str] = set()
    for node in graph.node:
        if node.op_type in PRODUCTS and len(node.input) > 1:
            factors = [quantized(name) for name in node.input[:2]]
            if all(factor or name in moved for factor, name in zip(factors, node.input, strict=False)):
                found.update(filter(None, factors))
    return found


def fold(
    graph: onnx.GraphProto,
    constants: dict[str, Weight],
    domains: Mapping[str, int],
    block: int | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Type]:
    """Folds the graph in place, adding to `constants`; gives the type of every tensor that is left.

    Nodes are in topological order and of opset 23, inputs have static shapes, constants are in `constants` alone; `block` is how
    many channels a block has, and `limits` how much nodes find in the data at most, if the user says it.
    """
    return Folder(graph, constants, domains, block, limits).run()


class Folder:
    """Walks the nodes once, in order: each is folded into a constant, replaced by others that are visited next, or kept."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        constants: dict[str, Weight],
        domains: Mapping[str, int],
        block: int | None = None,
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.graph = graph
        self.constants = constants
        self.opsets = [onnx.helper.make_opsetid(d, v) for d, v in domains.items()]
        self.domains = domains
        self.alias: dict[str, str] = {}  # tensors that are the same as another
        self.sequences: dict[str, list[str]] = {}  # the tensors of each sequence
        self.absent: set[str] = set()  # optional values that are not there
        self.present: dict[str, str] = {}  # of those that need not be there, the tensors that say it
        self.types: dict[str, Type] = {}
        self.said = {v.name: t for v in (*graph.value_info, *graph.output) if (t := static_type(v.type))}
        self.kept: list[onnx.NodeProto] = []
        self.pending = deque(graph.node)
        self.said_block = block

        self.control = Unroller(self)
        self.sizes = sizes(self, limits)
        self.factors = _factors(graph)
        self.given_out = {v.name for v in graph.output}
        self.unused = {y for node in graph.node for y in node.output} - _read_by(graph)
        self.room = ROOM + 32 * sum(held(w).nbytes for w in constants.values())
        self.work = WORK + 64 * sum(held(w).size for w in constants.values())

    def run(self) -> dict[str, Type]:
        for value in self.graph.input:
            self.types[value.name] = static_type(value.type)  # type: ignore[assignment]
        self.go_on(self.visit)
        self.open_outputs()
        self.sizes.finish()
        note_all(self.constants, self.kept)
        self.name_outputs()
        self.drop_unused()
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(self.kept)
        return self.types

    def go_on(self, visit: Callable[[onnx.NodeProto], None]) -> None:
        """Visits the nodes that are pending, and those that come in their place."""
        while self.pending:
            node = self.pending.popleft()
            rename_inputs(node, self.alias)
            with blamed_on(title(node)):
                visit(node)
            if len(self.kept) + len(self.pending) > MAX_NODES:
                raise UnsupportedError(
                    f"the model has more than 2^20 nodes, loops and functions taken apart, at {title(node)}: split it there"
                )

    def apart(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Visits these nodes before those that are pending. Raises what is wrong with one, also where errors are collected."""
        rest, self.pending = self.pending, deque(nodes)
        try:
            self.go_on(partial(Folder.visit, self))
        finally:
            self.pending = rest

    def visit(self, node: onnx.NodeProto) -> None:
        standard = node.domain in ("", "ai.onnx")
        if (operator := added().find(node.domain, node.op_type)) is not None:
            self.types |= custom.types_of(operator, node, [self.type_of(name, node) if name else None for name in node.input])
            self.kept.append(node)
            return
        if (standard or node.domain in contrib.DOMAINS) and (wrong := wrong_attribute(node)):
            raise invalid(node, wrong)
        if self.sizes.visit(node) or self.control.visit(node):
            return
        if node.domain in contrib.DOMAINS:
            types = {name: self.type_of(name, node) for name in node.input if name}
            block = self.block if node.domain == contrib.BLOCKED else None
            self.instead(*contrib.taken_apart(node, types, self.values, block))
            return
        if node.domain == classical.DOMAIN:
            given = [classical.Given(t.elem, t.shape) for t in (self.type_of(name, node) for name in node.input)]
            if (parts := classical.taken_apart(node, given, self.is_used, self.domains[node.domain])) is not None:
                self.instead(*parts)
            else:
                self.types[node.output[0]] = Type(*classical.type_of_trees(node, given[0]))
                self.kept.append(node)
            return
        if standard and (self.simplify(node) or self.take_apart(node)):
            return
        self.infer(node)
        if self.empty(node):
            return
        inputs = [self.constants.get(name) for name in node.input if name]
        if standard and is_late(*node.output) and (node.op_type != "Range" or all(c is not None for c in inputs)):
            if node.op_type == "ConstantOfShape":
                del self.types[node.output[0]]
                self.instead(*_expanded(node))
            else:
                self.kept.append(node)
            return
        if standard and all(c is not None for c in inputs) and self.may_fold(node, inputs):  # type: ignore[arg-type]
            self.work -= self.work_of(node, inputs)  # type: ignore[arg-type]
            result = self.evaluate(node)
            if result is not None:
                note(node)
                for name, weight in zip(node.output, result, strict=False):
                    if name:
                        del self.types[name]
                        self.set_constant(name, weight)
                        if not any(np.may_share_memory(held(weight), held(c)) for c in inputs):  # type: ignore[union-attr]
                            self.room -= held(weight).nbytes
                return
        if standard and _is_function(node) and (body := self.body(node)):
            for name in filter(None, node.output):
                del self.types[name]
            self.instead(*body)
            return
        self.kept.append(node)

    @cached_property
    def block(self) -> int | None:
        """How many channels a block has."""
        shapes = {name: weight.shape for name, weight in self.constants.items()}
        return contrib.block_of(self.graph.node, shapes, self.said_block)

    def values(self, name: str) -> np.ndarray | None:
        """The values of a constant, or None for what is none."""
        return self.constants[name].values if name in self.constants else None

    def body(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that a node of FUNCTIONS stands for, by ONNX's definition of it for these attributes and types."""
        version = self.domains.get("", UNIFORM)
        schema: Any = onnx.defs.get_schema(node.op_type, version, "")  # its type says nothing of functions
        if node.op_type == "MeanVarianceNormalization":
            text = _mean_variance()
        elif schema.has_function:
            known = [v for v in schema.function_opset_versions if v <= version]
            text = schema.get_function_with_opset_version(max(known))
        elif schema.has_context_dependent_function:
            known = [v for v in schema.context_dependent_function_opset_versions if v <= version]
            types = [self.type_of(name, node).proto.SerializeToString() if name else b"" for name in node.input]
            text = schema.get_context_dependent_function_with_opset_version(max(known), node.SerializeToString(), types)
        else:
            return []
        function = onnx.FunctionProto.FromString(text)
        prefix = next(filter(None, node.output))
        names = {name: f"{prefix}/{name}" for n in function.node for name in n.output if name}
        for own, given in ((function.input, node.input), (function.output, node.output)):
            names |= dict(zip(own, [*given, *[""] * len(own)], strict=False))
        attributes = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
        attributes |= {a.name: a for a in node.attribute}
        nodes = []
        for inner in function.node:
            n = onnx.NodeProto()
            n.CopyFrom(inner)
            n.name = f"{prefix}/{inner.output[0]}"
            n.output[:] = [names.get(y, y) for y in n.output]
            del n.attribute[:]
            for a in inner.attribute:
                source = attributes.get(a.ref_attr_name) if a.ref_attr_name else a
                if source is not None:
                    n.attribute.add().CopyFrom(source)
                    n.attribute[-1].name = a.name
            rename_inputs(n, names)
            nodes.append(n)
        opset = next((o.version for o in function.opset_import if o.domain in ("", "ai.onnx")), version)
        taken = {*self.types, *self.constants, *names.values()}
        return nodes if opset >= UNIFORM else upgrade_nodes(nodes, opset, Scope(lambda name: None, taken))

    def is_used(self, name: str) -> bool:
        """Whether a node or an output of the model may read it."""
        return name not in self.unused

    # --- what needs no evaluation

    def simplify(self, node: onnx.NodeProto) -> bool:
        """Removes the node if it computes nothing: True if that was so."""
        match node.op_type:
            case "Identity" | "Cast" | "CastLike" | "Dropout" | "Shape" | "Size" | "EyeLike" if node.input[0] in self.constants:
                x = self.type_of(node.input[0], node)
            case "Identity" | "Cast" | "CastLike" | "Dropout" | "Shape" | "Size" | "EyeLike":
                if node.input[0] not in self.types:
                    return False
                x = self.types[node.input[0]]
        match node.op_type:
            case "Constant":
                self.set_constant(node.output[0], constant_node(node))
                return True
            case "CastLike":
                to = self.type_of(node.input[1], node).elem
                node.op_type = "Cast"
                del node.attribute[:], node.input[1:]
                node.attribute.append(onnx.helper.make_attribute("to", to))
                return self.simplify(node)
            case "BitCast" if self.wraps(node):
                node.op_type = "Cast"
                return self.simplify(node)
            case "Cast" if onnx.helper.get_node_attr_value(node, "to") == x.elem:
                self.same(node.output[0], node.input[0])
                return True
            case "Identity":
                self.same(node.output[0], node.input[0])
                return True
            case "Dropout" if not self.trains(node):
                self.same(node.output[0], node.input[0])
                if len(node.output) > 1 and node.output[1]:
                    if math.prod(x.shape) > LARGE_VIEW:
                        raise UnsupportedError(
                            f"{title(node)} of {x.shape} would have a constant of more than {LARGE_VIEW} bytes for its mask, "
                            "which is true everywhere: leave that output out"
                        )
                    self.set_constant(node.output[1], literal("", np.broadcast_to(np.True_, x.shape)))
                return True
            case "Shape":
                start, end = (attribute(node, n, d) for n, d in (("start", 0), ("end", len(x.shape))))
                self.set_constant(node.output[0], literal("", x.shape[start:end], np.int64))
                return True
            case "Size":
                self.set_constant(node.output[0], literal("", math.prod(x.shape), np.int64))
                return True
            case "EyeLike" if len(x.shape) == 2:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(attribute(node, "dtype", x.elem))
                if math.prod(x.shape) * dtype.itemsize > LARGE:
                    raise UnsupportedError(
                        f"{title(node)} of {x.shape} would be a constant of more than {LARGE} bytes; "
                        "multiplying by it changes nothing: leave it out"
                    )
                self.set_constant(node.output[0], literal("", np.eye(*x.shape, attribute(node, "k", 0), dtype)))
                return True
        return False

    def wraps(self, node: onnx.NodeProto) -> bool:
        """Whether the bits of a BitCast are those of a Cast: integers of one size, and what is true as a byte."""
        given = self.type_of(node.input[0], node).dtype
        made = onnx.helper.tensor_dtype_to_np_dtype(onnx.helper.get_node_attr_value(node, "to"))
        return given.kind in "biu" and made.kind in "iu" and given.itemsize == made.itemsize

    def empty(self, node: onnx.NodeProto) -> bool:
        """Removes the node if its outputs have no elements: True if that was so."""
        types = {name: self.types[name] for name in node.output if name}
        if not all(0 in t.shape and t.dtype.kind in "biuf" for t in types.values()):
            return False
        for name, t in types.items():
            del self.types[name]
            self.set_constant(name, literal("", np.empty(t.shape, t.dtype)))
        return True

    def trains(self, node: onnx.NodeProto) -> bool:
        if len(node.input) < 3 or not node.input[2]:
            return False
        mode, ratio = self.constants.get(node.input[2]), self.constants.get(node.input[1])
        return mode is None or (bool(mode.values.any()) and (ratio is None or bool(ratio.values.any())))

    def same(self, name: str, as_name: str) -> None:
        """`name` is another name of the tensor `as_name`."""
        if as_name in self.constants:
            self.set_constant(name, self.constants[as_name])
            note(onnx.helper.make_node("Identity", [as_name], [name]))
        else:
            self.alias[name] = as_name

    def resolved(self, name: str) -> str:
        """The tensor that a name stands for, among those that have been folded."""
        return self.alias.get(name, name)

    def set_constant(self, name: str, weight: Weight) -> None:
        self.constants[name] = Weight(name, held(weight), weight.recipe)

    def take_apart(self, node: onnx.NodeProto) -> bool:
        """Removes the node if it handles a sequence whose tensors are known one by one: True if that was so."""
        y = node.output[0]
        if node.op_type.startswith("Optional"):
            self.optional(node)
            return True
        if node.op_type == "Identity" and node.input[0] in self.absent:
            self.absent.add(y)
            return True
        if node.op_type in ("SequenceEmpty", "SequenceConstruct"):
            self.sequences[y] = list(node.input)
            return True
        if node.op_type == "SplitToSequence":
            return self.split_to_sequence(node)
        parts = self.sequences.get(node.input[0]) if node.input else None
        if parts is None:
            return False
        if (flags := [self.present[part] for part in parts if part in self.present]) and self.late(node, parts, flags):
            return True
        where = SEQUENCE_PLACES.get(node.op_type, len(node.input))
        at = self.place(node, where, len(parts)) if where < len(node.input) and node.input[where] else None
        match node.op_type:
            case "SequenceLength":
                self.set_constant(y, literal("", len(parts), np.int64))
            case "Identity":
                self.sequences[y] = parts
            case "SequenceAt" if at is not None:
                self.same(y, parts[at])
            case "SequenceInsert":
                at = len(parts) if at is None else at
                self.sequences[y] = [*parts[:at], node.input[1], *parts[at:]]
            case "SequenceErase" if parts:
                at = len(parts) - 1 if at is None else at % max(len(parts), 1)
                self.sequences[y] = [*parts[:at], *parts[at + 1 :]]
            case "ConcatFromSequence" if not parts:
                raise UnsupportedError(
                    f"{title(node)} reads the sequence {node.input[0]!r}, which has no tensors: if it is an input of the model, "
                    f"give the shape of each, as --shape '{part(node.input[0], 0)}=2x3'"
                )
            case "ConcatFromSequence":
                self.concat_from_sequence(node, parts)
            case _:
                raise UnsupportedError(
                    f"{title(node)} reads the sequence {node.input[0]!r}; only operators that make tensors of one can be "
                    "compiled: split the model there"
                )
        return True

    def optional(self, node: onnx.NodeProto) -> None:
        """An optional value is what it has, or nothing."""
        x, y = next(iter(node.input), ""), node.output[0]
        there = bool(x) and x not in self.absent
        if node.op_type == "OptionalHasElement":
            self.set_constant(y, literal("", there))
        elif there:
            self.control.bind(y, x)
        elif node.op_type == "Optional":
            self.absent.add(y)
        else:
            raise UnsupportedError(
                f"{title(node)} reads {x!r}, an optional value that is not there: give its shape, with --shape '{x}=2x3'"
            )

    def late(self, node: onnx.NodeProto, parts: list[str], flags: list[str]) -> bool:
        """What can be made of a sequence some of whose tensors need not be there: True if it is its length."""
        s, y = self.sizes, node.output[0]
        s.node = node
        if node.op_type == "SequenceLength":
            count = s.constant([len(parts) - len(flags)])
            for flag in flags:
                count = s.add("Add", [count, s.as_count(flag)])
            s.numbers[y] = np.array(s.size(count, len(parts)), object)
            self.instead(onnx.helper.make_node("Reshape", [count, s.constant(np.zeros(0))], [y], node.name or y))
            return True
        at_end = node.op_type == "SequenceInsert" and not any(node.input[2:])
        if not at_end and node.op_type not in ("Identity", "ConcatFromSequence"):
            raise UnsupportedError(
                f"{title(node)}: how many tensors the sequence {node.input[0]!r} has is computed at run time; of such a sequence "
                "all tensors can be put together, or one more be added at its end: end the model before it"
            )
        return False

    def place(self, node: onnx.NodeProto, i: int, parts: int) -> int:
        """The place in a sequence of so many parts that input i says."""
        at = self.number(node, i)
        if at is None:
            raise UnsupportedError(
                f"{title(node)}: its position ({node.input[i]}) is computed at run time; export the model with that constant, or "
                "split it there"
            )
        if not -parts <= at < parts + (node.op_type == "SequenceInsert"):
            raise invalid(node, f"its position is {at}, in a sequence of {parts}")
        return at

    def number(self, node: onnx.NodeProto, i: int) -> int | None:
        """The value of input i, if it is a constant number."""
        weight = self.constants.get(node.input[i])
        return int(weight.values.item()) if weight is not None and held(weight).size == 1 else None

    def instead(self, *nodes: onnx.NodeProto) -> None:
        """These nodes come next."""
        self.pending.extendleft(reversed(nodes))

    def split_to_sequence(self, node: onnx.NodeProto) -> bool:
        """Split in its place, if the sizes are known."""
        x, y, axis = self.type_of(node.input[0], node), node.output[0], attribute(node, "axis", 0)
        given = len(node.input) > 1 and bool(node.input[1])
        weight = self.constants.get(node.input[1]) if given else literal("", 1, np.int64)
        stays = given or attribute(node, "keepdims", 1)
        if weight is None or not -len(x.shape) <= axis < len(x.shape):
            return False
        n, sizes = x.shape[axis], weight.values.reshape(-1).astype(np.int64)
        if held(weight).ndim == 0:  # of this size each, and what is left
            step = max(int(sizes[0]), 1)
            if n > step * MAX_PARTS:
                raise UnsupportedError(
                    f"{title(node)} makes {ceil_div(n, step)} tensors; at most 2^14 are supported, split larger parts"
                )
            sizes = np.minimum(step, n - np.arange(0, n, step))
        self.sequences[y] = parts = [f"{y}/{i}" for i in range(len(sizes))]
        made = parts if stays else [f"{name}/row" for name in parts]
        nodes = [
            onnx.helper.make_node("Constant", [], [f"{y}/split"], value=onnx.numpy_helper.from_array(sizes)),
            onnx.helper.make_node("Split", [node.input[0], f"{y}/split"], made, node.name, axis=axis),
        ]
        if not stays:
            nodes.append(onnx.helper.make_node("Constant", [], [f"{y}/axis"], value_ints=[axis]))
            for row, name in zip(made, parts, strict=True):
                nodes.append(onnx.helper.make_node("Squeeze", [row, f"{y}/axis"], [name], node.name))
        self.instead(*nodes)
        return True

    def concat_from_sequence(self, node: onnx.NodeProto, parts: list[str]) -> None:
        y, axis, s = node.output[0], attribute(node, "axis"), self.sizes
        s.node, rows = node, list[str]()
        for one in parts:
            row = self.resolved(one)
            if attribute(node, "new_axis", 0):
                row = s.add("Unsqueeze", [row, s.constant([axis])])
            if one in self.present:
                shape = list(s.shape(row))
                shape[axis] = 0
                nothing = s.constant(np.empty(shape), self.type_of(row, node).dtype)
                name = s.fresh(f"{y}/part")
                self.visit(onnx.helper.make_node("Choice", [self.present[one], row, nothing], [name], node.name, domain=OWN))
                row = self.resolved(name)
            rows.append(row)
        self.instead(onnx.helper.make_node("Concat", rows, [y], node.name, axis=axis))

    # --- types

    def type_of(self, name: str, node: onnx.NodeProto) -> Type:
        weight = self.constants.get(name)
        if weight is not None:
            return Type(onnx.helper.np_dtype_to_tensor_dtype(weight.dtype), weight.shape)
        if name not in self.types:
            raise ModelError(f"{title(node)} reads {name!r}, which nothing before it computes")
        return self.types[name]

    def infer(self, node: onnx.NodeProto) -> None:
        """Sets the types of the node's outputs by ONNX's rules.

        What the model itself says of them counts only for operators that are not the standard's. Where the rules leave a shape
        open, it is the values' to decide, and what was true when the model was exported need not be when it runs.
        """
        domain = "" if node.domain == "ai.onnx" else node.domain
        known = onnx.defs.has(node.op_type, self.domains.get(domain, 1), domain)
        found = self.inferred(node, domain) if known else {}
        claimed = {name: found.get(name) or self.said.get(name) for name in node.output if name}
        if domain == "":
            first = claimed.get(node.output[0])
            self.check_shapes(node, first.shape if first is not None else None if node.output[0] else ())
        outputs = {name: found.get(name) for name in claimed} if known and domain == "" else claimed
        for name, type_ in outputs.items():
            if type_ is None:
                failure = (
                    self.undecided(node, domain)
                    if known
                    else "the operator is not one of ONNX's; say what it is in Python (--ops), or export the model without it"
                )
                raise UnsupportedError(f"{title(node)}: the shape of its output {name!r} cannot be inferred: {failure}")
            if max(type_.shape, default=0) >= MAX_EXTENT:
                raise UnsupportedError(f"{title(node)}: its output {name!r} is {type_.shape}; extents below 2^31 are supported")
            size = math.prod(type_.shape) * type_.dtype.itemsize
            if size > MAX_BYTES:
                raise UnsupportedError(f"{title(node)}: its output {name!r} takes {size} bytes; at most 2^40 are supported")
            if name in self.types or name in self.constants:
                raise ModelError(f"{title(node)} writes {name!r}, which has been written before")
            self.types[name] = type_

    def inferred(self, node: onnx.NodeProto, domain: str) -> dict[str, Type]:
        """The types of the node's outputs by ONNX's rules, as far as they give any; asked once for all loads of a model."""
        known = remembered()
        key = self.asked(node) if known is not None else None
        if known is None or key is None:
            return self.by_rules(node, domain)
        if key not in known.types:
            found = self.by_rules(node, domain)
            known.types[key] = [found.get(name) for name in node.output]
        return {name: t for name, t in zip(node.output, known.types[key], strict=True) if name and t is not None}

    def asked(self, node: onnx.NodeProto) -> Hashable | None:
        """What the types of a standard node's outputs follow from; None where that is more than types and a few numbers."""
        if node.domain not in ("", "ai.onnx") or node.op_type in BY_VALUES or any(True for _ in subgraphs(node)):
            return None
        decides = _deciding(node)
        few = [self.constants.get(name) for name in decides]
        types = [self.type_of(name, node) if name else None for name in node.input]
        data = [weight.values.tobytes() if weight is not None and _is_read(weight) else None for weight in few]
        attrs = [a.SerializeToString() for a in node.attribute]
        return node.op_type, tuple(attrs), tuple(map(bool, node.output)), tuple(types), tuple(data)

    def by_rules(self, node: onnx.NodeProto, domain: str) -> dict[str, Type]:
        """What `inferred` gives, of a node that is asked for the first time."""
        names = [name for name in reads(node) if name]
        types = {name: self.type_of(name, node).proto for name in names}
        decides = _deciding(node)
        data = {
            name: onnx.numpy_helper.from_array(np.array(weight.values if name in decides else held(weight)), name)
            for name in names
            if (weight := self.constants.get(name)) is not None and _is_read(weight)
        }
        schema = onnx.defs.get_schema(node.op_type, self.domains.get(domain, 1), domain)
        if domain == "":
            self.check_axis(node)
            types_of = [self.type_of(x, node).elem if x else None for x in node.input]
            if wrong := wrong_type(node, types_of, schema):
                raise invalid(node, wrong)
        try:
            found = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self.opsets)
        except Exception as e:
            shapes = ", ".join("×".join(map(str, self.type_of(x, node).shape)) or "scalar" if x else "none" for x in node.input)
            raise invalid(node, f"{first_line(e).removeprefix('[ShapeInferenceError] ')} (inputs of {shapes})") from e
        if domain == "" and node.op_type in LIKE_INPUT:
            return {node.output[0]: self.type_of(node.input[0], node)}
        if domain == "" and node.op_type == "Resize" and (scaled := self.scaled(node)) is not None:
            return {node.output[0]: scaled}
        if domain == "" and node.op_type == "MaxUnpool" and len(node.input) > 2 and node.input[2] in self.constants:
            shape = tuple(self.constants[node.input[2]].values.tolist())
            return {node.output[0]: Type(self.type_of(node.input[0], node).elem, shape)}
        if domain == "" and node.op_type == "Compress" and node.input[1] in self.constants:
            return {node.output[0]: self.compressed(node)}
        if domain == "" and node.op_type in COUNTED and node.input[0] in self.constants:
            return self.counted(node)
        if domain == "" and node.op_type == "Range" and all(x in self.constants for x in node.input):
            start, limit, step = (self.constants[x].values.item() for x in node.input)
            if not step:
                raise invalid(node, "its delta is 0")
            return {node.output[0]: Type(self.type_of(node.input[0], node).elem, (max(math.ceil((limit - start) / step), 0),))}
        if domain == "" and node.op_type == "STFT" and attribute(node, "onesided", 1):
            found = {name: onnx.TypeProto.FromString(proto.SerializeToString()) for name, proto in found.items()}
            for proto in found.values():  # ONNX's rule forgets that these are half of the bins
                dims = proto.tensor_type.shape.dim
                if len(dims) == 4 and dims[2].dim_value == self.window_length(node):
                    dims[2].dim_value = dims[2].dim_value // 2 + 1
        for name, proto in found.items():
            extents = [d.dim_value for d in proto.tensor_type.shape.dim]
            if min(extents, default=0) < 0:
                raise invalid(node, f"its output {name!r} would be {'×'.join(map(str, extents))}")
        return {name: t for name, proto in found.items() if (t := static_type(proto))}

    def undecided(self, node: onnx.NodeProto, domain: str) -> str:
        """Why ONNX's rules leave the shape of a node's output open, and what can be done."""
        schema = onnx.defs.get_schema(node.op_type, self.domains.get(domain, 1), domain)
        decide = DECIDES.get(node.op_type, ()) if domain == "" and node.op_type not in COUNTED else ()
        given = [i for i in decide if i < len(node.input) and node.input[i] and node.input[i] not in self.constants]
        if not given:
            return (
                "its shape depends on values that are known only when the model runs; end the model before it, and compute the "
                "rest in the application"
            )
        names = " and ".join(f"{schema.inputs[i].name} ({node.input[i]})" for i in given)
        verb = "is" if len(given) == 1 else "are"
        return f"its {names} {verb} computed at run time; export the model with that constant, or end it before this node"

    def check_axis(self, node: onnx.NodeProto) -> None:
        """Raises ModelError for an axis that there is not, and for outputs that are not as many as parts: ONNX aborts on some."""
        if node.op_type == "Split" and self.parts(node) not in (None, len(node.output)):
            raise invalid(node, f"it has {len(node.output)} outputs for {self.parts(node)} parts")
        axis = attribute(node, "axis")
        if isinstance(axis, int) and node.input and node.op_type not in ANY_AXIS:
            rank = len(self.type_of(node.input[0], node).shape)
            if not -rank <= axis < rank:
                raise invalid(node, f"axis {axis} of a tensor of rank {rank}")

    def check_shapes(self, node: onnx.NodeProto, output: tuple[int, ...] | None) -> None:
        inputs = [self.type_of(x, node).shape if x else None for x in node.input]
        shapes = Shapes(inputs, output, attributes(node)) if output is not None else None
        if shapes and (wrong := wrong_shapes(node.op_type, shapes)):
            raise invalid(node, wrong)

    def parts(self, node: onnx.NodeProto) -> int | None:
        """How many a Split says it has, where it says so."""
        sizes = self.constants.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        return held(sizes).size if sizes is not None else attribute(node, "num_outputs")

    def window_length(self, node: onnx.NodeProto) -> int | None:
        """Of an STFT."""
        if len(node.input) > 3 and node.input[3]:
            return self.number(node, 3)
        return self.type_of(node.input[2], node).shape[0]

    def compressed(self, node: onnx.NodeProto) -> Type:
        """The type of a Compress by a constant condition."""
        x, kept = self.type_of(node.input[0], node), int(np.count_nonzero(self.constants[node.input[1]].values))
        axis = attribute(node, "axis")
        shape = (kept,) if axis is None else tuple(kept if a == axis % len(x.shape) else n for a, n in enumerate(x.shape))
        return Type(x.elem, shape)

    def counted(self, node: onnx.NodeProto) -> dict[str, Type]:
        """The types of what an operator of COUNTED finds in a constant; none where that takes too long."""
        x = self.constants[node.input[0]]
        if held(x).size > max(self.work, SMALL):
            return {}
        values = [w.values for w in reference(node, [x], self.opsets)]
        types = [Type(onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for v in values]
        return {name: t for name, t in zip(node.output, types, strict=False) if name}

    def scaled(self, node: onnx.NodeProto) -> Type | None:
        """The type of a Resize by constant scales, or by constant sizes that need not keep its proportions.

        By scales the extents are floor(extent * scale) with the product rounded to float32, as ONNX Runtime has it and as
        exporters expect that divide the size they want by the extent; ONNX's own rule may give one less.
        """
        scales, sizes = (self.constants.get(node.input[i]) if len(node.input) > i and node.input[i] else None for i in (2, 3))
        if scales is not None and not (np.isfinite(scales.values) & (scales.values > 0)).all():
            raise invalid(node, f"its scales are {scales.values.tolist()}; they must be positive and finite")
        x = self.type_of(node.input[0], node)
        axes = attribute(node, "axes", range(len(x.shape)))
        shape = list(x.shape)
        if (
            sizes is not None
            and held(sizes).size == len(axes)
            and attribute(node, "keep_aspect_ratio_policy", b"stretch") == b"stretch"
        ):
            if sizes.values.min(initial=0) < 0:
                raise invalid(node, f"its sizes are {sizes.values.tolist()}; they must not be negative")
            for axis, size in zip(axes, sizes.values.tolist(), strict=True):
                shape[axis] = size
            return Type(x.elem, tuple(shape))
        if scales is None or held(scales).size != len(axes):
            return None
        for axis, scale in zip(axes, scales.values.reshape(-1), strict=True):
            shape[axis] = int(np.floor(np.float32(shape[axis]) * np.float32(scale)))
        return Type(x.elem, tuple(shape))

    # --- values

    def may_fold(self, node: onnx.NodeProto, inputs: list[Weight]) -> bool:
        if node.op_type in RANDOM or node.op_type in CONTROL_FLOW or node.op_type in LEFT or node.output[0] in self.factors:
            return False
        if self.types[node.output[0]].elem != wide(self.types[node.output[0]].elem) and node.output[0] in self.given_out:
            return False  # the model gives it as the type's bits
        if node.op_type in ORDERED and any(w.dtype.kind == "f" and np.isnan(held(w)).any() for w in inputs):
            return False
        made_of = sum(held(w).nbytes for w in inputs)
        made = sum(math.prod(self.types[y].shape) * self.types[y].dtype.itemsize for y in node.output if y)
        if node.op_type in ("ConstantOfShape", "Expand"):
            return made <= max(LARGE_VIEW, 4 * made_of)
        small = made <= min(max(LARGE, 4 * made_of), max(self.room, SMALL))
        return small and self.work_of(node, inputs) <= max(self.work, SMALL)

    def work_of(self, node: onnx.NodeProto, inputs: list[Weight]) -> int:
        """The elements that evaluating the node takes about as long as reading and making: none for a view."""
        if node.op_type in ("ConstantOfShape", "Expand"):
            return 0
        sizes, made = [held(w).size for w in inputs], sum(math.prod(self.types[y].shape) for y in node.output if y)
        match node.op_type:
            case "Conv":
                return sum(sizes) + GATHERED * made * math.prod(inputs[1].shape[1:])
            case "Einsum":
                return math.prod(sizes)
            case "Gemm" | "MatMul" | "MatMulInteger" | "QLinearMatMul":
                terms = max(max(w.shape[-2:], default=1) for w in inputs)
                return sum(sizes) + made * terms // (PER_ELEMENT if self.types[node.output[0]].dtype.kind == "f" else 1)
        return sum(sizes) + made

    def evaluate(self, node: onnx.NodeProto) -> list[Weight] | None:
        """The node's outputs, or None if nobody here can compute them: then it is left to later stages, as any other node."""
        inputs = [self.constants.get(name) for name in node.input]
        known = remembered()
        key = known.key(node, inputs) if known is not None else None
        if known is None or key is None:
            return self.computed(node, inputs)
        if key not in known.made and (result := self.computed(node, inputs)) is not None:
            known.keep(key, result)
        return known.made.get(key)

    def computed(self, node: onnx.NodeProto, inputs: list[Weight | None]) -> list[Weight] | None:
        how = TRANSFORMED.get(node.op_type)
        try:
            result = how(node, inputs, self.types[node.output[0]]) if how else None
            if result is None:
                result = reference(node, inputs, self.opsets)
        except Exception as e:
            log.debug("%s is not folded: %s", title(node), first_line(e))
            return None
        for name, weight in zip(node.output, result, strict=False):
            held_as = onnx.helper.tensor_dtype_to_np_dtype(wide(self.types[name].elem)) if name else None
            if name and (weight.dtype, weight.shape) != (held_as, self.types[name].shape):
                log.debug("%s is not folded: its output %r would be %s", title(node), name, weight.dtype)
                return None
        return result

    # --- the end

    def open_outputs(self) -> None:
        """Tensors in the place of the graph's outputs that are sequences or optional values."""
        made = list[onnx.ValueInfoProto]()
        for value in self.graph.output:
            parts = self.sequences.get(self.resolved(value.name), self.sequences.get(value.name))
            if parts is not None and any(name in self.present for name in parts):
                raise UnsupportedError(
                    f"how many tensors the model's output {value.name!r} has is computed at run time: put them together "
                    "(ConcatFromSequence), or end the model before it"
                )
            if parts is not None:
                for i, name in enumerate(parts):
                    made.append(onnx.ValueInfoProto(name=part(value.name, i)))
                    self.same(made[-1].name, self.resolved(name))
            elif value.name not in self.absent:
                made.append(onnx.ValueInfoProto(name=value.name) if value.type.HasField("optional_type") else value)
        made = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in made]
        del self.graph.output[:]
        self.graph.output.extend(made)

    def name_outputs(self) -> None:
        """Gives the model's outputs their names back where a node that computes nothing was removed."""
        rename: dict[str, str] = {}
        inputs, outputs = {v.name for v in self.graph.input}, {v.name for v in self.graph.output}
        for name in dict.fromkeys(v.name for v in self.graph.output):
            target = self.alias.get(name)
            if target is None:
                if name not in self.types and name not in self.constants:
                    raise ModelError(f"nothing computes the model's output {name!r}")
            elif target in inputs or target in outputs or target in rename:
                self.kept.append(onnx.helper.make_node("Identity", [target], [name], name))
                self.types[name] = self.types[rename.get(target, target)]
            else:
                rename[target] = name
                self.types[name] = self.types.pop(target)
        for node in self.kept if rename else ():
            rename_inputs(node, rename)
            node.output[:] = [rename.get(y, y) for y in node.output]

    def drop_unused(self) -> None:
        used = {v.name for v in self.graph.output}
        alive = []
        for node in reversed(self.kept):
            if used.intersection(node.output):
                alive.append(node)
                used.update(reads(node))
        self.kept = alive[::-1]
        for name in [name for name in self.constants if name not in used]:
            del self.constants[name]
        live = used | {v.name for v in self.graph.input} | {y for node in self.kept for y in node.output}
        self.types = {name: t for name, t in self.types.items() if name in live}


WEIGHED = frozenset(
    [
        "Add",
        "BatchNormalization",
        "Cast",
        "Concat",
        "Conv",
        "ConvInteger",
        "ConvTranspose",
        "DequantizeLinear",
        "Div",
        "Flatten",
        "GRU",
        "Gather",
        "Gemm",
        "GroupNormalization",
        "Identity",
        "InstanceNormalization",
        "LSTM",
        "LayerNormalization",
        "MatMul",
        "MatMulInteger",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "PRelu",
        "Pow",
        "QLinearConv",
        "QLinearMatMul",
        "QuantizeLinear",
        "RMSNormalization",
        "RNN",
        "Sqrt",
        "Sub",
        "Transpose",
        "Where",
    ]
)
"""Operators whose results have a shape that follows from the shapes of what they read, and their attributes, alone."""

BY_VALUES = frozenset(("Compress", "MaxUnpool", "Range", "Resize", "STFT", *COUNTED, *CONTROL_FLOW))
"""Operators whose results' types are found by more of what they read than ONNX's rules are given."""


def _deciding(node: onnx.NodeProto) -> list[str]:
    """The names of what a node reads whose values, where they are known, its results' types may follow from."""
    places = () if node.op_type in WEIGHED else DECIDES.get(node.op_type, range(len(node.input)))
    return [name for i, name in enumerate(node.input) if i in places and name]


def _is_read(weight: Weight) -> bool:
    """Whether ONNX's rules are given a constant's values: they take what says shapes, axes and the like."""
    return held(weight).nbytes <= 4096 and held(weight).ndim <= 1


def _expanded(node: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """A number, and the Expand of it that a ConstantOfShape stands for."""
    y, number = node.output[0], onnx.numpy_helper.from_array(np.zeros(1, np.float32))
    value = onnx.helper.make_node("Constant", [], [f"{y}/value"], value=attribute(node, "value", number))
    return value, onnx.helper.make_node("Expand", [f"{y}/value", node.input[0]], [y], node.name)


@cache
def _mean_variance() -> bytes:
    """MeanVarianceNormalization by differences from the mean: the squares that ONNX's definition subtracts are nearly equal."""
    function = onnx.parser.parse_function("""<domain: "", opset_import: ["": 18]>
        MeanVarianceNormalization <axes> (X) => (Y) {
            Axes = Constant <value_ints: ints = @axes> ()
            Epsilon = Constant <value: tensor = float {1e-9}> ()
            Mean = ReduceMean (X, Axes)
            Difference = Sub (X, Mean)
            Square = Mul (Difference, Difference)
            Variance = ReduceMean (Square, Axes)
            Deviation = Sqrt (Variance)
            Divisor = Add (Deviation, Epsilon)
            Y = Div (Difference, Divisor)
        }""")
    return bytes(function.SerializeToString())


def _is_function(node: onnx.NodeProto) -> bool:
    """Whether a node is taken apart: those of FUNCTIONS, and the forms of Attention that are no single op later."""
    windowed = any(a.name in ("left_window_size", "right_window_size") for a in node.attribute)
    special = windowed or any(node.output[3:]) or any(node.input[6:])  # the scores are used; lengths are an input
    return node.op_type in FUNCTIONS or (node.op_type == "Attention" and special)
