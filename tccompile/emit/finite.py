"""Writes `runtime/finite.ptx`: the kernel of kernels/finite.py as PTX of the oldest generation.

python -m tccompile.emit.finite
"""

from __future__ import annotations

from pathlib import Path

from tccompile.arch import ARCHS
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import oldest
from tccompile.kernels import finite
from tccompile.runtime.finite import PTX


def made() -> str:
    """The PTX, in the lowest version that has its instructions."""
    arch = ARCHS["sm_61"]
    return oldest(ptx_text(finite.build(), arch, finite.NAME), arch)


if __name__ == "__main__":
    Path(PTX).write_text(made(), encoding="ascii")
