"""A kernel's code to an image: Numba to PTX, PTX to a cubin by ptxas, with a cache on disk. Needs no GPU.

The same code and the same tools give the same bytes: names that Numba numbers by process are replaced, and each kernel
is assembled by itself from a file of a fixed name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from tccompile.arch import Arch, Feature
from tccompile.emit import cache, numba, ptxas, toolchain
from tccompile.emit.job import CodegenError, Job, Resources, SpillError
from tccompile.emit.ptx import ptx_text
from tccompile.kernels import family
from tccompile.kernels.spec import Code, Function
from tccompile.plan.format import Image
from tccompile.schedule import digest


def compile_code(code: Code, arch: Arch, kind: str = "cubin") -> Image:
    """The kernel's code for one generation: "cubin", or "ptx" in the lowest PTX version that takes it.

    From the cache if it has been compiled before. Raises CodegenError if Numba or ptxas refuses it, or if it spills
    registers; UsageError if the installed CUDA toolchain does not know the generation.
    """
    return _built(code, arch, kind)[0]


def compile_anew(code: Code, arch: Arch, kind: str = "cubin") -> Image:
    """The same, whatever the cache holds; nothing is kept there."""
    return _build(code, arch, kind)[0]


def resources(code: Code, arch: Arch) -> Resources:
    """Registers and memory that the kernel uses on a generation."""
    return _built(code, arch, "cubin")[1]


def kept(job: Job) -> Image | None:
    """The job's image if the cache has it."""
    found = _kept(_key(*job), *job)
    return found[0] if found else None


def _built(code: Code, arch: Arch, kind: str) -> tuple[Image, Resources]:
    assert kind in ("cubin", "ptx"), kind
    key = _key(code, arch, kind)
    if (found := _kept(key, code, arch, kind)) is not None:
        return found
    image, used = _build(code, arch, kind)
    cache.put(key, _FIGURES.pack(used.registers, used.shared, used.stack) + image.code)
    return image, used


_FIGURES = struct.Struct("<3I")
"""What an entry of the cache begins with; the code follows."""


def _kept(key: str, code: Code, arch: Arch, kind: str) -> tuple[Image, Resources] | None:
    """What the cache has of it; None if that is nothing, or too short to be all."""
    entry = cache.get(key)
    if entry is None or len(entry) <= _FIGURES.size:
        return None
    return Image(arch.name, kind, _entry_name(code), entry[_FIGURES.size :], code.kernel, code.params), Resources(
        *_FIGURES.unpack_from(entry)
    )


def _build(code: Code, arch: Arch, kind: str) -> tuple[Image, Resources]:
    toolchain.check(arch)
    try:
        text, cubin, used = _compiled(code, arch)
    except Exception as error:
        if (theirs := family(code.kernel).blamed(code, arch, error)) is not None:
            raise theirs from error
        params = ", ".join(f"{k}={v!r}" for k, v in code.params)
        message = f"kernel {code.kernel}({params}) does not compile for {arch.name}: {error}"
        if isinstance(error, SpillError):
            raise SpillError(message, ((code, arch, kind),)) from None
        raise CodegenError(message) from (None if isinstance(error, CodegenError) else error)
    made = ptxas.oldest(text, arch).encode() if kind == "ptx" else cubin
    return Image(arch.name, kind, _entry_name(code), made, code.kernel, code.params), used


@lru_cache(maxsize=1)
def _compiled(code: Code, arch: Arch) -> tuple[str, bytes, Resources]:
    """PTX and cubin of a kernel. Remembered for the job that wants it in the other kind, which comes next."""
    lowered = _lowered(code, arch)
    text = ptx_text(lowered.function, arch, _entry_name(code), lowered.library)
    return text, *ptxas.assemble(text, arch.name)


def _entry_name(code: Code) -> str:
    return "tc_" + re.sub(r"\W", "_", code.kernel)


def _key(code: Code, arch: Arch, kind: str) -> str:
    """A name for what comes out: it depends on the sources of the kernel's module and all that it imports, and on this
    file's and those of this room that it compiles with."""
    compiler = digest.sources_of(__name__, within=__package__)
    sources = digest.sources_of(type(family(code.kernel)).__module__)
    return digest.key(code.kernel, code.params, repr(arch), kind, toolchain.versions(), sources, compiler)


# --- What generations share --------------------------------------------------------------------------------------------


class _Known:
    """A generation for `Kernel.build`, with the figures that it has looked up and the features that it has asked for."""

    def __init__(self, arch: Arch):
        self._arch, self.figures, self.features = arch, dict[str, Any](), dict[Feature, bool]()

    def has(self, feature: Feature) -> bool:
        return self.features.setdefault(feature, self._arch.has(feature))

    def __getattr__(self, name: str) -> Any:
        return self.figures.setdefault(name, getattr(self._arch, name))


@dataclass(frozen=True)
class _Lowered:
    """A kernel's function and its LLVM IR, which is that of all generations that are alike in what it was made by."""

    function: Function
    library: Any
    figures: Mapping[str, Any]
    features: Mapping[Feature, bool]
    cc: tuple[Any, ...]

    def suits(self, arch: Arch) -> bool:
        alike = all(getattr(arch, name) == value for name, value in self.figures.items())
        alike = alike and all(arch.has(feature) == there for feature, there in self.features.items())
        return alike and numba.alike(self.cc, arch.target)


@lru_cache(maxsize=1)
def _lowerings(code: Code) -> list[_Lowered]:
    """What was made of the code. Remembered for other generations, which come next."""
    return []


def _lowered(code: Code, arch: Arch) -> _Lowered:
    made = _lowerings(code)
    found = next((m for m in made if m.suits(arch)), None)
    if found is None:
        known = _Known(arch)
        function = family(code.kernel).build(cast(Arch, known), **dict(code.params))
        found = _Lowered(function, numba.library(function, arch), known.figures, known.features, arch.target)
        made.append(found)
    return found
