"""Which of a file's arrays is which of a plan's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tccompile.errors import UsageError
from tccompile.refit.names import Called, by_content, named, read_map
from tccompile.refit.plan import refitted
from tests.refit.common import bits, plan_of, products, tuned, weights
from tests.rewrites.common import Net


def elsewhere(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as another tool has them: by other names, and one of the square ones transposed."""
    return {"fc1.weight": arrays["w0"], "fc1.bias": arrays["w1"], "fc2.weight": arrays["w2"].T, "fc2.bias": arrays["w3"]}


CALLED = {"w0": Called("fc1.weight"), "w1": Called("fc1.bias"), "w2": Called("fc2.weight", True), "w3": Called("fc2.bias")}


def test_weights_are_found_by_what_they_were() -> None:
    old = products().model()
    plan, new = plan_of(old), tuned(old)
    found = by_content(plan, elsewhere(weights(old)))
    assert found == CALLED
    made = refitted(plan, named(plan, elsewhere(weights(new)), found, False))
    assert bits(made) == bits(refitted(plan, weights(new)))


def test_narrower_types_are_widened() -> None:
    """A checkpoint in halves of a model in floats: only what halves hold exactly is the same."""
    old = products()
    for tensor in old.weights:
        values = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    plan, w = plan_of(old.model()), weights(old.model())
    halves = {name: values.astype(np.float16) for name, values in elsewhere(w).items()}
    found = by_content(plan, halves)
    assert found == CALLED
    assert bits(refitted(plan, named(plan, halves, found, False))) == bits(plan)


def test_the_own_name_comes_first_where_values_are_equal() -> None:
    old = products()
    old.weights[3].CopyFrom(old.weights[1])
    old.weights[3].name = "w3"
    plan, w = plan_of(old.model()), weights(old.model())
    assert by_content(plan, w) == {name: Called(name) for name in w}
    with pytest.raises(UsageError, match=r"'w1' has the values of 'fc1.bias', 'fc2.bias': say which with --map"):
        by_content(plan, elsewhere(w))


def test_a_matrix_that_is_its_own_transpose() -> None:
    """How it lies elsewhere nothing tells: what it becomes may not be."""
    old = products()
    old.weights[2].CopyFrom(onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w2"))
    plan, w = plan_of(old.model()), weights(old.model())
    assert by_content(plan, w)["w2"] == Called("w2")
    with pytest.raises(UsageError, match=r"'w2' has the values of 'fc2.weight', 'fc2.weight' transposed: say which with --map"):
        by_content(plan, elsewhere(w))


def test_values_that_are_not_there() -> None:
    old = products().model()
    with pytest.raises(UsageError, match="no array has the values that the plan's weight 'w0' was made of"):
        by_content(plan_of(old), elsewhere(weights(tuned(old))))


def test_weights_that_are_missing() -> None:
    old = products().model()
    plan, w = plan_of(old), weights(old)
    with pytest.raises(UsageError, match=r"'w0' is not there: give the old weights by the new names \(--was OLD\)"):
        named(plan, elsewhere(w), {}, False)
    with pytest.raises(UsageError, match=r"'w0' is not there as 'fc1.weight'"):
        named(plan, w, {"w0": Called("fc1.weight")}, False)
    with pytest.raises(UsageError, match="the plan has no weight 'none'"):
        named(plan, w, {"none": Called("w0")}, False)


def test_a_map(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(json.dumps({"w0": "fc1.weight", "w2": {"name": "fc2.weight", "transposed": True}, "w3": {"name": "b"}}))
    assert read_map(path) == {"w0": Called("fc1.weight"), "w2": Called("fc2.weight", True), "w3": Called("b")}


@pytest.mark.parametrize(
    "content, why",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "it must be an object, as"),
        ({"w": 3}, "'w' must be a name, or as"),
        ({"w": {"transposed": True}}, "'w' must be a name, or as"),
        ({"w": {"name": "a", "transposed": 1}}, "'w' must be a name, or as"),
        ({"w": {"name": "a", "more": 1}}, "'w' must be a name, or as"),
    ],
)
def test_what_is_no_map(tmp_path: Path, content: Any, why: str) -> None:
    path = tmp_path / "names.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=why):
        read_map(path)


def test_what_was_folded_is_known_by_other_names_too() -> None:
    """What was computed of it is a literal: where the file has it, under any name, it must be what it was."""
    n = Net(x=(4, 16))
    old = n.out(n("Mul", n("MatMul", "x", n.normal(16, 16)), n("Abs", n.normal(16)))).model()
    plan = plan_of(old)
    was = {"fc": weights(old)["w0"].T, "scale": weights(old)["w1"]}
    found = by_content(plan, was)
    assert found == {"w0": Called("fc", True), "w1": Called("scale")}
    assert bits(refitted(plan, named(plan, was, found, True))) == bits(plan)
    with pytest.raises(UsageError, match="the weight 'w1' has other values than when the plan was made"):
        refitted(plan, named(plan, was | {"scale": 2 * was["scale"]}, found, True))
    found = {"w0": Called("fc", True)}
    assert by_content(plan, {"fc": was["fc"]}) == found
    assert "w1" not in named(plan, was, found, False), "a checkpoint need not have it"
    with pytest.raises(UsageError, match="'w1' is not there: give the old weights"):
        named(plan, was, found, True)
    with pytest.raises(UsageError, match="'w1' has the values of 'a', 'scale': say which with --map"):
        by_content(plan, {"a": was["scale"]} | was)
