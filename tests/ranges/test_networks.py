"""Plans for ranges on the CPU engine, and their launches beside those of fixed shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from time import process_time
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.pack import pack
from tccompile.errors import InputError, PlanError, UnsupportedError, UsageError
from tccompile.ir.extent import hint
from tccompile.ir.metric import relative_error
from tccompile.ir.ops import Softmax
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels.gemm_sm90 import Hopper
from tccompile.kernels.pool import PoolKernel
from tccompile.kernels.remembered import forget
from tccompile.kernels.softmax import SoftmaxKernel
from tccompile.kernels.spec import Code
from tccompile.options import Options, as_sizes, parse_sizes
from tccompile.pipeline import Dump, Told, compile, jobs_of, origin_of, quiet, read, to_parts, to_patterns, without_code
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.plan.format import Family, Map
from tccompile.plan.formulas import Slot, computed, drawn, filler, integers
from tccompile.plan.members import Bounds
from tccompile.plan.rules import check_families, check_member
from tccompile.ranges import steps
from tccompile.ranges.box import corners, opened, scattered
from tccompile.ranges.families import with_families
from tccompile.ranges.inputs import open_inputs
from tccompile.ranges.pool import SURE, Known
from tccompile.runtime.session import Session
from tccompile.schedule.choose import uncopied
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.sizes import Size
from tests.kernels import simulator
from tests.kernels.support import check
from tests.ranges import models
from tests.rewrites.common import Net
from tests.small import image
from tests.tiers import usually

IMAGE = as_sizes({"batch": (1, 2), "h": (16, 48, 4), "w": (12, 44, 4)})
TOKENS = as_sizes({"batch": (1, 3), "tokens": (1, 40)})
CASES = {"image": (models.image, IMAGE), "tokens": (models.tokens, TOKENS)}


def feeds(name: str, point: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    if name == "image":
        return {"x": draw.standard_normal((point["batch"], 3, point["h"], point["w"])).astype(np.float32)}
    return {"x": draw.integers(0, 50, (point["batch"], point["tokens"]))}


def sizes(ranges: dict[str, Size], count: int) -> list[dict[str, int]]:
    """The least and the greatest sizes, and some at random."""
    box = tuple(ranges.values())
    found = [corners(box)[0], corners(box)[-1], *scattered(box, count)]
    return [dict(zip(ranges, point, strict=True)) for point in found]


@pytest.fixture(scope="module", params=CASES)
def built(request):
    """A model's name, the model, its ranges and its plan, as it is read from a file."""
    make, ranges = CASES[request.param]
    model = make()
    return request.param, model, ranges, from_bytes(to_bytes(without_code(model, precision="fp32", ranges=ranges)))


def test_outputs_are_right_at_all_sizes(built):
    name, model, ranges, plan = built
    session = Session(plan, device="cpu")
    oracle = onnxruntime.InferenceSession(model.SerializeToString())
    for point in sizes(ranges, 12):
        given = feeds(name, point)
        (out,), (expected,) = session.run(None, given), oracle.run(None, given)
        assert out.shape == expected.shape and relative_error(out, expected) < 1e-5, point


def test_weights_are_stored_once(built):
    name, model, ranges, plan = built
    fixed = without_code(model, {k: v.shape for k, v in feeds(name, sizes(ranges, 0)[-1]).items()}, "fp32")
    assert plan.families and len(plan.weights) <= len(fixed.weights) + 1
    assert sum(map(plan.size, plan.weights)) <= 1.1 * sum(map(fixed.size, fixed.weights)) + 256


def test_shapes_are_told_and_checked(built):
    name, _, ranges, plan = built
    session = Session(plan, device="cpu")
    (given,) = session.get_inputs()
    assert given.shape == ((None, 3, None, None) if name == "image" else (None, None))
    for size in ranges.values():
        for wrong in (size.high + size.step, size.low + 1 if size.step > 1 else 0):
            with pytest.raises(InputError, match=rf"{size.low}\.\.{size.all[-1]}"):
                session.run(None, feeds(name, {**sizes(ranges, 0)[0], size.name: wrong}))


def test_sizes_may_change_with_every_run(built):
    name, _, ranges, plan = built
    session = Session(plan, device="cpu")
    points = sizes(ranges, 10)
    first = [session.run(None, feeds(name, point))[0] for point in points]
    for point, before in zip(reversed(points), reversed(first), strict=True):
        assert np.array_equal(session.run(None, feeds(name, point))[0], before)
    assert len(session._members) <= 8


LAUNCHED = [
    ("image", "sm_90a"),
    ("tokens", "sm_80"),
    ("tokens", "sm_90a"),
    ("image", "sm_75"),
]


@cache
def parts_of(name, arch):
    """The model, what is told of it, its patterns, and their parts."""
    make, ranges = CASES[name]
    opened, told = read(make()), Told()
    patterns, options = to_patterns(opened, Options(archs=(arch,), precision="fp16", ranges=ranges), Dump(None), quiet, told)
    return opened, told, [(p, to_parts(p, options, quiet, (), NO_TIMINGS, Known())) for p in patterns]


@pytest.mark.parametrize("name, arch", usually(LAUNCHED, 0))
def test_launches_are_those_of_fixed_shapes(name, arch):
    """What formulas give is what the kernels say of the program at each size; a launch's code does not depend on it."""
    compared = 0
    for pattern, parts in parts_of(name, arch)[2]:
        for (box, _), program, builds in parts:
            (build, *_) = builds
            formulas, whole = drawn((program, build), [size.name for size in box])
            fill = filler(whole)
            for point in dict.fromkeys((*corners(box)[:1], *corners(box)[-1:], *scattered(box, 6))):
                made, its = fill(computed(formulas, point))
                fixed = pattern.at(point)
                assert made == fixed
                for op, old, choice in zip(fixed.ops, made.ops, its.choices, strict=True):
                    if choice.work.launches:
                        work = choice.kernel.work(old, fixed, choice.config, ARCHS[arch])
                        assert choice.kernel.supports(op, fixed, ARCHS[arch]) is None
                        if [a.code for a in choice.work.launches] == [b.code for b in work.launches]:  # else a constant is lifted
                            assert choice.work.launches == work.launches, (point, op.nodes, choice.kernel.name)
                            compared += 1
    assert compared > 100


def test_choosing_asks_for_configs_once_and_tells_of_codes_before_all_is_chosen(monkeypatch):
    """No kernel is asked twice for the configs of an op; codes are those of the launches; some of the pool's are told early."""
    make, sizes_ = CASES["tokens"]
    options = Options(archs=("sm_90a",), precision="fp16", ranges=sizes_)
    patterns, options = to_patterns(read(make()), options, Dump(None), quiet, Told())
    asked, told = list[tuple[Any, Any]](), list[Code]()
    of_kernel = Hopper.configs_of

    def configs_of(kernel, way, program, arch):
        asked.append((way, program))
        return of_kernel(kernel, way, program, arch)

    monkeypatch.setattr(Hopper, "configs_of", configs_of)
    known = Known(NO_TIMINGS, patterns, lambda arch, codes: told.extend(codes))
    forget()
    for pattern in patterns:
        to_parts(pattern, options, quiet, (), NO_TIMINGS, known)
    assert asked and len({(id(way), id(program)) for way, program in asked}) == len(asked)
    ops = {own.number: own for of_point in known.at.values() for own in of_point}
    coded = [(ops[i], c, codes) for (_, i), found in known.ranked.items() for c, codes in found if codes is not None]
    for own, c, codes in coded:
        assert codes == {launch.code for launch in c.kernel.work(own.op, own.program, c.config, ARCHS["sm_90a"]).launches}
    assert any(isinstance(c.kernel, Hopper) for _, c, _ in coded)
    assert 0 < len(told) <= SURE and {*told} <= known.pool(patterns[0], ARCHS["sm_90a"], ()).codes


@pytest.mark.parametrize("name, arch", usually(LAUNCHED, 0, 1))
def test_members_between_the_ends_keep_to_their_bounds(name, arch):
    """A GPU holds members to less than all rules, and to these at every size; what is changed is refused, and nothing fails."""
    opened, told, patterns = parts_of(name, arch)
    families = [part for _, parts in patterns for part in parts]
    jobs = dict.fromkeys(job for *_, builds in families for build in builds for job in jobs_of(build))
    images = {job: image(job[1].name, job[2], f"kernel_{n}") for n, job in enumerate(jobs)}
    packed = pack("test", {}, [part[1:] for part in families], images, opened.weights, False, origin=origin_of(opened, told))
    plan = with_families(packed, [box for box, *_ in families])
    draw = np.random.default_rng(0)
    for family in plan.families[:6]:
        bounds = Bounds(family, 0)
        for point in scattered(family.sizes, 8):
            check_member(plan, family.at(point))
            bounds.check(integers(computed(family.formulas, point)))
        refused = 0
        for _ in range(30):
            number = int(draw.integers(len(family.formulas)))
            op, a, _ = family.formulas[number]
            constant = a + int(draw.choice([1, -1, 1 << 20, 1 << 40])) if op == "int" else 1 << int(draw.integers(40))
            value = ("int", constant, 0)
            changed = replace(family, formulas=(*family.formulas[:number], value, *family.formulas[number + 1 :]))
            try:
                Bounds(changed, 0).check(integers(computed(changed.formulas, point)))
            except PlanError:
                refused += 1
        assert refused


def test_results_whose_innermost_axis_is_open():
    """Their padding is there at some sizes only: code that looks for itself is for all of them"""
    n = Net(x=(np.float32, ("batch", 24)))
    model = n.out(n("ReduceSum", "x", np.array([1], np.int64), keepdims=0)).model()
    options = Options(archs=("sm_80",), precision="fp16", ranges={"batch": Size("batch", 2, 40)})
    patterns, options = to_patterns(read(model), options, Dump(None), quiet, Told())
    parts = [part for p in patterns for part in to_parts(p, options, quiet, (), NO_TIMINGS, Known())]
    assert {size.low for ((size,), _), *_ in parts} >= {2} and max(size.high for ((size,), _), *_ in parts) == 40
    assert all(c.work.launches for _, _, builds in parts for build in builds for c in build.choices)
    x = np.random.default_rng(0).standard_normal((13, 24)).astype(np.float32)
    (got,) = Session(without_code(model, precision="fp32", ranges={"batch": Size("batch", 2, 40)}), "cpu").run(None, {"x": x})
    assert got.shape == (13,) and relative_error(got, x.sum(1)) < 1e-6


@pytest.mark.parametrize("kind, more", [("Softmax", {"axis": -1}), ("ReduceMean", {"axes": [1], "keepdims": 1})])
def test_rows_that_are_multiples_of_8_at_some_sizes_only(kind, more):
    """A code that reads elements one by one is for all of them: else the range would be divided at each multiple."""
    g = models.Graph()
    model = g.model("x", 1, [2, 40, "n"], g.op(kind, "x", **more))
    options = Options(archs=("sm_90a",), precision="fp32", ranges={"n": Size("n", 20, 600)})
    (pattern,), options = to_patterns(read(model), options, Dump(None), quiet, Told())
    assert len(to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())) <= steps.FASTER


def test_padding_that_only_some_sizes_have_is_filled_at_all():
    n = Net(x=(np.float32, (3, "n")))
    model = n.out(n("CumSum", "x", np.array(1))).model()
    options = Options(archs=("sm_80",), precision="fp32", ranges={"n": Size("n", 2, 60)})
    (pattern,), options = to_patterns(read(model), options, Dump(None), quiet, Told())
    assert len(to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())) < 8


def test_a_kernel_that_takes_one_size_for_all_is_not_taken(monkeypatch):
    """A grid by the greatest sizes would be out of a smaller image's memory."""
    said = PoolKernel.work

    def by_the_greatest(self, op, program, config, arch):
        work = said(self, op, program, config, arch)
        return replace(work, launches=tuple(replace(w, grid=(hint(w.grid[0]), *w.grid[1:])) for w in work.launches))

    monkeypatch.setattr(PoolKernel, "work", by_the_greatest)
    monkeypatch.setattr(steps, "MOST", 1)
    options = Options(archs=("sm_80",), precision="fp16", ranges={**IMAGE, "batch": Size("batch", 64, 64)})
    (pattern,), options = to_patterns(read(models.image()), options, Dump(None), quiet, Told())
    with pytest.raises(UnsupportedError, match="by one rule"):
        to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())


def packed(model: onnx.ModelProto, ranges: Mapping[str, Any], arch: str) -> Plan:
    """A plan without code for a model of one pattern, written and read."""
    opened, told = read(model), Told()
    (pattern,), options = to_patterns(opened, Options(archs=(arch,), precision="fp16", ranges=ranges), Dump(None), quiet, told)
    parts = to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())
    jobs = dict.fromkeys(job for *_, builds in parts for build in builds for job in jobs_of(build))
    images = {job: image(job[1].name, job[2], f"kernel_{n}") for n, job in enumerate(jobs)}
    plan = pack("test", {}, [part[1:] for part in parts], images, opened.weights, False, origin=origin_of(opened, told))
    return from_bytes(to_bytes(with_families(plan, [region for region, *_ in parts])))


def test_convolutions_with_strides_of_sizes_of_any_remainder():
    """The last window by im2col begins further from the image's edge, or less far, as the stride meets the size"""
    g = models.Graph()
    hidden = g.op("Relu", g.op("Conv", "x", g.weight(16, 3, 3, 3), pads=[1, 1, 1, 1]))
    y = g.op("Conv", hidden, g.weight(8, 16, 3, 3), strides=[2, 2])
    plan = packed(g.model("x", onnx.TensorProto.FLOAT, [1, 3, "h", 16], y), as_sizes({"h": (16, 64)}), "sm_90a")
    steps = [step for family in plan.families for section in family.entry.sections for step in section.steps]
    maps = [arg for step in steps for launch in step.launches for arg in launch.args if isinstance(arg, Map)]
    assert any(isinstance(n, Slot) for m in maps for n in m.upper)


def test_parts_by_the_product_of_sizes():
    """What a product of matrices takes follows from its rows, a batch's tokens. Each size is in one part."""
    ranges = as_sizes({"batch": (2, 9), "tokens": (2, 40)})
    plan = packed(models.tokens(), ranges, "sm_80")
    assert any(family.product for family in plan.families)
    for batch, tokens in itertools.product(*(size.all for size in ranges.values())):
        assert sum(family.sizes_of({"x": (batch, tokens)}) is not None for family in plan.families) == 1, (batch, tokens)
    for product in ((16, 9), (9,), (9.0, 16.0)):
        with pytest.raises(PlanError, match="a product of"):
            check_families([replace(plan.families[0], product=product)])


def test_a_model_that_differs_at_each_size_is_refused():
    g = models.Graph()
    table = g.op("Resize", "x", "", "", g.numbers(1, 1, 9, 9), mode="cubic", exclude_outside=1)
    model = g.model("x", 1, [1, 1, "h", 8], g.op("Relu", table))
    with pytest.raises(UnsupportedError, match=r"h \d+ to \d+.*--entry"):
        without_code(model, ranges={"h": (4, 60)})


def test_boxes_that_the_data_decide_of_any_number():
    """Of few boxes all may be selected, of many so many a class: the limits are formulas, too."""
    g = models.Graph()
    scores = g.op("Transpose", g.op("Sigmoid", g.op("Slice", "x", g.numbers(4), g.numbers(6), g.numbers(2))), perm=[0, 2, 1])
    boxes = g.op("Slice", "x", g.numbers(0), g.numbers(4), g.numbers(2))
    few, near, least = g.numbers(5), g.value(np.float32([0.5])), g.value(np.float32([0.4]))
    model = g.model("x", 1, [1, "n", 6], g.op("Cast", g.op("NonMaxSuppression", boxes, scores, few, near, least), to=1))
    session = Session(without_code(model, precision="fp32", ranges={"n": (2, 40)}), "cpu")
    oracle = onnxruntime.InferenceSession(model.SerializeToString())
    for n in (2, 5, 8, 23, 40):
        x = np.random.default_rng(n).random((1, n, 6)).astype(np.float32)
        (found,), (expected,) = session.run(None, {"x": x}), oracle.run(None, {"x": x})
        assert len(found) and np.array_equal(found, expected)


def decoder_of(total):
    """A mask over earlier tokens and those of now, whose dimension is called so."""
    n = Net(x=(np.float32, (1, "past", 4)), y=(np.float32, (1, "new", 4)), mask=(np.float32, (1, total)))
    return n.out(n("Mul", n("Concat", "x", "y", axis=1), n("Unsqueeze", "mask", np.array([2])))).model()


@pytest.mark.parametrize(
    "total, told",
    [("past + new", {}), ("total", {"total": "past+new"})],
    ids=("by its terms", "by a name of its own"),
)
def test_dimensions_that_are_a_sum_of_others(total, told):
    """As exporters name a mask over earlier tokens and those of now."""
    session = Session(without_code(decoder_of(total), precision="fp32", ranges={"past": (0, 9), "new": (1, 4)} | told), "cpu")
    for past, new in ((0, 1), (0, 4), (5, 1), (9, 3), (7, 4)):
        x, y, mask = (np.random.default_rng(k).random(shape).astype(np.float32) for k, shape in enumerate(
            ((1, past, 4), (1, new, 4), (1, past + new))
        ))  # fmt: skip
        (out,) = session.run(None, {"x": x, "y": y, "mask": mask})
        assert np.array_equal(out, np.concatenate([x, y], 1) * mask[..., None])
    says = r"axis 1 of 'mask' is (past \+ new|new \+ past), here (7 \+ 4|4 \+ 7) = 11, and not 10; it was compiled for"
    with pytest.raises(InputError, match=says) as wrong:
        session.run(None, {"x": x, "y": y, "mask": mask[:, 1:]})
    assert wrong.value.exit_code == 7


@pytest.mark.parametrize(
    "tall, told",
    [("4*h", {}), ("h * 4 + 1", {}), ("tall", {"tall": "4*h"}), ("tall", {"tall": "1 + 4*h"})],
    ids=("by its name", "by its name, and more", "said", "said, and more"),
)
def test_dimensions_that_are_so_many_times_another(tall, told):
    """As of an image beside what an encoder has made of one of its size"""
    n = Net(x=(np.float32, (1, 3, "h", 5)), image=(np.float32, (1, 3, tall, 5)))
    more = "1" in f"{tall}{told}"
    small = n("Conv", "image", np.full((3, 3, 4, 1), 0.25, np.float32), strides=[4, 1])
    model = n.out(n("Add", "x", small)).model()
    session = Session(without_code(model, precision="fp32", ranges={"h": (2, 9)} | told), "cpu")
    oracle = onnxruntime.InferenceSession(model.SerializeToString())
    for h in (2, 5, 9):
        draw = np.random.default_rng(h)
        given = {"x": draw.random((1, 3, h, 5), np.float32), "image": draw.random((1, 3, 4 * h + more, 5), np.float32)}
        assert relative_error(session.run(None, given)[0], oracle.run(None, given)[0]) < 1e-5
    says = r"axis 2 of 'image' is (1 \+ )?(4 \* h|h \* 4)( \+ 1)?, here .*, and not 4; it was compiled for"
    with pytest.raises(InputError, match=says):
        session.run(None, {"x": given["x"], "image": given["image"][:, :, :4]})


def test_a_softmax_over_an_open_axis_that_is_padded_at_some_sizes_only():
    """... has code for all of them, which does not rely on padding"""
    (tokens,) = opened((Size("tokens", 18, 31),))
    made = {name: dense(name, (4, tokens, tokens), dtype) for name, dtype in (("x", DType.F32), ("y", DType.F16))}
    op = Softmax(nodes=("Softmax",), x="x", y="y", axis=2)
    program, kernel = Program((), (), made, {}, (op,)), SoftmaxKernel()
    (launch,) = kernel.work(op, program, {"threads": 4, "rows": 1, "shared": 0}, ARCHS["sm_90a"]).launches
    assert not dict(launch.code.params)["whole"]


@pytest.mark.parametrize("along", (True, False), ids=("along rows", "across rows"))
@pytest.mark.parametrize("threads, longest", [(4, 70), (32, 70), (4, 30)])
def test_outputs_of_any_length_are_shared_out_by_one_code(along, threads, longest):
    """... which keeps as many elements as the longest output has, or reads them again"""
    sizes, kernel, config = (Size("n", 2, longest),), SoftmaxKernel(), {"threads": threads, "rows": 1, "shared": 0}

    def of(n: int) -> Program:
        shape = (3, 5, n) if along else (3, n, 24)
        made = {name: dense(name, shape, DType.F16) for name in ("x", "y")}
        op = Softmax(nodes=("Softmax",), x="x", y="y", axis=2 if along else 1)
        x = {"x": Literal(np.random.default_rng(0).standard_normal(shape, np.float32))} if isinstance(n, int) else {}
        return Program((), ("y",), made, x, (op,))

    program = of(opened(sizes)[0])
    formulas, tree = drawn(kernel.work(program.ops[0], program, config, ARCHS["sm_90a"]), ["n"])
    for n in (2, 7, 8, 24, longest):
        fixed, work = of(n), filler(tree)(computed(formulas, (n,)))
        assert kernel.takes(fixed.ops[0], fixed, config, ARCHS["sm_90a"])
        check(kernel, fixed, config, run=lambda _, *more, work=work: simulator.run(work, *more))


def test_an_input_whose_copy_has_its_shape_at_one_size_only():
    n = Net(x=(np.float32, ("tokens", 24)))
    scores = n("MatMul", "x", n("Transpose", "x", perm=[1, 0]))
    model = n.out(n("MatMul", n("Mul", n("Softmax", scores, axis=-1), scores), "x")).model()
    options = Options(archs=("sm_90a",), ranges=as_sizes({"tokens": (18, 31)}))
    (found, *_), _ = to_patterns(read(model), options, Dump(None), quiet, Told())
    assert not uncopied(found.at(opened(found.box)))


def test_sums_are_told_from_shapes():
    """... on the command line, where a sum begins with a name, or has a + or a *"""
    told = {"total=past+new": "past+new", "b2=b1": "b1", "a=8*h": "8*h", "a=h*8+1": "8*h+1", "a=1+h": "1+h", "a=2*h+w": "2*h+w"}
    for text, says in told.items():
        assert [str(size) for size in parse_sizes([text]).values()] == [says]
    assert parse_sizes(["x=1..64x3x8"]) == {"x": (Size("x[0]", 1, 64), 3, 8)}


def test_two_sizes_of_one_name_are_told_apart():
    n = Net(x=(np.float32, ("batch", 4)), y=(np.float32, ("others", 4)))
    model = n.out(n("Add", "x", "y")).model()
    session = Session(without_code(model, precision="fp32", ranges={"batch": (2, 9), "others": "batch"}), "cpu")
    with pytest.raises(InputError, match="batch is 3 by axis 0 of 'x', and 4 by axis 0 of 'y'"):
        session.run(None, {"x": np.ones((3, 4), np.float32), "y": np.ones((4, 4), np.float32)})


@pytest.mark.parametrize(
    "told, says",
    [
        ({"total": "past+others"}, "'total' is given as past\\+others, and 'others' has no range"),
        ({"total": "past+total"}, "'total' is given as past\\+total, and 'total' has no range"),
        ({"total": "past+new", "all": "past+new"}, "the model has no dimension or input 'all'"),
        ({}, "no size is known for 'total' of input 'mask': .* NAME=PAST\\+NEW"),
    ],
)
def test_a_sum_that_is_none(told, says):
    with pytest.raises(UsageError, match=says):
        without_code(decoder_of("total"), ranges={"past": (1, 9), "new": (1, 4)} | told)


def test_a_part_of_a_sum_that_is_no_extent():
    with pytest.raises(UsageError, match="'new' is a part of an input's extent only"):
        without_code(
            Net(m=(np.float32, ("past + new",)), x=(np.float32, ("past",))).out("m").model(),
            ranges={"past": (1, 3), "new": (1, 4)},
        )


@pytest.mark.parametrize("name, told", [("batch", Size("batch", 1, 3)), ("x", (Size("x0", 1, 3), 3, 16, 16))])
def test_a_range_of_what_a_shape_says(name, told):
    with pytest.raises(UsageError, match=f"--shape x=… says already how large '{name}' is"):
        open_inputs(models.image().graph, (), {name: told}, {"x": (1, 3, 16, 16)})


@pytest.mark.parametrize(
    "ranges, says",
    [
        ({"batch": (1, 3)}, "no size is known for 'h' of input 'x', 'w' of input 'x'"),
        ({**IMAGE, "depth": (1, 3)}, "no dimension or input 'depth'"),
        (
            {"x": ((1, 2), 3, 16)},
            r"has 4 axes, and its range 3: say all, in the order \(batch, 3, h, w\), or that of 'batch' alone, by this name",
        ),
        ({**IMAGE, "batch": (1, 1 << 31)}, "sizes that no input can have: extents below"),
        ({"x": ((1, 2), 4, 16, 16)}, "axis 1 of input 'x' is 3 in the model, not 4"),
    ],
)
def test_ranges_that_fit_no_input(ranges, says):
    with pytest.raises(UsageError, match=says):
        without_code(models.image(), ranges=ranges)


def test_a_dimension_of_an_input_s_name():
    """A single range is the dimension's, one of several axes the input's."""
    graph = Net(x=(np.float32, ("x", 3)), y=(np.float32, ("x", "k"))).out("x").model().graph
    same = open_inputs(graph, (), {"x": Size("x", 1, 4), "k": Size("k", 2, 3)}, {})
    assert same.axes == {"x": ("x", 3), "y": ("x", "k")} and [s.name for s in same.box] == ["x", "k"]
    whole = open_inputs(graph, (), {"x": (Size("x[0]", 1, 4), 3), "y": (Size("y[0]", 1, 4), Size("y[1]", 2, 3))}, {})
    assert whole.axes == same.axes


def test_a_range_of_many_sizes_is_not_walked_through():
    """Kernels say that its indices are too large, within seconds and megabytes."""
    net, begun = Net(x=(np.float32, ("n", 3))), process_time()
    with pytest.raises(UnsupportedError, match="it computes indices in 32 bits, and one reaches"):
        compile(net.out(net("Relu", "x")).model(), archs=("sm_86",), ranges={"n": (1, 1 << 30)})
    assert process_time() - begun < 30, "as long as it takes to walk"


def _broken(family: Family, what: str) -> Family:
    match what:
        case "slot":
            return replace(family, formulas=family.formulas[:1])
        case "size":
            return replace(family, sizes=(*family.sizes, Size("more", 1, 2)))
        case "arena":
            return replace(family, sizes=tuple(replace(s, high=s.high * 4) for s in family.sizes))
        case _:
            program = family.entry.program
            x = program.tensors["x"]
            tensors = {**program.tensors, "x": replace(x, shape=tuple(Slot(99) for _ in x.shape))}
            return replace(family, entry=replace(family.entry, program=replace(program, tensors=tensors)))


@pytest.mark.parametrize("what", ["slot", "size", "arena", "shape"])
def test_families_of_a_file_are_checked(built, what):
    plan = built[3]
    number = max(range(len(plan.families)), key=lambda i: len(plan.families[i].formulas))
    families = [_broken(f, what) if i == number else f for i, f in enumerate(plan.families)]
    with pytest.raises(PlanError):
        from_bytes(_unchecked(replace(plan, families=tuple(families))))


def _unchecked(plan):
    """The bytes of a plan that breaks rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tccompile.plan.file.check_plan", lambda plan: None)
        return to_bytes(plan)


def test_a_reduction_along_an_open_axis_has_one_number_of_threads():
    """Its code has the number in it, and of few elements each has its own thread where the shape is fixed."""
    g = models.Graph()
    model = g.model("x", 1, ["n", "m"], g.op("ReduceMax", "x", axes=[1], keepdims=1))
    options = Options(archs=("sm_90a",), precision="mixed", ranges=as_sizes({"n": (2, 64), "m": (2, 64)}))
    (pattern,), options = to_patterns(read(model), options, Dump(None), quiet, Told())
    assert to_parts(pattern, options, quiet, (), NO_TIMINGS, Known())
