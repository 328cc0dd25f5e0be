"""How a block is shared out whose warpgroups make 64 whole rows of results at a time, with all weights in shared memory: see
`whole_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from tccompile.kernels.parts.operands import ROW, ROWS
from tccompile.kernels.spec import TiledMap, Value


@dataclass(frozen=True)
class RowTile:
    """What follows from these, of any such kernel.

    columns  of a row of results; result: bytes of one
    groups   warpgroups
    """

    columns: int
    result: int
    groups: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """The one whose `params` are among these."""
        return cls(**{field.name: params[field.name] for field in fields(cls)})

    @property
    def params(self) -> dict[str, Value]:
        """As parameters of the code."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def line(self) -> int:
        """Bytes of a row of a box of results."""
        return min(ROW, self.columns * self.result)

    @property
    def z_boxes(self) -> int:
        return self.columns * self.result // self.line

    @property
    def z_bytes(self) -> int:
        """Of a warpgroup's results."""
        return self.z_boxes * ROWS * self.line

    def boxes_of(self, results: TiledMap) -> TiledMap:
        """The map of results, for boxes of these rows."""
        return replace(results, box=(self.line // self.result, ROWS, 1), swizzle=self.line)
