"""Results whose extent the data decide, on the CPU engine beside ONNX Runtime: where they begin, what they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tccompile.errors import InputError, ModelError, UnsupportedError, UsageError
from tccompile.load.sizes import Sizes
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import reference
from tests.rewrites.common import Net

Feeds = Mapping[str, np.ndarray]


def boxes(rng: np.random.Generator, images: int, count: int) -> np.ndarray:
    """Corners of boxes of which many overlap, some upside down."""
    middle, size = rng.uniform(0, 4, (images, count, 2)), rng.uniform(-1, 1, (images, count, 2))
    return np.concatenate([middle - size, middle + size], -1).astype(np.float32)


def holds(net: Net, *feeds: Feeds) -> None:
    """One plan, for data of which there is more or less, has the outputs of ONNX Runtime, and their shapes."""
    model = net.model()
    with Session(without_code(model, precision="fp32"), "cpu") as session:
        for given in feeds:
            got, want = session.run(net.outputs, given), reference(model, given)
            for name, y in zip(net.outputs, got, strict=True):
                assert y.shape == want[name].shape, f"{name} is {y.shape} in place of {want[name].shape}"
                assert y.dtype == want[name].dtype
                np.testing.assert_allclose(y, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


# --- NonMaxSuppression -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "iou", "least", "how"),
    [
        (np.array([3]), np.float32([0.5]), np.float32([0.2]), {}),
        (np.array(1000), np.float32(0.1), None, {}),
        (np.array([2**62]), None, np.float32([0.9]), {"center_point_box": 1}),
        (np.array([5]), np.float32([1.0]), np.float32([2.0]), {}),
        (np.array([0]), np.float32([0.5]), None, {}),
        (None, None, None, {}),
    ],
)
def test_non_max_suppression(most: np.ndarray | None, iou: np.ndarray | None, least: np.ndarray | None, how: dict) -> None:
    net = Net(boxes=(2, 40, 4), scores=(2, 3, 40))
    net.out(net("NonMaxSuppression", "boxes", "scores", most, iou, least, **how))
    rng, feeds = np.random.default_rng(0), []
    for steps in (1000, 4):  # in the second, many scores are equal
        given = boxes(rng, 2, 40)
        if how:
            given = np.abs(given)
        feeds.append({"boxes": given, "scores": (rng.integers(0, steps, (2, 3, 40)) / steps).astype(np.float32)})
    holds(net, *feeds)


def detector(net: Net, then: Callable[[Net, str, str], tuple[str, ...]]) -> Net:
    """What is done with the boxes that are kept, (K, 4), and their scores (K,)."""
    kept = net("NonMaxSuppression", "boxes", "scores", np.array([7]), np.float32([0.4]), np.float32([0.5]))
    which = net("Squeeze", net("Slice", kept, np.array([2]), np.array([3]), np.array([1])), np.array([1]))
    flat = net("Reshape", "scores", np.array([-1]))
    return net.out(*then(net, net("Gather", net("Squeeze", "boxes", np.array([0])), which, axis=0), net("Gather", flat, which)))


def found(count: int, seed: int = 0) -> Feeds:
    """Data in which at most so many boxes are good enough."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0, 0.5, (1, 1, 30))
    scores[..., rng.choice(30, count, replace=False)] += 0.5
    return {"boxes": boxes(rng, 1, 30), "scores": scores.astype(np.float32)}


def sums(net: Net, b: str, s: str) -> tuple[str, ...]:
    reduced = [net(f"Reduce{kind}", b, np.array([0]), keepdims=0) for kind in ("Sum", "Max", "Min", "Prod", "L2", "SumSquare")]
    return (*reduced, net("ReduceSum", b, keepdims=1), net("ReduceMean", b, np.array([0])), net("ReduceMax", s))


def elements(net: Net, b: str, s: str) -> tuple[str, ...]:
    areas = net(
        "Mul", net("Sub", net("Gather", b, np.array([2, 3]), axis=1), net("Gather", b, np.array([0, 1]), axis=1)), s_(net, s)
    )
    flags = net("Where", net("Greater", s, np.float32(0.7)), s, np.float32(-1))
    return net("Concat", b, s_(net, s), areas, axis=1), flags, net("Transpose", areas, perm=[1, 0]), net("Flatten", b, axis=0)


def s_(net: Net, s: str) -> str:
    return net("Unsqueeze", s, np.array([1]))


def reshaped(net: Net, b: str, s: str) -> tuple[str, ...]:
    flat = net("Reshape", b, np.array([-1]))
    pairs = net("Reshape", b, np.array([-1, 2, 2]))
    return (
        flat,
        net("Reshape", flat, np.array([-1, 4])),
        pairs,
        net("Reshape", pairs, np.array([1, -1, 4])),
        net("Reshape", b, np.array([0, 2, -1])),
    )


def parts(net: Net, b: str, s: str) -> tuple[str, ...]:
    def cut(start: int, end: int) -> str:
        return net("Slice", b, np.array([start]), np.array([end]), np.array([0]))

    return cut(0, 3), cut(2, 100), cut(1, 2**62), cut(0, -1), cut(1, 2), *net("Split", b, np.array([1, 3]), outputs=2, axis=1)


def sizes(net: Net, b: str, s: str) -> tuple[str, ...]:
    """Shape, and what exporters make of it: Range, Expand, ConstantOfShape, Reshape and Slice by numbers that are computed."""
    shape = net("Shape", b)
    k = net("Gather", shape, np.array(0), axis=0)
    pair = net("Concat", net("Unsqueeze", k, np.array([0])), np.array([4]), axis=0)
    doubled = net("Mul", k, np.array(2))
    twos = net("Concat", net("Unsqueeze", doubled, np.array([0])), np.array([2]), axis=0)
    first = net("Slice", "line", np.array([0]), net("Unsqueeze", k, np.array([0])), np.array([0]))
    return (
        shape, k, net("Range", np.array(0), k, np.array(1)), net("Expand", np.ones((1, 4), np.float32), pair),
        net("ConstantOfShape", pair), net("Reshape", b, twos), net("Size", b), net("Cast", doubled, to=TensorProto.FLOAT), first,
    )  # fmt: skip


def best(net: Net, b: str, s: str) -> tuple[str, ...]:
    """As many as there are, or three."""
    k = net("ReduceMin", net("Concat", np.array([3]), net("Shape", s), axis=0), keepdims=1)
    values, at = net("TopK", s, k, outputs=2)
    least, _ = net("TopK", net("Neg", s), k, outputs=2, largest=0)
    return values, at, net("Gather", b, at), least, net("Gather", s, net("Sub", at, net("Shape", s)))


def mixed(net: Net, b: str, s: str) -> tuple[str, ...]:
    rows = net("MatMul", b, net.normal(4, 5))
    crossed = net("MatMul", net("Transpose", b, perm=[1, 0]), b)
    norm = net("LayerNormalization", rows, net.positive(5), axis=-1)
    return (
        net("Softmax", s, axis=0), crossed, net("Gemm", b, net.normal(3, 4), transB=1), norm, net("Softmax", rows, axis=-1),
        net("CumSum", s, np.array(0)), net("CumSum", s, np.array(0), reverse=1), net("ArgMax", b, axis=1, keepdims=0),
    )  # fmt: skip


def joined(net: Net, b: str, s: str) -> tuple[str, ...]:
    top = net("Slice", b, np.array([0]), np.array([2]), np.array([0]))
    one = net("Concat", b, np.zeros((1, 4), np.float32), top, axis=0)
    return one, net("ReduceSum", one, np.array([0])), net("Concat", net("Shape", one), net("Shape", b), axis=0)


def filtered(net: Net, b: str, s: str) -> tuple[str, ...]:
    """What is kept of what is kept: by NonZero, by Compress, and by another NonMaxSuppression."""
    good = net("Greater", s, np.float32(0.75))
    at = net("NonZero", good)
    rows = net("GatherND", b, net("Transpose", at, perm=[1, 0]))
    again = net(
        "NonMaxSuppression",
        net("Unsqueeze", b, np.array([0])),
        net("Unsqueeze", s, np.array([0, 1])),
        np.array([2]),
        np.float32(0.1),
    )
    return at, rows, net("Compress", b, good, axis=0), net("NonZero", net("Greater", b, s_(net, s))), again


def written(net: Net, b: str, s: str) -> tuple[str, ...]:
    at = net("NonZero", net("Greater", s, np.float32(0.75)))
    rows = net("Transpose", at, perm=[1, 0])
    values = net("GatherND", s, rows)
    line = net("Squeeze", at, np.array([0]))
    return net("ScatterND", "line", rows, values), net("ScatterElements", "line", line, values, axis=0, reduction="add")


def filled_up(net: Net, b: str, s: str) -> tuple[str, ...]:
    """As many rows as there may be, with a number behind those that there are, as exporters write it."""
    k = net("Gather", net("Shape", b), np.array(0), axis=0)
    rest = net("Mul", net("Sub", np.array(9), k), np.array(4))
    pads = net(
        "Reshape",
        net("Transpose", net("Concat", np.array([[0]]), net("Reshape", rest, np.array([1, 1])), axis=1)),
        np.array([-1]),
    )
    flat = net("Pad", net("Reshape", b, np.array([-1])), pads, np.float32(-1))
    return flat, net("Reshape", flat, np.array([1, -1, 4]))


def branches(net: Net, b: str, s: str) -> tuple[str, ...]:
    """Nothing, or something of what there is: by how much there is."""

    def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.INT64, None)])

    empty = numpy_helper.from_array(np.zeros((0,), np.int64))
    nothing = branch("nothing", helper.make_node("Constant", [], ["none"], value=empty))
    found = branch(
        "found",
        helper.make_node("Shape", [s], ["shape"]),
        helper.make_node("TopK", [s, "shape"], ["sorted", "places"]),
        helper.make_node("Identity", ["places"], ["all"]),
    )
    which = net("If", net("Equal", net("Size", b), np.array(0)), then_branch=nothing, else_branch=found)
    few = net("Less", net("Gather", net("Shape", b), np.array(0), axis=0), np.array(5))
    line = branch("line", helper.make_node("Cast", ["line"], ["integers"], to=TensorProto.INT64))
    return which, net("Gather", b, which), net("If", few, then_branch=line, else_branch=found)


KINDS = (filled_up, branches, sums, elements, reshaped, parts, sizes, best, mixed, joined, filtered, written)


def test_conditions() -> None:
    """Of all elements, by a condition of another shape, which ONNX Runtime takes; one shorter than the axis, one too long."""
    net = Net(x=(4, 6))
    good = net("Greater", "x", np.float32(0))
    few = net("Less", net("Slice", "x", np.array([0]), np.array([1]), np.array([0])), np.float32(0))
    net.out(net("Compress", "x", good), net("Compress", "x", net("Reshape", few, np.array([-1])), axis=1))
    holds(net, *({"x": np.random.default_rng(i).standard_normal((4, 6), np.float32)} for i in range(3)))
    net.out(net("Compress", "x", net("Reshape", good, np.array([-1])), axis=1))
    with pytest.raises(ModelError, match="its condition has 24 elements, and axis 1 of its input 6"):
        without_code(net.model())


def test_what_is_left_out_is_no_index() -> None:
    """Labels that mean nothing are filtered out before a table is read at those that are left."""
    net = Net(x=(np.int64, (6,)), rows=(6, 2))
    good = net("Less", "x", np.array(9))
    labels, rows = net("Compress", "x", good, axis=0), net("Compress", "rows", good, axis=0)
    table = net("Gather", net.normal(9, 3), labels)
    pairs = net("Concat", net("Unsqueeze", labels, np.array([1])), net("Unsqueeze", labels, np.array([1])), axis=1)
    net.out(table, net("GatherND", net.normal(9, 9), pairs), net("OneHot", labels, np.array(9), np.float32([0, 1])), rows)
    feeds = [np.array([255, 3, 255, 8, 0, 255]), np.array([255] * 6), np.arange(6)]
    holds(net, *({"x": x, "rows": np.ones((6, 2), np.float32)} for x in feeds))


@pytest.mark.parametrize("then", KINDS)
def test_along_what_is_kept(then: Callable[[Net, str, str], tuple[str, ...]]) -> None:
    net = detector(Net(boxes=(1, 30, 4), scores=(1, 1, 30), line=(30,)), then)
    line = {"line": np.arange(30, dtype=np.float32)}
    few = [3, 5] if then in (sums, best, mixed, reshaped) else [0, 1, 4]  # what there is in nothing, some tell and some do not
    holds(net, *({**found(count, count), **line} for count in (20, *few)))


# --- What is refused -------------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[Net, str, str], str]] = {
    "'n9' (Add)": lambda net, b, s: net("Add", s, "line"),
    "'n9' (Squeeze)": lambda net, b, s: net("Squeeze", s, np.array([0])),
    "'n9' (Gather)": lambda net, b, s: net("Gather", s, np.array(0)),
    "'n9' (Slice)": lambda net, b, s: net("Slice", s, np.array([-2]), np.array([2**62])),
    "'n10' (Reshape)": lambda net, b, s: net("Reshape", net("Transpose", b, perm=[1, 0]), np.array([2, -1])),
    "'n9' (Pad)": lambda net, b, s: net("Pad", s, np.array([1, 0])),
    "'n9' (Einsum)": lambda net, b, s: net("Einsum", b, equation="ij->i"),
}


@pytest.mark.parametrize("where", REFUSED)
def test_says_what_it_cannot_do(where: str) -> None:
    def then(net: Net, b: str, s: str) -> tuple[str, ...]:
        while len(net.nodes) < 9:
            net("Neg", "line")
        return (REFUSED[where](net, b, s),)

    with pytest.raises(UnsupportedError) as error:
        without_code(detector(Net(boxes=(1, 30, 4), scores=(1, 1, 30), line=(7,)), then).model())
    assert str(error.value).startswith(f"node {where}") and "node 'n0' (NonMaxSuppression) decides it" in str(error.value)


def test_an_output_that_is_cut_takes_no_array() -> None:
    net = Net(x=(3, 4))
    net.out(net("NonZero", "x"), net("Neg", "x"))
    with Session(without_code(net.model(), precision="fp32"), "cpu") as session:
        given, out = {"x": np.eye(3, 4, dtype=np.float32)}, np.empty((3, 4), np.float32)
        found, _ = session.run(None, given, {net.outputs[1]: out})
        assert found.shape == (2, 3) and (out == -given["x"]).all()
        assert [y.shape for y in session.get_outputs()] == [(2, None), (3, 4)]
        assert session.run([net.outputs[1]], given)[0].shape == (3, 4)
        with pytest.raises(InputError, match=r"'n0' \(NonZero\) decides it: give no array"):
            session.run(None, given, {net.outputs[0]: np.empty((2, 12), np.int64)})


@pytest.mark.parametrize("ratio", [2, 3])
def test_regions_that_are_not_there_are_of_no_image(ratio: int) -> None:
    """Nothing is read for them, and they are no part of what is."""
    net = Net(opset=17, x=(2, 3, 6, 7), rois=(5, 4), keep=(5,), of=(np.int64, (5,)))
    there = net("Greater", "keep", np.float32(0))
    rois, of = net("Compress", "rois", there, axis=0), net("Compress", "of", there, axis=0)
    y = net("RoiAlign", "x", rois, of, output_height=2, output_width=3, sampling_ratio=ratio, spatial_scale=0.5)
    model = net.out(y, net("ReduceSum", y, np.array([0]), keepdims=0)).model()
    session = Session(without_code(model, precision="fp32"), "cpu")
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"x": rng.standard_normal((2, 3, 6, 7)).astype(np.float32), "of": np.array([1, 0, 1, 1, 0])}
    feeds["rois"] = np.sort(rng.uniform(0, 12, (5, 2, 2)), 1).reshape(5, 4).astype(np.float32)
    for keep in ([1, -1, 1, -1, 1], [-1] * 5, [1] * 5):
        given = {**feeds, "keep": np.float32(keep)}
        expected = reference(model, given)
        for name, got in zip(net.outputs, session.run(None, given), strict=True):
            assert got.shape == expected[name].shape
            np.testing.assert_allclose(got, expected[name], 1e-5, 1e-5)


def test_a_limit_is_kept_room_for_and_held_to() -> None:
    """By a user's word there is less than there may be; more in the data is an error, in what is computed of it too."""
    net = Net(x=(3, 4))
    found = net("NonZero", "x")
    net.out(net("ReduceSum", net("Cast", found, to=TensorProto.FLOAT), keepdims=0), found)
    model = net.model()
    with Session(without_code(model, limits={"n0": 5}), "cpu") as session:
        assert session.plan.entries[0].program.tensors[found].shape == (2, 5)
        for count in (0, 5):
            given = {"x": np.float32(np.arange(12).reshape(3, 4) < count)}
            total, places = session.run(None, given)
            assert places.shape == (2, count) and total == places.sum()
        more = {"x": np.ones((3, 4), np.float32)}
        with pytest.raises(InputError, match=r"'n0' \(NonZero\) finds 12 .* room for 5: compile it with a larger --limit"):
            session.run([net.outputs[0]], more)
    with pytest.raises(UsageError, match="--limit n1=5: no node of this name"):
        without_code(model, limits={"n1": 5})


@pytest.mark.parametrize(("op", "keepdims"), [("ArgMax", 0), ("ArgMin", 1)])
def test_the_place_of_the_largest_in_an_image_of_computed_sizes(op: str, keepdims: int) -> None:
    """It is found row by row, without putting rows behind one another; the first of equal ones counts."""
    net = Net(opset=17, x=(3, 1, 4, 5), hw=(np.int64, (2,)))
    hw = net("Min", net("Max", "hw", np.array([1, 1])), np.array([9, 7]))
    size = net("Concat", np.array([3, 1]), hw, axis=0)
    big = net("Resize", "x", None, None, size, mode="linear")
    big = net("Round", net("Mul", big, np.float32(2)))
    flat = net("Reshape", big, np.array([3, -1]))
    y = net(op, flat, axis=1, keepdims=keepdims)
    model = net.out(y, flat).model()
    session = Session(without_code(model, precision="fp32"), "cpu")
    rng = np.random.default_rng(0)
    for sizes in ([1, 1], [3, 7], [9, 2], [9, 7], [5, 5]):
        given = {"x": rng.standard_normal((3, 1, 4, 5)).astype(np.float32), "hw": np.array(sizes)}
        expected = reference(model, given)
        for name, got in zip(net.outputs, session.run(None, given), strict=True):
            assert got.shape == expected[name].shape
            np.testing.assert_array_equal(got, expected[name])


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_one_scatter_after_another(reduction: str) -> None:
    """Each writes what is not there beyond the result, and reads the one before with that place."""
    net = Net(opset=17, x=(5, 3), keep=(5,), u=(5, 3))
    y = "x"
    for sign in ("Greater", "Less"):
        at = net("Transpose", net("NonZero", net(sign, "keep", np.float32(0))))
        rows = net("Gather", "u", net("Squeeze", at, np.array([1])), axis=0)
        y = net("ScatterND", y, at, rows, reduction=reduction)
    net.out(net("Exp", y))
    given = {"x": np.arange(15, dtype=np.float32).reshape(5, 3) / 9, "u": np.ones((5, 3), np.float32)}
    holds(net, *({**given, "keep": np.float32(keep)} for keep in ([1, -1, 0, 1, 0], [0] * 5, [1] * 5, [-1] * 5)))


@pytest.mark.parametrize("rows", [3, 5, 20])
def test_features_in_the_place_of_marked_tokens(rows: int) -> None:
    """PyTorch's masked_scatter: as many elements of the features as there are marked ones, one after the other."""
    net = Net(opset=17, x=(2, 5, 4), marked=(2, 5, 1), features=(rows, 4))
    marked = net("Expand", net("Greater", "marked", np.float32(0)), net("Shape", "x"))
    at = net("Transpose", net("NonZero", marked), perm=[1, 0])
    count = net("Unsqueeze", net("Gather", net("Shape", at), np.array(0), axis=0), np.array([0]))
    flat = net("Slice", net("Reshape", "features", np.array([-1])), np.array([0]), count, np.array([0]))
    net.out(net("ScatterND", "x", at, flat))
    x, features = np.zeros((2, 5, 4), np.float32), np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)

    def given(count: int) -> dict[str, np.ndarray]:
        return {"x": x, "marked": np.roll(np.arange(10) < count, 3).reshape(2, 5, 1).astype(np.float32), "features": features}

    holds(net, *(given(count) for count in (0, 1, 3, 5, 10) if count <= rows))
    with Session(without_code(net.model(), precision="fp32"), "cpu") as session:
        if rows < 10:
            with pytest.raises(InputError, match=rf"\(ScatterND\) finds 40 .* room for {rows * 4}"):
                session.run(None, given(10))


def test_names_that_the_compiler_would_make() -> None:
    """A model has them for tensors of its own, and two outputs that are the same tensor."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["sizes"]),
        helper.make_node("Transpose", ["sizes"], ["sizes1"], perm=[1, 0]),
        helper.make_node("GatherND", ["x", "sizes1"], ["y"]),
        helper.make_node("Identity", ["y"], ["y/bound"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("y", "y/bound")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 5])], ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.maximum(np.random.default_rng(0).standard_normal((3, 5)), 0).astype(np.float32)
    for y in Session(without_code(model, precision="fp32"), "cpu").run(None, {"x": x}):
        np.testing.assert_array_equal(y, x[x != 0])


def test_a_model_that_has_many_names_already():
    taken = SimpleNamespace(
        made={}, names={f"size{i or ''}" for i in range(5000)}, folder=SimpleNamespace(types={}, constants={})
    )
    assert [Sizes.fresh(taken, "size") for _ in range(2)] == ["size5000", "size5001"]  # type: ignore[arg-type]
