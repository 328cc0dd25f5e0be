"""The programs that make machine code: where they are, which versions, and for which generations they make any."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache as memoised
from pathlib import Path

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit import numba
from tccompile.errors import UsageError


@memoised
def ptxas() -> str:
    """The ptxas of the CUDA packages that Numba takes NVVM from; never one that happens to be on PATH."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility, load_nvidia_dynamic_lib

        nvvm = Path(load_nvidia_dynamic_lib("nvvm").abs_path)
    except Exception as error:
        raise UsageError(
            f"compiling needs the CUDA compiler packages; install them: pip install 'tccompile[compiler]' ({error})"
        ) from error
    name = "ptxas.exe" if sys.platform == "win32" else "ptxas"
    beside = (folder / "bin" / name for folder in nvvm.parents[:4])
    found = next((str(p) for p in beside if p.is_file()), None) or find_nvidia_binary_utility("ptxas")
    if found is None:
        raise UsageError(f"no ptxas beside {nvvm}; install the CUDA compiler packages: pip install 'tccompile[compiler]'")
    return found


@memoised
def versions() -> dict[str, str]:
    """Versions of the tools that make machine code, by name. UsageError if they cannot work together."""
    try:
        of_numba = numba.versions()
    except Exception as error:  # Numba raises types of its own, and AttributeError for what NumPy no longer has
        raise UsageError(
            f"Numba-CUDA cannot be imported beside NumPy {np.__version__} ({error}); "
            "install versions that fit: pip install 'tccompile[compiler]'"
        ) from error
    said = subprocess.run([ptxas(), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release \S+, V(\S+)", said)
    return of_numba | {"ptxas": version[1] if version else said.strip()}


@memoised
def targets() -> frozenset[str]:
    """The generations that the installed ptxas and Numba both know, as sm_80: ptxas 13's help still names older ones."""
    said = subprocess.run([ptxas(), "--help"], capture_output=True, text=True).stdout
    oldest = numba.oldest()
    return frozenset(name for name in re.findall(r"\bsm_\d+[a-z]?\b", said) if name in ARCHS and ARCHS[name].cc >= oldest)


def check(arch: Arch) -> None:
    """Raise UsageError if the installed CUDA toolchain makes no code for the generation."""
    if arch.name not in targets():
        raise UsageError(
            f"the installed CUDA toolchain (ptxas {versions()['ptxas']}) makes no code for {arch.name}; "
            f"it knows {', '.join(a for a in ARCHS if a in targets())}. "
            "CUDA 12.9 knows all of them: pip install 'numba-cuda[cu12]', or leave the generation out with --arch"
        )
