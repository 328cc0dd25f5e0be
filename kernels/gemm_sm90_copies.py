"""What the copy engine reads and writes for Hopper's implicit GEMM: tensor maps of operands and of results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tccompile.ir.extent import ceil_div
from tccompile.ir.forms import Sparse
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.sparse import PIECE
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.gemm_sm90_tile import Tile, stages_at_once
from tccompile.kernels.implicit_gemm import OPERANDS, Problem
from tccompile.kernels.parts.maps import may_move, unmapped
from tccompile.kernels.parts.operands import BLOCK, ROW, STEP, UNIT
from tccompile.kernels.parts.staging import BYTES, RESULT
from tccompile.kernels.ptx.atoms import BITS, group_atom
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import Arg, Im2colMap, TiledMap

EIGHTS = 32
"""Columns of a group of which a lane has 8 neighbours: see `Operand.eights`."""

PAIRED = 16
"""Columns of which neighbours are 8 rows apart."""


@dataclass(frozen=True)
class Copies:
    """How an implicit GEMM's operands are read: tensor maps whose boxes are a tile's, filled in by `work`.

    a, b      arrays of (k, rows, batches) and (k, columns, batches), or for a an im2col map; (rows, k, batches) and
              (columns, k, batches) where they are not K-major
    k_major   whether a and b are
    kinds     PTX's types of the elements of both, which have the same size
    depth     elements of K that the kernel goes through, by im2col a multiple of the box's row
    chunk     elements of a box's row; B's are `whole` beside an im2col map
    geometry  what the code needs to walk through A, in the order of its parameters
    short     bytes of K that the first stage counts, those at K's end, where its box ends, in a kernel that has all of K: rows of
              boxes that reach beyond the tensor come slowly; else 0, or where stages fill K
    places    of 2:4 weights: an array of (PIECE, pieces along K, 64 columns); b is then one of their values, and all other
              numbers count the zeros, too
    """

    a: TiledMap | Im2colMap
    b: TiledMap
    k_major: tuple[bool, bool]
    kinds: tuple[str, str]
    depth: int
    chunk: int
    geometry: tuple[int, ...]
    places: TiledMap | None = None
    short: int = 0

    @cached_property
    def size(self) -> int:
        """Bytes of an element."""
        return BITS[self.kinds[0]] // 8

    @cached_property
    def im2col(self) -> bool:
        return isinstance(self.a, Im2colMap)

    @cached_property
    def whole(self) -> int:
        """Elements of K in a stage."""
        return ROW // self.size

    @cached_property
    def steps(self) -> int:
        """Stages along K."""
        return ceil_div(self.depth, self.whole)

    def promoted(self, result: int) -> bool:
        """Whether sums are rough, of more stages than are made at once for results of so many bytes: see
        `parts.accumulator.Promoted`."""
        return group_atom(*self.kinds).rough and (self.steps > stages_at_once(self.kinds, result) or self.places is not None)

    @property
    def smooth(self) -> bool:
        """Whether operands have 8 bits, and no row of a tiled box reaches beyond K."""
        return self.size == 1 and not self.im2col and (self.depth - self.short) % self.chunk == 0

    def boxes_of_stage(self, t: Tile) -> int:
        """How many copies fill a stage."""
        a, b = (1 if k_major else n // BLOCK for n, k_major in zip((t.bm, t.bn), self.k_major, strict=True))
        return (self.whole // self.chunk if self.im2col else a) + b + (self.places is not None)

    def boxed(self, t: Tile) -> tuple[TiledMap | Im2colMap, ...]:
        """The maps with a tile's boxes."""
        if self.places and t.places:
            row = self.whole // 2
            values = replace(self.b, box=(row, t.bn, 1), swizzle=self.size * row)
            pieces = t.places.group_bytes // PIECE
            return self._boxed_a(t), values, replace(self.places, box=(PIECE, pieces, t.bn // 64), swizzle=0)
        if isinstance(self.a, Im2colMap):
            b = replace(self.b, box=(self.whole, t.bn, 1))
            return self._boxed_a(t), _ordered(b, t)
        sides = zip((t.bm // t.shared, t.bn), self.k_major, strict=True)
        boxes = ((self.chunk, n, 1) if k_major else (BLOCK, self.whole, 1) for n, k_major in sides)
        a, b = (replace(m, box=box, swizzle=self.size * self.chunk) for m, box in zip((self.a, self.b), boxes, strict=True))
        return a, _ordered(b, t)

    def _boxed_a(self, t: Tile) -> TiledMap | Im2colMap:
        """A's map, K-major, in boxes as wide as B's."""
        if isinstance(self.a, Im2colMap):
            return replace(self.a, pixels=t.bm)
        return replace(self.a, box=(self.chunk, t.bm // t.shared, 1), swizzle=self.size * self.chunk)


def by_eight(m: TiledMap) -> TiledMap:
    """The map of an array's (k, columns, one batch) in boxes with an order of their own: see `Operand.eights`."""
    (depth, columns, _), step, (row, extent, _) = m.extents, m.strides[0], m.box
    extents, strides = (depth, 2, 4, 4, columns // EIGHTS), (step, 8 * step, 2 * step, EIGHTS * step)
    return replace(m, extents=extents, strides=strides, box=(row, 2, 4, 4, extent // EIGHTS), steps=(1,) * 5)


def columns_in_order(w: TiledMap, deep: int, columns: int, row: int, size: int) -> TiledMap:
    """The map of weights in boxes of so many columns, whose results have a size."""
    m = replace(w, box=(deep, columns, 1), swizzle=row)
    return by_eight(m) if size == 1 else m


def _ordered(b: TiledMap, t: Tile) -> TiledMap:
    return _paired(b) if t.paired else by_eight(b) if t.eights else b


def _paired(m: TiledMap) -> TiledMap:
    """The map of an array's (k, columns, one batch) in boxes with an order of their own: see `Operand.paired`."""
    (depth, columns, _), step, (row, extent, _) = m.extents, m.strides[0], m.box
    extents, strides = (depth, min(columns, PAIRED) // 2, 2, ceil_div(columns, PAIRED)), (2 * step, step, PAIRED * step)
    return replace(m, extents=extents, strides=strides, box=(row, PAIRED // 2, 2, extent // PAIRED), steps=(1, 1, 1, 1))


def row_cycles(channels: int, chunk: int, size: int) -> float:
    """Cycles of the copy engine for a row of an im2col box, on average: for one that reaches beyond the channels, most."""
    boxes = ceil_div(channels, chunk)
    whole = 1.7 if chunk * size == ROW else 2.5
    return whole if channels % chunk == 0 else (whole * (boxes - 1) + 5.2) / boxes


def multiplying_cycles(rows: int, columns: int, sparse: bool = False) -> int:
    """Cycles of the Tensor Cores for a stage."""
    return rows // 64 * (1 if sparse else 2) * max(columns, 48)


def _chunk(channels: int, columns: int, size: int) -> int:
    """Elements of an im2col box's row: a stage's, which may be mostly zeros to multiply, or a divisor of the channels, in more
    boxes of 64, 32 or 16 bytes."""

    def cycles(n: int) -> float:
        """Of 64 rows of a tap."""
        boxes = ceil_div(channels, n)
        multiplying = multiplying_cycles(64, min(columns, 128)) * boxes * n / whole
        return max(64 * row_cycles(channels, n, size) * boxes, multiplying)

    whole = ROW // size
    return min((n for n in (whole, whole // 2, whole // 4, whole // 8) if n == whole or channels % n == 0), key=cycles)


def _array(t: Tensor, depth: tuple[int, int], rows: tuple[int, int], batches: tuple[int, int], k_major: bool) -> TiledMap:
    """The map of an array of (depth, rows, batches), or (rows, depth, batches): each of them (extent, stride in elements)."""
    (inner, _), (outer, step) = (depth, rows) if k_major else (rows, depth)
    steps = tuple(stride * t.dtype.size if extent > 1 else UNIT for extent, stride in ((outer, step), batches))
    return TiledMap(t.name, 0, (inner, outer, batches[0]), steps, (), (1, 1, 1))


@remembered
def copies(problem: Problem, program: Program) -> Copies | str:
    """The maps for an op that `implicit_gemm.unfit` has passed, or why the copy engine cannot read its operands."""
    if reason := unmapped((problem.x, problem.w), program):
        return reason
    if problem.column_batch and problem.batches > 1:
        return f"{problem.batches} groups; the kernel takes one"
    if 0 in (problem.rows, problem.columns, problem.depth, problem.batches):
        return "an extent is 0"
    lead = [(n, i) for i, n in enumerate(problem.batch) if n > 1]
    if len(lead) > 1:
        return f"its batches {problem.batch} lie at two different strides"
    batches, level = lead[0] if lead else (1, 0)
    columns, by_batch = (problem.columns, problem.w_column), (batches, problem.w_batch[level])
    b = _array(problem.w, (problem.depth, problem.w_tap[2]), columns, by_batch, problem.k_major[1])
    if problem.linear:
        return _by_rows(problem, b, batches, level)
    if not problem.k_major[1]:
        return f"{problem.w.name} is transposed, and the rows of {problem.x.name}, {problem.pixels}, lie at more than one stride"
    if batches > 1:
        return f"its rows {problem.pixels} lie at more than one stride, in each of {batches} batches"
    return _by_im2col(problem, b)


@remembered
def gathered(problem: Problem, program: Program) -> Copies | None:
    """The maps by which a convolution's window of one element is read as larger ones are, a whole stage at a time; None where it
    is read so anyway, or cannot be, or where operands have 8 bits."""
    found = copies(problem, program)
    if isinstance(found, str) or found.im2col or found.size != 2 or found.k_major != (True, True) or problem.batches > 1:
        return None
    how = _by_im2col(problem, found.b)
    return how if isinstance(how, Copies) and how.chunk == how.whole else None


@remembered
def compressed(problem: Problem, program: Program, form: Sparse) -> Copies | str:
    """The maps for an op that `copies` knows, of a compressed form of its weights; or why these cannot be read."""
    values, places = (program.tensors[name] for name in form.tensors)
    dense = copies(problem, program)
    if isinstance(dense, str):
        return dense
    whole = dense.whole
    if not all(dense.k_major):
        return f"{problem.x.name} or {problem.w.name} is transposed; sparse Tensor Cores take both along K"
    if not dense.im2col and dense.chunk < whole:
        return f"its K of {problem.channels} is less than the {whole} that are multiplied at a time"
    steps = (values.strides[0] * values.dtype.size, UNIT)
    b = TiledMap(values.name, 0, (values.shape[1], values.shape[0], 1), steps, (), (1, 1, 1))
    of_places = TiledMap(places.name, 0, places.shape[::-1], (PIECE, PIECE * places.shape[1]), (), (1, 1, 1))
    found = _by_im2col(problem, b, whole) if dense.im2col else replace(dense, b=b)
    return found if isinstance(found, str) else replace(found, places=of_places, short=0)


def _kinds(problem: Problem) -> tuple[str, str]:
    return OPERANDS[problem.x.dtype], OPERANDS[problem.w.dtype]


def _by_rows(problem: Problem, b: TiledMap, batches: int, level: int) -> Copies:
    """A by a tiled map, for rows at one stride; `level`: the one of two levels of batches at which there are several."""
    (n, p, q), (step_n, step_h, step_w, step_c) = problem.pixels, problem.x_pixel
    channels, size = problem.channels, problem.x.dtype.size
    step = next((t for extent, t in ((q, step_w), (p, step_h), (n, step_n)) if extent > 1), UNIT // size)
    by_batch = batches, problem.x_batch[level]
    a = _array(problem.x, (channels, step_c), (problem.rows, step), by_batch, problem.k_major[0])
    # A row of 128 bytes of which less than half are there takes longer than a narrower one.
    whole = ROW // size
    narrow = whole // 2 if channels > whole // 4 else whole // 4
    chunk = whole if problem.k_major != (True, True) or channels > whole // 2 else narrow
    found = Copies(a, b, problem.k_major, _kinds(problem), channels, chunk, (int(problem.w_batch[level] > 0),))
    return _ending_with_k(found, problem)


def _ending_with_k(how: Copies, problem: Problem) -> Copies:
    """The same with the end of K in a first stage that is short, where rows of the last one would reach beyond K: of numbers of
    8 bits, of which 128 bytes hold more, so that this is so more often. Padding counts as K, since it comes as fast, and is 0."""
    depth = problem.padded
    if how.size > 1 or how.k_major != (True, True) or not isinstance(depth, int):
        return how
    assert isinstance(how.a, TiledMap)
    a, b = (replace(m, extents=(depth, *m.extents[1:])) for m in (how.a, how.b))
    rows = depth % STEP == 0 and how.chunk == how.whole < depth  # others are as slow wherever they begin
    return replace(how, a=a, b=b, short=depth % how.whole if rows else 0)


def _by_im2col(problem: Problem, b: TiledMap, filled: int = 0) -> Copies | str:
    """A by an im2col map, or why there is none; filled: B has channels filled up to a multiple of it, and boxes as many."""
    (n, p, q), (step_n, step_h, step_w, _) = problem.pixels, problem.x_pixel
    (r, s), (height, width), channels, cp = problem.taps, problem.image, problem.channels, problem.padded
    (stride_h, stride_w), (pad_h, pad_w), (dil_h, dil_w) = problem.strides, problem.pads, problem.dilations
    # The window's first element walks from -pad to where the last output pixel needs it: p × q steps.
    upper_w, upper_h = (q - 1) * stride_w - pad_w - (width - 1), (p - 1) * stride_h - pad_h - (height - 1)
    if max(problem.strides) > 8:
        return f"strides {problem.strides}; im2col maps step at most 8"
    corners = (-pad_w, -pad_h, upper_w, upper_h)
    if min(corners) < -128 or max(corners) > 127:
        return f"the window's first element goes from {corners[:2]} to {corners[2:]} off the image; im2col maps take -128 to 127"
    if (r - 1) * dil_h > 255 or (s - 1) * dil_w > 255:
        return "the window spans more than 256 elements, the most of im2col maps"
    size = problem.x.dtype.size
    chunk = filled or _chunk(cp, problem.stored, size)
    steps = [size * t if extent > 1 else UNIT for extent, t in ((width, step_w), (height, step_h), (n, step_n))]
    window = Im2colMap(
        problem.x.name,
        (channels, width, height, n),
        (steps[0], steps[1], steps[2]),
        (-pad_w, -pad_h),
        (upper_w, upper_h),
        (stride_w, stride_h),
        chunk,
        0,
        0 if size * chunk == UNIT else size * chunk,
    )
    boxes = ceil_div(cp, chunk)
    sizes = (boxes * chunk if filled else cp, r * s, s, q, p * q, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, boxes)
    geometry = (*sizes, *divider(boxes), *divider(s), *divider(q), *divider(p * q))
    return Copies(window, b, problem.k_major, _kinds(problem), r * s * boxes * chunk, chunk, geometry)


@dataclass(frozen=True)
class Boxed:
    """How results go to y in boxes.

    y, added  the maps of y and of what is added to it by row, whose elements have `size` bytes
    epilogue  for what a thread has
    """

    y: TiledMap
    added: TiledMap | None
    size: int
    epilogue: epilogue.EpilogueSpec

    def args(self, t: Tile) -> tuple[Arg, ...]:
        """The launch's arguments after the integers, for a tile's boxes."""
        maps = [self.y, *([self.added] if self.added else [])]
        row = self.size * t.box[0]
        return *(replace(m, box=(*t.box, 1), swizzle=row if row > UNIT else 0) for m in maps), *self.epilogue.args


def turned_results(op: Op, program: Program, problem: Problem, how: Copies) -> Boxed | None:
    """How results go to y in boxes where operands are swapped, or None: where results have 16 bits, or are bytes of whole groups
    of channels or of one with some pairs, and what is added to them is taken as floats."""
    boxed = boxed_results(op, program, problem, 1)
    if boxed is None or boxed.size == RESULT:
        return boxed
    whole = problem.columns % (PAIRED if problem.columns > PAIRED else 2) == 0 and problem.batches == 1 and how.k_major[1]
    form = boxed.epilogue.form
    return boxed if whole and epilogue.adds_floats(form) else None


@remembered
def boxed_results(op: Op, program: Program, problem: Problem, lanes: int) -> Boxed | None:
    """None where the copy engine cannot write y, or read what is added to it; lanes: columns that a thread has side by side."""
    y, shape, frame = program.tensors[op.y], program.op_shape(op), epilogue.frame_of(op, program)
    target = epilogue.describe(op, program, frame).form.y
    by_row = epilogue.loads_by_row(op, program)
    if target.shuffled or target.mode != "vector" or target.rows == "general" or len(by_row) > 1:
        return None
    if any(load.step is None or not load.vector for load in by_row):
        return None
    size = y.dtype.size
    boxes = y, *(load.tensor for load in by_row)
    if any(may_move(t, program) for t in boxes):
        return None
    if not any(all(t.dtype in kinds for t in boxes) for kinds in ((DType.F16,), (DType.BF16,), FLOAT8, BYTES)):
        return None
    lane = frame[-1] or 0
    step = next((y.strides[a] for a in reversed(frame[:-1]) if a is not None and shape[a] > 1), 0)
    if any(size * n % UNIT for n in (step, y.offset, y.padded[lane])):
        return None

    def rows_of(t: Tensor, offset: int, columns: int, step: int) -> TiledMap:
        apart = size * step or UNIT
        extents = columns, problem.rows, problem.batches
        return TiledMap(t.name, size * offset, extents, (apart, apart * problem.rows), (), (1, 1, 1))

    added = [rows_of(load.tensor, load.offset, shape[lane], load.step or 0) for load in by_row]
    spec = epilogue.describe(op, program, frame, lanes)
    return Boxed(rows_of(y, 0, y.padded[lane], step), added[0] if added else None, size, spec)
