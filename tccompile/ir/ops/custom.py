"""Operators of the user's own that have kernels of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import numpy as np

from tccompile.errors import DeviceError
from tccompile.ir.extent import Extent, Shape, round_up
from tccompile.ir.moments import Known, Moments
from tccompile.ir.ops.op import OneOf, Op, Ref, Text
from tccompile.ir.tensor import LANES

MOST = 64
"""Tensors that an operator reads, and outputs that it has: at most."""

LENGTH = 1 << 16
"""Characters of an operator's settings: at most."""


class Meaning(Protocol):
    """What a user says of an operator, as far as running a program asks for it."""

    @property
    def digest(self) -> str:
        """Of the code that it is said by."""

    def results(
        self, reads: Sequence[np.ndarray | None], types: Sequence[str], attributes: Mapping[str, Any]
    ) -> list[np.ndarray]:
        """All outputs, by the user's reference. Raises OperatorError if it fails, or gives what the operator's rule does not.

        reads  values, of which floats are float32; types, those that the model gives them
        """


_meanings: ContextVar[Mapping[str, Meaning]] = ContextVar("meanings", default=MappingProxyType({}))


@contextmanager
def meaning(known: Mapping[str, Meaning]) -> Iterator[None]:
    """Within it, operators have these meanings, by name. A plan brings none: only whoever runs it can give them."""
    token = _meanings.set(known)
    try:
        yield
    finally:
        _meanings.reset(token)


def meanings() -> Mapping[str, Meaning]:
    """Those in force."""
    return _meanings.get()


@dataclass(frozen=True, kw_only=True)
class Custom(Op):
    """y = outputs of an operator of the user's: one of them as it is, or several, one after the other, in a vector.

    Several begin at multiples of LANES elements of y, in row-major order, with zeros between them.

    operator  its name: "acme::Foo"
    digest    of the Python that said what it is when the program was made
    reads     its tensors, None for one that is left out
    outputs   which of its outputs y holds, ascending
    settings  JSON: of each tensor the type that the model gives it ("types"), and the attributes ("attributes")
    floats    how it takes floats: "float32" only, or "any" as they are stored
    layout    which axis of what it reads and writes lies innermost: "any", the last one ("rows") or the second ("channels")
    """

    operator: Annotated[str, Text()]
    digest: Annotated[str, Text()]
    reads: tuple[Ref | None, ...]
    outputs: tuple[int, ...]
    settings: Annotated[str, Text()]
    floats: Annotated[str, OneOf("float32", "any")] = "float32"
    layout: Annotated[str, OneOf("any", "rows", "channels")] = "any"

    takes_epilogue = False

    @property
    def types(self) -> list[str]:
        """The types that the model gives what it reads."""
        found: list[str] = json.loads(self.settings)["types"]
        return found

    @property
    def attributes(self) -> dict[str, Any]:
        """By name; lists are tuples."""
        found: dict[str, Any] = json.loads(self.settings)["attributes"]
        return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        yield len(self.reads) <= MOST and 1 <= len(self.outputs) <= MOST and len(self.settings) <= LENGTH
        yield all(a < b for a, b in zip((-1, *self.outputs), self.outputs, strict=False)) and self.outputs[-1] < MOST
        yield len(self.outputs) == 1 or len(y) == 1
        yield _is_settings(self.settings, len(self.reads))

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
        """By the user's reference. Raises DeviceError if nobody has given one, or one of other Python."""
        known = meaning_of(self)
        reads = [None if name is None else _as(values[name], t) for name, t in zip(self.reads, self.types, strict=True)]
        made = known.results(reads, self.types, self.attributes)
        results = [made[k] for k in self.outputs if k < len(made)]
        *begins, end = starts([r.size for r in results])
        if len(results) < len(self.outputs) or shape != (results[0].shape if len(results) == 1 else (end,)):
            raise DeviceError(f"node {self.nodes[0]!r}: {self.operator} has not the outputs that the plan says: compile it again")
        kind = self.epilogue.expr.dtype.numpy
        if len(results) == 1:
            return results[0].astype(kind)
        out = np.zeros(shape, kind)
        for begin, result in zip(begins, results, strict=True):
            out[begin : begin + result.size] = result.reshape(-1)
        return out

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments:
        """Nothing is known of it: as what it reads, and anything between any bounds."""
        n = np.broadcast(*at).shape if at else ()
        read = [known.moments(t, [known.random(n, e) for e in known.shape(t)]) for t in self.reads if t is not None]
        if not read:
            return Moments(np.zeros(n), np.ones(n))
        mean, var = (np.stack([np.broadcast_to(getattr(m, of), n) for m in read], -1) for of in ("mean", "var"))
        return Moments(mean, var).mixed()


def meaning_of(op: Custom) -> Meaning:
    """What is said of an operator here. Raises DeviceError if nothing is, or something else than when the program was made."""
    known = meanings().get(op.operator)
    what = f"node {op.nodes[0]!r}: {op.operator} is the user's own operator"
    if known is None:
        raise DeviceError(f"{what}: give its Python, by --ops FILE.py or Session(…, ops=[…]); a plan has only its code")
    if known.digest != op.digest:
        raise DeviceError(f"{what}, and the Python that is given is not what the plan was made with: compile the model again")
    return known


def starts(sizes: Sequence[Extent]) -> list[Extent]:
    """Where outputs of these sizes begin that lie in one vector, and where it ends."""
    out: list[Extent] = [0]
    for size in sizes:
        out.append(out[-1] + round_up(size, LANES))
    return out


def _as(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values in compute types as the reference takes them: floats are float32, and all else is of the model's type."""
    return values if values.dtype.kind == "f" else values.astype(dtype)


def _is_settings(text: str, reads: int) -> bool:
    try:
        found = json.loads(text)
    except (RecursionError, ValueError):
        return False
    if not isinstance(found, dict) or set(found) != {"types", "attributes"} or not isinstance(found["attributes"], dict):
        return False
    types = found["types"]
    return isinstance(types, list) and len(types) == reads and all(isinstance(t, str) and t in TYPES for t in types)


TYPES = ("", "float16", "bfloat16", "float32", "float64", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
"""Types of the model's tensors; "" of one that is left out."""
