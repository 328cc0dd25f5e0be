"""Numbers at some sizes become the formula that they come from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tccompile.ir.extent import ceil_div, round_up
from tccompile.plan.formulas import computed, drawn, filler
from tccompile.ranges.alike import star
from tccompile.ranges.box import opened, points
from tccompile.ranges.fit import as_counts, derived, fit
from tccompile.sizes import Size

ONE, TWO = (Size("n", 2, 300),), (Size("h", 16, 256, 8), Size("w", 17, 260, 1))

FORMS = {
    "batch": (ONE, lambda n: n),
    "stride 2": (ONE, lambda n: (n - 1) // 2 + 1),
    "three strides": (ONE, lambda n: ceil_div(ceil_div(ceil_div(n, 2), 2), 2) * 48),
    "pooled without padding": (ONE, lambda n: (n + 61) // 2 * 3 - 7),
    "padded row": (ONE, lambda n: round_up(n, 8)),
    "a matrix of padded rows": (ONE, lambda n: n * round_up(n, 8)),
    "half as large again": (ONE, lambda n: 3 * n // 2),
    "rows of two fifths": (TWO, lambda h, w: h * 5 // 8 * round_up(2 * w // 5, 8)),
    "constant": (ONE, lambda n: 7),
    "pixels": (TWO, lambda h, w: h * w * 64),
    "halved": (TWO, lambda h, w: (h // 8) * ((w - 1) // 2 + 1) * 192),
    "bordered": (TWO, lambda h, w: (h + 2) * (w + 2) * 3),
    "one of two": (TWO, lambda h, w: ((w + 5) // 4) * 8),
    "all tokens": (TWO, lambda h, w: (h + w) * 64),
    "new tokens by all": (TWO, lambda h, w: h * round_up(h + w, 8) * 12),
    "a last window": (ONE, lambda n: (ceil_div(n + 2, 20) + 1) * 20 - n),
    "at most": (TWO, lambda h, w: h * min(w, 40) * 3 + 1),
    "patches and one more": (TWO, lambda h, w: (h // 8 * (w // 4) + 1) * 32),
    "padded": (TWO, lambda h, w: h * round_up(w, 8)),
    "half of a border to a multiple": (ONE, lambda n: -((round_up(n, 8) - n) // 2)),
    "the larger half, in rows": (TWO, lambda h, w: (round_up(w + 3, 16) - w - 2) // 2 * (h // 8) * 24),
}


@pytest.mark.parametrize("name", FORMS)
def test_formulas_are_found(name):
    box, form = FORMS[name]
    names = [size.name for size in box]
    seen = star(box, ())
    sizes = dict(zip(names, opened(box), strict=True))
    found = fit([form(*p) for p in seen], [dict(zip(names, p, strict=True)) for p in seen], sizes)
    formulas, tree = drawn((found,), names)
    fill = filler(tree)
    for point in points(box)[::7]:
        assert fill(computed(formulas, point)) == (form(*point),), point


def test_one_more_than_a_product_where_few_sizes_change_together():
    """A quotient of (18 batch + 1) and (9 n + 1) is the same where only one of them changes."""
    box = Size("batch", 2, 4), Size("n", 4, 60)
    at = [{"batch": batch, "n": n} for batch, n in star(box, (2, 4))]
    found = fit([3 * p["batch"] * p["n"] + 1 for p in at], at, dict(zip(("batch", "n"), opened(box), strict=True)))
    formulas, tree = drawn((found,), ["batch", "n"])
    assert {p["batch"] for p in at if p["n"] != at[0]["n"]} == {at[0]["batch"]}
    assert filler(tree)(computed(formulas, (4, 50))) == (601,)


DERIVED = {
    "at most so many of all places": lambda h, w: min(h // 8 * (w // 4), 90),
    "half as large again": lambda h, w: 3 * (h // 8 * (w // 4)) // 2,
    "a part that is none at some sizes": lambda h, w: h * w + h - 16,
    "two parts": lambda h, w: h * w + h // 8 * (w // 4),
    "three parts, three times": lambda h, w: 3 * (h * w + 2 * (h // 8 * (w // 4))),
    "rows of two parts": lambda h, w: h * w * (h * w + h // 8 * (w // 4)),
    "padded rows, sixteen times": lambda h, w: h * w * (h // 8 * (w // 4)) * 16,
    "the last part, with the padding of all": lambda h, w: round_up(h * w + h // 8 * (w // 4), 8) - h * w,
}


@pytest.mark.parametrize("name", DERIVED)
def test_formulas_are_made_of_others(name):
    seen, (h, w) = star(TWO, ()), opened(TWO)
    forms = (lambda h, w: h - 16, lambda h, w: h * w, lambda h, w: h // 8 * (w // 4))
    known = {tuple(form(*p) for p in seen): form(h, w) for form in forms}
    found = derived([DERIVED[name](*p) for p in seen], known)
    assert found.values.tolist() == [DERIVED[name](*p) for p in points(TWO)]
    assert derived([DERIVED[name](*p) + p[0] % 3 for p in seen], known) is None


def test_floats_are_counts_or_parts_of_counts():
    """Two parts of a count less one, as coordinates from -1 to 1 are made with, may have been rounded to float32."""
    assert as_counts([3.0, 4.0]) == (1, False, (3, 4)) and as_counts([1.5, 2.0]) == (2, False, (3, 4))
    assert as_counts([0.5, 1 / 3]) == (1, True, (2, 3))
    assert as_counts([float(np.float32(2 / n)) for n in (15, 16, 17)]) == (2, True, (15, 16, 17))
    assert as_counts([0.3, 0.41]) is None and as_counts([0.5, math.inf]) is None and as_counts([0.0, 0.5, 0.3]) is None


def test_numbers_on_either_side_of_none():
    """What is looked for divides by nothing below none on the way."""
    h = [9, 9, 7, 10, 11, 13, 14, 15, 16, 17, 18, 19, 9, 9, 9, 16, 9, 7, 19]
    w = [12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 10, 14, 16, 10, 8, 6, 16]
    numbers = [-2, 0, -2, -2, 0, 0, 0, 2, 2, 2, 2, 4, -2, 0, 0, 2, 0, -4, 9]
    box = Size("batch", 2, 3), Size("h", 7, 19), Size("w", 6, 17, 2)
    at = [{"batch": 2 if i in (1, 16) else 3, "h": a, "w": b} for i, (a, b) in enumerate(zip(h, w, strict=True))]
    assert fit(numbers, at, dict(zip(at[0], opened(box), strict=True))) is None


@pytest.mark.parametrize("form", [lambda n: n * n * n + n, lambda n: n if n < 100 else 2 * n, lambda n: n ^ 5])
def test_what_is_no_formula_is_none(form):
    seen = star(ONE, ())
    assert fit([form(*p) for p in seen], [{"n": p[0]} for p in seen], dict(zip("n", opened(ONE), strict=True))) is None


def test_some_points_differ_in_all_sizes():
    """Beside a first point a sum looks as a product of sums does, which the greatest one, being no generic one, does not tell."""
    first, *others = star(TWO, {size.all[-1] for size in TWO})
    assert any(all(a != b for a, b in zip(first, point, strict=True)) for point in others)
