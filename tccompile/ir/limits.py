"""What a program from an untrusted file must keep to, before anything is done with it: sizes, depths, shapes, names.

`verify` holds our own stages to the rules of a Program, and Python may be told to skip it (-O). Whatever memory or
time depends on is checked here in any case; then `verify` is asked for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tccompile.errors import PlanError
from tccompile.ir import packed
from tccompile.ir.evaluate import takes
from tccompile.ir.expr import FUNCTIONS, Coord, Element, Expr, Index, Quotient, Remainder, View, parts
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.forms import Form, Grouped, Packed, Sparse
from tccompile.ir.memory import COMPARED, Block, Budget, Line, block_of, common
from tccompile.ir.ops import Carry, Op, Pointwise
from tccompile.ir.ops.op import OneOf
from tccompile.ir.ops.rules import EXTENT
from tccompile.ir.program import Program
from tccompile.ir.sparse import shapes, whole
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import ELEMENTS, DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, Source, Transform

RANK = 16
SIZE = 1 << 40
"""Elements of a tensor, bytes of an arena: fewer."""
SCALE = 2.0**126
"""The most that a tensor is scaled by, and the inverse of the least: float32 holds both, and the inverse of what lies between."""
DEPTH = 128
"""Expressions, indices and recipes nest less deep."""


def require(condition: Any, message: str) -> None:
    """Raise PlanError unless the condition holds."""
    if not condition:
        raise PlanError(message)


def check_program(program: Program) -> None:
    """Raises PlanError, which names the tensor, constant or op, for a program that breaks a rule."""
    for name, tensor in program.tensors.items():
        _check_tensor(name, tensor)
    for tensor in program.tensors.values():
        if tensor.base is not None:
            _check_base(tensor, program.tensors.get(tensor.base))
    ends = {*program.inputs, *program.outputs}
    for name in ends:
        require(name in program.tensors, f"input or output {name!r} is no tensor")
        tensor = program.tensors[name]
        plain = tensor == dense(name, tensor.shape, tensor.dtype, pad=1)
        require(plain, f"input or output {name!r} is not row-major without padding")
    for names in (program.inputs, program.outputs):
        require(len(set(names)) == len(names), f"inputs or outputs of the same name in {names}")
    for name, recipe in program.constants.items():
        require(name in program.tensors, f"constant {name!r} is no tensor")
        require(name not in ends, f"constant {name!r} is an input or output")
        require(program.tensors[name].base is None, f"constant {name!r} lies in another tensor")
        _check_recipe(name, recipe)
    for name, storage in program.storage.items():
        own = name in program.tensors and program.tensors[name].base is None and program.tensors[name].dtype.is_float
        require(own, f"the storage of {name!r}, which is no float tensor with storage of its own")
        require(1.0 / SCALE <= storage.scale <= SCALE, f"tensor {name!r} is scaled by {storage.scale}")
    for name, forms in program.forms.items():
        for form in forms:
            _check_form(name, form, program)
    _check_counts(program)
    given = {*program.inputs, *program.constants}
    for op in program.ops:
        _check_op(op, program, given)
    try:
        verify(program)
    except (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise PlanError(str(error) or type(error).__name__) from None
    _check_written(program, given)


def _check_counts(program: Program) -> None:
    """Counts are outputs of their own, and cut others along axes that have as many elements as there is room for."""
    hidden = [count.tensor for count in program.counts]
    require(len(set(hidden)) == len(hidden), "several counts in one output")
    cut: set[tuple[str, int]] = set()
    for count in program.counts:
        what = f"the count {count.tensor!r} of {count.node!r}"
        require(count.tensor in program.outputs, f"{what} is no output")
        t = program.tensors[count.tensor]
        require(t.dtype is DType.I64 and t.size == 1, f"{what} is not one int64")
        require(0 <= count.limit < EXTENT, f"{what} has a limit of {count.limit}")
        for name, axes in count.cuts.items():
            require(name in program.outputs and name not in hidden, f"{what} cuts {name!r}, which is no result")
            shape = program.tensors[name].shape
            for axis in axes:
                fits = 0 <= axis < len(shape) and shape[axis] == count.limit and (name, axis) not in cut
                require(fits, f"{what} cuts {name!r} of {shape} along axis {axis}, with a limit of {count.limit}")
                cut.add((name, axis))


def _check_tensor(name: str, t: Tensor) -> None:
    what = f"tensor {name!r}"
    require(t.name == name, f"{what} calls itself {t.name!r}")
    require(t.dtype in ELEMENTS, f"{what} has elements of type {t.dtype.value}, which no kernel reads or writes")
    require(len(t.shape) == len(t.padded) == len(t.strides) <= RANK, f"{what}: rank above {RANK}, or different ones")
    count: Extent = 1
    empty = 0 in t.padded
    for n, padded, stride in zip(t.shape, t.padded, t.strides, strict=True):
        if not 0 <= n <= padded < EXTENT:
            raise PlanError(f"{what}: shape {t.shape} in extents of {t.padded}")
        if not (0 < stride < SIZE or (stride == 0 and (padded <= 1 or empty))):
            raise PlanError(f"{what}: strides {t.strides}")
        count *= padded or 1  # more than SIZE NumPy cannot count, not even of an empty array
    require(count < SIZE and 0 <= t.offset < SIZE and t.span < SIZE, f"{what} has {SIZE} elements or more")
    require(t.base is not None or not t.offset, f"{what} begins {t.offset} elements into its own storage")
    reach: Extent = 0
    for stride, n in sorted(zip(t.strides, t.padded, strict=True)):
        if n > 1 and not empty:
            if stride <= reach:
                raise PlanError(f"{what}: elements in the same place, by strides {t.strides}")
            reach += stride * (n - 1)


def _check_form(name: str, form: Form, program: Program) -> None:
    what = f"{form.tensor!r}, which is a form of {name!r}"
    require({name, *form.tensors} <= program.constants.keys(), f"{what}: one of them is no constant")
    shape, own, together = program.tensors[name].shape, program.tensors[form.tensor].shape, 0
    if isinstance(form, Sparse):
        _check_sparse(what, program.tensors[name], program.tensors[form.tensor], program.tensors[form.places])
        return
    if isinstance(form, Packed):
        _check_packed(what, form, program.tensors[name], [program.tensors[part] for part in form.tensors])
        return
    match form:
        case Grouped(groups=groups, of=of) if 0 < groups < of and of % groups == 0:
            together = of // groups
    fits = len(shape) > 1 and own == (shape[0], shape[1] * together, *shape[2:]) and together
    require(fits, f"{what}, has shape {own} where that has {shape}")


def _check_sparse(what: str, w: Tensor, values: Tensor, places: Tensor) -> None:
    require(w.rank > 1 and w.dtype.bits in (8, 16), f"{what}: that is {w.dtype.value} {w.shape}, which has no 2:4 form")
    of_values, of_places = shapes(w.shape, whole(w.dtype))
    fits = values == dense(values.name, of_values, w.dtype, pad=1) and places == dense(places.name, of_places, DType.U8, pad=1)
    found = f"{values.dtype.value} {values.shape} and {places.dtype.value} {places.shape}"
    require(fits, f"{what}, and its places are {found} in place of {w.dtype.value} {of_values} and uint8 {of_places}, row-major")


def _check_packed(what: str, form: Packed, w: Tensor, parts: list[Tensor]) -> None:
    require(w.rank == 2 and w.dtype.is_float, f"{what}: that is {w.dtype.value} {w.shape}, which has no form of integers")
    require(0 <= form.zero < 256, f"{what}: {form.zero} stands for 0")
    try:
        shapes_ = packed.shapes(w.shape, form.bits, form.block)
    except ValueError as error:
        raise PlanError(f"{what}: {error}") from None
    scales = parts[1]
    kinds = DType.U8, scales.dtype if scales.dtype in (DType.F16, DType.F32) else DType.F32, DType.U8
    wide = packed.per(form.block) > 1 or scales.dtype is DType.F32
    for part, shape, kind in zip(parts, shapes_, kinds, strict=False):
        fits = wide and part == dense(part.name, shape, kind, pad=1)
        require(fits, f"{what}: {part.name!r} is {part.dtype.value} {part.shape} in place of {kind.value} {shape}, row-major")


def _check_base(t: Tensor, base: Tensor | None) -> None:
    if base is None or base.base is not None:
        raise PlanError(f"tensor {t.name!r} lies in {t.base!r}, which has no storage of its own")
    require(t.dtype is base.dtype, f"tensor {t.name!r} of {t.dtype.value} lies in {base.name!r} of {base.dtype.value}")
    require(t.offset + t.span <= base.span, f"tensor {t.name!r} reaches outside the storage of {base.name!r}")


def _check_recipe(name: str, recipe: Recipe) -> None:
    require(
        _depth(recipe, lambda r: r.args if isinstance(r, Transform) else ()) < DEPTH, f"the recipe of {name!r} nests too deep"
    )
    rest = [recipe]
    while rest:
        match rest.pop():
            case Transform(fn, args):
                require(fn in TRANSFORMS, f"the recipe of {name!r} has an unknown transform {fn!r}")
                rest += args
            case Source() | Literal():
                pass


def _check_written(program: Program, given: Collection[str]) -> None:
    """Each element is written once before it is read: of what one op reads, others may have written parts."""
    written: dict[str, _Written] = {}
    budget = Budget(COMPARED)
    for op in program.ops:
        for name in op.inputs:
            t = program.tensors[name]
            if t.storage not in given and t.span and not (t.storage in written and written[t.storage].hold(t)):
                raise PlanError(f"{type(op).__name__} {op.nodes[0]!r} reads elements of {name!r} that nothing before it writes")
        if isinstance(op, Carry) and op.stays:  # over what it has read: see `loops.verify_loops`
            continue
        for t in (program.tensors[name] for name in op.results):
            if not written.setdefault(t.storage, _Written(program.tensors[t.storage], budget)).add(t):
                raise PlanError(f"{type(op).__name__} {op.nodes[0]!r} writes elements of {t.storage!r} that have been written")
    for name in program.outputs:
        t = program.tensors[name]
        require(not t.span or (name in written and written[name].hold(t)), f"not all of the output {name!r} is written")


class _Written:
    """The elements of a storage that have been written: all of it, or blocks, by where they lie along one axis."""

    def __init__(self, base: Tensor, budget: Budget) -> None:
        self._base, self._left = base, math.prod(base.padded)
        self._solid = self._left == base.span  # else there are elements between its own, which nobody writes
        self._axis = -1
        self._line = Line[Block](budget)

    def add(self, t: Tensor) -> bool:
        """Note that a tensor is written. False if some of it has been, or it is no block of the storage."""
        size = math.prod(t.padded)
        block = block_of(t, self._base)
        if not size or not self._left or block is None:
            return not size
        if t.base is None:
            whole, self._left = self._left == size, 0
            return whole
        if self._left == math.prod(self._base.padded):
            self._axis = next((a for a, n in enumerate(self._base.padded) if block[a] != (0, n)), -1)
        if self._shared(block):
            return False
        self._left -= size
        self._line.add(*self._along(block), block)
        return True

    def hold(self, t: Tensor) -> bool:
        """Whether all of a tensor has been written."""
        if not self._left and (self._solid or t.base is None):
            return True
        block = block_of(t, self._base)
        return block is not None and self._shared(block) == math.prod(t.padded)

    def _along(self, block: Block) -> tuple[Extent, Extent]:
        return block[self._axis] if self._axis >= 0 else (0, 1)

    def _shared(self, block: Block) -> Extent:
        """How many elements of a block have been written."""
        return sum(common(block, other) for other in {*self._line.between(*self._along(block))})


# --- Ops -------------------------------------------------------------------------------------------------------------


def _check_op(op: Op, program: Program, given: Collection[str]) -> None:
    require(op.nodes, f"{type(op).__name__} without a node's name")
    what = f"{type(op).__name__} {op.nodes[0]!r}"
    for view in op.views + ((op.scattered[1],) if op.scattered else ()):
        for index in (*view.index, *(r.index for r in view.valid)):
            require(_depth(index, _parts) < DEPTH, f"{what}: an index of {view.tensor!r} nests too deep")
    for name in (*op.inputs, *op.results):
        require(name in program.tensors, f"{what}: {name!r} is no tensor")
    for owner in (program.tensors[name].storage for name in op.results):
        require(owner not in given, f"{what}: writes into {owner!r}, which is an input or a constant")
    if op.also is not None:
        first, second = program.tensors[op.y], program.tensors[op.also.y]
        alike = all(getattr(first, k) == getattr(second, k) for k in ("shape", "padded", "strides"))
        require(alike and op.epilogue.shuffle == 1, f"{what}: {op.also.y!r} does not lie as {op.y!r}")
        _check_expr(op.also.expr, 1, False, what)
    y, b = program.tensors[op.y].shape, op.epilogue.shuffle
    require(1 <= b < EXTENT and (b == 1 or (len(y) == 4 and y[2] % b == y[3] % b == 0)), f"{what}: shuffle {b} of {y}")
    shape = program.op_shape(op)
    for view in op.views:
        _check_view(view, program.tensors, shape, what)
    if op.scattered:
        updates, places = op.scattered
        _check_view(places, program.tensors, program.tensors[updates].shape, what)
    _check_expr(op.epilogue.expr, len(op.views), not isinstance(op, Pointwise), what)
    operands = {name: program.tensors[name].shape for name in op.operands}
    words = {field: held.words for field, held in op.holds.items() if isinstance(held, OneOf)}
    fits = all(getattr(op, field) in known for field, known in words.items()) and all(op.rule(operands, shape))
    require(fits, f"{what}: shapes {list(operands.values())} to {shape} do not fit its parameters")
    for field, held in op.holds.items():
        for expr in _flat(getattr(op, field)) if held is Expr else ():
            _check_expr(expr, 0, True, field)
    for name in op.integers:
        _check_integers(program.tensors[name], what)


def _flat(value: Any) -> Iterator[Any]:
    """What nested tuples hold."""
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


# --- Expressions -----------------------------------------------------------------------------------------------------


def _check_expr(expr: Expr, loads: int, acc: bool, what: str) -> None:
    require(_depth(expr, lambda e: e.args) < DEPTH, f"{what}: its expression nests too deep")
    rest = [expr]
    while rest:
        e = rest.pop()
        rest += e.args
        numbers = {"acc": 0, "const": 0, "load": 0, "cast": 1}
        known = e.fn in numbers or e.fn in FUNCTIONS
        require(known, f"{what}: unknown function {e.fn!r}")
        count = numbers[e.fn] if e.fn in numbers else len(FUNCTIONS[e.fn].params)
        require(len(e.args) == count, f"{what}: {e.fn} with {len(e.args)} arguments")
        require(e.dtype in (DType.F32, DType.I64, DType.BOOL), f"{what}: {e.fn} computes in {e.dtype.value}")
        if e.fn == "load":
            require(type(e.value) is int and 0 <= e.value < loads, f"{what}: it has no view {e.value}")
        elif e.fn == "const":
            fits = type(e.value) is {DType.F32: float, DType.I64: int, DType.BOOL: bool}[e.dtype]
            require(fits, f"{what}: a constant of {e.dtype.value} that is {e.value!r}")
        else:
            require(e.value is None and (acc or e.fn != "acc"), f"{what}: {e.fn} where it has no place")
        if e.fn in FUNCTIONS:
            types = [a.dtype.value for a in e.args]
            require(takes(e.fn, tuple(a.dtype for a in e.args)), f"{what}: {e.fn} of {', '.join(types)}")


def _check_view(view: View, tensors: Mapping[str, Tensor], shape: Shape, what: str) -> None:
    extents = tensors[view.tensor].shape
    require(
        len(view.index) == len(extents), f"{what}: {len(view.index)} indices of {view.tensor!r}, which has {len(extents)} axes"
    )
    elements: list[Element] = []
    for index in (*view.index, *(r.index for r in view.valid)):
        rest = [index]
        while rest:
            i = rest.pop()
            rest += _parts(i)
            for atom, factor in i.terms:
                require(-SIZE < factor < SIZE, f"{what}: an index of {view.tensor!r} has the factor {factor}")
                if isinstance(atom, Coord):
                    require(0 <= atom.axis < len(shape), f"{what}: an index of {view.tensor!r} has no axis {atom.axis}")
                elif isinstance(atom, Quotient | Remainder):
                    require(0 < atom.divisor < SIZE, f"{what}: an index of {view.tensor!r} is divided by {atom.divisor}")
                elif isinstance(atom, Element):
                    elements.append(atom)
            require(-SIZE < i.constant < SIZE, f"{what}: an index of {view.tensor!r} has the constant {i.constant}")
    for element in elements:  # whose own indices have been looked at now
        _check_element(element, tensors, view, shape, what)
    if not view.valid and 0 not in shape:
        for index, n in zip(view.index, extents, strict=True):
            low, high = index.bounds(shape)
            require(low >= 0 and high < n, f"{what}: reads {view.tensor!r} at {low}…{high} of {n}")


def _check_element(element: Element, tensors: Mapping[str, Tensor], view: View, shape: Shape, what: str) -> None:
    """An index that is read: from integers, and inside their tensor."""
    require(0 < element.extent < EXTENT, f"{what}: indices into an axis of {element.extent} elements")
    t = tensors[element.tensor]
    _check_integers(t, what)
    require(len(element.index) == t.rank, f"{what}: {len(element.index)} indices of {t.name!r}, which has {t.rank} axes")
    for index, n in zip(element.index, t.shape, strict=True) if not view.valid and 0 not in shape else ():
        low, high = index.bounds(shape)
        require(low >= 0 and high < n, f"{what}: reads {t.name!r} at {low}…{high} of {n}")


def _check_integers(t: Tensor, what: str) -> None:
    require(t.dtype.compute is DType.I64, f"{what}: indices of {t.dtype.value}")


def _parts(index: Index) -> list[Index]:
    return [inner for atom, _ in index.terms for inner in parts(atom)]


def _depth(root: Any, parts: Callable[[Any], Any]) -> int:
    """How deep a tree nests; DEPTH if deeper."""
    level, depth = [root], 0
    while level and depth < DEPTH:
        level = [part for node in level for part in parts(node)]
        depth += 1
    return depth
