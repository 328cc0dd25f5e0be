"""Names that come from a model or a plan, printed on a terminal and written into an archive, do nothing there."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import unquote

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.ir.feeds import read_arrays
from tccompile.pipeline import without_code
from tccompile.plan.file import write_plan
from tccompile.terminal import member_name, say
from tests.commands import Result, Run

ODD = (
    "\x1b]0;title\x07\x1b[2J",
    "a\nsecond line",
    "\u202egnp.exe",
    "c1\x9b31m",
    "tab\tand\rreturn",
    "\u2066isolate\u2069",
    "del\x7f",
)


def odd(op: str, names: tuple[str, ...] = ODD) -> onnx.ModelProto:
    """Every tensor and node has a name with signs in it that a terminal acts on."""
    ends = [
        [helper.make_tensor_value_info(n + side, TensorProto.FLOAT, shape) for n in names]
        for side, shape in (("", (2, 2)), (" out", None))
    ]
    nodes = [helper.make_node(op, [n], [f"{n} out"], f"node {n}") for n in names]
    graph = helper.make_graph(nodes, "".join(names), *ends)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def is_harmless(text: str, lines: int) -> bool:
    """Only signs that are seen; and as many lines as there are things to tell, whatever they are called."""
    return all(line.isprintable() for line in text.split("\n")) and text.count("\n") <= lines


def harmless(result: Result, lines: int) -> Result:
    assert is_harmless(result.out, lines) and is_harmless(result.err, lines), (result.out, result.err)
    return result


def test_names_in_what_is_printed(run: Run, tmp_path: Path) -> None:
    n = len(ODD)
    onnx.save(odd("Relu"), tmp_path / "fine.onnx")
    onnx.save(odd("Bernoulli"), tmp_path / "refused.onnx")
    write_plan(without_code(odd("Relu")), tmp_path / "m.plan")
    np.savez(tmp_path / "x.npz", **{f"{i}": np.ones((2, 2), np.float32) for i in range(n)})
    refused = harmless(run("tccompile", "refused.onnx", "--check"), 3)
    assert refused.code == 3 and r"\x1b]0;title\x07" in refused.out and f"{n} nodes are not supported" in refused.out
    assert harmless(run("tccompile", "refused.onnx"), 4).code == 3
    for option in ("--output", "--input"):
        assert harmless(run("tccompile", "fine.onnx", option, "\x1b[2Jx\ny"), 1).code == 2
    assert harmless(run("tcrun", "m.plan", "x.npz", "--device", "cpu"), 4).code == 7
    assert harmless(run("tcrun", "m.plan", "--device", "cpu", "--bench", "--iterations", 1), n + 2).code == 0
    assert harmless(run("tcrun", "m.plan", "--device", "cpu", "--profile", "--iterations", 1), n + 9).code == 0
    assert harmless(run("tcinspect", "m.plan", "--steps"), 9 * n + 9).code == 0
    found = json.loads(harmless(run("tcinspect", "m.plan", "--json"), 1).out)
    assert [v["name"] for v in found["entries"][0]["inputs"]] == list(ODD), "a program gets them as they are"


def test_what_stdout_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of another encoding than UTF-8 gets an escape, not a failure."""
    out = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    say("é → \udc80")
    out.seek(0)
    assert out.read() == "é \\u2192 \\udc80\n"


CLIMBING = (
    "../../up", "/root", "//host/share", "C:\\Windows\\x", "c:relative", "a/../../b", "..", ".", "a\\..\\b", "zero\0byte",
    "%2Froot", "100%", "/model/layer.0/Relu_output_0", "plain", "Relu:0", "a..b/.hidden", "\x1b[2J", "naïve",
)  # fmt: skip


def test_names_in_archives_cannot_climb_and_come_back(run: Run, tmp_path: Path) -> None:
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, (2,)) for n in names] for names in (("x",), CLIMBING)]
    nodes = [helper.make_node("Constant", [], [f"c{i}"], value_float=float(i)) for i in range(len(CLIMBING))]
    nodes += [helper.make_node("Add", ["x", f"c{i}"], [n]) for i, n in enumerate(CLIMBING)]
    model = helper.make_model(helper.make_graph(nodes, "g", *ends), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    write_plan(without_code(model), tmp_path / "m.plan")
    np.save(tmp_path / "x.npy", np.zeros(2, np.float32))
    assert run("tcrun", "m.plan", "x.npy", "-o", "y.npz", "--device", "cpu", "-q").code == 0
    members = zipfile.ZipFile(tmp_path / "y.npz").namelist()
    for member in members:
        assert PurePosixPath(member).parts[0] not in ("/", "//") and PureWindowsPath(member).anchor == "", member
        assert PureWindowsPath(member).drive == "" and not {"..", "."} & set(member.replace("\\", "/").split("/")), member
        assert member.isprintable()
    assert [unquote(m.removesuffix(".npy")) for m in members] == list(CLIMBING)
    back = read_arrays(tmp_path / "y.npz", CLIMBING)
    assert {n: a.tolist() for n, a in back.items()} == {n: [i, i] for i, n in enumerate(CLIMBING)}


def test_a_name_that_is_no_text_is_written() -> None:
    """Half of a character, which a plan's header may hold, though no model can."""
    assert member_name("\udc80") == "%ED%B2%80"
