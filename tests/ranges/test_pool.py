"""Which codes a range is run with, by what they gain and how many there are."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.ir.ops import Attention
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Code
from tccompile.load.model import read
from tccompile.options import Options
from tccompile.pipeline import Told, to_patterns
from tccompile.ranges.box import between
from tccompile.ranges.grid import _kind, _ranked
from tccompile.ranges.launches import key_of
from tccompile.ranges.pool import ENOUGH, FEW, LEFT, LESS, LITTLE, Case, Known, _by_use, _codes_for, _Costs, _most
from tccompile.ranges.steps import parts
from tccompile.schedule.choose import Candidate, candidates
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.sizes import Size
from tccompile.stages.progress import quiet
from tests.kernels.test_pair_sm90 import bottlenecks
from tests.ranges.models import Graph


def code(name: str) -> Code:
    return Code(name, ())


def points(ops: int, slower: float) -> list[list[Case]]:
    """Two sizes; each op has a code of its own, and at both sizes one that serves all, and takes longer by that share."""
    shared = frozenset([code("shared")])
    costs = [[(1.0, frozenset([code(f"own {i}")])), (1 + slower, shared)] for i in range(ops)]
    return [[Case(1 / ops, own, 1.5) for own in costs] for _ in range(2)]


@pytest.mark.parametrize(
    ("ops", "slower", "left", "own"),
    [
        (10, 0.0015, LITTLE, 0),
        (10, 0.0039, LITTLE, 5),
        (10, 0.011, LITTLE, 9),
        (2 * ENOUGH, 0.006, LESS, 0),
        (2 * ENOUGH, 0.013, LESS, ENOUGH - 2),
        (3 * FEW, 0.019, LEFT, 0),  # more than a few would be needed for that
        (3 * FEW, 0.039, LEFT, 3 * FEW // 2 - 1),
    ],
)
def test_codes_are_few_or_worth_it(ops, slower, left, own):
    asked = points(ops, slower)
    pool = _codes_for(asked, 1000)
    assert left.holds(_Costs(asked).losses(pool))
    assert sum(c.kernel.startswith("own") for c in pool) == own


def test_codes_come_in_the_order_of_their_use():
    """Of a pool in which one op of four has a code of its own, and one code serves nobody"""
    pool = frozenset([code("own 2"), code("shared"), code("other")])
    assert [c.kernel for c in _by_use(points(4, 0.01), pool)] == ["shared", "own 2", "other"]


@pytest.mark.parametrize(("weights", "most", "room"), [(1 << 10, 19, 1), (1 << 19, 30, 4), (1 << 24, 32, 128)])
def test_a_plan_of_few_weights_has_few_codes_and_parts(weights, most, room):
    """Twelve codes would do for one size; a plan of a megabyte has room for so many codes as are worth it."""
    tensor = dense("w", (weights,), DType.U8)
    program = Program((), (), {"w": tensor}, {"w": None}, (None,) * 40)
    costs = [[(1.0, frozenset([code(f"own {i}")]))] for i in range(12)]
    assert _most([[[Case(1 / 12, own, 1.5) for own in costs]]], [program]) == (most, room)


def test_no_size_loses_much():
    """One code is left out: one that many sizes would lose a little without, not what a single size would lose much without."""
    own, few, many = (frozenset([code(name)]) for name in ("own", "few", "many"))
    costs = [[(1.0, own)], [(1.0, few), (1.15, own)], *[[(1.0, many), (1.013, own)]] * 12]
    asked = [[Case(1.0, found, 1.5)] for found in costs]
    assert _codes_for(asked, 2) == own | few


def test_codes_are_so_many_at_most():
    """Those stay that inferences lose most without: the one that serves all ops."""
    pool = _codes_for(points(40, 0.3), 5)
    assert len(pool) == 5 and code("shared") in pool


@pytest.mark.parametrize(("bounds", "below"), [([(1, 512)], 9), ([(2, 32), (2, 77)], 12)])
def test_points_between_lie_among_small_sizes_and_large_ones(bounds, below):
    """Half of them evenly in how often sizes double: so many of 40 are in the lower half of the first size's doublings."""
    box = tuple(Size(f"n{i}", low, high, 1) for i, (low, high) in enumerate(bounds))
    found = between(box, 40)
    assert len(found) > 35 and all(n in size.all for point in found for n, size in zip(point, box, strict=True))
    assert below <= sum(point[0] ** 2 < box[0].low * box[0].high for point in found) <= below + 3


def test_what_no_point_has_candidates_for_has_none():
    """As where the pool has none for an op at these sizes: then all of its candidates are asked for."""
    own, kernel = Candidate(2.0, KERNELS[0], {}), Candidate(4.0, KERNELS[1], {})
    kind = _kind(0, [[], [], [own, kernel]], np.array([0.1, 0.1, 0.1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _ranked(kind, np.array([0, 1]), 0) == []
        assert [c.cost for c in _ranked(kind, np.array([1, 2]), 2)] == [2.0, 4.0]


def test_slow_candidates_of_the_pool_are_known_at_sizes_where_others_are_faster():
    """A code is for sizes of which the pool has no other, however slow it is there."""
    ranges = {"batch": Size("batch", 2, 40)}
    options = Options(archs=("sm_90a",), precision="fp16", ranges=ranges)
    (pattern,), _ = to_patterns(read(bottlenecks("batch")), options, Dump(None), quiet, Told())
    arch, known = ARCHS["sm_90a"], Known(NO_TIMINGS, [pattern])
    tried = known.pool(pattern, arch, ()).tried[id(pattern)]
    for point in known.points(pattern):
        for asked, of_op in zip(known.ops(pattern, point), tried, strict=True):
            slow = [(c, None) for c, _ in known.likely(asked, arch, ())]
            found = known._also(asked, slow, of_op, arch)
            assert {key_of(c) for c, codes in found if codes} == {key_of(c) for c in of_op}
            assert len({key_of(c) for c, _ in found}) == len(found)


def one_row(heads: int = 8, size: int = 64) -> onnx.ModelProto:
    """One row's attention to open many keys, as a decoder's."""
    g = Graph()
    weights = g.op("Softmax", g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 1, 3, 2])), axis=-1)
    y = g.op("MatMul", weights, "v")
    shapes = {"q": [1, heads, 1, size], "k": [1, heads, "keys", size], "v": [1, heads, "keys", size]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(g.nodes, "one_row", inputs, [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_keys_are_split_over_blocks_at_all_sizes():
    """Into as many parts as there are tiles, by one choice for a range of them; and a kernel that takes several times as long as
    others at some sizes is not taken for all."""
    options = Options(archs=("sm_90a",), precision="fp16", ranges={"keys": Size("keys", 2, 2047)})
    (pattern,), _ = to_patterns(read(one_row()), options, Dump(None), quiet, Told())
    arch, known = ARCHS["sm_90a"], Known(NO_TIMINGS, [pattern])
    found = parts(pattern, ("sm_90a",), (), NO_TIMINGS, known)
    assert len(found) <= 12
    for keys in (5, 100, 300, 448, 700, 1024, 1500, 2047):
        (part,) = (part for part in found if part.region.box[0].low <= keys <= part.region.box[0].high)
        program = pattern.at((keys,))
        (at,) = (i for i, op in enumerate(program.ops) if isinstance(op, Attention))
        choice, best = part.choices["sm_90a"][at], candidates(program.ops[at], program, arch)[0]
        assert choice.kernel.cost(program.ops[at], program, choice.config, arch) < 1.1 * best.cost
