"""The CPU engine: a section's steps in NumPy, on the same arena, offsets, strides, padding and views as on a GPU.

Each step reads its tensors where they lie, computes what its op means, rounds to the tensor's type and writes it with its
padding. It needs no code of the section's generation, so it runs any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tccompile.errors import DeviceError, InputError, LaunchError, VerificationError
from tccompile.ir.branches import picked, taken
from tccompile.ir.loops import in_turn
from tccompile.ir.ops import Custom, Op
from tccompile.ir.ops.custom import Meaning, meaning, meaning_of, meanings
from tccompile.ir.reference import Observer, beside, compute, unobserved
from tccompile.ir.storage import elements, store, to_storage
from tccompile.ir.tensor import Tensor
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Section
from tccompile.plan.rules import check_member
from tccompile.runtime.arrays import Array, adopt, as_stored
from tccompile.runtime.engine import Engine
from tccompile.runtime.finite import check_finite
from tccompile.runtime.profile import Profile, profiled


@dataclass(eq=False)
class _Constant:
    """A constant's storage, and the plan that it is of: as long as engines share it, no other plan has that one's id."""

    plan: Plan
    storage: np.ndarray


_constants: WeakValueDictionary[tuple[int, str], _Constant] = WeakValueDictionary()
"""What the engines of a plan share of its weights, by the plan's id."""


def _constant(plan: Plan, tensor: Tensor) -> _Constant:
    """What a plan's engines share of one constant."""
    key = id(plan), tensor.name
    found = _constants.get(key)
    if found is None:
        found = _constants[key] = _Constant(plan, np.frombuffer(plan.weight(tensor.name), tensor.dtype.numpy))
    return found


class CpuPlatform:
    """The CPU as a `Platform`. `target` leaves only the steps for that generation, and otherwise those for any will do."""

    name = "cpu"

    def __init__(self, plan: Plan, target: str | None = None, check_finite: bool = False):
        self.plan, self.target, self.check_finite = plan, target, check_finite
        self.own = meanings()  # of operators of the user's, now: an entry may be loaded when others are in force

    def load(self, entry: Entry) -> CpuEngine:
        sections = [s for s in entry.sections if self.target in (None, s.arch)]
        if not sections:
            there = ", ".join(s.arch for s in entry.sections)
            raise DeviceError(f"the plan has nothing for {self.target}; it has {there}")
        return CpuEngine(self.plan, entry, sections[0], check_finite=self.check_finite, own=self.own)

    def load_families(self) -> None: ...

    def load_member(self, number: int, sizes: Sequence[int]) -> CpuEngine:
        entry = self.plan.families[number].at(sizes)
        check_member(self.plan, entry)
        return self.load(entry)

    def close(self) -> None: ...

    def adopt(self, array: Any, stream: int | None, what: str) -> Array:
        return adopt(array, None, 0, what)

    def refit(self, engines: Iterable[Engine], constants: Mapping[str, bytes | memoryview]) -> None:
        """See `Platform.refit`. Engines of other sessions keep the memory that they have."""
        digests = {name: digest for name, digest in self.plan.digests.items() if name not in constants}
        self.plan = replace(self.plan, weights={**self.plan.weights, **constants}, digests=digests)
        for engine in engines:
            assert isinstance(engine, CpuEngine)
            engine.take_weights(self.plan)

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class CpuEngine:
    """One entry of a plan, with the memory map of one of its sections: an `Engine`.

    check_finite   stop at the first step that writes an infinity or a NaN
    check_padding  for tests: the arena starts full of NaN, and a step stops that would read padding that is not zero
    observe        sees what each step writes, as it is stored
    own            what users' own operators mean, by name; None for what is in force
    Raises DeviceError for an operator of the user's that has no meaning here, UsageError if the plan was made without its
    weights, PlanError if they are damaged, LaunchError if memory runs out.
    """

    def __init__(
        self,
        plan: Plan,
        entry: Entry,
        section: Section,
        *,
        check_finite: bool = False,
        check_padding: bool = False,
        observe: Observer = unobserved,
        own: Mapping[str, Meaning] | None = None,
    ) -> None:
        self.plan, self.entry, self.program, self.section = plan, entry, entry.program, section
        self.io = {name: entry.program.tensors[name] for name in (*entry.program.inputs, *entry.program.outputs)}
        self.counts = entry.program.counts
        self.check_finite, self.check_padding, self.observe = check_finite, check_padding, observe
        self.own = meanings() if own is None else own
        with meaning(self.own):
            for op in self.program.ops:
                if isinstance(op, Custom):
                    meaning_of(op)
        tensors = self.program.tensors
        try:
            arena = np.zeros(section.arena, np.uint8)
        except MemoryError:
            raise LaunchError(f"there is no memory for the plan's arena of {section.arena} bytes") from None
        if check_padding:
            arena[:] = 0xFF
        self._memory: dict[str, np.ndarray] = {}  # one-dimensional, by the tensor that owns the storage
        for name, offset in section.offsets.items():
            self._memory[name] = arena[offset : offset + tensors[name].nbytes].view(tensors[name].dtype.numpy)
        self.take_weights(plan)

    def take_weights(self, plan: Plan) -> None:
        """Read the constants of a plan that is the engine's own but for their values."""
        self.plan = plan
        self._shared: list[_Constant] = []
        tensors = self.program.tensors
        for owner in dict.fromkeys(tensors[name].storage for op in self.program.ops for name in op.inputs):
            if owner in self.program.constants:
                self._shared.append(_constant(plan, tensors[owner]))
                self._memory[owner] = self._shared[-1].storage

    def describe(self) -> str:
        return f"CPU (NumPy, the steps for {self.section.arch})"

    def run(
        self, arrays: Mapping[str, Array], outputs: Mapping[str, Array | None] | None = None, stream: int | None = None
    ) -> dict[str, Any]:
        """See `Engine.run`; there is no stream. bfloat16 is its bits in uint16, in what is given and in what is made.

        Raises VerificationError, which names the user's node and the tensor, if a check fails, InputError for an index
        outside its axis, and LaunchError if memory runs out.
        """
        made = self._run_timed(arrays)[0]
        for name, target in (outputs or {}).items():
            if target is not None:
                assert isinstance(target, np.ndarray)
                np.copyto(target, made.pop(name))
        return made if outputs is None else {name: made[name] for name in outputs if name in made}

    def time(self, arrays: Mapping[str, Array], iterations: int, warmup: int) -> list[float]:
        """See `Engine.time`: there is nothing to warm up, and an inference may take seconds."""
        times = []
        for _ in range(iterations):
            begin = perf_counter()
            self.run(arrays)
            times.append((perf_counter() - begin) * 1e3)
        return times

    def profile(self, arrays: Mapping[str, Array], iterations: int) -> Profile:
        """The time of each step in NumPy."""
        times = [self._run_timed(arrays)[1] for _ in range(iterations)]
        steps, whole = profiled(self.program, self.section, times, None), median(map(sum, times))
        return Profile(self.plan.name, self.describe(), True, iterations, whole, steps, None)

    def close(self) -> None:
        self._memory.clear()
        self._shared.clear()

    def _run_timed(self, arrays: Mapping[str, Array]) -> tuple[dict[str, np.ndarray], list[float]]:
        """All outputs by name, and the microseconds of each step."""
        tensors = self.program.tensors
        feeds = {n: np.asarray(as_stored(arrays[n], tensors[n].dtype)) for n in self.program.inputs}
        times: list[float] = []
        try:
            with meaning(self.own), np.errstate(all="ignore"):  # as on a GPU: infinities and NaN are values
                return self._run(feeds, times), times
        except MemoryError as error:
            raise LaunchError(f"there is no memory to run the plan on the CPU: {error}") from None

    def _run(self, feeds: Mapping[str, np.ndarray], times: list[float]) -> dict[str, np.ndarray]:
        tensors, memory = self.program.tensors, self._memory
        for name in self.program.inputs:
            memory[name] = np.ascontiguousarray(feeds[name], tensors[name].dtype.numpy).reshape(-1)
        for name in self.program.outputs:
            memory[name] = np.empty(tensors[name].span, tensors[name].dtype.numpy)
        times += [0.0] * len(self.section.steps)
        for i in self._in_turn():
            begin = perf_counter()
            op = self.program.ops[i]
            if self.check_padding:
                self._check_padding(op)
            y = tensors[op.y]
            try:
                values = compute(op, self.program, {name: self._elements(name) for name in op.inputs})
            except (InputError, MemoryError) as error:
                raise type(error)(f"node {op.nodes[0]!r}: {error}") from None
            stored = to_storage(values, y.dtype)
            if self.check_finite:
                check_finite(op, y, stored, partial(np.asarray, values), self.program.storage.get(y.storage))
            self.observe(op.y, stored)
            store(memory[y.storage], y, stored)
            if op.also is not None:
                second = tensors[op.also.y]
                store(memory[second.storage], second, to_storage(beside(op, self.program, stored), second.dtype))
            times[i] += (perf_counter() - begin) * 1e6
        return {name: memory.pop(name).reshape(tensors[name].shape) for name in self.program.outputs}

    def _in_turn(self) -> Iterator[int]:
        """The numbers of ops as they run: those of branches only if these are taken."""

        def says(name: str) -> bool:
            return bool(self._elements(name).item())

        order = [step.op for step in self.section.steps]
        turns = in_turn(self.program, lambda body: says(body.going), order=order)
        return turns if order != sorted(order) else taken(self.program, turns, says)

    def _elements(self, name: str) -> np.ndarray:
        tensor = self.program.tensors[name]
        return elements(self._memory[tensor.storage], tensor)

    def _check_padding(self, op: Op) -> None:
        for name in picked(op, lambda name: bool(self._elements(name).item())):
            tensor = self.program.tensors[name]
            padding = elements(self._memory[tensor.storage], tensor, tensor.padded).copy()
            padding[tuple(slice(n) for n in tensor.shape)] = 0
            if padding.any():
                raise VerificationError(f"node {op.nodes[0]!r} reads {name!r} {tensor.shape}, whose padding is not zero")
