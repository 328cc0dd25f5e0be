"""The CPU engine: a section's steps in NumPy, on the same arena, offsets, strides, padding and views as on a GPU.

Each step reads its tensors where they lie, computes what its op means, rounds to the tensor's type and writes it with its
padding. It needs no code of the section's generation, so it runs any.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from tccompile.errors import InputError, LaunchError, VerificationError
from tccompile.expr import DType
from tccompile.plan import Entry, Plan, Section
from tccompile.program import Op, Storage, Tensor
from tccompile.reference import Observer, compute, elements, from_storage, store, to_storage, unobserved


class CpuEngine:
    """One entry of a plan, with the memory map of one of its sections.

    check_finite   stop at the first step that writes an infinity or a NaN
    check_padding  for tests: the arena starts full of NaN, and a step stops that would read padding that is not zero
    observe        sees what each step writes, as it is stored
    Raises UsageError if the plan was made without its weights, PlanError if they are damaged, LaunchError if memory runs out.
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
    ) -> None:
        self.entry, self.program, self.section = entry, entry.program, section
        self.check_finite, self.check_padding, self.observe = check_finite, check_padding, observe
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
        for owner in dict.fromkeys(tensors[name].storage for op in self.program.ops for name in op.inputs):
            if owner in self.program.constants:
                self._memory[owner] = np.frombuffer(plan.weight(owner), tensors[owner].dtype.numpy)

    def run(self, feeds: Mapping[str, np.ndarray], times: list[float] | None = None) -> dict[str, np.ndarray]:
        """The outputs by name, from the inputs by name; shapes and dtypes are the model's, bf16 is its bits in uint16.

        times  takes the microseconds of each step
        Raises VerificationError, which names the user's node and the tensor, if a check fails, and InputError for an index
        outside its axis.
        """
        with np.errstate(all="ignore"):  # as on a GPU: infinities and NaN are values
            return self._run(feeds, times)

    def _run(self, feeds: Mapping[str, np.ndarray], times: list[float] | None) -> dict[str, np.ndarray]:
        tensors, memory = self.program.tensors, self._memory
        for name in self.program.inputs:
            memory[name] = np.ascontiguousarray(feeds[name], tensors[name].dtype.numpy).reshape(-1)
        for name in self.program.outputs:
            memory[name] = np.empty(tensors[name].span, tensors[name].dtype.numpy)
        for step in self.section.steps:
            begin = perf_counter()
            op = self.program.ops[step.op]
            if self.check_padding:
                self._check_padding(op)
            y = tensors[op.y]
            try:
                values = compute(op, self.program, {name: self._elements(name) for name in op.inputs})
            except InputError as error:
                raise InputError(f"node {op.nodes[0]!r}: {error}") from None
            stored = to_storage(values, y.dtype)
            if self.check_finite and y.dtype.is_float:
                _check_finite(op, y, values, stored, self.program.storage.get(y.storage))
            self.observe(op.y, stored)
            store(memory[y.storage], y, stored)
            if times is not None:
                times.append((perf_counter() - begin) * 1e6)
        return {name: memory.pop(name).reshape(tensors[name].shape) for name in self.program.outputs}

    def _elements(self, name: str) -> np.ndarray:
        tensor = self.program.tensors[name]
        return elements(self._memory[tensor.storage], tensor)

    def _check_padding(self, op: Op) -> None:
        for name in op.inputs:
            tensor = self.program.tensors[name]
            padding = elements(self._memory[tensor.storage], tensor, tensor.padded).copy()
            padding[tuple(slice(n) for n in tensor.shape)] = 0
            if padding.any():
                raise VerificationError(f"node {op.nodes[0]!r} reads {name!r} {tensor.shape}, whose padding is not zero")


def _check_finite(op: Op, tensor: Tensor, values: np.ndarray, stored: np.ndarray, storage: Storage | None) -> None:
    numbers = from_storage(stored, tensor.dtype)
    if np.isfinite(numbers).all():
        return
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    what = "NaN" if np.isnan(numbers).any() else "an infinity"
    where = f"node {op.nodes[0]!r} writes {what} into {tensor.name!r} {tensor.shape} {tensor.dtype.value}"
    if tensor.dtype is DType.F16 and largest > 65504:
        scale = storage.scale if storage else 0
        end = f"float16 {f'times 2^{-scale} ' if scale else ''}ends at {65504 / 2.0**scale:.6g}"
        way = f"its largest magnitude is {largest / 2.0**scale:.4g}, {end}: compile with --calibrate INPUT, or --precision fp32"
    else:
        way = f"its largest finite magnitude is {largest:.4g}: the model itself computes it, or an input holds it"
    raise VerificationError(f"{where}; {way}")
