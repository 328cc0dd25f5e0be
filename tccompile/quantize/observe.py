"""What the operands of products take for values: from running the graph on the user's inputs, in float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count

import numpy as np

from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate, rounded_before
from tccompile.ir.storage import nearest
from tccompile.ir.types import FLOAT8, DType
from tccompile.precision.sensitivity import Sensitivity

SAMPLE = 1 << 17
"""Elements of a tensor that are looked at one by one, spread over all runs; the least and the greatest are sought among all."""

FAR, MOST = 2.5, 2.0
"""How many standard deviations beyond the mean new inputs are looked for, and how many times the largest seen, at most."""

WATCHED = 2
"""Runs in which what moves the outputs is measured, which takes as long again, and by which channels are smoothed."""


@dataclass
class Values:
    """The values of a tensor over all runs: a sample, bounds, and of each channel the mean, the mean square and the greatest
    magnitude.

    channels  the axis that channels go along
    each      how many elements of a run are sampled
    largest   the greatest magnitude of each run
    """

    channels: int
    each: int
    sample: list[np.ndarray] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
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

    def likely(self) -> np.ndarray:
        """The same, and the run of the greatest values, as much larger as new inputs may make them: a grid has room for these if
        runs differ."""
        more = room(self.largest)
        if more == 1.0:
            return self.all()
        most = self.sample[int(np.argmax(self.largest))]
        return np.concatenate([self.all(), more * most, more * np.array([self.low, self.high], np.float32)])


def room(largest: Sequence[float]) -> float:
    """How many times the largest of some runs' greatest magnitudes new inputs' may be, if their logarithms are normal numbers."""
    logs = np.log([x for x in largest if x > 0])
    if len(logs) < 2:
        return 1.0
    beyond = logs.mean() + FAR * logs.std(ddof=1) - logs.max()
    return float(np.exp(np.clip(beyond, 0.0, np.log(MOST))))


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
    progress: Callable[[int], object],
    gains: Mapping[str, float] | None = None,
) -> Observed:
    """Run a program that is not fused on inputs, in float32.

    sources   the model's weights by name
    wanted    tensors by name, and which of their axes is that of their channels
    progress  called with how many ops have run
    gains     where they are known, they are not measured
    """
    values: dict[str, Values] = {}
    wrong = set[str]()
    put_together = wanted.keys() - {*program.inputs, *(op.y for op in program.ops)}  # of parts, by several ops
    sensitivity, done, each = Sensitivity(program, steady=False), count(1), max(SAMPLE // len(runs), 1)

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
        progress(next(done))

    with np.errstate(all="ignore"):
        for feeds in runs:
            left = set(put_together)
            for name in program.inputs:
                see(name, np.asarray(feeds[name]))
            evaluate(program, feeds, sources, watch)
    if gains is None:
        by_storage = sensitivity.gains()
        gains = {name: by_storage[t.storage] for name, t in program.tensors.items() if t.storage in by_storage}
    return Observed({name: v for name, v in values.items() if name not in wrong}, dict(gains))


class _InFloat8(Attention):
    """Attention as Tensor Cores compute it that multiply its weights in E4M3: a weight of 1 is 32 there."""

    def weights(self, e: np.ndarray) -> np.ndarray:
        return nearest(32 * e, DType.E4M3) / 32


def _rounds(op: Attention) -> Attention:
    return _InFloat8(**{f.name: getattr(op, f.name) for f in fields(op)})


def outputs(program: Program, runs: Collection[Mapping[str, np.ndarray]], sources: Mapping[str, np.ndarray]) -> list[dict]:
    """What a program computes from each set of inputs, in float32; weights of attention in E4M3 are rounded to it."""
    program = rounded_before(program, sources)
    ops = (_rounds(op) if isinstance(op, Attention) and program.tensors[op.q].dtype in FLOAT8 else op for op in program.ops)
    program = replace(program, ops=tuple(ops))
    with np.errstate(all="ignore"):
        return [evaluate(program, feeds, sources) for feeds in runs]
