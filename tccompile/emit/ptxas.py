"""PTX to machine code by ptxas, and in which version of PTX a text can be kept for drivers to compile."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tccompile.arch import Arch
from tccompile.emit import toolchain
from tccompile.emit.job import CodegenError, Resources, SpillError

PTX_VERSIONS = ("5.0", "6.0", "6.3", "6.4", "6.5", "7.0", "7.1", "7.4", "7.8", "8.0", "8.1", "8.3", "8.4", "8.6", "8.7", "8.8")
"""PTX ISA versions worth trying, oldest first: those that brought targets or instructions (PTX ISA, "Release Notes")."""


def assemble(ptx: str, target: str) -> tuple[bytes, Resources]:
    """PTX to a cubin, by the ptxas of the toolchain that Numba uses.

    Raises CodegenError with ptxas' message on an error, on spills, and on warnings C75xx (serialised wgmma); SpillError, too,
    where ptxas crashes, as some versions do on some code: other configs are other code.
    """
    with tempfile.TemporaryDirectory(prefix="tccompile-") as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [toolchain.ptxas(), f"-arch={target}", "-O3", "-v", "--warn-on-spills", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode < 0:
            raise SpillError(f"ptxas crashes on it (signal {-done.returncode})")
        if done.returncode:
            raise CodegenError(f"ptxas: {log.strip()}")
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        if any(spilled):
            raise SpillError(f"it spills registers ({max(spilled)} bytes a thread)")
        if warning := re.search(r".*\bC75\d\d\b.*", log):
            raise CodegenError(f"ptxas: {warning[0].strip()}")
        cubin = Path(folder, "kernel.cubin").read_bytes()
    figures = (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack")
    return cubin, Resources(*(_figure(pattern, log) for pattern in figures))


def _figure(pattern: str, log: str) -> int:
    return max((int(n) for n in re.findall(pattern, log)), default=0)


def oldest(ptx: str, arch: Arch) -> str:
    """The PTX with the lowest `.version` that ptxas accepts it with: a driver refuses what is newer than itself."""
    own = re.search(r"^\.version\s+(\S+)", ptx, re.M)
    assert own, "PTX without a version"
    for version in PTX_VERSIONS:
        if _number(version) >= _number(own[1]):
            break
        text = ptx.replace(own[0], f".version {version}", 1)
        try:
            assemble(text, arch.name)
        except CodegenError:
            continue
        return text
    return ptx


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
