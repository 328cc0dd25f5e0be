"""Operators that ONNX Runtime has beside the standard, and that its optimizers and quantizers write into models: each is taken
apart into standard ones (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tccompile.load.contrib import attention, blocked, decoding, pointwise, products, quantized
from tccompile.load.contrib.blocked import block_of
from tccompile.load.contrib.parts import MICROSOFT, Operator, Parts

if TYPE_CHECKING:
    from tccompile.load.types import Type

__all__ = ["BLOCKED", "DOMAINS", "MICROSOFT", "OPERATORS", "block_of", "taken_apart"]

OPERATORS: dict[str, dict[str, Operator]] = {
    MICROSOFT: {
        **attention.OPERATORS, **decoding.OPERATORS, **pointwise.OPERATORS, **products.OPERATORS, **quantized.OPERATORS,
    },
    blocked.DOMAIN: blocked.OPERATORS,
}  # fmt: skip
"""By domain and name."""

DOMAINS = frozenset(OPERATORS)

BLOCKED = blocked.DOMAIN

_SEARCH = "it decides, step by step, what to say next", "export the network without the search, and search in the application"
_SIZES = "the size of its output depends on values that are known only when the model runs", "compute it in the application"
_STRINGS = "it is about strings", "only numbers and booleans can be compiled: compute it in the application"
_DEVICE = "it is laid out for one kind of GPU", "write the model without it"
_EXPERTS = (
    "which experts work on a token depends on values that are known only when the model runs",
    "export it as MatMul, TopK …",
)
_SPARSE = "which scores count depends on a layout of blocks", "export the model with dense attention"

REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), _SEARCH),
    **dict.fromkeys(("NGramRepeatBlock", "RemovePadding", "Unique", "DynamicTimeWarping"), _SIZES),
    **dict.fromkeys(("MurmurHash3", "Tokenizer"), _STRINGS),
    **dict.fromkeys(("DequantizeWithOrder", "QuantizeWithOrder", "EPContext", "Snpe"), _DEVICE),
    **dict.fromkeys(("MoE", "QMoE"), _EXPERTS),
    **dict.fromkeys(("DynamicSparseAttention", "LongformerAttention", "SparseAttention"), _SPARSE),
}
"""Why operators have no meaning here, and the way out."""


def taken_apart(
    node: onnx.NodeProto, types: Mapping[str, Type], values: Callable[[str], np.ndarray | None], block: int | None
) -> list[onnx.NodeProto]:
    """The nodes that a node of DOMAINS stands for; raises UnsupportedError for what none stand for.

    types, values  those of its inputs by name; None for what is no constant
    block          how many channels a block has, if that is known
    """
    parts = Parts(node, types, values, block)
    operator = OPERATORS[node.domain].get(node.op_type)
    if operator is None:
        why = REFUSED.get(node.op_type) if node.domain == MICROSOFT else None
        ordered = node.op_type.startswith("QOrdered") and _DEVICE
        other = "the operator is one of ONNX Runtime's own", "replace it by standard ones, or split the model there"
        raise parts.refused(*(why or ordered or other))
    operator(parts)
    return parts.nodes
