"""Where things lie in a block's dynamic shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.arch import KIB
from tccompile.ir.extent import round_up

BARRIER = 8
"""Bytes of an mbarrier."""


@dataclass(frozen=True)
class Region:
    """A named part of shared memory.

    alignment  in bytes, a power of 2 and at most 1 KiB
    over       the region in whose place it begins, because that one's content is not needed any more by then
    """

    name: str
    bytes: int
    alignment: int = 16
    over: str | None = None


def barriers(name: str, count: int) -> Region:
    """The region of `count` mbarriers."""
    return Region(name, BARRIER * count, BARRIER)


def ring_barriers(name: str, stages: int) -> tuple[Region, Region]:
    """The regions of the barriers of the ring `name`, whose stages are a region of that name: see `Ring`."""
    return barriers(f"{name} full", stages), barriers(f"{name} empty", stages)


class SharedLayout:
    """Regions one after the other, from a multiple of 1 KiB on, at which swizzled boxes must begin.

    `layout[name]` is the offset of a region in bytes from there.
    """

    def __init__(self, *regions: Region) -> None:
        self._offsets: dict[str, int] = {}
        self.end = 0
        for region in regions:
            assert region.name not in self._offsets and KIB % region.alignment == 0, region
            at = round_up(self.end, region.alignment) if region.over is None else self[region.over]
            assert at % region.alignment == 0, f"{region.name} begins at {at}"
            self._offsets[region.name] = at
            self.end = max(self.end, at + region.bytes)

    def __getitem__(self, name: str) -> int:
        return self._offsets[name]

    @property
    def smem(self) -> int:
        """Bytes to ask for in a launch: 1 KiB more than is used, since shared memory may begin anywhere in it."""
        return self.end + KIB
