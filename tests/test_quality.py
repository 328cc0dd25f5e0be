"""Trained networks in 8 bits, on inputs that they were not trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.quality import FORMATS, Trained, digits, photograph, qualities
from tests.tiers import thorough


@pytest.mark.parametrize("trained", [digits(16), pytest.param(photograph(), marks=thorough)], ids=["digits", "photograph"])
def test_eight_bits_keep_the_quality(trained: Trained, tmp_path: Path) -> None:
    """With all products in them that may be, from one calibration for all formats."""
    found = qualities(trained, ("sm_89",), True, tmp_path)
    exact = found["fp32"][0]
    assert {"%": exact > 99, " dB": exact > 31.5}[trained.unit]
    assert abs(found["fp16"][0] - exact) < trained.bar / 3
    for name in FORMATS[2:]:
        quality, count, _ = found[name]
        assert quality >= exact - trained.bar, name
        assert count >= 9, f"{name}: what is in floats loses nothing"
