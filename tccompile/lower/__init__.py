"""From ONNX operators to typed ops: one converter an operator, one file a family."""
