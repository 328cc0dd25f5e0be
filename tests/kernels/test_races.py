"""Shared memory that two warps access with nothing between: what the PTX machine sees of it, and that no kernel does it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.kernels import KERNELS, kernel
from tests.gpu.cases import program_of
from tests.kernels import machine
from tests.kernels.memory import Memory
from tests.kernels.races import Races
from tests.kernels.test_waiting import CASES
from tests.tiers import usually

ARCH = ARCHS["sm_90a"]

TOGETHER = ("rnn_mma", "rnn_simt")
"""Kernels whose blocks wait for each other: the machine runs one after the other."""


def run(name: str) -> Memory:
    """The smallest case of a kernel, as it is chosen first."""
    program = program_of(CASES[name])
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    config = next(iter(kernel(name).configs(op, program, ARCH)))
    return machine.run(kernel(name).work(op, program, config, ARCH), program, values, op.y, ARCH)


@pytest.mark.parametrize("name", usually((k.name for k in KERNELS if k.name not in TOGETHER), "gemv", "reduce", "trees"))
def test_kernels_do_not_race(name: str) -> None:
    """Beside the tests of values, all of which would fail where they do."""
    run(name)


LESS = {
    "before a stage is read": ("gemm_mma", r"\bbar\.sync\s+0;", 0, "ldmatrix.* what cp.async of warp . has written"),
    "before results turn round": ("gemm_mma", r"\bbar\.sync\s+0;", 1, "st.shared.* what warp . has read"),
    "for cp.async": ("gemm_mma", r"cp\.async\.wait_group\s+\d+;", None, "ldmatrix.* what cp.async of warp . has written"),
    "for mbarriers": ("gemm_sm90", r"\bbar\.sync\s+0;", 0, "mbarrier.try_wait.* what warp 0 has written"),
    "for the engine": ("gemm_sm90", r"mbarrier\.try_wait[^;]*;", None, "bulk.* what wgmma of warp 0 has read"),
    "before boxes leave": ("gemm_sm90", r"\bbar\.sync\s+%\w+, 128;", 1, "bulk.* what warp . has written"),
    "for staged rows": ("mlp", r"\bbar\.sync\s+0;", 0, "ld.shared.* what warp 0 has written"),
}
"""Waits: of which kernel, its line, which of these is left out, or all; and what the machine says."""


@pytest.mark.parametrize(("name", "line", "which", "told"), LESS.values(), ids=LESS)
def test_a_wait_less_is_a_race(monkeypatch: pytest.MonkeyPatch, name: str, line: str, which: int | None, told: str) -> None:
    """The test of the test"""
    right = machine.ptx_of

    def wrong(*args: Any) -> str:
        text = right(*args)
        found = list(re.finditer(line, text))
        for m in reversed(found if which is None else [found[which]]):
            text = text[: m.start()] + text[m.end() :]
        return text

    monkeypatch.setattr(machine, "ptx_of", wrong)
    with pytest.raises(AssertionError, match=f"a race: .*{told}"):
        run(name)


AT = np.array([64])


def accessed(races: Races, warps: int | list[int], at: np.ndarray, size: int, writes: bool) -> str | None:
    by = np.atleast_1d(warps)
    return races.access(by, at, size, writes, by, races.known[by, by])


def test_what_a_warp_knows() -> None:
    races = Races(64, 256, 4)
    assert accessed(races, 0, AT, 16, writes=True) is None
    assert accessed(races, 0, AT, 16, writes=False) is None
    assert accessed(races, 1, AT + 16, 4, writes=True) is None
    assert accessed(races, 1, AT + 12, 4, writes=False) == "what warp 0 has written at 76"
    assert races.stale(np.array([0, 1, 1, 1]), np.array([64, 60, 64, 80]), 4).tolist() == [False, False, True, False]
    races.take(np.array([1]), races.leave(np.array([0])))
    assert accessed(races, 1, AT, 16, writes=False) is None
    assert accessed(races, 0, AT, 4, writes=True) == "what warp 1 has read at 64"
    assert accessed(races, 0, AT + 16, 4, writes=False) == "what warp 1 has written at 80"


def test_what_comes_after_an_arrival_is_not_known() -> None:
    races = Races(64, 256, 4)
    known = races.leave(np.array([0]))
    assert accessed(races, 0, AT, 4, writes=True) is None
    races.take(np.array([1]), known)
    assert accessed(races, 1, AT, 4, writes=True) == "what warp 0 has written at 64"


def test_two_by_one_instruction() -> None:
    same, beside = np.array([64, 64]), np.array([64, 66])
    assert accessed(Races(64, 256, 4), [0, 1], same, 4, writes=False) is None
    assert accessed(Races(64, 256, 4), [0, 1], same, 4, writes=True) == "what warp 1 has written at 64"
    assert accessed(Races(64, 256, 2), [0, 1], beside, 2, writes=True) is None


def test_what_goes_on_beside_a_warp() -> None:
    """It comes after what the warp did before, and before what it does once it has waited."""
    races, one = Races(64, 256, 4), np.array([0])
    copies = races.beside("cp.async", one)
    assert accessed(races, 0, AT, 4, writes=True) is None
    assert races.access(one, AT, 4, True, copies, np.array([1])) is None
    assert races.access(one, AT + 4, 4, True, copies, np.array([2])) is None
    assert accessed(races, 0, AT, 4, writes=False) == "what cp.async of warp 0 has written at 64"
    races.done(0, "cp.async", 1)
    assert accessed(races, 0, AT, 4, writes=False) is None
    assert accessed(races, 0, AT + 4, 4, writes=False) == "what cp.async of warp 0 has written at 68"
    assert accessed(races, 1, AT, 4, writes=False) == "what cp.async of warp 0 has written at 64"
    races.take(np.array([1]), races.leave(one))
    assert accessed(races, 1, AT, 4, writes=False) is None


def test_copies_that_mbarriers_count() -> None:
    races, one = Races(64, 256, 4), np.array([0])
    first, second = races.copies(8), races.copies(16)
    assert races.copies(8) == first != second
    assert races.access(one, AT, 4, True, np.array([second]), np.array([1])) is None
    assert accessed(races, 1, AT, 4, writes=False) == "what the copies that 16 counts has written at 64"
