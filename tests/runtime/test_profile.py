"""The profile: what a step's work is, what the roof allows, and how both are shown."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tccompile.cli.profile_page import profile_page, profile_text
from tccompile.ir.expr import Epilogue, View, coord, load
from tccompile.ir.ops import Attention, Conv, Gemm, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry
from tccompile.runtime import driver as driver_module
from tccompile.runtime.driver import Driver
from tccompile.runtime.profile import Roof, profiled, traffic
from tccompile.runtime.session import Session
from tests.gpu.cases import program_of
from tests.runtime.fake_driver import FakeApi, FakeArray
from tests.runtime.test_session import KERNELS, expected, plan, x_of
from tests.small import feeds
from tests.small import plan as small_plan
from tests.small import program as small_program


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi(KERNELS)
    cu = Driver(fake)
    monkeypatch.setattr(driver_module, "driver", lambda: cu)
    monkeypatch.setattr(driver_module, "_devices", type(driver_module._devices)())
    return fake


def op_of(program: Program, y: str):
    return next(op for op in program.ops if op.y == y)


def test_arithmetic_of_products():
    p = small_program()
    assert p.products(op_of(p, "c1")) == 2 * (11 * 6 * 6) * (3 * 3 * 3)
    assert p.products(op_of(p, "y")) == 2 * 5 * 19
    assert p.products(op_of(p, "mean")) == 0
    half = {"dtype": DType.F16}
    shapes = {
        "x": (2, 8, 5, 5),
        "w": (12, 2, 3, 3),
        "y": (2, 12, 5, 5),
        "q": (2, 6, 7, 16),
        "k": (2, 3, 9, 16),
        "v": (2, 3, 9, 24),
    }
    shapes |= {"o": (2, 6, 7, 24), "a": (3, 4, 5), "b": (6, 5), "ab": (3, 4, 6)}
    q = Program((), (), {n: dense(n, s, **half) for n, s in shapes.items()}, {}, ())
    grouped = Conv(nodes=("c",), y="y", x="x", w="w", strides=(1, 1), pads=(1, 1), dilations=(1, 1), groups=4)
    assert q.products(grouped) == 2 * (2 * 12 * 25) * (2 * 9)
    assert q.products(Attention(nodes=("a",), y="o", q="q", k="k", v="v", scale=1.0)) == 2 * (2 * 6 * 7) * 9 * (16 + 24)
    assert q.products(Gemm(nodes=("g",), y="ab", a="a", b="b")) == 2 * (3 * 4 * 6) * 5
    gru = program_of("gru_wide")  # 12 steps of 1 sequence, 2 directions, 3 gates of 512 units
    assert gru.products(gru.ops[0]) == 2 * 12 * 2 * 3 * 512**2


def test_traffic_counts_what_is_needed_once():
    p = small_program()
    assert traffic(op_of(p, "c1"), p) == 2 * (11 * 36 + 3 * 36 + 11 * 3 * 9)  # neither padding nor what a tap reads again
    assert traffic(op_of(p, "y"), p) == 2 * 19 + 2 * 5 * 19 + 4 * 5 + 4 * 5  # a bias in fp32, and the result
    large, part = dense("large", (1000, 8), DType.F32), dense("part", (2, 8), DType.F32)
    cut = Pointwise(nodes=("Slice",), y="part", epilogue=Epilogue(load(0), (View("large", (coord(0) + 7, coord(1))),)))
    assert traffic(cut, Program((), (), {"large": large, "part": part}, {}, (cut,))) == 4 * (16 + 16)


def test_the_median_beside_the_roof():
    base = small_plan()
    entry = base.entries[0]
    section = replace(entry.sections[0], steps=tuple(replace(s, tensor_cores=s.op == 1) for s in entry.sections[0].steps))
    times = [[float(10 * i + run) for i in range(len(section.steps))] for run in (1, 5, 2)]
    steps = profiled(entry.program, section, times, Roof(tensor=1.0, cuda=0.001, memory=0.5))
    assert [s.us for s in steps] == [10 * i + 2.0 for i in range(len(steps))]
    first, second = steps[1], steps[2]
    assert first.nodes == ("first",) and first.least == pytest.approx(traffic(entry.program.ops[1], entry.program) / 0.5e3)
    assert second.least == pytest.approx(entry.program.products(entry.program.ops[2]) / 0.001e6)  # on CUDA cores
    assert second.share == pytest.approx(second.least / 22.0)
    assert second.tflops == pytest.approx(second.flops / 22e-6 / 1e12) and second.gbps == pytest.approx(
        second.bytes / 22e-6 / 1e9
    )


def test_what_events_add_is_taken_off():
    base = small_plan()
    entry = base.entries[0]
    launched = entry.sections[0].steps[0]
    section = replace(entry.sections[0], steps=tuple(replace(launched, op=i) for i in range(len(entry.sections[0].steps))))
    times = [[10.0 * (i + 1) for i in range(len(section.steps))]] * 3
    steps = profiled(entry.program, section, times, None, whole=sum(times[0]) - 3 * len(section.steps))
    assert [s.us for s in steps] == [10 * (i + 1) - 3 for i in range(len(steps))]
    faster = profiled(entry.program, section, times, None, whole=1000.0)  # noise: events never take time away
    assert [s.us for s in faster] == times[0]


def test_steps_on_a_gpu(api):
    """One step at a time, in order, with the addresses of this call"""
    with Session(plan(), "gpu") as session:
        profile = session.profile(4, {"x": FakeArray(api, x_of())})
        assert [s.us for s in profile.steps] == [250.0] * 3 and profile.us == 750.0 and profile.iterations == 4
        assert [s.nodes for s in profile.steps] == [("Add_0",), ("Mul_1",), ("Neg_2",)]
        # 54 multiprocessors are half of the 108 that the table has for sm_80; 2 edges of 1 GHz, 512 bytes wide
        assert profile.roof == Roof(156.0, 9.75, 1024.0)
        assert profile.steps[0].bytes == 24 + 12 + 24 and profile.steps[0].share == pytest.approx(60 / 1024e3 / 250)
        for got, want in zip(session.run(None, {"x": x_of() + 1}), expected(x_of() + 1), strict=True):
            np.testing.assert_array_equal(got, want)  # running is as before
    assert not api.stack


def test_a_step_without_launches_takes_no_time(api):
    base = plan()
    s = base.entries[0].sections[0]
    nothing = replace(s.steps[1], launches=(replace(s.steps[1].launches[0], grid=(0, 1, 1)),))
    twice = replace(s.steps[2], launches=s.steps[2].launches * 2)
    s = replace(s, steps=(s.steps[0], nothing, twice))
    profile = Session(replace(base, entries=(Entry(base.entries[0].program, (s,)),)), "gpu").profile(2)
    assert [x.us for x in profile.steps] == [250.0, 0.0, 500.0]
    assert "0.0" in profile_text(profile) and "Mul_1" in profile_page(profile)


def test_an_unknown_generation_has_no_roof(api):
    api.cc = (13, 0)
    profile = Session(plan((("sm_80", "ptx"),)), "gpu").profile(1)
    assert profile.roof is None and [s.share for s in profile.steps] == [None] * 3
    assert "no roof" in profile_text(profile)


def test_steps_on_the_cpu():
    profile = Session(small_plan(), "cpu").profile(3, feeds())
    program = small_plan().entries[0].program
    assert [s.nodes for s in profile.steps] == [op.nodes for op in program.ops]
    assert all(s.us > 0 and s.share is None for s in profile.steps)
    assert sum(s.us for s in profile.steps) == pytest.approx(profile.us, rel=0.8)
    text = profile_text(profile)
    assert "in NumPy" in text and all(node in text for op in program.ops for node in op.nodes)


def named(name: str) -> Plan:
    base = plan()
    p = base.entries[0].program
    ops = (replace(p.ops[0], nodes=(name,)), *p.ops[1:])
    return replace(base, name=name, entries=(replace(base.entries[0], program=replace(p, ops=ops)),))


def test_the_page(api):
    """Bars lie where the steps ran and as wide as they took; nothing is fetched, no name becomes markup"""
    page = profile_page(Session(named('<b>&"/x'), "gpu").profile(2))
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page
    assert "<script" not in page and "http" not in page and "url(" not in page
    bars = [
        tuple(map(float, b))
        for b in re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="12" fill="[^"]*" opacity', page)
    ]
    assert len(bars) == 3
    (x0, y0, w0), (x1, y1, w1), (x2, y2, w2) = bars
    assert y0 < y1 < y2 and w0 == w1 == w2 > 100
    assert x1 == pytest.approx(x0 + w0, abs=0.02) and x2 + w2 == pytest.approx(1070, abs=0.1)


def test_the_roofline(api):
    """Points under the lines, and none beyond the drawing"""
    base = small_plan()
    entry = base.entries[0]
    times = [[100.0] * len(entry.sections[0].steps)]
    roof = Roof(tensor=100.0, cuda=10.0, memory=1000.0)
    steps = profiled(entry.program, entry.sections[0], times, roof)
    profile = replace(Session(small_plan(), "cpu").profile(1, feeds()), steps=steps, roof=roof)
    page = profile_page(profile)
    circles = [tuple(map(float, c)) for c in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)]
    assert len(circles) == 3 and all(70 <= x <= 1100 and 0 <= y <= 430 for x, y in circles)
    lines = re.findall(r'<polyline class="roof" points="([^"]*)"', page)
    assert len(lines) == 2 and "Tensor Cores, 100 TFLOP/s" in page
    for line in lines:
        points = [tuple(map(float, p.split(","))) for p in line.split()]
        assert points[0][1] > points[1][1] == points[2][1]  # it climbs, then is level
        assert min(y for _, y in circles) > points[1][1]
