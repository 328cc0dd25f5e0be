"""Atomic operations on addresses in global memory."""

from __future__ import annotations

from tccompile.kernels.ptx.core import i32, instruction, types

atomic_add = instruction("atom.global.add.u32 $0, [$1], $2;", i32, types.int64, i32)
"""atomic_add(address, value): the number at the address before."""
