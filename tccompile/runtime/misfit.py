"""Why shapes that a plan for a range is given do not fit each other: two sizes of one name, or a sum that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tccompile.ir.extent import Shape
from tccompile.plan.format import Family
from tccompile.plan.formulas import Formula, Slot, computed


def misfit(family: Family, shapes: Mapping[str, Shape]) -> str:
    """What of the shapes contradicts what, in words; nothing if they fit each other, or if the family does not say."""
    seen: dict[int, tuple[int, str]] = {}
    sums: list[tuple[str, int, int]] = []
    for name, shape in shapes.items():
        extents: Sequence[int | Slot] = family.entry.program.tensors[name].shape
        if len(extents) != len(shape):
            return ""
        for axis, (extent, n) in enumerate(zip(extents, shape, strict=True)):
            if not isinstance(extent, Slot):
                continue
            place, (kind, number, _) = f"axis {axis} of {name!r}", family.formulas[extent.number]
            if kind != "size":
                sums.append((place, extent.number, n))
                continue
            before, where = seen.setdefault(number, (n, place))
            if before != n:
                return f"{family.sizes[number].name} is {before} by {where}, and {n} by {place}"
    if len(seen) < len(family.sizes):
        return ""
    numbers = computed(family.formulas, [seen[i][0] for i in range(len(family.sizes))])
    for place, formula, n in sums:
        if numbers[formula] != n:
            names = [size.name for size in family.sizes]
            here = [str(seen[i][0]) for i in range(len(family.sizes))]
            parts = _text(family.formulas, formula, names), _text(family.formulas, formula, here)
            return f"{place} is {parts[0]}, here {parts[1]} = {numbers[formula]}, and not {n}"
    return ""


def _text(formulas: Sequence[Formula], number: int, names: Sequence[str]) -> str:
    """A sum as people write it, with these names of the sizes."""
    op, a, b = formulas[number]
    if op == "size":
        return names[a]
    return str(a) if op == "int" else f"{_text(formulas, a, names)} {op} {_text(formulas, b, names)}"
