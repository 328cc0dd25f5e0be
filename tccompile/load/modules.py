"""What PyTorch's exporters tell of a model's weights: the modules that they are part of, and into which others were folded.

torch.export's writes of each node in which modules it was called. It names no weight after its module that it transposes, and
keeps the name of one into which it folds the batch normalization behind it. TorchScript's numbers both: `onnx::Conv_24`. Modules
may share a weight, as an embedding and the last layer often do: then it is the weight of none alone.
"""

from __future__ import annotations

import ast
import re

import onnx

from tccompile.load.model import Opened
from tccompile.plan.format import Exported

SCOPES = "pkg.torch.onnx.name_scopes"
FOLDED = re.compile(r"onnx::Conv(Transpose)?_\d+")
"""What TorchScript's exporter calls a convolution's weights that are no module's own."""

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
READERS = (*PRODUCTS, "Transpose", "Gather")


def exported(model: Opened) -> Exported:
    """What the model's file tells of weights of products; of a weight in several modules that it is no module's own."""
    modules: dict[str, set[str]] = {}
    paths: dict[str, set[str]] = {}
    folded = {name for name in model.weights if FOLDED.fullmatch(name)}
    for node in model.proto.graph.node:
        scopes = _scopes(node) if node.op_type in READERS else []
        path = _path(node.name) if node.op_type in READERS else None
        for name in node.input:
            if name not in model.weights or model.weights[name].ndim < 2:
                continue
            if len(scopes) > 1:
                modules.setdefault(name, set()).add(scopes[-2])
                if node.op_type in PRODUCTS and "batch_norm" in scopes[-1]:
                    folded.add(name)
            elif path:
                paths.setdefault(name, set()).add(path)
    folded |= {name for found in (modules, paths) for name, of in found.items() if len(of) > 1}
    return Exported({name: min(of) for name, of in modules.items() if len(of) == 1 and "" not in of}, tuple(sorted(folded)))


def _path(name: str) -> str | None:
    """The module that TorchScript's exporter names a node after, `/layers.0/fc_1/MatMul`: a later call of `layers.0.fc`."""
    return re.sub(r"_\d+(?=/)", "", name.rpartition("/")[0] + "/") if name.startswith("/") else None


def _scopes(node: onnx.NodeProto) -> list[str]:
    """The modules in which a node was called, the outermost first, and what was called; nothing if the file does not say."""
    said = next((p.value for p in node.metadata_props if p.key == SCOPES), "")
    try:
        scopes = ast.literal_eval(said) if said else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [*scopes] if isinstance(scopes, list) and all(isinstance(s, str) for s in scopes) else []
