"""GPU generations as users name them: `sm_86`, `8.6`, (8, 6), `native` for this machine's GPU, `all`."""

from __future__ import annotations

from collections.abc import Iterable

from tccompile.arch import ARCHS, PTX, TEGRA, arch_named
from tccompile.errors import DeviceError
from tccompile.runtime.driver import open_device

Named = str | int | float | tuple[int, int]
"""What a generation is called: its name, or its compute capability, as 8.6 or as PyTorch's (8, 6)."""


def archs_of(names: Iterable[Named]) -> tuple[str, ...]:
    """The generations that are meant, each once. Raises UsageError for a name of none, DeviceError for `native` without a GPU."""
    out: list[str] = []
    texts = (".".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names)
    for name in filter(None, map(str.strip, texts)):
        out += ARCHS if name == "all" else _of_this_machine() if name == "native" else [arch_named(name)]
    return tuple(dict.fromkeys(out))


def _of_this_machine() -> tuple[str, ...]:
    try:
        gpu = open_device(0)
    except DeviceError as error:
        raise DeviceError(f"native means the GPU of this machine: {error}; name the generation that the plan is for") from error
    found = native(gpu.cc)
    if not found:
        raise DeviceError(f"{gpu} is older than {next(iter(ARCHS))}, the first that can be built for")
    return found


def native(cc: tuple[int, int]) -> tuple[str, ...]:
    """What to build for so that a plan runs on a GPU: the generation whose machine code fits it best, else one whose PTX does;
    none for a GPU that is too old."""
    fitting = [a for a in ARCHS.values() if a.cc == cc or (not a.suffix and a.cc[0] == cc[0] and a.cc <= cc)]
    if fitting and cc not in TEGRA:
        return (fitting[-1].name,)
    return tuple([name for name in PTX if ARCHS[name].cc <= cc][-1:])
