"""Random small graphs: what exporters write, in orders that nobody thought of.

`python -m tests.random_graphs 1000 2000` tries these seeds and tells which went wrong. Each graph is compiled in fp32 and in
mixed precision, for generations with and without Tensor Cores, and held to ONNX Runtime on the CPU engine.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tccompile.fuse import pad, unfold
from tccompile.runtime.cpu import CpuEngine
from tests.apart import apart
from tests.networks import feeds, reference, relative_error
from tests.plans import without_code
from tests.rewrites.common import Net

BOUNDS = {"fp32": (("sm_61",), 1e-5, 2.0**-23), "mixed": (("sm_61", "sm_75", "sm_90a"), 3e-3, 2.0**-11)}
"""By precision, for which generations, the relative error allowed, and how far a value moves when it is rounded."""

AMPLIFIED = 8
"""An output that moves far when what it is made of is rounded may be off by so many times as much."""

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 40)
UNARY = (
    "Relu", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "Elu", "Softplus", "Softsign", "Abs", "Neg",
    "Erf", "Mish", "Gelu", "Clip", "Relu6", "PRelu", "Silu", "Square", "Root", "GeluParts", "HardSwishParts", "Identity",
    "Selu", "Sin",
)  # fmt: skip

Shape = tuple[int, ...]


class Wild(Net):
    """Weights and constants of all sizes: activations leave fp16's range."""

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return super().normal(*shape, scale=scale * (10 ** self.rng.uniform(-3, 3) if self.rng.random() < 0.3 else 1))


class Graph:
    """A graph that grows by one layer after another; each reads tensors that are there."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.shapes: dict[str, Shape] = {}
        self.read: set[str] = set()
        n = self.pick((1, 1, 1, 2, 3))
        image = (n, self.pick(CHANNELS), self.size(), self.size())
        shape = self.pick((image, image, image, (n, self.pick(CHANNELS), self.size()), (n, self.pick((1, 7, 16, 33)))))
        self.net = (Wild if seed % 4 == 3 else Net)(opset=self.pick((20, 21, 23)), seed=seed, x=shape)
        self.shapes["x"] = shape
        if rng.random() < 0.2:
            self.shapes["z"] = shape if rng.random() < 0.5 else (1, *shape[1:])
            self.net.inputs += Net(z=self.shapes["z"]).inputs
        for _ in range(int(rng.integers(5, 16))):
            self.grow()
        ends = [t for t in self.shapes if t not in self.read]
        if rng.random() < 0.3:
            ends.append(self.pick([t for t in self.shapes if t not in ("x", "z")]))
        self.net.out(*dict.fromkeys(t for t in ends if t not in ("x", "z")))

    def model(self) -> onnx.ModelProto:
        net, value = self.net, helper.make_tensor_value_info
        outputs = [value(y, TensorProto.FLOAT, self.shapes[y]) for y in net.outputs]
        graph = helper.make_graph(net.nodes, "random", net.inputs, outputs, net.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", net.opset)], ir_version=10)

    # --- choices ---

    def pick(self, values):
        return values[int(self.rng.integers(len(values)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def size(self) -> int:
        return int(self.rng.integers(1, 15))

    def call(self, op: str, *args, shape: Shape, **attributes) -> str:
        self.read |= {a for a in args if isinstance(a, str)}
        y = self.net(op, *args, **attributes)
        self.shapes[y] = shape
        return y

    def like(self, op: str, x: str, *args, **attributes) -> str:
        return self.call(op, x, *args, shape=self.shapes[x], **attributes)

    def weight(self, *shape: int) -> np.ndarray:
        return self.net.normal(*shape, scale=1 / math.sqrt(max(math.prod(shape[1:]), 1)))

    def grow(self) -> None:
        last = list(self.shapes)[-1]
        x = last if self.chance(0.75) else self.pick(list(self.shapes))
        rank = len(self.shapes[x])
        kinds: list[Callable[[str], None]] = [*self.any_rank]
        if rank == 4:
            kinds += self.images * 2
        if rank == 3:
            kinds += self.signals * 2
        if rank >= 2:
            kinds += self.matrices
        self.pick(kinds)(x)

    # --- layers of images ---

    def conv(self, x: str) -> None:
        n, c, *spatial = self.shapes[x]
        kind = self.pick(("plain", "plain", "pointwise", "depthwise", "groups"))
        groups = 1
        if kind == "depthwise":
            groups = c
        elif kind == "groups":
            groups = self.pick([g for g in range(1, c + 1) if c % g == 0])
        o = self.pick(CHANNELS) if groups == 1 else groups * self.pick((1, 1, 2, 3))
        k = [1 if kind == "pointwise" else self.pick((1, 2, 3, 3, 3, 5)) for _ in spatial]
        dilations = [self.pick((1, 1, 1, 2)) for _ in spatial]
        strides = [self.pick((1, 1, 1, 2, 3)) for _ in spatial]
        if self.chance(0.6):
            starts = ends = [(a - 1) * d // 2 for a, d in zip(k, dilations, strict=True)]
        else:
            starts, ends = ([self.pick((0, 0, 1, 2)) for _ in spatial] for _ in range(2))
        out = [
            (e + p + q - (a - 1) * d - 1) // s + 1 if e + p + q >= (a - 1) * d + 1 else 0
            for e, p, q, a, d, s in zip(spatial, starts, ends, k, dilations, strides, strict=True)
        ]
        if 0 in out:
            return
        bias = [self.weight(o, 1).reshape(o)] if self.chance(0.6) else []
        y = self.call(
            "Conv", x, self.weight(o, c // groups, *k), *bias, shape=(n, o, *out),
            group=groups, dilations=dilations, strides=strides, pads=[*starts, *ends],
        )  # fmt: skip
        self.after_product(y)

    def after_product(self, y: str) -> None:
        """What often follows a convolution."""
        if self.chance(0.3):
            self.batch_norm(y)
            y = list(self.shapes)[-1]
        if self.chance(0.5):
            self.unary(y)

    def conv_transpose(self, x: str) -> None:
        n, c, *spatial = self.shapes[x]
        if max(spatial) > 12:
            return
        groups = c if self.chance(0.2) else 1
        o = self.pick((1, 2)) * groups if groups > 1 else self.pick(CHANNELS)
        k = [self.pick((1, 2, 3, 4)) for _ in spatial]
        strides = [self.pick((1, 2, 2, 3)) for _ in spatial]
        dilations = [self.pick((1, 1, 1, 2)) for _ in spatial]
        starts, ends = ([int(self.rng.integers(0, min(a, 3))) for a in k] for _ in range(2))
        extra = [self.pick((0, 0, 1)) if s > 1 else 0 for s in strides]
        out = [
            (e - 1) * s + (a - 1) * d + 1 + m - p - q
            for e, s, a, d, m, p, q in zip(spatial, strides, k, dilations, extra, starts, ends, strict=True)
        ]
        if min(out) < 1:
            return
        bias = [self.weight(o, 1).reshape(o)] if self.chance(0.6) else []
        w = self.net.normal(c, o // groups, *k, scale=1 / math.sqrt(c // groups * math.prod(k)))
        self.call(
            "ConvTranspose", x, w, *bias, shape=(n, o, *out),
            group=groups, strides=strides, dilations=dilations, pads=[*starts, *ends], output_padding=extra,
        )  # fmt: skip

    def pool(self, x: str) -> None:
        n, c, *spatial = self.shapes[x]
        k = [min(self.pick((1, 2, 2, 3, 3)), e) for e in spatial]
        strides = [self.pick((1, 2, 2)) for _ in spatial]
        starts, ends = ([int(self.rng.integers(0, (a + 1) // 2)) for a in k] for _ in range(2))
        out = [(e + p + q - a) // s + 1 for e, p, q, a, s in zip(spatial, starts, ends, k, strides, strict=True)]
        more = {"count_include_pad": 1} if self.chance(0.3) else {}
        op = "AveragePool" if more else self.pick(("MaxPool", "AveragePool"))
        self.call(op, x, shape=(n, c, *out), kernel_shape=k, strides=strides, pads=[*starts, *ends], **more)

    def global_pool(self, x: str) -> None:
        n, c, *spatial = self.shapes[x]
        self.call(self.pick(("GlobalAveragePool", "GlobalMaxPool")), x, shape=(n, c, *(1 for _ in spatial)))

    def batch_norm(self, x: str) -> None:
        c = self.shapes[x][1]
        self.like("BatchNormalization", x, self.net.positive(c), self.net.normal(c), self.net.normal(c), self.net.positive(c))

    def instance_norm(self, x: str) -> None:
        c, *spatial = self.shapes[x][1:]
        if math.prod(spatial) >= 9:
            self.like("InstanceNormalization", x, self.net.positive(c), self.net.normal(c), epsilon=1e-2)

    def group_norm(self, x: str) -> None:
        c, *spatial = self.shapes[x][1:]
        groups = self.pick([g for g in range(1, c + 1) if c % g == 0])
        if self.net.opset < 21 or math.prod(spatial) * c // groups < 9:
            return
        self.like("GroupNormalization", x, self.net.positive(c), self.net.normal(c), num_groups=groups, epsilon=1e-2)

    def lrn(self, x: str) -> None:
        self.like("LRN", x, size=self.pick((1, 3, 5)), alpha=0.1)

    def squeeze(self, x: str) -> None:
        """Squeeze and excitation."""
        n, c = self.shapes[x][:2]
        h = max(c // 4, 1)
        s = self.call("GlobalAveragePool", x, shape=(n, c, 1, 1))
        s = self.call("Conv", s, self.weight(h, c, 1, 1), self.net.normal(h), shape=(n, h, 1, 1))
        s = self.like(self.pick(("Relu", "HardSwish")), s)
        s = self.call("Conv", s, self.weight(c, h, 1, 1), self.net.normal(c), shape=(n, c, 1, 1))
        s = self.like(self.pick(("Sigmoid", "HardSigmoid")), s)
        self.like("Mul", x, s)

    def residual(self, x: str) -> None:
        c = self.shapes[x][1]
        y = self.like("Conv", x, self.weight(c, c, 3, 3), self.net.normal(c), pads=[1] * 4)
        y = self.like("Relu", y)
        y = self.like("Conv", y, self.weight(c, c, 1, 1))
        y = self.like("Add", *((x, y) if self.chance(0.5) else (y, x)))
        if self.chance(0.5):
            self.unary(y)

    def resize(self, x: str) -> None:
        n, c, *spatial = self.shapes[x]
        if max(spatial) > 20:
            return
        mode = self.pick(("nearest", "nearest", "linear", "cubic")) if len(spatial) == 2 else self.pick(("nearest", "linear"))
        at = self.pick(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
        if mode == "nearest" or self.chance(0.5):
            scales = [float(self.pick((1, 2, 2, 3))) for _ in spatial]
            out = [int(e * s) for e, s in zip(spatial, scales, strict=True)]
            args = (x, None, np.array([1, 1, *scales], np.float32))
        else:
            out = [self.size() for _ in spatial]
            args = (x, None, None, np.array([n, c, *out], np.int64))
        more = {"nearest_mode": self.pick(("floor", "round_prefer_floor", "ceil"))} if mode == "nearest" else {}
        if mode == "cubic":
            more = {"cubic_coeff_a": -0.5}
        self.call("Resize", *args, shape=(n, c, *out), mode=mode, coordinate_transformation_mode=at, **more)

    def depth_to_space(self, x: str) -> None:
        n, c, h, w = self.shapes[x]
        fits = [b for b in (2, 3) if c % (b * b) == 0]
        if fits:
            b = self.pick(fits)
            self.call("DepthToSpace", x, shape=(n, c // (b * b), h * b, w * b), blocksize=b, mode=self.pick(("DCR", "CRD")))

    def space_to_depth(self, x: str) -> None:
        n, c, h, w = self.shapes[x]
        fits = [b for b in (2, 3) if h % b == 0 and w % b == 0]
        if fits:
            b = self.pick(fits)
            self.call("SpaceToDepth", x, shape=(n, c * b * b, h // b, w // b), blocksize=b)

    def shuffle(self, x: str) -> None:
        """Channels shuffled, as ShuffleNet does."""
        n, c, h, w = self.shapes[x]
        g = self.pick([g for g in range(1, c + 1) if c % g == 0])
        y = self.call("Reshape", x, np.array([n, g, c // g, h, w], np.int64), shape=(n, g, c // g, h, w))
        y = self.call("Transpose", y, shape=(n, c // g, g, h, w), perm=[0, 2, 1, 3, 4])
        self.call("Reshape", y, np.array([n, c, h, w], np.int64), shape=(n, c, h, w))

    def tokens(self, x: str) -> None:
        """Pixels as rows."""
        n, c, h, w = self.shapes[x]
        y = self.call("Reshape", x, np.array([n, c, -1], np.int64), shape=(n, c, h * w))
        if self.chance(0.8):
            self.call("Transpose", y, shape=(n, h * w, c), perm=[0, 2, 1])

    # --- layers of matrices ---

    def linear(self, x: str) -> None:
        *lead, c = self.shapes[x]
        o = self.pick(CHANNELS)
        y = self.call("MatMul", x, self.net.normal(c, o, scale=1 / math.sqrt(c)), shape=(*lead, o))
        if self.chance(0.6):
            bias = self.net.normal(o)
            y = self.like("Add", y, bias) if self.chance(0.5) else self.call("Add", bias, y, shape=self.shapes[y])
        if self.chance(0.4):
            self.unary(y)

    def gemm(self, x: str) -> None:
        shape = self.shapes[x]
        if len(shape) != 2:
            axis = 1
            shape = (shape[0], math.prod(shape[1:]))
            if shape[1] > 2000:
                return
            x = self.call("Flatten", x, shape=shape, axis=axis)
        turned, o = self.chance(0.2), self.pick(CHANNELS)
        m, k = reversed(shape) if turned else shape
        across = int(self.chance(0.7))
        w = self.net.normal(o, k, scale=1 / math.sqrt(k))
        c = [self.net.normal(*self.pick(((o,), (1, o), (m, 1), (m, o), (1,))))] if self.chance(0.6) else []
        more = {"alpha": 0.5, "beta": 2.0} if self.chance(0.2) else {}
        y = self.call("Gemm", x, w if across else w.T.copy(), *c, shape=(m, o), transA=int(turned), transB=across, **more)
        if self.chance(0.4):
            self.unary(y)

    def products(self, x: str) -> None:
        """x @ xᵀ and what follows in attention."""
        *lead, m, k = self.shapes[x]
        if len(lead) > 2 or m > 200:
            return
        q, v = self.like("MatMul", x, self.weight(k, k)), self.like("MatMul", x, self.weight(k, k))
        perm = [*range(len(lead)), len(lead) + 1, len(lead)]
        kt = self.call("Transpose", x, shape=(*lead, k, m), perm=perm)
        s = self.call("MatMul", q, kt, shape=(*lead, m, m))
        s = self.like(self.pick(("Mul", "Div")), s, np.float32(self.pick((0.25, 0.5, 2.0))))
        if self.chance(0.3):
            s = self.like("Add", s, np.where(self.rng.random((m, m)) < 0.3, np.float32(self.pick((-1e4, -5.0))), np.float32(0)))
        if self.chance(0.8):
            s = self.like("Softmax", s, axis=-1)
        self.call("MatMul", s, v, shape=self.shapes[v])

    def heads(self, x: str) -> None:
        """Attention of several heads, as exporters write it."""
        if len(self.shapes[x]) != 3:
            return
        n, m, c = self.shapes[x]
        d, h = self.pick((4, 8, 16)), self.pick((1, 2, 3))
        parts = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            p = self.call("MatMul", x, self.net.normal(c, h * d, scale=1 / math.sqrt(c)), shape=(n, m, h * d))
            p = self.like("Add", p, self.net.normal(h * d)) if self.chance(0.5) else p
            p = self.call("Reshape", p, np.array([0, 0, h, d], np.int64), shape=(n, m, h, d))
            parts.append(self.call("Transpose", p, shape=tuple((n, m, h, d)[a] for a in perm), perm=perm))
        s = self.call("MatMul", parts[0], parts[1], shape=(n, h, m, m))
        s = self.like("Softmax", self.like("Div", s, np.float32(math.sqrt(d))), axis=-1)
        y = self.call("MatMul", s, parts[2], shape=(n, h, m, d))
        y = self.call("Transpose", y, shape=(n, m, h, d), perm=[0, 2, 1, 3])
        y = self.call("Reshape", y, np.array([n, m, h * d], np.int64), shape=(n, m, h * d))
        y = self.call("MatMul", y, self.net.normal(h * d, c, scale=1 / math.sqrt(h * d)), shape=(n, m, c))
        self.like("Add", x, y)

    def layer_norm(self, x: str) -> None:
        c = self.shapes[x][-1]
        if c < 5:
            return
        scale, bias = self.net.positive(c), self.net.normal(c)
        if self.chance(0.5):
            self.like("LayerNormalization", x, scale, *((bias,) if self.chance(0.7) else ()), axis=-1, epsilon=1e-2)
            return
        one = (*self.shapes[x][:-1], 1)
        mean = self.call("ReduceMean", x, np.array([-1], np.int64), shape=one, keepdims=1)
        off = self.like("Sub", x, mean)
        var = self.call("ReduceMean", self.like("Pow", off, np.float32(2)), np.array([-1], np.int64), shape=one, keepdims=1)
        size = self.like("Sqrt", self.like("Add", var, np.float32(1e-2)))
        y = self.like("Mul", self.like("Div", off, size), scale)
        self.like("Add", y, bias)
        del self.shapes[off]  # a difference that others read too is not guarded against rounding

    # --- layers of anything ---

    def unary(self, x: str) -> None:
        fn = self.pick(UNARY)
        rank = len(self.shapes[x])
        match fn:
            case "Clip":
                low, high = sorted(self.net.normal(2))
                ends = self.pick(((low, high), (low,), (None, high)))
                self.like("Clip", x, *ends)
            case "Relu6":
                self.like("Clip", x, np.float32(0), np.float32(6))
            case "PRelu":
                per_channel = rank > 1 and self.chance(0.7)
                slope = self.net.normal(self.shapes[x][1], *(1,) * (rank - 2)) if per_channel else self.net.normal(1)
                self.like("PRelu", x, slope)
            case "Silu":
                self.like("Mul", x, self.like("Sigmoid", x))
            case "Square":
                self.like("Mul", x, x) if self.chance(0.5) else self.like("Pow", x, np.float32(2))
            case "Root":
                self.like("Sqrt", self.like("Add", self.like("Abs", x), np.float32(0.1)))
            case "Gelu":
                self.like("Gelu", x, approximate=self.pick(("none", "tanh")))
            case "GeluParts":
                e = self.like("Erf", self.like("Div", x, np.float32(math.sqrt(2))))
                y = self.like("Mul", x, self.like("Add", e, np.float32(1)))
                self.like("Mul", y, np.float32(0.5))
            case "HardSwishParts":
                y = self.like("Clip", self.like("Add", x, np.float32(3)), np.float32(0), np.float32(6))
                self.like("Div", self.like("Mul", x, y), np.float32(6))
            case _:
                self.like(fn, x)

    def constant(self, x: str) -> None:
        """Arithmetic with a constant that is broadcast somehow."""
        shape = self.shapes[x]
        op = self.pick(("Add", "Mul", "Sub", "Div", "Max", "Min"))
        rank = len(shape)
        kinds = [(), (1,), shape, shape[-1:], (1,) * rank]
        if rank >= 2:
            kinds += [(shape[1], *(1,) * (rank - 2)), (1, shape[1], *(1,) * (rank - 2)), (*shape[:-1], 1)]
        of = self.pick(kinds)
        value = self.net.positive(*of) if op == "Div" else self.net.normal(*of)
        swapped = op != "Div" and self.chance(0.3)
        self.call(op, *((value, x) if swapped else (x, value)), shape=shape)

    def binary(self, x: str) -> None:
        shape = self.shapes[x]
        others = [t for t, s in self.shapes.items() if _broadcasts(s, shape)]
        y = self.pick(others)
        op = self.pick(("Add", "Add", "Mul", "Max", "Min", "Sub"))
        if op == "Sub" and y == x:
            return
        self.call(op, *((x, y) if self.chance(0.5) else (y, x)), shape=shape)

    def where(self, x: str) -> None:
        c = self.call("Greater", x, np.float32(0.1), shape=self.shapes[x])
        del self.shapes[c]
        y = self.pick([t for t, s in self.shapes.items() if s == self.shapes[x]])
        self.call("Where", c, x, self.pick((y, np.float32(0.5))), shape=self.shapes[x])

    def concat(self, x: str) -> None:
        shape = self.shapes[x]
        axis = self.pick((1, 1, 1, *range(len(shape)))) if len(shape) > 1 else 0
        fits = [t for t, s in self.shapes.items() if len(s) == len(shape) and _but(s, axis) == _but(shape, axis)]
        parts = [x, *(self.pick(fits) for _ in range(self.pick((1, 1, 2))))]
        if self.chance(0.1):
            parts.append(self.net.normal(*(2 if a == axis else n for a, n in enumerate(shape))))
        extent = sum(p.shape[axis] if isinstance(p, np.ndarray) else self.shapes[p][axis] for p in parts)
        if extent > 200:
            return
        order = self.rng.permutation(len(parts))
        self.call("Concat", *(parts[i] for i in order), shape=(*shape[:axis], extent, *shape[axis + 1 :]), axis=axis)

    def split(self, x: str) -> None:
        shape = self.shapes[x]
        axis = self.pick([a for a, n in enumerate(shape) if n > 1] or [0])
        if shape[axis] < 2:
            return
        cut = int(self.rng.integers(1, shape[axis]))
        sizes = (cut, shape[axis] - cut)
        self.read.add(x)
        for y, n in zip(self.net("Split", x, np.array(sizes, np.int64), outputs=2, axis=axis), sizes, strict=True):
            self.shapes[y] = (*shape[:axis], n, *shape[axis + 1 :])

    def slice(self, x: str) -> None:
        shape = self.shapes[x]
        axis = self.pick(range(len(shape)))
        n = shape[axis]
        start, step = int(self.rng.integers(0, n)), self.pick((1, 1, 2))
        end = int(self.rng.integers(start + 1, n + 1))
        args = [np.array([i], np.int64) for i in (start, end, axis, step)]
        self.call("Slice", x, *args, shape=(*shape[:axis], -(-(end - start) // step), *shape[axis + 1 :]))

    def gather(self, x: str) -> None:
        shape = self.shapes[x]
        axis = self.pick(range(len(shape)))
        at = self.rng.integers(0, shape[axis], self.pick((1, 3, 8)))
        self.call("Gather", x, at.astype(np.int64), shape=(*shape[:axis], len(at), *shape[axis + 1 :]), axis=axis)

    def pad(self, x: str) -> None:
        shape = self.shapes[x]
        mode = self.pick(("constant", "constant", "reflect", "edge"))
        inner = [a >= min(2, len(shape) - 1) or self.chance(0.2) for a in range(len(shape))]
        most = [min(3, n - 1 if mode == "reflect" else 3) * take for take, n in zip(inner, shape, strict=True)]
        starts, ends = ([int(self.rng.integers(0, m + 1)) for m in most] for _ in range(2))
        value = [np.float32(self.pick((0, 0, 1.5)))] if mode == "constant" and self.chance(0.5) else []
        out = tuple(n + a + b for n, a, b in zip(shape, starts, ends, strict=True))
        self.call("Pad", x, np.array([*starts, *ends], np.int64), *value, shape=out, mode=mode)

    def transpose(self, x: str) -> None:
        perm = [int(a) for a in self.rng.permutation(len(self.shapes[x]))]
        self.call("Transpose", x, shape=tuple(self.shapes[x][a] for a in perm), perm=perm)

    def reshape(self, x: str) -> None:
        shape = list(self.shapes[x])
        if self.chance(0.5) and len(shape) > 1:  # two axes as one
            a = int(self.rng.integers(0, len(shape) - 1))
            shape[a : a + 2] = [shape[a] * shape[a + 1]]
        elif len(shape) < 5:  # one axis as two
            a = int(self.rng.integers(0, len(shape)))
            f = self.pick([f for f in range(1, shape[a] + 1) if shape[a] % f == 0])
            shape[a : a + 1] = [f, shape[a] // f]
        self.call("Reshape", x, np.array(shape, np.int64), shape=tuple(shape))

    def reduce(self, x: str) -> None:
        shape = self.shapes[x]
        axes = sorted({int(a) for a in self.rng.integers(0, len(shape), self.pick((1, 1, 2)))})
        keep = int(self.chance(0.7))
        out = tuple(1 if a in axes else n for a, n in enumerate(shape) if keep or a not in axes)
        op = self.pick(("ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1"))
        if out:
            self.call(op, x, np.array(axes, np.int64), shape=out, keepdims=keep)

    def softmax(self, x: str) -> None:
        self.like(self.pick(("Softmax", "Softmax", "LogSoftmax")), x, axis=self.pick(range(len(self.shapes[x]))))

    def tile(self, x: str) -> None:
        shape = self.shapes[x]
        times = [self.pick((1, 1, 1, 2)) for _ in shape]
        out = tuple(n * t for n, t in zip(shape, times, strict=True))
        if math.prod(out) < 1 << 14:
            self.call("Tile", x, np.array(times, np.int64), shape=out)

    @property
    def images(self) -> list[Callable[[str], None]]:
        return [
            self.conv, self.conv, self.conv, self.conv, self.conv_transpose, self.pool, self.global_pool, self.batch_norm,
            self.instance_norm, self.group_norm, self.lrn, self.squeeze, self.residual, self.resize, self.depth_to_space,
            self.space_to_depth, self.shuffle, self.tokens,
        ]  # fmt: skip

    @property
    def signals(self) -> list[Callable[[str], None]]:
        return [
            self.conv, self.conv, self.conv_transpose, self.pool, self.batch_norm, self.instance_norm, self.heads, self.resize,
        ]  # fmt: skip

    @property
    def matrices(self) -> list[Callable[[str], None]]:
        return [self.linear, self.linear, self.gemm, self.products, self.layer_norm]

    @property
    def any_rank(self) -> list[Callable[[str], None]]:
        return [
            self.unary, self.unary, self.constant, self.constant, self.binary, self.binary, self.where, self.concat, self.concat,
            self.split, self.slice, self.gather, self.pad, self.transpose, self.reshape, self.reduce, self.softmax, self.tile,
        ]  # fmt: skip


def _but(shape: Shape, axis: int) -> Shape:
    """The extents of all axes but one."""
    return shape[:axis] + shape[axis + 1 :]


def _broadcasts(a: Shape, b: Shape) -> bool:
    """Whether a tensor of shape a is broadcast to b."""
    return len(a) <= len(b) and all(m in (1, n) for m, n in zip(reversed(a), reversed(b), strict=False))


@contextlib.contextmanager
def small_is_large(seed: int) -> Iterator[None]:
    """What fusion does to large images only, in every other graph to small ones too."""
    with contextlib.ExitStack() as stack:
        if seed % 2:
            stack.enter_context(mock.patch.object(pad, "LARGE", 16))
            stack.enter_context(mock.patch.object(unfold, "PIXELS", 16))
        yield


def errors(seed: int) -> dict[str, float]:
    """The largest relative error of an output by precision, where it is beyond the bound."""
    model = Graph(seed).model()
    inputs = feeds(model, seed + 1)
    expected = reference(model, inputs)
    found = {}
    with small_is_large(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for precision, (archs, bound, unit) in BOUNDS.items():
            plan = without_code(model, archs, precision=precision)
            entry = plan.entries[0]
            for section in entry.sections:
                got = CpuEngine(plan, entry, section, check_padding=True).run(inputs)
                for name, e in expected.items():
                    error = relative_error(got[name], e)
                    if not error <= bound and not error <= AMPLIFIED * moved(model, inputs, name, unit):
                        found[precision] = max(found.get(precision, 0.0), error) if error == error else error
    return found


def moved(model: onnx.ModelProto, inputs: dict[str, np.ndarray], name: str, by: float) -> float:
    """How far an output moves in ONNX Runtime when inputs and weights do by so much: what rounding alone may do."""
    expected, worst = reference(model, inputs)[name], 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def beside(values: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
            return np.asarray(values * (1 + by * rng.uniform(-1, 1, values.shape)), np.float32)

        other = onnx.ModelProto()
        other.CopyFrom(model)
        exact = {n.input[2] for n in model.graph.node if n.op_type == "Resize" and len(n.input) > 2}
        for t in other.graph.initializer:
            values = numpy_helper.to_array(t)
            if values.dtype == np.float32 and values.size > 1 and t.name not in exact:  # single numbers are not rounded either
                t.CopyFrom(numpy_helper.from_array(beside(values), t.name))
        near = {n: beside(v) for n, v in inputs.items()}
        worst = max(worst, relative_error(reference(other, near)[name], expected))
    return worst


def main(first: int, last: int, step: int = 1) -> None:
    """Tries the seeds, each in a process of its own."""
    for seed in range(first, last, step):
        if seed % 100 == 0:
            print(f"# {seed}", flush=True)
        apart(seed, _tried)
    print(f"{first} to {last}: done", flush=True)


def _tried(seed: int) -> int:
    """The exit code of a seed's process, which tells what is wrong."""
    try:
        found = errors(seed)
    except Exception as error:
        print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return 1
    if found:
        print(f"{seed}: {', '.join(f'{p} {e:.1e}' for p, e in found.items())}", flush=True)
    return int(bool(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
