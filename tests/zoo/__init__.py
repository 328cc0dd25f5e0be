"""Models of many libraries with random weights: what exports them, and what compiles them and compares with ONNX Runtime."""
