"""Entries with open extents → families of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tccompile.plan.file import Plan
from tccompile.plan.format import Family
from tccompile.plan.formulas import drawn
from tccompile.ranges.box import Region, count


def with_families(plan: Plan, regions: Sequence[Region]) -> Plan:
    """The plan with a family in the place of each entry that is for more than one point of its region."""
    fixed, families = [], []
    for entry, (box, product) in zip(plan.entries, regions, strict=True):
        if count(box) == 1:
            fixed.append(entry)
        else:
            sizes = tuple(size for size in box if len(size.all) > 1)
            others = math.prod(size.low for size in box if len(size.all) == 1)
            within = (-(-product[0] // others), product[1] // others) if product else ()
            families.append(Family(sizes, *drawn(entry, [size.name for size in sizes]), within))
    return replace(plan, entries=(*fixed, *(family.lowest for family in families)), families=tuple(families))
