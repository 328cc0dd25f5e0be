"""The plans of the kernels' tests, built without a GPU: one case of each kernel, and the network on the CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.job import SpillError
from tccompile.ir.reference import evaluate
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Kernel
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.runtime.session import Session
from tests.gpu import build
from tests.gpu.build import Variant, build_plan, build_plans, session_plan, variants
from tests.gpu.cases import CASES, program_of
from tests.small import image
from tests.tiers import thorough


@cache
def first_variants(arch: str, case: str) -> dict[str, Variant]:
    """Of each kernel that takes a case, its first config."""
    found: dict[str, Variant] = {}
    for variant in variants(case, program_of(case), [ARCHS[arch]], "cubin", every=False):
        found.setdefault(variant.kernel.name, variant)
    return found


@thorough
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_kernel_has_a_case(kernel: Kernel):
    """Of each kernel, a config in a plan that is read back as it was written; that its code compiles, its own tests see"""
    for name in ("sm_90a", "sm_75", "sm_61"):
        for case in CASES:
            found = first_variants(name, case).get(kernel.name)
            if found:
                plan = build_plan(case, program_of(case), [found], {job: image(name, job[2]) for job in found.jobs})
                again = from_bytes(to_bytes(plan))
                assert to_bytes(again) == to_bytes(plan) and {i.arch for i in again.images} == {name}
                (step,) = again.entries[0].sections[0].steps
                assert (step.kernel, len(step.launches)) == (kernel.name, len(found.work.launches))
                return
    pytest.fail(f"no case in tests/gpu/cases.py is for {kernel.name}")


def test_a_sample_has_some_variants_of_each_kernel(monkeypatch):
    """Spread over its cases; and what spills is left out, and named"""
    asked = []

    def spilling(jobs, progress=None):
        asked.append(list(jobs))
        spills = tuple(job for job in jobs if job[0].kernel == "gemm_simt")
        if spills:
            raise SpillError("it spills", spills)
        return {job: image(job[1].name, job[2]) for job in jobs}

    monkeypatch.setattr(build, "emit", spilling)
    cases = ["gemm", "gemm_1_row", "gemm_large", "softmax_rows"]
    built = build_plans(cases, [(ARCHS["sm_80"], "cubin")], sample=2)
    found = [(p.name, e.sections[0].steps[0].kernel) for p in built.plans for e in p.entries]
    kernels = [kernel for _, kernel in found]
    assert (kernels.count("gemm_mma"), kernels.count("softmax"), kernels.count("gemm_simt")) == (2, 2, 0)
    assert len({case for case, kernel in found if kernel == "gemm_mma"}) == 2
    assert [v.kernel.name for v in built.spilled] == ["gemm_simt"] * 2
    assert len(asked) == 2 and set(asked[1]) < set(asked[0])


def test_the_network_on_the_cpu():
    plan = session_plan([(ARCHS["sm_75"], "cubin")])
    for batch, entry in zip((1, 3), plan.entries, strict=True):
        x = np.random.default_rng(batch).standard_normal((batch, 3, 20, 24)).astype(np.float32)
        want = evaluate(entry.program, {"x": x}, {})
        for name, got in zip(("y", "z"), Session(plan, "cpu").run(None, {"x": x}), strict=True):
            assert np.linalg.norm(got.astype(np.float64) - want[name]) <= 2e-3 * np.linalg.norm(want[name])
