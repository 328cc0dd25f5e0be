"""Ops that move data, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tccompile.errors import InputError, UnsupportedError
from tccompile.ir.ops import Pointwise
from tccompile.ir.reference import evaluate
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session
from tests.networks import feeds
from tests.ops.common import Net, agrees

INT = np.int64


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT)


@pytest.mark.parametrize("image", [False, True])  # whether the input is an image inside, channels innermost
@pytest.mark.parametrize(
    ("op", "args", "attrs"),
    [
        ("Reshape", (ints(2, 3, -1),), {}),
        ("Reshape", (ints(6, 4, 5, 5),), {}),
        ("Flatten", (), {"axis": 1}),
        ("Unsqueeze", (ints(0, 3),), {}),
        ("Transpose", (), {"perm": [0, 2, 3, 1]}),
        ("Transpose", (), {"perm": [3, 1, 0, 2]}),
        ("Slice", (ints(1, 2), ints(9, -1), ints(1, 2)), {}),
        ("Slice", (ints(-1, 4), ints(-100, 0), ints(1, 3), ints(-2, -1)), {}),
        ("Expand", (ints(3, 1, 1, 1, 1),), {}),
        ("Tile", (ints(1, 2, 1, 3),), {}),
        ("Pad", (ints(0, 1, 2, 0, 0, 3, 0, 4), np.float32(1.5)), {}),
        ("Pad", (ints(0, 1, -2, 0, 0, 3, 0, -1),), {}),
        ("Pad", (ints(0, 0, 1, 2, 0, 0, 4, 3),), {"mode": "reflect"}),
        ("Pad", (ints(0, 0, 1, 2, 0, 0, 4, 3),), {"mode": "edge"}),
        ("Pad", (ints(0, 0, 1, 2, 0, 0, 4, 3),), {"mode": "wrap"}),
        ("Pad", (ints(2, 1), np.float32(0), ints(-1, 2)), {"mode": "constant"}),
        ("DepthToSpace", (), {"blocksize": 2, "mode": "DCR"}),
        ("DepthToSpace", (), {"blocksize": 2, "mode": "CRD"}),
        ("SpaceToDepth", (), {"blocksize": 5}),
        ("Gather", (ints(-5, 9, 11),), {"axis": 1}),
        ("Gather", (np.array(2, INT),), {"axis": 2}),
        ("Trilu", (np.array(1, INT),), {}),
        ("Trilu", (np.array(-1, INT),), {"upper": 0}),
    ],
)
def test_movement(image: bool, op: str, args: tuple, attrs: dict) -> None:
    if op == "Pad" and len(args) == 3:
        args = (ints(2, 1, 0, 3), *args[1:])
    net = Net(x=(2, 12, 5, 5))
    x = net("Conv", "x", net.normal(12, 12, 1, 1)) if image else "x"
    agrees(net.out(net(op, x, *args, **attrs)))


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize(("shapes", "axis"), [(((1, 8, 4, 4), (1, 3, 4, 4), (1, 5, 4, 4)), 1), (((1, 3, 2, 4), (1, 3, 5, 4)), 2)])
def test_concat_copies_into_slices_of_one_tensor(shapes: tuple, axis: int, image: bool) -> None:
    net = Net(**{f"x{i}": s for i, s in enumerate(shapes)})
    parts = [f"x{i}" for i in range(len(shapes))]
    if image:
        parts = [net("Conv", p, net.normal(s[1], s[1], 1, 1)) for p, s in zip(parts, shapes, strict=True)]
    whole = net("Concat", *parts, parts[0], axis=axis)
    program = agrees(net.out(net("Relu", whole)))
    slices = [t for t in program.tensors.values() if t.base]
    assert len(slices) == len(shapes) + 1
    parent = program.tensors[slices[0].storage]
    assert sum(t.padded[axis] for t in slices) == parent.padded[axis], "the last slice writes the padding too"


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("rows", [(), (7,), (2, 3)])
@pytest.mark.parametrize("known", [False, True])  # whether the indices are constants
def test_gather(axis: int, rows: tuple, known: bool) -> None:
    values = np.random.default_rng(0).integers(-5, 5, rows)
    net = Net(x=(5, 9, 6), i=(INT, rows))
    agrees(net.out(net("Gather", "x", values if known else "i", axis=axis)), {"i": values})


@pytest.mark.parametrize(("op", "kind"), [("GatherElements", INT), ("GatherElements", np.int32), ("GatherND", INT)])
def test_gather_by_rows_of_indices(op: str, kind: type) -> None:
    """Computed indices, of an image that lies with its channels innermost; what is gathered is sliced and added to."""
    rng = np.random.default_rng(0)
    values = rng.integers(-3, 3, (2, 4, 2) if op == "GatherND" else (2, 4, 3, 6)).astype(kind)
    net = Net(x=(2, 8, 3, 6), i=(kind, values.shape))
    image = net("Conv", "x", net.normal(8, 8, 1, 1))
    found = net(op, image, net("Add", "i", np.array(0, kind)), **({"batch_dims": 1} if op == "GatherND" else {"axis": 2}))
    part = net("Slice", found, ints(1), ints(3), ints(1))
    agrees(net.out(net("Mul", part, np.float32(2)), found), {"i": values})


def test_an_index_outside_its_axis_is_named() -> None:
    net = Net(x=(5, 9), i=(INT, (2,)))
    model = net.out(net("Gather", "x", "i", axis=0)).model()
    with pytest.raises(InputError, match="'i' holds the index -6 into an axis of 5 elements"):
        evaluate(lower(load(model)), feeds(model, 0) | {"i": ints(4, -6)}, sources(model))
    net = Net(x=(5, 9))
    with pytest.raises(UnsupportedError, match="has the index 5 into 5 elements"):
        lower(load(net.out(net("Gather", "x", ints(0, 5))).model()))


def test_split_with_sizes_and_by_number() -> None:
    net = Net(x=(2, 10, 3))
    a, b = net("Split", "x", ints(4, 6), outputs=2, axis=1)
    c, d, e = net("Split", "x", outputs=3, axis=1, num_outputs=3)
    agrees(net.out(a, b, c, d, e))


@pytest.mark.parametrize(
    "shape, target",
    [
        ((2, 0, 4), (0, 0, 2, 2)),
        ((3, 2, 13, 0), (0, 2, -1)),
        ((3, 2, 13, 0), (0, -1, 13, 1)),
        ((2, 0, 4), (-1, 2)),
        ((1, 0, 2, 3), (0, 0, 3, 2)),
    ],
)
def test_nothing_takes_another_shape(shape: tuple, target: tuple) -> None:
    net = Net(x=shape)
    agrees(net.out(net("Relu", net("Reshape", net("Relu", "x"), ints(*target)))), {"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("op", "args", "attrs"),
    [
        ("Gather", (ints(),), {"axis": 1}),
        ("Compress", (np.zeros(3, bool),), {"axis": 1}),
        ("Slice", (ints(2), ints(2), ints(1)), {}),
        ("GatherND", (np.zeros((0, 2), INT),), {}),
        ("TopK", (ints(0),), {"outputs": 2}),
    ],
)
def test_nothing_is_taken(op: str, args: tuple, attrs: dict) -> None:
    net = Net(x=(2, 3, 4))
    y = net(op, "x", *args, **attrs)
    y = y if isinstance(y, str) else y[0]
    agrees(net.out(y, net("Relu", net("Concat", y, y, axis=0))))


def test_reflection_of_more_than_the_extent_folds_twice() -> None:
    net = Net(x=(1, 1, 3, 9))
    agrees(net.out(net("Pad", "x", ints(0, 0, 0, 8, 0, 0, 2, 8), mode="reflect")))


def test_a_transpose_changes_no_memory() -> None:
    net = Net(x=(1, 12, 5, 5))
    y = net("Transpose", net("Conv", "x", net.normal(12, 12, 1, 1)), perm=[0, 2, 3, 1])
    program = agrees(net.out(net("Relu", y)))
    image, moved = (program.tensors[n] for n in ("t0", "t1"))
    assert sorted(zip(image.padded, image.strides, strict=True)) == sorted(zip(moved.padded, moved.strides, strict=True))


def test_a_vector_of_channels_is_padded_in_channels() -> None:
    net = Net(x=(2, 3))
    program = agrees(net.out(net("Relu", net("Unsqueeze", "x", ints(2, 3)))))
    assert program.tensors["t0"].padded == (2, 8, 1, 1)
    assert all(isinstance(op, Pointwise) for op in program.ops)


def test_a_cache_that_is_still_empty() -> None:
    """An input of several heads and no steps, as keys and values are before the first: no two of its elements share a place."""
    model = (net := Net(past=(1, 8, 0, 16), x=(1, 8, 3, 16))).out(net("Relu", net("Concat", "past", "x", axis=2))).model()
    inputs = {"past": np.empty((1, 8, 0, 16), np.float32), "x": net.normal(1, 8, 3, 16)}
    with Session(without_code(model, precision="fp32"), "cpu") as session:
        (y,) = session.run(None, inputs)
    np.testing.assert_array_equal(y, np.maximum(inputs["x"], 0))
