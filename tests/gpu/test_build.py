"""The plans of the kernels' tests, built without a GPU: one case of each kernel, and the network on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Kernel
from tccompile.plan import from_bytes, to_bytes
from tccompile.reference import evaluate
from tccompile.runtime.session import Session
from tests.gpu.build import build_plan, emit, session_plan, variants
from tests.gpu.cases import CASES, program_of


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_kernel_has_a_case(kernel: Kernel):
    """Of each kernel, a config in a plan that is read back as it was written"""
    for name in ("sm_90a", "sm_75", "sm_61"):
        for case in CASES:
            program = program_of(case)
            found = [v for v in variants(case, program, [ARCHS[name]], "cubin", every=False) if v.kernel is kernel]
            if found:
                plan = build_plan(case, program, found[:1], emit(found[0].jobs))
                again = from_bytes(to_bytes(plan))
                assert to_bytes(again) == to_bytes(plan) and {i.arch for i in again.images} == {name}
                (step,) = again.entries[0].sections[0].steps
                assert (step.kernel, len(step.launches)) == (kernel.name, len(found[0].work.launches))
                return
    pytest.fail(f"no case in tests/gpu/cases.py is for {kernel.name}")


def test_the_network_on_the_cpu():
    plan = session_plan([(ARCHS["sm_75"], "cubin")])
    for batch, entry in zip((1, 3), plan.entries, strict=True):
        x = np.random.default_rng(batch).standard_normal((batch, 3, 20, 24)).astype(np.float32)
        want = evaluate(entry.program, {"x": x}, {})
        for name, got in zip(("y", "z"), Session(plan, "cpu").run(None, {"x": x}), strict=True):
            assert np.linalg.norm(got.astype(np.float64) - want[name]) <= 2e-3 * np.linalg.norm(want[name])
