"""What a user's program looks like to a type checker: `make check` reads it, and a test runs what needs no GPU of it.

Each `assert_type` is what somebody's editor says of the name; a public name without a type would be `Any` here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np

import tccompile
import tccompile.ort as ort
from tccompile.check import Report
from tccompile.verify.oracle import Verification


def compiled(path: Path) -> tccompile.Plan:
    report = tccompile.check(path)
    assert_type(report, Report)
    assert_type(report.text, str)
    try:
        plan = tccompile.compile(path.read_bytes(), {"x": (2, 4)}, ["native", "8.6"], precision="fp32", max_error=1e-3)
    except tccompile.errors.UnsupportedError as error:
        raise SystemExit(error.exit_code) from error
    assert_type(plan, tccompile.Plan)
    assert_type(tccompile.verify(plan, path, tolerance=1e-3), Verification)
    plan.save(path.with_suffix(".plan"))
    return assert_type(tccompile.Plan.load(path.with_suffix(".plan")), tccompile.Plan)


def run(plan: tccompile.Plan, x: np.ndarray) -> list[Any]:
    assert_type(tccompile.inspect(plan, steps=True), dict[str, Any])
    with tccompile.Session(plan, device="cpu", check_finite=True) as session:
        assert_type(session, tccompile.Session)
        (value,) = session.get_inputs()
        assert_type(value, tccompile.Value)
        assert_type(value.shape, tuple[int | None, ...] | None)
        assert_type(session.entries, tuple[Mapping[str, tuple[int, ...]], ...])
        assert_type(session.get_modelmeta().custom_metadata_map, Mapping[str, str])
        assert_type(session.bench(iterations=1), list[float])
        return assert_type(session.run(output_names=None, input_feed={value.name: x}), list[Any])


def refitted(session: tccompile.Session, model: str) -> None:
    weights = tccompile.weights(model)
    assert_type(weights, Mapping[str, np.ndarray])
    session.refit(weights)


def by_onnx_runtimes_api(model: bytes, x: np.ndarray) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.anything_else = True
    session = ort.InferenceSession(
        model, options, providers=[("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]
    )
    assert_type(session.get_inputs()[0].name, str)
    return assert_type(session.run(None, {session.get_inputs()[0].name: x}), list[Any])


def mistakes() -> None:
    """What a type checker must find: each ignored error is one, and it says so if it is not."""
    tccompile.compile(3)  # type: ignore[arg-type]
    tccompile.compile("m.onnx", precison="fp32")  # type: ignore[call-arg]
    tccompile.Session("m.plan").run("y")  # type: ignore[call-arg]
    tccompile.Session(io.StringIO())  # type: ignore[arg-type]
    tccompile.nope()  # type: ignore[attr-defined]
