"""Ensembles of decision trees against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.ir.ops import Trees
from tccompile.load.model import load
from tccompile.lower.graph import lower
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.ops.test_classical import INT, TRANSFORMS, F, agrees, bound, model

ROWS, FEATURES = 41, 6
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def rows(seed: int = 0, holes: bool = False) -> np.ndarray:
    """Few values, so that many are equal to thresholds."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (ROWS, FEATURES)).astype(np.float32) / 10
    return np.where(rng.random(x.shape) < 0.2, np.float32(np.nan), x) if holes else x


def forest(
    trees: int,
    depth: int,
    ids: list[int],
    modes: tuple[str, ...] = MODES[:1],
    what: str = "target",
    positive: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Random trees, whose leaves have a weight for each of the targets or classes, as attributes."""
    rng = np.random.default_rng(seed)
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids", "missing_value_tracks_true")
    nodes: dict[str, list] = {f"nodes_{name}": [] for name in names}
    leaves: dict[str, list] = {f"{what}_{name}": [] for name in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, number: int, level: int) -> int:
        """Adds a node of this number and all below it; the next number."""
        leaf = level == depth or (level > 1 and rng.random() < 0.2)
        place = len(nodes["nodes_treeids"])
        values = (tree, number, int(rng.integers(FEATURES)), float(np.float32(rng.integers(-4, 5) / 10)),
                  "LEAF" if leaf else str(rng.choice(modes)), 0, 0, int(rng.integers(2)))  # fmt: skip
        for name, value in zip(nodes, values, strict=True):
            nodes[name].append(value)
        if leaf:
            for i in ids:
                weight = rng.random() / trees if positive else rng.standard_normal()
                for name, value in zip(leaves, (tree, number, i, float(np.float32(weight))), strict=True):
                    leaves[name].append(value)
            return number + 1
        nodes["nodes_truenodeids"][place] = number + 1
        nodes["nodes_falsenodeids"][place] = following = grow(tree, number + 1, level + 1)
        return grow(tree, following, level + 1)

    for tree in range(trees):
        grow(tree, 0, 0)
    return nodes | leaves


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    """What is equal to a threshold, and NaN, which goes where `missing_value_tracks_true` says."""
    x = rows(holes=True)
    attributes = forest(7, 4, [0], (mode,))
    proto = model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=1, **attributes)
    agrees(proto, {"x": x})
    del attributes["nodes_missing_value_tracks_true"]
    agrees(model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=1, **attributes), {"x": x})


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("base", [False, True])
def test_regressors(aggregate: str, targets: int, base: bool) -> None:
    x = rows()
    more = {"base_values": [0.5, -1.0, 2.0][:targets]} if base else {}
    attributes = forest(9, 4, [*range(targets)], MODES) | more
    proto = model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=targets, aggregate_function=aggregate, **attributes)
    agrees(proto, {"x": x}, 1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 3])
def test_transforms(targets: int, transform: str) -> None:
    x = rows()
    attributes = forest(5, 3, [*range(targets)], positive=True)
    proto = model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=targets, post_transform=transform, **attributes)
    agrees(proto, {"x": x}, bound(transform))


def test_a_target_that_no_leaf_names_is_zero() -> None:
    x = rows()
    for aggregate in ("SUM", "MIN", "MAX"):
        attributes = forest(5, 3, [0, 2])
        proto = model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=3, aggregate_function=aggregate, **attributes)
        assert not agrees(proto, {"x": x}, 1e-5)["y0"][:, 1].any()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_features_of_other_types(dtype: type) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (ROWS, FEATURES)).astype(dtype)
    attributes = forest(5, 4, [0, 1, 2], what="class")
    attributes["nodes_values"] = [round(10 * v) / 1.0 for v in attributes["nodes_values"]]
    agrees(model("TreeEnsembleClassifier", {"x": x}, [INT, F], classlabels_int64s=[5, 6, 7], **attributes), {"x": x}, 1e-5)


@pytest.mark.parametrize("transform", [*TRANSFORMS[:3], "PROBIT"])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("base", [0, 1, 2])
@pytest.mark.parametrize(("classes", "ids"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3])])
def test_classifiers(classes: int, ids: list[int], base: int, positive: bool, transform: str) -> None:
    """Labels and scores of two classes depend on which of them have weights, on the weights' signs, and on the base values."""
    base = classes if classes > 2 and base else base
    x = rows(1)
    attributes = forest(7, 3, ids, what="class", positive=positive) | {"classlabels_int64s": [10, 20, 5, 7][:classes]}
    if base:
        attributes["base_values"] = [0.05, 0.1, -0.2, 0.3][:base]
    proto = model("TreeEnsembleClassifier", {"x": x}, [INT, F], post_transform=transform, **attributes)
    if base > 1 and (classes == 1 or ids == [1]):
        reason = "2 base values where all weights are for one class"
    elif transform == "PROBIT" and classes == 2 and ids == [0] and base < 2:
        reason = "undefined after PROBIT"
    else:
        agrees(proto, {"x": x}, bound(transform))
        return
    with pytest.raises(UnsupportedError, match=reason):
        load(proto)


@pytest.mark.parametrize("mode", MODES)
def test_thresholds_that_are_doubles(mode: str) -> None:
    """Between two float32, as features cast to double meet them: no rounding moves a feature to the other side."""
    x = rows()
    attributes = forest(7, 4, [0], (mode,))
    values = np.array(attributes.pop("nodes_values"))
    attributes["nodes_values_as_tensor"] = numpy_helper.from_array(np.round(values, 1))  # 0.1 is no float32
    weights = np.array(attributes.pop("target_weights"))
    attributes["target_weights_as_tensor"] = numpy_helper.from_array(weights)
    proto = model("TreeEnsembleRegressor", {"wide": x.astype(np.float64)}, [F], n_targets=1, **attributes)
    proto.graph.node.insert(0, onnx.helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.DOUBLE))
    proto.graph.input[0].name, proto.graph.input[0].type.tensor_type.elem_type = "x", TensorProto.FLOAT
    agrees(proto, {"x": x}, 1e-5)


def numbered(members: bool, targets: int = 1, seed: int = 0) -> dict[str, Any]:
    """A chain of branches for each of two trees, as TreeEnsemble has them; some ask for membership."""
    rng = np.random.default_rng(seed)
    n, roots = 8, [0, 5]
    modes = rng.integers(0, 6, n).astype(np.uint8)
    if members:
        modes[[1, 5, 7]] = 6
    ends = [i in (4, 7) for i in range(n)]
    leaf = np.arange(n)
    sets = [1, 3, 2, np.nan, 0, np.nan, 4, 1, 3, np.nan] if members else []  # ONNX Runtime takes small integers only
    split = (rng.integers(-4, 5, n) / 10).astype(np.float32)
    more = {"membership_values": numpy_helper.from_array(np.array(sets, np.float32))} if members else {}
    return more | {
        "tree_roots": roots, "nodes_featureids": rng.integers(0, FEATURES, n).tolist(),
        "nodes_modes": numpy_helper.from_array(modes),
        "nodes_splits": numpy_helper.from_array(split), "nodes_truenodeids": leaf.tolist(), "nodes_trueleafs": [1] * n,
        "nodes_falsenodeids": [n if end else i + 1 for i, end in enumerate(ends)], "nodes_falseleafs": [int(end) for end in ends],
        "leaf_targetids": rng.integers(0, targets, n + 1).tolist(),
        "nodes_missing_value_tracks_true": rng.integers(0, 2, n).tolist(),
        "leaf_weights": numpy_helper.from_array(rng.standard_normal(n + 1).astype(np.float32)), "n_targets": targets,
    }  # fmt: skip


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
def test_numbered_trees(members: bool, aggregate: int, targets: int) -> None:
    x = 10 * rows() if members else rows()
    for seed in range(3):
        attributes = numbered(members, targets, seed)
        agrees(model("TreeEnsemble", {"x": x}, [F], opset=5, aggregate_function=aggregate, **attributes), {"x": x}, 1e-5)


@pytest.mark.parametrize("transform", range(5))
def test_transforms_of_numbered_trees(transform: int) -> None:
    """ONNX Runtime takes 1 for LOGISTIC and 2 for SOFTMAX, and the standard says the opposite."""
    x = rows()
    attributes = numbered(False, 3)
    attributes["leaf_weights"] = numpy_helper.from_array(np.random.default_rng(0).random(9).astype(np.float32) / 2)
    proto = model("TreeEnsemble", {"x": x}, [F], opset=5, aggregate_function=1, post_transform=transform, **attributes)
    if transform in (1, 2):
        with pytest.raises(UnsupportedError, match=r"means (SOFTMAX|LOGISTIC) in the standard"):
            load(proto)
    else:
        agrees(proto, {"x": x}, 1e-3 if transform == 4 else 1e-5)


def test_a_chain_is_as_deep_as_it_is() -> None:
    """A tree with one long way: the depth that a walk may take is that of the tree."""
    n = 300
    x = np.random.default_rng(0).random((ROWS, 1)).astype(np.float32)
    ids = [*range(n), n]
    attributes = {
        "nodes_treeids": [0] * (2 * n + 1), "nodes_nodeids": [*range(2 * n + 1)], "nodes_featureids": [0] * (2 * n + 1),
        "nodes_values": [(i + 1) / n for i in range(n)] + [0.0] * (n + 1), "nodes_modes": ["BRANCH_LEQ"] * n + ["LEAF"] * (n + 1),
        "nodes_truenodeids": [n + i for i in range(n)] + [0] * (n + 1),
        "nodes_falsenodeids": [*range(1, n), 2 * n] + [0] * (n + 1),
        "target_treeids": [0] * (n + 1), "target_nodeids": [n + i for i in ids], "target_ids": [0] * (n + 1),
        "target_weights": [float(i) for i in ids],
    }  # fmt: skip
    proto = model("TreeEnsembleRegressor", {"x": x}, [F], n_targets=1, **attributes)
    agrees(proto, {"x": x})
    (op,) = (op for op in lower(load(proto)).ops if isinstance(op, Trees))
    assert op.depth == n


BROKEN = {
    "nodes_falsenodeids": (lambda v: [1, *v[1:]], "trees have"),
    "nodes_truenodeids": (lambda v: [99, *v[1:]], "has no node 99"),
    "nodes_nodeids": (lambda v: [1, *v[1:]], "the same tree and number"),
    "nodes_featureids": (lambda v: [FEATURES, *v[1:]], "features"),
    "nodes_modes": (lambda v: [b"BRANCH_AT", *v[1:]], "BRANCH_AT"),
    "nodes_values": (lambda v: v[1:], "nodes_values are"),
    "target_ids": (lambda v: [1, *v[1:]], "targets"),
    "target_weights": (lambda v: v[1:], "target_weights are"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_trees_are_refused_by_their_node(name: str) -> None:
    change, reason = BROKEN[name]
    attributes = forest(2, 3, [0])
    attributes[name] = change(attributes[name])
    proto = model("TreeEnsembleRegressor", {"x": rows()}, [F], n_targets=1, **attributes)
    with pytest.raises(UnsupportedError, match=f"treeensembleregressor.*{reason}"):
        lower(load(proto))


def test_a_cycle_is_refused() -> None:
    attributes = numbered(False) | {"nodes_falsenodeids": [1, 2, 3, 4, 0, 6, 7, 8], "nodes_falseleafs": [0] * 7 + [1]}
    with pytest.raises(UnsupportedError, match="cycles"):
        lower(load(model("TreeEnsemble", {"x": rows()}, [F], opset=5, **attributes)))


@pytest.mark.parametrize("precision", ["mixed", "fp16"])
def test_what_trees_compare_is_not_rounded(precision: str) -> None:
    """Thresholds lie closer to features than fp16 resolves; features are computed."""
    x = (1 + np.arange(ROWS * FEATURES).reshape(ROWS, FEATURES) * np.float32(2**-20)).astype(np.float32)
    attributes = forest(9, 4, [0, 1, 2], what="class")
    attributes["nodes_values"] = [float(x[7 * i % ROWS, f] * np.float32(3)) for i, f in enumerate(attributes["nodes_featureids"])]
    proto = model("TreeEnsembleClassifier", {"wide": x}, [INT, F], classlabels_int64s=[5, 6, 7], **attributes)
    three = onnx.helper.make_tensor("three", F, (1,), [3.0])
    proto.graph.node.insert(0, onnx.helper.make_node("Mul", ["x", "three"], ["wide"]))
    proto.graph.initializer.append(three)
    proto.graph.input[0].name = "x"
    want = agrees(proto, {"x": x}, 1e-5)
    with Session(without_code(proto, precision=precision), "cpu") as session:
        labels, scores = session.run(None, {"x": x})
    assert len(set(want["y0"].tolist())) > 1
    np.testing.assert_array_equal(labels, want["y0"])
    assert np.allclose(scores, want["y1"], rtol=2e-3 if precision == "fp16" else 1e-6)
