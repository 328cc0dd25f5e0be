"""Small models of several kinds, the same fine-tuned, and plans of them that the CPU engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tccompile.load.model import Model, sources
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan
from tccompile.runtime.session import Session
from tests.rewrites.common import Net


def convolutions() -> Net:
    """Two convolutions, the first one with a batch normalization that is folded into it, and one in groups."""
    n = Net(x=(1, 8, 6, 6))
    h = n("Conv", "x", n.normal(16, 8, 3, 3, scale=0.1), n.normal(16), pads=[1] * 4)
    h = n("BatchNormalization", h, n.positive(16), n.normal(16), n.normal(16), n.positive(16))
    h = n("Conv", n("Relu", h), n.normal(16, 8, 3, 3, scale=0.1), n.normal(16), pads=[1] * 4, group=2)
    return n.out(n("GlobalAveragePool", h))


def products() -> Net:
    """A Gemm that has its weights as (outputs, inputs), and a product that has them as (inputs, outputs), all of one extent."""
    n = Net(x=(4, 16))
    h = n("Relu", n("Gemm", "x", n.normal(16, 16, scale=0.25), n.normal(16), transB=1))
    return n.out(n("Add", n("MatMul", h, n.normal(16, 16, scale=0.25)), n.normal(16)))


def attention() -> Net:
    """A layer with two heads, and a normalization."""
    n = Net(x=(1, 6, 16))
    h = n("LayerNormalization", "x", n.positive(16), n.normal(16))
    shape, heads = np.array([1, 6, 2, 8]), []
    for _ in range(3):
        one = n("Add", n("MatMul", h, n.normal(16, 16, scale=0.25)), n.normal(16, scale=0.1))
        heads.append(n("Transpose", n("Reshape", one, shape), perm=[0, 2, 1, 3]))
    q, k, v = heads
    scores = n("Softmax", n("Mul", n("MatMul", q, n("Transpose", k, perm=[0, 1, 3, 2])), np.float32(8**-0.5)), axis=-1)
    mixed = n("Reshape", n("Transpose", n("MatMul", scores, v), perm=[0, 2, 1, 3]), np.array([1, 6, 16]))
    return n.out(n("Add", "x", n("MatMul", mixed, n.normal(16, 16, scale=0.25))))


def of_bytes() -> Net:
    """A quantized convolution whose weights and biases are integers."""
    n = Net(x=(1, 16, 5, 5))
    rng = np.random.default_rng(0)
    w, b = rng.integers(-90, 90, (16, 16, 3, 3), np.int8), rng.integers(-900, 900, 16, np.int32)
    scales = (n.positive(16) / 50).astype(np.float32)
    q = n("QuantizeLinear", "x", np.float32(0.05), np.uint8(128))
    parameters = np.float32(0.05), np.uint8(128), w, scales, np.zeros(16, np.int8), np.float32(2.0), np.uint8(120), b
    y = n("QLinearConv", q, *parameters, pads=[1] * 4)
    return n.out(n("DequantizeLinear", y, np.float32(2.0), np.uint8(120)))


def recurrent() -> Net:
    n = Net(x=(5, 2, 8))
    return n.out(n("LSTM", "x", n.normal(1, 48, 8, scale=0.3), n.normal(1, 48, 12, scale=0.3), n.normal(1, 96), hidden_size=12))


def taken_apart() -> Net:
    """Weights that an exporter cuts, repeats and normalizes in the graph."""
    n = Net(x=(3, 8))
    rows = n.normal(8, 16)
    low, high = n("Split", n.normal(16, scale=0.3), num_outputs=2, outputs=2)
    left = n("Slice", rows, np.array([0]), np.array([8]), np.array([1]))
    right = n("Mul", n.normal(8, 8), n("Div", n.positive(8, 1), n("ReduceL2", rows, np.array([1]))))
    h = n("Add", n("MatMul", "x", n("Mul", left, n("Slice", n.normal(9), np.array([1]), np.array([9])))), low)
    h = n("Add", n("MatMul", n("Relu", h), right), n("Concat", high, axis=0))
    return n.out(n("Mul", h, n("Tile", n.positive(1, 4), np.array([3, 2]))))


KINDS: Mapping[str, Callable[[], Net]] = {
    "convolutions": convolutions, "products": products, "attention": attention, "bytes": of_bytes, "recurrent": recurrent,
    "taken apart": taken_apart,
}  # fmt: skip


def tuned(model: onnx.ModelProto, names: tuple[str, ...] | None = None, by: float = 0.05) -> onnx.ModelProto:
    """The model with random deltas on its weights of several elements, but for indices; all of them or those named."""
    out, rng = onnx.ModelProto(), np.random.default_rng(7)
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.size < 8 or values.dtype == np.int64 or (names is not None and tensor.name not in names) or not values.any():
            continue
        moved = values * (1 + by * rng.standard_normal(values.shape))
        whole = np.rint(moved).clip(-127, 127) if values.dtype == np.int8 else moved
        tensor.CopyFrom(numpy_helper.from_array(whole.astype(values.dtype), tensor.name))
    return out


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return dict(sources(model))


def plan_of(model: Model, precision: str = "mixed") -> Plan:
    return without_code(model, precision=precision)


def bits(plan: Plan) -> dict[str, bytes]:
    """Every constant's bytes."""
    return {name: bytes(plan.weight(name)) for name in plan.weights}


def outputs(plan: Plan, seed: int = 0) -> list[np.ndarray]:
    with Session(plan, "cpu") as session:
        return session.run(None, feeds(plan, seed))


def feeds(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    program, rng = plan.entries[0].program, np.random.default_rng(seed)
    return {name: rng.standard_normal(program.tensors[name].shape).astype(np.float32) for name in program.inputs}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A file of the format safetensors; `kinds` names types that NumPy does not have."""
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int8": "I8"}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    data = b""
    for name, values in arrays.items():
        raw = np.ascontiguousarray(values).tobytes()
        kind = (kinds or {}).get(name) or names[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
