"""Where a range is divided: between two points that are compared, where tiles of one part just fill the multiprocessors."""

import pytest
from onnx import TensorProto

from tccompile.arch import ARCHS
from tccompile.options import Options
from tccompile.pipeline import Dump, Told, quiet, read, to_patterns
from tccompile.ranges.box import Region
from tccompile.ranges.grid import Grid, _near, _roundest
from tccompile.ranges.pool import Known
from tccompile.schedule.timings import NO_TIMINGS
from tccompile.sizes import Size
from tests.ranges.models import Graph

H, W = Size("h", 64, 1024, 8), Size("w", 64, 1024, 8)


def grid(kind: str, **ranges: Size) -> Grid:
    """Of a convolution of images of open height and width, or of a product of open rows."""
    g = Graph()
    if kind == "Conv":
        y, shape = g.op("Conv", "x", g.weight(128, 128, 3, 3), pads=[1, 1, 1, 1]), [1, 128, "h", "w"]
    else:
        y, shape = g.op("MatMul", "x", g.weight(768, 2304)), ["rows", 768]
    options = Options(archs=("sm_90a",), precision="fp16", ranges=ranges)
    model = read(g.model("x", TensorProto.FLOAT, shape, y))
    (pattern,), _ = to_patterns(model, options, Dump(None), quiet, Told())
    return Grid(pattern, ARCHS["sm_90a"], (), Known(NO_TIMINGS, [pattern]))


@pytest.mark.parametrize("wanted", [304_128, 4096, 1_048_576])
def test_points_of_a_product_are_as_square_as_may_be(wanted):
    """At most so large, and within 1 % of it."""
    point = _near(Region((H, W)), 2, wanted, 0.99 * wanted, wanted)
    assert point is not None and point[0] in H and point[1] in W and 0.99 * wanted <= point[0] * point[1] <= wanted
    assert max(point) < 1.5 * min(point)


def test_where_no_point_is_there_is_none():
    assert _near(Region((H, W)), 2, 4097, 4097, 4100) is None
    assert _near(Region((H,)), 0, 65, 65, 71) is None


def test_the_roundest_value_is_what_most_tiles_end_with():
    assert _roundest(Region((Size("n", 1, 512),)), 0, 100, 135) == 128
    assert _roundest(Region((H, W)), 2, 30_000, 40_000) == 32_768


@pytest.mark.parametrize(("kind", "ranges"), [("Conv", {"h": H, "w": W}), ("MatMul", {"rows": Size("rows", 2, 4096)})])
def test_a_range_is_divided_where_the_one_part_becomes_slower(kind, ranges):
    """To 1 % of the size, or the product of sizes, by which it is: 1 % before and behind that, what is chosen is no slower than
    what is chosen for the other part. A few more tiles than multiprocessors may take half as long again."""
    own = grid(kind, **ranges)
    region = Region(own.pattern.box)
    number = len(own.columns) - 1
    inside = own.inside(region)
    found = own._divided(number, inside)
    assert found is not None
    low, high = found[1]
    end = own._end(region, number, (low, high))
    at = own.columns[number][inside]
    below, above = own._taken(inside[at <= low]), own._taken(inside[at >= high])
    assert low < end <= high
    for near, ours, theirs in ((0.99 * end, below, above), (1.01 * end, above, below)):
        if low < near < high and (point := _near(region, number, near, low + 1, high - 1)) is not None:
            assert own._time_us(ours, theirs, point) <= own._time_us(theirs, ours, point)
