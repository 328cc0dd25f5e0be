from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.common import Net, check

i = np.array
CASES = {
    # name: (x, how, what is left beside the Relu and the Neg around it)
    "flatten": ((2, 3, 4), lambda n, x: n("Flatten", x), {"Reshape": 1}),
    "squeeze and unsqueeze": (
        (2, 1, 4), lambda n, x: n("Unsqueeze", n("Squeeze", x, i([1])), i([0, 3])), {"Reshape": 1}),
    "there and back": ((2, 1, 4), lambda n, x: n("Unsqueeze", n("Squeeze", x, i([1])), i([1])), {}),
    "reshapes": ((2, 6, 4), lambda n, x: n("Reshape", n("Reshape", x, i([12, 4])), i([3, -1])), {"Reshape": 1}),
    "transposes": ((2, 3, 4), lambda n, x: n("Transpose", n("Transpose", x, perm=[1, 2, 0])), {"Transpose": 1}),
    "transposes that cancel": (
        (2, 3, 4), lambda n, x: n("Transpose", n("Transpose", x, perm=[1, 2, 0]), perm=[2, 0, 1]), {}),
    "a transpose of ones": ((2, 1, 4, 1), lambda n, x: n("Transpose", x, perm=[1, 0, 3, 2]), {"Reshape": 1}),
    "a slice of everything": ((2, 3), lambda n, x: n("Slice", x, i([0]), i([1 << 40]), i([1])), {}),
    "an expansion to itself": ((2, 3), lambda n, x: n("Expand", x, i([2, 1])), {}),
    "a pad of nothing": ((2, 3), lambda n, x: n("Pad", x, i([0, 0, 0, 0])), {}),
    "a tile of one": ((2, 3), lambda n, x: n("Tile", x, i([1, 1])), {}),
    "a concatenation of one": ((2, 3), lambda n, x: n("Concat", x, axis=1), {}),
    "softmax of flat axes": (
        (2, 5, 1, 1), lambda n, x: n("Reshape", n("Softmax", n("Flatten", x), axis=1), i([2, 5, 1, 1])), {"Softmax": 1}),
    "a true transpose": ((2, 3, 4), lambda n, x: n("Transpose", x), {"Transpose": 1}),
    "a reversal": ((2, 3), lambda n, x: n("Slice", x, i([-1]), i([-1000]), i([1]), i([-1])), {"Slice": 1}),
    "a roll": ((2, 3), lambda n, x: n("Pad", x, i([0, 1, 0, -1])), {"Pad": 1}),
    "softmax over two axes": (
        (2, 5, 3, 1), lambda n, x: n("Reshape", n("Softmax", n("Flatten", x), axis=1), i([2, 5, 3, 1])),
        {"Softmax": 1, "Reshape": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_between_others(case):
    shape, how, left = CASES[case]
    net = Net(x=shape)
    check(net.out(net("Neg", how(net, net("Relu", "x")))), {"Relu": 1, "Neg": 1} | left)


@pytest.mark.parametrize("case", CASES)
def test_at_an_output(case):
    shape, how, left = CASES[case]
    net = Net(x=shape)
    check(net.out(how(net, net("Relu", "x"))), {"Relu": 1} | left)


def test_between_input_and_output_one_node_stays():
    net = Net(x=(2, 3))
    check(net.out(net("Reshape", "x", i([2, 3]))), {"Reshape": 1})


def test_between_two_outputs_one_node_stays():
    net = Net(x=(2, 3))
    y = net("Relu", "x")
    check(net.out(y, net("Reshape", y, i([2, 3]))), {"Relu": 1, "Reshape": 1})


def _shuffle(n: Net, split, perm, shape) -> str:
    return n("Reshape", n("Transpose", n("Reshape", "x", i(split)), perm=perm), i(shape))


SHUFFLES = {
    "DCR": ((2, 12, 3, 5), [2, 2, 2, 3, 3, 5], [0, 3, 4, 1, 5, 2], [2, 3, 6, 10], "DepthToSpace"),
    "CRD": ((2, 12, 3, 5), [2, 3, 2, 2, 3, 5], [0, 1, 4, 2, 5, 3], [2, 3, 6, 10], "DepthToSpace"),
    "CRD by 3": ((1, 9, 2, 5), [1, 1, 3, 3, 2, 5], [0, 1, 4, 2, 5, 3], [1, 1, 6, 15], "DepthToSpace"),
    "space to depth": ((2, 3, 6, 4), [2, 3, 3, 2, 2, 2], [0, 3, 5, 1, 2, 4], [2, 12, 3, 2], "SpaceToDepth"),
}


@pytest.mark.parametrize("case", SHUFFLES)
def test_shuffles(case):
    x, split, perm, shape, op = SHUFFLES[case]
    net = Net(x=x)
    check(net.out(_shuffle(net, split, perm, shape)), {op: 1})


@pytest.mark.parametrize(
    ("x", "split", "perm", "shape"),
    [
        ((2, 18, 3, 5), [2, 3, 2, 3, 3, 5], [0, 1, 4, 2, 5, 3], [2, 3, 6, 15]),  # a block that is not square
        ((2, 12, 3, 5), [2, 3, 2, 2, 3, 5], [0, 1, 4, 3, 5, 2], [2, 3, 6, 10]),  # rows and columns of the block exchanged
        ((2, 3, 6, 4), [2, 3, 3, 2, 2, 2], [0, 1, 3, 5, 2, 4], [2, 12, 3, 2]),  # channels outermost
    ],
)
def test_near_misses_stay(x, split, perm, shape):
    net = Net(x=x)
    check(net.out(_shuffle(net, split, perm, shape)), {"Reshape": 2, "Transpose": 1})
