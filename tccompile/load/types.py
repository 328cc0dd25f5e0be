"""Element types and shapes of a graph's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper


@dataclass(frozen=True)
class Type:
    """A tensor's element type (as in ONNX's TensorProto) and static shape."""

    elem: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return onnx.helper.tensor_dtype_to_np_dtype(self.elem)

    @property
    def proto(self) -> onnx.TypeProto:
        return onnx.helper.make_tensor_type_proto(self.elem, self.shape)


def static_type(proto: onnx.TypeProto) -> Type | None:
    """The tensor type, or None if it is not a tensor's or some extent is not known."""
    if proto.WhichOneof("value") != "tensor_type" or not proto.tensor_type.HasField("shape"):
        return None
    dims = proto.tensor_type.shape.dim
    if not proto.tensor_type.elem_type or any(d.WhichOneof("value") != "dim_value" or d.dim_value < 0 for d in dims):
        return None
    return Type(proto.tensor_type.elem_type, tuple(d.dim_value for d in dims))
