"""What an op is: fields whose types say what they hold, and what every op must say of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

import numpy as np

from tccompile.ir.expr import Epilogue, Expr, Index, View
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.moments import Known, Moments


@dataclass(frozen=True)
class Operand:
    """Of a field of an op: it names a tensor that the op reads.

    multiplied  Tensor Cores read it as weights
    integers    it holds indices, counts or bits
    """

    multiplied: bool = False
    integers: bool = False


Ref = Annotated[str, Operand()]
Weights = Annotated[str, Operand(multiplied=True)]
Integers = Annotated[str, Operand(integers=True)]
"""Types of fields. To whoever makes an op, and in a plan, they are strings."""


class OneOf:
    """Of a field of an op: it is one of these words."""

    def __init__(self, *words: str) -> None:
        self.words = words


class Text:
    """Of a field of an op: it is text, of which only whoever made it knows what it says."""


@dataclass(frozen=True)
class Also:
    """What an op stores in a second tensor, which lies as its first: an expression whose load 0 is what the first one holds, as
    whoever reads that gets it."""

    y: str
    expr: Expr


@dataclass(frozen=True, kw_only=True)
class Op:
    """One typed operation. The types of its fields say what they hold; what is asked of every op follows from them.

    A field holds one of these, a tuple of them, or None in its place:

    Ref, Weights, Integers    the name of a tensor that it reads
    Index                     an index, whose elements may be read from tensors
    Expr                      an expression of `acc`
    Annotated[str, OneOf(…)]  a word
    Annotated[str, Text()]    any text
    int, float, bool          a number

    nodes  the user's ONNX nodes it stands for, the one that gives it its name first
    y      the tensor that it writes
    also   a second one
    """

    nodes: tuple[str, ...]
    y: str
    epilogue: Epilogue = field(default_factory=Epilogue)
    also: Also | None = None

    takes_epilogue: ClassVar[bool] = True
    """Whether `epilogue` may be more than what the op computed."""

    holds: ClassVar[Mapping[str, Any]] = {}
    """What each field of its own holds, by the field's name and in their order: an Operand, a OneOf, a Text, or a type."""

    multiplies: ClassVar[bool] = False
    """Whether it is a convolution or matrix products: it says how many operations these are, by `products`."""

    def __init_subclass__(cls) -> None:
        cls.multiplies = cls.products is not Op.products
        cls.holds = {name: _held(hint) for name, hint in get_annotations(cls, eval_str=True).items()}
        for name, held in cls.holds.items():
            if not isinstance(held, Operand | OneOf | Text) and held not in (Index, Expr, int, float, bool):
                raise TypeError(f"{cls.__name__}.{name}: {held} does not say what it holds, see Op")

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors it reads beside those of its views."""
        return tuple(name for field, held in self.holds.items() if _refers(held) for name in _named(getattr(self, field)))

    @property
    def multiplied(self) -> tuple[str, ...]:
        """The operands that Tensor Cores read as weights."""
        fields = (field for field, held in self.holds.items() if isinstance(held, Operand) and held.multiplied)
        return tuple(name for field in fields for name in _named(getattr(self, field)))

    @property
    def integers(self) -> tuple[str, ...]:
        """The operands that hold indices, counts or bits."""
        fields = (field for field, held in self.holds.items() if isinstance(held, Operand) and held.integers)
        return tuple(name for field in fields for name in _named(getattr(self, field)))

    @property
    def views(self) -> tuple[View, ...]:
        return self.epilogue.loads

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """All tensors it reads, each once."""
        return tuple(dict.fromkeys((*self.operands, *(name for v in self.views for name in v.tensors))))

    @property
    def results(self) -> tuple[str, ...]:
        """The tensors that it writes."""
        return (self.y,) if self.also is None else (self.y, self.also.y)

    @property
    def scattered(self) -> tuple[str, View] | None:
        """Of an op that writes where it is told to: the operand that it writes, and the view of y where its elements go.

        None for one that writes all of y in order.
        """
        return None

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The op with tensors replaced by others, in fields and views."""
        loads = tuple(v.renamed(names) for v in self.epilogue.loads)
        changed = {field: _renamed(getattr(self, field), names) for field, held in self.holds.items() if _refers(held)}
        also = self.also and replace(self.also, y=names.get(self.also.y, self.also.y))
        y, epilogue = names.get(self.y, self.y), replace(self.epilogue, loads=loads)
        return replace(self, y=y, epilogue=epilogue, also=also, **changed)

    def rule(self, shapes: Mapping[str, Shape], y: Shape) -> Iterator[bool]:
        """Whether its parameters fit each other and the shapes: what a plan from a file must keep to, one thing after the other.

        shapes  of its operands, by name; y, the shape that it computes (`Program.op_shape`)
        """
        raise NotImplementedError

    def verify(self, where: str) -> None:
        """Hold its parameters to what every stage may rely on; raises AssertionError, named by `where`: a bug of ours."""

    def compute(self, values: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray | None:
        """What it means: what it computes before its epilogue, or None for an op that is all epilogue.

        values  of its operands, by name: logical arrays in compute types
        shape   the shape that it computes
        """
        raise NotImplementedError

    def moments(self, known: Known, at: Sequence[np.ndarray]) -> Moments | None:
        """Moments of what it computes before its epilogue at some elements; None for an op that is all epilogue.

        known  what is known of its operands
        at     the elements' coordinates, an array for each axis
        """
        raise NotImplementedError

    def growth(self, of: Callable[[str], float], through: Callable[[Expr, float], float]) -> float:
        """By which power what it computes before its epilogue grows with what a model is fed; 0 if it stays as large as it is.

        of       the power for a tensor that it reads
        through  the power for an expression of `acc`, from that of `acc`
        """
        return 0.0

    def products(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        """Operations of its convolution or matrix products, two for a multiplication with an addition; 0 for ops without any."""
        return 0

    def flops(self, shapes: Mapping[str, Shape], y: Shape) -> Extent:
        """Operations of its products, or of its windows; 0 for ops without either."""
        return self.products(shapes, y)


def multiplied_in(a: np.ndarray, b: np.ndarray) -> np.dtype:
    """The type to multiply operands in, given in compute types, and to add products up in: sums of bytes are exact in float64."""
    return np.dtype(np.float64 if a.dtype.kind == b.dtype.kind == "i" else np.float32)


def summed(sums: np.ndarray) -> np.ndarray:
    """Sums of products as an epilogue takes them: those of integers, made in float64, as int64, modulo 2^32 as int32 is."""
    return sums.astype(np.int64).astype(np.int32).astype(np.int64) if sums.dtype == np.float64 else sums


def _held(hint: Any) -> Any:
    """What a field of this type holds one of, or several, or none: an Operand, a OneOf, or a type."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) in (tuple, Union, UnionType):
        parts = {_held(part) for part in get_args(hint)} - {NoneType, Ellipsis}
        return parts.pop() if len(parts) == 1 else hint
    return hint


def _refers(held: Any) -> bool:
    return isinstance(held, Operand) or held is Index


def _named(value: Any) -> Iterator[str]:
    """The tensors that what a field holds refers to."""
    if isinstance(value, tuple):
        for part in value:
            yield from _named(part)
    elif isinstance(value, Index):
        yield from (element.tensor for element in value.elements)
    elif value is not None:
        yield value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    return value.renamed(names) if isinstance(value, Index) else names.get(value, value)
