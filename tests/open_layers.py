"""Layers of `tests.open_graphs` beyond the plain ones: what reads and writes places, counts, branches, lists, bytes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.ranges.models import Graph

END = 1 << 40
"""Beyond every axis."""


class Layers(Graph):
    """A graph of images (batch, channels, h, w) or of rows (batch, tokens, channels); x is the last layer's result.

    bytes  something has been rounded to bytes: what lies near a half may go either way
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.pick((17, 17, 21, 23)))
        self.images = bool(self.rng.random() < 0.6)
        self.x, self.channels = "x", int(self.pick((3, 4, 8)))
        self.first, self.bytes = self.channels, False

    def pick(self, choices):
        return choices[int(self.rng.integers(0, len(choices)))]

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        if kind.startswith("Reduce") and "axes" in attributes and self.opset >= (13 if kind == "ReduceSum" else 18):
            inputs = (*inputs, self.numbers(*attributes.pop("axes")))
        return super().op(kind, *inputs, **attributes)

    def weight(self, *shape: int, scale: float = 0.0) -> str:
        scale = scale or float(np.prod(shape[1:]) or 1) ** -0.5
        return self.value((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def outputs(self, count: int, kind: str, *inputs: str, **attributes: object) -> list[str]:
        """All outputs of a node that has several."""
        first = self.op(kind, *inputs, **attributes)
        self.nodes[-1].output.extend(f"{first}_{i}" for i in range(1, count))
        return list(self.nodes[-1].output)

    def model(self, x: str, dtype: int, shape: list[int | str], y: str) -> onnx.ModelProto:
        model = super().model(x, dtype, shape, y)
        model.opset_import[0].version = self.opset
        model.ir_version = 10
        return model

    # --- what layers are made of ---

    def scalar(self, axis: int) -> str:
        return self.op("Squeeze", self.extent(self.x, axis), self.numbers(0))

    def places(self, axis: int) -> str:
        return self.op("Range", self.value(np.int64(0)), self.scalar(axis), self.value(np.int64(1)))

    def along(self, axis: int, vector: str) -> str:
        """A vector that is broadcast along an axis."""
        return self.op("Reshape", vector, self.numbers(-1, *[1] * ((4 if self.images else 3) - 1 - axis)))

    def open_axis(self) -> int:
        return int(self.pick((2, 3, 0) if self.images else (1, 1, 0)))

    def number(self, value: float) -> str:
        return self.value(np.float32(value))

    def add(self, y: str, by: float = 0.1) -> None:
        """A share of what is broadcast, added."""
        self.x = self.op("Add", self.x, self.op("Mul", y, self.number(by)))

    def floats(self, x: str) -> str:
        return self.op("Cast", x, to=TensorProto.FLOAT)

    # --- places ---

    def backwards(self) -> None:
        axis, step = self.open_axis(), int(self.pick((-1, -1, -2, -3)))
        end = int(self.pick((-END, -END, 0)))
        part = self.op("Slice", self.x, *map(self.numbers, (int(self.pick((END, -1))), end, axis, step)))
        self.x = self.op("Concat", self.x, part, axis=axis)

    def written(self) -> None:
        """Every other row, or all of them from the end, in the place of what was there."""
        axis = self.open_axis()
        rank = 4 if self.images else 3
        perm = [axis, *(a for a in range(rank) if a != axis)]
        back = [perm.index(a) for a in range(rank)]
        y = self.op("Transpose", self.x, perm=perm)
        if self.rng.random() < 0.5:
            at = self.op("Sub", self.op("Sub", self.scalar(axis), self.value(np.int64(1))), self.places(axis))
            rows = self.op("Sigmoid", y)
        else:
            at = self.op("Range", self.value(np.int64(0)), self.scalar(axis), self.value(np.int64(2)))
            rows = self.op("Slice", self.op("Neg", y), *map(self.numbers, (0, END, 0, 2)))
        kind = {"reduction": "add"} if self.rng.random() < 0.3 else {}
        y = self.op("ScatterND", y, self.op("Unsqueeze", at, self.numbers(1)), rows, **kind)
        self.x = self.op("Transpose", y, perm=back)

    def elements(self) -> None:
        axis = self.open_axis()
        half = self.op("Div", self.places(axis), self.value(np.int64(2)))
        at = self.op("Expand", self.along(axis, half), self.op("Shape", self.x))
        if self.rng.random() < 0.5:
            self.x = self.op("GatherElements", self.x, at, axis=axis)
        else:
            self.x = self.op("ScatterElements", self.x, at, self.op("Tanh", self.x), axis=axis, reduction="add")

    def masked(self) -> None:
        axis = self.open_axis()
        places, n = self.places(axis), self.scalar(axis)
        match self.pick(("half", "mod", "last")):
            case "half":
                seen = self.op("Less", places, self.op("Div", n, self.value(np.int64(2))))
            case "mod":
                seen = self.op("Equal", self.op("Mod", places, self.value(np.int64(3))), self.value(np.int64(0)))
            case _:
                seen = self.op("Equal", places, self.op("Sub", n, self.value(np.int64(1))))
        self.x = self.op("Where", self.along(axis, seen), self.x, self.pick((self.number(0.5), self.op("Neg", self.x))))

    def border(self) -> None:
        """Pads of any kind, to a multiple, or to at least so many."""
        axis = self.pick((2, 3)) if self.images else 1
        n, rank = self.extent(self.x, axis), 4 if self.images else 3
        m = int(self.pick((2, 3, 4, 5)))
        up = self.op("Mul", self.op("Div", self.op("Add", n, self.numbers(m - 1)), self.numbers(m)), self.numbers(m))
        more = self.op("Sub", self.op("Max", n, self.numbers(7)) if self.rng.random() < 0.3 else up, n)
        mode = self.pick(("constant", "edge", "reflect") + (("wrap",) if self.opset >= 19 else ()))
        before = [0] * axis + [int(self.pick((0, 0, 1)))] + [0] * (rank - 1 - axis) + [0] * axis
        pads = self.op(
            "Concat", self.numbers(*before), more, *([self.numbers(*[0] * (rank - 1 - axis))] * (axis < rank - 1)), axis=0
        )
        self.x = self.op("Pad", self.x, pads, mode=mode)

    def repeated(self) -> None:
        axis = self.open_axis()
        self.x = self.op("Tile", self.x, self.numbers(*(2 if a == axis else 1 for a in range(4 if self.images else 3))))

    def both(self) -> None:
        self.x = self.op("Concat", self.x, self.op("Sin", self.x), axis=self.open_axis())

    # --- sums, counts, order ---

    def reduced(self) -> None:
        kind = self.pick(("Sum", "Mean", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare", "LogSum"))
        x = self.op("Abs", self.x) if kind == "LogSum" else self.x
        axes = list(self.pick(((0,), (1,), (2,), (1, 2), (-1,), (0, 2), (0, 1, 2))))
        self.add(self.op("Tanh", self.op(f"Reduce{kind}", x, axes=axes, keepdims=1)))

    def summed(self) -> None:
        how = {"exclusive": int(self.pick((0, 1))), "reverse": int(self.pick((0, 1)))}
        self.add(self.op("CumSum", self.x, self.value(np.int64(self.open_axis())), **how))

    def best(self) -> None:
        """Of so many, of half of them, or of at most so many."""
        axis, largest = self.open_axis(), int(self.pick((0, 1)))
        n = self.extent(self.x, axis)
        match self.pick(("one", "half", "few")):
            case "one":
                k = self.numbers(1)
            case "half":
                k = self.op("Div", self.op("Add", n, self.numbers(1)), self.numbers(2))
            case _:
                k = self.op("Min", n, self.numbers(int(self.pick((2, 4, 6)))))
        values, places = self.outputs(2, "TopK", self.x, k, axis=axis, largest=largest)
        found = values if self.rng.random() < 0.7 else self.op("Add", values, self.floats(places))
        if self.rng.random() < 0.5:
            self.add(self.op("ReduceSum", found, axes=[axis], keepdims=1))
        else:
            self.x = self.op("Concat", self.x, found, axis=axis)

    def most(self) -> None:
        how = {"keepdims": 1, "select_last_index": int(self.pick((0, 1)))}
        self.add(self.floats(self.op(self.pick(("ArgMax", "ArgMin")), self.x, axis=self.open_axis(), **how)))

    def counted(self) -> None:
        """How many of all elements are large."""
        found = self.op("NonZero", self.op("Greater", self.x, self.number(0.1234)))
        share = self.op("Div", self.floats(self.extent(found, 1)), self.floats(self.op("Size", self.x)))
        self.add(share, 1.0)

    def bounded(self) -> None:
        n = self.op("Div", self.floats(self.scalar(self.open_axis())), self.number(10))
        self.x = self.op("Clip", self.x, self.op("Neg", n), n)

    # --- branches, loops, lists ---

    def _branch(self, name: str, kind: str) -> onnx.GraphProto:
        y = f"{name}_{len(self.nodes)}"
        value = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(kind, [self.x], [y], name=y)], name, [], [value])

    def branched(self) -> None:
        if self.rng.random() < 0.5:
            which = self.op("Greater", self.op("ReduceMean", self.x, keepdims=0), self.number(0.05))
        else:
            which = self.op("Greater", self.scalar(self.open_axis()), self.value(np.int64(9)))
        self.x = self.op("If", which, then_branch=self._branch("yes", "Tanh"), else_branch=self._branch("no", "Neg"))

    def looped(self) -> None:
        """Three times, or fewer if the data say so."""
        number = len(self.nodes)
        names = [f"{name}_{number}" for name in ("i", "go", "v", "on", "w", "s", "less")]
        i, go, v, on, w, total, _ = names
        body = [
            helper.make_node("Sub", [v, self.x], [total]),
            helper.make_node("Tanh", [total], [w]),
            helper.make_node("Identity", [go], [on]),
        ]
        if self.rng.random() < 0.5:
            half = f"half_{number}"
            kept = {"keepdims": 0}
            body[2:] = [
                helper.make_node("ReduceMean", [w], [f"mean_{number}"], **kept),
                helper.make_node("Constant", [], [half], value_float=0.01),
                helper.make_node("Greater", [f"mean_{number}", half], [on]),
            ]
        info = helper.make_tensor_value_info
        ins = [info(i, TensorProto.INT64, []), info(go, TensorProto.BOOL, []), info(v, TensorProto.FLOAT, None)]
        outs = [info(on, TensorProto.BOOL, []), info(w, TensorProto.FLOAT, None)]
        graph = helper.make_graph(body, "body", ins, outs)
        self.x = self.op("Loop", self.value(np.int64(3)), self.value(np.array(True)), self.op("Sin", self.x), body=graph)

    def listed(self) -> None:
        """Channels in two lists and back; or two tensors as one along an open axis."""
        axis = 1 if self.images else 2
        if self.rng.random() < 0.5:
            parts = self.op("SplitToSequence", self.x, self.value(np.int64(1)), axis=axis)
            self.x = self.op("ConcatFromSequence", parts, axis=axis)
        else:
            parts = self.op("SequenceConstruct", self.x, self.op("Abs", self.x))
            self.x = self.op("ConcatFromSequence", parts, axis=self.open_axis())

    # --- bytes ---

    def rounded(self) -> None:
        scale, zero = self.number(0.05), self.value(np.uint8(128))
        self.x = self.op("DequantizeLinear", self.op("QuantizeLinear", self.x, scale, zero), scale, zero)
        self.bytes = True

    # --- layers of images ---

    def any_conv(self) -> None:
        """Strides, dilations, groups, pads that differ, or SAME."""
        k = [int(self.pick((1, 2, 3, 4))) for _ in range(2)]
        groups = self.channels if self.rng.random() < 0.3 else 1
        out = groups if groups > 1 else int(self.pick((4, 6, 8)))
        how: dict[str, object] = {"strides": [int(self.pick((1, 1, 2, 3))) for _ in range(2)], "group": groups}
        if self.rng.random() < 0.3:
            how["auto_pad"] = self.pick(("SAME_UPPER", "SAME_LOWER"))
        else:
            how["dilations"] = [int(self.pick((1, 1, 2))) for _ in range(2)]
            how["pads"] = [int(self.pick((0, 1, 2))) for _ in range(4)]
        bias = [self.weight(out)] * (self.rng.random() < 0.5)
        self.x = self.op("Conv", self.x, self.weight(out, self.channels // groups, *k), *bias, **how)
        self.channels = out

    def transposed(self) -> None:
        groups = self.channels if self.rng.random() < 0.3 else 1
        out, k = int(self.pick((1, 2))) if groups > 1 else int(self.pick((4, 6))), int(self.pick((2, 3, 4)))
        stride = int(self.pick((1, 2, 2, 3)))
        extra = [int(self.pick((0, 1))) if stride > 1 else 0] * 2
        how = {"strides": [stride] * 2, "pads": [int(self.pick((0, 1))) for _ in range(4)], "output_padding": extra}
        self.x = self.op("ConvTranspose", self.x, self.weight(self.channels, out, k, k), group=groups, **how)
        self.channels = out * groups

    def any_pool(self) -> None:
        kind = self.pick(("MaxPool", "AveragePool", "LpPool"))
        k = [int(self.pick((2, 3))) for _ in range(2)]
        how: dict[str, object] = {"kernel_shape": k, "strides": [int(self.pick((1, 2, 2, 3))) for _ in range(2)]}
        if self.rng.random() < 0.25:
            how["auto_pad"] = self.pick(("SAME_UPPER", "SAME_LOWER", "VALID"))
        else:
            how["pads"] = [int(self.pick((0, 1))) for _ in range(4)]
            if kind != "LpPool":
                how["ceil_mode"] = int(self.pick((0, 1)))
        if kind == "AveragePool":
            how["count_include_pad"] = int(self.pick((0, 1)))
        self.x = self.op(kind, self.x, **how)

    def shuffled(self) -> None:
        wide = self.op("Conv", self.x, self.weight(4 * self.channels, self.channels, 1, 1))
        self.x = self.op("DepthToSpace", wide, blocksize=2, mode=self.pick(("DCR", "CRD")))

    def folded(self) -> None:
        """To an even number of rows and columns, and these as channels."""
        more = [self.op("Mod", self.extent(self.x, a), self.numbers(2)) for a in (2, 3)]
        even = self.op("Pad", self.x, self.op("Concat", self.numbers(0, 0, 0, 0, 0, 0), *more, axis=0))
        w = self.weight(self.channels, 4 * self.channels, 1, 1)
        self.x = self.op("Conv", self.op("SpaceToDepth", even, blocksize=2), w)

    def grouped(self) -> None:
        """GroupNormalization of one group, as exporters write it."""
        shape = self.op("Shape", self.x)
        y = self.op("InstanceNormalization", self.op("Reshape", self.x, self.numbers(0, 1, -1)), self.weight(1), self.weight(1))
        self.x = self.op("Reshape", y, shape)

    def near(self) -> None:
        self.x = self.op("LRN", self.x, size=3)

    # --- layers of rows ---

    def looked_up(self) -> None:
        """Rows by a product with ones and zeros."""
        n = self.scalar(1)
        ones = self.op(
            "OneHot",
            self.op("Sub", self.op("Sub", n, self.value(np.int64(1))), self.places(1)),
            n,
            self.value(np.float32([0, 1])),
        )
        self.x = self.op("MatMul", ones, self.x)

    def triangle(self) -> None:
        scores = self.op("Tanh", self.op("MatMul", self.x, self.op("Transpose", self.x, perm=[0, 2, 1])))
        scores = self.op("Trilu", scores, self.value(np.int64(int(self.pick((-1, 0, 1))))), upper=int(self.pick((0, 1))))
        self.add(self.op("MatMul", scores, self.x))

    def einsum(self) -> None:
        scores = self.op("Softmax", self.op("Einsum", self.x, self.x, equation="bic,bjc->bij"), axis=int(self.pick((-1, 1))))
        self.x = self.op("Einsum", scores, self.x, equation="bij,bjc->bic")

    def flat_rows(self) -> None:
        out = int(self.pick((4, 8)))
        ends = [self.extent(self.x, 0), self.extent(self.x, 1)]
        rows = self.op("Gemm", self.op("Flatten", self.x, axis=2), self.weight(self.channels, out), self.weight(out))
        self.x, self.channels = self.op("Reshape", rows, self.op("Concat", *ends, self.numbers(out), axis=0)), out

    def attended(self) -> None:
        """By the operator, where there is one."""
        if self.opset < 23:
            return self.einsum()
        heads = 2 if self.channels % 2 == 0 else 1
        q = self.op("MatMul", self.x, self.weight(self.channels, self.channels))
        how = {"q_num_heads": heads, "kv_num_heads": heads, "is_causal": int(self.pick((0, 1)))}
        self.x = self.op("Attention", q, self.x, self.x, **how)
        return None

    def filtered(self) -> None:
        """A convolution along tokens."""
        k, out = int(self.pick((2, 3))), int(self.pick((4, 8)))
        y = self.op("Transpose", self.x, perm=[0, 2, 1])
        y = self.op("Conv", y, self.weight(out, self.channels, k), pads=[k - 1, 0], strides=[int(self.pick((1, 1, 2)))])
        self.x, self.channels = self.op("Transpose", y, perm=[0, 2, 1]), out

    def both_ways(self) -> None:
        steps = self.op("Transpose", self.x, perm=[1, 0, 2])
        w, r = self.weight(2, 16, self.channels, scale=0.3), self.weight(2, 16, 4, scale=0.3)
        y = self.op("Transpose", self.op("LSTM", steps, w, r, hidden_size=4, direction="bidirectional"), perm=[2, 0, 1, 3])
        self.x, self.channels = self.op("Reshape", y, self.numbers(0, 0, 8)), 8

    def bytes_product(self) -> None:
        """As dynamic quantization writes it."""
        out = int(self.pick((4, 8)))
        low, scale, zero = self.outputs(3, "DynamicQuantizeLinear", self.x)
        w = self.value(self.rng.integers(-127, 128, (self.channels, out)).astype(np.int8))
        sums = self.floats(self.op("MatMulInteger", low, w, zero))
        self.x = self.op("Mul", sums, self.op("Mul", scale, self.number(0.01)))
        self.channels, self.bytes = out, True


ANYWHERE = (
    "backwards", "written", "elements", "masked", "border", "border", "repeated", "both", "reduced", "reduced", "summed", "best",
    "best", "most", "counted", "bounded", "branched", "looped", "listed", "rounded",
)  # fmt: skip
OF_IMAGES = ("any_conv", "any_conv", "transposed", "any_pool", "any_pool", "shuffled", "folded", "grouped", "near")
OF_ROWS = ("looked_up", "triangle", "einsum", "flat_rows", "attended", "filtered", "both_ways", "bytes_product")
