"""The page of `tcinspect --report`: what it shows, and that it loads and runs nothing of others'."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tccompile.cli.report_page import BOX, _places, report_page
from tccompile.plan.file import Plan, write_plan
from tccompile.plan.format import Rewritten
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.verify.budgets import estimate, step_times
from tests.commands import Run
from tests.plans import without_code
from tests.rewrites.common import Net

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two branches that meet, and a node whose name is no name."""
    n = Net(x=(1, 8, 8, 8))
    h = n("Conv", "x", n.normal(8, 8, 3, 3, scale=0.1), n.normal(8), pads=[1] * 4)
    left, right = n("Relu", n("Conv", h, n.normal(16, 8, 1, 1))), n("MaxPool", h, kernel_shape=[3, 3], pads=[1] * 4)
    net = n.out(n("Softmax", n("Concat", left, right, axis=1), axis=1))
    net.nodes[0].name = HOSTILE
    rewrites = (Rewritten("conv(x, w) * s <b> => conv(x, w * s)", ("one", HOSTILE)), Rewritten("x\x1b[2J => x", ("two",)))
    plan = without_code(net.model(), ("sm_80", "sm_90a"))
    return replace(plan, name=HOSTILE, notes=("decided <b>so</b>",), rewrites=rewrites)


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    return report_page(plan, NO_TIMINGS)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))


def test_it_loads_nothing_and_runs_nothing_of_the_plan_s(page: str) -> None:
    tags = Tags(page).seen
    assert not [a for _, a in tags if a.keys() & {"src", "href", "onerror", "onload", "data"}]
    assert {tag for tag, _ in tags}.isdisjoint({"img", "link", "iframe", "b"})
    assert sum(tag == "script" for tag, _ in tags) == 2 and "http" not in page.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_what_rewrites_did_is_there_as_text(page: str) -> None:
    text = html.unescape(page)
    assert "conv(x, w) * s <b> => conv(x, w * s): at 2 nodes" in text and f"<li>{HOSTILE}</li>" in text
    assert "<li>two</li>" in page and "\x1b" not in page


def test_a_node_in_two_steps_counts_once(plan: Plan, page: str) -> None:
    (entry,) = plan.entries
    distinct = {name for op in entry.program.ops for name in op.nodes}
    assert f"<p>{len(distinct)} of the model's nodes in {len(entry.program.ops)} steps" in page
    first, second, *rest = entry.program.ops
    ops = (first, replace(second, nodes=(*first.nodes, *second.nodes)), *rest)
    twice = replace(plan, entries=(replace(entry, program=replace(entry.program, ops=ops)),))
    assert f"<p>{len(distinct)} of the model's nodes in" in report_page(twice, NO_TIMINGS)


def test_every_step_of_every_generation_is_there(plan: Plan, page: str) -> None:
    data, program = data_of(page), plan.entries[0].program
    assert data["box"] == list(BOX) and len(data["parts"]) == 2 == page.count("<section")
    for part, arch in zip(data["parts"], ("sm_80", "sm_90a"), strict=True):
        section = next(s for s in plan.entries[0].sections if s.arch == arch)
        steps = part["boxes"][: len(section.steps)]
        for box, step in zip(steps, section.steps, strict=True):
            assert box["detail"].count(" + ") == len(program.ops[step.op].nodes) - 1
            assert step.reason in box["detail"] and step.kernel in box["kind"] + box["detail"]
        assert [b["name"] for b in part["boxes"][len(steps) :]] == [*program.inputs, *program.outputs]
    names = [b["name"] for b in data["parts"][0]["boxes"]]
    assert HOSTILE in names, "as text"


def test_edges_go_down_and_reach_everything(plan: Plan, page: str) -> None:
    part = data_of(page)["parts"][0]
    boxes, edges = part["boxes"], part["edges"]
    assert all(boxes[a]["y"] < boxes[b]["y"] for a, b in edges)
    count = len(plan.entries[0].program.ops)
    assert {b for _, b in edges} == {*range(len(boxes))} - {count}, "only the input reads nothing"
    places = {(b["x"], b["y"]) for b in boxes}
    assert len(places) == len(boxes)
    assert len({b["y"] for b in boxes}) < len(boxes), "the branches lie beside each other"


def test_boxes_beside_each_other_do_not_overlap() -> None:
    edges = [(0, i) for i in range(1, 6)] + [(i, 6) for i in range(1, 6)]
    places = _places(7, edges)
    row = sorted(x for x, y in places[1:6])
    assert all(b - a >= BOX[0] for a, b in pairwise(row))
    assert places[0][0] == pytest.approx(sum(row) / 5) == pytest.approx(places[6][0])


def test_expected_times_are_those_of_the_budget(plan: Plan, page: str) -> None:
    from tccompile.arch import ARCHS

    for section in plan.entries[0].sections:
        program, arch = plan.entries[0].program, ARCHS[section.arch]
        us, measured, steps = estimate(program, section, arch, NO_TIMINGS)
        assert f"expected to take {us:.1f} µs: {measured} of {steps} steps were measured" in page
        times = step_times(program, section, arch, NO_TIMINGS)
        for step, time in zip(section.steps, times, strict=True):
            assert time.begin >= max((times[k].begin + times[k].us for k in step.after), default=0.0)
        assert f"expected {max(t.us for t in times):.1f} " in page


@pytest.mark.parametrize(
    "options, code, says",
    [
        ("--report page.html", 0, ""),
        ("--report page.txt", 2, "--report writes a page, not page.txt; choose page.html"),
        ("--report nowhere/page.html", 2, "make it first"),
        ("--report page.html --steps", 2, "give one"),
    ],
)
def test_as_a_command(run: Run, plan: Plan, tmp_path: Path, options: str, code: int, says: str) -> None:
    write_plan(plan, tmp_path / "m.plan")
    result = run("tcinspect", "m.plan", *options.split())
    assert result.code == code and says in result.err
    assert (tmp_path / "page.html").exists() == (code == 0)
