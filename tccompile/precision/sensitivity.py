"""How exactly a tensor must be stored: by how much results move when what they are computed from is rounded to fp16.

fp16 keeps 11 digits of every number, so storing x moves it by 2**-12 of its size. What is computed from x may move by far more of
its own size: a difference of near equals, the sine of a large angle, the fraction of a place, what a threshold lets through.
Each op is evaluated a second time, with one operand rounded; the condition number of a function, measured (N. J. Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, section 1.6). Where its result moves by more than LIMIT, the operand is
to be stored in fp32. Then what it is computed from has to be as exact as that, so a tolerance goes back from op to op, through
each by the measured ratio of what moves, until fp16 is within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tccompile.ir.expr import Expr, call, cast, substitute, walk
from tccompile.ir.ops import Attention, Conv, Gemm, Mlp, Op, Pointwise, Pool, Resize, Rnn, Scatter, Softmax, Suppress, TopK
from tccompile.ir.program import Program
from tccompile.ir.reference import finish
from tccompile.ir.types import DType

LIMIT = 2.0**-9
"""How far a result may move, relative to it, when one operand is rounded; of most ops that is 2**-12 to 2**-10."""

TARGET = 2.0**-11
"""How far it may move by errors of an operand that has been found to need fp32."""

ROUNDING = 2.0**-12
"""About what fp16 is off by, relative to what is stored."""

MOVED = 1 / 256
"""What part of the bytes that a tensor is quantized to rounding may make others, a step off: little beside them all."""

INHERENT = 4.0
"""A product's operands may cost so many times what its result is to be exact to before the product leaves Tensor Cores."""

COUNTS = 16.0
"""How far below its row's largest element an input of a Softmax counts at least: there its exponential is 1e-7 of that one's."""

NOISE = 2.0**20
"""The size of a row's largest logits at which fp32's last digit, 2^-3, changes what softmax makes of them by an eighth."""

ROWS, CHANNELS, WHOLE = 64, 8, 1 << 22
"""A product is evaluated for so many rows or output channels, one of groups whole if its result has no more elements."""

STEADY = (
    "acc", "load", "const", "cast", "mul", "div", "neg", "abs", "min", "max", "relu", "leaky_relu", "reciprocal", "sqrt", "rsqrt",
    "sigmoid", "hard_sigmoid", "tanh", "erf", "gelu", "gelu_tanh", "silu", "swish", "hard_swish", "elu", "selu", "celu",
    "softplus", "softsign", "mish", "is_nan", "is_inf",
)  # fmt: skip
"""Functions whose results never move by much more, relative to them, than their arguments do."""


@dataclass(frozen=True)
class Need:
    """Why a tensor is to be stored in fp32: the node that reads it, and how far its result would move otherwise, relative to it.

    exact  the reader is to read it in fp32, where a Tensor Core's fp16 copy would be as bad
    """

    node: str
    moved: float
    exact: bool = False


@dataclass
class _Read:
    """How one op reads one operand, over all runs: the largest figures.

    gain   what its result moves by for what the operand moves, both as root mean squares
    moved  what its result moves by, relative to it, when the operand is rounded
    error  what rounding moves the operand by; result: the result's own size
    ratio  what the result moves by, relative to it, for what the operand moves by, relative to that
    steps  whether the result is on a grid, so that `moved` is about how many of its numbers move by a step
    """

    gain: float = 0.0
    moved: float = 0.0
    error: float = 0.0
    result: float = math.inf
    ratio: float = 0.0
    steps: bool = False

    def add(self, error: float, change: float, result: float, operand: float) -> None:
        if not (error > 0 and result > 0 and math.isfinite(change) and math.isfinite(result)):
            return
        self.gain, self.error = max(self.gain, change / error), max(self.error, error)
        self.moved, self.result = max(self.moved, change / result), min(self.result, result)
        self.ratio = max(self.ratio, change / result * operand / error)

    def merge(self, other: _Read) -> None:
        """Add what was added to another one."""
        self.gain, self.error = max(self.gain, other.gain), max(self.error, other.error)
        self.moved, self.result = max(self.moved, other.moved), min(self.result, other.result)
        self.ratio, self.steps = max(self.ratio, other.ratio), self.steps or other.steps


class Sensitivity:
    """Watches runs of a program (`reference.evaluate`), and then says what must be exact.

    bytes_count  whether it counts which of two bytes a value is rounded to that lies halfway, by a digit that fp16 has not
    steady       whether functions of `STEADY` are taken to move by as much as their arguments: that is quick, but from function
                 to function it adds up
    """

    def __init__(self, program: Program, bytes_count: bool = True, steady: bool = True) -> None:
        self.program, self.bytes_count, self.steady = program, bytes_count, steady
        self.reads: dict[int, dict[str, _Read]] = {}
        self.squares: dict[int, float] = {}
        tensors, outside = program.tensors, {*program.inputs, *program.outputs, *program.constants}
        written = {tensors[op.y].storage for op in program.ops}
        self.free = {name for name in tensors if tensors[name].dtype.is_float and tensors[name].storage in written - outside}
        self.number = {op.y: i for i, op in enumerate(program.ops)}

    def observe(self, op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
        """See what an op reads, what it computes before its epilogue, and what it writes.

        What rounds to a type of few digits moves by a step or not at all, and on average by as much as what is rounded; so do
        bytes, where it does not count which of two they are.
        """
        steps = {e: e.args[0] for e in walk(op.epilogue.expr) if e.fn == "on_grid"}
        expr = substitute(op.epilogue.expr, steps) if steps else op.epilogue.expr
        expr = expr if self.bytes_count else _not_rounded(expr, {})
        if expr is not op.epilogue.expr:
            op = replace(op, epilogue=replace(op.epilogue, expr=expr))
            y = finish(op, self.program, values, acc)
        size = _rms(y)
        self.squares[self.number[op.y]] = self.squares.get(self.number[op.y], 0.0) + size**2 * y.size
        for name in op.inputs:
            if name not in self.free or not values[name].size:
                continue
            rounded = fp16(values[name])
            error = _rms(rounded - values[name])
            if error > 0:
                on_grid = self.bytes_count and _on_steps(expr) and not (op.multiplies and name in op.operands)
                change = self._change(op, values, acc, y, name, rounded, _steps_apart if on_grid else _apart)
                read = self.reads.setdefault(self.number[op.y], {}).setdefault(self.program.tensors[name].storage, _Read())
                read.add(error, size * change, size, _rms(values[name]))
                read.steps = read.steps or on_grid

    def merge(self, other: Sensitivity) -> None:
        """Add what another one saw of other runs of the program."""
        for i, square in other.squares.items():
            self.squares[i] = self.squares.get(i, 0.0) + square
        for i, reads in other.reads.items():
            for owner, read in reads.items():
                self.reads.setdefault(i, {}).setdefault(owner, _Read()).merge(read)

    def _change(
        self,
        op: Op,
        values: Mapping[str, np.ndarray],
        acc: np.ndarray | None,
        y: np.ndarray,
        name: str,
        rounded: np.ndarray,
        apart: Callable[[np.ndarray, np.ndarray], float],
    ) -> float:
        """What y moves by, relative to it, when an operand is rounded, as `apart` has it."""
        plain = all(e.fn in STEADY for e in walk(op.epilogue.expr))
        plain &= self.steady or not isinstance(op, Pointwise)
        given = {**values, name: rounded}
        if isinstance(op, Pointwise):
            return _apart(values[name], rounded) if plain else apart(y, finish(op, self.program, given, None))
        assert acc is not None
        moved = 0.0
        if name in op.operands:
            other = op.compute(given, acc.shape) if apart is _steps_apart else None
            moved = _moved_operand(op, values, acc, name, rounded) if other is None else 0.0
            if other is not None:  # each of its numbers counts, not their size
                moved = apart(y, finish(op, self.program, values, other))
            elif not plain:
                moved = apart(y, finish(op, self.program, values, _off_by(acc, moved)))
        if any(v.tensor == name for v in op.views) and not plain:
            moved = max(moved, apart(y, finish(op, self.program, given, acc)))
        return moved

    def needs(self) -> dict[str, Need]:
        """What must be stored in fp32, by the tensor that owns the storage.

        Products multiply fp16 whatever that does to bytes that their results become: that is what was asked for.
        """
        found: dict[str, Need] = {}
        tolerance: dict[str, float] = {}
        for_steps: set[str] = set()
        for i in range(len(self.program.ops) - 1, -1, -1):
            op = self.program.ops[i]
            y = self.program.tensors[op.y].storage
            bound = tolerance.get(y, math.inf)
            slack = INHERENT if op.multiplies else 1.0
            for owner, read in self.reads.get(i, {}).items():
                change = read.gain * read.error
                if read.moved > LIMIT:
                    bound = min(bound, TARGET * read.result)
                elif change <= slack * bound or (y in for_steps and op.multiplies and self.operand(op, owner)):
                    continue
                if bound / read.gain < tolerance.get(owner, math.inf):
                    tolerance[owner] = bound / read.gain
                    (for_steps.add if read.steps or y in for_steps else for_steps.discard)(owner)
                need = Need(op.nodes[0], read.moved, op.multiplies and bool(self.operand(op, owner)))
                if owner not in found or (need.exact, need.moved) > (found[owner].exact, found[owner].moved):
                    found[owner] = need
        return found

    def shares(self) -> dict[str, float]:
        """What storing each tensor in fp16 moves the program's outputs by, relative to them.

        From the outputs back, through each op by the measured ratio of what moves; errors add up as independent ones.
        """
        return {owner: ROUNDING * moved for owner, moved in self._moved(lambda read: read.moved / ROUNDING).items()}

    def gains(self) -> dict[str, float]:
        """What the program's outputs move by, relative to them, for what a tensor moves by, relative to it; as `shares` are."""
        return self._moved(lambda read: read.ratio)

    def _moved(self, through: Callable[[_Read], float]) -> dict[str, float]:
        tensors = self.program.tensors
        squares = dict.fromkeys((tensors[name].storage for name in self.program.outputs), 1.0)
        whole: dict[str, float] = {}
        for i, square in self.squares.items():
            owner = tensors[self.program.ops[i].y].storage
            whole[owner] = whole.get(owner, 0.0) + square
        for i in range(len(self.program.ops) - 1, -1, -1):
            owner = tensors[self.program.ops[i].y].storage
            part = self.squares.get(i, 0.0) / whole[owner] if whole.get(owner, 0.0) > 0 else 1.0  # of what others write, too
            behind = squares.get(owner, 0.0) * part
            for name, read in self.reads.get(i, {}).items():
                squares[name] = squares.get(name, 0.0) + behind * through(read) ** 2
        return {owner: math.sqrt(square) for owner, square in squares.items()}

    def operand(self, op: Op, owner: str) -> bool:
        return any(self.program.tensors[name].storage == owner for name in op.operands)


def _not_rounded(e: Expr, known: dict[int, Expr]) -> Expr:
    """The expression without what rounds to integers before they are saturated, as quantizing does, in float32.

    known  parts for which it has been found, by identity: they are often shared
    """
    if id(e) not in known:
        args = tuple(_not_rounded(a, known) for a in e.args)
        if e.fn == "saturate" and e.args[0].fn in ("round", "add"):
            first, *rest = args[0].args if e.args[0].fn == "add" else (args[0],)
            begins = first.args[0] if first.fn == "round" else first
            args = (call("add", begins, *rest) if rest else begins, *args[1:])
        if e.fn == "cast" and e.args[0].fn == "saturate" and args[0].dtype is DType.F32:
            known[id(e)] = args[0]
        elif all(a is b for a, b in zip(args, e.args, strict=True)):
            known[id(e)] = e
        elif e.dtype is DType.I64 and any(a.dtype is DType.F32 for a in args):
            known[id(e)] = replace(e, args=tuple(cast(a, DType.F32) for a in args), dtype=DType.F32)
        else:
            known[id(e)] = replace(e, args=args)
    return known[id(e)]


def _on_steps(e: Expr) -> bool:
    """Whether the values of an expression are those of a grid that does not depend on the data, as quantizing makes them."""
    while e.fn in ("cast", "saturate", "add", "sub", "mul"):
        rest = [a for a in e.args if a.fn != "const"]
        if len(rest) != 1:
            return False
        (e,) = rest
    return e.fn == "round"


def _moved_operand(op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray, name: str, rounded: np.ndarray) -> float:
    """How far what an op computes before its epilogue moves, relative to it, when an operand is rounded."""
    given = {**values, name: rounded}
    match op:
        case Softmax():
            return _moved_softmax(op, values[name], rounded)
        case Conv(groups=1):
            # not np.unique, which first loads numpy.ma: where two threads ask for that at once, NumPy recurses without end
            chosen = sorted({*np.linspace(0, values[op.w].shape[0] - 1, CHANNELS).astype(int)})
            parts = ({**v, op.w: v[op.w][chosen]} for v in (values, given))
            return _apart(*(op.compute(part, (acc.shape[0], len(chosen), *acc.shape[2:])) for part in parts))
        case Conv() if acc.size > WHOLE:
            return _apart(values[name], rounded)
        case Gemm():
            return _apart(*(_rows(op, v) for v in (values, given)))
        case Attention() | Mlp() | Rnn() | Pool() | Resize() | Scatter() | Suppress() | TopK():  # as exact as what they read
            return _apart(values[name], rounded)
    other = op.compute(given, acc.shape)
    assert other is not None
    return _apart(acc, other)


def _rows(op: Gemm, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The products of some rows of a with b: those of the first matrix, if there are several."""
    a, b = values[op.a], values[op.b]
    if b.ndim > 2:
        a, b = a.reshape(-1, *a.shape[-2:])[0], b.reshape(-1, *b.shape[-2:])[0]
    rows = a.reshape(-1, a.shape[-1])[:: max(math.prod(a.shape[:-1]) // ROWS, 1)]
    return rows.astype(np.float32, copy=False) @ b.T.astype(np.float32, copy=False)


def _moved_softmax(op: Softmax, x: np.ndarray, rounded: np.ndarray) -> float:
    """The same of a Softmax, or of the differences that its row's largest element leaves, relative to them, if that is less.

    Logits that are merely far apart are as exact as the activations they were computed from. Of logits from NOISE on, fp32 does
    not hold what decides either: their last digits are another processor's choice.
    """
    if x.size and np.abs(x.max(op.axis)).min() >= NOISE:
        return 0.0
    shares = replace(op, log=False)  # logarithms of what is masked would outweigh all others
    moved = _apart(*(shares.compute({op.x: values}, x.shape) for values in (x, rounded)))
    return min(moved, _apart(*_differences(op, x, rounded))) if moved else 0.0


def _differences(op: Softmax, *inputs: np.ndarray) -> list[np.ndarray]:
    """Each of the inputs less its row's mean, over the elements that count in the first; 0 for others.

    Those below the largest by more than twice its magnitude do not: they are masked, and their distance is no measure of others.
    """
    top = inputs[0].max(op.axis, keepdims=True)
    counts = inputs[0] > top - np.maximum(2 * np.abs(top), COUNTS)
    number = np.maximum(counts.sum(op.axis, keepdims=True), 1)
    kept = [np.where(counts, x, 0) for x in inputs]
    return [np.where(counts, x - x.sum(op.axis, np.float64, keepdims=True) / number, 0) for x in kept]


def fp16(x: np.ndarray) -> np.ndarray:
    """x rounded to fp16's 11 digits at any exponent: what a scale would do about its range is no matter here (Dekker, 1971)."""
    high = np.asarray(x * np.float32(2.0**13 + 1))
    rounded = np.subtract(high, np.asarray(high - x), out=high)
    finite = np.isfinite(rounded)
    return rounded if finite.all() else np.where(finite, rounded, x)


def _off_by(acc: np.ndarray, moved: float) -> np.ndarray:
    """acc with an error of that relative size: that of its own rounding, larger."""
    wrong = fp16(acc.astype(np.float32)) - acc
    size = _apart(acc, acc + wrong)
    return acc + wrong * np.float32(moved / size) if size else acc


def _rms(x: np.ndarray) -> float:
    """The root of the mean square of what is finite."""
    flat = x.ravel("K").astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)
    square = float(np.dot(flat, flat))
    if not math.isfinite(square):
        flat = flat[np.isfinite(flat)].astype(np.float64)
        square = float(np.dot(flat, flat))
    return math.sqrt(square / max(flat.size, 1))


def _apart(exact: np.ndarray, other: np.ndarray) -> float:
    """‖other - exact‖ / ‖exact‖, 0 if that is no number."""
    exact, other = (x.astype(np.float32) if x.dtype.kind != "f" else x for x in (exact, other))
    size = _rms(exact)
    moved = _rms(other - exact) / size if size else 0.0
    return moved if math.isfinite(moved) else 0.0


def _steps_apart(exact: np.ndarray, other: np.ndarray) -> float:
    """The same of numbers on a grid; more where so many of them are others, LIMIT if MOVED are."""
    share = float(np.mean(exact != other)) if exact.size else 0.0
    return max(_apart(exact, other), LIMIT * share / MOVED)
