"""Which tensors hold positions, angles, phases and counts, whose rounding errors count as they are, not for their size.

fp16 keeps 11 digits: the position 4001 becomes 4000, and the sine of it another number. How large such values get depends on
what a user feeds, so what was measured says little. What matters is how they are read and where they come from:

  read for its angle      sin, cos, tan of it
  read about its mean     what a normalization takes the mean out of
  statistics              what means, sums and maxima are taken of, these, and what is computed of them alone
  spectra                 Fourier transforms, whose first elements are sums of all, and what is computed of them alone
  read exactly            floor, ceil, round, remainders and casts to integers of it; the places of the largest of it
  open                    as large as an input of the model or an integer happens to be: computed from them by arithmetic, sums,
                          resampling and products of few terms, not by layers, norms or functions of bounded results
  whole                   an integer that became a float
  a divisor               what is divided by, or of which a logarithm is taken: small values count as much as large ones
  a box, or its score     what NonMaxSuppression decides by: fp16 knows a coordinate of 600 to half a pixel

What is open and read for its angle, about its mean, for statistics or exactly is stored in fp32, and so is all that it is
computed from on the way from the inputs; spectra of what is open, which products read in full; what is read as an integer, even
if a layer computed it; whole numbers that may exceed 2**11, up to where fp16 holds them; and divisors that are kept from zero by
a number that fp16 takes for zero, or nearly so.
Boxes and scores are in fp32 from the layers on whose results they are computed from, and so is what is computed of boxes alone,
such as those that are kept, and where regions of interest lie.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tccompile.errors import UsageError
from tccompile.ir.expr import Element, Expr, View, is_whole, walk
from tccompile.ir.feeds import InputRange
from tccompile.ir.ops import (
    Carry,
    Conv,
    Cumulate,
    Gemm,
    Norm,
    Op,
    Pointwise,
    Pool,
    Reduce,
    Resize,
    Rnn,
    Scatter,
    Softmax,
    Suppress,
    TopK,
)
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe

ANGLES = ("sin", "cos", "tan")
STEPS = ("floor", "ceil", "round", "fmod", "floor_mod", "trunc_div")
BOUNDED = (
    "sin", "cos", "tanh", "atan", "sigmoid", "hard_sigmoid", "erf", "softsign", "sign", "equal", "less", "less_equal", "greater",
    "greater_equal", "logical_not", "is_nan", "is_inf",
)  # fmt: skip
"""Functions whose results are about 1, however large their arguments."""

FEW = 16
"""Terms of a sum of products up to which its result is as open as its operands: a rotation is, a layer is not."""

SMALL_COUNTS = ("reciprocal", "rsqrt", "log")
"""Functions of which small arguments count as much as large ones; and so do divisors."""

BYTE = 256.0
"""The magnitude up to which limits make a number a small one."""

LEAST = 2.0**-14
"""The smallest normal fp16 number."""

QUANTIZED = (DType.I8, DType.U8, DType.I16, DType.U16)

EXACT = 2.0**11
"""The magnitude up to which fp16 holds all whole numbers."""

POSITIONS, TIMES = 1 << 15, 1000
"""How many positions a sequence may have, and a process time steps, where nothing in the model says it."""

MASKING = 1000.0
"""What is multiplied by numbers of this size and more to be added to something is a mask of zeros and ones."""


@dataclass
class Positions:
    """What is found: for tensors, by the one that owns the storage, why they must be in fp32.

    wide    the reason
    exact   products, by their position, that must read their operands in fp32
    inputs  the model's inputs that are read for their angle
    """

    wide: dict[str, str] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)


def positions(program: Program, exact: float = EXACT, bytes_count: bool = True) -> Positions:
    """What must be in fp32 for what it is read for, whatever values it takes.

    exact        up to where halves hold whole numbers
    bytes_count  whether it counts which of two bytes a value is rounded to that lies halfway
    """
    found = Positions()
    owner = {name: t.storage for name, t in program.tensors.items()}
    open_, whole = _open(program), whole_numbers(program)
    angles: set[str] = set()
    for i in range(len(program.ops) - 1, -1, -1):
        op = program.ops[i]
        y = owner[op.y]
        why = found.wide.get(y, "")
        for name, through in _reads(op, program):
            through = through if bytes_count else _without_quantizing(through)
            x = owner[name]
            if whole.get(name, math.inf) <= exact:
                continue  # whatever reads it gets it as it is
            read = next((fn for fn in through if fn in (*ANGLES, *STEPS, "integer")), "")
            if read and x in open_:
                reason = f"fp32: {op.nodes[0]!r} reads it {_for(read)}"
                turning = read in ANGLES
            elif read == "integer" and program.tensors[name].dtype.is_float:
                reason, turning = f"fp32: {op.nodes[0]!r} reads it as an integer", False
            elif why and x in open_ and not any(fn in BOUNDED for fn in through):
                reason, turning = why, y in angles
                if isinstance(op, Conv | Gemm) and name in op.operands:
                    found.exact.add(i)
            else:
                continue
            found.wide.setdefault(x, reason)
            if turning:
                angles.add(x)
    found.inputs = angles & {*program.inputs}
    read_as_divisors = divisors(program)
    for op in program.ops:
        if isinstance(op, Norm) and op.centred and owner[op.x] in open_:
            found.wide.setdefault(owner[op.x], f"fp32: {op.nodes[0]!r} takes its mean out of it, however large that is")
        if owner[op.y] in read_as_divisors and any(_tiny(e) for e in walk(op.epilogue.expr)):
            found.wide.setdefault(owner[op.y], "fp32: it divides, and is kept from zero by a number that fp16 does not hold")
    for name, bound in whole.items():
        if bound > exact:
            found.wide.setdefault(owner[name], f"fp32: whole numbers that may exceed {exact:.0f}")
    found.wide = _decided_by(program) | _statistics(program, open_) | found.wide
    spectra = _spectra(program, open_)
    found.wide = _of_inputs(program) | spectra | found.wide
    products = (i for i, op in enumerate(program.ops) if isinstance(op, Conv | Gemm))
    found.exact |= {i for i in products if any(owner[name] in spectra for name in program.ops[i].operands)}
    return found


def _spectra(program: Program, open_: set[str]) -> dict[str, str]:
    """The tensors, by the owner of their storage, that are open and transformed, their Fourier transforms, and what is computed
    of these alone; with the reason."""
    owner = {name: t.storage for name, t in program.tensors.items()}
    known = {owner[name] for name, recipe in program.constants.items() if _adds_up(recipe)}
    found: dict[str, str] = {}
    transformed: dict[str, str] = {}
    for op in program.ops:
        y, read = owner[op.y], {own for name in op.inputs if (own := owner[name]) not in program.constants}
        if isinstance(op, Gemm) and owner[op.b] in known and ((x := owner[op.a]) in open_ or x in found):
            why = found.get(
                x, f"fp32: of the spectrum that {op.nodes[0]!r} makes, small elements count, too, however large it is"
            )
            transformed |= {x: why}
            found.setdefault(y, why)
        elif isinstance(op, Pointwise | Reduce) and read and program.tensors[op.y].dtype.is_float and read <= found.keys():
            found.setdefault(y, found[min(read)])
        elif isinstance(op, Pointwise) and read <= known:
            known.add(y)  # of places alone, as the matrix of a transform whose length a range leaves open
    return transformed | found


def _adds_up(recipe: Recipe) -> bool:
    """Whether a matrix is none of the model's weights, and its first row adds up what it is multiplied by."""
    return isinstance(recipe, Literal) and recipe.values.ndim == 2 and bool((recipe.values[:1] >= 0).all())


def _statistics(program: Program, open_: set[str]) -> dict[str, str]:
    """The tensors, by the owner of their storage, that are open and of which means, sums or maxima are taken, what they are
    computed from element by element, these statistics, and what is computed of them alone; with the reason."""
    owner = {name: t.storage for name, t in program.tensors.items()}
    found: dict[str, str] = {}
    for op in reversed(program.ops):
        if isinstance(op, Reduce) and owner[op.x] in open_ and program.tensors[op.x].dtype.is_float:
            found[owner[op.x]] = f"fp32: {op.nodes[0]!r} takes statistics of it, however large it is"
        elif isinstance(op, Pointwise) and (why := found.get(owner[op.y])):
            for name in _floats_of(op, program):
                if owner[name] in open_:
                    found.setdefault(owner[name], why)
    taken: dict[str, str] = {}
    for op in program.ops:
        read = {owner[name] for name in _floats_of(op, program)} - {*program.constants}
        if isinstance(op, Reduce) and owner[op.x] in open_ and owner[op.x] in found:
            taken[owner[op.y]] = f"fp32: statistics of {op.x!r}, however large that is"
        elif isinstance(op, Pointwise) and read and all(name in taken for name in read):
            taken.setdefault(owner[op.y], taken[min(read)])
    return taken | found


def _of_inputs(program: Program) -> dict[str, str]:
    """The tensors, by the owner of their storage, that are computed of inputs in floats wider than fp16 alone, by no layer, if
    they are given out as they are or no product reads them; with the reason."""
    owner = {name: t.storage for name, t in program.tensors.items()}
    types = {name: program.tensors[name].dtype for name in program.inputs}
    alone = computed_of(program, {name for name, dtype in types.items() if dtype.is_float and dtype is not DType.F16})
    given, multiplied = set[str](), set[str]()
    for op in program.ops:
        read = {owner[name] for name in op.inputs}
        if op.y in program.outputs and op.epilogue.expr.fn == "load":
            given |= read
        if not isinstance(op, Pointwise | Reduce | Pool | Resize | Norm | Softmax | TopK):
            multiplied |= read
    wide = (alone & given) | (alone - multiplied)
    reason = "fp32: computed of inputs alone, it is as large or small as these happen to be"
    return dict.fromkeys(wide - {*program.inputs}, reason)


def computed_of(program: Program, inputs: Collection[str]) -> set[str]:
    """These inputs, and what is computed of them and constants alone, by no layer; by the owner of their storage."""
    owner = {name: t.storage for name, t in program.tensors.items()}
    alone, mixed = {*inputs}, set[str]()
    for op in program.ops:
        y, read = owner[op.y], {owner[name] for name in op.inputs} - {*program.constants}
        carries = isinstance(op, Pointwise | Reduce | Pool | Resize | Gemm | Conv)
        layer = not program.constants.keys().isdisjoint(op.operands)
        looks_up = any(view.tensor in program.constants and len(view.tensors) > 1 for view in op.views)
        if carries and not layer and not looks_up and read and read <= alone and y not in mixed:
            alone.add(y)
        else:
            mixed.add(y)
            alone.discard(y)
    return alone


def _decided_by(program: Program) -> dict[str, str]:
    """The tensors, by the owner of their storage, that boxes and scores of NonMaxSuppression are computed from, back to results
    of layers, and what is computed of such boxes and nothing else; with the reason."""
    owner = {name: t.storage for name, t in program.tensors.items()}
    scores: dict[str, str] = {}
    boxes: dict[str, str] = {}
    for op in reversed(program.ops):
        if isinstance(op, Suppress):
            reason = f"fp32: {op.nodes[0]!r} decides by it"
            boxes.setdefault(owner[op.boxes], reason)
            scores.setdefault(owner[op.scores], reason)
        elif isinstance(op, Pointwise | Reduce | Scatter | Softmax):
            for found in (boxes, scores):
                if why := found.get(owner[op.y]):
                    for name in _floats_of(op, program):
                        found.setdefault(owner[name], why)
    known = {*program.inputs, *program.constants}
    for op in program.ops:
        read = [owner[name] for name in _floats_of(op, program) if owner[name] not in known]
        if isinstance(op, Pointwise | Reduce) and read and all(name in boxes for name in read):
            boxes.setdefault(owner[op.y], boxes[read[0]])
    return scores | boxes


def _floats_of(op: Op, program: Program) -> list[str]:
    """The floats that an op reads."""
    return [name for name in op.inputs if program.tensors[name].dtype.is_float]


def read_in_full(program: Program) -> dict[int, str]:
    """The products, by their position, whose sums count as they are, however large: with the reason.

    That is what is read for its angle or as an integer, in the product's own epilogue or by ops behind it. What is limited to
    a byte's range first, as when it is quantized, is no large number.
    """
    owner = {name: t.storage for name, t in program.tensors.items()}
    found: dict[int, str] = {}
    read: dict[str, tuple[str, str]] = {}
    for i in range(len(program.ops) - 1, -1, -1):
        op = program.ops[i]
        for leaf, (node, how) in _in_full(op.epilogue.expr, read.get(owner[op.y]), False, op.nodes[0]):
            if leaf.fn == "load":
                read.setdefault(owner[op.views[leaf.value].tensor], (node, how))  # type: ignore[index]
            elif isinstance(op, Conv | Gemm):
                found.setdefault(i, f"{node!r} reads it {_for(how)}")
            elif _carries(op, program):
                read.update((owner[name], (node, how)) for name in op.operands if owner[name] not in read)
    return found


def _in_full(e: Expr, by: tuple[str, str] | None, limited: bool, node: str) -> Iterator[tuple[Expr, tuple[str, str]]]:
    """What an expression of a node reads as it is, with the node and the function that do so.

    by       what reads the expression itself so, if anything does
    limited  whether it counts only as far as a byte's range
    """
    if e.fn in ("load", "acc"):
        if by:
            yield e, by
        return
    if e.fn in ANGLES:
        by, limited = (node, e.fn), False
    elif e.fn in BOUNDED:
        by, limited = None, False
    elif e.fn in ("min", "saturate") and any(a.fn == "const" and abs(float(a.value or 0)) <= BYTE for a in e.args):
        by, limited = (by if by and by[1] in ANGLES else None), True
    elif not limited and (_becomes_integer(e) or (e.fn in STEPS and e.dtype is DType.F32)):
        by = (node, "integer" if e.fn == "cast" else e.fn)
    for a in e.args[1:] if e.fn == "where" else e.args:
        yield from _in_full(a, by, limited, node)


def _becomes_integer(e: Expr) -> bool:
    return e.fn == "cast" and e.dtype is DType.I64 and e.args[0].dtype is DType.F32


def divisors(program: Program) -> set[str]:
    """The tensors, by the owner of their storage, of which small elements count as much as large ones."""

    def under(e: Expr, divides: bool) -> Iterator[Expr]:
        if e.fn == "load" and divides:
            yield e
        for i, a in enumerate(e.args):
            yield from under(a, divides or e.fn in SMALL_COUNTS or (e.fn == "div" and i == 1))

    found: set[str] = set()
    for op in program.ops:
        found |= {program.tensors[op.views[e.value].tensor].storage for e in under(op.epilogue.expr, False)}  # type: ignore[index]
    return found


def _tiny(e: Expr) -> bool:
    return e.fn == "const" and e.dtype is DType.F32 and 0 < abs(float(e.value or 0)) < LEAST


def _for(read: str) -> str:
    return "for its angle" if read in ANGLES else "as an integer" if read == "integer" else f"for the {read} of it"


def _open(program: Program) -> set[str]:
    """The tensors, by the owner of their storage, that are as large as an input of the model, or what a loop carries, happens
    to be."""
    tensors = program.tensors
    found = {name for name in program.inputs if tensors[name].dtype is not DType.BOOL}
    carried = (tensors[op.y] for op in program.ops if isinstance(op, Carry))
    found |= {t.storage for t in carried if t.dtype is not DType.BOOL}
    for op in program.ops:
        if _carries(op, program) and tensors[op.y].dtype is not DType.BOOL:
            sources = (tensors[name].storage for name, through in _reads(op, program) if not any(fn in BOUNDED for fn in through))
            if any(name in found for name in sources):
                found.add(tensors[op.y].storage)
    return found


def _carries(op: Op, program: Program) -> bool:
    """Whether an op's result is as large as its operands happen to be."""
    match op:
        case Gemm(a=a):
            return program.tensors[a].shape[-1] <= FEW
        case Conv(w=w):
            return math.prod(program.tensors[w].shape[1:]) <= FEW
    return isinstance(op, Pointwise | Carry | Cumulate | Reduce | Pool | Resize | Scatter)


def _reads(op: Op, program: Program) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The tensors whose values an op computes with, each with the functions that it goes through; "integer" for a cast to one.

    Not those that are indices, nor operands of ops whose results are not as large as these.
    """
    pre = op.pre if isinstance(op, Reduce) else None
    for leaf, through in _leaves(op.epilogue.expr, ()):
        if leaf.fn == "load":
            yield op.views[leaf.value].tensor, through  # type: ignore[index]
        elif isinstance(op, TopK):
            yield op.x, ("integer",)
        elif isinstance(op, Suppress):
            yield from ((name, ("integer",)) for name in (op.boxes, op.scores))
        elif _carries(op, program):
            inside = tuple(fn for _, fns in _leaves(pre, ()) for fn in fns) if pre is not None else ()
            for name in op.operands:
                yield name, (*inside, *through)


def _without_quantizing(through: tuple[str, ...]) -> tuple[str, ...]:
    """The functions but for those that quantize: an integer of what is saturated, which has been rounded."""
    if "saturate" not in through[1:] or through[(i := through.index("saturate")) - 1] != "integer" or "round" not in through[i:]:
        return through
    j = through.index("round", i)
    return (*through[: i - 1], *through[i:j], *through[j + 1 :])


def _leaves(e: Expr, through: tuple[str, ...]) -> Iterator[tuple[Expr, tuple[str, ...]]]:
    if e.fn in ("load", "acc"):
        yield e, through
    fn = e.fn
    if fn == "cast":
        fn = "integer" if _becomes_integer(e) else ""
    elif fn in STEPS and e.dtype is not DType.F32:  # of integers, which are exact
        fn = ""
    for i, a in enumerate(e.args):
        if e.fn == "where" and i == 0:
            continue  # what a condition is computed from is compared, and has been measured
        yield from _leaves(a, (*through, fn) if fn else through)


# --- Whole numbers ---------------------------------------------------------------------------------------------------


def whole_numbers(program: Program) -> dict[str, float]:
    """The float tensors that hold whole numbers, computed from integers, with what no magnitude of them exceeds."""
    bounds: dict[str, float] = {}
    for op in program.ops:
        y = program.tensors[op.y]
        acc: float | None = None
        if isinstance(op, Cumulate | Reduce) and op.combine in ("add", "min", "max") and not _changes(op):
            x = program.tensors[op.x]
            terms = x.size // max(y.size, 1) if isinstance(op, Reduce) else x.shape[op.axis]
            one = _bound_of(program, op.x, bounds)
            acc = None if one is None else one * (terms if op.combine == "add" else 1)
        bound = _bound(op.epilogue.expr, op.views, acc, program, bounds)
        if bound is not None and y.dtype.is_float:
            bounds[op.y] = bound
    return bounds


def _changes(op: Op) -> bool:
    return isinstance(op, Reduce) and op.pre.fn != "acc"


def _bound_of(program: Program, name: str, bounds: Mapping[str, float]) -> float | None:
    """What no magnitude in a tensor of whole numbers exceeds; None if it may hold others."""
    dtype = program.tensors[name].dtype
    if dtype is DType.BOOL:
        return 1.0
    if dtype.is_float:
        return bounds.get(name)
    return 2.0 ** (8 * dtype.size) if dtype.size == 1 else math.inf


def _bound(e: Expr, views: tuple[View, ...], acc: float | None, program: Program, bounds: Mapping[str, float]) -> float | None:
    """The same of an expression; integers are whole numbers whatever they are computed by, such as sums of products of bytes."""
    args = [_bound(a, views, acc, program, bounds) for a in e.args]
    match e.fn:
        case "acc":
            found = acc
        case "load":
            view = views[e.value]  # type: ignore[index]
            inner = _bound_of(program, view.tensor, bounds)
            found = inner if inner is None or not view.valid else max(inner, abs(view.fill)) if view.fill % 1 == 0 else None
        case _:
            found = _bound_of_call(e, args)
    return math.inf if found is None and e.dtype is DType.I64 else found


def _bound_of_call(e: Expr, args: list[float | None]) -> float | None:
    """The same of a function's result, from those of its arguments."""
    match e.fn:
        case "saturate" if is_whole(e) and _limit(e) is not None:
            return _limit(e)
        case "cast" if e.dtype is DType.I64 and (limit := _limit(e.args[0])) is not None:
            return limit
        case "const":
            whole = e.dtype is not DType.F32 or float(e.value or 0) % 1 == 0
            return abs(float(e.value or 0)) if whole else None
        case "bit_and" if e.args[1].fn == "const" and (mask := int(e.args[1].value or 0)) >= 0:
            return float(mask)
        case "where":
            args = args[1:]
    if any(a is None for a in args):
        return None
    known = [a for a in args if a is not None]
    match e.fn:
        case "cast" | "neg" | "abs" | "relu":
            return known[0]
        case "add" | "sub":
            return sum(known)
        case "mul":
            return math.prod(known) if 0.0 not in known else 0.0
        case "min" | "max" | "where":
            return max(known)
    return None


def _limit(e: Expr) -> float | None:
    """What no magnitude exceeds where constants limit an expression."""
    limited = e.fn == "saturate" and all(a.fn == "const" for a in e.args[1:])
    return max(abs(float(a.value or 0)) for a in e.args[1:]) if limited else None


# --- Inputs ----------------------------------------------------------------------------------------------------------


def input_ranges(program: Program) -> dict[str, InputRange]:
    """Between what numbers the values of inputs lie, for those of which the program tells: what is computed from them shows it.

    Indices into a table are below its extent, lengths below that of their sequences; what is read for its angle is a time step
    if it is one number a sample, and other integers are positions; floats that are multiplied by huge numbers are masks.
    Integers of 8 and 16 bits that are dequantized, or multiplied as they are, have any value of their type.
    """
    tensors = program.tensors
    found: dict[str, InputRange] = {}
    for name in positions(program).inputs:
        if tensors[name].rank < 2 or not tensors[name].dtype.is_float:  # others are coordinates, of about 1
            count = TIMES if tensors[name].rank < 2 else POSITIONS
            found[name] = InputRange(0, count - 1, whole=True)
    for name, offset, extent in _indices(program):
        old = found.get(name, InputRange(0, math.inf, whole=True))
        low, high = -offset, extent - 1 - offset
        if high >= max(low, 0):
            found[name] = InputRange(max(low, 0), min(high, old.high), whole=True)
    for op in program.ops:
        if isinstance(op, Rnn) and op.lengths in program.inputs:
            found[op.lengths] = InputRange(1, tensors[op.x].shape[0], whole=True)
        for leaf, factor in _multiplied(op.epilogue.expr):
            name = op.views[leaf.value].tensor  # type: ignore[index]
            if factor >= MASKING and name in program.inputs and tensors[name].dtype.is_float:
                found[name] = InputRange(0, 1, whole=True)
        for name in {*_dequantized(op)} & {*program.inputs} - {*found}:
            if tensors[name].dtype in QUANTIZED:
                found[name] = InputRange(tensors[name].dtype.lowest, tensors[name].dtype.largest, whole=True)
    return {name: r for name, r in found.items() if math.isfinite(r.high) and tensors[name].dtype is not DType.BOOL}


def ranges_of(program: Program, given: Mapping[str, tuple[float, float]]) -> dict[str, InputRange]:
    """Between what numbers the values of inputs lie, as the user says, or else as the program tells.

    Raises UsageError for a name that no input has, and for a range that its type does not hold.
    """
    found = input_ranges(program)
    for name, (low, high) in given.items():
        if name not in program.inputs:
            raise UsageError(f"a range of {name!r}, which is no input; there are {', '.join(map(repr, program.inputs))}")
        dtype = program.tensors[name].dtype
        least, most = _limits(dtype)
        if low < least or high > most or (not dtype.is_float and math.ceil(low) > math.floor(high)):
            raise UsageError(f"input {name!r} is {dtype.value}, which does not hold the numbers {low:g}..{high:g}")
        found[name] = InputRange(low, high)
    return found


def _limits(dtype: DType) -> tuple[float, float]:
    """The least and the greatest finite number of a type."""
    if dtype is DType.BOOL:
        return 0, 1
    if dtype is DType.BF16:
        return -3.38e38, 3.38e38
    limits = np.finfo(dtype.numpy) if dtype.is_float else np.iinfo(dtype.numpy)
    return float(limits.min), float(limits.max)


def _indices(program: Program) -> Iterator[tuple[str, int, int]]:
    """The inputs that are indices, each with what is added to it before it is one, and the extent of the axis."""
    writers = program.writer()

    def origins(name: str, offset: int) -> Iterator[tuple[str, int]]:
        if name in program.inputs:
            yield name, offset
        op = writers.get(name)
        if isinstance(op, Pointwise):
            for leaf, added in _shifted(op.epilogue.expr):
                yield from origins(op.views[leaf.value].tensor, offset + added)  # type: ignore[index]

    for op in program.ops:
        at = op.at if isinstance(op, Scatter) else ()
        places = [e for v in op.views for i in (*v.index, *(r.index for r in v.valid)) for e in i.elements]
        for e in (*places, *(e for i in at for e in i.elements)):
            assert isinstance(e, Element)
            for name, offset in origins(e.tensor, 0):
                yield name, offset, e.extent


def _shifted(e: Expr) -> Iterator[tuple[Expr, int]]:
    """The loads that an integer expression is a copy of, or is but for a constant that is added."""
    if e.dtype is not DType.I64:
        return
    match e.fn:
        case "load":
            yield e, 0
        case "cast" | "bit_and":  # narrow integers are added modulo their range, which is shifted there and back
            yield from _shifted(e.args[0])
        case "where":
            yield from _shifted(e.args[1])
            yield from _shifted(e.args[2])
        case "min" | "max":
            for a in e.args:
                yield from _shifted(a)
        case "add" | "sub" if e.args[1].fn == "const":
            sign = 1 if e.fn == "add" else -1
            for leaf, added in _shifted(e.args[0]):
                yield leaf, added + sign * int(e.args[1].value or 0)


def _dequantized(op: Op) -> Iterator[str]:
    """What an op multiplies, or loads and multiplies by a scale, perhaps less a zero point."""
    yield from op.multiplied
    for leaf in _scaled(op.epilogue.expr):
        if leaf.fn == "load":
            yield op.views[leaf.value].tensor  # type: ignore[index]
    if isinstance(op, Reduce) and any(_scaled(op.pre)):
        yield op.x


def _scaled(e: Expr) -> Iterator[Expr]:
    """What an expression takes for floats, perhaps less a number, and multiplies by one between 0 and 1."""
    for part in walk(e):
        if part.fn == "mul" and part.args[1].fn == "const" and 0 < float(part.args[1].value or 0) < 1:
            x = part.args[0]
            x = x.args[0] if x.fn == "sub" and x.args[1].fn == "const" else x
            if x.fn == "cast":
                yield x.args[0]


def _multiplied(e: Expr, factor: float = 1.0) -> Iterator[tuple[Expr, float]]:
    """The loads of an expression that are added up, each with the magnitude of the constant that it is multiplied by."""
    match e.fn:
        case "load":
            yield e, factor
        case "add" | "sub" | "neg" | "cast":
            for a in e.args:
                yield from _multiplied(a, factor)
        case "mul":
            for a, b in (e.args, e.args[::-1]):
                if b.fn == "const":
                    yield from _multiplied(a, factor * abs(float(b.value or 0)))
