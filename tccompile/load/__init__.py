"""From an ONNX file to a checked graph of one opset: control flow, functions and other domains taken apart, constants folded."""
