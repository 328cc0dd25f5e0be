"""Forms of a constant: other constants that hold what it holds in a way that some kernel reads faster.

A stage that knows the formats offers them (`Program.forms`), each with a tensor and a recipe as every constant has. A kernel's
configs say which one they read, so the schedule's choice of a config chooses the form, for each generation. The plan has those
that its steps read, beside the constant itself, which the CPU engine and all other kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from tccompile.ir.packed import CHUNK
from tccompile.ir.tensor import Tensor


@dataclass(frozen=True)
class Form:
    """What every form has: `tensor`, the constant that holds it."""

    tensor: str

    @property
    def tensors(self) -> tuple[str, ...]:
        """All constants that hold it together."""
        return (self.tensor,)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The form, of constants by other names."""
        return replace(self, tensor=names.get(self.tensor, self.tensor))


@dataclass(frozen=True)
class Grouped(Form):
    """The weights (O, C, …) of a convolution in `of` groups as those of one in `groups`: (O, C · of / groups, …), with each
    group's weights at its own channels and zeros at those of the neighbours that it is joined with.
    """

    groups: int
    of: int


@dataclass(frozen=True)
class Sparse(Form):
    """Weights (O, C, …) that are 2:4, compressed: `tensor` has two of every four neighbouring channels, and `places` says which
    two they are. Both lie as `ir/sparse.py` says.
    """

    places: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.tensor, self.places

    def renamed(self, names: Mapping[str, str]) -> Self:
        return replace(super().renamed(names), places=names.get(self.places, self.places))


@dataclass(frozen=True)
class Packed(Form):
    """Weights (N, K) that are integers of 4 or 8 bits times a scale for each block of K: `tensor` has the integers, `scales` and
    `zeros` what they are multiplied by and what stands for 0. All lie as `ir/packed.py` says.

    zeros  "" where `zero` stands for 0 in all blocks
    block  along K; one that has all of K is a multiple of `packed.CHUNK`
    alone  whether the plan has the weights in no other form: they are computed from this one where they are asked for
    """

    scales: str
    zeros: str
    bits: int
    block: int
    zero: int = 0
    alone: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor, self.scales, *([self.zeros] if self.zeros else []))

    def text(self, tensors: Mapping[str, Tensor]) -> str:
        """As people read it: what a kernel sees of it."""
        scales = tensors[self.scales]
        of_each = "one scale a row" if scales.shape[1] == 1 and self.block >= CHUNK else f"blocks of {self.block}"
        return f"{self.bits} bits in {of_each}{' with zero points' if self.zeros else ''}"

    def renamed(self, names: Mapping[str, str]) -> Self:
        own = {name: names.get(name, name) for name in (self.scales, self.zeros)}
        return replace(super().renamed(names), scales=own[self.scales], zeros=own[self.zeros])


FORMS: tuple[type[Form], ...] = (Grouped, Sparse, Packed)
"""All kinds: plans name them by their classes."""
