"""Running a plan: `Session(plan).run(None, {"input": x})`, on a GPU, or on the CPU: whatever engine there is for it."""

from __future__ import annotations

import difflib
import io
import os
import shlex
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock, RLock
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tccompile.custom.files import Given, collected, using
from tccompile.errors import DeviceError, InputError, PlanError, UsageError
from tccompile.garbage import no_garbage
from tccompile.ir.extent import Shape
from tccompile.ir.feeds import seeded
from tccompile.ir.metadata import Form, Kind, Metadata
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.plan.file import Plan, from_bytes, read_plan
from tccompile.plan.trust import check_trust
from tccompile.refit.constants import refitted_constants
from tccompile.refit.swap import Adapters
from tccompile.runtime.arrays import Array, DeviceBuffer, as_stored, check_apart, stream_handle
from tccompile.runtime.counts import check_made, cut, open_axes, wanted
from tccompile.runtime.engine import RECENT, Engine, Held, Platform
from tccompile.runtime.forms import flattened, grouped, parts, written
from tccompile.runtime.misfit import misfit

if TYPE_CHECKING:
    from tccompile.runtime.profile import Profile

_ORT_TYPES = {DType.F16: "float16", DType.F32: "float", DType.F64: "double"}


@dataclass(frozen=True)
class Value:
    """A model input or output.

    shape  extents; None for one that differs between the plan's entries (`Session.entries` has them), or in place of all where
           their number does
    type   as ONNX Runtime says it: `tensor(float)`
    """

    name: str
    shape: tuple[int | None, ...] | None
    type: str
    dtype: np.dtype


def value_of(form: Form, tensors: Sequence[Value]) -> Value:
    """What a model's value is that is made of these tensors; of one without any, the type of its elements is not known."""
    if form.kind in (Kind.TENSOR, Kind.GIVEN):
        return replace(tensors[0], name=form.name)
    inner, dtype = (tensors[0].type, tensors[0].dtype) if tensors else ("tensor", np.dtype(np.float32))
    if form.kind is not Kind.OPTIONAL:
        inner = f"seq({inner})"
    return Value(form.name, None, inner if form.kind is Kind.SEQUENCE else f"optional({inner})", dtype)


class Session:
    """A plan, ready to run. Any number of threads may use it: its inferences run one after the other.

    A plan is native code, which runs with your rights: take plans only from those from whom you would take a program.

    plan          a Plan, its file's path, that file's bytes, or a file that is open for reading
    device        "auto": the first GPU, or with a RuntimeWarning the CPU if no GPU can run the plan; "gpu" or "cuda"; "gpu:1";
                  "cpu"
    check_finite  raise VerificationError that names the first node whose result is not finite: on the CPU as soon as there is
                  one, on a GPU if one reaches an output. There a kernel looks at outputs, which each inference waits for
    target        run the code of this generation, as "sm_80", instead of the best for the device
    providers     what ONNX Runtime takes; it says no more than `device`, and a RuntimeWarning tells so
    trust         a file that says whose plans to run (docs/guide/trust.md): a list that `tcinspect --rebuild --trust` has made,
                  or the key that they are signed with. VerificationError for any other plan, before any of its code is loaded
    ops           files or modules with operators of your own (`tccompile.op`): on the CPU their references are run. Nothing of
                  what is in a plan names any, or is imported
    Raises PlanError, DeviceError, LaunchError (not enough memory) and UsageError.

    Sessions of the same Plan object, or of the same file, share one copy of the weights on a GPU, which goes with the last of
    them. Use `close` or `with` to free memory early.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | bytes | IO[bytes],
        device: str = "auto",
        check_finite: bool = False,
        target: str | None = None,
        providers: Sequence[Any] | None = None,
        trust: str | os.PathLike[str] | None = None,
        ops: Sequence[Given] = (),
    ):
        if providers is not None:
            message = f"providers are ONNX Runtime's: this session runs on device={device!r}; leave them away"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.plan = _plan_of(plan)
        if trust is not None:
            if not isinstance(plan, str | os.PathLike):
                raise UsageError("trust is in the file of a plan: give the session its path")
            check_trust(self.plan, plan, trust)
        where = os.path.abspath(plan) if isinstance(plan, str | os.PathLike) else None
        self._opened = (where, device, check_finite, target, None, trust and os.path.abspath(trust), ops) if where else None
        self._lock = RLock()
        self._engines: dict[int, Engine] = {}
        """Those of the plan's entries that have been run, and the first one's; none when the session is closed."""
        self._members: dict[tuple[int, tuple[int, ...]], Engine] = {}
        """Those of families for sizes that have been run, by the family's number and the sizes; the last used comes last."""
        self._known: dict[tuple, Engine] = {}
        """Which engine runs arrays of a layout that has been checked."""
        self._adapters = Adapters(self.plan)
        with using(collected(ops)) if ops else nullcontext(), no_garbage():
            self._platform = self._open(device, target, check_finite)

    def _open(self, device: str, target: str | None, check_finite: bool) -> Platform:
        """The platform that was asked for, with the first entry loaded on it."""
        name, colon, number = str(device).lower().partition(":")
        name = "gpu" if name == "cuda" else name
        if name not in ("auto", "cpu", "gpu") or (colon and (name != "gpu" or not number.isdecimal())):
            raise UsageError(f"unknown device {device!r}; choose auto, cpu, gpu, or gpu:N")
        if name != "cpu":
            from tccompile.runtime.gpu import GpuPlatform

            try:
                return self._loaded(GpuPlatform(self.plan, int(number or 0), target, check_finite))
            except DeviceError as error:
                if name == "gpu":
                    raise
                if target is not None:  # somebody wants that code, and no other
                    there = any(section.arch == target for section in self.plan.entries[0].sections)
                    way_out = f"; on the device cpu, NumPy runs the steps for {target}" if there else ""
                    raise DeviceError(f"{error}{way_out}") from error
                warnings.warn(f"running on the CPU, which is slow: {error}", RuntimeWarning, stacklevel=3)
        from tccompile.runtime.cpu import CpuPlatform

        return self._loaded(CpuPlatform(self.plan, target, check_finite))

    def _loaded(self, platform: Platform) -> Platform:
        platform.load_families()
        fixed = len(self.plan.entries) - len(self.plan.families)
        for number in range(fixed if self.plan.families else 1):  # single sizes of a range are loaded as its others are
            self._engines[number] = platform.load(self.plan.entries[number])
        if not fixed:
            self._engines[0] = platform.load_member(0, [size.low for size in self.plan.families[0].sizes])
        return platform

    # --- What it is --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """ "cpu", or the GPU's number as in "gpu:0"."""
        return self._platform.name

    def describe(self) -> str:
        """The device, and the code that runs on it."""
        self._check_open()
        return self._engines[0].describe()

    def __repr__(self) -> str:
        where = self.device if self._engines else "closed"
        return f"<Session of {self.plan!r}, {where}>"

    def __reduce__(self) -> Any:
        """Pickled, a session is its plan's path, which is opened again; with other weights, or without a path, it cannot be."""
        if self._opened is None:
            raise TypeError("a Session of no file cannot be pickled: save the plan, and open a Session of its path")
        if self._adapters.changed:
            raise TypeError("a Session with other weights than its plan's cannot be pickled: tcrefit writes a plan that has them")
        return type(self), self._opened

    def get_inputs(self) -> list[Value]:
        """The model's inputs, in its order."""
        return self._values(self.plan.entries[0].program.inputs, self.plan.metadata.inputs)

    def get_outputs(self) -> list[Value]:
        """The model's outputs, in its order."""
        return self._values(self.plan.entries[0].program.results, self.plan.metadata.outputs)

    @property
    def entries(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Each set of input shapes that the plan can run, by the inputs' names: `run` takes that which its inputs have."""
        return tuple({n: e.program.tensors[n].shape for n in e.program.inputs} for e in self.plan.entries)

    def get_modelmeta(self) -> Metadata:
        """What the model's file says of itself, such as a detector's class names in `custom_metadata_map`."""
        return self.plan.metadata

    def get_providers(self) -> list[str]:
        """The device, in ONNX Runtime's words."""
        return ["CPUExecutionProvider"] if self.device == "cpu" else ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def _values(self, names: Sequence[str], forms: Sequence[Form]) -> list[Value]:
        if forms:
            made = {v.name: v for v in self._values(names, ())}
            return [value_of(form, [made[one] for one in parts(form, made)]) for form in forms]
        out = []
        for name in names:
            entries = (*self.plan.entries, *(family.highest for family in self.plan.families))
            tensors = [e.program.tensors[name] for e in entries]
            extents = tuple(n[0] if len(set(n)) == 1 else None for n in zip(*(t.shape for t in tensors), strict=False))
            cut_at = open_axes(self.plan.entries[0].program, name)
            extents = tuple(None if axis in cut_at else n for axis, n in enumerate(extents))
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
        input_feed: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> list[Any]:
        """One inference: the outputs, in the order of `output_names` (None or none: all, in the model's order).

        input_feed  each input's array, in the plan's shape and dtype (bfloat16 as uint16): NumPy, or anything with DLPack, or
                 contiguous and on this GPU with `__cuda_array_interface__`. Arrays on the GPU are read where they lie
        outputs  arrays to write outputs into, by name: NumPy, or contiguous ones on this GPU; they are what is returned. None may
                 overlap another, nor on the GPU an input
        stream   the CUDA stream to run on: a CUstream as an integer, or an object of PyTorch's, CuPy's or cuda.core's

        A sequence is a list of arrays, and an optional value that is not there None.
        Outputs that are not given are NumPy arrays if all inputs lie on the host, and DeviceArrays if any lies on the GPU.
        With a stream, and all inputs and outputs on the GPU, it returns at once: the results are there when the stream
        comes to them, and until then inputs and outputs must not be freed. Otherwise the results are complete, as they always
        are of a model that has outputs of which the data decide how much there is.
        Raises InputError, and LaunchError if the GPU fails.
        """
        if not isinstance(input_feed, Mapping):
            example = ", ".join(f"{name!r}: array" for name in self.plan.entries[0].program.inputs)
            raise InputError(f"inputs are given by name, as {{{example}}}, not as a {type(input_feed).__name__}")
        if (forms := self.plan.metadata).outputs:
            program = self.plan.entries[0].program
            feed = flattened(forms.inputs, program.inputs, input_feed)
            asked = list(output_names or ()) or [form.name for form in forms.outputs]
            called = {form.name: parts(form, program.results) for form in forms.outputs}
            tensors = [one for name in asked for one in called.get(name, [name])]
            made = self._run(tensors, feed, written(forms.outputs, outputs or {}), stream) if tensors else []
            return grouped(forms.outputs, asked, dict(zip(tensors, made, strict=True)))
        return self._run(output_names, input_feed, outputs or {}, stream)

    def _run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], given: Mapping[str, Any], stream: Any
    ) -> list[Any]:
        """The same for arrays by the names of the plan's tensors."""
        with self._lock:
            self._check_open()
            names = self._output_names(output_names, given)
            queue = None if stream is None else stream_handle(stream)
            with self._platform:
                adopt = self._platform.adopt
                arrays = {name: adopt(array, queue, f"input {name!r}") for name, array in input_feed.items()}
                adopted = {name: adopt(array, queue, f"output {name!r}") for name, array in given.items()}
                engine, targets = self._checked(arrays, adopted)
                check_apart(targets, arrays)
                asked: dict[str, Array | None] = dict.fromkeys(names) | dict(targets)
                found = wanted(self.plan.entries[0].program)
                made = engine.run(arrays, asked | found, queue)
                cut(engine.counts, found, made)
            return [given[name] if name in given else made[name] for name in names]

    def _run_apart(self, inputs: Mapping[str, DeviceBuffer], outputs: Mapping[str, DeviceBuffer], stream: int) -> None:
        """Queue one inference on arrays of this GPU, into memory that nothing else has: `run` without what that need not look at.

        The plan has neither counts nor values that are no tensors, and whoever made the inputs works on the stream.
        """
        with self._lock:
            self._check_open()
            with self._platform:
                engine, _ = self._checked(inputs, outputs)
                engine.run(inputs, outputs, stream)

    def _checked(self, arrays: Mapping[str, Array], given: Mapping[str, Array]) -> tuple[Engine, Mapping[str, Array]]:
        """The engine for the inputs, and the caller's output arrays as it writes them.

        Arrays are checked once for each layout that they come in, but for those on the host that are written into.
        """
        layouts: list[Any] = []
        for of_one in (arrays, given):
            for name, a in of_one.items():
                layouts += (name, a.shape, a.dtype, a.contiguous if isinstance(a, DeviceBuffer) else None)
            layouts.append(None)
        key = tuple(layouts)
        if (engine := self._known.get(key)) is not None:
            self._use(engine)
            on_host = {name: self._target_array(engine, a, name) for name, a in given.items() if isinstance(a, np.ndarray)}
            return engine, {**given, **on_host}
        engine = self._engine(arrays)
        targets = {name: self._target_array(engine, array, name) for name, array in given.items()}
        self._known[key] = engine
        return engine, targets

    def bench(self, iterations: int = 100, feeds: Mapping[str, Any] | None = None, warmup: int = 10) -> list[float]:
        """Milliseconds of each of `iterations` inferences, with inputs and outputs on the device, copied there before.

        On a GPU by CUDA events around launches of the graph, after `warmup` ones. `feeds` as in `run`; None for random values
        of the first entry.
        """
        with self._lock, self._platform:
            if feeds is None:
                feeds = seeded(self.plan.entries[0].program, 0)
            self.run(None, feeds)
            engine, arrays = self._adopted(feeds)
            return engine.time(arrays, iterations, warmup)

    def profile(self, iterations: int = 50, feeds: Mapping[str, Any] | None = None) -> Profile:
        """The time of every step: the median of `iterations` inferences. `feeds` as in `bench`.

        On a GPU one step at a time, by events around each, less what the events add, the same for all; on the CPU, the time of
        each step in NumPy.
        """
        if iterations < 1:
            raise UsageError(f"{iterations} iterations measure nothing; give at least 1")
        with self._lock, self._platform:
            self._check_open()
            if feeds is None:
                feeds = seeded(self.plan.entries[0].program, 0)
            engine, arrays = self._adopted(feeds)
            return engine.profile(arrays, iterations)

    def _adopted(self, feeds: Mapping[str, Any]) -> tuple[Engine, dict[str, Array]]:
        """The engine for the inputs, and the inputs as it takes them."""
        arrays = {name: self._platform.adopt(array, None, f"input {name!r}") for name, array in feeds.items()}
        return self._engine(arrays), arrays

    # --- Other weights -----------------------------------------------------------------------------------------------

    def refit(self, weights: Mapping[str, Any]) -> None:
        """Put other values in the place of the model's weights, by name, where they lie: later inferences read them.

        weights  arrays of the type and shape that the model has them in (bfloat16 as float32). Of weights that make one constant
                 of the plan, all are to be given. The old ones give the old bits

        Code, graphs and addresses stay. It waits for inferences that are queued. If it raises, nothing has changed: UsageError
        for what does not fit the plan, for weights by which something was decided when it was made, while adapters are merged
        (`lora`), or where another session on the GPU reads the same memory; VerificationError for values that the plan's
        precision does not hold for. Only after a LaunchError, when the GPU has failed, some may have changed.
        """
        if not isinstance(weights, Mapping):
            raise UsageError(f"weights are given by name, as {{'conv1.weight': array}}, not as a {type(weights).__name__}")
        given = {name: _on_host(name, values) for name, values in weights.items()}
        with self._lock:
            self._check_open()
            if self._adapters.now.weights:
                raise UsageError("adapters are merged into the session's weights: take them out first, with lora(None)")
            self._replace(refitted_constants(self.plan, given))
            self._adapters.refitted(given)

    def lora(
        self,
        adapters: str | os.PathLike[str] | None,
        scale: float = 1.0,
        base: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
        names: str | os.PathLike[str] | None = None,
    ) -> None:
        """Merge adapters of low rank into the weights, in place of those that were merged before; None takes these out again.

        adapters  a safetensors file, as peft, diffusers or kohya's scripts write them; `scale` says how much they count
        base      the weights without adapters, from which those are computed that have them: arrays by the model's names, as
                  `tccompile.weights("model.onnx")` gives them, or a safetensors file. A session remembers them
        names     a file that says what modules the adapters call weights, where the model's names do not show it

        See `refit` for what else holds, and for what it raises. Without adapters the bits are those of before. Constants of the
        last four adapters are kept: to swap among them is to copy them.
        """
        with self._lock:
            self._check_open()
            if base is not None:
                self._adapters.based_on(base)
            made = self._adapters.made(adapters, scale, names)
            if constants := self._adapters.to(made.constants):
                self._replace(constants)
            self._adapters.now = made

    def _replace(self, constants: Mapping[str, bytes | memoryview]) -> None:
        with self._platform:
            self._platform.refit([*self._engines.values(), *self._members.values()], constants)

    # --- Checking ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._engines:
            raise UsageError("the session is closed")

    def _output_names(self, asked: Sequence[str] | None, given: Mapping[str, Any]) -> list[str]:
        program = self.plan.entries[0].program
        there = program.results
        if isinstance(asked, str):
            raise InputError(f"the outputs asked for are a list, as [{asked!r}], or None for all of them")
        if not isinstance(given, Mapping):
            raise InputError(f"arrays to write into go by name, as {{{there[0]!r}: array}}, not as a {type(given).__name__}")
        for name in (*(() if asked is None else asked), *given):
            if name not in there:
                raise InputError(f"the model has no output {name!r}{_near(name, there)}; it has {', '.join(map(repr, there))}")
        check_made(program, given)
        return list(asked if asked is not None and len(asked) else there)

    def _engine(self, arrays: Mapping[str, Array]) -> Engine:
        """The engine of the entry whose shapes the inputs have; InputError if they fit none."""
        entries = self.plan.entries[: len(self.plan.entries) - len(self.plan.families)]
        program = self.plan.entries[0].program
        inputs, tensors = program.inputs, program.tensors
        if arrays.keys() != set(inputs):
            self._check_names(arrays, inputs)
        for name in inputs:
            self._check_dtype("input", name, tensors[name], arrays[name])
        shapes = {name: tuple(arrays[name].shape) for name in inputs}
        fits = (i for i, e in enumerate(entries) if all(e.program.tensors[n].shape == s for n, s in shapes.items()))
        number = next(fits, None)
        members = ((i, f.sizes_of(shapes)) for i, f in enumerate(self.plan.families)) if number is None else iter(())
        member = next(((i, sizes) for i, sizes in members if sizes is not None), None)
        if number is None and member is None:
            raise InputError(self._shapes_message(shapes))
        for name, array in arrays.items():
            self._check_order("input", name, array)
        if member is not None:
            return self._member(*member)
        assert number is not None
        if number not in self._engines:
            self._engines[number] = self._platform.load(entries[number])
        return self._engines[number]

    def _check_names(self, arrays: Mapping[str, Array], inputs: Sequence[str]) -> None:
        for name in arrays:
            if name not in inputs:
                raise InputError(f"the model has no input {name!r}{_near(name, inputs)}; it has {', '.join(map(repr, inputs))}")
        for name in inputs:
            if name not in arrays:
                raise InputError(f"input {name!r} is missing")

    def _member(self, number: int, sizes: tuple[int, ...]) -> Engine:
        """The engine of a family for these sizes; it takes the place of the one that has been used longest ago."""
        key = number, sizes
        engine = self._members.pop(key, None)
        if engine is None:
            while len(self._members) >= RECENT:
                oldest = self._members.pop(next(iter(self._members)))
                self._known = {layout: known for layout, known in self._known.items() if known is not oldest}
                oldest.close()
            engine = self._platform.load_member(number, sizes)
        self._members[key] = engine
        return engine

    def _use(self, engine: Engine) -> None:
        """Says that an engine is used now: of a family's, it is then the last one to be closed."""
        key = next((key for key, member in self._members.items() if member is engine), None)
        if key is not None:
            self._members[key] = self._members.pop(key)

    def _target_array(self, engine: Engine, array: Array, name: str) -> Array:
        """An output array of the caller's, checked."""
        t = engine.io[name]
        self._check_dtype("output", name, t, array)
        if tuple(array.shape) != t.shape:
            raise InputError(f"output {name!r} has shape {_shape(t.shape)}, got an array of shape {_shape(array.shape)}")
        self._check_order("output", name, array)
        if isinstance(array, np.ndarray):
            if not array.flags.writeable:
                raise InputError(f"output {name!r}: the array is read-only")
            return as_stored(array, t.dtype)
        return array

    def _check_dtype(self, kind: str, name: str, t: Tensor | Held, array: Array) -> None:
        if array.dtype is t.dtype or array.dtype is t.dtype.numpy:  # as it mostly is: NumPy takes long to name a type
            return
        got = array.dtype.value if isinstance(array.dtype, DType) else array.dtype.name
        if got == t.dtype.value or (t.dtype is DType.BF16 and got == "uint16"):
            return
        got = "uint16 (as which bfloat16 comes)" if got == "uint16" else got
        way_out = f"; convert it with .astype(np.{t.dtype.value}), PyTorch's with .to(torch.{t.dtype.value})"
        if t.dtype is DType.BF16:
            way_out = "; NumPy has no such type: give its bits as uint16"
        raise InputError(f"{kind} {name!r} has type {t.dtype.value}, got {got}{way_out}")

    def _check_order(self, kind: str, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray) and not array.contiguous:
            raise InputError(
                f"{kind} {name!r} on the GPU is not contiguous in row-major order; make it so first (.contiguous() in PyTorch)"
            )

    def _shapes_message(self, got: Mapping[str, Shape]) -> str:
        entries, families = self.plan.entries, self.plan.families
        shapes = ", ".join(f"{n} {_shape(s)}" for n, s in got.items())
        if families:
            there = ", ".join(f"{n} {'x'.join(extents)}" for n, extents in ranges_of(self.plan).items())
            why = misfit(max(families, key=lambda family: len(family.sizes)), got)
            return f"the plan takes no {shapes}{why and ': '}{why}; it was compiled for {there}"
        if len(entries) == 1:
            tensors = entries[0].program.tensors
            wrong = [
                f"input {n!r} has shape {_shape(tensors[n].shape)}, got {_shape(s)}"
                for n, s in got.items()
                if s != tensors[n].shape
            ]
            if any(len(tensors[n].shape) != len(s) for n, s in got.items()):
                return "; ".join(wrong)
            if turned := next((n for n, s in got.items() if s != tensors[n].shape and _channels_last(s, tensors[n].shape)), None):
                return f"{'; '.join(wrong)}. Its channels come first: give {turned} as array.transpose(0, 3, 1, 2)"
            other = {n: s for n, s in got.items() if s}
            words = " ".join(f"--shape {shlex.quote(f'{n}=' + 'x'.join(map(str, s)))}" for n, s in other.items())
            return f"{'; '.join(wrong)}. Other shapes need another plan: tccompile {words}, in Python shapes={other}"
        there = "; or ".join(", ".join(f"{n} {_shape(e.program.tensors[n].shape)}" for n in got) for e in entries)
        return f"the plan has no entry for {shapes}; it was compiled for {there}"

    # --- The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the session's memory on the device. Arrays that it returned stay."""
        with self._lock:
            for engine in (*self._engines.values(), *self._members.values()):
                engine.close()
            if self._engines:
                self._platform.close()
            self._engines.clear()
            self._members.clear()
            self._known.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _plan_of(plan: Plan | str | os.PathLike[str] | bytes | IO[bytes]) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | os.PathLike):
        return _in_file(plan)
    text = isinstance(plan, io.TextIOBase)  # which, of other bytes than text, cannot even be read
    data = plan.read() if hasattr(plan, "read") and not text else plan
    if not isinstance(data, bytes | bytearray | memoryview):
        what = "a file that is open as text: open it with 'rb'" if text else f"a {type(data).__name__}"
        way_out = ": tccompile.compile makes a plan of a model" if "ModelProto" in what else ""
        raise UsageError(f"a session takes a Plan, a path, bytes or an open file, not {what}{way_out}")
    try:
        return from_bytes(bytes(data))
    except PlanError as error:
        raise PlanError(f"what was given in memory: {error}") from None


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


def ranges_of(plan: Plan) -> dict[str, list[str]]:
    """The extents of a plan's inputs as people write them, between the least and the greatest: `1..64`, `64..2160:8`, `224`."""
    programs = [e.program for e in (*plan.entries, *(family.highest for family in plan.families))]
    steps = {size.name: size.step for family in plan.families for size in family.sizes}
    step = f":{next(iter(steps.values()))}" if len(set(steps.values())) == 1 and 1 not in steps.values() else ""
    out = {}
    for name in programs[0].inputs:
        ends = [(min(n), max(n)) for n in zip(*(p.tensors[name].shape for p in programs), strict=True)]
        out[name] = [str(low) if low == high else f"{low}..{high}{step}" for low, high in ends]
    return out


def _on_host(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception as error:  # whatever a library raises about its own arrays
        raise UsageError(f"the weight {name!r} cannot be read as a NumPy array ({error}); copy it to the host first") from error


def _near(name: object, names: Sequence[str]) -> str:
    """A question about the name that may have been meant, if there are many."""
    plain = {n.lower(): n for n in names}
    found = difflib.get_close_matches(str(name).lower()[:1000], plain, 1, 0.6) if len(names) > 1 else []
    return f" (did you mean {plain[found[0]]!r}?)" if found else ""


def _channels_last(got: Shape, wanted: Shape) -> bool:
    """Whether images of the wanted extents have come with their channels last."""
    return len(got) == 4 and tuple(got[a] for a in (0, 3, 1, 2)) == wanted


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if len(shape) else "() (a scalar)"
