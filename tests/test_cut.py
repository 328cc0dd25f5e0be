"""A part of a model is what ONNX Runtime makes of that part; a refusal names the cut that leaves out what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.utils
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile import compile as compile_plan
from tccompile.check import check
from tccompile.dump import Dump
from tccompile.errors import TccompileError, UnsupportedError, UsageError
from tccompile.load.cut import Part, quoted
from tccompile.load.model import input_names, parsed, sources
from tccompile.options import Options
from tccompile.pipeline import compile_model, to_program, without_code
from tccompile.plan.weights import fill
from tccompile.runtime.session import Session
from tccompile.verify.oracle import Oracle
from tests.commands import Run
from tests.networks import reference, relative_error
from tests.rewrites.common import Net
from tests.test_broken_models import BROKEN, INVALID, NAMED, as_it_is

FLOAT = TensorProto.FLOAT


def tensor(name: str, shape: Sequence[int | str] | None = None, elem: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def made(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    **weights: np.ndarray,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(v, n) for n, v in weights.items()])
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in ("own", "com.microsoft"))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def backbone(size: int | str = 8) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Of a detector: boxes (1, 64, 4) and scores (1, 5, 64) of an image."""
    weights = {"w1": normal(8, 3, 3, 3), "wb": normal(4, 8, 1, 1), "ws": normal(5, 8, 1, 1)}
    weights |= {"as boxes": np.array([1, -1, 4]), "as scores": np.array([1, 5, -1])}
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "positive"),
        helper.make_node("Conv", ["b", "wb"], ["c"], "to boxes"),
        helper.make_node("Conv", ["b", "ws"], ["d"], "to scores"),
        helper.make_node("Reshape", ["c", "as boxes"], ["boxes"], "boxes"),
        helper.make_node("Reshape", ["d", "as scores"], ["the scores"], "scores"),
    ]
    return nodes, weights


def detector() -> onnx.ModelProto:
    """It ends in what cannot be compiled, of which only the first can be judged by shapes."""
    nodes, weights = backbone()
    weights |= {"most": np.array([10]), "overlap": np.array([0.5], np.float32)}
    nodes += [
        helper.make_node("ReduceMean", ["the scores"], ["least"], "least", keepdims=0),
        helper.make_node("NonMaxSuppression", ["boxes", "the scores", "most", "overlap", "least"], ["kept"], "suppress"),
        helper.make_node("Unique", ["kept"], ["once"], "unique"),
        helper.make_node("Cast", ["once"], ["y"], "cast", to=FLOAT),
    ]
    return made(nodes, [tensor("image", (1, 3, 8, 8))], [tensor("y")], **weights)


def compare(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str], whole: dict[str, np.ndarray]) -> None:
    """The part computes what the whole does there, where it is given what the whole computes."""
    part = Part(model, tuple(inputs), tuple(outputs))
    names = input_names(part)
    shapes = {n: whole[n].shape for n in names}
    with Session(without_code(part, shapes, "fp32"), "cpu") as session:
        assert [x.name for x in session.get_inputs()] == names
        assert [y.name for y in session.get_outputs()] == list(outputs)
        for name, value in zip(outputs, session.run(None, {n: whole[n] for n in names}), strict=True):
            assert relative_error(value, whole[name]) < 1e-5, name


# --- Parts -----------------------------------------------------------------------------------------------------------

CUTS = {
    "the end": ((), ("boxes", "the scores")),
    "the end, other way round": ((), ("the scores", "boxes")),
    "the middle": (("b",), ("boxes",)),
    "one operator": (("a",), ("b",)),
    "two inputs": (("c", "d"), ("boxes", "the scores")),
    "an input of the model": (("image",), ("b",)),
    "from the beginning and between": ((), ("a", "boxes")),
    "a weight as an input": (("b", "wb"), ("boxes",)),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_part_is_what_onnx_runtime_makes_of_it(case: str, tmp_path: Path) -> None:
    inputs, outputs = CUTS[case]
    model = detector()
    part = [n for n in model.graph.node if n.name not in ("suppress", "unique", "cast")]
    tensors = [y for n in part for y in n.output]
    image = {"image": normal(1, 3, 8, 8)}
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    seen = made(part, list(model.graph.input), [tensor(y) for y in tensors], **weights)
    compare(model, inputs, outputs, image | weights | reference(seen, image))


def test_a_part_is_what_onnx_extracts(tmp_path: Path) -> None:
    """The same nodes, inputs and outputs as onnx.utils.extract_model takes."""
    nodes, weights = backbone()
    model = made(nodes, [tensor("image", (1, 3, 8, 8))], [tensor("boxes"), tensor("the scores")], **weights)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.save(model, tmp_path / "m.onnx")
    onnx.utils.extract_model(tmp_path / "m.onnx", tmp_path / "part.onnx", ["b"], ["the scores", "c"])
    expected, (found, _) = onnx.load(tmp_path / "part.onnx").graph, parsed(Part(model, ("b",), ("the scores", "c")))
    assert [n.name for n in found.graph.node] == [n.name for n in expected.node]
    assert list(found.graph.input) == list(expected.input) and {v.name for v in found.graph.output} == {"the scores", "c"}
    assert {t.name for t in found.graph.initializer} == {t.name for t in expected.initializer}


def test_one_of_two_results_is_given() -> None:
    """A node that also computes another result stays."""
    net = Net(opset=17, x=(2, 6))
    halves = net("Split", net("Relu", "x"), outputs=2, axis=1)
    y = net("Sub", net("Exp", halves[0]), halves[1])
    model, x = net.out(y).model(), normal(2, 6)
    given = {"x": x, halves[0]: normal(2, 3)}
    with Session(without_code(Part(model, (halves[0], "x"), ()), precision="fp32"), "cpu") as session:
        (found,) = session.run(None, given)
    np.testing.assert_allclose(found, np.exp(given[halves[0]]) - np.maximum(x[:, 3:], 0), rtol=1e-6)


def test_weights_in_another_file_and_the_oracle(tmp_path: Path) -> None:
    """ONNX Runtime runs the same part, of a model whose weights lie beside it; the rest need not even be valid."""
    onnx.save(detector(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="weights")
    part = Part(tmp_path / "m.onnx", ("b",), ("boxes",))
    plan = without_code(part, precision="fp32")
    program, x = plan.entries[0].program, {"b": normal(1, 8, 8, 8)}
    oracle = Oracle(part)
    with Session(plan, "cpu") as session:
        (y,) = session.run(None, x)
    assert relative_error(y, oracle.run(program, x, ["boxes"])["boxes"]) < 1e-5
    assert set(oracle.run(program, x, ["c"])) == {"c"}, "layers between"


def test_a_plan_of_a_part_takes_its_weights_from_the_whole() -> None:
    """Which need not be a model that could be read."""
    model = detector()
    model.graph.node.append(helper.make_node("NoSuchOperator", ["y"], ["z"]))
    plan = without_code(Part(model, (), ("boxes",)), precision="fp32")
    stripped = replace(plan, weights={})
    assert fill(stripped, sources(model)).weights == plan.weights


def test_functions_and_constants_that_are_cut_away_are_not_read() -> None:
    texts = helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"b"])
    bad = helper.make_function(
        "own", "Bad", ["p"], ["q"], [helper.make_node("Nowhere", ["p"], ["q"])], [helper.make_opsetid("", 17)]
    )
    twice = helper.make_function(
        "own", "Twice", ["p"], ["q"], [helper.make_node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["t"], domain="own"),
        helper.make_node("Bad", ["t"], ["u"], domain="own"),
        helper.make_node("LabelEncoder", ["u", "texts"], ["y"], domain="ai.onnx.ml"),
    ]
    model = made(nodes, [tensor("x", (3,))], [tensor("y", None, TensorProto.STRING)], 17, [bad, twice])
    model.graph.initializer.append(texts)
    with Session(without_code(Part(model, (), ("t",))), "cpu") as session:
        (y,) = session.run(None, {"x": np.float32([1, 2, 3])})
    assert y.tolist() == [2, 4, 6]


def test_a_model_whose_weights_are_inputs_too() -> None:
    model = made([helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"]),
                  helper.make_node("Nowhere", ["y"], ["z"], domain="own")],
                 [tensor("x", (2, 3)), tensor("w", (3, 4))], [tensor("z")], 7, w=normal(3, 4))  # fmt: skip
    model.ir_version = 3
    part, x = Part(model, (), ("y",)), {"x": normal(2, 3)}
    plan = without_code(part, precision="fp32")
    with Session(plan, "cpu") as session:
        (y,) = session.run(None, x)
    assert relative_error(y, Oracle(part).run(plan.entries[0].program, x, ["y"])["y"]) < 1e-6


# --- The types of inputs ---------------------------------------------------------------------------------------------


def chain(*nodes: onnx.NodeProto, known: Sequence[onnx.ValueInfoProto] = (), **weights: np.ndarray) -> onnx.ModelProto:
    model = made(nodes, [tensor("x", ("N", 3, "H", 8))], [tensor(nodes[-1].output[0])], **weights)
    model.graph.value_info.extend(known)
    return model


node = helper.make_node
TYPES = {
    # name: model, input, its element type, its shape as it is known
    "a symbol and a number": (chain(node("Shape", ["x"], ["s"]), node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])),
                              "a", FLOAT, ["N", 3, "H", 8]),
    "an operator's own": (chain(node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["y"], to=1)), "s", TensorProto.INT64, [4]),
    "what the model says": (chain(node("What", ["x"], ["a"], domain="own"), node("Relu", ["a"], ["y"]),
                                  known=[tensor("a", (2, 5), TensorProto.FLOAT16)]), "a", TensorProto.FLOAT16, [2, 5]),
    "that of the filters": (chain(node("What", ["x"], ["a"], domain="own"), node("Conv", ["a", "w"], ["y"]),
                                  w=normal(8, 3, 3, 3)), "a", FLOAT, None),
    "the only one that is read": (chain(node("What", ["x"], ["a"], domain="own"), node("Not", ["a"], ["y"])),
                                  "a", TensorProto.BOOL, None),
    "an axis on which ONNX aborts": (chain(node("LayerNormalization", ["x", "w"], ["a"], axis=2**31),
                                           node("Add", ["a", "w"], ["y"]), w=normal(8)), "a", FLOAT, None),
}  # fmt: skip


@pytest.mark.parametrize("case", TYPES)
def test_the_type_of_an_input_is_inferred(case: str) -> None:
    model, name, elem, shape = TYPES[case]
    (value,) = (v for v in parsed(Part(model, (name,), ("y",)))[0].graph.input if v.name == name)
    kind = value.type.tensor_type
    assert kind.elem_type == elem
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    assert dims == shape if shape is not None else not kind.HasField("shape")


# --- What is no part -------------------------------------------------------------------------------------------------


def branching() -> onnx.ModelProto:
    branches = [
        helper.make_graph([helper.make_node(op, ["a"], [f"inside {op}"])], op, [], [tensor(f"inside {op}")])
        for op in ("Exp", "Neg")
    ]
    call = helper.make_node("F", ["z"], ["y"], "call", domain="own")
    inner = [helper.make_node("Exp", ["p"], ["within"]), helper.make_node("Neg", ["within"], ["q"])]
    function = helper.make_function("own", "F", ["p"], ["q"], inner, [helper.make_opsetid("", 17)])
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("If", ["c"], ["z"], "choose", then_branch=branches[0], else_branch=branches[1]),
        call,
        helper.make_node("What", ["a"], ["strange"], "strange", domain="own"),
        helper.make_node("Identity", ["strange"], ["still strange"]),
        helper.make_node("Add", ["half", "half"], ["constant"]),
    ]
    ends = [tensor("y"), tensor("still strange")]
    return made(nodes, [tensor("x", (2,)), tensor("c", (), TensorProto.BOOL)], ends, 17, [function], half=normal(2))


WRONG = {
    "a name like another": ((), ("stil strange",), "no tensor 'stil strange'", "nearest names are 'still strange'"),
    "a name like none": ((), ("qqqqqq",), "no tensor 'qqqqqq'", "Netron"),
    "a plan": ((), ("m.plan",), "no tensor 'm.plan'", "-o"),
    "a node": ((), ("choose",), "'choose' is a node", "computes 'z'"),
    "inside a branch": ((), ("inside Exp",), "inside node 'choose' (If)", "main graph only", "'z'"),
    "inside a function": ((), ("within",), "inside the function F", "main graph only"),
    "a constant": ((), ("constant",), "'constant' depends on no input"),
    "a weight": ((), ("half",), "'half' depends on no input"),
    "an input that is still needed": (("z",), ("y", "a"), "the output 'a' still needs the model's input 'x'", "--input x"),
    "outputs that need others": (("z",), (), "'still strange' still needs the model's input 'x'", "--output"),
    "an input that nothing needs": (("x", "c"), ("a",), "nothing", "'a' needs the input 'c'", "leave it away"),
    "what comes behind": (("y", "x"), ("a",), "nothing", "needs the input 'y'"),
    "a type that nobody knows": (
        ("strange",),
        ("still strange",),
        "type of the input 'strange' is not known",
        "own.What",
        "Cast",
    ),
    "both": (("a",), ("a",), "'a' is an input and an output"),
    "twice": ((), ("a", "a"), "'a' is named twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_between_which_there_is_no_part(case: str) -> None:
    inputs, outputs, *says = WRONG[case]
    with pytest.raises(UsageError) as error:
        without_code(Part(branching(), inputs, outputs))
    assert all(text in str(error.value) for text in says), error.value


def test_an_input_without_a_shape_asks_for_it() -> None:
    part = Part(TYPES["that of the filters"][0], ("a",), ("y",))
    with pytest.raises(UsageError, match="the input 'a' has no shape: give it with --shape"):
        without_code(part)
    with pytest.raises(UsageError, match="the model has no input 'x'; its inputs are 'a'"):
        without_code(part, {"x": (1, 3, 8, 8)})
    assert without_code(part, {"a": (1, 3, 8, 8)}).entries[0].program.tensors["y"].shape == (1, 8, 6, 6)


def test_names_are_a_list() -> None:
    with pytest.raises(UsageError, match=r"outputs is a list of names, as \['boxes'\]"):
        compile_plan(detector(), outputs="boxes")


# --- The cut that a refusal names ------------------------------------------------------------------------------------


def text_classifier() -> onnx.ModelProto:
    """It begins with what cannot be compiled."""
    vocabulary = {"pool_strings": ["a", "b", "c", "d"], "ngram_counts": [0], "ngram_indexes": [0, 1, 2, 3]}
    nodes = [
        helper.make_node("StringNormalizer", ["text"], ["lower"], "lower", case_change_action="LOWER"),
        helper.make_node("TfIdfVectorizer", ["lower"], ["counts"], "counts", mode="TF", min_gram_length=1, max_gram_length=1,
                         max_skip_count=0, **vocabulary),
        helper.make_node("MatMul", ["counts", "w"], ["logits"], "layer"),
        helper.make_node("Softmax", ["logits"], ["y"], "softmax", axis=-1),
    ]  # fmt: skip
    return made(nodes, [tensor("text", ("words",), TensorProto.STRING)], [tensor("y")], w=normal(4, 7))


def both_ends() -> onnx.ModelProto:
    """A file of a picture comes in, what is kept of the boxes goes out."""
    nodes, weights = backbone()
    weights |= {"axes": np.array([0]), "most": np.array([10])}
    before = [
        helper.make_node("ImageDecoder", ["file"], ["picture"], "decode"),
        helper.make_node("Cast", ["picture"], ["floats"], "floats", to=FLOAT),
        helper.make_node("Transpose", ["floats"], ["planes"], "planes", perm=[2, 0, 1]),
        helper.make_node("Unsqueeze", ["planes", "axes"], ["image"], "batch"),
    ]
    after = [helper.make_node("NonMaxSuppression", ["boxes", "the scores", "most"], ["kept"], "suppress")]
    return made([*before, *nodes, *after], [tensor("file", ("n",), TensorProto.UINT8)],
                [tensor("kept", None, TensorProto.INT64)], 20, **weights)  # fmt: skip


def strings_out() -> onnx.ModelProto:
    nodes, weights = backbone()
    label = helper.make_node(
        "LabelEncoder", ["best"], ["label"], "label", domain="ai.onnx.ml", keys_int64s=[0], values_strings=["a"]
    )
    nodes += [helper.make_node("ArgMax", ["the scores"], ["best"], "best", axis=1), label]
    model = made(nodes, [tensor("image", (1, 3, 8, 8))], [tensor("boxes"), tensor("label", None, TensorProto.STRING)], **weights)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return model


ADVICE = {
    # name: model, shapes, the options that the command has
    "at the end": (detector(), {}, "--output boxes --output 'the scores'"),
    "at the beginning": (text_classifier(), {"text": (3,)}, "--input counts"),
    "at both ends": (both_ends(), {"file": (100,)}, "--input picture --output boxes --output 'the scores' --shape picture="),
    "strings at the end": (strings_out(), {}, "--output boxes --output best"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_refusal_names_a_cut_that_is_accepted(case: str, tmp_path: Path) -> None:
    model, shapes, options = ADVICE[case]
    path = tmp_path / "a model.onnx"
    onnx.save(model, path)
    with pytest.raises(UnsupportedError) as error:
        compile_model(path, Options((shapes,)))
    command = str(error.value).splitlines()[-1].partition(": ")[2]
    assert command.startswith(f"tccompile '{path}' {options}"), error.value
    words = shlex.split(command)
    of = {what: tuple(b for a, b in pairwise(words) if a == f"--{what}") for what in ("input", "output", "shape")}
    given = {text.partition("=")[0]: tuple(map(int, text.partition("=")[2].split("x"))) for text in of["shape"]}
    part = Part(path, of["input"], of["output"])
    plan = without_code(part, given, "fp32")
    program = plan.entries[0].program
    inputs = {n: np.abs(normal(*program.tensors[n].shape)).astype(program.tensors[n].dtype.numpy) for n in program.inputs}
    expected = Oracle(part).run(program, inputs, program.outputs)
    with Session(plan, "cpu") as session:
        for name, value in zip(program.outputs, session.run(None, inputs), strict=True):
            assert relative_error(value, expected[name]) < 1e-5


def test_no_cut_is_named_where_none_helps() -> None:
    model = made([helper.make_node("Det", ["x"], ["y"], "only")], [tensor("x", (4, 4))], [tensor("y")])
    report = check(model, [{}])
    assert [m.nodes for m in report.missing] == [("only",)] and report.cut is None
    with pytest.raises(UnsupportedError, match="Det") as error:
        compile_plan(model)
    assert "cut" not in str(error.value)


def test_a_part_is_cut_further() -> None:
    report = check(Part(detector(), ("b",), ("y",)), [{}])
    assert report.cut is not None and report.cut.part.inputs == ("b",)
    assert report.cut.part.outputs == ("boxes", "the scores", "least")
    assert check(report.cut.part, [{}]).missing == ()


@pytest.mark.parametrize(
    "name", ["x", "a b", "it's", "$HOME", "new\nline", "\x1b[31mred", "back\\slash\x07", "\u202eright", "–é"]
)
def test_names_are_quoted_for_a_shell(name: str) -> None:
    text = quoted(name)
    assert text.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True)
    assert done.stdout.decode() == name


# --- All that is missing ---------------------------------------------------------------------------------------------


def test_all_is_listed_in_one_run_each_once() -> None:
    """Beside what is masked: an operator without shapes is named, one that only lacks its input's shape is not."""
    nodes = [
        *(helper.make_node("Det", ["x"], [f"d{i}"], f"det{i}") for i in range(5)),
        helper.make_node("Unique", ["x"], ["where"], "where", sorted=0),
        helper.make_node("Relu", ["where"], ["r"], "masked"),
        helper.make_node("Unique", ["r"], ["u"], "unique", sorted=0),
        helper.make_node("Transpose", ["x"], ["t"], "turn", perm=[0, 0]),
        helper.make_node("Other", ["t"], ["o"], "other", domain="own"),
        helper.make_node("Exp", ["x"], ["e"], "fine"),
    ]
    model = made(nodes, [tensor("x", (4, 4))], [tensor(n) for n in ("d0", "d1", "d2", "d3", "d4", "u", "o", "e")])
    found = {m.nodes: m for m in check(model, [{}]).missing}
    assert set(found) == {tuple(f"det{i}" for i in range(5)), ("where",), ("unique",), ("turn",), ("other",)}
    assert found["turn",].issue.invalid and "perm" in found["turn",].text
    assert found["other",].issue.domain == "own" and "own.Other" in found["other",].text
    assert found["where",].issue.shapes == ((4, 4),)
    text = next(m.text for m in found.values() if m.issue.op == "Det")
    assert text.startswith("det0, det1, det2 and 2 more (Det of 4×4, 5 nodes): ")


def test_a_loop_that_cannot_be_unrolled_hides_what_depends_on_it() -> None:
    body = helper.make_graph([helper.make_node("Relu", ["v"], ["v2"]), helper.make_node("Identity", ["go"], ["on"])], "body",
                             [tensor("i", (), TensorProto.INT64), tensor("go", (), TensorProto.BOOL), tensor("v", (2,))],
                             [tensor("on", (), TensorProto.BOOL), tensor("v2", (2,))])  # fmt: skip
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Loop", ["n", "", "a"], ["l"], "around", body=body),
        helper.make_node("Exp", ["l"], ["y"], "after"),
    ]
    model = made(nodes, [tensor("x", (2,)), tensor("n", (), TensorProto.INT64)], [tensor("y")])
    report = check(model, [{}])
    assert [m.nodes for m in report.missing] == [("around",)]
    assert report.cut is not None and report.cut.part.outputs == ("a",)


def test_what_is_refused_is_listed() -> None:
    """Where compiling stops, the list is not empty, and its exit code is that of the error."""
    for name, (opset, shape, build) in {**BROKEN, **{n: case for n, (case, _) in {**NAMED, **INVALID}.items()}}.items():
        net = Net(opset=opset, x=shape)
        model = as_it_is(net, build(net))
        with pytest.raises(TccompileError) as error:
            to_program(model, {}, Options(precision="fp16"), Dump(None))
        try:
            report = check(model, [{}])
        except TccompileError as same:
            assert str(same) == str(error.value), name
        else:
            assert report.exit_code == error.value.exit_code, (name, report.text, error.value)


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_compiles_a_part_and_verifies_it(run: Run, tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    words = ["m.onnx", "--input", "a", "--output", "b", "--arch", "sm_80", "--precision", "fp32"]
    assert run("tccompile", *words, "--check").out == "every node is supported\n"
    done = run("tccompile", *words, "-o", "m.plan", "--verify", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [v["name"] for v in found["entries"][0]["inputs"]] == ["a"]
    assert [r["output"] for r in found["verify"]["outputs"]] == ["b"] and found["verify"]["passed"]
    assert run("tccompile", *words, "--shape", "image=1x3x8x8").code == 2


def test_the_list_for_programs(run: Run, tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    listed = run("tccompile", "m.onnx", "--check", "--json")
    suppress, unique = json.loads(listed.out)
    assert listed.code == 3
    assert (suppress["node"], suppress["op"], suppress["count"], suppress["nodes"]) == (
        "suppress",
        "NonMaxSuppression",
        1,
        ["suppress"],
    )
    assert suppress["shapes"] == [[1, 64, 4], [1, 5, 64], [1], [1], []] and suppress["domain"] == "" and not suppress["invalid"]
    assert unique["reason"] and unique["way_out"]
    assert shlex.split(suppress["cut"]) == [
        *("tccompile", "m.onnx", "--output", "boxes", "--output", "the scores", "--output", "least"),
    ]
    assert run("tccompile", *shlex.split(suppress["cut"])[1:], "--check", "--json").out == "[]\n"
