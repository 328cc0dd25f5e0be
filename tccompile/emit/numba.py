"""The compiler of Python for GPUs: Numba-CUDA makes PTX of a kernel's function. The only module of this room that knows it, but
for `quicker.py`, which only this one imports.

What kernels are written in is Numba's too, and comes to them by `kernels/ptx/core.py`. No other module imports Numba or llvmlite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from tccompile.arch import Arch
from tccompile.emit import quicker
from tccompile.emit.quicker import Place
from tccompile.kernels.spec import Function

Target = tuple[int, int] | tuple[int, int, str]
"""A generation as `Arch.target` gives it."""


def versions() -> dict[str, str]:
    """Numba's versions, by the names of its packages. Raises whatever importing it raises: ImportError, or types of Numba's own
    and AttributeError for what NumPy no longer has."""
    import llvmlite
    import numba
    import numba_cuda
    from numba.cuda.np import arrayobj  # noqa: F401  what a newer NumPy than Numba knows breaks

    return {"numba": numba.__version__, "numba-cuda": numba_cuda.__version__, "llvmlite": llvmlite.__version__}


def oldest() -> tuple[int, int]:
    """The oldest compute capability that it makes code for: the oldest that its NVRTC knows."""
    from numba.cuda.cudadrv import nvrtc

    return min(nvrtc.get_supported_ccs())


def library(function: Function, arch: Arch) -> Any:
    """Numba's library of a kernel's function, as LLVM IR: what `numba.cuda.compile` makes the PTX of one generation from."""
    from numba.cuda import compiler

    options = {
        "device": False,
        "abi": "numba",
        "fastmath": function.fastmath,
        "launch_bounds": (function.threads, function.blocks),
    }
    with quick() as ready:
        if ready:
            return compiler._compile_pyfunc_with_fixup(function.function, function.signature, cc=arch.target, **options)[0]
    return _Recompiled(lambda cc: compiler.compile(function.function, function.signature, cc=cc, **options)[0])


@dataclass(frozen=True)
class _Recompiled:
    """What stands for a library where there is none to be had: each generation's PTX is compiled from the beginning."""

    compile: Callable[[Any], str]

    def get_asm_strs(self, cc: Any) -> list[str]:
        return [self.compile(cc)]


# --- What of the generation it asks ----------------------------------------------------------------------------------


class _Asked(tuple[Any, ...]):
    """A generation's number as Numba sees it while it makes LLVM IR, and asks whether it is at least some other.

    questions  all of them, for good: what Numba compiled for one kernel is part of others, and then it does not ask again
    """

    questions: ClassVar[set[tuple[Any, ...]]] = set()

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        self.questions.add(other)
        return tuple(self) >= other

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return not self >= other

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        raise AssertionError("Numba has no such question")

    __le__ = __gt__


def alike(one: Target, other: Target) -> bool:
    """Whether Numba's questions have the same answers for two generations, so that LLVM IR of one is that of the other."""
    return all((one >= q) == (other >= q) for q in tuple(_Asked.questions))  # other threads may add


# --- In less time ----------------------------------------------------------------------------------------------------

KNOWN_NUMBA = "0.30."
"""Releases of numba-cuda whose insides `quick` knows."""


def _places() -> tuple[Place, ...]:
    """What `quick` replaces, and by what; nothing if this release is not known, or has it elsewhere."""
    try:
        from numba.cuda.compiler import CUDAFlags, _compile_pyfunc_with_fixup  # noqa: F401  what `library` calls
        from numba_cuda import __version__ as release

        places = (*quicker.places(), Place(CUDAFlags, "compute_capability", _asking))
    except (ImportError, AttributeError):
        return ()
    return places if release.startswith(KNOWN_NUMBA) and all(hasattr(p.owner, p.name) for p in places) else ()


def _asking(number: property) -> property:
    """The generation among Numba's flags, which notes what it is asked."""
    return property(lambda self: _Asked(number.__get__(self) or ()), number.fset, number.fdel)


@contextmanager
def quick() -> Iterator[bool]:
    """Numba with some of its functions replaced by ones that do the same in less time: a third of what a kernel takes to compile.
    And its questions about the generation are noted, see `_Asked`.

    All threads of the process see what is replaced, so Numba's own lock is held until it is put back: no other one compiles
    meanwhile, of this compiler's or of the user's.
    Yields whether this is a release of numba-cuda that the replacements were made for, and all is where it was sought; else
    Numba is as quick as it is.
    """
    places = _places()
    if not places:
        yield False
        return
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        before = [getattr(place.owner, place.name) for place in places]
        try:
            for place, old in zip(places, before, strict=True):
                setattr(place.owner, place.name, place.quicker(old))
            yield True
        finally:
            for place, old in zip(places, before, strict=True):
                setattr(place.owner, place.name, old)
