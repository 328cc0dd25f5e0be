"""Measured times of kernels, by op: tables that `--tune` writes on a GPU, and that any machine can choose kernels by.

A table is one GPU's: for each op, as kernels see it, the candidates that were measured there. Those that come with tccompile
lie in kernels/timings/; `--timing-cache FILE` is a user's own, and is asked first. Running a plan reads none of them.

Each time carries a digest of the kernel's code: its syntax, without comments and docstrings. When that has changed since, the
time still ranks the candidates, as the order of a kernel's configs rarely changes and estimates are further off; the reason says
so, and `--tune` measures them again.
"""

from __future__ import annotations

import gzip
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as memoised
from math import gcd
from pathlib import Path
from typing import Any

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UsageError
from tccompile.ir.expr import Expr, const
from tccompile.ir.forms import Packed, Sparse
from tccompile.ir.ops import Attention, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import LANES, Tensor
from tccompile.ir.text import op_text
from tccompile.kernels.remembered import remembered
from tccompile.kernels.spec import Config, Kernel, Value
from tccompile.plan.codec import Codec, CodecError, loads
from tccompile.plan.file import whole_file
from tccompile.schedule import digest

FORMAT = 1
LIMIT = 64 << 20
"""Bytes of the largest file that is read."""


@dataclass(frozen=True)
class Timing:
    """The time of one kernel in one config: the median, in microseconds.

    source  the digest of the kernel's code when it was measured
    """

    kernel: str
    config: Mapping[str, Value]
    us: float
    source: str


@dataclass(frozen=True)
class Table:
    """What was measured on one GPU with the code of one generation.

    gpu   the driver's name of it
    ops   the candidates measured for each op, by its `key`, the fastest first
    """

    gpu: str
    arch: str
    ops: Mapping[str, tuple[Timing, ...]]
    format: int


@dataclass(frozen=True)
class Measured:
    """The times of one op's candidates on a GPU, by kernel and config; `dense`: its weights are 2:4, and what was measured is the
    same op with others."""

    gpu: str
    times: Mapping[tuple[str, str], Timing]
    dense: bool = False

    def of(self, kernel: Kernel, config: Config) -> Timing | None:
        return self.times.get((kernel.name, config_text(config)))


@dataclass(frozen=True)
class Timings:
    """The tables to choose kernels by, those to ask first in front."""

    tables: tuple[Table, ...] = ()

    @remembered
    def of(self, op: Op, program: Program, arch: Arch) -> Measured | None:
        """What the first table that knows the op on this generation says; None if none does."""
        tables = [t for t in self.tables if t.arch == arch.name]
        if not tables:
            return None
        wanted = key(op, program)
        for name in dict.fromkeys((wanted, wanted.removesuffix(SPARSE))):
            table = next((t for t in tables if name in t.ops), None)
            if table is not None:
                times = {(t.kernel, config_text(t.config)): t for t in table.ops[name]}
                return Measured(table.gpu, times, name != wanted)
        return None


NO_TIMINGS = Timings()


def timings(own: Path | None, archs: Sequence[str]) -> Timings:
    """A user's table, if there is one, and those that come with tccompile.

    Raises UsageError for a file that is no table; warns of one whose times are of none of the generations to build for.
    """
    tables = [read(own)] if own else []
    for table in tables:
        if table.arch not in archs:
            message = f"{own} holds times of {table.arch} code, and this builds for {', '.join(archs)}: it has no effect"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return Timings((*tables, *_shipped()))


@memoised
def _shipped() -> tuple[Table, ...]:
    """Plain in the sources, compressed where they are installed: kernels/timings/packed.py."""
    tables = sorted((Path(__file__).parents[1] / "kernels" / "timings").glob("*.json*"))
    return tuple(_decoded(gzip.decompress(t.read_bytes()) if t.suffix == ".gz" else t.read_bytes()) for t in tables)


# --- What an op is to the kernels --------------------------------------------------------------------------------------


SPARSE = ", 2:4"
"""Ends the key of an op whose weights are."""


def key(op: Op, program: Program) -> str:
    """The op as kernels see it, the same in every model: its geometry, its epilogue without the constants' values, and of each
    tensor its type, extents, order of axes, alignment, and whether it is a constant, a model input or output, or a part of
    another tensor (whatever that one's size); and whether its weights are 2:4, or integers in blocks. What Attention multiplies
    scores by is no part of it: in floats of 8 bits it differs from layer to layer.
    """
    forms = program.forms_of(op)
    known = SPARSE if any(isinstance(form, Sparse) for form in forms) else ""
    known += "".join(f", {form.text(program.tensors)}" for form in forms if isinstance(form, Packed))
    names = dict.fromkeys((*op.operands, *op.results, *op.inputs))
    shown = {name: f"{number}:{_tensor_text(program.tensors[name], program)}" for number, name in enumerate(names)}
    expressions = {k: v for k in op.holds if isinstance(v := getattr(op, k), Expr)}
    plain: dict[str, Any] = {k: _without_values(e) for k, e in expressions.items()}
    plain |= {"scale": 1.0} if isinstance(op, Attention) else {}
    also = op.also and replace(op.also, expr=_without_values(op.also.expr))
    op = replace(op, epilogue=replace(op.epilogue, expr=_without_values(op.epilogue.expr)), also=also, **plain)
    op = op.renamed(shown)
    return f"{op_text(op)} -> %{op.y}{known}"


def _without_values(e: Expr) -> Expr:
    if e.fn == "const":
        return const(0, e.dtype)
    return replace(e, args=tuple(map(_without_values, e.args)))


def _tensor_text(t: Tensor, program: Program) -> str:
    """As in `float16[1,20(24),56,56]@0231`: padded extents in brackets, and the axes from the outermost to the innermost."""
    extents = ",".join(str(n) if n == p else f"{n}({p})" for n, p in zip(t.shape, t.padded, strict=True))
    axes = [a for a in t.order if t.padded[a] > 1]
    place = "const" if t.storage in program.constants else ""
    if t.storage in program.inputs or t.storage in program.outputs:
        place = "io"
    steps = (t.strides[a] for a in axes if t.strides[a] != 1)
    part = f"/{gcd(LANES, t.offset, *steps)}" if t.base else ""
    return f"{t.dtype.value}[{extents}]@{''.join(map(str, axes))}{part}{place}"


def config_text(config: Config) -> str:
    """A config as text, equal for equal configs."""
    return _json(dict(config))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@memoised
def source(kernel: Kernel) -> str:
    """A digest of the code that a kernel is made by: its module, and those of the kernels' package that it imports."""
    return digest.sources_of(type(kernel).__module__, "tccompile.kernels")[:16]


# --- Files -------------------------------------------------------------------------------------------------------------


_CODEC = Codec({}, {})


def read(path: Path) -> Table:
    """The table in a file. Raises UsageError that names the file and what is wrong with it."""
    try:
        with open(path, "rb") as file:
            return _decoded(file.read(LIMIT + 1))  # a device says nothing of its size
    except CodecError as error:
        raise UsageError(f"{path} is no timing table: {error}; `tccompile MODEL.onnx --tune` writes one") from None
    except OSError as error:
        raise UsageError(f"cannot read the timing table {path}: {error.strerror}") from None


def _decoded(text: bytes) -> Table:
    if len(text) > LIMIT:
        raise CodecError(f"larger than {LIMIT >> 20} MiB")
    table: Table = _CODEC.decode(loads(text), Table)
    _check(table)
    return table


def _check(table: Table) -> None:
    if table.format != FORMAT:
        raise CodecError(f"format {table.format}, this tccompile reads format {FORMAT}")
    if table.arch not in ARCHS:
        raise CodecError(f"unknown GPU generation {table.arch!r}")
    for op, times in table.ops.items():
        for t in times:
            if not (math.isfinite(t.us) and t.us > 0):
                raise CodecError(f"{t.us} µs for {t.kernel} in {op!r}")


def write(table: Table, path: Path) -> None:
    """Write a table, all of it or nothing; an op a line, so that two tables can be compared. Raises UsageError."""
    encoded = _CODEC.encode(table, Table)
    ops = encoded.pop("ops")
    head, body = (",\n".join(f"{json.dumps(n)}:{_json(v)}" for n, v in sorted(part.items())) for part in (encoded, ops))
    text = f'{{{head},\n"ops":{{\n{body}\n}}}}\n'
    try:
        with whole_file(path) as file:
            file.write(text.encode("ascii"))
    except OSError as error:
        raise UsageError(f"cannot write the timing table {path}: {error.strerror}") from None


def with_times(table: Table, op: str, times: Iterable[Timing]) -> Table:
    """The table with what was measured now in the place of what it had for the op."""
    return replace(table, ops={**table.ops, op: tuple(sorted(times, key=lambda t: t.us))})


def is_current(times: Iterable[Timing], kernels: Mapping[str, Kernel]) -> bool:
    """Whether all of an op's times were measured with the kernels' present sources."""
    return all(t.kernel in kernels and t.source == source(kernels[t.kernel]) for t in times)
