"""Sizes and places that are computed of the data themselves: bounds that follow from what they are of, or that the user says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tccompile.errors import InputError, UnsupportedError
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.ops.test_counted import holds
from tests.rewrites.common import Net

TO_INT64 = {"to": 7}


def number(net: Net, most: int) -> str:
    """An integer of the data: n, between 0 and that."""
    return net("Cast", net("Clip", "n", np.float32(0), np.float32(most)), **TO_INT64)


def made(net: Net) -> tuple[str, ...]:
    n = number(net, 6)
    rows = net("Concat", n, np.array([3]), axis=0)
    scalar = net("Squeeze", n, np.array([0]))
    values, places = net("TopK", "line", n, outputs=2)
    zeros = net("ConstantOfShape", rows)
    return (
        zeros, net("Expand", np.ones((1, 3), np.float32), rows), net("Range", np.array(0), scalar, np.array(1)), values, places,
        net("Concat", zeros, "x", axis=0), net("ReduceSum", net("Slice", "line", np.array([0]), n), keepdims=0),
    )  # fmt: skip


def repeated(net: Net) -> tuple[str, ...]:
    """By as many rows on either side, as often, and by as many classes as the data say."""
    n = number(net, 3)
    zero = np.array([0])
    around = net("Pad", "x", net("Concat", n, zero, net("Add", n, np.array([1])), np.array([2]), axis=0), np.float32(0.5))
    copies = net("Tile", "x", net("Concat", n, np.array([2]), axis=0))
    classes = net("OneHot", net("Sub", n, np.array([1])), net("Add", n, np.array([1])), np.float32([0, 1]))
    few, _ = net("TopK", "line", net("ReduceSum", net("Cast", net("Greater", "line", np.float32(0)), **TO_INT64)), outputs=2)
    return around, copies, classes, few, net("ReduceSum", around, zero)


def cut_out(net: Net) -> tuple[str, ...]:
    """From one computed place to another, from the end too; along two axes at once; and put between zeros again."""
    n = number(net, 6)
    low, far = net("Sub", n, np.array([2])), net("Add", n, np.array([1]))
    line = net("Slice", "line", low, far)
    box = net("Slice", "x", net("Concat", low, np.array([1]), axis=0), net("Concat", far, n, axis=0), np.array([0, 1]))
    whole = net("Slice", "line", np.array([0]), n)
    rest = net("ConstantOfShape", net("Sub", np.array([6]), n))
    filled = net("Unsqueeze", net("Concat", whole, rest, axis=0), np.array([0]))
    pair = net("Concat", filled, np.ones((1, 6), np.float32), axis=0)
    return line, box, net("Slice", "line", np.array([2]), far), pair


def resized(mode: str, how: str) -> Callable[[Net], tuple[str, ...]]:
    """Along two axes, and the place of the greatest element of all that there is."""

    def then(net: Net) -> tuple[str, ...]:
        n = net("Max", number(net, 6), np.array([1]))
        image = net("Unsqueeze", "x", np.array([0, 1]))
        sizes = net("Concat", np.array([1, 1]), n, net("Add", n, np.array([3])), axis=0)
        y = net("Resize", image, None, None, sizes, mode=mode, coordinate_transformation_mode=how)
        flat = net("Reshape", y, np.array([1, -1]))
        return y, flat, net("ArgMax", flat, axis=1), net("Shape", y)

    return then


CASES: dict[str, Callable[[Net], tuple[str, ...]]] = {
    "made": made,
    "repeated": repeated,
    "cut": cut_out,
    "linear": resized("linear", "half_pixel"),
    "linear_corners": resized("linear", "align_corners"),
    "cubic": resized("cubic", "half_pixel"),
    "cubic_pytorch": resized("cubic", "pytorch_half_pixel"),
    "linear_from_zero": resized("linear", "asymmetric"),
}


@pytest.mark.parametrize("case", CASES)
def test_as_much_as_the_data_say(case: str) -> None:
    net = Net(n=(1,), line=(6,), x=(6, 3))
    net.out(*CASES[case](net))
    rng = np.random.default_rng(0)
    given = {"line": rng.standard_normal(6).astype(np.float32), "x": rng.standard_normal((6, 3)).astype(np.float32)}
    sizes = (1, 2, 4, 6) if case == "cut" else (0.5, 1.2, 3, 5.9, 6)
    holds(net, *({"n": np.float32([n]), **given} for n in sizes))


def test_what_is_there_once() -> None:
    """Words of a line, how often each is there, and that the line is made of them; then of those that are kept of it."""
    net = Net(x=(np.int64, (7,)))
    words, first, inverse, counts = net("Unique", "x", outputs=4)
    kept = net("Compress", "x", net("Greater", "x", np.array(2)), axis=0)
    again, _, places, many = net("Unique", kept, outputs=4, axis=0)
    floats = net("Unique", net("Reshape", net("Cast", "x", to=1), np.array([7, 1])))
    net.out(words, first, inverse, counts, net("Gather", words, inverse), again, places, many, floats)
    holds(net, *({"x": np.array(x)} for x in ([3, 1, 3, 2, 9, 1, 3], [5] * 7, [*range(7)], [9, -4, 9, -4, 0, 1, 3])))


def test_what_has_no_bound_takes_the_users_word() -> None:
    net = Net(n=(1,))
    net.out(net("ConstantOfShape", net("Cast", "n", **TO_INT64)))
    with pytest.raises(UnsupportedError, match=r"is computed at run time, and says how much there is: .* --limit n1=N"):
        without_code(net.model())
    with Session(without_code(net.model(), limits={"n1": 4}), "cpu") as session:
        assert [session.run(None, {"n": np.float32([n])})[0].shape for n in (0, 4)] == [(0,), (4,)]
        with pytest.raises(InputError, match=r"'n1' \(ConstantOfShape\) finds 5 .* room for 4"):
            session.run(None, {"n": np.float32([5])})
