"""All models, library by library. A library that is not installed leaves its models out, and says so."""

from __future__ import annotations

import importlib
import sys

from tests.zoo.entry import Entry

LIBRARIES = ("torchvision", "timm", "transformers", "diffusers", "modules", "keras", "sklearn", "tools")


def entries() -> list[Entry]:
    found: list[Entry] = []
    for library in LIBRARIES:
        try:
            found += importlib.import_module(f"tests.zoo.of_{library}").ENTRIES
        except ImportError as error:
            print(f"without the models of {library}: {error}", file=sys.stderr)
    names = [entry.name for entry in found]
    assert len(set(names)) == len(names), "two models of one name"
    return found
