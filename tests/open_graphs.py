"""Random small graphs whose batch, height and width, or batch and tokens, are open: what is made of sizes in any order.

`python -m tests.open_graphs 0 300` tries these seeds and tells which went wrong; with `sm_90a` behind that, also which have
no kernels. Each graph is compiled for a range, and held to ONNX Runtime at the least and the greatest sizes and at some between
them; shapes outside of the range must be refused.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from tccompile.errors import InputError, UnsupportedError
from tccompile.ir.metric import relative_error
from tccompile.options import Options, as_sizes
from tccompile.pipeline import Dump, Told, quiet, read, to_parts, to_patterns, without_code
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.ranges.box import corners, scattered
from tccompile.ranges.pool import Known
from tccompile.runtime.session import Session
from tccompile.schedule.timings import NO_TIMINGS
from tests.apart import apart
from tests.open_layers import ANYWHERE, OF_IMAGES, OF_ROWS, Layers

BOUND, ROUNDED = 1e-5, 3e-2
"""The errors allowed, of all and of graphs in which something is rounded to bytes."""

REFUSED = 2
"""The exit code of a seed's process for a graph that is refused."""


class Open(Layers):
    """A graph that grows by one layer after another, of images (batch, channels, h, w) or of rows (batch, tokens, channels)."""

    def model_of(self, layers: int) -> onnx.ModelProto:
        kinds = IMAGES if self.images else ROWS
        for _ in range(layers):
            getattr(self, self.pick(kinds))()
        shape = ["batch", self.first, "h", "w"] if self.images else ["batch", "tokens", self.first]
        return self.model("x", TensorProto.FLOAT, shape, self.op("Tanh", self.x))

    def ranges(self) -> dict[str, tuple[int, ...]]:
        """Sizes from the least with which most layers work; batches may be none."""
        low = int(self.pick((1, 2, 3)))
        batch = {"batch": (int(self.pick((0, 1, 1, 1, 2))), 3)}
        if self.images:
            return batch | {"h": (low + 4, 19), "w": self.pick(((low + 3, 17, 2), (16, 64, 8)))}
        return batch | {"tokens": self.pick(((low, 21), (low, 21), (0, 9), (8, 96, 8)))}

    # --- layers of anything ---

    def unary(self) -> None:
        self.x = self.op(self.pick(("Relu", "Sigmoid", "Abs", "Neg", "Elu", "Softplus", "Erf")), self.x)

    def twice(self) -> None:
        self.x = self.op(self.pick(("Add", "Mul", "Max")), self.x, self.op("Sigmoid", self.x))

    def normalized(self) -> None:
        largest = self.op("ReduceMax", self.x, axes=list(self.pick(((1,), (2,), (1, 2), (-1,)))), keepdims=1)
        self.x = self.op("Sub", self.x, largest)

    def share(self) -> None:
        """Of how many there are: a size is a number."""
        n = self.op("Cast", self.scalar(self.pick((0, 2) if self.images else (0, 1))), to=TensorProto.FLOAT)
        self.x = self.op(self.pick(("Mul", "Div", "Add")), self.x, self.op("Sqrt", n) if self.rng.random() < 0.4 else n)

    def positions(self) -> None:
        """Adds where elements are, from 0 to 1 or as angles."""
        axis = self.pick((2, 3) if self.images else (1,))
        places = self.op("Cast", self.places(axis), to=TensorProto.FLOAT)
        places = self.op("Div", places, self.op("Cast", self.scalar(axis), to=TensorProto.FLOAT))
        if self.rng.random() < 0.5:
            places = self.op("Sin", self.op("Mul", places, self.value(np.float32(6.28))))
        behind = [3] if axis == 2 else [] if axis == 3 else [2]
        shape = self.numbers(-1, *[1] * len([b for b in behind if b != axis]))
        self.x = self.op("Add", self.x, self.op("Reshape", places, shape))

    def flipped(self) -> None:
        axis = self.pick((2, 3) if self.images else (1,))
        last = self.op("Sub", self.scalar(axis), self.value(np.int64(1)))
        self.x = self.op("Gather", self.x, self.op("Sub", last, self.places(axis)), axis=axis)

    def cut(self) -> None:
        """All but the last element, or every other one."""
        axis = self.pick((2, 3) if self.images else (1,))
        end, step = self.pick(((-1, 1), (1 << 40, 2), (1 << 40, 1)))
        both = [self.op("Slice", self.x, *(self.numbers(n) for n in (0, end, axis, step)))]
        self.x = self.op("Concat", *both, self.x, axis=axis)

    def first_half(self) -> None:
        axis = self.pick((2, 3) if self.images else (1,))
        half = self.op("Div", self.op("Add", self.extent(self.x, axis), self.numbers(1)), self.numbers(2))
        self.x = self.op("Slice", self.x, self.numbers(0), half, self.numbers(axis))

    def padded(self) -> None:
        ends = [0, 0, 1, 2, 0, 0, 1, 0] if self.images else [0, 1, 0, 0, 2, 0]
        self.x = self.op("Pad", self.x, self.numbers(*ends), mode=self.pick(("constant", "edge")))

    def expanded(self) -> None:
        ones = self.op("ConstantOfShape", self.op("Shape", self.x), value=onnx.numpy_helper.from_array(np.float32([0.5])))
        self.x = self.op("Mul", self.x, ones)

    # --- layers of images ---

    def conv(self) -> None:
        out, k = int(self.pick((4, 8, 12))), int(self.pick((1, 3)))
        strides = [int(self.pick((1, 1, 2)))] * 2
        w = self.weight(out, self.channels, k, k)
        self.x, self.channels = self.op("Conv", self.x, w, strides=strides, pads=[k // 2] * 4), out

    def pool(self) -> None:
        self.x = self.op(self.pick(("MaxPool", "AveragePool")), self.x, kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1])

    def resized(self) -> None:
        kind = {"mode": self.pick(("linear", "nearest", "cubic"))}
        kind["coordinate_transformation_mode"] = self.pick(("half_pixel", "asymmetric", "pytorch_half_pixel"))
        whole = [self.extent(self.x, 0), self.numbers(self.channels)]
        match self.pick(("size", "scale", "back")):
            case "size":
                size = self.op("Concat", *whole, self.numbers(int(self.pick((9, 12))), 7), axis=0)
                self.x = self.op("Resize", self.x, "", "", size, **kind)
            case "scale":
                by = self.pick((2.0, 1.5, 0.5))
                self.x = self.op("Resize", self.x, "", self.value(np.array([1, 1, by, 2], np.float32)), **kind)
            case _:
                to = [self.op("Add", self.extent(self.x, a), self.numbers(3)) for a in (2, 3)]
                self.x = self.op("Resize", self.x, "", "", self.op("Concat", *whole, *to, axis=0), **kind)

    def flat(self) -> None:
        """As rows, mixed, and as an image again."""
        shape = self.op("Shape", self.x)
        rows = self.op("Reshape", self.x, self.op("Concat", self.extent(self.x, 0), self.numbers(self.channels, -1), axis=0))
        mixed = self.op("MatMul", self.weight(self.channels, self.channels), rows)
        self.x = self.op("Reshape", self.op("Softmax", mixed, axis=int(self.pick((1, 2)))), shape)

    def instance(self) -> None:
        self.x = self.op("InstanceNormalization", self.x, self.weight(self.channels), self.weight(self.channels))

    def pooled(self) -> None:
        self.x = self.op("Mul", self.x, self.op("Sigmoid", self.op("GlobalAveragePool", self.x)))

    # --- layers of rows ---

    def linear(self) -> None:
        out = int(self.pick((4, 8, 16)))
        self.x, self.channels = self.op("MatMul", self.x, self.weight(self.channels, out)), out

    def attention(self) -> None:
        """With a mask of what is ahead, of what is far away, or of nothing."""
        scores = self.op("MatMul", self.x, self.op("Transpose", self.x, perm=[0, 2, 1]))
        places = self.places(1)
        ahead = self.op("Sub", self.op("Unsqueeze", places, self.numbers(0)), self.op("Unsqueeze", places, self.numbers(1)))
        match self.pick(("causal", "near", "none", "bias")):
            case "causal":
                hidden = self.op("Greater", ahead, self.value(np.int64(0)))
                scores = self.op("Where", hidden, self.value(np.float32(-1e4)), scores)
            case "near":
                far = self.op("Greater", self.op("Abs", ahead), self.op("Div", self.scalar(1), self.value(np.int64(2))))
                scores = self.op("Where", far, self.value(np.float32(-1e4)), scores)
            case "bias":
                scores = self.op("Sub", scores, self.op("Abs", self.op("Cast", ahead, to=TensorProto.FLOAT)))
        self.x = self.op("MatMul", self.op("Softmax", scores, axis=-1), self.x)

    def layer_norm(self) -> None:
        self.x = self.op("LayerNormalization", self.x, self.weight(self.channels, scale=1), self.weight(self.channels))

    def split(self) -> None:
        """Into heads and back."""
        ends = [self.extent(self.x, 0), self.extent(self.x, 1)]
        heads = self.op("Reshape", self.x, self.op("Concat", *ends, self.numbers(-1, 1 if self.channels % 2 else 2), axis=0))
        heads = self.op("Relu", self.op("Transpose", heads, perm=[0, 2, 1, 3]))
        whole = self.op("Concat", *ends, self.numbers(self.channels), axis=0)
        self.x = self.op("Reshape", self.op("Transpose", heads, perm=[0, 2, 1, 3]), whole)

    def recurrent(self) -> None:
        steps = self.op("Transpose", self.x, perm=[1, 0, 2])
        w, r = self.weight(1, 24, self.channels, scale=0.3), self.weight(1, 24, 8, scale=0.3)
        y = self.op("GRU", steps, w, r, hidden_size=8)
        self.x, self.channels = self.op("Transpose", self.op("Squeeze", y, self.numbers(1)), perm=[1, 0, 2]), 8


ANY = ("unary", "twice", "normalized", "share", "positions", "flipped", "cut", "first_half", "padded", "expanded")
IMAGES = (*ANY, *ANYWHERE, *OF_IMAGES, "conv", "conv", "pool", "resized", "resized", "flat", "instance", "pooled")
ROWS = (*ANY, *ANYWHERE, *OF_ROWS, "linear", "attention", "attention", "layer_norm", "split", "recurrent")


def error_of(seed: int, arch: str = "") -> float | str:
    """The largest error of a graph at some sizes of its range; why it is refused, if that is so.

    arch  kernels for all sizes are chosen for it, too
    """
    graph = Open(seed)
    model = graph.model_of(int(graph.rng.integers(2, 5)))
    ranges = graph.ranges()
    oracle = onnxruntime.InferenceSession(model.SerializeToString())
    if not all(_runs(oracle, graph, [getattr(s, end) for s in as_sizes(ranges).values()]) for end in ("low", "high")):
        ranges["batch"] = (1, 3)
        if not all(_runs(oracle, graph, [getattr(s, end) for s in as_sizes(ranges).values()]) for end in ("low", "high")):
            return 0.0  # nothing of an image is left, say
    sizes = as_sizes(ranges)
    try:
        plan = from_bytes(to_bytes(without_code(model, precision="fp32", ranges=ranges)))
        session = Session(plan, device="cpu")
        if arch:
            patterns, options = to_patterns(read(model), Options(archs=(arch,), ranges=sizes), Dump(None), quiet, Told())
            known = Known(NO_TIMINGS, patterns)
            for pattern in patterns:
                to_parts(pattern, options, quiet, (), NO_TIMINGS, known)
    except UnsupportedError as refusal:
        return str(refusal)
    box, worst = tuple(sizes.values()), 0.0
    for point in dict.fromkeys((corners(box)[0], corners(box)[-1], *scattered(box, 4))):
        x = graph.rng.standard_normal(_shape(graph, point)).astype(np.float32)
        try:
            (expected,) = oracle.run(None, {"x": x})
        except Exception:
            continue  # it cannot be computed at these sizes
        (out,) = session.run(None, {"x": x})
        error = relative_error(out, expected) if out.shape == expected.shape else np.inf
        if not error <= (ROUNDED if graph.bytes else BOUND) and np.array_equal(out, _of_fixed(model, x)):
            continue  # a neighbour at half a pixel: so it is without a range
        worst = max(worst, error) if error == error else error
    for beyond in ([s.low - s.step for s in box], [s.all[-1] + s.step for s in box]):
        if min(beyond) >= 0:
            try:
                session.run(None, {"x": np.zeros(_shape(graph, beyond), np.float32)})
            except InputError:
                continue
            return float("inf")
    return 0.0 if graph.bytes and worst <= ROUNDED else worst


def _runs(oracle: onnxruntime.InferenceSession, graph: Open, point: list[int]) -> bool:
    try:
        oracle.run(None, {"x": np.zeros(_shape(graph, point), np.float32)})
    except Exception:
        return False
    return True


def _of_fixed(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """What a plan for this shape alone gives."""
    return Session(without_code(model, {"x": x.shape}, "fp32"), device="cpu").run(None, {"x": x})[0]


def _shape(graph: Open, point: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return (point[0], graph.first, *point[1:]) if graph.images else (*point, graph.first)


def main(first: int, last: int, arch: str = "") -> None:
    """Tries the seeds, each in a process of its own."""
    print(f"# {first} to {last}", flush=True)
    refused = 0
    for seed in range(first, last):
        refused += apart(seed, partial(_tried, arch=arch)) == REFUSED
    print(f"{first} to {last}: done, {refused} refused", flush=True)


def _tried(seed: int, arch: str) -> int:
    """The exit code of a seed's process, which tells what is wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = error_of(seed, arch)
    except Exception as error:
        print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return 1
    if isinstance(found, str):
        print(f"{seed}: refused: {found[:300]}", flush=True)
        return REFUSED
    if not found <= BOUND:
        print(f"{seed}: {found:.1e}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
