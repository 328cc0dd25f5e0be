"""The lists of layers in 8 bits: what the peer takes of them, and that Tensor Cores multiply them as they are."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tccompile.arch import ARCHS
from tccompile.ir.types import DType
from tccompile.schedule.choose import candidates
from tests.bench.eight import Convolution, Product, products
from tests.bench.layers import ConvLayer, Row

LISTS = {"square": 4, "DeepBench inference": 84, "DeepBench training": 83}
"""Before those of the zoo, whose networks take seconds to read."""


def before_the_zoo(kind: DType, result: str) -> list[Row]:
    return list(islice(products(kind, result, False), sum(LISTS.values())))


def test_lists_are_whole():
    rows = before_the_zoo(DType.E4M3, "float16")
    assert Counter(r.group for r in rows) == LISTS
    assert len({(r.group, r.layer) for r in rows}) == len(rows)


@pytest.mark.parametrize(
    ("kind", "size", "padded"),
    [
        (DType.I8, (5, 35, 2050), (17, 40, 2056)),
        (DType.I8, (64, 40, 2048), (64, 40, 2048)),
        (DType.E4M3, (5, 35, 2050), (5, 48, 2064)),
    ],
)
def test_sizes_that_the_peer_refuses_are_padded_and_marked(kind, size, padded):
    layer = Product(*size, kind)
    assert layer.padded == padded
    assert ("padded" in str(layer)) is (size != padded)


@pytest.mark.parametrize("kind", [DType.I8, DType.E4M3])
def test_products_are_multiplied_in_8_bits(kind):
    for row in before_the_zoo(kind, "float16")[::40]:
        ((op, program),) = row.layer.parts()
        assert candidates(op, program, ARCHS["sm_90a"])[0].kernel.tensor_cores, row.layer


@pytest.mark.parametrize("kind", [DType.U8, DType.E4M3])
def test_convolutions_are_multiplied_in_8_bits(kind):
    layer = ConvLayer((32, 256, 14, 14), (256, 256, 3, 3), (1, 1), (1, 1))
    ((op, program),) = Convolution(layer, kind).parts()
    assert candidates(op, program, ARCHS["sm_90a"])[0].kernel.tensor_cores
