"""Which generation a piece of machine code says that it is for. It may say so and be anything: what code does, nobody can tell
by looking at it.
"""

from __future__ import annotations

import re
import struct

ELF = struct.Struct("<4sBBBBB7xHHI3QI")  # to the flags: magic, class, byte order, version, ABI and its version, type, machine, …
CUDA = 190
"""The machine of a cubin (ELF's EM_CUDA)."""


def targets(kind: str, code: bytes) -> tuple[str, ...]:
    """The generations, as "sm_80", one of which a "cubin" or "ptx" says that it is for; none if it is neither.

    CUDA 13's cubins do not tell sm_90a from sm_90 in their header (seen of its ptxas 13.0.88), those before do.
    """
    return _cubin_targets(code) if kind == "cubin" else _ptx_targets(code)


def _cubin_targets(code: bytes) -> tuple[str, ...]:
    if len(code) < ELF.size:
        return ()
    magic, bits, order, _, _, abi, _, machine, _, _, _, _, flags = ELF.unpack_from(code)
    if magic != b"\x7fELF" or (bits, order) != (2, 1) or machine != CUDA:
        return ()
    if abi >= 8:
        return f"sm_{flags >> 8 & 0xFF}", f"sm_{flags >> 8 & 0xFF}a"
    return (f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}",)


_TARGET = re.compile(rb"^\.target[ \t]+(sm_\d+[a-z]?)", re.M)


def _ptx_targets(code: bytes) -> tuple[str, ...]:
    found = _TARGET.search(code)
    return (found[1].decode(),) if found else ()


def has_function(kind: str, code: bytes, name: str) -> bool:
    """Whether the code has an entry of this name."""
    if kind == "cubin":
        return b"\0.text." + name.encode() + b"\0" in code
    return re.search(rb"\.entry\s+" + re.escape(name.encode()) + rb"\b", code) is not None
