"""What commands tell a newcomer: all that a model lacks, errors as JSON, what was written and measured, where things are kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.cli import commands as cli
from tccompile.cli import foreign
from tccompile.cli import progress as progress_of
from tccompile.cli.bug import where_to_send
from tccompile.cli.cache import cache
from tccompile.cli.tccompile import SECTIONS
from tccompile.ir.ops import Conv, Op
from tccompile.lower.registry import CONVERTERS
from tccompile.options import Options
from tccompile.pipeline import compile_model, without_code
from tccompile.schedule import choose
from tests.plans import without_code as with_sections
from tests.small import image

FLOAT, INT, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def tensor(name: str, elem: int = FLOAT, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, elem, shape or None)


def broken() -> onnx.ModelProto:
    """A model with a dozen different problems, and a node that has none."""
    nodes = [
        helper.make_node("Det", ["x"], ["det"], "the determinant"),
        helper.make_node("NonZero", ["z"], ["places"], "the places"),
        helper.make_node("Unique", ["z"], ["once"], "once each", axis=0),
        helper.make_node("Frobnicate", ["z"], ["frob"], "somebody's own", domain="my.ops"),
        helper.make_node("StringNormalizer", ["s"], ["words"], "the words"),
        helper.make_node("Bernoulli", ["z"], ["coin"], "a coin"),
        helper.make_node("Reshape", ["z", "late"], ["shaped"], "a late shape"),
        helper.make_node("MatMul", ["z", "z3"], ["product"], "no product"),
        helper.make_node("RandomNormal", [], ["drawn"], "drawn", shape=[2, 2]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "k"], ["kept"], "suppression"),
        helper.make_node("Conv", ["image", "w"], ["groups"], "odd groups", group=2),
        helper.make_node("Relu", ["image"], ["fine"], "a good one"),
    ]
    inputs = [tensor("x", FLOAT, 2, 4, 4), tensor("z", FLOAT, 2, 4), tensor("late", INT, 2), tensor("z3", FLOAT, 3, 5),
              tensor("s", STRING, 2), tensor("image", FLOAT, "batch", 3, "height", "width"),
              tensor("boxes", FLOAT, 1, 10, 4), tensor("scores", FLOAT, 1, 2, 10)]  # fmt: skip
    types = {"places": INT, "kept": INT, "words": STRING}
    outputs = [tensor(y, types.get(y, FLOAT)) for n in nodes for y in n.output]
    weights = [numpy_helper.from_array(np.array([5]), "k"), numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w")]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, weights), opset_imports=imports, ir_version=8)


def network(shape: tuple[int | str, ...] = (1, 3, 8, 8)) -> onnx.ModelProto:
    w = np.random.default_rng(0).standard_normal((32, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "the layer", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["y"], "after"),
    ]
    graph = helper.make_graph(nodes, "g", [tensor("x", FLOAT, *shape)], [tensor("y")], [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    onnx.save(broken(), folder / "broken.onnx")
    onnx.save(network(), folder / "net.onnx")
    onnx.save(network(("batch", 3, "height", 8)), folder / "open.onnx")
    without_code(network()).save(folder / "net.plan")
    np.save(folder / "x.npy", np.ones((1, 3, 8, 8), np.float32))
    return folder


PROBLEMS = {
    "image": "'batch', 'height', 'width' can be anything", "s": "it holds strings", "a coin": "at random",
    "the determinant": "up to 3×3", "once each": "only a vector's",
    "somebody's own": "not one of ONNX's", "the words": "StringNormalizer is not supported", "a late shape": "at run time",
    "no product": "2×4, 3×5", "drawn": "at random", "odd groups": "in 2 groups",
}  # fmt: skip


def test_check_lists_everything(run: Any, models: Path) -> None:
    """Also behind an input whose shape is open, of which an example is taken, and nodes whose results have no known shape."""
    result = run("tccompile", models / "broken.onnx", "--check")
    assert result.code == 3 and "these examples of shapes" in result.out and "a good one" not in result.out
    found = json.loads(run("tccompile", models / "broken.onnx", "--check", "--json").out)
    assert {n: why for i in found for n in i["nodes"] for why in [i["reason"] or i["way_out"]]}.keys() == PROBLEMS.keys()
    for issue in found:
        for node in issue["nodes"]:
            assert PROBLEMS[node] in issue["reason"] + issue["way_out"], issue
            assert f"{node} (" in result.out


def test_check_of_an_open_shape_alone(run: Any, models: Path) -> None:
    result = run("tccompile", models / "open.onnx", "--check")
    assert result.code == 2 and "--shape x=1x3x224x8" in result.out
    assert result.err.startswith("error: every node is supported, and the shapes of inputs are all that is missing. x: say what")
    assert "--shape x=1x3x224x8" in result.err
    (issue,) = json.loads(run("tccompile", models / "open.onnx", "--check", "--json").out)
    assert issue["open"] and issue["cut"] is None
    assert run("tccompile", models / "open.onnx", "--check", "--shape", "x=1x3x224x8").code == 0


@pytest.mark.parametrize(
    ("command", "args", "code", "says"),
    [
        ("tccompile", ("nowhere.onnx", "--json"), 2, "nowhere.onnx"),
        ("tccompile", ("--json",), 2, "MODEL.onnx"),
        ("tccompile", ("broken.onnx", "--json", "--arch", "86"), 3, "'s' holds strings"),
        ("tccompile", ("net.plan", "--json"), 2, "is a plan already: tcrun runs it"),
        ("tcrun", ("net.plan", "--json"), 2, "'x'"),
        ("tcrun", ("x.npy", "--json"), 5, "is not a plan"),
        ("tcinspect", ("net.onnx", "--json"), 5, "this is not a plan of tccompile's: tccompile makes one of a model"),
    ],
)
def test_errors_are_json_where_results_are(
    command: str, args: tuple[str, ...], code: int, says: str, run: Any, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    result = run(command, *args)
    error = json.loads(result.out)["error"]
    assert result.code == error["code"] == code and says in error["message"] and "error: " in result.err


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("tccompile", "m.onnx --fp16", "--precision fp16"),
        ("tccompile", "m.onnx --precision fp8", "Here it is --quantize fp8 --calibrate DATA.npz"),
        ("tccompile", "m.onnx --quantize fp16", "Here it is --precision fp16"),
        ("tccompile", "--onnx=m.onnx --saveEngine=m.plan", "tccompile MODEL.onnx"),
        ("tccompile", "m.onnx --optShapes=x:1x3", "--entry"),
        ("tccompile", "run m.plan", "If no file is meant: tcrun MODEL.plan"),
        ("tccompile", "-q cache", "If no file is meant: tccompile cache --size, or --clear, with cache as the first word"),
        ("tccompile", "m.onnx --clear", "here it is tccompile cache --clear"),
        ("tccompile", "cache", "give --size, which says"),
        ("tccompile", "cache --size --clear", "give --size, which says"),
        ("tccompile", "cache --clean", "see: tccompile cache --help"),
        ("tcrun", "--loadEngine=m.plan", "tcrun MODEL.plan"),
        ("tcrun", "m.plan --nonsense", "No such option '--nonsense'"),
    ],
)
def test_what_users_of_other_tools_type(command: str, args: str, says: str, run: Any) -> None:
    result = run(command, *args.split())
    assert result.code == 2 and says in result.err


def test_no_hint_is_about_an_option_that_there_is() -> None:
    """And every option and command that a hint names is there."""
    options = {o: c for c in (cli.tccompile, cache, cli.tcrun, cli.tcinspect, cli.tcrefit) for p in c.params for o in (*p.opts,)}
    both = [o for o in foreign.SAID if o in {o for p in cli.tccompile.params for o in p.opts}]
    assert not both
    for said in (*foreign.SAID.values(), *foreign.VALUES.values(), *foreign.COMMANDS.values()):
        for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", said):
            assert option in options, said


def test_help_shows_each_option_under_one_heading(run: Any) -> None:
    text = run("tccompile", "-h").out
    assert re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE) == [*SECTIONS, "Others"]
    for option in (p for p in cli.tccompile.params if p.param_type_name == "option"):
        shown = re.findall(rf"^  (?:-\w, )?{re.escape(max(option.opts, key=len))}(?![\w-])", text, re.MULTILINE)
        assert len(shown) == 1, option
    assert "\n  MODEL.onnx" not in text


@pytest.mark.parametrize("command", ["tccompile", "tcrun", "tcinspect", "tcrefit"])
def test_help_by_one_letter(command: str, run: Any) -> None:
    short, long = run(command, "-h"), run(command, "--help")
    assert short.code == long.code == 0 and short.out == long.out and "-h, --help" in short.out


def test_tcrun_says_what_it_wrote_and_measured(run: Any, models: Path) -> None:
    wrote = run("tcrun", models / "net.plan", models / "x.npy", "-o", "y.npy", "--device", "CPU")
    assert wrote.out == "y.npy: y 1x32x8x8\n" and np.load("y.npy").shape == (1, 32, 8, 8)
    assert run("tcrun", models / "net.plan", models / "x.npy", "-o", "y.npy", "--device", "cpu", "-q").out == ""
    told = run("tcrun", models / "net.plan", models / "x.npy", "-o", "y.npy", "--device", "cpu", "--json").out
    assert json.loads(told)["wrote"] == "y.npy"
    bench = "--device", "cpu", "--bench", "--iterations", 1
    assert run("tcrun", models / "net.plan", *bench).out.endswith("of entry 0: x 1x3x8x8\n")


def test_bench_names_the_entry_that_ran(run: Any, models: Path, tmp_path: Path) -> None:
    plan = with_sections(network(), ("sm_86",))
    other = with_sections(network((2, 3, 8, 8)), ("sm_86",))
    type(plan)(**{**vars(plan), "entries": (*other.entries, *plan.entries)}).save(tmp_path / "two.plan")
    data = json.loads(run("tcrun", "two.plan", models / "x.npy", "--device", "cpu", "--bench", "--iterations", 1, "--json").out)
    assert (data["entry"], data["inputs"]) == (1, {"x": [1, 3, 8, 8]})


def test_explain_begins_with_what_takes_longest(run: Any, models: Path) -> None:
    plan = with_sections(network(), ("sm_86", "sm_61"))
    plan.save("net.plan")
    text = run("tcinspect", "net.plan", "--steps").out
    assert text.count("  all steps:") == 2 and "100.0% of 110.6 kFLOP on Tensor Cores" in text
    assert "0.0% of 110.6 kFLOP on Tensor Cores" in text
    number, nodes = len(plan.entries[0].program.ops) - 1, " + ".join(plan.entries[0].program.ops[-1].nodes)
    assert text.count(f": {nodes}\n") == text.count(f"  {number}  {nodes}\n") == 2, "a step has one name"
    for section in json.loads(run("tcinspect", "net.plan", "--steps", "--json").out)["explain"]:
        assert section["us"] == sum(step["us"] for step in section["steps"]) > 0
        assert section["flops"] == 2 * 32 * 27 * 64
        assert section["tensor_core_flops"] == (section["flops"] if section["arch"] == "sm_86" else 0)


def test_the_cache_is_told_of_and_cleared(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tccompile.emit import cache as kept

    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path / "kept"))
    for i in range(3):
        kept.put(f"{i:064x}", bytes(1000))
    told = run("tccompile", "cache", "--size")
    assert told.code == 0 and told.out.startswith(f"{tmp_path / 'kept'}: 3 entries, 3.1 KiB of 2.0 GiB")
    assert "3 entries deleted, 3.1 KiB" in run("tccompile", "cache", "--clear").out
    assert "0 entries, 0 B" in run("tccompile", "cache", "--size").out and kept.get(f"{0:064x}") is None
    onnx.save(network(), "cache")
    assert "0 entries" in run("tccompile", "cache", "--size").out
    assert run("tccompile", "./cache", "--check").out == "every node is supported\n"


def test_a_bug_is_sent_with_the_node_and_without_weights(
    run: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = choose.candidates

    def broken_rule(op: Op, *others: Any) -> Any:
        return 1 / 0 if isinstance(op, Conv) else rule(op, *others)

    monkeypatch.setattr(choose, "candidates", broken_rule)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("tccompile", models / "net.onnx", "--arch", "86")
    (path,) = tmp_path.glob("tccompile-bug-*.txt")
    assert result.code == 70 and f"please send the file {path}" in result.err and f"to {where_to_send()}\n" in result.err
    text = path.read_text()
    assert "  on sm_86: Conv(" in text and "# the layer, after" in text
    assert "%w~: float16[32x3x3x3]" in text.replace("%w~1", "%w~").replace("%w:", "%w~:")
    assert "net.onnx --arch 86" in text and "numba-cuda 0." in text and "ZeroDivisionError" in text and len(text) < 20_000
    weights = numpy_helper.to_array(network().graph.initializer[0])
    assert not any(f"{value:.6g}" in text for value in weights.flat[:50])


def test_a_bug_in_reading_a_model_is_sent_with_the_node(
    run: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ONNX has it, with the types of what it reads."""

    def broken_folding(self: object, node: onnx.NodeProto) -> None:
        raise RuntimeError("by accident")

    monkeypatch.setattr("tccompile.load.fold.Folder.visit", broken_folding)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("tccompile", models / "net.onnx", "--arch", "86").code == 70
    (path,) = tmp_path.glob("tccompile-bug-*.txt")
    text = path.read_text()
    assert "ai.onnx.Conv(pads=[1, 1, 1, 1])    # the layer" in text and "    x: float32[1x3x8x8]\n" in text


def test_what_may_be_a_bug_is_written_down_when_asked_for(
    run: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python says of a model may be the model's fault: of such models no files are left behind unasked."""
    monkeypatch.setitem(CONVERTERS, "Conv", lambda node, builder: {}[node.op])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    build = ("tccompile", models / "net.onnx", "--arch", "86")
    assert "contradicts itself" in (short := run(*build)).err and short.code == 4
    assert not [*tmp_path.glob("tccompile-bug-*.txt")]
    long = run(*build, "--verbose")
    (path,) = tmp_path.glob("tccompile-bug-*.txt")
    assert long.code == 4 and f"then send the file {path}" in long.err
    assert "Conv(" in (text := path.read_text()) and "KeyError: 'Conv'" in text


def test_all_generations_are_announced_when_there_is_something_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of.Progress(False, False, "for all of them") as progress:
        progress("schedule", 0, 9)
        progress("emit", 5, 5)
        assert capsys.readouterr().err == ""
        progress("emit", 0, 5)
        progress("emit", 1, 5)
    assert capsys.readouterr().err == "for all of them\n"


def test_stages_are_shown_where_there_are_no_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation that only runs plans."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_of.Progress(False, False) as progress:
        progress("run", 0, 1)
        progress("measure", 0, 1)
        progress.stop()
    assert capsys.readouterr().err == f"\rrun…{progress_of.CLEAR}\rmeasure…{progress_of.CLEAR}\r{progress_of.CLEAR}"


def test_stages_are_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def emitted(jobs: list[Any], progress: Any, *_: object) -> dict[Any, Any]:
        progress(0, len(jobs))
        return {job: image(job[1].name, job[2], f"kernel_{n}") for n, job in enumerate(jobs)}

    monkeypatch.setattr("tccompile.pipeline.emit", emitted)
    with caplog.at_level("INFO", "tccompile"):
        compile_model(network((1, 3, 4, 4)), Options(({},), ("sm_86",), "fp16"))
    stages = [record.getMessage() for record in caplog.records]
    assert stages == ["load", "rewrite", "lower", "fuse", "precision", "schedule", "emit", "pack"]


@pytest.mark.skipif(sys.platform == "win32", reason="shells of Unix")
@pytest.mark.parametrize(
    ("words", "offered"),
    [("--precision f", ["plain,fp16", "plain,fp32"]), ("cache --", ["plain,--size", "plain,--clear", "plain,--help"])],
)
def test_shells_complete_options(words: str, offered: list[str]) -> None:
    start = "import sys; from tccompile.cli.commands import tccompile; sys.argv[0] = 'tccompile'; tccompile()"
    asked = {"COMP_WORDS": f"tccompile {words}", "COMP_CWORD": "2", "_TCCOMPILE_COMPLETE": "bash_complete"}
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=os.environ | asked)
    assert done.stdout.split() == offered
