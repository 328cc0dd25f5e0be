"""Accesses of shared memory that nothing orders: two by different warps, of the same bytes, at least one a write.

Each warp knows of every actor up to which of its times all that it did comes before what the warp does next: a vector clock.
Actors are the warps, and what goes on beside them until someone waits for it: copies and products that are asynchronous. Who
arrives at a barrier leaves there what it knows, and who has waited there takes it along. A warp is one actor: what its own lanes
do to each other is not looked at.
"""

from __future__ import annotations

import numpy as np

BESIDE = ("cp.async", "stores", "wgmma")
"""What goes on until warps wait for groups of it: an actor for each warp, or of products for the first of a warpgroup."""

MBARRIERS = 64
"""At most; the copies that one counts are an actor."""


class Races:
    """What the warps of a block know, and who accessed each unit of shared memory last, and when."""

    def __init__(self, threads: int, size: int, unit: int) -> None:
        """`unit`: bytes that are always accessed together."""
        self.warps, self.unit = -(-threads // 32), unit
        self.mbarriers: list[int] = []
        actors = (1 + len(BESIDE)) * self.warps + MBARRIERS
        self.known = np.zeros((self.warps, actors), np.int32)
        np.fill_diagonal(self.known, 1)  # at time 0 nothing has been accessed
        units = -(-size // unit)
        self.writer, self.written = np.zeros((2, units), np.int32)
        self.read = np.zeros((actors, units), np.int32)  # when each actor read last
        self.reads = np.zeros(actors, bool)  # which actors have read

    def beside(self, what: str, warps: np.ndarray) -> np.ndarray:
        """The actors that something is which warps have started."""
        first = (1 + BESIDE.index(what)) * self.warps
        return first + (warps // 4 * 4 if what == "wgmma" else warps)

    def copies(self, mbarrier: int) -> int:
        """The actor that copies are which a barrier counts."""
        if mbarrier not in self.mbarriers:
            self.mbarriers.append(mbarrier)
        return (1 + len(BESIDE)) * self.warps + self.mbarriers.index(mbarrier)

    def stale(self, by: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
        """Which of these reads by warps see bytes before they can know that what writes there has."""
        units = at[:, None] // self.unit + np.arange(-(-size // self.unit))
        return (self.written[units] > self.known[by[:, None], self.writer[units]]).any(1)

    def access(self, by: np.ndarray, at: np.ndarray, size: int, writes: bool, actor: np.ndarray, time: np.ndarray) -> str | None:
        """So many bytes at addresses are accessed because of warps `by`: gives what else may come at the same time, or None.

        actor, time  who does it, and when it is done
        """
        units = at[:, None] // self.unit + np.arange(-(-size // self.unit))
        by, actor, time = by[:, None], actor[:, None], time[:, None]
        late = self.written[units] > self.known[by, self.writer[units]]
        if late.any():
            return self.told("written", self.writer[units][late][0], units[late][0])
        if not writes:
            self.read[actor, units] = time
            self.reads[actor] = True
            return None
        for reader in np.flatnonzero(self.reads):
            late = self.read[reader][units] > self.known[by, reader]
            if late.any():
                return self.told("read", int(reader), units[late][0])
        self.writer[units], self.written[units] = actor, time
        late = self.writer[units] != actor  # two by the same instruction
        return self.told("written", self.writer[units][late][0], units[late][0]) if late.any() else None

    def told(self, what: str, actor: int, unit: int) -> str:
        kind, number = divmod(actor, self.warps)
        if kind <= len(BESIDE):
            name = f"{BESIDE[kind - 1]} of warp {number}" if kind else f"warp {number}"
        else:
            name = f"the copies that {self.mbarriers[actor - (1 + len(BESIDE)) * self.warps]} counts"
        return f"what {name} has {what} at {unit * self.unit}"

    def leave(self, warps: np.ndarray) -> np.ndarray:
        """What warps know who arrive somewhere; what they do from here on is not part of it."""
        known: np.ndarray = self.known[warps].max(0)
        self.known[warps, warps] += 1
        return known

    def take(self, warps: np.ndarray, known: np.ndarray) -> None:
        """Warps have waited for all that is known there."""
        self.known[warps] = np.maximum(self.known[warps], known)

    def done(self, warp: int, what: str, time: int) -> None:
        """A warp has waited for what it started, until all was done up to that time."""
        actor = self.beside(what, np.array(warp))
        self.known[warp, actor] = max(self.known[warp, actor], time)
