"""What the operands of products take for values: from running the graph on the user's inputs, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from tccompile.ir.expr import Expr
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.reference import Kept, evaluate, rounded_before
from tccompile.ir.storage import nearest
from tccompile.ir.types import FLOAT8, DType
from tccompile.precision.sensitivity import Sensitivity

SAMPLE = 1 << 17
"""Elements of a tensor that are looked at one by one, spread over all runs; the least and the greatest are sought among all."""

FAR, MOST = 4.0, 4.0
"""How many standard deviations beyond the mean new inputs are looked for, and how many times the largest seen, at most: of a
network's tensors, some one meets what is rare for each in a few of 100 inputs."""

TAIL, FEW = 1000, 16
"""Of so many values the largest tells how fast numbers become rare, and at least so many of all; and of so many inputs one has a
value that a grid has no room for, by that."""

OTHERS = 4
"""How many degrees of freedom the other tensors' spreads are worth to a tensor's own, which few runs tell little of."""

WATCHED = 2
"""Runs in which what moves the outputs is measured, which takes as long again, and by which channels are smoothed."""


@dataclass
class Values:
    """The values of a tensor over all runs: a sample, bounds, and of each channel the mean, the mean square and the greatest
    magnitude.

    channels  the axis that channels go along
    each      how many elements of a run are sampled
    largest   the greatest magnitude of each run
    room      how many times the largest of these new inputs' may be
    """

    channels: int
    each: int
    sample: list[np.ndarray] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    room: float = 1.0
    low: float = np.inf
    high: float = -np.inf
    sums: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0
    count: int = 0
    magnitudes: np.ndarray | float = 0.0

    def add(self, values: np.ndarray) -> None:
        """See one run's values, which are finite."""
        flat = values.ravel()
        self.sample.append(flat[:: flat.size // self.each | 1].astype(np.float32))  # odd: channels are mostly even
        low, high = float(flat.min()), float(flat.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.largest.append(max(high, -low))
        rows = np.moveaxis(values, self.channels, 0).reshape(values.shape[self.channels], -1)
        self.sums = self.sums + rows.sum(1, dtype=np.float64)
        self.squares = self.squares + np.einsum("ck,ck->c", rows, rows)
        self.count += rows.shape[1]
        self.magnitudes = np.maximum(self.magnitudes, np.abs(rows).max(1))

    @property
    def means(self) -> np.ndarray:
        """Of each channel."""
        return np.asarray(self.sums) / max(self.count, 1)

    @property
    def mean_squares(self) -> np.ndarray:
        """Of each channel."""
        return np.asarray(self.squares) / max(self.count, 1)

    def all(self) -> np.ndarray:
        """The sample, with the least and the greatest of all values."""
        return np.concatenate([*self.sample, np.array([self.low, self.high], np.float32)])

    def likely(self, float8: bool = False) -> np.ndarray:
        """The same, and the run of the greatest values, as much larger as new inputs may make them: a grid has room for these if
        runs differ. To floats of 8 bits room costs nothing, since their steps grow with the numbers."""
        more = MOST if float8 else self.room
        if more == 1.0:
            return self.all()
        most = self.sample[int(np.argmax(self.largest))]
        return np.concatenate([self.all(), more * most, more * np.array([self.low, self.high], np.float32)])


def rarer(sample: np.ndarray, runs: int) -> float:
    """How many times the largest value of these runs one in TAIL inputs has, if what values exceed a large one by is an
    exponential number: few tokens, say, of which some are new, are told apart by nothing else."""
    sizes = np.abs(sample)
    count = min(max(len(sizes) // TAIL, FEW), len(sizes) // 4)
    if not count:
        return 1.0
    top = np.partition(sizes, -count)[-count:]
    return 1.0 + float(top.mean() - top.min()) / max(float(top.max()), 1e-30) * math.log(max(TAIL / runs, 1.0))


def rooms(largest: Sequence[Sequence[float]]) -> list[float]:
    """How many times the largest of some runs' greatest magnitudes new inputs' may be, for each tensor of a network.

    Logarithms of these magnitudes are taken as normal numbers. What varies in one input often varies in all tensors, and few runs
    tell little of how much. So a tensor's variance is put together with the mean of all. What is the same number in every run is
    what something is cut off at, and is not exceeded.
    """
    logs = [np.log([x for x in own if x > 0]) for own in largest]
    variances = [float(own.var(ddof=1)) if len(own) > 1 and np.ptp(own) else None for own in logs]
    mean = float(np.mean([v for v in variances if v is not None] or [0.0]))
    found = []
    for own, variance in zip(logs, variances, strict=True):
        count, beyond = len(own), 0.0
        if variance is not None:
            together = (OTHERS * mean + (count - 1) * variance) / (OTHERS + count - 1)
            beyond = own.mean() + FAR * np.sqrt(together * (1 + 1 / count)) - own.max()
        found.append(float(np.exp(np.clip(beyond, 0.0, np.log(MOST)))))
    return found


def cut_off_at(expr: Expr) -> float | None:
    """The magnitude that an expression's values cannot exceed, whatever the inputs, as of a ReLU6; None if it says none."""
    if expr.fn != "min" or expr.args[0].fn != "max":
        return None
    ends = [arg.args[-1].value if arg.fn == "max" else arg.value for arg in expr.args if arg.fn in ("max", "const")]
    if len(ends) != 2 or expr.args[1].fn != "const" or expr.args[0].args[-1].fn != "const":
        return None
    return max(abs(float(end)) for end in ends)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Observed:
    """What was seen of a program's tensors.

    values  of those that were asked for, by name; those that were never finite numbers are missing
    gains   what the outputs move by, relative to them, for what a tensor moves by, relative to it
    """

    values: dict[str, Values]
    gains: dict[str, float]


def observe(
    program: Program,
    runs: Collection[Mapping[str, np.ndarray]],
    sources: Mapping[str, np.ndarray],
    wanted: Mapping[str, int],
    done: Callable[[], None],
    gains: Mapping[str, float] | None = None,
) -> Observed:
    """Run a program that is not fused on inputs, in float32.

    sources   the model's weights by name
    wanted    tensors by name, and which of their axes is that of their channels
    done      called after each op
    gains     where they are known, they are not measured
    """
    values: dict[str, Values] = {}
    wrong = set[str]()
    put_together = wanted.keys() - {*program.inputs, *(op.y for op in program.ops)}  # of parts, by several ops
    sensitivity, each = Sensitivity(program, steady=False), max(SAMPLE // len(runs), 1)

    def see(name: str, y: np.ndarray) -> None:
        if name in wanted and y.size:
            if np.isfinite(y).all():
                values.setdefault(name, Values(wanted[name], each)).add(y)
            else:
                wrong.add(name)

    def watch(op: Op, read: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
        see(op.y, y)
        for name in left & read.keys():
            see(name, read[name])
            left.remove(name)
        if gains is None:
            sensitivity.observe(op, read, acc, y)
        done()

    with np.errstate(all="ignore"):
        for feeds in runs:
            left = set(put_together)
            for name in program.inputs:
                see(name, np.asarray(feeds[name]))
            evaluate(program, feeds, sources, watch)
    if gains is None:
        by_storage = sensitivity.gains()
        gains = {name: by_storage[t.storage] for name, t in program.tensors.items() if t.storage in by_storage}
    values = {name: v for name, v in values.items() if name not in wrong}
    for v, room in zip(values.values(), rooms([v.largest for v in values.values()]), strict=True):
        v.room = min(max(room, rarer(np.concatenate(v.sample), len(v.sample))), MOST)
    for op in program.ops:
        if op.y in values and (most := cut_off_at(op.epilogue.expr)) is not None and values[op.y].largest:
            v = values[op.y]
            v.room = min(v.room, max(1.0, most / max(*v.largest, 1e-30)))
    return Observed(values, dict(gains))


class _InFloat8(Attention):
    """Attention as Tensor Cores compute it that multiply its weights in E4M3: a weight of 1 is 32 there."""

    def weights(self, e: np.ndarray) -> np.ndarray:
        return nearest(32 * e, DType.E4M3) / 32


def _rounds(op: Attention) -> Attention:
    return _InFloat8(**{f.name: getattr(op, f.name) for f in fields(op)})


def outputs(
    program: Program,
    runs: Collection[Mapping[str, np.ndarray]],
    sources: Mapping[str, np.ndarray],
    kept: Kept | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[dict]:
    """What a program computes from each set of inputs, in float32; weights of attention in E4M3 are rounded to it.

    kept  weights that were rounded before; done, called after each op
    """
    program = rounded_before(program, sources, kept)
    ops = (_rounds(op) if isinstance(op, Attention) and program.tensors[op.q].dtype in FLOAT8 else op for op in program.ops)
    program = replace(program, ops=tuple(ops))
    with np.errstate(all="ignore"):
        return [evaluate(program, feeds, sources, lambda *_: done()) for feeds in runs]
