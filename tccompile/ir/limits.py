"""What a program from an untrusted file must keep to, before anything is done with it: sizes, depths, shapes, names.

`program.verify` holds our own stages to the rules of a Program, and Python may be told to skip it (-O). Whatever memory or
time depends on is checked here in any case; then `verify` is asked for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tccompile.errors import PlanError
from tccompile.ir.expr import FUNCTIONS, Coord, Element, Epilogue, Expr, Index, Quotient, Remainder, Shape, View, parts
from tccompile.ir.forms import Form, Grouped
from tccompile.ir.memory import COMPARED, Block, Budget, Line, block_of, common
from tccompile.ir.program import (
    GATES,
    Attention,
    Conv,
    Cumulate,
    Gemm,
    Mlp,
    Norm,
    Op,
    Pointwise,
    Pool,
    Program,
    Reduce,
    Resize,
    Rnn,
    Scatter,
    Softmax,
    TopK,
    Trees,
    verify,
)
from tccompile.ir.reference.expressions import takes
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import ELEMENTS, DType
from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, Source, Transform

RANK = 16
EXTENT = 1 << 31
"""Extents, strides of windows and the like are smaller."""
SIZE = 1 << 40
"""Elements of a tensor, bytes of an arena: fewer."""
SCALE = 126
"""A tensor is scaled by a power of two of at most this exponent, which float32 holds."""
DEPTH = 128
"""Expressions, indices and recipes nest less deep."""
TREE = 1 << 14
"""Branches from the root of a decision tree to a leaf: at most."""


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
        require(abs(storage.scale) <= SCALE, f"tensor {name!r} is scaled by 2**{storage.scale}")
    for name, forms in program.forms.items():
        for form in forms:
            _check_form(name, form, program)
    given = {*program.inputs, *program.constants}
    for op in program.ops:
        _check_op(op, program, given)
    try:
        verify(program)
    except (AssertionError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise PlanError(str(error) or type(error).__name__) from None
    _check_written(program, given)


def _check_tensor(name: str, t: Tensor) -> None:
    what = f"tensor {name!r}"
    require(t.name == name, f"{what} calls itself {t.name!r}")
    require(t.dtype in ELEMENTS, f"{what} has elements of type {t.dtype.value}, which no kernel reads or writes")
    require(len(t.shape) == len(t.padded) == len(t.strides) <= RANK, f"{what}: rank above {RANK}, or different ones")
    count, empty = 1, 0 in t.padded
    for n, padded, stride in zip(t.shape, t.padded, t.strides, strict=True):
        if not 0 <= n <= padded < EXTENT:
            raise PlanError(f"{what}: shape {t.shape} in extents of {t.padded}")
        if not (0 < stride < SIZE or (stride == 0 and (padded <= 1 or empty))):
            raise PlanError(f"{what}: strides {t.strides}")
        count *= padded or 1  # more than SIZE NumPy cannot count, not even of an empty array
    require(count < SIZE and 0 <= t.offset < SIZE and t.span < SIZE, f"{what} has {SIZE} elements or more")
    require(t.base is not None or not t.offset, f"{what} begins {t.offset} elements into its own storage")
    reach = 0
    for stride, n in sorted(zip(t.strides, t.padded, strict=True)):
        if n > 1 and not empty:
            if stride <= reach:
                raise PlanError(f"{what}: elements in the same place, by strides {t.strides}")
            reach += stride * (n - 1)


def _check_form(name: str, form: Form, program: Program) -> None:
    what = f"{form.tensor!r}, which is a form of {name!r}"
    require({name, form.tensor} <= program.constants.keys(), f"{what}: one of them is no constant")
    shape, own, together = program.tensors[name].shape, program.tensors[form.tensor].shape, 0
    match form:
        case Grouped(groups=groups, of=of) if 0 < groups < of and of % groups == 0:
            together = of // groups
    fits = len(shape) > 1 and own == (shape[0], shape[1] * together, *shape[2:]) and together
    require(fits, f"{what}, has shape {own} where that has {shape}")


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
        t = program.tensors[op.y]
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

    def _along(self, block: Block) -> tuple[int, int]:
        return block[self._axis] if self._axis >= 0 else (0, 1)

    def _shared(self, block: Block) -> int:
        """How many elements of a block have been written."""
        return sum(common(block, other) for other in {*self._line.between(*self._along(block))})


# --- Ops -------------------------------------------------------------------------------------------------------------


def _check_op(op: Op, program: Program, given: Collection[str]) -> None:
    require(op.nodes, f"{type(op).__name__} without a node's name")
    what = f"{type(op).__name__} {op.nodes[0]!r}"
    places = op.at if isinstance(op, Scatter) else ()
    for view in op.views + ((View(op.y, places),) if places else ()):
        for index in (*view.index, *(r.index for r in view.valid)):
            require(_depth(index, _parts) < DEPTH, f"{what}: an index of {view.tensor!r} nests too deep")
    for name in (*op.inputs, op.y):
        require(name in program.tensors, f"{what}: {name!r} is no tensor")
    owner = program.tensors[op.y].storage
    require(owner not in given, f"{what}: writes into {owner!r}, which is an input or a constant")
    y, b = program.tensors[op.y].shape, op.epilogue.shuffle
    require(1 <= b < EXTENT and (b == 1 or (len(y) == 4 and y[2] % b == y[3] % b == 0)), f"{what}: shuffle {b} of {y}")
    shape = program.op_shape(op)
    for view in op.views:
        _check_view(view, program.tensors, shape, what)
    if isinstance(op, Scatter):
        _check_view(View(op.y, places), program.tensors, program.tensors[op.updates].shape, what)
    _check_expr(op.epilogue.expr, len(op.views), not isinstance(op, Pointwise), what)
    if not isinstance(op, Pointwise):  # which has no parameters
        operands = {name: program.tensors[name].shape for name in op.operands}
        message = f"{what}: shapes {list(operands.values())} to {shape} do not fit its parameters"
        require(all(RULES[type(op)](op, operands, shape)), message)
    for name in op.integers:
        _check_integers(program.tensors[name], what)


def _conv(op: Conv, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x, w = shapes[op.x], shapes[op.w]
    yield len(x) == len(w) == len(y) and _windows(w[2:], op.strides, op.pads, op.dilations, y)
    yield _covered(x, w[2:], op.strides, op.dilations, y)
    yield op.groups >= 1 and x[0] == y[0] and w[0] == y[1] and w[0] % op.groups == 0 and x[1] == w[1] * op.groups


def _pool(op: Pool, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x = shapes[op.x]
    yield len(x) == len(y) and x[:2] == y[:2] and op.kind in ("max", "mean")
    yield _windows(op.window, op.strides, op.pads, op.dilations, y)
    yield _covered(x, op.window, op.strides, op.dilations, y)
    yield len(op.end_pads) == len(op.pads) and all(0 <= p < EXTENT for p in op.end_pads)


def _windows(window: Shape, strides: Shape, pads: Shape, dilations: Shape, y: Shape) -> bool:
    """Whether parameters of a convolution or a pooling fit their rank, and what all windows cover is no more than EXTENT."""
    return (
        len(y) in (3, 4)
        and len(window) == len(strides) == len(pads) == len(dilations) == len(y) - 2
        and all(p >= 0 for p in pads)
        and all(k >= 1 and s >= 1 and d >= 1 for k, s, d in zip(window, strides, dilations, strict=True))
        and all(p * s + k * d < EXTENT for p, s, k, d in zip(y[2:], strides, window, dilations, strict=True))
    )


ON_THE_WAY, TIMES = 1 << 25, 64
"""Elements that computing an op may make between its operands and its result: so many, or so many times those that they have."""


def _in_proportion(made: int, *shapes: Shape) -> bool:
    return made <= max(ON_THE_WAY, TIMES * sum(map(math.prod, shapes)))


def _covered(x: Shape, window: Shape, strides: Shape, dilations: Shape, y: Shape) -> bool:
    """Whether windows cover no more than an image and some padding."""
    sides = (max(p - 1, 0) * s + (k - 1) * d + 1 for p, s, k, d in zip(y[2:], strides, window, dilations, strict=True))
    return _in_proportion(math.prod(x[:2]) * math.prod(sides), x, y)


def _gemm(op: Gemm, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    a, b = shapes[op.a], shapes[op.b]
    yield len(a) >= 2 and len(b) >= 2 and a[-1] == b[-1] and y == (*a[:-1], b[-2]) and (len(b) == 2 or b[:-2] == a[:-2])


def _mlp(op: Mlp, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x, w, v = shapes[op.x], shapes[op.w], shapes[op.v]
    yield all(len(s) == 4 and s[2:] == (1, 1) for s in (x, w, v, y))
    yield x[1] == w[1] and w[0] == v[1] and y[:2] == (x[0], v[0])
    yield op.b is None or shapes[op.b] == w[:1]
    yield _in_proportion(x[0] * w[0], x, w, v, y)
    _check_expr(op.hidden, 0, True, "hidden")


def _attention(op: Attention, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    q, k, v = shapes[op.q], shapes[op.k], shapes[op.v]
    yield len(q) == len(k) == len(v) == len(y) == 4 and q[3] == k[3] and k[:3] == v[:3] and y == (*q[:3], v[3])
    yield q[0] == k[0] and k[1] >= 1 and q[1] % k[1] == 0
    yield math.isfinite(op.scale) and (op.causal is None or abs(op.causal) < EXTENT)
    if op.mask is not None:
        scores = (*q[:3], k[2])
        yield len(shapes[op.mask]) == 4 and all(n in (1, s) for n, s in zip(shapes[op.mask], scores, strict=True))


def _cumulate(op: Cumulate, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    yield shapes[op.x] == y and _axes((op.axis,), y) and op.combine in ("add", "mul")


def _top_k(op: TopK, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x = shapes[op.x]
    yield _axes((op.axis,), x) and len(y) == len(x) and y[op.axis] <= x[op.axis]
    yield all(n == y[a] for a, n in enumerate(x) if a != op.axis)


def _trees(op: Trees, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x, branches, leaves = shapes[op.x], shapes[op.branches], shapes[op.leaves]
    yield len(x) == len(y) == 2 and x[0] == y[0] and x[1] >= 1 and op.combine in ("add", "min", "max")
    yield len(branches) == len(leaves) == 1 and branches[0] % 4 == 0 and branches[0] >= 8 and leaves[0] % 2 == 0
    yield 1 <= op.trees <= branches[0] // 4 and 0 <= op.depth < branches[0] // 4 and op.depth <= TREE


def _scatter(op: Scatter, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    yield shapes[op.x] == y and op.combine in ("set", "add", "mul", "min", "max")


def _reduce(op: Reduce, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x = shapes[op.x]
    yield _axes(op.axes, x) and y == tuple(1 if a in op.axes else n for a, n in enumerate(x))
    yield op.combine in ("add", "mul", "min", "max")
    _check_expr(op.pre, 0, True, "pre")


def _softmax(op: Softmax, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    yield shapes[op.x] == y and _axes((op.axis,), y)


def _norm(op: Norm, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    yield shapes[op.x] == y and _axes(op.axes, y)
    yield op.groups == 0 or (op.groups > 0 and len(y) >= 2 and y[1] % op.groups == 0 and 1 not in op.axes)


def _resize(op: Resize, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x = shapes[op.x]
    yield len(x) == len(y) and _axes(op.axes, x) and len(op.axes) == len(op.index) == len(op.weights)
    yield all(n == y[a] for a, n in enumerate(x) if a not in op.axes)
    way = list(x)
    for axis, index, weights in zip(op.axes, op.index, op.weights, strict=True):
        way[axis] = y[axis]
        yield _in_proportion(math.prod(way), x, y)
        yield len(shapes[index]) == 2 and shapes[index] == shapes[weights] and shapes[index][0] == y[axis]
        yield shapes[index][1] >= 1 and x[axis] >= 1


def _rnn(op: Rnn, shapes: dict[str, Shape], y: Shape) -> Iterator[bool]:
    x, d = shapes[op.x], len(op.backward)
    yield op.cell in GATES and len(x) == 3 and len(y) == 4 and len(shapes[op.r]) == 4 and op.epilogue == Epilogue()
    gates, n, h = GATES[op.cell], x[1], shapes[op.r][-1]
    yield d in (1, 2) and shapes[op.r] == (d, gates, h, h) and x[2] == d * gates * h
    yield y == (x[0] + 1 + (op.cell == "lstm"), d, n, h)
    yield all(name is None or shapes[name] == (d, n, h) for name in (op.h, op.c))
    yield (op.b is None or shapes[op.b] == (d, h)) and (op.p is None or shapes[op.p] == (d, 3, h))
    yield op.lengths is None or shapes[op.lengths] == (n,)
    yield len(op.functions) == d and all(len(f) == {"rnn": 1, "gru": 2, "lstm": 3}[op.cell] for f in op.functions)
    yield op.clip > 0
    for function in (f for of_one in op.functions for f in of_one):
        _check_expr(function, 0, True, "an activation")


def _axes(axes: tuple[int, ...], shape: Shape) -> bool:
    return len(set(axes)) == len(axes) and all(0 <= a < len(shape) for a in axes)


RULES: dict[type[Op], Callable[..., Iterator[bool]]] = {
    Attention: _attention,
    Conv: _conv,
    Cumulate: _cumulate,
    Scatter: _scatter,
    TopK: _top_k,
    Trees: _trees,
    Gemm: _gemm,
    Mlp: _mlp,
    Norm: _norm,
    Pool: _pool,
    Reduce: _reduce,
    Resize: _resize,
    Rnn: _rnn,
    Softmax: _softmax,
}
"""Whether an op's parameters and the shapes of its operands, by name, fit the shape that it computes. Every op has one."""


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
                require(abs(factor) < SIZE, f"{what}: an index of {view.tensor!r} has the factor {factor}")
                if isinstance(atom, Coord):
                    require(0 <= atom.axis < len(shape), f"{what}: an index of {view.tensor!r} has no axis {atom.axis}")
                elif isinstance(atom, Quotient | Remainder):
                    require(0 < atom.divisor < SIZE, f"{what}: an index of {view.tensor!r} is divided by {atom.divisor}")
                elif isinstance(atom, Element):
                    elements.append(atom)
            require(abs(i.constant) < SIZE, f"{what}: an index of {view.tensor!r} has the constant {i.constant}")
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
