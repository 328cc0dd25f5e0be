"""What a session asks of whatever runs plans: a platform loads a plan's entries, and each becomes an engine.

The platforms are the CPU (`cpu.py`) and a GPU (`gpu.py`). A session knows of them only what stands here.

Checks   The session chooses the engine by the inputs' shapes. It holds all arrays to the entry's names, types, shapes and
         order, and outputs to memory that overlaps no other output's and, on a GPU, no input's. Engines rely on that.
Memory   Arrays that are given are the caller's: an engine reads inputs and writes outputs where they lie, and copies what it
         cannot use there. Arrays that it returns are the caller's too, and outlive the engine. All else (weights, arena,
         buffers to copy by) is the engine's, or shared with other engines of the plan; a run depends on nothing that one before
         it left there.
Streams  A stream is a CUstream's handle, or None. Without one a run is over when it returns. With one, and all arrays on the
         GPU, it may return as soon as everything is queued there. An engine orders its runs, whatever their streams.
Threads  One at a time calls a platform and its engines: the session's lock sees to that.
Errors   LaunchError if the device fails or memory runs out; VerificationError if values were to be checked and are not finite;
         InputError for an index in the data that lies outside its axis, which only the CPU finds. After the last two an engine
         runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tccompile.ir.extent import Shape
from tccompile.ir.program import Count
from tccompile.ir.types import DType
from tccompile.plan.format import Entry
from tccompile.runtime.arrays import Array

if TYPE_CHECKING:
    from tccompile.runtime.profile import Profile


RECENT = 8
"""Sizes of a plan's families for which a session keeps what runs them."""


class Held(Protocol):
    """What is to be known of an input or output, whose elements lie in row-major order."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def nbytes(self) -> int: ...


class Engine(Protocol):
    """One entry of a plan, loaded where it runs."""

    @property
    def entry(self) -> Entry: ...

    @property
    def io(self) -> Mapping[str, Held]:
        """The entry's inputs and outputs."""

    @property
    def counts(self) -> Sequence[Count]:
        """What of its outputs the data decide."""

    def describe(self) -> str:
        """The device and the code that runs on it, for people."""

    def run(
        self, arrays: Mapping[str, Array], outputs: Mapping[str, Array | None] | None = None, stream: int | None = None
    ) -> dict[str, Any]:
        """One inference on all of the entry's inputs, by name.

        outputs  what is wanted, by name, all outputs if None: the array to write it into, or None where the engine makes one
        Returns the arrays that it made, by name: NumPy's, or the platform's own where an input lies on it.
        """

    def time(self, arrays: Mapping[str, Array], iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each of `iterations` inferences, inputs and outputs in the device's memory.

        warmup  inferences ahead of them, on a platform that needs any
        """

    def profile(self, arrays: Mapping[str, Array], iterations: int) -> Profile:
        """The time of every step, the median of `iterations` inferences."""

    def close(self) -> None:
        """Free everything that no other engine uses, once what was queued is done. It does not run afterwards."""


class Platform(Protocol):
    """Where a session's engines run. `with platform:` around several calls saves each of them what the first one sets up."""

    @property
    def name(self) -> str:
        """As users name it: "cpu", "gpu:0"."""

    def load(self, entry: Entry) -> Engine:
        """An engine for an entry of the plan.

        Raises DeviceError if nothing in the entry runs here, LaunchError if memory does not suffice or the driver refuses a
        launch, UsageError if the plan was stored without its weights, and PlanError if they are damaged.
        """

    def load_families(self) -> None:
        """Get ready for members of the plan's families, such that these are loaded fast. Raises what `load` does."""

    def load_member(self, number: int, sizes: Sequence[int]) -> Engine:
        """The same for sizes of the family of that number: of all that are loaded so, one runs at a time.

        Also raises PlanError for numbers that the family's formulas give at these sizes, and that break a rule.
        """

    def close(self) -> None:
        """Free what its engines, which are closed before, have shared."""

    def adopt(self, array: Any, stream: int | None, what: str) -> Array:
        """A caller's array as engines take it, ready for work on a stream (None: the engines' own); nothing is copied.

        Raises InputError, which says `what` it is, if it lies on another device or cannot be read.
        """

    def refit(self, engines: Iterable[Engine], constants: Mapping[str, bytes | memoryview]) -> None:
        """Put other bytes in the place of constants, where they lie, for these engines of its own and all that it loads later.

        Inferences that are queued end before it. Raises UsageError, and changes nothing, if an engine of another platform reads
        the same memory; LaunchError if the device fails.
        """

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: object) -> None: ...
