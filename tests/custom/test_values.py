"""Elementwise operators: each function and operator beside NumPy's, types, places, and where they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tccompile as tc
from tccompile.custom import values
from tccompile.custom.operators import Operator
from tccompile.ir.ops import Pointwise
from tests.custom.common import normal, plan_of, program_of, run
from tests.networks import relative_error
from tests.rewrites.common import Net

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "arithmetic": (lambda x, y: (x + 2) * y - x / 3 - 1 / (y * y + 1), lambda x, y: (x + 2) * y - x / 3 - 1 / (y * y + 1)),
    "numpy_numbers": (lambda x, y: np.float32(2) * x - np.int64(3) + y * np.float64(0.5), lambda x, y: 2 * x - 3 + y * 0.5),
    "floors": (lambda x, y: x // 0.5 + 7 % (abs(y) + 1), lambda x, y: x // 0.5 + 7 % (abs(y) + 1)),
    "powers": (lambda x, y: x**2 + x**3 + abs(y) ** 1.5 + 2**y, lambda x, y: x**2 + x**3 + abs(y) ** 1.5 + 2.0**y),
    "choice": (lambda x, y: tc.where((x > 0) & ~(y >= 1) | (x == y), x, -y), lambda x, y: np.where((x > 0) & (y < 1), x, -y)),
    "xor": (lambda x, y: tc.where((x > 0) ^ (y < 0), 1, 2.5), lambda x, y: np.where((x > 0) ^ (y < 0), 1, 2.5)),
    "bounds": (lambda x, y: tc.clip(x, -0.5, 0.5) + tc.minimum(x, y), lambda x, y: np.clip(x, -0.5, 0.5) + np.minimum(x, y)),
    "integers": (lambda x, y: tc.astype(x * 10, "int64") // 3 * 2, lambda x, y: np.trunc(x * 10) // 3 * 2),
    "remainders": (
        lambda x, y: (tc.astype(x * 10, "int64") % 3 - 1) & 1,
        lambda x, y: (np.trunc(x * 10) % 3 - 1).astype(int) & 1,
    ),
    "booleans": (lambda x, y: tc.astype(x, "bool") + (y != 0) * 2, lambda x, y: np.full_like(x, 3)),
    "no_numbers": (
        lambda x, y: tc.where(tc.isnan(tc.log(x)), 0, tc.log(abs(x))),
        lambda x, y: np.where(x < 0, 0, np.log(abs(x))),
    ),
    "waves": (lambda x, y: tc.sin(x) * tc.cos(y) + tc.sigmoid(x), lambda x, y: np.sin(x) * np.cos(y) + 1 / (1 + np.exp(-x))),
    "places": (lambda x, y: x + tc.index(1) * 2 - tc.index(-1) / tc.size(-1), lambda x, y: x + PLACES[0] * 2 - PLACES[1] / 5),
    "a_number": (lambda x, y: 3, lambda x, y: np.full_like(x, 3)),
}
"""What an operator's function says, and the same in NumPy."""

PLACES = np.arange(4)[:, None], np.arange(5)


def operator(function: Callable[..., Any], out: Any = lambda x: x.like()) -> Operator:
    return tc.op("test::F", out=out, elementwise=True)(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_numpy_s(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x, y = normal(3, 4, 5), normal(4, 1, seed=2)
    net = Net(x=(3, 4, 5), y=(4, 1))
    (out,) = run(net.out(net("F", "x", "y", domain="test")), {"x": x, "y": y}, operator(ours), precision="fp32")
    assert relative_error(out, np.broadcast_to(theirs(x.astype(np.float64), y.astype(np.float64)), x.shape)) < 1e-5


def test_the_package_has_all_functions_and_no_others() -> None:
    functions = {n for n, v in vars(values).items() if callable(v) and getattr(v, "__module__", "") == values.__name__}
    assert set(tc.OF_VALUES) == {n for n in functions if n[0].islower() and n not in ("as_expr", "traced")}
    assert all(callable(getattr(tc, name)) for name in tc.OF_VALUES)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("int8", [-3, 3, 127, -128]), ("bool", [1, 1, 1, 1]), ("int64", [-3, 3, 127, 128]), ("float32", [-3.7, 3.7, 127.2, 128.4])],
)
def test_results_are_stored_as_casts_store_them(dtype: str, expected: list[float]) -> None:
    net = Net(x=(4,))
    made = operator(lambda x: x + 0.0, lambda x: x.like(dtype=dtype))
    (out,) = run(net.out(net("F", "x", domain="test")), {"x": np.float32([-3.7, 3.7, 127.2, 128.4])}, made)
    assert out.dtype == dtype and np.allclose(out, np.array(expected, dtype))


def test_inputs_and_attributes_are_parameters_in_turn() -> None:
    """What a node gives as a tensor may be a number in another model: `low` is either here, `high` its default."""
    x = normal(6)
    for low in ({"low": 0.25}, {}):
        net = Net(x=(6,))
        net.out(net("Ramp", "x", *([] if low else [np.float32(0.25)]), domain="test", **low))
        (out,) = run(net, {"x": x}, precision="fp32")
        assert relative_error(out, np.clip((x - 0.25) / 0.75, 0, 1)) < 1e-6


def test_several_outputs() -> None:
    x, y = normal(3, 5), normal(4, 1, 5, seed=2)
    net = Net(x=(3, 5), y=(4, 1, 5))
    first, second = run(net.out(*net("Parts", "x", "y", outputs=2, domain="test")), {"x": x, "y": y}, precision="fp32")
    both = np.broadcast_to(x, (4, 3, 5))
    assert relative_error(first, np.where(both > y, np.sin(both), np.abs(y) ** 1.5)) < 1e-6
    assert second.dtype == np.int32 and (second == np.floor(3 * both) + np.arange(5) % 2).all()


def _network(*ops: tuple[str, dict[str, Any]]) -> Net:
    net = Net(x=(2, 5, 12, 12))
    t = net("Conv", "x", net.normal(16, 5, 3, 3, scale=0.2), pads=[1, 1, 1, 1])
    for op, attributes in ops:
        t = net(op, t, domain="press", **attributes)
    return net.out(net("Conv", t, net.normal(8, 16, 1, 1)))


def test_it_costs_no_launch() -> None:
    """Nor do two of them, with places: they are computed where the convolution before them stores."""
    screen = "Halftone", {"pitch": 6, "depth": 0.5}
    plain, one, two = (_network(*[screen] * n) for n in range(3))
    example = tc.op("press::Halftone", out=lambda x: x.like(), elementwise=True)(
        lambda x, pitch, depth: x + depth * tc.cos(tc.index(2) / pitch) * tc.cos(tc.index(3) / pitch)
    )
    counts = [
        [sum(len(step.launches) for step in section.steps) for section in plan_of(net, example).entries[0].sections]
        for net in (plain, one, two)
    ]
    assert counts[0] == counts[1] == counts[2]
    assert [op.nodes for op in program_of(two, example).ops if "n1" in op.nodes] == [("n0", "n1", "n2")]


def test_it_is_fused_with_what_else_there_is() -> None:
    net = Net(x=(4, 9))
    net.out(net("Ramp", net("Exp", net("Ramp", net("Neg", "x"), domain="test", low=-1)), domain="test", low=0))
    (op,) = program_of(net, precision="fp32").ops
    assert isinstance(op, Pointwise)


def test_behind_a_kernel_it_is_one_step_with_the_copy_to_an_output() -> None:
    net = Net(x=(4, 9), w=(9, 6))
    y = net("Spread", "x", "w", outputs=2, domain="test", steps=[1.0, 2.0], scale=0.5)[0]
    ops = program_of(net.out(net("Ramp", y, domain="test", low=0))).ops
    assert [type(op).__name__ for op in ops] == ["Custom", "Pointwise"]
