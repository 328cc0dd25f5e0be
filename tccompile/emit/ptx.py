"""The PTX of a kernel's function: Numba's, with lasting names, clusters, and the wait for the grids before it."""

from __future__ import annotations

import re
from typing import Any

from tccompile.arch import Arch, Feature
from tccompile.emit import numba
from tccompile.emit.job import CodegenError
from tccompile.kernels.spec import Function


def ptx_text(function: Function, arch: Arch, name: str, library: Any = None) -> str:
    """The PTX of a kernel's function, with `name` as its entry: the same text in every process.

    Where the generation can start a grid while those before it still run, the code waits for their end. `library` is what
    `numba.library` gives for the function and this generation, or another that it suits. Raises whatever Numba raises.
    """
    (text,) = (library or numba.library(function, arch)).get_asm_strs(cc=arch.target)
    if function.cluster > 1:
        text = re.sub(r"(?m)^(\.maxntid.*)$", rf"\1\n.explicitcluster\n.reqnctapercluster {function.cluster}, 1, 1", text)
    text = _stable(text, name)
    return _waiting(text) if arch.has(Feature.EARLY_START) else text


_NUMBERED = re.compile(r"[\w$]*(?:_Z\w*|_cudapy_\w+|\$cst\$\w+)[\w$]*")
"""Names in PTX that Numba or LLVM made from a counter of the process, or from where the source lies."""


def _stable(ptx: str, name: str) -> str:
    """The PTX with such names replaced in the order in which they appear, without comments and without Numba's environment."""
    lines = [line.rstrip() for line in ptx.splitlines()]
    kept = [x for x in lines if x and not x.lstrip().startswith("//") and "NumbaEnv" not in x.partition("=")[0]]
    text = "\n".join(kept) + "\n"
    entries = re.findall(r"\.entry\s+([\w$]+)", text)
    if len(entries) != 1:
        raise CodegenError(f"{len(entries)} entry functions in its PTX")
    text = re.sub(rf"\b{re.escape(entries[0])}(?=_param_|\b)", name, text)
    names: dict[str, str] = {}
    return _NUMBERED.sub(lambda m: names.setdefault(m[0], f"${name}_{len(names)}"), text)


_ARITHMETIC = re.compile(
    r"\t(\.reg|\.local|\.shared|ld\.param|mov|cvta?|add|sub|mul|mad|neg|abs|min|max|div|rem"
    r"|and|or|xor|not|shl|shr|shf|bfe|bfi|prmt|setp|selp)\b"
)


def _waiting(ptx: str) -> str:
    """The PTX of a kernel that waits for the grids before it, unless it does already: after the arithmetic at its beginning.

    Then it lets those after it start: not sooner, or they take the place of blocks that have work to do. Loads by way of the
    read-only cache become plain ones, since ptxas moves those ahead of the wait.
    """
    ptx = ptx.replace("ld.global.nc.", "ld.global.")
    if "griddepcontrol.wait" in ptx:
        return ptx
    head, body = re.split(r"(?m)^\{\n", ptx, maxsplit=1)
    lines = body.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if not _ARITHMETIC.match(line))
    return "".join([head, "{\n", *lines[:at], "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n", *lines[at:]])
