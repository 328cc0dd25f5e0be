"""What quantizers, optimizers and converters make of models that were exported before, into the same folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization
from onnxruntime.quantization import QuantFormat, QuantType
from onnxruntime.transformers import float16, optimizer
from onnxruntime.transformers.fusion_options import FusionOptions

from tests.zoo.entry import Entry


class Rows(quantization.CalibrationDataReader):
    """The model's own inputs, and noisy ones, to measure ranges with."""

    def __init__(self, inputs: dict[str, np.ndarray]) -> None:
        rng = np.random.default_rng(2)
        noisy = {
            n: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype) if x.dtype.kind == "f" else x for n, x in inputs.items()
        }
        self._rows = iter([inputs, noisy])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rows, None)


def _made(source: str, tool: Callable[[Path, Path, dict[str, np.ndarray]], None], folder: Path) -> Any:
    before, after = folder / f"{source}.onnx", folder / f".{source}.made.onnx"
    with np.load(before.with_suffix(".npz")) as data:
        inputs = dict(data)
    try:
        tool(before, after, inputs)
        model = onnx.load(after)
    finally:
        after.unlink(missing_ok=True)
    types = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    return model, {n: x.astype(types[n]) for n, x in inputs.items()}


def _dynamic(before: Path, after: Path, _: Any, **options: Any) -> None:
    quantization.quantize_dynamic(before, after, **options)


def _static(before: Path, after: Path, inputs: dict[str, np.ndarray], **options: Any) -> None:
    prepared = after.with_suffix(".prepared")
    try:
        quantization.quant_pre_process(str(before), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(str(prepared), str(after), Rows(inputs), **options)
    finally:
        prepared.unlink(missing_ok=True)


def _optimized(before: Path, after: Path, _: Any, level: str = "ORT_ENABLE_EXTENDED") -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(after)
    onnxruntime.InferenceSession(str(before), options, providers=["CPUExecutionProvider"])


def _fused(before: Path, after: Path, _: Any, kind: str = "bert", heads: int = 4, hidden: int = 128) -> None:
    made = optimizer.optimize_model(str(before), kind, heads, hidden, optimization_options=FusionOptions(kind), opt_level=0)
    made.save_model_to_file(str(after))


def _half(before: Path, after: Path, _: Any, **options: Any) -> None:
    onnx.save(float16.convert_float_to_float16(onnx.load(before), **options), after)


def _onnxscript(before: Path, after: Path, _: Any) -> None:
    from onnxscript import optimizer as onnxscript_optimizer

    onnx.save(onnxscript_optimizer.optimize(onnx.load(before)), after)


TOOLS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "dynamic": (
        "quantized",
        _dynamic,
        (
            "transformers.Bert",
            "transformers.ViT",
            "transformers.GPT2",
            "plain.lstm_2_both",
            "transformers.T5",
            "transformers.Wav2Vec2",
        ),
    ),
    "dynamic_u8": ("quantized", partial(_dynamic, weight_type=QuantType.QUInt8), ("plain.conformer", "plain.lstm_1")),
    "dynamic_channels": ("quantized", partial(_dynamic, per_channel=True), ("transformers.Bert", "transformers.Swin")),
    "qdq": (
        "quantized",
        partial(_static, quant_format=QuantFormat.QDQ),
        (
            "torchvision.mobilenet_v3_small",
            "timm.convnextv2_atto",
            "transformers.ViT",
            "transformers.Segformer.segment",
            "plain.super_resolution",
        ),
    ),
    "qdq_channels": (
        "quantized",
        partial(_static, quant_format=QuantFormat.QDQ, per_channel=True, activation_type=QuantType.QInt8),
        ("torchvision.mobilenet_v3_small", "transformers.DPT"),
    ),
    "qoperator": (
        "quantized",
        partial(_static, quant_format=QuantFormat.QOperator),
        ("torchvision.mobilenet_v3_small", "plain.yolo_head", "plain.tasnet", "transformers.ViT"),
    ),
    "basic": ("optimized", partial(_optimized, level="ORT_ENABLE_BASIC"), ("transformers.Llama", "plain.conformer")),
    "extended": (
        "optimized",
        _optimized,
        (
            "transformers.Bert",
            "transformers.GPT2",
            "torchvision.mobilenet_v3_small",
            "transformers.Swin",
            "plain.gru_2_both",
            "transformers.Llama",
        ),
    ),
    "all": ("optimized", partial(_optimized, level="ORT_ENABLE_ALL"), ("torchvision.mobilenet_v3_small", "plain.yolo_head")),
    "fused": ("optimized", _fused, ("transformers.Bert", "transformers.DistilBert", "transformers.MPNet")),
    "fused_gpt2": ("optimized", partial(_fused, kind="gpt2"), ("transformers.GPT2",)),
    "fused_vit": ("optimized", partial(_fused, kind="vit", heads=3, hidden=96), ("transformers.ViT",)),
    "fp16": (
        "in fp16",
        _half,
        (
            "transformers.Bert",
            "torchvision.mobilenet_v3_small",
            "plain.conformer",
            "plain.lstm_1",
            "transformers.Segformer.segment",
        ),
    ),
    "fp16_inside": ("in fp16", partial(_half, keep_io_types=True), ("transformers.ViT", "timm.convnextv2_atto")),
    "onnxscript": ("optimized", _onnxscript, ("transformers.Llama", "transformers.DebertaV2", "plain.rotary")),
}

ENTRIES = [
    Entry(f"{source}.{tool}", "tools", kind, partial(_made, source, make))
    for tool, (kind, make, sources) in TOOLS.items()
    for source in sources
]
