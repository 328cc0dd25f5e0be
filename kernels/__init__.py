"""The GPU code: `KERNELS` lists every kernel family, `kernel` finds one by its name."""

from __future__ import annotations

from tccompile.kernels.depthwise import Depthwise
from tccompile.kernels.spec import Kernel

KERNELS: tuple[Kernel, ...] = (
    Depthwise(),
)


def kernel(name: str) -> Kernel:
    """The kernel family of that name; KeyError if there is none."""
    return {k.name: k for k in KERNELS}[name]
