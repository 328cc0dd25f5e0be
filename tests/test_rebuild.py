"""tcinspect --rebuild: code and launches are made again, and whatever was changed is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from tccompile.cli.commands import tcinspect
from tccompile.errors import UsageError
from tccompile.pipeline import compile as compile_plan
from tccompile.plan.file import Plan, from_bytes, to_bytes, write_plan
from tccompile.plan.format import Image, Int, Step
from tccompile.verify import rebuild


def model() -> onnx.ModelProto:
    """Two kernels for one input."""
    nodes = [helper.make_node("Neg", ["x"], ["y"], "negative"), helper.make_node("ReduceMax", ["x"], ["z"], "largest", axes=[1])]
    shapes = {"x": (5, 7), "y": (5, 7), "z": (5, 1)}
    x, *ends = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    return helper.make_model(helper.make_graph(nodes, "g", [x], ends), opset_imports=[helper.make_opsetid("", 13)])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return from_bytes(to_bytes(compile_plan(model(), archs=["sm_75"], precision="fp32")))


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """The compiler makes the plan's own code, at once."""
    made = {(i.kernel, i.params, i.arch, i.kind): i for i in plan.images}
    monkeypatch.setattr(rebuild, "remake", lambda jobs, *_: [made[c.kernel, c.params, a.name, kind] for c, a, kind in jobs])


def with_step(plan: Plan, change: Callable[[Step], Step], number: int = 0) -> Plan:
    entry = plan.entries[0]
    section = entry.sections[0]
    steps = tuple(change(s) if i == number else s for i, s in enumerate(section.steps))
    return replace(plan, entries=(replace(entry, sections=(replace(section, steps=steps), *entry.sections[1:])),))


def with_launch(plan: Plan, **changes) -> Plan:
    return with_step(plan, lambda s: replace(s, launches=(replace(s.launches[0], **changes), *s.launches[1:])))


def with_integer(plan: Plan) -> Plan:
    args = list(plan.entries[0].sections[0].steps[0].launches[0].args)
    at = next(i for i, a in enumerate(args) if isinstance(a, Int))
    args[at] = Int(args[at].value + 1)
    return with_launch(plan, args=tuple(args))


def with_image(plan: Plan, **changes) -> Plan:
    return replace(plan, images=(replace(plan.images[0], **changes), *plan.images[1:]))


def test_a_plan_is_what_its_kernels_make(plan, tmp_path):
    """Compiled once more, past the cache."""
    write_plan(plan, tmp_path / "a.plan")
    done = CliRunner().invoke(tcinspect, [str(tmp_path / "a.plan"), "--rebuild", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == {"images": len(plan.images), "differences": []}


def test_a_byte_of_code_that_is_another_is_found(plan, unchanged, tmp_path):
    flipped = bytearray(plan.images[0].code)
    flipped[-1] ^= 1
    write_plan(with_image(plan, code=bytes(flipped)), tmp_path / "b.plan")
    done = CliRunner().invoke(tcinspect, [str(tmp_path / "b.plan"), "--rebuild"])
    assert done.exit_code == 9 and "code 0" in done.stdout and "do not run it" in done.stderr


@pytest.mark.parametrize(
    "change, message",
    [
        (with_integer, r"step 0 .*: launch 0 has argument \d+ Int"),
        (lambda p: with_launch(p, grid=(1, 1, 7)), "has grid"),
        (lambda p: with_launch(p, block=1024), "has block 1024"),
        (lambda p: with_launch(p, smem=4), "has shared memory 4"),
        (lambda p: with_launch(p, image=1), "has code of"),
        (lambda p: with_step(p, lambda s: replace(s, launches=s.launches * 2)), "launches, not"),
        (lambda p: with_step(p, lambda s: replace(s, config={"threads": 3})), "has no config"),
        (lambda p: with_step(p, lambda s: replace(s, kernel="gemm_simt")), "there is no kernel 'gemm_simt' for it"),
        (lambda p: with_image(p, params=(("n", 1),)), "no step's kernel launches code of these parameters"),
        (lambda p: with_image(p, kernel="os"), "no step's kernel launches code of these parameters"),
    ],
)
def test_what_was_changed_is_found(plan, unchanged, change, message):
    assert rebuild.differences(plan) == []
    found = rebuild.differences(from_bytes(to_bytes(change(plan))))
    assert found
    with pytest.raises(ValueError, match=message):
        raise ValueError("\n".join(map(str, found)))


def test_code_of_other_tools_is_not_compared(plan):
    with pytest.raises(UsageError, match=r"made by ptxas 0\.0 \(here "):
        rebuild.differences(replace(plan, producer={**plan.producer, "ptxas": "0.0"}))


def test_only_code_that_a_kernel_asks_for_is_made(plan, monkeypatch):
    """Parameters go into the text of a kernel: those of a file that nobody trusts are not compiled."""
    asked: list[object] = []

    def remake(jobs: list, *_: object) -> list[Image]:
        asked.extend(jobs)
        return [replace(plan.images[0], kernel=c.kernel, params=c.params) for c, _, _ in jobs]

    monkeypatch.setattr(rebuild, "remake", remake)
    rebuild.differences(replace(plan, images=tuple(replace(i, params=(("types", "__import__('os')"),)) for i in plan.images)))
    assert asked == []
