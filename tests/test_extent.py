"""What is computed with extents, and who relies on their being integers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccompile.ir.extent import ceil_div, round_up

ROOT = Path(__file__).parents[1]

OPEN = (
    "ir/tensor.py", "ir/program.py", "ir/limits.py", "ir/memory.py", "ir/ops/op.py",
    "layout.py", "schedule/place.py", "schedule/choose.py", "kernels/spec.py", "kernels/implicit_gemm.py", "kernels/pointwise.py",
    "kernels/epilogue.py", "kernels/loops.py", "kernels/lines.py", "kernels/image_walk.py", "kernels/parts/tile_order.py",
)  # fmt: skip
"""Modules that would take extents which are known late as they are."""


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_parts_of_an_extent_hold_it_and_no_fewer_do(n, part):
    parts = ceil_div(n, part)
    assert parts * part >= n > (parts - 1) * part
    assert round_up(n, part) == parts * part


@pytest.mark.thorough
def test_no_open_module_relies_on_integers(tmp_path):
    """As `make extents` finds out: mypy with tests/open_extent.py in place of ir/extent.py."""
    shadow = ["--shadow-file", "tccompile/ir/extent.py", "tests/open_extent.py", "--cache-dir", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "mypy", *shadow], cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in run.stdout.splitlines() if ": error: " in line]
    assert any(line.startswith("tccompile/ir/expr.py:") and "arange" in line for line in errors), run.stdout + run.stderr
    assert not [line for line in errors if line.startswith(tuple(f"tccompile/{name}:" for name in OPEN))]
