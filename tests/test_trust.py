"""Which plans are run: lists of plans that were confirmed, identities, bills of materials. Signatures: doors/test_sign.py."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.errors import PlanError, UsageError, VerificationError
from tccompile.options import Options
from tccompile.pipeline import compile_model
from tccompile.plan.file import PREFIX, from_bytes, read_plan, to_bytes, write_plan
from tccompile.plan.trust import check_trust, confirm
from tccompile.runtime.session import Session
from tccompile.verify import rebuild
from tests.commands import Run
from tests.rewrites.common import Net
from tests.small import feeds, plan

PLAN = plan()
FILE = to_bytes(PLAN)


@pytest.fixture
def trusted(tmp_path: Path) -> tuple[Path, Path]:
    """A plan, and a list of plans to trust that has it."""
    path, trust = tmp_path / "small.plan", tmp_path / "trusted.json"
    write_plan(PLAN, path)
    confirm(read_plan(path), trust, "by hand")
    return path, trust


def test_a_plan_s_identity_is_what_its_header_is() -> None:
    read = from_bytes(FILE)
    length = PREFIX.unpack_from(FILE)[3]
    assert read.identity == hashlib.sha256(FILE[PREFIX.size : PREFIX.size + length]).hexdigest()
    assert replace(read, name="other").identity == "" == PLAN.identity, "it is the file's, and no other plan's"


def noticed(data: bytes, path: Path, trust: Path) -> str:
    """Where another byte is found: reading the plan, holding it to the list, or reading weights."""
    path.write_bytes(data)
    try:
        found = read_plan(path)
        check_trust(found, path, trust)
    except (PlanError, VerificationError) as error:
        return type(error).__name__
    with pytest.raises(PlanError, match="SHA-256"):
        for name in found.weights:
            found.weight(name)
    return "weights"


def test_any_changed_byte_is_noticed(trusted: tuple[Path, Path]) -> None:
    end = PREFIX.size + PREFIX.unpack_from(FILE)[3]
    places = [*range(PREFIX.size), *range(PREFIX.size, end, 149), *range(end, len(FILE), 1999), len(FILE) - 1]
    found = {noticed(FILE[:at] + bytes([FILE[at] ^ 1]) + FILE[at + 1 :], *trusted) for at in places}
    assert found == {"PlanError", "weights"}
    assert noticed(FILE[:-1], *trusted) == noticed(FILE + b"\0", *trusted) == "PlanError"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, name="another"),
        lambda p: replace(p, weights={**p.weights, "w2": bytes(len(p.weights["w2"]))}),
        lambda p: replace(p, images=(replace(p.images[0], code=p.images[0].code + b"\0"), *p.images[1:])),
        lambda p: replace(p, notes=()),
    ],
)
def test_what_fits_together_and_is_something_else(trusted: tuple[Path, Path], change: Callable) -> None:
    """Whoever changes a plan can make its checksums right, and has another plan."""
    path, trust = trusted
    write_plan(change(PLAN), path)
    with pytest.raises(VerificationError, match=r"small.plan is none of the plans that .*trusted.json says to trust"):
        Session(path, "cpu", trust=trust)


def test_a_session_that_holds_its_plan_to_a_list(trusted: tuple[Path, Path]) -> None:
    path, trust = trusted
    want = Session(path, "cpu").run(None, feeds())
    with Session(path, "cpu", trust=trust) as session:
        for a, b in zip(session.run(None, feeds()), want, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(UsageError, match="trust is in the file of a plan: give the session its path"):
        Session(read_plan(path), "cpu", trust=trust)


@pytest.mark.parametrize(
    "differences, code, says",
    [([], 0, "all launches are what the kernels make"), ([rebuild.Difference("code 0", "other")], 9, "do not run it")],
)
def test_what_rebuild_confirms_is_trusted(
    trusted: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch, differences: list, code: int, says: str
) -> None:
    path, trust = trusted
    trust.unlink()
    monkeypatch.setattr(rebuild, "differences", lambda *_: differences)
    result = run("tcinspect", path, "--rebuild", "--trust", trust)
    assert result.code == code and says in result.out + result.err
    assert trust.exists() == (code == 0) == (f"the plan is in the list {trust}" in result.out)
    if trust.exists():
        plans = json.loads(trust.read_text())["plans"]
        assert plans == {read_plan(path).identity: "small: code and launches are what the kernels of tccompile 0.1.0 make"}
        before = trust.read_bytes()
        run("tcinspect", path, "--rebuild", "--trust", trust)
        assert trust.read_bytes() == before


CASES: dict[str, tuple[str, int, str]] = {
    "a plan of the list": ("tcrun small.plan x.npz --trust trusted.json", 0, ""),
    "without a list": ("tcrun other.plan x.npz", 0, ""),
    "another plan": ("tcrun other.plan x.npz --trust trusted.json", 9, "other.plan is none of the plans that trusted.json"),
    "a damaged plan": ("tcrun damaged.plan x.npz --trust trusted.json", 5, "damaged.plan: section 'header'"),
    "no list": ("tcrun small.plan x.npz --trust nowhere.json", 2, "nowhere.json"),
    "another file": ("tcrun small.plan x.npz --trust x.npz", 2, "x.npz is neither a list of plans"),
    "a list of nothing": ("tcrun small.plan x.npz --trust empty.json", 2, "empty.json is neither a list of plans"),
    "not rebuilt": ("tcinspect small.plan --trust new.json", 2, "--trust says how to --rebuild"),
    "the list is the plan": (
        "tcinspect small.plan --rebuild --trust small.plan",
        2,
        "small.plan would replace the file small.plan",
    ),
    "two questions": ("tcinspect small.plan --sbom --steps", 2, "give one"),
}


@pytest.mark.parametrize("case", CASES)
def test_good_cases_and_bad_ones(case: str, run: Run, trusted: tuple[Path, Path]) -> None:
    command, code, says = CASES[case]
    folder = trusted[0].parent
    write_plan(replace(PLAN, name="other"), folder / "other.plan")
    (folder / "damaged.plan").write_bytes(FILE[:80] + bytes([FILE[80] ^ 1]) + FILE[81:])
    (folder / "empty.json").write_text("{}")
    np.savez(folder / "x.npz", **feeds())
    name, *words = command.split()
    result = run(name, *words, *(["--device", "cpu"] if name == "tcrun" else []))
    assert result.code == code, result.err
    assert says in result.err


def test_keys_without_the_library_of_signatures(trusted: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tccompile.plan import trust

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(trust, "import_module", missing)
    path, key = trusted[0], trusted[0].with_name("public.pem")
    key.write_text("-----BEGIN PUBLIC KEY-----\n")
    np.savez(path.with_name("x.npz"), **feeds())
    result = run("tcrun", path, path.with_name("x.npz"), "--trust", key)
    assert (
        result.code == 2 and "signatures need model_signing, which is not installed: pip install 'tccompile[sign]'" in result.err
    )


def test_a_bill_of_materials(tmp_path: Path, run: Run) -> None:
    net = Net(x=(2, 8))
    onnx.save(net.out(net("Neg", net("Add", "x", net.normal(8)))).model(), tmp_path / "m.onnx")
    made = compile_model(tmp_path / "m.onnx", Options(archs=("sm_80",)))
    made.save(tmp_path / "m.plan")
    result = run("tcinspect", tmp_path / "m.plan", "--sbom")
    bill = json.loads(result.out)
    assert result.code == 0 and (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    subject, (model, *tools) = bill["metadata"]["component"], bill["components"]
    assert subject["hashes"] == [{"alg": "SHA-256", "content": read_plan(tmp_path / "m.plan").identity}]
    assert model["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()}]
    assert [p["value"].removeprefix("sha256:") for p in model["properties"]] == [*made.origin.weights.values()]
    assert {t["name"]: t["version"] for t in tools} == dict(made.producer) and "ptxas" in made.producer
    refs = [c["bom-ref"] for c in (subject, model, *tools)]
    assert len(set(refs)) == len(refs)


def test_the_page_of_checks_names_tests_that_there_are() -> None:
    """docs/guide/trust.md says which test breaks each rule: file::function."""
    root = Path(__file__).parents[1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs/guide/trust.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, function in named:
        assert f"def {function}(" in (root / file).read_text(encoding="utf-8"), f"{file} has no {function}"
