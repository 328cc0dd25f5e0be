"""What is computed with extents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tccompile.ir.extent import ceil_div, round_up


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_parts_of_an_extent_hold_it_and_no_fewer_do(n, part):
    parts = ceil_div(n, part)
    assert parts * part >= n > (parts - 1) * part
    assert round_up(n, part) == parts * part
