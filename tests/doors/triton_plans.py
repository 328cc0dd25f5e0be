"""The plans of test_triton.py: `python -m tests.doors.triton_plans FOLDER` writes them where the compiler is."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx

from tccompile.options import as_sizes
from tccompile.pipeline import without_code
from tests.rewrites.common import Net


def rows(count: int | str) -> onnx.ModelProto:
    """A convolution and a mean of images, each by itself."""
    n = Net(x=(count, 3, 8, 8))
    h = n("Relu", n("Conv", "x", n.normal(8, 3, 3, 3, scale=0.2), n.normal(8), pads=[1] * 4))
    return n.out(n("Flatten", n("GlobalAveragePool", h))).model()


def write(folder: Path) -> Path:
    """A network of 8 rows, one of 1 to 24, and a product whose operands have no common axis."""
    folder.mkdir(exist_ok=True, parents=True)
    without_code(rows(8), precision="fp32").save(folder / "rows.plan")
    without_code(rows("n"), precision="fp32", ranges=as_sizes({"n": (1, 24)})).save(folder / "range.plan")
    n = Net(x=(4, 3), y=(3, 2))
    without_code(n.out(n("MatMul", "x", "y")).model(), precision="fp32").save(folder / "product.plan")
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
