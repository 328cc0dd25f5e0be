"""The lists of the benchmark of layers: sizes as published, layers that kernels take, and what its summary says."""

from __future__ import annotations

import csv
import math

import pytest

from tccompile.arch import ARCHS
from tccompile.ir.ops import Conv, Gemm, Pointwise
from tccompile.schedule.choose import candidates
from tests.bench.layers import DEEPBENCH, ConvLayer, GemmLayer, Row, deepbench, mean, summary


def test_sizes_are_those_that_deepbench_publishes():
    rows = []
    for path in DEEPBENCH.glob("*_conv.csv"):
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    assert len(rows) > 200
    for row in rows:
        n, c, h, w, k, r, s, *rest = (int(row[name]) for name in ("n", "c", "h", "w", "k", "r", "s", "p", "q"))
        strides, pads = ((int(row[f"{what}_h"]), int(row[f"{what}_w"])) for what in ("stride", "pad"))
        layer = ConvLayer((n, c, h, w), (k, c, r, s), pads, strides)
        assert layer.y == (n, k, *rest)
        assert layer.flop / 1e9 == pytest.approx(float(row["gflop"]), rel=1e-3)


def test_transposed_operands_are_read_as_the_lists_store_them():
    """In column-major order A (m, k) that is not transposed has m innermost, and B (k, n) has k innermost."""
    assert [type(op) for op, _ in GemmLayer(16, 1760, 1760, stored=(True, True)).parts()] == [Gemm]
    ((op, program),) = GemmLayer(16, 1760, 1024, stored=(True, False)).parts()
    assert (program.tensors["a"].strides, program.tensors["b"].strides) == ((1024, 1), (1, 1760))
    assert {"gemm_sm90", "gemm_mma"} <= {c.kernel.name for c in candidates(op, program, ARCHS["sm_90a"])}


def test_operands_without_aligned_rows_are_copied_first():
    copies = GemmLayer(16, 35, 1760, stored=(True, False)).parts()
    assert [type(op) for op, _ in copies] == [Pointwise, Gemm]
    _, program = copies[0]
    assert program.tensors["x"].shape == (1760, 35) and program.tensors["y"].strides == (1760, 1)
    assert [type(op) for op, _ in GemmLayer(16, 35, 2050, stored=(True, True)).parts()] == [Pointwise, Pointwise, Gemm]
    first = next(layer for layer in deepbench("training") if isinstance(layer, GemmLayer))
    assert (first.m, first.n, first.k, first.stored) == (16, 1760, 1760, (True, False))


def test_few_channels_are_two_steps_as_in_a_network():
    patches = ConvLayer((1, 3, 224, 224), (768, 3, 16, 16), (0, 0), (16, 16)).parts()
    assert [type(op) for op, _ in patches] == [Pointwise, Conv]
    last = ConvLayer((1, 32, 728, 1288), (3, 32, 9, 9), (0, 0), (1, 1)).parts()
    assert [type(op) for op, _ in last] == [Conv, Pointwise]
    assert len(ConvLayer((1, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1)).parts()) == 1


def test_every_part_has_candidates():
    layers = deepbench("inference")[::20] + deepbench("training")[::20]
    parts = [part for layer in layers for part in layer.parts()]
    assert {type(op) for op, _ in parts} == {Conv, Gemm, Pointwise}
    for op, program in parts:
        assert candidates(op, program, ARCHS["sm_90a"])[0].cost > 0


def test_summary_counts_and_means():
    layer = GemmLayer(1, 8, 8)
    rows = [Row("a", layer, ours=2.0, best=1.0, peer=8.0), Row("a", layer, ours=1.0, best=1.0, peer=1.0)]
    rows.append(Row("b", layer, ours=3.0, best=3.0, peer=math.nan, wrong=["odd"]))
    text = list(summary(rows))
    assert text[2] == "| a | 2 | 2.00 | 1.00 | 2.83 | 0.71 |"
    assert text[3] == "| b | 1 | nan | nan | nan | 1.00 |"
    assert [line.split(" | ")[5] for line in text if line.startswith("| a | gemm")] == ["1.00", "4.00"], "the worst first"
    assert text[-1] == "WRONG: gemm 1×8×8: odd"
    assert mean([2.0, 8.0, math.nan]) == pytest.approx(4.0)
