"""Which generation code says that it is for."""

from __future__ import annotations

import pytest

from tccompile.plan.code import ELF, targets


def cubin(abi: int, flags: int, machine: int = 190) -> bytes:
    return ELF.pack(b"\x7fELF", 2, 1, 1, 0x33, abi, 2, machine, 1, 0, 0, 0, flags)


@pytest.mark.parametrize(
    "abi, flags, said",
    [
        (7, 0x5A0D5A, ("sm_90a",)),  # what ptxas 12.9 writes of sm_90a, and of sm_90
        (7, 0x5A055A, ("sm_90",)),
        (8, 0x6005A04, ("sm_90", "sm_90a")),  # what ptxas 13.0 writes of both
    ],
)
def test_a_cubin_says_what_it_is_for(abi, flags, said):
    assert targets("cubin", cubin(abi, flags)) == said


def test_what_is_no_cubin_is_for_nothing():
    for code in (b"", b"\x7fELF", cubin(7, 0x5A0D5A, machine=62)):
        assert targets("cubin", code) == ()
    assert targets("ptx", b".version 8.0\n.target sm_90a\n") == ("sm_90a",) and targets("ptx", b"") == ()
