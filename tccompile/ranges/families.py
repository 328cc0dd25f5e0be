"""Entries with open extents → families of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tccompile.plan.file import Plan
from tccompile.plan.format import Family
from tccompile.plan.formulas import drawn
from tccompile.ranges.box import Box, count


def with_families(plan: Plan, boxes: Sequence[Box]) -> Plan:
    """The plan with a family in the place of each entry that is for more than one point of its box."""
    fixed, families = [], []
    for entry, box in zip(plan.entries, boxes, strict=True):
        if count(box) == 1:
            fixed.append(entry)
        else:
            sizes = tuple(size for size in box if len(size.all) > 1)
            families.append(Family(sizes, *drawn(entry, [size.name for size in sizes])))
    return replace(plan, entries=(*fixed, *(family.lowest for family in families)), families=tuple(families))
