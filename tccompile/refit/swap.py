"""Adapters under a session: the constants with them, and without."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tccompile.errors import UsageError
from tccompile.ir.weights import sources_of
from tccompile.plan.file import Plan
from tccompile.refit.constants import THREADS, digests_of, refitted_constants, together
from tccompile.refit.lora import added, assigned, places, read_adapters
from tccompile.refit.names import read_map
from tccompile.refit.safetensors import SafeTensors

KEPT = 4
"""Adapters whose constants are kept, so that taking them again only copies."""

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Made:
    """The weights that adapters change, and the bytes of the constants that these are part of."""

    weights: frozenset[str] = frozenset()
    constants: Mapping[str, Bytes] = field(default_factory=dict)


class Adapters:
    """Which adapters a session has merged into its weights, and what it has of others.

    digests  of the session's weights, without adapters
    now      what is merged
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.now = plan, Made()
        self.digests = dict(plan.origin.weights)
        self._base: Mapping[str, np.ndarray] = {}
        self._checked: set[str] = set()
        self._made: dict[tuple, Made] = {}
        self._without: dict[str, Bytes] = {}

    @property
    def changed(self) -> bool:
        """Whether the session's weights are others than the plan's."""
        return bool(self.now.weights) or self.digests != self.plan.origin.weights

    def refitted(self, given: Mapping[str, np.ndarray]) -> None:
        """The session has other weights."""
        self.digests |= digests_of(given)
        self._forget()

    def _forget(self) -> None:
        self._checked.clear()
        self._made.clear()
        self._without.clear()

    def based_on(self, base: Mapping[str, np.ndarray] | str | os.PathLike[str]) -> None:
        """Take these for the weights without adapters."""
        self._base = base if isinstance(base, Mapping) else SafeTensors(base)
        self._forget()

    def made(self, path: str | os.PathLike[str] | None, scale: float, names: str | os.PathLike[str] | None) -> Made:
        """What merging a file's adapters makes; nothing for None. Raises what `Session.lora` does."""
        if path is None:
            return Made()
        key = _state(path), scale, names and _state(names)
        made = self._made.pop(key, None) or self._merged(Path(path), scale, names)
        self._made[key] = made
        while len(self._made) > KEPT:
            self._made.pop(next(iter(self._made)))
        return made

    def _merged(self, path: Path, scale: float, names: str | os.PathLike[str] | None) -> Made:
        found, called = read_adapters(path), read_map(Path(names)) if names is not None else {}
        known = places((entry.program for entry in self.plan.entries), self.plan.origin.exported)
        pairs = assigned(found, known, called)
        targets = frozenset(place.weight for _, place in pairs)
        others = self._base_of(targets)
        return Made(targets, refitted_constants(self.plan, added(others, pairs, scale), others))

    def _base_of(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """What these weights are without adapters, and those that make constants with them; UsageError if that is not known."""
        out = {}
        for name in sorted(together(self.plan, names)):
            if name not in self._base:
                raise UsageError(f"merging adapters takes the weight {name!r} without them: give base, tccompile.weights(MODEL)")
            out[name] = np.asarray(self._base[name])
        for name, found in digests_of({name: out[name] for name in out.keys() - self._checked}).items():
            if found != self.digests[name]:
                raise UsageError(f"the base's weight {name!r} is not what the session has: give the weights that are in it")
            self._checked.add(name)
        return out

    def to(self, made: Mapping[str, Bytes]) -> dict[str, Bytes]:
        """The bytes of all constants that change when these take the place of what is merged."""
        if missing := [name for name in self.now.constants if name not in made and name not in self._without]:
            self._without |= self._plain(missing)
        return {name: self._without[name] for name in self.now.constants if name not in made} | dict(made)

    def _plain(self, names: Collection[str]) -> dict[str, Bytes]:
        """Constants without adapters: the plan's, if the session has its weights, or made of the base."""
        recipes = {name: recipe for entry in self.plan.entries for name, recipe in entry.program.constants.items()}
        sources = {name: sources_of(recipes[name]) for name in names}
        own = {
            name
            for name, made_of in sources.items()
            if name in self.plan.weights and all(self.digests[s] == self.plan.origin.weights[s] for s in made_of)
        }
        with ThreadPoolExecutor(THREADS) as threads:  # each is held to its checksum
            out: dict[str, Bytes] = dict(zip(own, threads.map(self.plan.weight, own), strict=True))
        if others := sources.keys() - own:
            base = self._base_of({s for name in others for s in sources[name]})
            out |= {name: data for name, data in refitted_constants(self.plan, base).items() if name in others}
        return out


def _state(path: str | os.PathLike[str]) -> tuple:
    """Tells whether a file is the same as it was."""
    try:
        status = os.stat(path)
    except OSError:
        return (os.fspath(path),)  # reading it says what is wrong
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
