"""Index arithmetic against NumPy's, and expressions' bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccompile.errors import InputError
from tccompile.ir.expr import (
    ACC,
    Coord,
    Index,
    Range,
    View,
    call,
    cast,
    const,
    constant,
    coord,
    element,
    greatest,
    least,
    load,
    quotient,
    remainder,
    reshape_view,
    substitute,
)
from tccompile.ir.types import DType

SHAPE = (3, 4, 6)


def values(index: Index, shape=SHAPE) -> np.ndarray:
    return np.broadcast_to(index.evaluate(shape), shape)


@st.composite
def indices(draw, depth: int = 3) -> tuple[Index, np.ndarray]:
    """A random expression over SHAPE, and what it should be everywhere, computed without our simplifications."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        axis = draw(st.integers(0, 2))
        return coord(axis), np.broadcast_to(np.indices(SHAPE)[axis], SHAPE)
    a, va = draw(indices(depth=depth - 1))
    match draw(st.sampled_from(["add", "scale", "quotient", "remainder", "least", "greatest"])):
        case "add":
            b, vb = draw(indices(depth=depth - 1))
            return a + b, va + vb
        case "scale":
            k, c = draw(st.integers(-3, 24)), draw(st.integers(-9, 9))
            return a * k + c, va * k + c
        case "quotient":
            d = draw(st.sampled_from([2, 3, 4, 6, 12, 24]))
            return quotient(a, d, SHAPE), va // d
        case "remainder":
            d = draw(st.sampled_from([2, 3, 4, 6, 12, 24]))
            return remainder(a, d, SHAPE), va % d
        case "least":
            b, vb = draw(indices(depth=depth - 1))
            return least(a, b, SHAPE), np.minimum(va, vb)
        case _:
            b, vb = draw(indices(depth=depth - 1))
            return greatest(a, b, SHAPE), np.maximum(va, vb)


@settings(max_examples=400, deadline=None)
@given(indices())
def test_an_index_is_what_its_operations_say(pair):
    index, expected = pair
    assert (values(index) == expected).all()
    low, high = index.bounds(SHAPE)
    assert low <= expected.min() and expected.max() <= high


@settings(max_examples=200, deadline=None)
@given(indices(), st.permutations(range(3)))
def test_substitution_is_composition(pair, order):
    index, expected = pair
    shape = tuple(SHAPE[a] for a in order)
    back = [coord(order.index(a)) for a in range(3)]
    assert (values(index.at(back, shape), shape) == expected.transpose(order)).all()


@pytest.mark.parametrize("shape", [(2, 60), (6, 20), (2, 3, 20), (120,), (5, 4, 6), (1, 2, 3, 4, 5), (2, 3, 4, 5)])
def test_reshape_views_read_in_row_major_order(shape):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    view = reshape_view("x", x.shape, shape)
    assert (np.broadcast_to(view.read({"x": x}, shape), shape) == x.reshape(shape)).all()


def test_a_reshape_that_splits_rows_keeps_the_last_axis():
    (_, _, last) = reshape_view("x", (4, 6, 16), (24, 16)).index
    assert last == coord(1)


def test_a_coordinate_taken_zero_times():
    """The compiler writes no such term; a plan may hold one."""
    view = View("x", (Index(((Coord(0), 0),), 2),))
    assert np.broadcast_to(view.read({"x": np.arange(4.0)}, (3,)), (3,)).tolist() == [2, 2, 2]


def test_a_view_reads_its_fill_where_it_is_not_valid():
    padded = View("x", (coord(0) - 1,), (Range(coord(0), 1, 5),), 7.0)
    assert padded.read({"x": np.arange(4.0)}, (6,)).tolist() == [7, 0, 1, 2, 3, 7]


def test_conditions_that_always_hold_are_dropped():
    view = View("x", (coord(0),), (Range(coord(0) + 1, 1, 9),))
    assert view.at([coord(0)], (8,)).valid == () and view.at([coord(0)], (9,)).valid != ()


def test_calls_type_their_constants_and_results():
    x = load(0, DType.I64)
    assert call("add", x, 2).args[1] == const(2, DType.I64)
    assert call("less", x, 2).dtype is DType.BOOL
    assert cast(x, DType.F32).dtype is DType.F32 and cast(x, DType.I64) is x
    with pytest.raises(TypeError, match="leaky_relu takes"):
        call("leaky_relu", ACC)


def test_substitution_does_not_look_into_what_it_put_in():
    expr = call("add", load(0), load(1))
    assert substitute(expr, {load(0): load(1), load(1): load(0)}) == call("add", load(1), load(0))


def test_equal_expressions_are_equal_however_they_were_written():
    assert coord(0) * 2 + coord(1) + 1 == constant(1) + coord(1) + coord(0) + coord(0)


TABLE = {"i": np.array([[0, -1, 3], [-4, 2, 1]])}


def test_an_index_that_is_read_counts_from_the_end_and_stays_in_its_axis():
    """Also under a slice, in another order of axes, and divided."""
    read = element("i", [coord(1), coord(0)], 4)
    expected = np.where(TABLE["i"] < 0, TABLE["i"] + 4, TABLE["i"]).T
    assert read.bounds((3, 2)) == (0, 3)
    np.testing.assert_array_equal((read * 2 + 1).evaluate((3, 2), TABLE), 2 * expected + 1)
    moved = read.at([coord(1) + 1, constant(1)], (5, 2))
    np.testing.assert_array_equal(np.broadcast_to(moved.evaluate((5, 2), TABLE), (5, 2)), np.tile(expected[1:, 1], (5, 1)))
    np.testing.assert_array_equal(quotient(read, 2, (3, 2)).evaluate((3, 2), TABLE), expected // 2)
    assert remainder(read, 4, (3, 2)) == read, "it is known to be less"
    with pytest.raises(InputError, match="'i' holds the index 3 into an axis of 3 elements"):
        element("i", [coord(0), coord(1)], 3).evaluate((2, 3), TABLE)


@pytest.mark.parametrize("last", [4, 3], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_gathered_rows_are_what_their_elements_are(order, last):
    """Which rows of x are read is in two tensors, and rows' elements lie along an axis in the middle of the output"""
    x = np.asarray(np.arange(3 * 5 * 4).reshape(3, 5, 4), order=order)
    i, j = np.array([[2, 0], [1, 2], [0, -1]]), np.array([4, -2])
    view = View("x", (element("i", [coord(0), coord(2)], 3), element("j", [coord(2)], 5), coord(1)))
    found = np.broadcast_to(view.read({"x": x, "i": i, "j": j}, (3, last, 2)), (3, last, 2))
    expected = [[[x[i[a, c], j[c], b] for c in range(2)] for b in range(last)] for a in range(3)]
    np.testing.assert_array_equal(found, expected)


def test_a_view_knows_what_it_reads_and_under_which_names():
    inner = element("j", [coord(0)], 2)
    view = View("x", (element("i", [inner, coord(1)], 9), coord(1)), (Range(element("k", [coord(0)], 5), 0, 3),))
    assert view.tensors == ("x", "i", "j", "k")
    assert view.renamed({"j": "a", "x": "b"}).tensors == ("b", "i", "a", "k")
    assert view.renamed({"j": "a"}).renamed({"a": "j"}) == view
    x, values = (
        np.arange(18.0).reshape(9, 2),
        {"i": np.array([[8, 0], [-1, 4]]), "j": np.array([1, 0, 1]), "k": np.array([0, 4, 2])},
    )
    found = view.read({"x": x, **values}, (3, 2))
    assert found.tolist() == [[x[8, 0], x[4, 1]], [0, 0], [x[8, 0], x[4, 1]]]
