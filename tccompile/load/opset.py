"""One opset: nodes of opsets 7 to 22 written as opset 23 has them.

Only what changed an operator's attributes, inputs or meaning needs an entry; all other changes between these opsets
widened the types or added attributes and inputs whose defaults keep the old meaning (ONNX's operator changelog). Written
here node by node, because ONNX's own converter fails above 2 GB, stops at the first node of another domain that it does not
know, and is wrong without a word for Upsample, Resize, Hardmax and GroupNormalization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.load.nodes import new_name

OLDEST, UNIFORM, NEWEST = 7, 23, 28
"""Models of opsets OLDEST to NEWEST are taken. Older ones are written as UNIFORM has them; newer ones stay as they are, because
what changed since then are types, and attributes whose defaults keep the old meaning."""


@dataclass
class Scope:
    """What the upgrade of one graph needs: fresh names, and the values of constants.

    values  the values of a constant by its tensor's name, or None
    taken   the names in use
    """

    values: Callable[[str], np.ndarray | None]
    taken: set[str]
    before: list[onnx.NodeProto] = field(default_factory=list)

    def name(self, like: str) -> str:
        """A new tensor name, the same on every run."""
        return new_name(like, self.taken)

    def node(self, op: str, inputs: Iterable[str], like: str, **attributes: Any) -> str:
        """Adds a node ahead of the one that is being upgraded; gives the name of its output."""
        y = self.name(f"{like}_{op.lower()}")
        self.before.append(onnx.helper.make_node(op, list(inputs), [y], y, **attributes))
        return y

    def constant(self, values: Any, like: str, dtype: type = np.int64) -> str:
        return self.node("Constant", (), like, value=onnx.numpy_helper.from_array(np.asarray(values, dtype)))


Upgrade = Callable[[onnx.NodeProto, Scope], None]
"""Changes a node in place; new nodes that it reads go into the scope."""


def upgrade_nodes(nodes: Iterable[onnx.NodeProto], opset: int, scope: Scope) -> list[onnx.NodeProto]:
    """The nodes of one graph, and of the graphs inside them, as opset 23 has them."""
    out = []
    for node in nodes:
        for attribute in node.attribute:
            for graph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                inner = upgrade_nodes(graph.node, opset, Scope(scope.values, scope.taken))
                del graph.node[:]
                graph.node.extend(inner)
        if node.domain in ("", "ai.onnx"):
            for before, upgrade in UPGRADES.get(node.op_type, ()):
                if opset < before:
                    upgrade(node, scope)
        out += [*scope.before, node]
        scope.before.clear()
    return out


def _pop(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Takes an attribute away from a node; its value, or `default`."""
    for i, attribute in enumerate(node.attribute):
        if attribute.name == name:
            if attribute.ref_attr_name:
                raise UnsupportedError(f"node {node.name!r}: {node.op_type} takes {name!r} from a function of another opset")
            value = onnx.helper.get_attribute_value(attribute)
            del node.attribute[i]
            return value.decode() if isinstance(value, bytes) else value
    return default


def _set(node: onnx.NodeProto, **attributes: Any) -> None:
    for name, value in attributes.items():
        _pop(node, name)
        node.attribute.append(onnx.helper.make_attribute(name, value))


def _inputs(node: onnx.NodeProto, *names: str) -> None:
    del node.input[:]
    node.input.extend(names)


def _attribute_to_input(name: str, position: int) -> Upgrade:
    """An attribute that became an input of integers."""

    def upgrade(node: onnx.NodeProto, scope: Scope) -> None:
        value = _pop(node, name)
        if value is not None:
            given = [*node.input, *[""] * (position - len(node.input))][:position]
            _inputs(node, *given, scope.constant(value, node.output[0]))

    return upgrade


def _attributes_to_inputs(**defaults: float | None) -> Upgrade:
    """Numbers that became inputs of x's type, in this order."""

    def upgrade(node: onnx.NodeProto, scope: Scope) -> None:
        values = {name: _pop(node, name, default) for name, default in defaults.items()}
        names = []
        for value in values.values():
            if value is None:
                names.append("")
            else:
                number = scope.constant(value, node.output[0], np.float32)
                names.append(scope.node("CastLike", (number, node.input[0]), node.output[0]))
        _inputs(node, *node.input, *names)

    return upgrade


def _without(*names: str) -> Upgrade:
    """Attributes that went away and never mattered for inference."""

    def upgrade(node: onnx.NodeProto, scope: Scope) -> None:
        for name in names:
            _pop(node, name)

    return upgrade


def _slice(node: onnx.NodeProto, scope: Scope) -> None:
    starts, ends, axes = (_pop(node, n) for n in ("starts", "ends", "axes"))
    axes = range(len(starts)) if axes is None else axes
    _inputs(node, node.input[0], *(scope.constant(list(v), node.output[0]) for v in (starts, ends, axes)))


def _top_k(node: onnx.NodeProto, scope: Scope) -> None:
    _inputs(node, node.input[0], scope.constant([_pop(node, "k")], node.output[0]))


def _pad(node: onnx.NodeProto, scope: Scope) -> None:
    pads = scope.constant(_pop(node, "pads"), node.output[0])
    value = scope.constant(_pop(node, "value", 0.0), node.output[0], np.float32)
    _inputs(node, node.input[0], pads, scope.node("CastLike", (value, node.input[0]), node.output[0]))


def _split_evenly(node: onnx.NodeProto, scope: Scope) -> None:
    if len(node.input) < 2 or not node.input[1]:
        _set(node, num_outputs=len(node.output))


def _batch_norm_7(node: onnx.NodeProto, scope: Scope) -> None:
    if _pop(node, "spatial", 1) != 1:
        raise UnsupportedError(
            f"node {node.name or node.output[0]!r}: BatchNormalization with spatial=0 (statistics per element) is not supported; "
            "export the model with opset 9 or newer"
        )


def _batch_norm_14(node: onnx.NodeProto, scope: Scope) -> None:
    """More than one output meant training: statistics of x itself. The two saved ones went away."""
    if any(node.output[1:]):
        _set(node, training_mode=1)
    del node.output[3:]


def _softmax(node: onnx.NodeProto, scope: Scope) -> None:
    """softmax_12(x, axis) = reshape(softmax_13(flatten(x, axis), -1), shape(x)): it took all axes from `axis` on as one."""
    axis, x, y = _pop(node, "axis", 1), node.input[0], node.output[0]
    flat = scope.node("Flatten", (x,), y, axis=axis)
    soft = scope.node(node.op_type, (flat,), y, axis=-1)
    shape = scope.node("Shape", (x,), y)
    node.op_type = "Reshape"
    _inputs(node, soft, shape)


def _upsample(node: onnx.NodeProto, scope: Scope) -> None:
    scales = _pop(node, "scales")
    name = node.input[1] if scales is None else scope.constant(scales, node.output[0], np.float32)
    mode = _pop(node, "mode", "nearest")
    node.op_type = "Resize"
    _set(node, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    _inputs(node, node.input[0], "", name)


def _resize_10(node: onnx.NodeProto, scope: Scope) -> None:
    """Resize-10 takes the nearest element at floor(o / scale) when it enlarges, at ceil(o / scale) when it reduces."""
    x, name = node.input[:2]
    _set(node, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    scales = scope.values(name)
    if scales is not None and (scales < 1).any() and _mode(node) == "nearest":
        if (scales > 1).any():
            larger = scope.constant(np.maximum(scales, 1), node.output[0], np.float32)
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            x = scope.node("Resize", (x, "", larger), node.output[0], **attributes)
            name = scope.constant(np.minimum(scales, 1), node.output[0], np.float32)
        _set(node, nearest_mode="ceil")
    _inputs(node, x, "", name)


def _mode(node: onnx.NodeProto) -> str:
    return next((a.s.decode() for a in node.attribute if a.name == "mode"), "nearest")


def _resize_11(node: onnx.NodeProto, scope: Scope) -> None:
    """Inputs that had to be there, empty, may be left out; and tf_half_pixel_for_nn went away.

    floor((o + 0.5) / s) is what half_pixel gives when halves are rounded up.
    """
    mode = _pop(node, "coordinate_transformation_mode", "half_pixel")
    if mode == "tf_half_pixel_for_nn":
        rounding = _pop(node, "nearest_mode", "round_prefer_floor")
        if rounding != "floor":
            raise UnsupportedError(
                f"node {node.name or node.output[0]!r}: Resize with {mode} and {rounding} is not supported; export the model "
                "with opset 13 or newer"
            )
        mode, rounding = "half_pixel", "round_prefer_ceil"
        _set(node, nearest_mode=rounding)
    _set(node, coordinate_transformation_mode=mode)
    x, roi, scales, sizes = [*node.input, "", "", ""][:4]
    roi = roi if mode == "tf_crop_and_resize" else ""
    _inputs(node, *((x, roi, "", sizes) if sizes else (x, roi, scales)))


def _scan_8(node: onnx.NodeProto, scope: Scope) -> None:
    raise UnsupportedError(
        f"node {node.name or node.output[0]!r}: Scan of opset 8, over a batch of sequences, is not supported; export the model "
        "with opset 9 or newer"
    )


def _scatter(node: onnx.NodeProto, scope: Scope) -> None:
    node.op_type = "ScatterElements"


def _roi_align(node: onnx.NodeProto, scope: Scope) -> None:
    _set(node, coordinate_transformation_mode="output_half_pixel")


def _grid_sample(node: onnx.NodeProto, scope: Scope) -> None:
    mode = _pop(node, "mode", "bilinear")
    _set(node, mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _dft(node: onnx.NodeProto, scope: Scope) -> None:
    axis = scope.constant(_pop(node, "axis", 1), node.output[0])
    _inputs(node, *[*node.input, ""][:2], axis)


def _group_norm(node: onnx.NodeProto, scope: Scope) -> None:
    """Scale and bias were one number a group; now they are one a channel: repeat each channels / groups times."""
    x, y = node.input[0], node.output[0]
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    count = scope.constant([groups], y)
    channels = scope.node("Shape", (x,), y, start=1, end=2)
    shape = scope.node("Concat", (count, scope.node("Div", (channels, count), y)), y, axis=0)
    last = scope.constant([-1], y)
    one = scope.constant([1], y)
    wide = []
    for name in node.input[1:]:
        column = scope.node("Unsqueeze", (name, one), y)
        wide.append(scope.node("Reshape", (scope.node("Expand", (column, shape), y), last), y))
    _inputs(node, x, *wide)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

UPGRADES: dict[str, tuple[tuple[int, Upgrade], ...]] = {
    # op: (first opset that has the new form, how to get there), …
    "BatchNormalization": ((9, _batch_norm_7), (14, _batch_norm_14)),
    "Clip": ((11, _attributes_to_inputs(min=None, max=None)),),
    "DFT": ((20, _dft),),
    "Dropout": ((12, _without("ratio", "seed")),),
    "GridSample": ((20, _grid_sample),),
    "GroupNormalization": ((21, _group_norm),),
    "Hardmax": ((13, _softmax),),
    "LogSoftmax": ((13, _softmax),),
    "Pad": ((11, _pad),),
    **{f"Reduce{r}": ((18, _attribute_to_input("axes", 1)),) for r in _REDUCTIONS},
    "ReduceSum": ((13, _attribute_to_input("axes", 1)),),
    "Resize": ((11, _resize_10), (13, _resize_11)),
    "RoiAlign": ((16, _roi_align),),
    "Scan": ((9, _scan_8),),
    "Scatter": ((11, _scatter),),
    "Slice": ((10, _slice),),
    "Softmax": ((13, _softmax),),
    "Split": ((13, _attribute_to_input("split", 1)), (18, _split_evenly)),
    "Squeeze": ((13, _attribute_to_input("axes", 1)),),
    "TopK": ((10, _top_k),),
    "Unsqueeze": ((13, _attribute_to_input("axes", 1)),),
    "Upsample": ((10, _upsample),),
}
