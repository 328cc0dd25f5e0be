"""The node cases of `onnx.backend.test` through `tccompile.backend`, and which of them fail, each for a stated reason.

    python -m tests.backend                      # all of them on the CPU engine
    python -m tests.backend --device CUDA        # on a GPU: `make backend-test`
    python -m tests.backend --precision fp16 'test_softmax*'
    python -m tests.backend --device simulator   # kernels of generated text too, on the CPU: some minutes

A case passes if its outputs agree as ONNX's own runner asks (1e-3 an element), in type and shape too, and in fp32 if the error
of each whole output is at most STRICT. What is expected to fail must fail, and be refused, not wrong. The cases of one release
of the onnx package are listed here; of another, those that are not may be refused too, as what tccompile does not do.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.runner import Runner

import tccompile.backend
from tccompile.arch import ARCHS
from tccompile.errors import TccompileError, UnsupportedError
from tccompile.runtime.driver import Device, open_device
from tccompile.schedule.choose import schedule
from tests.kernels.replay import replay

STRICT = {np.dtype("float32"): 1e-5, np.dtype("float64"): 1e-6, np.dtype("float16"): 1e-3}
"""||out - expected|| / ||expected||, by the output's type. float64 is computed in float32."""

HALF = {"rtol": 2e-2, "atol": 2e-2}
"""What is allowed an element where floats are stored in fp16."""

SIMULATOR = "simulator"
"""The CPU engine, and each step's kernel thread by thread beside it."""

SHARE = 16
"""Cases that a process takes at a time."""

VERSION = "1.23."
"""The release whose cases are listed."""

LISTED = onnx.__version__.startswith(VERSION)

ANY = ARCHS["sm_90a"]
"""The generation that ops must have kernels for."""

REFUSED: dict[str, tuple[str, ...]] = {
    "strings are no numbers": (
        "test_ai_onnx_ml_label*", "test_equal_string*", "test_regex*", "test_string*", "test_strnormalizer*",
        "test_tfidfvectorizer*",
    ),
    "operators of other domains than ONNX's own": (
        "test_adagrad*", "test_adam*", "test_flexattention", "test_flexattention_causal_mask",
        "test_flexattention_diff_head_sizes",
        "test_flexattention_double", "test_flexattention_fp16", "test_flexattention_gqa", "test_flexattention_prob_mod",
        "test_flexattention_relative_positional", "test_flexattention_scaled", "test_flexattention_score_mod",
        "test_flexattention_soft_cap", "test_momentum*", "test_nesterov_momentum",
    ),
    "drops or draws values at random": (
        "test_bernoulli*", "test_training_dropout", "test_training_dropout_default*", "test_training_dropout_mask",
    ),
    "opsets before 7": (
        "test_not*",
    ),
    "a loop over a batch of sequences, of opset 8": (
        "test_scan_sum",
    ),
    "statistics are gathered while it trains": (
        "test_batchnorm_epsilon_training_mode", "test_batchnorm_example_training_mode",
    ),
    "uint64 is computed as int64": (
        "test_bitshift_right_uint64", "test_div_uint64", "test_mod_uint64", "test_pow_types_float32_uint64",
        "test_top_k_uint64",
    ),
    "images are decoded by the application": (
        "test_image*",
    ),
    "bits of floats are no values": (
        "test_bitcast*float*",
    ),
    "it takes as parameters what others compute": (
        "test_affine_grid_2d_align_corners_expanded", "test_affine_grid_2d_expanded",
        "test_affine_grid_3d_align_corners_expanded", "test_affine_grid_3d_expanded",
    ),
    "the case is of a form that is not supported": (
        "test_maxpool_with*",
    ),
}  # fmt: skip
"""Why cases are refused: patterns of their names."""

OUT_OF_RANGE = ("test_softmax_large_number*", "test_logsoftmax_large_number*")
"""Cases whose values fp16 does not tell apart."""

DIFFERENT: dict[str, str] = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad": "four digits are given of what is expected",
    "test_dft_inverse": "what should be 0 is the rounding of its computation",
    "test_dft_inverse_opset19": "what should be 0 is the rounding of its computation",
    "test_gridsample_bicubic": "four digits are given of what is expected",
    "test_roialign_aligned_false": "four digits are given of what is expected",
    "test_roialign_aligned_true": "four digits are given of what is expected",
    "test_resize_downsample_scales_linear_align_corners": "the result's length before rounding; ONNX Runtime rounds",
    "test_resize_downsample_scales_cubic_align_corners": "the result's length before rounding; ONNX Runtime rounds",
}
"""Cases whose expected values are not ours, and why."""


@cache
def cases() -> list[Any]:
    """ONNX's cases: their names, models, inputs and outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return collect_testcases(None)


def run(case: Any, device: str = "CPU", precision: str = "fp32") -> str | None:
    """What is wrong with a case's outputs, or with what its kernels compute, or None.

    Raises TccompileError if it is refused, or if an op has no kernel.
    """
    on_cpu = device in ("CPU", SIMULATOR)
    prepared = tccompile.backend.prepare(case.model, "CPU" if on_cpu else device, precision=precision, jobs=1)
    for inputs, outputs in case.data_sets:
        got = prepared.run([_array(x) for x in inputs])
        for session in prepared.sessions if on_cpu else ():
            schedule(session.plan.entries[0].program, ANY)
            if device == SIMULATOR:
                given = dict(zip(prepared.inputs, map(_array, inputs), strict=False))
                tensors = tccompile.backend.tensors_of(given)
                types = {n: t.dtype.numpy for n, t in session.plan.entries[0].program.tensors.items()}
                feeds = {n: np.asarray(tensors[n]).view(types[n]) for n in session.plan.entries[0].program.inputs}  # bf16 as bits
                for step in replay(session.plan, feeds, ANY):
                    if step.problem:
                        return f"{' + '.join(step.op.nodes)} by {step.kernel} {step.config}: {step.problem}"
        want = [_array(x) for x in outputs]
        allowed = {"rtol": case.rtol, "atol": case.atol} if precision == "fp32" else HALF
        try:
            with np.errstate(invalid="ignore"):
                Runner.assert_similar_outputs(_flat(want), _flat(got), **allowed)
        except AssertionError as error:
            return " ".join(str(error).split())
        for name, made, hoped in zip(prepared.outputs, got, want, strict=True):
            for y, expected in zip(_flat([made]), _flat([hoped]), strict=True):
                if precision == "fp32" and not (error := _error(y, expected)) <= STRICT.get(expected.dtype, 1.0):
                    return f"{name} is {error:.1e} off"
    return None


def _array(x: Any) -> Any:
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _flat(values: Any) -> list[Any]:
    """Arrays, also those in sequences: ONNX's runner takes no scalars in them."""
    return [one for x in values for one in (x if isinstance(x, list) else [x])]


def _error(y: np.ndarray, expected: np.ndarray) -> float:
    """||y - expected|| / ||expected|| over what is finite."""
    if expected.dtype.kind != "f":
        return 0.0
    y, expected = y.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    norm = float(np.linalg.norm(expected[finite]))
    return float(np.linalg.norm(y[finite] - expected[finite])) / norm if norm else 0.0


def reason(name: str) -> str | None:
    """Why a case is expected not to pass."""
    return DIFFERENT.get(name) or next((r for r, names in REFUSED.items() if any(fnmatch.fnmatch(name, n) for n in names)), None)


def verdict(case: Any, device: str = "CPU", precision: str = "fp32") -> tuple[bool, str | None]:
    """Whether it passed, and what is not as expected."""
    expected = reason(case.name)
    try:
        problem = run(case, device, precision)
    except TccompileError as refusal:
        wrong = case.name in DIFFERENT or (expected is None and (LISTED or not isinstance(refusal, UnsupportedError)))
        return False, f"{case.name}: refused: {refusal}" if wrong else None
    except Exception as crash:
        return False, f"{case.name}: {type(crash).__name__}: {crash}"
    if problem is None:
        odd = LISTED and expected and precision == "fp32"
        return True, f"{case.name}: passes, and is listed: {expected}" if odd else None
    return False, None if case.name in DIFFERENT else f"{case.name}: {problem}"


@cache
def _kept(number: int) -> Device:
    """A GPU whose context lasts as long as this process: to make one for each case would take longer than the case."""
    return open_device(number)


def verdicts(numbers: list[int], device: str, precision: str) -> list[tuple[bool, str | None]]:
    """Of the cases of these numbers, computed by this process."""
    if device.startswith("CUDA"):
        _kept(int(device.partition(":")[2] or 0))
    return [verdict(cases()[i], device, precision) for i in numbers]


def main() -> int:
    parser = argparse.ArgumentParser(description="ONNX's node cases, on this machine")
    parser.add_argument("--device", default="CPU", help=f"CPU, CUDA, CUDA:N, or {SIMULATOR}")
    parser.add_argument("--precision", default="fp32", help="fp32 or fp16")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of cases, as test_softmax*")
    options = parser.parse_args()
    chosen = [i for i, case in enumerate(cases()) if any(fnmatch.fnmatch(case.name, p) for p in options.patterns)]
    shares = [chosen[n : n + SHARE] for n in range(0, len(chosen), SHARE)]
    passes = problems = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(verdicts, share, options.device, options.precision) for share in shares]
        for future in as_completed(futures):
            for passed, problem in future.result():
                passes, problems = passes + passed, problems + (problem is not None)
                if problem:
                    print(problem, flush=True)
    print(f"{passes} of {len(chosen)} cases pass on {options.device} in {options.precision}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
