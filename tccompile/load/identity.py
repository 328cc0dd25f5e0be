"""What a model computes, whatever its values and its tensors' names are: a digest of each node, by which graphs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from tccompile.load.model import Opened
from tccompile.load.nodes import reads
from tccompile.load.valid import title

BYTES = 8
"""Of a digest: enough to tell nodes of one model apart."""


def digests(model: Opened) -> dict[str, str]:
    """A digest of each tensor that a node computes, by name, in the model's order of nodes.

    It is of the operator and its version, its attributes and the digests of what it reads: of an input its name and type, of a
    weight its shape and type.
    """
    versions = {o.domain: str(o.version) for o in model.proto.opset_import}
    found: dict[str, str] = {}
    for value in model.proto.graph.input:
        found[value.name] = _digest("input", value.name, str(value.type.tensor_type.elem_type))
    for name, values in model.weights.items():
        found[name] = _weight(values)
    functions = [f.SerializeToString(deterministic=True).hex() for f in model.proto.functions]
    made: dict[str, str] = {}
    for node in model.proto.graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        inner = [name for name in reads(node) if name not in node.input]  # what graphs inside it read of this one
        operands = [found.get(name, "") for name in (*node.input, *inner)]
        version = versions.get("" if node.domain == "ai.onnx" else node.domain, "")
        own = _digest(node.domain, version, node.op_type, *attributes, *operands, *(functions if node.domain else ()))
        for i, y in enumerate(node.output):
            if y:
                found[y] = made[y] = _digest(own, str(i))
    return made


def first_other(model: Opened, known: Iterable[str]) -> str | None:
    """What a model computes that is none of the known, for people: its first such node. None if it has all that is known."""
    there = digests(model)
    missing = set(known).difference(there.values())
    if not missing:
        return None
    others = {name for name, digest in there.items() if digest not in set(known)}
    for node in model.proto.graph.node:
        if y := others.intersection(node.output):
            return f"{title(node)}, which computes {min(y)!r}"
    return f"{len(missing)} nodes that are missing"


def _weight(values: np.ndarray) -> str:
    return _digest("weight", str(values.shape), values.dtype.name)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[: 2 * BYTES]
