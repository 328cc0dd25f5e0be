"""Budgets: what a plan may take, how it is said, and what a build does that takes more."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from tccompile.arch import ARCHS
from tccompile.cli.commands import tccompile as command
from tccompile.errors import UsageError
from tccompile.plan.file import Plan, encoded_size, to_bytes
from tccompile.schedule.choose import schedule
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.verify.budgets import Budgets, Latency, estimate, findings, parse_latency, parse_share, parse_size, text_of
from tests.plans import without_code
from tests.rewrites.common import Net


def network() -> onnx.ModelProto:
    """Most of its operations on Tensor Cores, some not: a product, and positions that are read for their angle."""
    net = Net(x=(64, 256), t=(64, 1))
    wave = net("Sin", net("CumSum", "t", np.array(0)))
    return net.out(net("MatMul", net("Add", net("MatMul", "x", net.normal(256, 256)), wave), net.normal(256, 256))).model()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return without_code(network(), ("sm_61", "sm_90a"), precision="mixed")


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1.5 kb", 1500), ("65536", 65536), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_shares_and_latencies() -> None:
    assert parse_share("95%") == 0.95 and parse_share(" 0.5 % ") == 0.005
    assert parse_latency("2ms@h200") == Latency(2000.0, "h200", "sm_90a")
    assert parse_latency("150us@sm_86") == Latency(150.0, "sm_86", "sm_86")


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_size, "2 GBit", "2GB, 512MiB or 65536"),
        (parse_size, "-1", "cannot read the size"),
        (parse_share, "0.95", "write it as 95%"),
        (parse_share, "101%", "cannot read the share"),
        (parse_latency, "2ms", "2ms@h200"),
        (parse_latency, "2@h200", "2ms@h200"),
        (parse_latency, "2ms@gtx", "unknown GPU 'gtx'; choose from h200, sm_61"),
    ],
)
def test_what_cannot_be_read(parse, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_each_budget_is_measured(plan: Plan) -> None:
    """One that is just met, and one that is just missed."""
    size, weights = encoded_size(plan), sum(map(plan.size, plan.weights))
    assert size == len(to_bytes(plan))
    used = [{launch.image for step in s.steps for launch in step.launches} for s in plan.entries[0].sections]
    code = [sum(len(plan.images[i].code) for i in images) for images in used]
    most = weights + max(s.arena + s.counters + c for s, c in zip(plan.entries[0].sections, code, strict=True))
    for name, at, less in (("plan_size", size, 1), ("vram", most, 1)):
        for limit, kept in ((at, True), (at - less, False)):
            found = findings(plan, Budgets(**{name: limit}), NO_TIMINGS)
            assert all(f.kept for f in found) == kept
    in_fp32 = findings(plan, Budgets(no_fp32=True), NO_TIMINGS)
    assert in_fp32 and not any(f.kept for f in in_fp32) and all(f.takes.startswith("fp32: ") for f in in_fp32)


def test_a_plan_in_fp32_is_not_without_fp32() -> None:
    net = Net(x=(8, 32))
    model = net.out(net("Relu", net("MatMul", net("Relu", "x"), net.normal(32, 32)))).model()
    made = [without_code(model, ("sm_90a",), precision=precision) for precision in ("fp16", "fp32")]
    assert [all(f.kept for f in findings(plan, Budgets(no_fp32=True), NO_TIMINGS)) for plan in made] == [True, False]


def test_operations_count_by_their_number(plan: Plan) -> None:
    """A product of two off Tensor Cores is half of the operations; sm_61 has none, and is not asked."""
    (entry,) = plan.entries
    (section,) = (s for s in entry.sections if s.arch == "sm_90a")
    steps = [i for i, s in enumerate(section.steps) if entry.program.products(entry.program.ops[s.op])]
    off = tuple(replace(s, tensor_cores=s.tensor_cores and i != steps[0]) for i, s in enumerate(section.steps))
    half = replace(plan, entries=(replace(entry, sections=(entry.sections[0], replace(section, steps=off))),))
    for made, takes, kept in ((plan, "100.0%", True), (half, "50.0%", False)):
        (found,) = findings(made, Budgets(tensor_cores=0.9), NO_TIMINGS)
        assert (found.where, found.takes, found.kept) == ("sm_90a", takes, kept)


def test_latency_is_that_of_the_longest_way() -> None:
    net = Net(x=(64, 256))
    model = net.out(net("MatMul", "x", net.normal(256, 64)), net("Softmax", net("MatMul", "x", net.normal(256, 128)))).model()
    plan = without_code(model, ("sm_90a",), precision="mixed")
    section = next(s for s in plan.entries[0].sections if s.arch == "sm_90a")
    program, arch = plan.entries[0].program, ARCHS["sm_90a"]
    time, measured, steps = estimate(program, section, arch, NO_TIMINGS)
    costs = [c.cost for c in schedule(program, arch)]
    assert measured == 0 and steps == len(costs)
    assert max(costs) < time < sum(costs)  # the products run beside each other
    chain = replace(section, steps=tuple(replace(s, after=(i - 1,) if i else ()) for i, s in enumerate(section.steps)))
    assert estimate(program, chain, arch, NO_TIMINGS)[0] == pytest.approx(sum(costs))
    for us, kept in ((time + 0.1, True), (time - 0.1, False)):
        (found,) = findings(plan, Budgets(latency=Latency(us, "h200", "sm_90a")), NO_TIMINGS)
        assert found.kept == kept
    with pytest.raises(UsageError, match="the plan has no code for sm_86; build for it, too"):
        findings(plan, Budgets(latency=Latency(1.0, "sm_86", "sm_86")), NO_TIMINGS)


def test_the_table_begins_with_what_is_exceeded(plan: Plan) -> None:
    found = findings(plan, Budgets(vram=10**9, plan_size=1000), NO_TIMINGS)
    lines = text_of(found).splitlines()
    assert lines[0].split() == ["budget", "of", "takes", "allowed"]
    assert lines[1].startswith("--max-plan-size  the file") and lines[1].endswith("1.0 KB      exceeded")
    assert not any(line.endswith("exceeded") for line in lines[2:])


BUDGETS = {
    "--max-plan-size 1MB": 0, "--max-plan-size 1KB": 9, "--max-plan-size 1 parsec": 2,
    "--max-vram 1GB": 0, "--max-vram 100B": 9, "--max-vram lots": 2,
    "--require-tensor-cores 95%": 0, "--require-tensor-cores 95": 2,
    "--max-latency 2ms@sm_80": 0, "--max-latency 1us@sm_80": 9, "--max-latency 2ms@sm_90a": 2, "--max-latency 2ms": 2,
    "--max-error 1e-2": 0, "--max-error 0": 2,
    "--no-fp32": 0, "--no-fp32 --precision fp32": 9,
    "--max-plan-size 1MB --max-vram 100B --no-fp32": 9,
}  # fmt: skip
"""Options, and what a build ends with: 0 if it keeps to them, 9 if not, 2 for what cannot be read or be known."""


@pytest.mark.parametrize("options", BUDGETS)
def test_good_cases_and_bad_ones(options: str, tmp_path: Path) -> None:
    net = Net(x=(16, 64))
    h = net("Relu", net("MatMul", "x", net.normal(64, 64)))
    onnx.save(net.out(net("MatMul", h, net.normal(64, 32))).model(), tmp_path / "m.onnx")
    given = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.plan"), "--arch", "sm_80", "-q", "-j", "1"]
    words = re.split(r" (?=--)", options)
    result = CliRunner().invoke(command, [*given, *(part for word in words for part in word.split(" ", 1))])
    assert result.exit_code == BUDGETS[options], result.output
    assert (tmp_path / "m.plan").exists() == (result.exit_code == 0), "what takes more than it may is not written"


def test_a_build_that_exceeds_a_budget_writes_nothing(tmp_path: Path) -> None:
    net = Net(x=(4, 32))
    onnx.save(net.out(net("MatMul", "x", np.ones((32, 16), np.float32))).model(), tmp_path / "m.onnx")
    command_line = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.plan"), "--arch", "sm_80", "-q", "-j", "1"]
    result = CliRunner().invoke(command, [*command_line, "--max-plan-size", "1KB", "--max-vram", "1GB", "--json"])
    told = json.loads(result.stdout)
    found = told["budgets"]
    assert told["error"] == {"code": 9, "message": "the plan takes more than it may, and was not written"}
    assert result.exit_code == 9 and [f["kept"] for f in found] == [False, True]
    assert "takes more than it may, and was not written" in result.stderr and not (tmp_path / "m.plan").exists()
    result = CliRunner().invoke(command, [*command_line, "--max-plan-size", "1MB", "--require-tensor-cores", "50%"])
    assert result.exit_code == 0 and (tmp_path / "m.plan").exists()
    assert CliRunner().invoke(command, [*command_line, "--max-vram", "lots"]).exit_code == 2
    without = [word.replace("sm_80", "sm_61") for word in command_line]
    result = CliRunner().invoke(command, [*without, "--require-tensor-cores", "50%"])
    assert result.exit_code == 2 and "sm_61 has no Tensor Cores" in result.stderr
