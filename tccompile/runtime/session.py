"""Running a plan: `Session(plan).run(None, {"input": x})`, on a GPU, or on the CPU."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from tccompile.errors import DeviceError, InputError, UsageError
from tccompile.ir.expr import Shape
from tccompile.ir.feeds import seeded
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.plan.format import Entry, Plan, read_plan
from tccompile.runtime.arrays import IO_ALIGN, DeviceArray, DeviceBuffer, Exchange, adopt, check_apart

if TYPE_CHECKING:
    from tccompile.runtime.cpu import CpuEngine
    from tccompile.runtime.driver import Device
    from tccompile.runtime.gpu import GpuEngine
    from tccompile.runtime.profile import Profile

_ORT_TYPES = {DType.F16: "float16", DType.F32: "float", DType.F64: "double"}


@dataclass(frozen=True)
class Value:
    """A model input or output.

    shape  extents; None for one that differs between the plan's entries, or in place of all where their number does
    type   as ONNX Runtime says it: `tensor(float)`
    """

    name: str
    shape: tuple[int | None, ...] | None
    type: str
    dtype: np.dtype


class Session:
    """A plan, ready to run. Any number of threads may use it: its inferences run one after the other.

    plan          a Plan, or the path of one
    device        "auto": the first GPU, or with a RuntimeWarning the CPU if no GPU can run the plan; "gpu"; "gpu:1"; "cpu"
    check_finite  raise VerificationError that names the first node whose result is not finite: on the CPU as soon as there is
                  one, on a GPU if one reaches an output. There outputs are copied to the host, which each inference waits for
    target        run the code of this generation, as "sm_80", instead of the best for the device
    Raises PlanError, DeviceError, LaunchError (not enough memory) and UsageError.

    Sessions of the same Plan object, or of the same file, share one copy of the weights on a GPU, which goes with the last of
    them. Use `close` or `with` to free memory early.
    """

    def __init__(
        self, plan: Plan | str | os.PathLike[str], device: str = "auto", check_finite: bool = False, target: str | None = None
    ):
        self.plan = plan if isinstance(plan, Plan) else _in_file(plan)
        self._check_finite, self._target = check_finite, target
        self._lock = RLock()
        self._engines: dict[int, GpuEngine | CpuEngine] = {}
        self._known: dict[tuple, GpuEngine] = {}  # which engine runs arrays of a layout that has been checked
        self._device = self._open(device)
        """The GPU, or None on the CPU."""

    def _open(self, device: str) -> Device | None:
        """The device that was asked for, with the first entry loaded on it."""
        name, colon, number = str(device).partition(":")
        if name not in ("auto", "cpu", "gpu") or (colon and (name != "gpu" or not number.isdecimal())):
            raise UsageError(f"unknown device {device!r}; choose auto, cpu, gpu, or gpu:N")
        if name == "cpu":
            self._engines[0] = self._cpu_engine(self.plan.entries[0])
            return None
        from tccompile.runtime.driver import open_device

        try:
            gpu = open_device(int(number or 0))
            self._engines[0] = self._gpu_engine(self.plan.entries[0], gpu)
            return gpu
        except DeviceError as error:
            if name == "gpu" or self._target is not None:
                raise
            warnings.warn(f"running on the CPU, which is slow: {error}", RuntimeWarning, stacklevel=3)
        self._engines[0] = self._cpu_engine(self.plan.entries[0])
        return None

    def _cpu_engine(self, entry: Entry) -> CpuEngine:
        from tccompile.runtime.cpu import CpuEngine

        sections = [s for s in entry.sections if self._target in (None, s.arch)]
        if not sections:
            raise DeviceError(f"the plan has nothing for {self._target}; it has {', '.join(s.arch for s in entry.sections)}")
        return CpuEngine(self.plan, entry, sections[0], check_finite=self._check_finite)

    def _gpu_engine(self, entry: Entry, device: Device) -> GpuEngine:
        from tccompile.runtime.gpu import GpuEngine

        return GpuEngine(self.plan, entry, device, self._target)

    # --- What it is --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """ "cpu", or the GPU's number as in "gpu:0"."""
        return "cpu" if self._device is None else f"gpu:{self._device.ordinal}"

    def describe(self) -> str:
        """The device, and the code that runs on it."""
        self._check_open()
        engine = self._engines[0]
        if self._device is None:
            return f"CPU (NumPy, the steps for {engine.section.arch})"
        return f"{self._device}, code for {engine.target}"  # type: ignore[union-attr]

    def get_inputs(self) -> list[Value]:
        return self._values(self.plan.entries[0].program.inputs)

    def get_outputs(self) -> list[Value]:
        return self._values(self.plan.entries[0].program.outputs)

    def _values(self, names: Sequence[str]) -> list[Value]:
        out = []
        for name in names:
            tensors = [e.program.tensors[name] for e in self.plan.entries]
            extents = tuple(n[0] if len(set(n)) == 1 else None for n in zip(*(t.shape for t in tensors), strict=False))
            dtype = tensors[0].dtype
            out.append(
                Value(
                    name,
                    extents if len({t.rank for t in tensors}) == 1 else None,
                    f"tensor({_ORT_TYPES.get(dtype, dtype.value)})",
                    dtype.numpy,
                )
            )
        return out

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> list[Any]:
        """One inference: the outputs, in the order of `output_names` (None: all, in the model's order).

        feeds    each input's array, in the plan's shape and dtype (bfloat16 as uint16): NumPy, or anything with DLPack, or
                 contiguous and on this GPU with `__cuda_array_interface__`. Arrays on the GPU are read where they lie
        outputs  arrays to write outputs into, by name: NumPy, or contiguous ones on this GPU; they are what is returned. None may
                 overlap another, nor on the GPU an input
        stream   the CUDA stream to run on: a CUstream as an integer, or an object of PyTorch's, CuPy's or cuda.core's

        Outputs that are not given are NumPy arrays if all inputs lie on the host, and DeviceArrays if any lies on the GPU.
        With a stream, and all inputs and outputs on the GPU, it returns at once: the results are there when the stream
        comes to them, and until then inputs and outputs must not be freed. Otherwise the results are complete.
        Raises InputError, and LaunchError if the GPU fails.
        """
        if not isinstance(feeds, Mapping):
            example = ", ".join(f"{name!r}: array" for name in self.plan.entries[0].program.inputs)
            raise InputError(f"inputs are given by name, as {{{example}}}, not as a {type(feeds).__name__}")
        with self._lock:
            self._check_open()
            names = self._output_names(output_names, outputs or {})
            if self._device is None:
                return self._run_on_cpu(names, feeds, outputs or {})
            return self._run_on_gpu(names, feeds, outputs or {}, stream)

    def _run_on_cpu(self, names: list[str], feeds: Mapping[str, Any], given: Mapping[str, Any]) -> list[Any]:
        arrays = {name: adopt(array, None, 0, f"input {name!r}") for name, array in feeds.items()}
        engine = self._engine(arrays)
        targets = {
            name: self._target_array(engine, adopt(array, None, 0, f"output {name!r}"), name) for name, array in given.items()
        }
        check_apart(targets, {})
        program = engine.entry.program
        results = engine.run({n: np.asarray(_as_stored(arrays[n], program.tensors[n])) for n in program.inputs})  # type: ignore[union-attr]
        for name, target in targets.items():
            assert isinstance(target, np.ndarray)
            np.copyto(target, results[name])
        return [given[name] if name in given else results[name] for name in names]

    def _run_on_gpu(self, names: list[str], feeds: Mapping[str, Any], given: Mapping[str, Any], stream: Any) -> list[Any]:
        """`run`, under the lock: streams ordered, arrays placed, launched, what the host wants fetched."""
        assert self._device is not None
        own = int(self._engines[0].stream.value)  # type: ignore[union-attr]
        queue = own if stream is None else _stream_handle(stream)
        gpu = self._device.ordinal
        with self._device as cu:
            arrays = {name: adopt(array, gpu, queue, f"input {name!r}") for name, array in feeds.items()}
            adopted = {name: adopt(array, gpu, queue, f"output {name!r}") for name, array in given.items()}
            engine, targets = self._checked(arrays, adopted)
            check_apart(targets, arrays)
            buffers = [a for a in (*arrays.values(), *targets.values()) if isinstance(a, DeviceBuffer)]
            for where in {b.stream for b in buffers}:
                producer = where.stream(gpu) if isinstance(where, Exchange) else where
                if producer is not None and producer != queue:
                    engine.order_after(producer, queue)
            engine.order_after_last(queue)

            tensors, program = engine.program.tensors, engine.program
            addresses: dict[str, int] = {}
            on_device = False  # whether any input is
            for name in program.inputs:
                a = arrays[name]
                on_device = on_device or isinstance(a, DeviceBuffer)
                placed = isinstance(a, DeviceBuffer) and not a.address % IO_ALIGN
                addresses[name] = a.address if placed else self._place_input(engine, name, a, queue)  # type: ignore[union-attr]
            made: dict[str, DeviceArray] = {}
            staged: list[str] = []
            for name in program.outputs:
                target = targets.get(name)
                if isinstance(target, DeviceBuffer) and not target.address % IO_ALIGN:
                    addresses[name] = target.address
                elif target is None and on_device and name in names:
                    made[name] = engine.output(name, queue)
                    addresses[name] = made[name].memory.address
                else:
                    addresses[name] = engine.staging().address(name)
                    staged.append(name)
            engine.launch_in(cu, addresses, queue)
            if self._check_finite:
                engine.check_finite(addresses, queue)

            to_host = []
            for name in staged:
                target = targets.get(name)
                if isinstance(target, DeviceBuffer):
                    cu.cuMemcpyDtoDAsync(target.address, addresses[name], tensors[name].nbytes, queue)
                elif target is not None or name in names:
                    engine.staging().fetch(name, queue)
                    to_host.append(name)
            if stream is None or to_host or len(buffers) < len(arrays) + len(targets):
                engine.synchronize(queue)
                engine.mark_last(None)
            else:
                engine.mark_last(queue)
                for array in made.values():
                    array.mark()

            for name in to_host:
                if name in targets:
                    np.copyto(targets[name], engine.staging().host(name))  # type: ignore[arg-type]
            return [given[n] if n in given else made[n] if n in made else engine.staging().host(n).copy() for n in names]

    def _checked(
        self, arrays: Mapping[str, np.ndarray | DeviceBuffer], given: Mapping[str, np.ndarray | DeviceBuffer]
    ) -> tuple[GpuEngine, Mapping[str, np.ndarray | DeviceBuffer]]:
        """The engine for the inputs, and the caller's output arrays as it writes them.

        Arrays in GPU memory are checked once for each layout that they come in.
        """
        layouts: list[Any] = []
        for of_one in (arrays, given):
            for name, a in of_one.items():
                layouts += (name, a.shape, a.dtype, a.contiguous) if isinstance(a, DeviceBuffer) else (name, None)
            layouts.append(None)
        key = tuple(layouts)
        if (known := self._known.get(key)) is not None:
            return known, given
        engine: GpuEngine = self._engine(arrays)  # type: ignore[assignment]
        targets = {name: self._target_array(engine, array, name) for name, array in given.items()}
        if not any(isinstance(a, np.ndarray) for a in (*arrays.values(), *given.values())):
            self._known[key] = engine
        return engine, targets

    def _place_input(self, engine: GpuEngine, name: str, array: np.ndarray | DeviceBuffer, stream: int) -> int:
        """Where the input lies on the device, after it has been queued to be copied there if need be."""
        t = engine.program.tensors[name]
        if isinstance(array, np.ndarray):
            engine.staging().put(name, _as_stored(array, t), stream)
            return engine.staging().address(name)
        if not array.address % IO_ALIGN:
            return array.address
        where = engine.staging().address(name)
        with engine.device as cu:
            cu.cuMemcpyDtoDAsync(where, array.address, t.nbytes, stream)
        return where

    def bench(self, iterations: int = 100, feeds: Mapping[str, Any] | None = None, warmup: int = 10) -> list[float]:
        """Milliseconds of each of `iterations` inferences, with inputs and outputs on the device, copied there before.

        On a GPU by CUDA events around launches of the graph. `feeds` as in `run`; None for random values of the first entry.
        """
        with self._lock:
            if feeds is None:
                feeds = seeded(self.plan.entries[0].program, 0)
            self.run(None, feeds)
            if self._device is None:
                times = []
                for _ in range(iterations):
                    begin = time.perf_counter()
                    self.run(None, feeds)
                    times.append((time.perf_counter() - begin) * 1e3)
                return times
            engine, addresses = self._placed(feeds)
            return engine.time(addresses, iterations, warmup)

    def profile(self, iterations: int = 50, feeds: Mapping[str, Any] | None = None) -> Profile:
        """The time of every step: the median of `iterations` inferences. `feeds` as in `bench`.

        On a GPU one step at a time, by events around each, less what the events add, the same for all; on the CPU, the time of
        each step in NumPy.
        """
        from tccompile.runtime.profile import Profile, profiled, roof

        if iterations < 1:
            raise UsageError(f"{iterations} iterations measure nothing; give at least 1")
        with self._lock:
            self._check_open()
            if feeds is None:
                feeds = seeded(self.plan.entries[0].program, 0)
            if self._device is None:
                arrays = {name: adopt(array, None, 0, f"input {name!r}") for name, array in feeds.items()}
                runner: CpuEngine = self._engine(arrays)  # type: ignore[assignment]
                stored = {n: np.asarray(_as_stored(arrays[n], runner.program.tensors[n])) for n in runner.program.inputs}
                times: list[list[float]] = [[] for _ in range(iterations)]
                for of_one in times:
                    runner.run(stored, of_one)
                steps, whole = profiled(runner.program, runner.section, times, None), median(map(sum, times))
                return Profile(self.plan.name, self.describe(), True, iterations, whole, steps, None)
            engine, addresses = self._placed(feeds)
            whole = median(engine.time(addresses, iterations, 10)) * 1e3
            limits = roof(engine.device)
            times, alone = engine.time_steps(addresses, iterations)
            steps = profiled(engine.program, engine.section, times, limits, median(alone))
            return Profile(self.plan.name, self.describe(), False, iterations, whole, steps, limits)

    def _placed(self, feeds: Mapping[str, Any]) -> tuple[GpuEngine, dict[str, int]]:
        """The engine for the inputs, copied to the device if they are not there, and the addresses of inputs and outputs."""
        assert self._device is not None
        stream = int(self._engines[0].stream.value)  # type: ignore[union-attr]
        arrays = {name: adopt(array, self._device.ordinal, stream, f"input {name!r}") for name, array in feeds.items()}
        engine: GpuEngine = self._engine(arrays)  # type: ignore[assignment]
        with engine.device:
            addresses = {n: self._place_input(engine, n, arrays[n], stream) for n in engine.program.inputs}
        return engine, addresses | {n: engine.staging().address(n) for n in engine.program.outputs}

    # --- Checking ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._engines:
            raise UsageError("the session is closed")

    def _output_names(self, asked: Sequence[str] | None, given: Mapping[str, Any]) -> list[str]:
        there = self.plan.entries[0].program.outputs
        if isinstance(asked, str):
            raise InputError(f"the outputs asked for are a list, as [{asked!r}], or None for all of them")
        for name in (*(asked or ()), *given):
            if name not in there:
                raise InputError(f"the model has no output {name!r}; it has {', '.join(map(repr, there))}")
        return list(there if asked is None else asked)

    def _engine(self, arrays: Mapping[str, np.ndarray | DeviceBuffer]) -> GpuEngine | CpuEngine:
        """The engine of the entry whose shapes the inputs have; InputError if they fit none."""
        entries = self.plan.entries
        inputs = entries[0].program.inputs
        for name in arrays:
            if name not in inputs:
                raise InputError(f"the model has no input {name!r}; it has {', '.join(map(repr, inputs))}")
        for name in inputs:
            if name not in arrays:
                raise InputError(f"input {name!r} is missing")
            self._check_dtype(f"input {name!r}", entries[0].program.tensors[name], arrays[name])
        shapes = {name: tuple(arrays[name].shape) for name in inputs}
        fits = (i for i, e in enumerate(entries) if all(e.program.tensors[n].shape == s for n, s in shapes.items()))
        number = next(fits, None)
        if number is None:
            raise InputError(self._shapes_message(shapes))
        for name, array in arrays.items():
            self._check_order(f"input {name!r}", array)
        if number not in self._engines:
            device = self._device
            entry = entries[number]
            self._engines[number] = self._cpu_engine(entry) if device is None else self._gpu_engine(entry, device)
        return self._engines[number]

    def _target_array(
        self, engine: GpuEngine | CpuEngine, array: np.ndarray | DeviceBuffer, name: str
    ) -> np.ndarray | DeviceBuffer:
        """An output array of the caller's, checked."""
        what, t = f"output {name!r}", engine.entry.program.tensors[name]
        self._check_dtype(what, t, array)
        if tuple(array.shape) != t.shape:
            raise InputError(f"{what} has shape {_shape(t.shape)}, got an array of shape {_shape(array.shape)}")
        self._check_order(what, array)
        if isinstance(array, np.ndarray):
            if not array.flags.writeable:
                raise InputError(f"{what}: the array is read-only")
            return _as_stored(array, t)
        return array

    def _check_dtype(self, what: str, t: Tensor, array: np.ndarray | DeviceBuffer) -> None:
        got = array.dtype.value if isinstance(array.dtype, DType) else array.dtype.name
        if got == t.dtype.value or (t.dtype is DType.BF16 and got == "uint16"):
            return
        way_out = f"; convert it with .astype(np.{t.dtype.value})" if isinstance(array, np.ndarray) else ""
        if t.dtype is DType.BF16:
            way_out = "; NumPy has no such type: give its bits as uint16"
        raise InputError(f"{what} has type {t.dtype.value}, got {got}{way_out}")

    def _check_order(self, what: str, array: np.ndarray | DeviceBuffer) -> None:
        if not isinstance(array, np.ndarray) and not array.contiguous:
            raise InputError(
                f"{what} on the GPU is not contiguous in row-major order; make it so first (.contiguous() in PyTorch)"
            )

    def _shapes_message(self, got: Mapping[str, Shape]) -> str:
        entries = self.plan.entries
        if len(entries) == 1:
            tensors = entries[0].program.tensors
            wrong = [
                f"input {n!r} has shape {_shape(tensors[n].shape)}, got {_shape(s)}"
                for n, s in got.items()
                if s != tensors[n].shape
            ]
            return "; ".join(wrong) + ". Other shapes need another plan: tccompile --shape NAME=…"
        there = "; or ".join(", ".join(f"{n} {_shape(e.program.tensors[n].shape)}" for n in got) for e in entries)
        return f"the plan has no entry for {', '.join(f'{n} {_shape(s)}' for n, s in got.items())}; it was compiled for {there}"

    # --- The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the session's memory on the device. Arrays that it returned stay."""
        with self._lock:
            for engine in self._engines.values():
                if self._device is not None:
                    engine.close()  # type: ignore[union-attr]
            self._engines.clear()
            self._known.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_plans: weakref.WeakValueDictionary[tuple[int, ...], Plan] = weakref.WeakValueDictionary()
_plans_lock = Lock()


def _in_file(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file: the one that another session has read, if the file is still the same."""
    try:
        status = os.stat(path)
    except OSError:
        return read_plan(path)  # says what is wrong
    key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    with _plans_lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = read_plan(path)
        return plan


def _as_stored(array: Any, t: Tensor) -> np.ndarray:
    """The array in the type that holds the tensor's elements: bfloat16 as its bits."""
    return array.view(np.uint16) if t.dtype is DType.BF16 and array.dtype.name != "uint16" else array


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if len(shape) else "() (a scalar)"


def _stream_handle(stream: Any) -> int:
    """The CUstream of an integer, or of an object of PyTorch (`cuda_stream`), CuPy (`ptr`), or with `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        if (value := getattr(stream, attribute, None)) is not None:
            return int(value)
    with suppress(TypeError, ValueError):
        return int(stream)
    raise InputError(f"a {type(stream).__name__} is not a CUDA stream; give its handle as an integer")
