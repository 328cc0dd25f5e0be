"""What happens to a kernel's results before and while they are stored: the epilogue's expression, its loads, y's layout.

A kernel computes its op's result as rows m and groups of neighbouring lanes c, and hands each group to `store`: float32, or int64
for integers that stay exact (`Form.taken`). Which axis is which is a `Frame`; how each tensor is read or written for it is
`describe`'s choice:

mode  how a group's lanes are read or written. "vector": neighbours in memory, accesses of up to 16 bytes; "strided": one access
      a lane; "guarded": the same, lanes at and beyond the result's channels not touched; "same": one element for all lanes
rows  how the address depends on m. "none": not at all; "linear": m times a stride; "general": a stride for each dimension of
      the rows, and m is taken apart by multiplications with reciprocals (once for all accesses)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tccompile.errors import UnsupportedError
from tccompile.ir.expr import Expr, View, cast, load, substitute, walk
from tccompile.ir.extent import Extent, Shape, UndecidedError, ceil_div, divides, greatest, round_up, same
from tccompile.ir.ops import Attention, Conv, Gemm, Op, Pool
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.codegen import (
    Lines,
    Parameters,
    coarse,
    decode,
    divider,
    encode,
    lifted,
    split,
    tuple_of,
    types_of,
    unrounded,
)
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import F32, I32, Arg, Ptr, Value
from tccompile.kernels.text import DeviceText, Intrinsic, device_function, intrinsic

BYTES = DType.I8, DType.U8

Frame = tuple[int | None, ...]
"""The axes of the result: those of the rows, outermost first, then that of the lanes. None where the result has no such axis.

Convolutions have (n, p, q, c): the row of an output pixel is (n * P + p) * Q + q.
"""


def frame_of(op: Op, program: Program) -> Frame:
    """The rows and lanes of an op's result: channels are the lanes of images, else y's innermost axis."""
    rank, y = len(program.op_shape(op)), program.tensors[op.y]
    if isinstance(op, Conv) or (isinstance(op, Pool) and y.padded[2:] == y.shape[2:]):
        return (0, 2, 3, 1) if rank == 4 else (0, None, 2, 1)
    inner = y.inner
    lane = rank - 1 if isinstance(op, Attention | Gemm) or inner is None else inner
    rows = [a for a in range(rank) if a != lane]
    return (*[None] * (3 - len(rows)), *rows, lane)


@dataclass(frozen=True)
class Read:
    """How a tensor is read for the result's rows and lanes: `mode` and `rows` of the module's text."""

    dtype: DType
    mode: str
    rows: str

    @property
    def by_row(self) -> bool:
        """Whether it reads something else for each row, such as a residual."""
        return self.rows != "none"


@dataclass(frozen=True)
class Written:
    """How y is written: `mode` and `rows` of the module's text.

    masked    lanes at and beyond the result's channels are stored as zeros: they are y's padding
    shuffled  depth-to-space: `Epilogue.shuffle` is a block of more than 1
    """

    dtype: DType
    mode: str
    rows: str
    masked: bool
    shuffled: bool


@dataclass(frozen=True)
class Form:
    """All that an epilogue's code is made from. It holds no shapes, which are arguments of the launch, so that ops share codes.

    lanes  neighbouring results that a call stores of a row
    depth  dimensions of the rows, after merging
    expr   the epilogue's expression, with constants as arguments: see `codegen.lifted`
    also   the type of a second result, which lies as y does, and its expression of what y holds: see `Op.also`
    """

    lanes: int
    depth: int
    y: Written
    loads: tuple[Read, ...]
    expr: Expr
    also: tuple[DType, Expr] | None = None

    @property
    def encoded(self) -> tuple[Value, ...]:
        """Nested tuples of strings and numbers, as `Code.params` holds them; `Form.decoded` reads them."""
        y = (self.y.dtype.value, self.y.mode, self.y.rows, self.y.masked, self.y.shuffled)
        loads = tuple((load.dtype.value, load.mode, load.rows) for load in self.loads)
        also = () if self.also is None else ((self.also[0].value, encode(self.also[1])),)
        return self.lanes, self.depth, y, loads, encode(self.expr), *also

    @staticmethod
    def decoded(params: Value) -> Form:
        """The form that `encoded` gave."""
        lanes, depth, (dtype, *how), loads, expr, *also = params
        reads = tuple(Read(DType(kind), mode, rows) for kind, mode, rows in loads)
        second = (DType(also[0][0]), decode(also[0][1])) if also else None
        return Form(lanes, depth, Written(DType(dtype), *how), reads, decode(expr), second)

    @property
    def taken(self) -> DType:
        """The compute type in which it takes results: float32, or int64 for integers that stay exact."""
        return next((e.dtype for e in walk(self.expr) if e.fn == "acc"), DType.F32)

    @property
    def unmasked(self) -> Form:
        """The same without zeros for y's padding, with the same arguments: for groups of lanes that have none of it."""
        return replace(self, y=replace(self.y, masked=False))

    @property
    def loads_by_row(self) -> int:
        """How many tensors it reads something else of for each row."""
        return sum(load.by_row for load in self.loads)


@dataclass(frozen=True)
class EpilogueSpec:
    """How to store one op's results.

    form  what its code is made from
    args  the arguments of the launch that the stored function takes as `e`
    """

    form: Form
    args: tuple[Arg, ...]

    @property
    def params(self) -> tuple[Value, ...]:
        """The form as a code's parameter: `code(…, epilogue=spec.params)`, of which `build` makes the function."""
        return self.form.encoded


@dataclass(frozen=True)
class RowLoad:
    """A tensor of which the epilogue reads something else for each row.

    offset  of what row 0 reads, in elements from the tensor's first one
    step    elements from row to row, or None where rows lie at several strides
    vector  whether neighbouring columns are neighbours in memory, and groups of 8 begin at multiples of 16 bytes
    strides  elements from one to the next along each axis of the result
    """

    tensor: Tensor
    offset: Extent
    step: Extent | None
    vector: bool
    strides: Shape


@dataclass(frozen=True)
class _Access:
    """One tensor as an affine function of the result's coordinates, in elements from its first one."""

    tensor: Tensor
    strides: Shape  # by axis of the result
    offset: Extent


def _access(program: Program, view: View, rank: int) -> _Access:
    tensor = program.tensors[view.tensor]
    strides: list[Extent] = [0] * rank
    offset: Extent = 0
    for index, stride in zip(view.index, tensor.strides, strict=True):
        assert index.affine is not None
        offset += index.constant * stride
        for axis, k in index.affine.items():
            strides[axis] += k * stride
    return _Access(tensor, tuple(strides), offset)


@remembered
def describe(op: Op, program: Program, frame: Frame, lanes: int = 8) -> EpilogueSpec:
    """How `op` stores groups of `lanes` (1, 2, 4 or 8) neighbouring results.

    Groups with c at or beyond y's padded extent are ignored, those below it must all be stored, with any values beyond the
    result's channels. Raises UnsupportedError for a tensor with a stride of 2**31 elements or more.
    """
    assert lanes in (1, 2, 4, 8)
    shape, y, block = program.op_shape(op), program.tensors[op.y], op.epilogue.shuffle
    lane = frame[-1]
    assert lane is not None
    for axis, (n, padded) in enumerate(zip(y.shape, y.padded, strict=True)):
        assert axis == lane or n == padded, f"{y.name}: padding along axis {axis}, which holds rows"
    accesses = [_access(program, view, len(shape)) for view in op.epilogue.loads]
    rows = [a for a in frame[:-1] if a is not None and (shape[a] > 1 or block > 1)]
    y_strides = list(y.strides)
    if block > 1:
        y_strides[2], y_strides[3] = block * y.strides[2], block * y.strides[3]
    dims = _merged(rows, shape, [tuple(y_strides), *(a.strides for a in accesses)], block > 1)
    y_rows, y_args = _rows(dims, tuple(y_strides), y.name)
    args: list[Arg] = [I32(v) for extent, _ in dims[1:] for v in (extent, *divider(extent))]
    args += [Ptr(op.y), *y_args]
    channels, padded = shape[lane], y.padded[lane]
    if block > 1:
        mode = _shuffled_mode(y, lanes)
        args += map(I32, (channels, padded, y.strides[1], y.shape[1], *divider(y.shape[1])))
        args += map(I32, (block, *divider(block), y.strides[2], y.strides[3]))
    else:
        vector = y.strides[lane] == 1 and divides(lanes, padded) and _aligned(y, lanes, 0, [y.strides[a] for a in rows])
        mode = "vector" if vector else "strided" if divides(lanes, padded) else "guarded"
        args += [I32(channels), I32(padded), I32(y.strides[lane])]
    reach = round_up(greatest(channels, padded if block == 1 else 0), lanes)  # lanes that groups ask for
    loads = []
    for access in accesses:
        how, more = _rows(dims, access.strides, access.tensor.name)
        loads.append(Read(access.tensor.dtype, _read_mode(access, shape, lane, rows, lanes, reach), how))
        step = _small(access.strides[lane], access.tensor.name)
        args += [Ptr(access.tensor.name, access.offset * access.tensor.dtype.size), *more, I32(step)]
    target = Written(y.dtype, mode, y_rows, block == 1 and not _always(padded, channels), block > 1)
    expr, scalars = _stored(op.epilogue.expr, y.dtype, isinstance(op, Conv | Gemm))
    form = Form(lanes, len(dims), target, tuple(loads), expr)
    if op.also is None:
        return EpilogueSpec(form, (*args, *scalars))
    second = program.tensors[op.also.y]
    assert (y.dtype, second.dtype.size) == (DType.F16, 1) and block == 1, f"{y.name}: bytes are stored beside halves only"
    beside, own = lifted(unrounded(op.also.expr, second.dtype))
    return EpilogueSpec(replace(form, also=(second.dtype, beside)), (*args, *scalars, Ptr(second.name), *y_args, *own))


@remembered
def _stored(expr: Expr, dtype: DType, product: bool) -> tuple[Expr, tuple[I32 | F32, ...]]:
    """What an op's expression becomes where this is stored of it, and constants that are arguments."""
    expr = _rounded_once(expr) if product else expr
    return lifted(coarse(unrounded(expr, dtype), dtype))


def _rounded_once(expr: Expr) -> Expr:
    """A product's expression of its sum in float32, where it takes the exact one so and no other way: it is rounded once."""
    exact = Expr("acc", (), None, DType.I64)
    found = substitute(expr, {cast(exact, DType.F32): Expr("acc")})
    return expr if exact in walk(found) else found


def _shuffled_mode(y: Tensor, lanes: int) -> str:
    """How depth-to-space writes groups of lanes: whole ones where none of them spans two pixels of a block."""
    whole = divides(lanes, y.shape[1]) and same(y.padded[1], y.shape[1]) and y.strides[1] == 1
    return "vector" if whole and _aligned(y, lanes, 0, [y.strides[a] for a in (0, 2, 3)]) else "strided"


def _read_mode(access: _Access, shape: Shape, lane: int, rows: list[int], lanes: int, reach: Extent) -> str:
    """How a tensor is read for groups of lanes, which ask for `reach` lanes from the result's first channel on.

    lane, rows  the result's axes of the lanes and of the rows
    """
    strides, tensor = access.strides, access.tensor
    if strides[lane] == 0:
        return "same"
    within = access.offset + sum((shape[a] - 1) * s for a, s in enumerate(strides) if s > 0 and a != lane)
    covered = _always(shape[lane], reach) or _always(greatest(within + reach, tensor.span), tensor.span)
    if strides[lane] == 1 and covered and _aligned(tensor, lanes, access.offset, [strides[a] for a in rows]):
        return "vector"
    return "strided" if _always(shape[lane], reach) else "guarded"


def _always(a: Extent, b: Extent) -> bool:
    """Whether two extents are the same at all sizes. Where they are so at some only, code looks for itself, which suits all."""
    try:
        return same(a, b)
    except UndecidedError:
        return False


def lane_groups(op: Op, program: Program, frame: Frame, lanes: int = 8) -> Extent:
    """How many groups of lanes a row has: those that must be stored."""
    lane = frame[-1]
    assert lane is not None
    extent = program.tensors[op.y].padded[lane] if op.epilogue.shuffle == 1 else program.op_shape(op)[lane]
    return ceil_div(extent, lanes)


@remembered
def loads_by_row(op: Op, program: Program) -> tuple[RowLoad, ...]:
    """What the epilogue reads elsewhere for each row, such as a residual: what it costs depends on them."""
    shape, frame = program.op_shape(op), frame_of(op, program)
    found = []
    for view, read in zip(op.epilogue.loads, describe(op, program, frame).form.loads, strict=True):
        if read.by_row:
            access = _access(program, view, len(shape))
            step = next((access.strides[a] for a in reversed(frame[:-1]) if a is not None and shape[a] > 1), 0)
            linear, vector = read.rows == "linear", read.mode == "vector"
            found.append(RowLoad(access.tensor, access.offset, step if linear else None, vector, access.strides))
    return tuple(found)


Dims = list[tuple[Extent, list[int]]]
"""Dimensions of the rows, outermost first: their extents, and the axes of the result that each is made of."""


def _merged(rows: list[int], shape: Shape, strides: list[Shape], apart: bool) -> Dims:
    """The fewest dimensions in which every access has one stride a dimension."""
    dims: Dims = []
    for axis in rows:
        if dims and not apart and all(same(s[dims[-1][1][-1]], s[axis] * shape[axis]) for s in strides):
            dims[-1] = (dims[-1][0] * shape[axis], [*dims[-1][1], axis])
        else:
            dims.append((shape[axis], [axis]))
    return dims


def _rows(dims: Dims, strides: Shape, name: str) -> tuple[str, list[Arg]]:
    """How an access depends on the row, and its strides as arguments."""
    steps = [_small(strides[axes[-1]], name) for _, axes in dims]
    if not any(steps):
        return "none", []
    if all(same(steps[i], steps[i + 1] * dims[i + 1][0]) for i in range(len(dims) - 1)):
        return "linear", [I32(steps[-1])]
    return "general", [I32(s) for s in steps]


def _small(stride: Extent, name: str) -> Extent:
    if not -(2**31) <= stride < 2**31:
        raise UnsupportedError(f"tensor {name}: a stride of {stride} elements; kernels take strides below 2**31")
    return stride


def _aligned(tensor: Tensor, lanes: int, offset: Extent, strides: list[Extent]) -> bool:
    """Whether groups of lanes begin at multiples of their size (16 bytes at most); storage itself is aligned to 16."""
    width = min(16, lanes * tensor.dtype.size)
    return all(divides(width, n * tensor.dtype.size) for n in (tensor.offset, offset, *strides))


# --- The code --------------------------------------------------------------------------------------------------------


def build(params: tuple[Value, ...], rows: int = 1, space: str = "global") -> tuple[Any, tuple[Any, ...]]:
    """The device function `store` and the Numba types of what `e` holds, for `EpilogueSpec.params`.

    store(acc, m, c, e)               `lanes` values of acc, of type `Form.taken`: the results of channels c … c + lanes - 1 (c a
                                      multiple of lanes) of row m (int32 both)
    store(acc, m, step, end, c, e)    with `rows` > 1: those of rows m, m + step, … one after the other; rows at and beyond `end`
                                      are ignored, but m lies below it. All rows' loads are issued before the first store
    e                                 a tuple of the launch's `EpilogueSpec.args`
    space                             where it stores, of `memory.SPACES`
    """
    found = source(Form.decoded(params), rows, space=space)
    return device_function(found.function), types_of(found.kinds)


def rectifies(params: tuple[Value, ...]) -> bool:
    """Whether what is stored are floats of 8 bits behind ReLU, which an instruction that rounds to them computes too."""
    form = Form.decoded(params)
    return form.y.dtype in FLOAT8 and form.expr.fn == "relu"


def build_results(
    params: tuple[Value, ...], rows: int = 2, groups: int = 1, rectified: bool = True
) -> tuple[Any, tuple[Any, ...]]:
    """As `build`, for a kernel that reads and stores by itself what differs by row, of some rows.

    results(acc, c, e)         rows · `lanes` float32 of acc, those of one row after those of another → as many that y is to hold,
                               rounded to nothing yet, nor saturated; zeros in y's padding, anything beyond it. With
                               `groups`, the same of channels c + 8, c + 16 … after them: then y's padded extent is a multiple of
                               8 · groups
    results(acc, added, c, e)  where a load differs by row: `added` has its values in the order of `acc`, as `load_added` gives
                               them

    rectified  whether results are those behind ReLU where the epilogue `rectifies`, or before it
    """
    form = Form.decoded(params) if rectified else _before_relu(params)
    found = source(form, rows, stores=False, groups=groups)
    return device_function(found.function), types_of(found.kinds)


def _before_relu(params: tuple[Value, ...]) -> Form:
    form = Form.decoded(params)
    return replace(form, expr=form.expr.args[0]) if rectifies(params) else form


def adds_floats(form: Form) -> bool:
    """Whether what differs by row is taken as float32, if anything does."""
    floats = _bytes_as_floats(form)[1]
    return all(k in floats or read.dtype.is_float for k, read in enumerate(form.loads) if read.by_row)


def load_added(params: tuple[Value, ...], n: int, space: str) -> Any:
    """The device function address → n values of what differs by row, as `results` of `build_results` takes them."""
    from tccompile.kernels.ptx import memory

    form = Form.decoded(params)
    (k,) = (k for k, read in enumerate(form.loads) if read.by_row)
    of = memory.load_floats if k in _bytes_as_floats(form)[1] else memory.load
    return of(form.loads[k].dtype, n, space=space)


def floats_added(params: tuple[Value, ...], n: int) -> Any:
    """The device function (words…) → n float32 of what differs by row: see `adds_floats`."""
    from tccompile.kernels.ptx import memory

    (read,) = (read for read in Form.decoded(params).loads if read.by_row)
    return memory.floats(read.dtype, n)


def build_kept(params: tuple[Value, ...], rows: int = 2, rectified: bool = True) -> tuple[Any, Any, tuple[Any, ...]]:
    """As `build_results`, for a kernel that stays with its columns.

    kept(c, e)                what is read for channels c … c + lanes - 1 of every row
    results(acc, read, c, e)  `read`: what `kept` gave for the same c; with `added` before it, as there
    """
    form = Form.decoded(params) if rectified else _before_relu(params)
    found = source(form, rows, stores=False, keeps=True)
    assert found.kept
    return device_function(found.kept), device_function(found.function), types_of(found.kinds)


def build_ahead(params: tuple[Value, ...]) -> Any:
    """The device function ahead(c, e): what `store` reads for channels c … c + lanes - 1 of every row, such as a bias, is to come
    to the L2 cache meanwhile. It may be called before earlier grids have ended: L2 sees what they write."""
    return device_function(source(Form.decoded(params)).ahead)


class Source(NamedTuple):
    """An epilogue as text: `store` or else `results`, the kinds of what `e` holds ("address", "int" or "float"), `ahead`, and
    `kept` for a kernel that stays with its columns."""

    function: DeviceText
    kinds: tuple[str, ...]
    ahead: DeviceText
    kept: DeviceText | None


def source(form: Form, rows: int = 1, stores: bool = True, keeps: bool = False, space: str = "global", groups: int = 1) -> Source:
    """What an epilogue's functions are made of: see `build`, `build_results`, `build_kept` and `build_ahead`."""
    assert (stores or (form.loads_by_row <= 1 and form.also is None)) and (groups == 1 or not (stores or keeps))
    return _Writer(form, rows, stores, keeps, space, groups).source()


GROUP = 8
"""Channels from one group of a lane's to the next, as the sums of Tensor Cores lie."""


def _bytes_as_floats(form: Form) -> tuple[Expr, frozenset[int]]:
    """The expression with bytes read as float32 where nothing reads them otherwise, and the numbers of those loads."""
    uses = [(e.fn == "cast" and e.dtype is DType.F32, x.value) for e in walk(form.expr) for x in e.args if x.fn == "load"]
    others = {number for alone, number in uses if not alone}
    of_bytes = {k for k, read in enumerate(form.loads) if read.dtype in (DType.I8, DType.U8)}
    found = of_bytes & {number for _, number in uses} - others
    leaf = {cast(load(k, DType.I64), DType.F32): load(k) for k in found}  # type: ignore[arg-type]
    return (substitute(form.expr, leaf) if leaf else form.expr), frozenset(found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Target:
    """The names of the arguments that say where y lies; the last four only of a shuffled one.

    step       elements from lane to lane
    remaining  the divider of y's channels, and `block` that of the shuffle's block
    y_p, y_q   elements from row to row and from column to column of y's pixels
    """

    channels: str
    padded: str
    step: str
    remaining: tuple[str, str, str] = ("", "", "")
    block: tuple[str, str, str] = ("", "", "")
    y_p: str = ""
    y_q: str = ""


class _Writer:
    """Puts the text together, and takes the launch's arguments in the order in which `describe` gives them."""

    def __init__(self, form: Form, rows: int, stores: bool, keeps: bool, space: str, groups: int) -> None:
        self.form, self.rows, self.stores, self.keeps, self.space, self.groups = form, rows, stores, keeps, space, groups
        self.expr, self.floats = _bytes_as_floats(form)
        # Whether results are floats up to where several bytes are rounded and packed at once.
        self.rounds = form.y.dtype in BYTES and (not stores or (form.y.mode == "vector" and form.lanes > 1))
        self.accesses: dict[str, Intrinsic] = {}
        self.arguments = Parameters("e[{}]")
        self.out, self.kept = Lines(), Lines()
        self.kept.narrow = self.out.narrow
        self.reading = self.kept if keeps else self.out  # where loads that are the same for every row are written
        self.found: list[str] = []  # the names of what was loaded, each once

    def source(self) -> Source:
        # The rows' numbers, and their coordinates, innermost last, if anything needs them. A row too many reads what row m reads.
        form, out = self.form, self.out
        self.numbers = ["m"] + [out.let(f"i32(m + step * {r})") for r in range(1, self.rows) if self.stores]
        read_from = ["m"] + [out.let(f"select({n} < end, {n}, m)") for n in self.numbers[1:]]
        self.read_from = read_from + ["m"] * (self.rows - len(self.numbers))
        inner = [self.arguments.divider() for _ in range(form.depth - 1)]
        apart = self.stores and "general" in (form.y.rows, *(load.rows for load in form.loads))
        self.digits = [split(out, n, inner) if apart else [] for n in self.read_from]
        first = self.arguments.take("address")
        addresses = [f"{first}{row}" for row in self._offsets(form.y.rows, form.y.dtype.size)]
        self.addresses = [out.let(text) for text in addresses] if self.stores else []
        self.target = self._target()
        ahead, values = self._loads()
        out.scalars = self.arguments.scalars(form.expr)
        self._take_second()
        return self._store(values, ahead) if self.stores else self._results(values, ahead)

    def _offsets(self, how: str, size: int) -> list[str]:
        """Bytes from the tensor's first element to each row's, as text to add."""
        strides = [self.arguments.take() for _ in range({"none": 0, "linear": 1, "general": self.form.depth}[how])]
        if not self.stores:  # the copy engine knows where rows lie
            return [""] * len(self.read_from)
        each = [{"none": [], "linear": [n], "general": d}[how] for n, d in zip(self.read_from, self.digits, strict=True)]
        return ["".join(f" + i64({d}) * (i64({s}) * {size})" for d, s in zip(at, strides, strict=True)) for at in each]

    def _take_second(self) -> None:
        """The addresses of a second result's rows, and the scalars of its expression."""
        self.second, self.more = list[str](), list[str]()
        if self.form.also is not None:
            dtype, expr = self.form.also
            first = self.arguments.take("address")
            self.second = [self.out.let(f"{first}{row}") for row in self._offsets(self.form.y.rows, dtype.size)]
            self.more = self.arguments.scalars(expr)

    def _target(self) -> _Target:
        take, divider = self.arguments.take, self.arguments.divider
        where = take(), take(), take()
        return _Target(*where, divider(), divider(), take(), take()) if self.form.y.shuffled else _Target(*where)

    # --- Loads ---

    def _loads(self) -> tuple[DeviceText, list[list[list[str]]]]:
        """The text of `ahead`, and the names of what is read: [r][k][i] is load k in lane i of row r; rows of the next group of
        channels come after all of those before.

        What does not depend on the row is read once.
        """
        values: list[list[list[str]]] = [[] for _ in range(self.rows * self.groups)]
        ahead = [f"if c < {self.target.channels}:", "    pass"]
        for k, read in enumerate(self.form.loads):
            size = read.dtype.size
            first = self.arguments.take("address")
            bases = [f"{first}{row}" for row in self._offsets(read.rows, size)]
            step = self.arguments.take()
            if not read.by_row:
                ahead.append(f"    prefetch({first} + i64(c) * (i64({step}) * {size}))")
            if not self.stores and read.by_row:
                for r, loaded in enumerate(values):
                    names = [f"added[{r * self.form.lanes + i}]" for i in range(self.form.lanes)]
                    loaded.append([self._as_taken(k, name) for name in names])
                continue
            together = self.form.lanes if read.mode == "vector" else 1
            how = "load_floats" if k in self.floats else "load"
            self.accesses[f"load{k}"] = intrinsic(f"ptx.memory.{how}", read.dtype, together, read.mode == "guarded")
            for r, loaded in enumerate(values):
                found = self._load(k, bases[r % self.rows], step, GROUP * (r // self.rows))
                lanes = [self._as_taken(k, name) for name in found]
                self.found += [name for name in lanes if name not in self.found]
                loaded.append([f"read[{self.found.index(name)}]" for name in lanes] if self.keeps else lanes)
        return DeviceText("ahead", "c, e", ahead, {"prefetch": intrinsic("ptx.memory.prefetch")}), values

    def _as_taken(self, k: int, name: str) -> str:
        """What was loaded in the type in which the expression takes load k."""
        return name if k in self.floats else self.reading.loaded(name, self.form.loads[k].dtype)

    def _load(self, k: int, base: str, step: str, further: int) -> list[str]:
        """The names of what load k gives for each lane of one row, of a group of channels that is so many further; `base` is the
        address of the row's first element."""
        lanes, read = self.form.lanes, self.form.loads[k]
        let, size = self.reading.let, read.dtype.size
        if read.mode == "same":
            return [let(f"load{k}({base})")] * lanes
        if read.mode == "vector":
            at = f"{base} + i64(c) * {size}"
            group = let(f"load{k}({let(at)} + {further * size})" if further else f"load{k}({at})")
            return [let(f"{group}[{i}]") if lanes > 1 else group for i in range(lanes)]
        each = []
        for i in range(further, further + lanes):
            at = f"c + {i}" if i else "c"
            guard = f", {at} < {self.target.channels}" if read.mode == "guarded" else ""
            each.append(let(f"load{k}({base} + i64({at}) * (i64({step}) * {size}){guard})"))
        return each

    # --- Results ---

    def _row(self, r: int, values: list[list[str]]) -> list[str]:
        """The names of row r's results, as the store takes them."""
        form, out = self.form, self.out
        lanes, y, further = range(form.lanes), form.y, GROUP * (r // self.rows)
        value = out.byte if y.dtype in BYTES else out.value

        def leaf(i: int) -> Callable[[Expr], str]:
            return lambda e: f"acc[{r * form.lanes + i}]" if e.fn == "acc" else values[e.value][i]  # type: ignore[index]

        if self.rounds:
            results = [out.unrounded(self.expr, leaf(i), y.dtype) for i in lanes]
        else:
            results = [out.stored(value(self.expr, leaf(i)), form.expr.dtype, y.dtype) for i in lanes]
        return self._masked(results, y.dtype, further)

    def _masked(self, results: list[str], dtype: DType, further: int = 0) -> list[str]:
        """Results with zeros in the padding."""
        if not self.form.y.masked:
            return results
        within = self.out.let(f"i32({self.target.channels} - c)")  # in 32 bits, as `c + i` would not be
        zero = self._zero_of(dtype)
        return [self.out.let(f"select({within} > i32({further + i}), {v}, {zero})") for i, v in enumerate(results)]

    def _beside(self, stored: list[str]) -> list[str]:
        """The names of one row's second results, made of what is stored first: halves, as whoever reads them gets them."""
        assert self.form.also is not None
        (dtype, expr), out = self.form.also, self.out
        first, out.scalars = out.scalars, self.more
        value, halves = (out.byte if expr.dtype is DType.I64 else out.value), [out.let(f"as_half({name})") for name in stored]
        results = [out.stored(value(expr, lambda e, half=half: half), expr.dtype, dtype) for half in halves]  # type: ignore[misc]
        out.scalars = first
        return self._masked(results, dtype)

    def _zero_of(self, dtype: DType) -> str:
        return "f32(0)" if dtype.is_float or self.rounds else "i64(0)"

    def _results(self, values: list[list[list[str]]], ahead: DeviceText) -> Source:
        """The functions of a kernel that stores by itself. What lies beyond y is computed from its first columns."""
        ready = [name for r, read in enumerate(values) for name in self._row(r, read)]

        def function(name: str, params: str, body: list[str], values: list[str]) -> DeviceText:
            lines = [f"c = select(c < {self.target.padded}, c, i32(0))", *body, f"return {tuple_of(values)}"]
            return DeviceText(name, params, lines, self.accesses)

        params = f"acc, {'added, ' * self.form.loads_by_row}{'read, ' * self.keeps}c, e"
        kept = function("kept", "c, e", self.kept.lines, self.found) if self.keeps else None
        return Source(function("results", params, self.out.lines, ready), tuple(self.arguments.kinds), ahead, kept)

    # --- Stores ---

    def _store(self, values: list[list[list[str]]], ahead: DeviceText) -> Source:
        y, body = self.form.y, self.out.lines
        for r in range(self.rows):
            results, at = self._row(r, values[r]), self.addresses[r]
            puts = self._shuffled(at, results) if y.shuffled else self._straight(at, results, y.dtype)
            if self.form.also is not None:
                puts += self._straight(self.second[r], self._beside(results), self.form.also[0], "put_beside")
            body += [f"if {self.numbers[r]} < end:", *(f"    {line}" for line in puts)] if r else puts
        params = "acc, m, step, end, c, e" if self.rows > 1 else "acc, m, c, e"
        limit = self.target.channels if y.shuffled else self.target.padded
        lines = [f"if c < {limit}:", *(f"    {line}" for line in body)]
        return Source(DeviceText("store", params, lines, self.accesses), tuple(self.arguments.kinds), ahead, None)

    def _put(self, dtype: DType, lanes: int, guarded: bool, put: str = "put") -> None:
        """The function that stores so many lanes."""
        rounds = (True,) if self.rounds and lanes > 1 else ()
        self.accesses[put] = intrinsic("ptx.memory.store", dtype, lanes, guarded, self.space, *rounds)

    def _straight(self, address: str, results: list[str], dtype: DType, put: str = "put") -> list[str]:
        """Stores one row's results where their channels lie, by a function of this name."""
        y, to, size = self.form.y, self.target, dtype.size
        if y.mode == "vector":
            self._put(dtype, self.form.lanes, False, put)
            return [f"{put}({address} + i64(c) * {size}, {', '.join(results)})"]
        self._put(dtype, 1, y.mode == "guarded", put)
        guards = [f", c + {i} < {to.padded}" if y.mode == "guarded" else "" for i in range(len(results))]
        at = [f"{address} + i64(c + {i}) * (i64({to.step}) * {size})" for i in range(len(results))]
        return [f"{put}({where}, {v}{guard})" for where, v, guard in zip(at, results, guards, strict=True)]

    def _shuffled(self, address: str, results: list[str]) -> list[str]:
        """Stores one row's results by depth-to-space: see `Epilogue.shuffle`."""
        y, to, let, size = self.form.y, self.target, self.out.let, self.form.y.dtype.size
        remaining, multiplier, shift = to.remaining
        vector, puts = y.mode == "vector", []
        self._put(y.dtype, self.form.lanes if vector else 1, not vector)
        for i in range(1 if vector else self.form.lanes):
            # Channel (bp * block + bq) * remaining + k of the result goes to channel k of pixel (bp, bq) of the block.
            lane = f"i32(c + {i})"
            pixel = let(f"divide({lane}, {multiplier}, {shift})")
            channel = let(f"i32({lane} - {pixel} * {remaining})")
            bp = let(f"divide({pixel}, {to.block[1]}, {to.block[2]})")
            bq = let(f"i32({pixel} - {bp} * {to.block[0]})")
            at = let(f"{address} + (i64({bp}) * i64({to.y_p}) + i64({bq}) * i64({to.y_q})) * {size}")
            if vector:
                return [f"put({at} + i64({channel}) * {size}, {', '.join(results)})"]
            puts.append(f"put({at} + i64({channel}) * (i64({to.step}) * {size}), {results[i]}, {lane} < {to.channels})")
            # Whoever writes the pixel's last channel writes its padding too.
            puts.append(f"last = select({lane} < {to.channels}, {channel}, i32(-1)) == {remaining} - 1")
            puts.append(f"for z in range({remaining}, select(last, {to.padded}, {remaining})):")
            puts.append(f"    put({at} + i64(z) * (i64({to.step}) * {size}), {self._zero_of(y.dtype)}, 1)")
        return puts
