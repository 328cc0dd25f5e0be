"""What there is to compile, what comes of it, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.errors import TccompileError
from tccompile.kernels.spec import Code

Job = tuple[Code, Arch, str]
"""What to compile, for which generation, as "cubin" or "ptx"."""

Progress = Callable[[int, int], None]
"""Called with how many jobs are done, and of how many."""


class CodegenError(TccompileError):
    """A kernel of ours that does not compile as it should: a bug of tccompile's, not of the model's."""


class SpillError(CodegenError):
    """A kernel that needs more registers than a thread may have: right, but slow, so another config should be taken. Or one that
    the assembler crashes on.

    jobs  what spilled, of all that was to be emitted
    """

    def __init__(self, message: str, jobs: tuple[Job, ...] = ()):
        super().__init__(message, jobs)
        self.jobs = jobs

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers a thread, bytes of static shared memory a block, bytes of stack a thread."""

    registers: int
    shared: int
    stack: int
