"""Measured constants: each says what it is, each is asked for, and none is anywhere else."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tccompile.arch import ARCHS
from tccompile.kernels.rates import MEASURED, measured
from tccompile.kernels.rates.rate import Rate, Rates, Table

ROOT = Path(__file__).parents[2]

CHOSEN = {
    ("attention_sm90_softmax.py", "FAR"), ("attention_mma.py", "LEAST"), ("implicit_gemm.py", "DOUBT"),
    ("suppress.py", "SEEN"), ("depthwise_bytes_sm90.py", "WASTED"),
}  # fmt: skip
"""Module constants of kernels with a float that no GPU decides."""


def constants(of: Any, name: str = "") -> Iterator[tuple[str, Rate | Table]]:
    """Those of a description of a GPU, by their names as cost models write them."""
    for field in fields(of):
        value = getattr(of, field.name)
        if isinstance(value, Rate | Table):
            yield f"{name}{field.name}", value
        elif is_dataclass(value):
            yield from constants(value, f"{name}{field.name}.")


def test_each_says_what_it_is() -> None:
    for rates in MEASURED.values():
        for name, constant in constants(rates):
            assert constant.unit and constant.source, f"{rates.gpu}: {name}"
            assert date.fromisoformat(constant.date) >= date(2026, 1, 1), f"{rates.gpu}: {name}"
            values = constant.values.values() if isinstance(constant, Table) else [constant]
            numbers = [n for value in values for n in (value if isinstance(value, tuple) else (value,))]
            assert numbers and all(math.isfinite(n) and n > 0 for n in numbers), f"{rates.gpu}: {name}"


def test_every_generation_has_constants() -> None:
    assert MEASURED.keys() <= ARCHS.keys()
    for arch in ARCHS.values():
        assert isinstance(measured(arch), Rates) and measured(arch) is MEASURED.get(arch.name, MEASURED["sm_90a"])


def test_each_is_asked_for() -> None:
    paths = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "tccompile/schedule").glob("*.py")]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    for name, _ in constants(measured(ARCHS["sm_90a"])):
        group, _, field = name.rpartition(".")
        asked = rf"\b(own|measured\(arch\)\.{group})\.{field}\b" if group else rf"\bmeasured\(arch\)\.{field}\b"
        where = [t for stem, t in texts.items() if not group or f"measured(arch).{group}" in t]
        assert any(re.search(asked, text) for text in where), f"no cost model asks for {name}"


def test_none_is_in_a_kernel() -> None:
    """No constant of a module there holds a float, as what was measured does, or is named by the unit of a time."""
    found = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        if path.parent.name == "rates":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            if any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(node.value)):
                found |= {(path.name, name) for name in names}
            found |= {(path.name, name) for name in names if name.endswith(("_US", "CYCLES"))}
    assert found == CHOSEN
