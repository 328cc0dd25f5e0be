"""What a file is that somebody took for an ONNX model, by how it begins, and how it becomes one."""

from __future__ import annotations

import re

from tccompile.plan.file import MAGIC

KINDS = {
    re.escape(MAGIC): "it is a plan already",
    b"version https://git-lfs": "it is Git LFS's pointer to the file: git lfs pull fetches the file itself",
    rb"\s*<(!DOCTYPE|html|HTML)": "it is a web page: a download that went wrong",
    rb"\s*<\?xml": "it is XML, as OpenVINO's models are: compile the ONNX file that it was made of",
    rb"PK\x03\x04": "it is a zip archive, as PyTorch and Keras write them: export it with torch.onnx.export or tf2onnx",
    rb"\x80[\x02-\x05]": "it is a pickle, as PyTorch and scikit-learn write them: export it with torch.onnx.export or skl2onnx",
    rb"\x89HDF": "it is HDF5, as Keras writes it: export it with tf2onnx",
    rb".{4}TFL3": "it is TensorFlow Lite's: tf2onnx --tflite makes ONNX of it",
    rb".{4}ORTM": "it has ONNX Runtime's own format: compile the .onnx file that it was made of",
    rb"ftrt": "it is a TensorRT engine: compile the ONNX file that it was made of",
    rb"GGUF": "it is GGUF, which holds weights and no graph: export the model",
    rb'.{8}\{"': "it is safetensors, which holds weights and no graph: export the model",
}
"""How files of other kinds begin, as regular expressions, and what to say of them."""


def told_by(data: bytes) -> str:
    """What the bytes of a file that is no ONNX model are; that it may be cut off where nothing shows it."""
    begin = bytes(data[:64])
    found = (said for pattern, said in KINDS.items() if re.match(pattern, begin, re.DOTALL))
    return next(found, "it is something else, or was cut off on its way")
