"""Real networks for tests: skeletons hydrated with random weights, ONNX Runtime as the oracle, random inputs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

MODELS = Path(__file__).parent / "models"

CONVOLUTIONAL = (
    "resnet18", "resnet50", "resnet50_dynbatch", "vgg16", "googlenet", "densenet121", "mobilenet_v2", "efficientnet_b0",
    "unet_denoise", "esrgan_x4", "espcn_x3", "style_transfer",
)  # fmt: skip
RECURRENT = ("deepspeech_gru", "lstm_lm")
OTHERS = ("vit_b_16", "bert_base", "taesd_decoder", "sd_vae_decoder", "ddpm_unet")


def skeleton(name: str) -> onnx.ModelProto:
    """The complete model: each weight that the file leaves out is drawn from the normal distribution it names.

    The generator is seeded by the weight's name, so all machines get the same model. Activations have a trained network's
    range; outputs mean nothing.
    """
    model = onnx.load(MODELS / f"{name}.onnx")
    missing = json.loads(next(p.value for p in model.metadata_props if p.key == "skeleton_weights"))
    for weight, w in missing.items():
        rng = np.random.default_rng(zlib.crc32(weight.encode()))
        values = rng.standard_normal(w["shape"], dtype=np.float32) * np.float32(w["std"]) + np.float32(w["mean"])
        model.graph.initializer.append(numpy_helper.from_array(values.astype(w.get("dtype", "float32")), weight))
    del model.metadata_props[:]
    return model


def shortened(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """The part of the model that computes one of its tensors, a float one, as a model."""
    out, wanted = onnx.ModelProto(), {output}
    out.CopyFrom(model)
    kept = []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= {*node.input}
    del out.graph.node[:], out.graph.output[:], out.graph.initializer[:]
    out.graph.node.extend(reversed(kept))
    out.graph.initializer.extend(t for t in model.graph.initializer if t.name in wanted)
    inputs = [v for v in model.graph.input if v.name in wanted]
    del out.graph.input[:]
    out.graph.input.extend(inputs)
    out.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
    return out


def feeds(model: onnx.ModelProto, seed: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """Random inputs by name: standard normal floats, small integers, booleans; `shapes` for those with symbolic extents."""
    rng = np.random.default_rng(seed)
    weights = {t.name for t in model.graph.initializer}
    out = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        shape = (shapes or {}).get(value.name) or tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype.kind == "b":
            out[value.name] = rng.integers(0, 2, shape).astype(bool)
        elif dtype.kind in "iu":
            out[value.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            out[value.name] = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
    return out


def reference(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's outputs by name, by ONNX Runtime on the CPU without any of its optimizations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # the other cores run other tests, and threads that wait for work keep them busy
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def relative_error(out: np.ndarray, ref: np.ndarray) -> float:
    """||out - ref|| / ||ref|| in float64; NaN if either holds one, so that no comparison with it passes."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape, f"{out.shape} instead of {ref.shape}"
    norm = np.linalg.norm(ref)
    return float(np.linalg.norm(out - ref) / norm) if norm else float(np.linalg.norm(out))


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as an exporter of fp16 networks writes it: fp16 weights, inputs and outputs."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for i, t in enumerate(out.graph.initializer):
        values = numpy_helper.to_array(t)
        if values.dtype == np.float32:
            out.graph.initializer[i].CopyFrom(numpy_helper.from_array(values.astype(np.float16), t.name))
    for value in (*out.graph.input, *out.graph.output, *out.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return out
