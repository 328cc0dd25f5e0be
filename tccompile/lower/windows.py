"""Sliding windows: the attributes that convolutions and pools share."""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.ir.extent import Shape, ceil_div
from tccompile.lower.builder import Builder

SPATIAL = (1, 2, 3)
"""The numbers of spatial axes that image ops take."""


@dataclass(frozen=True)
class Window:
    """A window that slides over the spatial axes; tuples have one entry for each of them."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # at the start
    end_pads: tuple[int, ...]

    def along(self, axes: slice) -> Window:
        """The window along some of the axes."""
        return Window(self.size[axes], self.strides[axes], self.dilations[axes], self.pads[axes], self.end_pads[axes])

    def reach(self, extents: Shape, outputs: Shape) -> tuple[int, ...]:
        """Elements beyond the end of each axis that the last window covers (negative if it ends before)."""
        spans = ((k - 1) * d + 1 for k, d in zip(self.size, self.dilations, strict=True))
        last = zip(extents, outputs, self.strides, self.pads, spans, strict=True)
        return tuple((out - 1) * stride - pad + span - n for n, out, stride, pad, span in last)


def window(b: Builder, extents: Shape, size: tuple[int, ...]) -> Window:
    """The current node's window over spatial `extents`, with `auto_pad` resolved as the ONNX specification says."""
    rank = len(extents)
    if rank not in SPATIAL:
        raise b.refuse(f"it has {rank} spatial axes", "images of one to three spatial axes are supported")
    strides = tuple(b.attr("strides", [1] * rank))
    dilations = tuple(b.attr("dilations", [1] * rank))
    pads = list(b.attr("pads", [0] * 2 * rank))
    auto = b.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        for i in range(rank):
            out = ceil_div(extents[i], strides[i])
            total = max((out - 1) * strides[i] + (size[i] - 1) * dilations[i] + 1 - extents[i], 0)
            small, large = total // 2, total - total // 2
            pads[i], pads[rank + i] = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        pads = [0] * 2 * rank
    return Window(size, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]))
