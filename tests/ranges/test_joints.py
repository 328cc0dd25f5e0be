"""Several ops in one launch, at all sizes of a range."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.emit.pack import pack
from tccompile.errors import PlanError
from tccompile.kernels.pair_sm90 import PairSm90
from tccompile.kernels.squeeze_excite import SqueezeExcite
from tccompile.load.model import read
from tccompile.options import Options
from tccompile.pipeline import Told, jobs_of, likely_jobs, origin_of, to_parts, to_patterns
from tccompile.plan import codec
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.plan.formulas import computed, drawn, filler, integers
from tccompile.plan.members import Bounds
from tccompile.plan.rules import check_member
from tccompile.ranges.box import count, scattered
from tccompile.ranges.families import with_families
from tccompile.ranges.pool import Known
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.sizes import Size
from tccompile.stages.progress import quiet
from tests.kernels.test_pair_sm90 import bottlenecks
from tests.kernels.test_squeeze_excite import gated
from tests.small import image
from tests.test_plan import header_of, with_header

ARCH = ARCHS["sm_90a"]
BATCH = {"batch": Size("batch", 2, 40)}


@pytest.fixture(scope="module")
def pattern():
    """Three residual blocks: what is read of the model, its only pattern, and the options."""
    opened, told = read(bottlenecks("batch")), Told()
    (found,), options = to_patterns(opened, Options(archs=("sm_90a",), precision="fp16", ranges=BATCH), Dump(None), quiet, told)
    return opened, told, found, options


def parts_of(pattern, monkeypatch, cost):
    """The parts where two products in one launch take so long, and the codes that are compiled before."""
    monkeypatch.setattr(PairSm90, "cost", lambda self, ops, program, config, arch: cost(program))
    _, _, found, options = pattern
    known = Known(NO_TIMINGS, [found])
    ahead = {code for code, *_ in likely_jobs([found], options, (), known)}
    return to_parts(found, options, quiet, (), NO_TIMINGS, known), ahead


def within(program, build):
    """What is computed within which step, by nodes."""
    named = [op.nodes[0] for op in program.ops]
    return {named[i]: named[c.work.within] for i, c in enumerate(build.choices) if c.work.within >= 0}


def packed(pattern, parts):
    """The plan, whose code is none."""
    opened, told, *_ = pattern
    jobs = dict.fromkeys(job for *_, builds in parts for build in builds for job in jobs_of(build))
    images = {job: image(job[1].name, job[2], f"kernel_{n}") for n, job in enumerate(jobs)}
    plan = pack("test", {}, [part[1:] for part in parts], images, opened.weights, False, origin=origin_of(opened, told))
    return with_families(plan, [region for region, *_ in parts])


TOGETHER = {"conv_wide": "conv_c0", "conv_a1": "conv_c0", "conv_a2": "conv_c1"}


def test_launches_of_several_ops_are_those_of_fixed_shapes(pattern, monkeypatch):
    """And members of the plan keep to its rules: nothing else lies where such a launch writes early."""
    found = pattern[2]
    parts, ahead = parts_of(pattern, monkeypatch, lambda program: 0.01)
    jobs = [job for *_, builds in parts for build in builds for job in jobs_of(build)]
    assert {code for code, *_ in jobs if code.kernel == "pair_sm90"} <= ahead
    plan = packed(pattern, parts)
    of_several = [part for part in parts if count(part[0].box) > 1]  # others are entries for fixed shapes
    for (_, program, (build,)), family in zip(of_several, plan.families, strict=True):
        assert within(program, build) == TOGETHER
        bounds = Bounds(family, 0)
        formulas, tree = drawn((program, build), ["batch"])
        for point in scattered(family.sizes, 3):
            check_member(plan, family.at(point))
            bounds.check(integers(computed(family.formulas, point)))
            made, its = filler(tree)(computed(formulas, point))
            assert made == found.at(point)
            for place in (
                i for i, choice in enumerate(its.choices) if choice.kernel.name == "pair_sm90" and choice.work.launches
            ):
                members = sorted([place, *(i for i, choice in enumerate(its.choices) if choice.work.within == place)])
                work = its.choices[place].kernel.work([made.ops[k] for k in members], made, its.choices[place].config, ARCH)
                assert its.choices[place].work == work


def test_a_squeeze_and_excitation_is_that_of_fixed_shapes(monkeypatch):
    """Of as many images as there are."""
    monkeypatch.setattr(SqueezeExcite, "cost", lambda *_: 0.01)
    (found,), options = to_patterns(
        read(gated("batch")), Options(archs=("sm_90a",), precision="fp16", ranges=BATCH), Dump(None), quiet, Told()
    )
    for (box, _), program, (build,) in to_parts(found, options, quiet, (), NO_TIMINGS, Known(NO_TIMINGS, [found])):
        formulas, tree = drawn((program, build), ["batch"])
        for point in scattered(box, 3):
            made, its = filler(tree)(computed(formulas, point))
            ((place, choice),) = [
                (i, c) for i, c in enumerate(its.choices) if c.kernel.name == "squeeze_excite" and c.work.launches
            ]
            members = [i for i, c in enumerate(its.choices) if place in (i, c.work.within)]
            assert made == found.at(point) and len(members) > 2
            assert choice.work == choice.kernel.work([made.ops[k] for k in members], made, choice.config, ARCH)


def large_together(program):
    """What one launch takes."""
    return 0.01 if program.tensors["x"].shape[0] > 12 else 1e3


@pytest.fixture(scope="module")
def divided(pattern):
    """The parts where one launch is faster at large sizes."""
    with pytest.MonkeyPatch.context() as patch:
        return parts_of(pattern, patch, large_together)[0]


def test_small_sizes_may_be_apart_and_large_ones_together(divided):
    """The range is divided between them."""
    for ((size,), _), program, (build,) in divided:
        assert within(program, build) == (TOGETHER if size.low > 12 else {}), size
    assert len(divided) > 1


def test_what_parts_run_is_compiled_ahead(pattern):
    """Also the code of kernels that have other code for some sizes, which is not."""
    _, _, found, options = pattern
    known = Known(NO_TIMINGS, [found])
    ahead = {code for code, *_ in likely_jobs([found], options, (), known)}
    parts = to_parts(found, options, quiet, (), NO_TIMINGS, known)
    assert {code for *_, builds in parts for build in builds for code, *_ in jobs_of(build)} <= ahead


def test_a_plan_stores_a_program_of_several_parts_once(pattern, divided, monkeypatch):
    """Others name it by its number, which has to be that of one before."""
    file = to_bytes(packed(pattern, divided))
    header = header_of(file)
    families = header["plan"]["families"]
    programs = [family["entry"]["program"] for family in families]
    assert len(families) > 1
    assert type(programs[0]) is dict and programs[1:] == [0] * (len(families) - 1)
    assert to_bytes(from_bytes(file)) == file
    families[1]["entry"]["program"] = 1
    with pytest.raises(PlanError, match="there is no program 1 before it"):
        from_bytes(with_header(file, header))
    families[1:] = [{"sizes": [], "formulas": [], "entry": {"program": 0, "sections": []}}] * 60
    monkeypatch.setattr("tccompile.plan.file.MAX_VALUES", codec.values(codec.dumps(header)))
    with pytest.raises(PlanError, match="each as often as families have it"):
        from_bytes(with_header(file, header))
