"""Plans on any number of rows, and what NVIDIA's server is told of them and asks. The real server: tests/doors/test_triton.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from tccompile.cli import commands
from tccompile.cli.triton import tctriton
from tccompile.errors import InputError, UsageError
from tccompile.options import as_sizes
from tccompile.pipeline import without_code
from tccompile.plan.file import Plan, write_plan
from tccompile.runtime.rows import Rows, row_sizes
from tccompile.runtime.session import Session
from tccompile.triton import Model, configuration, write_repository
from tests.commands import Run
from tests.rewrites.common import Net


def network(rows: int | str, dtype: Any = np.float32) -> onnx.ModelProto:
    n = Net(x=(dtype, (rows, 3, 5)), i=(np.int64, (rows, 2)))
    return n.out(n("Relu", "x"), n("Mul", "i", np.array([3], np.int64))).model()


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Entries of 2 and of 8 rows."""
    small, large = (without_code(network(n), precision="fp32") for n in (2, 8))
    return replace(large, entries=(*large.entries, *small.entries))


@pytest.fixture(scope="module")
def ranged() -> Plan:
    """For 1 to 24 rows."""
    return without_code(network("n"), precision="fp32", ranges=as_sizes({"n": (1, 24)}))


def feeds(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, 3, 5)).astype(np.float32)
    return {"x": x, "i": np.arange(2 * rows).reshape(rows, 2)}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 21])
def test_any_number_of_rows(plan: Plan, count: int) -> None:
    given = feeds(count)
    made = list(Rows(Session(plan, "cpu")).run(given).values())
    np.testing.assert_array_equal(made[0], np.maximum(given["x"], 0))
    np.testing.assert_array_equal(made[1], given["i"] * 3)


@pytest.mark.parametrize("count, runs", [(0, [2]), (2, [2]), (3, [8]), (8, [8]), (10, [8, 2]), (17, [8, 8, 2])])
def test_the_smallest_entry_that_is_enough(plan: Plan, count: int, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = Session.run
    monkeypatch.setattr(Session, "run", lambda s, names, given: (seen.append(len(given["x"])), whole(s, names, given))[1])
    Rows(Session(plan, "cpu")).run(feeds(count))
    assert seen == runs


@pytest.mark.parametrize("count", [0, 1, 5, 24, 31])
def test_any_number_of_rows_of_a_range(ranged: Plan, count: int) -> None:
    given, rows = feeds(count), Rows(Session(ranged, "cpu"))
    rows.warm()
    made = list(rows.run(given).values())
    np.testing.assert_array_equal(made[0], np.maximum(given["x"], 0))
    np.testing.assert_array_equal(made[1], given["i"] * 3)


@pytest.mark.parametrize(
    "low, high, step, sizes",
    [
        (1, 24, 1, [1, 2, 3, 6, 12, 24]),
        (3, 9, 1, [3, 4, 5, 6, 7, 8, 9]),
        (1, 1000, 1, [1, 2, 16, 32, 63, 125, 250, 500, 1000]),
        (5, 1000, 45, [5, 50, 95, 140, 275, 500, 995]),
        (64, 64, 1, [64]),
    ],
)
def test_sizes_of_a_range_that_are_run(low: int, high: int, step: int, sizes: list[int]) -> None:
    """Each is at most twice the one before, down to the least sizes: a session keeps eight beside those with entries."""
    plan = without_code(network("n"), precision="fp32", ranges=as_sizes({"n": (low, high, step)}))
    assert row_sizes(plan) == sizes


@pytest.mark.parametrize(
    "change, why",
    [
        ({"x": None}, "the batch has no column 'x', which the plan takes; it has 'i'"),
        ({"x": np.zeros((4, 3, 5), np.float32)}, "columns of 3, 4 rows are no batch"),
        ({"x": np.zeros((3, 3, 6), np.float32)}, "the plan has no entry for x 8x3x6"),
        ({"x": np.zeros((3, 3, 5))}, "input 'x' has type float32, got float64"),
    ],
)
def test_batches_that_do_not_fit(plan: Plan, change: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Rows(Session(plan, "cpu")).run({n: x for n, x in (feeds(3) | change).items() if x is not None})


def product() -> Plan:
    n = Net(x=(4, 3), y=(3, 2))
    return without_code(n.out(n("MatMul", "x", "y")).model())


def test_plans_without_rows(plan: Plan) -> None:
    with pytest.raises(UsageError, match="must have one row for each example, along the first axis: x 4x3, y 3x2"):
        row_sizes(product())
    with pytest.raises(UsageError, match="must differ in the number of rows"):
        row_sizes(replace(plan, entries=(plan.entries[0], plan.entries[0])))


@pytest.mark.parametrize(
    "shape, ranges, why",
    [
        ((2, "w"), {"w": (2, 9)}, "must differ in the number of rows, and in nothing else"),
        (("n", "w"), {"n": (2, 9), "w": (3, 4)}, "must differ in the number of rows, and in nothing else"),
    ],
)
def test_ranges_of_something_else(shape: tuple, ranges: dict, why: str) -> None:
    plan = without_code((n := Net(x=shape)).out(n("Relu", "x")).model(), ranges=as_sizes(ranges))
    with pytest.raises(UsageError, match=why):
        row_sizes(plan)
    dims = {"x": "[ -1, -1 ]" if "n" in shape else "[ 2, -1 ]"}["x"]
    assert f"dims: {dims}" in (text := configuration(plan, "m", True, 0)) and "max_batch_size: 0" in text


# --- NVIDIA's server -------------------------------------------------------------------------------------------------


def test_what_the_server_is_told_of_a_range(ranged: Plan) -> None:
    text = configuration(ranged, "m", cpu=False, wait_us=0)
    assert "max_batch_size: 24" in text and "dims: [ 3, 5 ]" in text and "max_queue_delay_microseconds: 0" in text


def test_another_version_of_a_model(ranged: Plan, plan: Plan, tmp_path: Path) -> None:
    """It is a folder of its own, and appears as a whole."""
    for made in (plan, ranged):
        write_plan(made, tmp_path / "m.plan")
        folder = write_repository(tmp_path / "m.plan", tmp_path / "repository", "m", update=True)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "config.pbtxt"] and [*folder.parent.iterdir()] == [folder]
    assert (folder / "2/model.plan").read_bytes() == (tmp_path / "m.plan").read_bytes() != (folder / "1/model.plan").read_bytes()
    assert "max_batch_size: 24" in (folder / "config.pbtxt").read_text()


def test_what_the_server_is_told(plan: Plan) -> None:
    assert configuration(plan, "m", cpu=False, wait_us=500).splitlines()[:6] == [
        'name: "m"',
        'backend: "python"',
        "max_batch_size: 8",
        'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 5 ] }',
        'input { name: "i" data_type: TYPE_INT64 dims: [ 2 ] }',
        'output { name: "t0" data_type: TYPE_FP32 dims: [ 3, 5 ] }',
    ]
    assert "KIND_GPU count: 1" in (text := configuration(plan, "m", False, 500))
    assert "max_queue_delay_microseconds: 500" in text
    text = configuration(product(), "m", cpu=True, wait_us=500)
    assert "max_batch_size: 0" in text and "dims: [ 4, 3 ]" in text and "KIND_CPU" in text and "dynamic" not in text


@dataclass
class Request:
    inputs: dict[str, np.ndarray]


@pytest.fixture
def model(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """An instance, as the server makes one; the server's module is stood in for."""
    utils = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request.inputs[name]),
        Tensor=lambda name, values: (name, values),
        TritonError=str,
        InferenceResponse=lambda output_tensors=None, error=None: error or dict(output_tensors),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    write_plan(plan, tmp_path / "m.plan")
    (tmp_path / "repository/m/1").mkdir(parents=True)
    write_plan(plan, tmp_path / "repository/m/1/model.plan")
    made = Model()
    args = {"model_instance_kind": "CPU", "model_instance_device_id": "0", "model_version": "1"}
    made.initialize(args | {"model_repository": str(tmp_path / "repository/m")})
    return made


def answers(model: Model, batches: Sequence[dict[str, np.ndarray]]) -> list[Any]:
    return model.execute([Request(given) for given in batches])


def test_requests_run_together_and_are_answered_apart(model: Model) -> None:
    batches = [feeds(n) for n in (1, 3, 2)]
    for given, answer in zip(batches, answers(model, batches), strict=True):
        values = list(answer.values())
        np.testing.assert_array_equal(values[0], np.maximum(given["x"], 0))
        np.testing.assert_array_equal(values[1], given["i"] * 3)
    model.finalize()


def test_a_bad_request_fails_alone(model: Model) -> None:
    bad = feeds(2) | {"x": np.zeros((2, 3, 5))}
    good, problem, other = answers(model, [feeds(1), bad, feeds(2)])
    assert "input 'x' has type float32, got float64" in problem
    assert [len(next(iter(a.values()))) for a in (good, other)] == [1, 2]


@pytest.mark.parametrize(
    "options, code, says",
    [
        ("m.plan -o repository", 0, ""),
        ("m.plan -o taken", 2, "m is there already: give --update for another version of it, or --name"),
        ("m.plan -o repository --name a/b", 2, "'a/b' is no name for a model"),
        ("m.plan -o repository --name ..", 2, "'..' is no name for a model"),
        ("bf16.plan -o repository", 2, "'x' is bfloat16, which the server's Python backend does not have"),
        ("m.plan", 2, "-o"),
        ("x.npy -o repository", 5, "is not a plan"),
    ],
)
def test_the_command(
    run: Run, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, code: int, says: str
) -> None:
    monkeypatch.setattr(commands, "tctriton", tctriton, raising=False)
    write_plan(plan, tmp_path / "m.plan")
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "taken/m").mkdir(parents=True)
    elem = onnx.TensorProto.BFLOAT16
    x, y = (onnx.helper.make_tensor_value_info(n, elem, (2, 4)) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    write_plan(
        without_code(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])), tmp_path / "bf16.plan"
    )
    result = run("tctriton", *options.split())
    assert result.code == code and says in result.err, result.err
    made = tmp_path / "repository/m"
    assert made.exists() == (code == 0), "nothing is half written"
    if code == 0:
        assert (made / "1/model.plan").read_bytes() == (tmp_path / "m.plan").read_bytes()
        assert {p.name for p in made.rglob("*") if p.is_file()} == {"config.pbtxt", "model.plan", "model.py"}
