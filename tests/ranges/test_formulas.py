"""Open extents compute as ints do, and formulas give again what they compute."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccompile.errors import PlanError
from tccompile.ir.extent import (
    ChangedError,
    Decisions,
    Open,
    UndecidedError,
    ceil_div,
    deciding,
    greatest,
    least,
    possible,
    round_up,
    worth,
)
from tccompile.kernels.codegen import divider
from tccompile.plan.formulas import Prepared, check_formulas, computed, drawn, everywhere, filler, integers, narrowed, spans
from tccompile.sizes import Size

A, B = np.arange(2, 40), np.arange(2, 40)[::-1] * 3
SIZES = {"a": Open("size", ("a",), A), "b": Open("size", ("b",), B)}

COMPUTED = {
    "sum": lambda a, b: a + 3 * b - 1,
    "reversed": lambda a, b: 100 - a,
    "product": lambda a, b: a * b * 8,
    "rounded": lambda a, b: round_up(a * b, 128) // 128,
    "parts": lambda a, b: ceil_div(a * 56 * 56, 200) % 8,
    "negative": lambda a, b: -(a // 3) * 2,
    "least": lambda a, b: least(a * b, 132) + least(7, a),
    "greatest": lambda a, b: greatest(a - 10, 1) * greatest(3, b),
    "divider": lambda a, b: divider(a * 7),
    "of one": lambda a, b: divider(greatest(a % 5, 1)),
    "both": lambda a, b: divmod(a * b, 12),
    "bits": lambda a, b: (a * b).bit_length(),
    "ratio": lambda a, b: 1 / (a * b),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_open_extents_compute_as_ints(name):
    def flat(x):
        return x if isinstance(x, tuple) else (x,)

    formulas, tree = drawn(flat(COMPUTED[name](SIZES["a"], SIZES["b"])), ["a", "b"])
    check_formulas(formulas, 2)
    fill = filler(tree)
    for a, b in zip(A.tolist(), B.tolist(), strict=True):
        assert fill(computed(formulas, (a, b))) == flat(COMPUTED[name](a, b))


def same_everywhere(formulas, *sizes):
    """Formulas that all give numbers are the same where they are not looked at, and where they are computed at all sizes"""
    at_all = everywhere(formulas, sizes, spans(formulas, sizes))
    assert at_all is not None
    for (low, high, _), row in zip(narrowed(spans(formulas, sizes), at_all), at_all, strict=True):
        assert (low, high) == (row.min(), row.max())
    kept = Prepared(formulas, sizes, at_all)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tccompile.plan.formulas.KEPT", 0)
        again = Prepared(formulas, sizes, at_all)
        last_again = Prepared(formulas, sizes, at_all, range(len(formulas))[-1:])
    last = Prepared(formulas, sizes, at_all, range(len(formulas))[-1:])
    assert kept.kept == last.kept == at_all.shape[1] and (not formulas or again.kept is last_again.kept is None)
    for column, point in zip(at_all.T, itertools.product(*(size.all for size in sizes)), strict=True):
        numbers = computed(formulas, point)
        for prepared in (kept, again):
            found, whole = prepared.at(point)
            assert found == numbers and whole.tolist() == column.tolist() == integers(numbers).tolist()
        for prepared in (last, last_again):
            found, whole = prepared.at(point)
            assert found[-1:] == numbers[-1:] and whole.tolist()[-1:] == column.tolist()[-1:]


@pytest.mark.parametrize("name", COMPUTED)
def test_formulas_are_computed_at_all_sizes_at_once(name):
    formulas, _ = drawn((COMPUTED[name](SIZES["a"], SIZES["b"]),), ["a", "b"])
    same_everywhere(formulas, Size("a", 2, 11), Size("b", 3, 114, 9))


@given(st.lists(st.tuples(st.sampled_from("+-*/%<>"), st.integers(1, 9)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_chain_of_operations(chain):
    def apply(x):
        for op, n in chain:
            match op:
                case "+":
                    x = x + n
                case "-":
                    x = n - x
                case "*":
                    x = x * n
                case "/":
                    x = x // n
                case "%":
                    x = x % (n + 1)
                case "<":
                    x = least(x, n)
                case ">":
                    x = greatest(n, x)
        return x

    formulas, tree = drawn((apply(SIZES["a"]),), ["a", "b"])
    same_everywhere(formulas, Size("a", 2, 39), Size("b", 1, 1))
    assert [filler(tree)(computed(formulas, (a, 0))) for a in A.tolist()] == [(apply(a),) for a in A.tolist()]


def test_what_is_the_same_at_all_sizes_is_a_number():
    a = SIZES["a"]
    assert type(a - a) is int and a * 0 == 0 and (a % 1) == 0 and type(least(a, 2)) is int
    assert a + 0 is a and least(a, 1000) is a


def test_comparisons_hold_at_all_sizes_or_are_refused():
    a = SIZES["a"]
    assert a > 1 and not a < 2 and a != 0 and a <= 39 and bool(a)
    with pytest.raises(UndecidedError, match="at some sizes") as found:
        _ = a < 5
    assert found.value.mask.tolist() == (A < 5).tolist()
    for needs in (range, float, np.zeros):
        with pytest.raises(UndecidedError, match="needed"):
            needs(a)


def test_what_is_worth_it_is_decided_once():
    decisions = Decisions()
    with deciding(decisions):
        assert worth("rows", True) and worth("rows", False)
    assert not worth("rows", False) and decisions.made == {"rows": True}


def test_what_is_possible_at_some_sizes_is_done_at_none_where_all_are_to_be_alike():
    decisions = Decisions()
    with deciding(decisions):
        assert possible("view", True) and not possible("view", False) and possible("view", True) and decisions.differs
        decisions.everywhere = True
        assert not possible("view", True) and possible("other", True)
        with pytest.raises(ChangedError):
            possible("other", False)
        assert not possible("other", True)


BAD = {
    "a later one": ((("+", 0, 1), ("int", 1, 0)), (), "formula 0"),
    "no such size": ((("size", 1, 0),), (1,), "formula 0"),
    "no such operation": ((("int", 1, 0), ("pow", 0, 0)), (1,), "formula 1"),
    "a quotient": ((("int", 1, 0), ("/", 0, 0), ("+", 0, 1)), (1,), "quotient"),
}


@pytest.mark.parametrize("name", BAD)
def test_formulas_are_checked(name):
    formulas, sizes, says = BAD[name]
    with pytest.raises(PlanError, match=says):
        check_formulas(formulas, len(sizes))


NOTHING = [
    (("int", 1, 0), ("int", 0, 0), ("//", 0, 1)),
    (("int", 1, 0), ("int", -3, 0), ("%", 0, 1)),
    (("int", 1, 0), ("int", 0, 0), ("/", 0, 1)),
    (("int", 1, 0), ("int", 4096, 0), ("<<", 0, 1)),
    (("int", 1 << 40, 0), ("*", 0, 0)),
    (("int", 1 << 70, 0),),
    (("int", 1 << 61, 0), ("int", 1, 0), ("<<", 0, 1), ("-", 2, 0)),
]


@pytest.mark.parametrize("formulas", NOTHING)
def test_formulas_that_give_nothing_are_refused(formulas):
    check_formulas(formulas, 0)
    with pytest.raises(PlanError):
        computed(formulas, ())
    assert everywhere(formulas, (), spans(formulas, ())) is None


@pytest.mark.parametrize("op, low", [("//", 8), ("%", 8), ("/", 8), ("<<", 7), ("*", 1)])
def test_formulas_that_give_nothing_at_some_sizes_are_not_proven(op, low):
    """Of 5 and the size less 7, or of 2^58 and the size"""
    a, b = (1 << 58, 0) if op == "*" else (5, 7)
    formulas = (("size", 0, 0), ("int", b, 0), ("-", 0, 1), ("int", a, 0), (op, 3, 2))
    same_everywhere(formulas, Size("a", low, 15))
    for size in (Size("a", 1, 15), Size("a", low, 80)):
        proven = everywhere(formulas, (size,), spans(formulas, (size,))) is not None
        try:
            proves = bool([computed(formulas, (n,)) for n in size.all])
        except PlanError:
            proves = False
        assert proven == proves
