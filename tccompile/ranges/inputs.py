"""What a user says of sizes → a box, and the inputs' shapes at each of its points."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx

from tccompile.errors import UsageError
from tccompile.options import Axes, Shapes
from tccompile.ranges.box import Box, Point
from tccompile.sizes import Size, Sum, Term

Ranges = Mapping[str, Size | Axes | Sum]
"""What a user says of sizes, by the names of dimensions and inputs."""

AGAIN = "export it with open dimensions (torch.onnx.export's dynamic_shapes)"
"""What makes a range of a size that a model fixes."""


Terms = tuple[Term, ...]
"""What is added."""


@dataclass(frozen=True)
class OpenInputs:
    """The inputs of a model for a range.

    box   the sizes, in the order in which inputs have them
    axes  of each input: extents, the names of sizes, and sums of these, as exporters name the tokens before and those now, or an
          image that is eight times as high as another
    """

    box: Box
    axes: Mapping[str, tuple[int | str | Terms, ...]]

    def shapes(self, point: Point) -> Shapes:
        """The shapes of all inputs at a point."""
        sizes = dict(zip((size.name for size in self.box), point, strict=True))
        return {name: tuple(_extent(n, sizes) for n in extents) for name, extents in self.axes.items()}


def _extent(told: int | str | Terms, sizes: Mapping[str, int]) -> int:
    if isinstance(told, tuple):
        return sum(n * sizes[name] if name else n for n, name in told)
    return sizes[told] if isinstance(told, str) else told


def open_inputs(graph: onnx.GraphProto, weights: Collection[str], ranges: Ranges, fixed: Shapes) -> OpenInputs:
    """The inputs of a graph with these ranges; `fixed` are shapes of others.

    Raises UsageError for ranges that fit no input, and for dimensions without one.
    """
    found, box = dict[str, tuple[int | str | Terms, ...]](), dict[str, Size]()
    inputs = [v for v in graph.input if v.name not in weights]
    dimensions = {name for value in inputs for name in _names(value)}
    missing, summed = list[str](), set[str | int]()
    for value in inputs:
        declared = [d.dim_param or d.dim_value if d.WhichOneof("value") else "?" for d in value.type.tensor_type.shape.dim]
        told = ranges.get(value.name)
        if isinstance(told, Size) and value.name in dimensions:
            told = None  # a single size is the dimension's, and says nothing of an input of the same name
        summed |= {d for d in declared if isinstance(ranges.get(str(d)), Sum) and value.name not in fixed}
        if value.name in fixed:
            extents: list[int | str | Size | Terms] = [*fixed[value.name]]
        elif told is not None and not isinstance(told, Sum):
            extents = _told(value.name, told if isinstance(told, tuple) else (told,), declared)
        else:
            extents = [_named(d, ranges) if isinstance(d, str) else d for d in declared]
        missing += [f"{d!r} of input {value.name!r}" for d in extents if isinstance(d, str)]
        for size in extents:
            if isinstance(size, Size) and box.setdefault(size.name, size) != size:
                raise UsageError(f"two ranges for the size {size.name!r}: {_text(box[size.name])} and {_text(size)}")
        found[value.name] = tuple(e.name if isinstance(e, Size) else e for e in extents)
    for axes in found.values():
        for name in (name for axis in axes if isinstance(axis, tuple) for _, name in axis):
            if name and name not in box:
                raise UsageError(
                    f"{name!r} is a part of an input's extent only, and no extent of its own: give a shape (--shape)"
                )
    unused = [name for name in ranges if name not in box and name not in summed and (name not in found or name in fixed)]
    if unused:
        if whose := next((v.name for v in inputs if v.name in fixed and unused[0] in (v.name, *_names(v))), None):
            raise UsageError(f"--shape {whose}=… says already how large {unused[0]!r} is: leave one of the two away")
        names = dict.fromkeys(name for v in inputs for name in _names(v))
        there = f"its open dimensions are {', '.join(map(repr, names))}" if names else f"all its shapes are fixed: {AGAIN}"
        raise UsageError(
            f"the model has no dimension or input {unused[0]!r}; its inputs are {', '.join(map(repr, found))}; {there}"
        )
    if missing:
        raise UsageError(
            f"no size is known for {', '.join(missing)}: give a range (--range NAME=1..64, NAME=PAST+NEW "
            "for what is a sum of others, or NAME=8*H for so many times one), or a shape (--shape)"
        )
    return OpenInputs(tuple(box.values()), found)


def _names(value: onnx.ValueInfoProto) -> list[str]:
    """What an input's dimensions are called that have a name."""
    return [d.dim_param for d in value.type.tensor_type.shape.dim if d.dim_param]


def _named(dimension: str, ranges: Ranges) -> str | Size | Terms:
    """What is known of a dimension; its name if that is nothing."""
    told = ranges.get(dimension)
    if isinstance(told, Size):
        return told
    terms = told.terms if isinstance(told, Sum) else Sum.of(dimension).terms  # as "past + 1"
    unknown = [name for _, name in terms if name and not isinstance(ranges.get(name), Size)]
    if unknown and isinstance(told, Sum):
        way_out = f"give it one, as --range {shlex.quote(unknown[0])}=1..64"
        raise UsageError(f"{dimension!r} is given as {told}, and {unknown[0]!r} has no range of its own: {way_out}")
    return dimension if unknown else terms


def _told(name: str, axes: Axes, declared: list[str | int]) -> list[int | str | Size | Terms]:
    """An input's axes as the user gives them, held to what the model declares; a size has the dimension's name, if it has one."""
    if len(axes) != len(declared):
        names = [d for d in declared if isinstance(d, str) and d != "?"]
        ways = [
            f"say all, in the order ({', '.join(map(str, declared))})",
            *(f"or that of {d!r} alone, by this name" for d in names[:1]),
        ]
        raise UsageError(f"input {name!r} has {len(declared)} axes, and its range {len(axes)}: {', '.join(ways)}")
    out: list[int | str | Size | Terms] = []
    for number, (axis, there) in enumerate(zip(axes, declared, strict=True)):
        if isinstance(there, int) and axis != there:
            said = _text(axis) if isinstance(axis, Size) else axis
            way_out = f": {AGAIN}" if isinstance(axis, Size) else ""
            raise UsageError(f"axis {number} of input {name!r} is {there} in the model, not {said}{way_out}")
        named = isinstance(axis, Size) and isinstance(there, str) and there != "?"
        out.append(replace(axis, name=there) if named else axis)  # type: ignore[arg-type, type-var]
    return out


def _text(size: Size) -> str:
    return f"{size.low}..{size.high}" + (f":{size.step}" if size.step != 1 else "")
