"""Forms of a constant: other constants that hold what it holds in a way that some kernel reads faster.

A stage that knows the formats offers them (`Program.forms`), each with a tensor and a recipe as every constant has. A kernel's
configs say which one they read, so the schedule's choice of a config chooses the form, for each generation. The plan has those
that its steps read, beside the constant itself, which the CPU engine and all other kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """What every form has: `tensor`, the constant that holds it."""

    tensor: str


@dataclass(frozen=True)
class Grouped(Form):
    """The weights (O, C, …) of a convolution in `of` groups as those of one in `groups`: (O, C · of / groups, …), with each
    group's weights at its own channels and zeros at those of the neighbours that it is joined with.
    """

    groups: int
    of: int


FORMS: tuple[type[Form], ...] = (Grouped,)
"""All kinds: plans name them by their classes."""
