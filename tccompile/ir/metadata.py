"""What a model's file says of itself, which plans keep for who runs them: `Session.get_modelmeta`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metadata:
    """As ONNX Runtime's ModelMetadata. `custom_metadata_map` has the model's own pairs, such as a detector's class names."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)
