"""What a model's file says of itself, which plans keep for who runs them: `Session.get_modelmeta`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What an input or output of a model is."""

    TENSOR = "tensor"
    SEQUENCE = "sequence"
    OPTIONAL = "optional"
    OPTIONAL_SEQUENCE = "optional sequence"
    GIVEN = "given"  # of outputs: an input of the model, as it was given


@dataclass(frozen=True)
class Form:
    """An input or output of a model. A plan has the tensors that it is made of: of a sequence, each by `part`, of an input that
    is an output, `copy_of` it."""

    name: str
    kind: Kind


def part(name: str, i: int) -> str:
    """What a plan calls tensor i of a sequence."""
    return f"{name}[{i}]"


def copy_of(name: str) -> str:
    """What a plan calls an output that is an input of this name."""
    return f"{name} (output)"


@dataclass(frozen=True)
class Metadata:
    """As ONNX Runtime's ModelMetadata. `custom_metadata_map` has the model's own pairs, such as a detector's class names.

    inputs, outputs  in the model's order; none if all are tensors, which are those of the plan
    """

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Form, ...] = ()
    outputs: tuple[Form, ...] = ()
