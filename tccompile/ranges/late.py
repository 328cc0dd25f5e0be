"""Which constants of a range's programs are computed when the plan runs, in place of being stored.

Most constants are the same at all sizes, or parts of one table (`ranges.tables`), or numbers that formulas give. The others come
from a few nodes: a Range to a size, a mask that is compared with it, a Gather of positions behind those that were there before.
These nodes, and those before them as far as need be, are not folded (`load.late`). The tables of a Resize to given extents are
computed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper
import onnx_graphsurgeon as gs

from tccompile.ir.expr import walk
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import same
from tccompile.load.constants import Weight, held
from tccompile.load.late import Seen, computing, watching
from tccompile.load.valid import DECIDES
from tccompile.lower.fourier import late_matrix
from tccompile.lower.registry import CONVERTERS
from tccompile.lower.resize_late import late_axis, late_scales
from tccompile.lower.sample import late_places
from tccompile.ranges.box import Box, Point, scattered, without_ones
from tccompile.ranges.fit import as_counts
from tccompile.ranges.tables import tables

PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
"""Operators whose operands are no views."""

ROUNDS = 4
"""How often is looked for what cannot be stored, at most: what is computed is made of constants that may be such, too."""


@dataclass(frozen=True)
class Trace:
    """What there was at one point: what was folded, the nodes left that are TABLED, and the program."""

    seen: Seen
    graph: gs.Graph
    program: Program


def traced(load: Callable[[], gs.Graph], to_program: Callable[[gs.Graph], Program]) -> Trace:
    """A trace of what `load` and `to_program` make."""
    with watching() as seen:
        graph = load()
    tabled = gs.Graph([node for node in graph.nodes if node.op in TABLED])
    return Trace(seen, tabled.copy() if tabled.nodes else tabled, to_program(graph))


def _points(box: Box) -> list[Point]:
    """Sizes by which is decided what is computed: near the least ones, of either parity, since what is made even may be so
    already; one between; and the greatest ones, which come last."""
    part = without_ones(box)[-1]
    near = [tuple(size.all[(k + i) % len(size.all)] for i, size in enumerate(part)) for k in (1, 2)]  # of two sizes either one
    return list(dict.fromkeys((*near, *scattered(part, 1), tuple(size.all[-1] for size in part))))


def late(traced_at: Callable[[Point], Trace], box: Box, weights: Mapping[str, np.ndarray]) -> frozenset[str]:
    """The names of what `load.late.computing` is to compute."""
    names: frozenset[str] = frozenset()
    for number in range(ROUNDS):
        with computing(names):
            traces = [traced_at(point) for point in _points(box)]
        programs = [trace.program for trace in traces]
        broken = _broken(programs, weights)
        names_of = {name.split("~")[0] for name in broken}
        before, found = names, _Found([trace.seen for trace in traces], names_of, number == 0, _has_counts_only(programs))
        readers = list(_readers(traces[-1].seen.kept))
        for reader in readers:
            if _is_of(names_of, reader[0]) or found.is_number(reader[0]):
                found.follow(*reader)
        if broken and not found.names:  # they have other names since they have been rewritten, or a count is a factor of them
            found.as_counts = False
            for reader in readers:
                found.follow(*reader)
        names |= found.names | {*_tabled([trace.graph for trace in traces])}
        if names == before and (number or not broken):
            break
    return names


def _is_of(names: Collection[str], name: str) -> bool:
    """Whether a constant, or what rewrites have made of it, is among these."""
    return name in names or any(other.startswith((f"{name}/", f"{name}.")) for other in names)


def _broken(programs: Sequence[Program], weights: Mapping[str, np.ndarray]) -> set[str]:
    """Constants of programs that are neither the same at all sizes nor parts of one table."""
    greatest, out = programs[-1], set[str]()
    for program in programs[:-1]:
        known = tables(greatest, program, weights)
        left = known.shared_by(program)
        out |= {
            name
            for name, recipe in left.constants.items()
            if name in greatest.constants and not same(recipe, greatest.constants[name])
        }
    return out


def _has_counts_only(programs: Sequence[Program]) -> bool:
    """Whether `alike` finds formulas for the numbers that are parts of expressions. Constants that have been multiplied with each
    other are no counts any more."""
    numbers = [
        [[e.value for e in walk(op.epilogue.expr) if e.fn == "const" and e.dtype is DType.F32] for op in program.ops]
        for program in programs
    ]
    numbers = [of for of in numbers if [*map(len, of)] == [*map(len, numbers[-1])]]  # else it is the programs that differ
    return all(
        _is_count([float(x) for x in same])  # type: ignore[arg-type]
        for of_ops in zip(*numbers, strict=True)
        for same in zip(*of_ops, strict=True)
    )


def _readers(nodes: Sequence[onnx.NodeProto]) -> Iterator[tuple[str, str, int]]:
    """The names that nodes read, with the operators and the places at which they do."""
    for node in nodes:
        for place, name in enumerate(node.input):
            yield name, node.op_type, place


class _Found:
    """Collects what is computed, from what is read to the sizes that it is made of."""

    def __init__(self, seen: Sequence[Seen], broken: Collection[str], as_parts: bool, as_counts: bool) -> None:
        """broken: what cannot be stored; as_parts: what is a part of a table is taken for stored; as_counts: what is a count is
        left a number."""
        self.seen, self.broken, self.as_parts, self.as_counts = seen, broken, as_parts, as_counts
        self.names: set[str] = set()

    def is_number(self, name: str) -> bool:
        """Whether a constant has one element: it is no constant of a program, but a part of expressions."""
        constant = self.seen[-1].constants.get(name)
        return constant is not None and held(constant).size == 1

    def follow(self, name: str, op: str, place: int) -> None:
        """The constant that an operator reads is computed, if it must be and can be."""
        last = self.seen[-1]  # at the least sizes there may be another graph, without this constant
        values = [found for seen in self.seen if (found := seen.constants.get(name)) is not None]
        if name in self.names or len(values) < 2 or (place in DECIDES.get(op, ()) and op != "Range"):
            return
        maker = last.makers.get(name)
        if maker is None or maker.op_type not in (*CONVERTERS, "ConstantOfShape", "Einsum"):  # which are rewritten
            return
        if _fits(values, self.as_parts and op not in PRODUCTS, self.as_counts, not _is_of(self.broken, name)):
            return
        self.names.update(filter(None, maker.output))
        for number, given in enumerate(maker.input):
            if given:
                self.follow(given, maker.op_type, number)


def _fits(constants: Sequence[Weight], as_part: bool, as_count: bool, as_one: bool) -> bool:
    """Whether a plan can hold a constant that is so at some sizes: as it is, as a number, or as a part of a table.

    as_one  elements that are all the same are one number, since they are no operand of a sum, say
    """
    values = [held(constant) for constant in constants]
    last = values[-1]
    if all(v.size == 1 for v in values):
        numbers = [float(v.reshape(())) for v in values]
        return last.dtype.kind != "f" or len(set(numbers)) == 1 or (as_count and _is_count(numbers))
    if all(v.shape == last.shape and np.array_equal(v, last, equal_nan=last.dtype.kind == "f") for v in values):
        return True
    if as_one and all(v.size and (v == last.flat[0]).all() for v in values):
        return True
    if not as_part or any(v.ndim != last.ndim or v.shape[-1:] != last.shape[-1:] for v in values):
        return False
    return all(np.array_equal(v, last[tuple(map(slice, v.shape))]) for v in values)


def _is_count(numbers: Sequence[float]) -> bool:
    """Whether floats are the same, or quotients of counts that `alike` finds formulas for."""
    return len({*map(str, numbers)}) == 1 or as_counts(numbers) is not None


# --- Tables that lowering makes --------------------------------------------------------------------------------------


def _tabled(graphs: Sequence[gs.Graph]) -> Iterator[str]:
    """What is computed of nodes whose tables differ from size to size."""
    kinds = [{node.outputs[0].name: node for node in graph.nodes} for graph in graphs]
    for name, last in kinds[-1].items():
        nodes = [found[name] for found in kinds if name in found]
        if len(nodes) == len(kinds):
            yield from TABLED[last.op](name, nodes)


def _transformed(name: str, nodes: Sequence[gs.Node]) -> Iterator[str]:
    """The matrix of a transform, which is as long as an axis."""
    if len({(str(node.inputs[0].shape), str(node.outputs[0].shape)) for node in nodes}) > 1:
        yield late_matrix(name)


def _gridded(name: str, nodes: Sequence[gs.Node]) -> Iterator[str]:
    """The places along the axes of a grid."""
    for axis in range(1, len(nodes[-1].outputs[0].shape) - 1):
        if len({node.outputs[0].shape[axis] for node in nodes}) > 1:
            yield late_places(name, axis)


def _resized(name: str, nodes: Sequence[gs.Node]) -> Iterator[str]:
    """The axes of a Resize, and its scales."""
    if not _can_be_late(nodes[-1]):
        return
    scales = [_scales(node) for node in nodes]
    fixed = scales[-1] is not None and all(s is not None and np.array_equal(s, scales[-1]) for s in scales)
    names = list(_late_axes(name, nodes, fixed))
    yield from names
    if names and not fixed:
        yield late_scales(name)


def _can_be_late(node: gs.Node) -> bool:
    attrs = node.attrs
    plain = attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize" and not attrs.get("exclude_outside", 0)
    return plain and not attrs.get("antialias", 0) and attrs.get("keep_aspect_ratio_policy", "stretch") == "stretch"


def _scales(node: gs.Node) -> np.ndarray | None:
    given = node.inputs[2] if len(node.inputs) > 2 else None
    return None if not isinstance(given, gs.Constant) or not held(given).size else held(given)


def _late_axes(name: str, nodes: Sequence[gs.Node], fixed: bool) -> Iterator[str]:
    """The axes along which the tables differ; none where each of nearest neighbours follows one formula at all sizes.

    fixed  the scales are the same at all sizes
    """
    nearest = nodes[-1].attrs.get("mode", "nearest") == "nearest"
    scales = _scales(nodes[-1])
    dropped = fixed and scales is not None and all(float(max(s, 1 / s)).is_integer() for s in scales.reshape(-1))
    for axis in range(len(nodes[-1].outputs[0].shape)):
        extents = [(int(node.inputs[0].shape[axis]), int(node.outputs[0].shape[axis])) for node in nodes]
        if len(set(extents)) == 1 or all(n == m for n, m in extents):
            continue
        repeated = len({m / n for n, m in extents}) == 1 and all(m % n == 0 for n, m in extents)
        if not nearest or not (repeated or dropped):
            yield late_axis(name, axis)


TABLED: Mapping[str, Callable[[str, Sequence[gs.Node]], Iterator[str]]] = {
    "AffineGrid": _gridded,
    "DFT": _transformed,
    "Resize": _resized,
}
"""What is late of nodes that lowering makes tables for, by the result's name and the node at each size."""
