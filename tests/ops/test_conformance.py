"""ONNX's own node cases: load → rewrite → lower → the NumPy reference gives what the standard expects."""

from __future__ import annotations

import numpy as np

from tccompile.errors import UnsupportedError
from tccompile.expr import DType
from tccompile.load import load, sources
from tccompile.lower import lower
from tccompile.program import verify
from tccompile.reference import evaluate, from_storage, to_storage
from tccompile.rewrites import rewrite
from tests.ops.conformance import Case, cases

TOLERANCE = {np.dtype("float16"): 1e-3, np.dtype("float32"): 1e-5, np.dtype("float64"): 1e-6}
"""Relative error by an output's type. float64 is computed in float32."""

REFUSED = {
    "3 spatial axes": ("3d",),
    "uint64": ("uint64",),
    "holds strings": ("string",),
    "training_mode": ("training_mode",),
    "Indices": ("with_argmax_2d_precomputed_pads", "with_argmax_2d_precomputed_strides"),
    "computed at run time": ("scatternd", "maxunpool"),
}
"""Part of the reason for a refusal, and parts of the names of the cases that are refused for it: no others may be."""

DIFFERENT = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad": "four digits are given of what is expected",
    "test_resize_downsample_scales_linear_align_corners": "the result's length before rounding; ONNX Runtime rounds",
    "test_resize_downsample_scales_cubic_align_corners": "the result's length before rounding; ONNX Runtime rounds",
}
"""Cases whose expected values are not ours, and why."""


def mistake(case: Case) -> str | None:
    """What is wrong with the program's outputs, or None."""
    program = lower(rewrite(load(case.model)))
    verify(program)
    with np.errstate(all="ignore"):
        got = evaluate(program, case.feeds, sources(case.model))
    for name, want in case.expected.items():
        dtype = DType(want.dtype.name)
        out = from_storage(to_storage(got[name], dtype), dtype)
        if out.shape != want.shape:
            return f"{name} has shape {out.shape} instead of {want.shape}"
        out, want = out.astype(np.float64), want.astype(np.float64)
        same = (out == want) | (np.isnan(out) & np.isnan(want))
        with np.errstate(invalid="ignore"):  # inf - inf, which is no pass
            error = np.linalg.norm((out - want)[~same]) / max(np.linalg.norm(want[np.isfinite(want)]), 1e-30)
        allowed = TOLERANCE.get(case.expected[name].dtype, 4e-3 if dtype is DType.BF16 else 0.0)
        if not error <= allowed:
            return f"{name} is {error:.1e} off: {out.ravel()[:4]} instead of {want.ravel()[:4]}"
    return None


def test_every_case_is_right_or_refused_for_a_stated_reason() -> None:
    wrong, right, seen = [], 0, set()
    for case in cases():
        if case.name in DIFFERENT:
            continue
        try:
            problem = mistake(case)
            right += problem is None
        except UnsupportedError as e:
            reason = next((r for r, names in REFUSED.items() if r in str(e) and any(n in case.name for n in names)), None)
            seen.add(reason)
            problem = None if reason else f"refused: {e}"
        if problem:
            wrong.append(f"{case.name}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert right >= 560  # of about 600 in onnx 1.23: they must not disappear unseen
    assert seen == set(REFUSED)
