"""ONNX Runtime's Python API on plans: `import tccompile.ort as ort` in place of `import onnxruntime as ort`.

    session = ort.InferenceSession("model.onnx")
    y, = session.run(None, {"x": x})

A model whose shapes are all fixed is compiled when its session is made, another one when inputs of new shapes first come. What
was compiled is kept in the folder of the kernel cache, by the content of the model, by what it was compiled for, and by the
compiler: the next session finds it there. A path may also be a plan's.

Providers choose the device: the CPU where CPUExecutionProvider stands first or there is no GPU, else the GPU of their
`device_id`. On a GPU models are compiled in "mixed" precision, on the CPU in "fp32"; the entry "tccompile.precision" of a
session's options says otherwise.
Other options of ONNX Runtime's are taken and change nothing. Errors are those of `tccompile.errors`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache as memoised
from importlib import metadata
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from tccompile import __version__ as __version__
from tccompile.emit import cache
from tccompile.errors import DeviceError, InputError, UsageError, extra
from tccompile.ir.metadata import Metadata
from tccompile.options import Options
from tccompile.plan.file import Plan, from_bytes, is_plan, read_plan, to_bytes
from tccompile.python import speaking_python
from tccompile.runtime.driver import Memory, open_device
from tccompile.runtime.generations import native
from tccompile.runtime.session import Session
from tccompile.schedule.digest import key
from tccompile.terminal import plain

with extra("compiler"):
    import onnx
    import onnx.helper
    import onnx.numpy_helper

    from tccompile.backend import KEPT, deciding, stored, typed
    from tccompile.load.classical import class_names
    from tccompile.load.model import files_beside, in_memory, parsed
    from tccompile.pipeline import compile_model, without_code

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"

PRECISION = "tccompile.precision"
"""The entry of a session's options that says the precision."""

LARGEST = cache.LIMIT // 4
"""Bytes of a plan that is kept: a larger one would push out too much else."""


class GraphOptimizationLevel(IntEnum):
    """Taken, and without effect: a model is compiled as well as it can be."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Taken, and without effect: steps that do not depend on each other run at the same time."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class SessionOptions:
    """Any of ONNX Runtime's options can be set. The entry "tccompile.precision" and the overrides of dimensions count."""

    def __init__(self) -> None:
        self.graph_optimization_level: Any = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.execution_mode: Any = ExecutionMode.ORT_SEQUENTIAL
        self.intra_op_num_threads = self.inter_op_num_threads = 0
        self.enable_profiling = False
        self.optimized_model_filepath = self.logid = self.profile_file_prefix = ""
        self.log_severity_level, self.log_verbosity_level = 2, 0
        self.entries: dict[str, str] = {}
        self.dimensions: dict[str, int] = {}

    def __setattr__(self, name: str, value: Any) -> None:  # which tells type checkers that there is any attribute
        object.__setattr__(self, name, value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Set an entry by its name."""
        self.entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """An entry that has been set; UsageError for another one."""
        if key not in self.entries:
            raise UsageError(f"the session options have no entry {key!r}")
        return self.entries[key]

    def add_free_dimension_override_by_name(self, name: str, extent: int) -> None:
        """Fix the extent that inputs' shapes call by this name."""
        self.dimensions[name] = extent

    def register_custom_ops_library(self, path: str) -> None:
        """Raises UsageError: such a library holds code for ONNX Runtime's tensors."""
        raise UsageError(f"{path}: libraries of ONNX Runtime's operators cannot be compiled; export the model without them")


class RunOptions:
    """Options of a run, which are taken and change nothing."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:  # which tells type checkers that there is any attribute
        object.__setattr__(self, name, value)

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Set an entry by its name."""
        self.entries[key] = value


class NodeArg:
    """An input or output of the model: its name, its type as `tensor(float)`, and its shape, with names of open extents."""

    def __init__(self, name: str, type: str, shape: list[int | str | None]) -> None:
        self.name, self.type, self.shape = name, type, shape

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


class OrtValue:
    """An array on the host or on a GPU, as ONNX Runtime hands them around."""

    def __init__(self, array: np.ndarray | _OnGpu) -> None:
        self._array = array

    @staticmethod
    def ortvalue_from_numpy(array: Any, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A copy of an array on the device; on the host the array itself."""
        array = np.ascontiguousarray(array) if np.ndim(array) else np.asarray(array)
        return OrtValue(array if device_type.lower() == "cpu" else _OnGpu.copy_of(array, device_id))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Room for an array on the device."""
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type) if isinstance(element_type, int) else element_type)
        shape = tuple(shape)
        return OrtValue(np.empty(shape, dtype) if device_type.lower() == "cpu" else _OnGpu(shape, dtype, device_id))

    def numpy(self) -> np.ndarray:
        """Its values on the host."""
        return np.asarray(self._array)

    def update_inplace(self, array: np.ndarray) -> None:
        """Put other values in its memory."""
        if isinstance(self._array, np.ndarray):
            self._array[...] = array
        else:
            self._array.fill(np.ascontiguousarray(array, self._array.dtype))

    def shape(self) -> list[int]:
        """Its extents."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """As `tensor(float)`."""
        return _type_name(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self._array.dtype)))

    def element_type(self) -> int:
        """As one of ONNX's TensorProto.DataType."""
        return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self._array.dtype)))

    def device_name(self) -> str:
        """ "cpu" or "cuda"."""
        return "cpu" if isinstance(self._array, np.ndarray) else "cuda"

    def data_ptr(self) -> int:
        """The address of its first element."""
        return self._array.ctypes.data if isinstance(self._array, np.ndarray) else self._array.address

    def has_value(self) -> bool:
        """Always true: there are no optional values."""
        return True

    def is_tensor(self) -> bool:
        """Always true: there are no sequences."""
        return True


class _OnGpu:
    """Memory of a GPU as an array."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, device_id: int = 0, address: int | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        self.device = open_device(device_id)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self.memory = Memory(self.device, size, "an OrtValue") if address is None else None  # else somebody else's
        self.address = self.memory.address if self.memory is not None else int(address or 0)
        self.size = size

    @staticmethod
    def copy_of(array: np.ndarray, device_id: int) -> _OnGpu:
        out = _OnGpu(array.shape, array.dtype, device_id)
        out.fill(array)
        return out

    def fill(self, array: np.ndarray) -> None:
        if array.shape != self.shape:
            raise InputError(f"an OrtValue of shape {self.shape} cannot take an array of shape {array.shape}")
        with self.device as cu:
            if self.size:
                cu.cuMemcpyHtoD(self.address, array.ctypes.data, self.size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        with self.device as cu:
            if self.size:
                cu.cuMemcpyDtoH(out.ctypes.data, self.address, self.size)
        return out if dtype is None else out.astype(dtype, copy=False)


class InferenceSession:
    """A model, ready to run; see the module for when it is compiled.

    path_or_bytes  the model's path or its bytes; or a plan's
    sess_options   SessionOptions, as keyword or second argument
    providers      names, or pairs of a name and its options; `provider_options` are those of each name
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        self._options = sess_options or SessionOptions()
        self._gpu = _gpu_of(providers, provider_options)
        self._lock = RLock()
        self._sessions: dict[str, Session] = {}
        self._plan: Plan | None = None
        model = in_memory(path_or_bytes)
        if isinstance(model, str | Path) and Path(model).is_file() and is_plan(Path(model)):
            self._plan = read_plan(model)
            self._fixed = Session(self._plan, self._device)
            return
        self._path = Path(model) if isinstance(model, str | Path) else None
        self._proto = parsed(model)[0]
        self._content = _digest(self._path, self._proto)
        graph = self._proto.graph
        weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        self._inputs = [v for v in graph.input if v.name not in weights]
        self._bound = deciding(self._proto) & {v.name for v in self._inputs}
        self._maps = {node.output[0]: class_names(node) for node in graph.node if node.op_type == "ZipMap"}
        shapes = {v.name: self._shape(v) for v in self._inputs}
        if not self._bound and all(isinstance(n, int) for s in shapes.values() for n in s or (None,)):
            self._session({n: tuple(int(e or 0) for e in s or ()) for n, s in shapes.items()}, {})

    # --- What it is --------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = [", ".join(v.name for v in values) for values in (self.get_inputs(), self.get_outputs())]
        return plain(f"<InferenceSession: {' → '.join(names)}, on {self._device}>")

    def get_inputs(self) -> list[NodeArg]:
        """The model's inputs, in its order."""
        return self._args(self._inputs) if self._plan is None else [_node_arg(v) for v in self._fixed.get_inputs()]

    def get_outputs(self) -> list[NodeArg]:
        """The model's outputs, in its order; as it says them, or once it is compiled as they are."""
        if self._plan is not None:
            return [_node_arg(v) for v in self._fixed.get_outputs()]
        made = {v.name: v for s in (*self._sessions.values(),)[:1] for v in s.get_outputs()}
        out = self._args(self._proto.graph.output)
        for value in out:
            if value.name in made and not value.shape and made[value.name].shape:
                value.shape = list(made[value.name].shape or ())
        return out

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: initializers are compiled in."""
        return []

    def get_modelmeta(self) -> Metadata:
        """What the model's file says of itself."""
        from tccompile.load.model import Opened, metadata

        return self._plan.metadata if self._plan is not None else metadata(Opened(self._proto, {}))

    def get_providers(self) -> list[str]:
        """Those that stand for the device."""
        return [CPU] if self._gpu is None else [CUDA, CPU]

    def set_providers(self, providers: Sequence[Any], provider_options: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Go on with other providers: what runs on another device is compiled again when it is next run."""
        with self._lock:
            self._gpu = _gpu_of(providers, provider_options)
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
            if self._plan is not None:
                self._fixed.close()
                self._fixed = Session(self._plan, self._device)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The device's number."""
        return {name: {"device_id": str(self._gpu)} if name == CUDA else {} for name in self.get_providers()}

    def get_session_options(self) -> SessionOptions:
        """Those that it was made with."""
        return self._options

    def disable_fallback(self) -> None:
        """No effect: nothing falls back to another device."""

    def enable_fallback(self) -> None:
        """No effect: nothing falls back to another device."""

    def _args(self, values: Sequence[onnx.ValueInfoProto]) -> list[NodeArg]:
        return [NodeArg(v.name, _kind(v.type), list(self._shape(v) or ())) for v in values]

    def _shape(self, value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
        """Extents, names for open ones that no override fixes, None for those without a name; None if even the rank is open."""
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
            return None
        fixed = self._options.dimensions
        said = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
        return tuple(fixed.get(d, d) if isinstance(d, str) else d for d in said)

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Any]:
        """The outputs, in the order of `output_names`; all of them for None or none. Raises InputError."""
        feeds = {name: _array(x) for name, x in input_feed.items()}
        return [self._as_said(name, y) for name, y in self._run(output_names, feeds, {}).items()]

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, OrtValue], run_options: Any = None
    ) -> list[OrtValue]:
        """As `run`, from OrtValues to OrtValues."""
        feeds = {name: value._array for name, value in input_dict_ort_values.items()}
        return [OrtValue(np.asarray(self._as_said(n, y))) for n, y in self._run(output_names, feeds, {}).items()]

    def io_binding(self) -> IOBinding:
        """Inputs and outputs that are kept from run to run."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on what is bound."""
        iobinding.run()

    def _run(self, names: Sequence[str] | None, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            session = self._session_of(feeds)
            wanted = list(names) if names is not None and len(names) else [v.name for v in session.get_outputs()]
            rest = {name: x for name, x in feeds.items() if self._plan is not None or name not in self._bound}
            given = {name: stored(x) if isinstance(x, np.ndarray) else x for name, x in rest.items()}
            return dict(zip(wanted, session.run(wanted, given, outputs), strict=True))

    def _as_said(self, name: str, y: Any) -> Any:
        """An output in the type that the model says; of a ZipMap, the maps."""
        if self._plan is not None:
            return np.asarray(y)
        if name in self._maps:
            return [dict(zip(self._maps[name], row.tolist(), strict=True)) for row in np.asarray(y)]
        elem = next(v.type.tensor_type.elem_type for v in self._proto.graph.output if v.name == name)
        return typed(elem, y) if elem else np.asarray(y)

    def _session_of(self, feeds: Mapping[str, Any]) -> Session:
        if self._plan is not None:
            return self._fixed
        names = [v.name for v in self._inputs]
        for name in feeds:
            if name not in names:
                raise InputError(f"the model has no input {name!r}; it has {', '.join(map(repr, names))}")
        if missing := [name for name in names if name not in feeds]:
            raise InputError(f"input {missing[0]!r} is missing")
        bound = {name: np.asarray(feeds[name]) for name in names if name in self._bound}
        shapes = {name: tuple(feeds[name].shape) for name in names if name not in bound}
        for value in self._inputs:
            self._check_shape(value, shapes)
        return self._session(shapes, bound)

    def _check_shape(self, value: onnx.ValueInfoProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
        said, got = self._shape(value), shapes.get(value.name)
        if got is None or said is None:
            return
        if len(said) != len(got) or any(isinstance(n, int) and n != m for n, m in zip(said, got, strict=True)):
            expected = "x".join("?" if n is None else str(n) for n in said)
            raise InputError(f"input {value.name!r} has shape {expected or '()'}, got {'x'.join(map(str, got)) or '()'}")

    # --- Compiling ---------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> str:
        return "cpu" if self._gpu is None else f"gpu:{self._gpu}"

    def _session(self, shapes: Mapping[str, tuple[int, ...]], bound: Mapping[str, np.ndarray]) -> Session:
        """The session for inputs of these shapes, and for these values of those that decide shapes."""
        precision = self._options.entries.get(PRECISION, "fp32" if self._gpu is None else "mixed")
        gpu = None if self._gpu is None else open_device(self._gpu)
        archs = ("cpu",) if gpu is None else native(gpu.cc)
        values = {name: (x.dtype.str, x.shape, hashlib.sha256(x.tobytes()).hexdigest()) for name, x in bound.items()}
        name = key(_compiler(), self._content, sorted(shapes.items()), values, archs, precision)
        if name not in self._sessions:
            if len(self._sessions) >= KEPT:
                self._sessions.pop(next(iter(self._sessions))).close()
            self._sessions[name] = Session(self._plan_of(name, shapes, bound, archs, precision), self._device)
        return self._sessions[name]

    @speaking_python
    def _plan_of(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        bound: Mapping[str, np.ndarray],
        archs: tuple[str, ...],
        precision: str,
    ) -> Plan:
        if (kept := cache.get(name)) is not None:
            return from_bytes(kept)
        model: Any = self._proto if self._path is None else self._path
        if bound:
            model = (
                onnx.load(self._path) if self._path is not None else onnx.ModelProto.FromString(self._proto.SerializeToString())
            )
            for value in [v for v in model.graph.input if v.name in bound]:
                model.graph.input.remove(value)
            model.graph.initializer.extend(onnx.numpy_helper.from_array(x, n) for n, x in bound.items())
        if archs == ("cpu",):
            plan = without_code(model, shapes, precision)
        else:
            plan = compile_model(model, Options((dict(shapes),), archs, precision))
        if sum(map(plan.size, plan.weights)) < LARGEST:
            cache.put(name, to_bytes(plan))
            cache.evict()
        return plan


class IOBinding:
    """Inputs and outputs that stay bound from run to run, on the host or on the session's GPU."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._results: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """An array on the host."""
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Memory of somebody else's, on the host or on a GPU."""
        self._inputs[name] = _memory(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """An input from where an OrtValue lies."""
        self._inputs[name] = ortvalue._array

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """An output to compute; into somebody else's memory if there is a `buffer_ptr`."""
        given = buffer_ptr is not None and shape is not None
        self._outputs[name] = _memory(device_type, device_id, element_type, shape or (), buffer_ptr or 0) if given else None

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """An output to compute, into where an OrtValue lies."""
        self._outputs[name] = ortvalue._array

    def synchronize_inputs(self) -> None:
        """What is copied here is there when the call returns."""

    def synchronize_outputs(self) -> None:
        """Results are complete when a run returns."""

    def run(self) -> None:
        """Compute the outputs that are bound."""
        given = {name: array for name, array in self._outputs.items() if array is not None}
        self._results = self._session._run(list(self._outputs), self._inputs, given)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs on the host, in the order in which they were bound."""
        return [self._session._as_said(name, np.asarray(self._results[name])) for name in self._outputs]

    def get_outputs(self) -> list[OrtValue]:
        """The outputs where they lie; those that nobody has given memory for are on the host."""
        return [OrtValue(y if isinstance(y, np.ndarray | _OnGpu) else np.asarray(y)) for y in self._results.values()]

    def clear_binding_inputs(self) -> None:
        """No input is bound any more."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """No output is bound any more."""
        self._outputs.clear()


# --- What the module says ---------------------------------------------------------------------------------------------


def get_available_providers() -> list[str]:
    """The providers that stand for what is there."""
    return [CUDA, CPU] if _gpu_there(0) else [CPU]


def get_all_providers() -> list[str]:
    """All providers that stand for something."""
    return [CUDA, CPU]


def get_device() -> str:
    """ "GPU" or "CPU"."""
    return "GPU" if _gpu_there(0) else "CPU"


def set_default_logger_severity(severity: int) -> None:
    """Taken, and without effect: Python's logging says what tccompile logs."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Taken, and without effect."""


# --- Helpers ---------------------------------------------------------------------------------------------------------


def _gpu_of(providers: Sequence[Any] | None, options: Sequence[Mapping[str, Any]] | None) -> int | None:
    """The GPU that providers name, None for the CPU: the first of them that there is."""
    if providers is None:
        return 0 if _gpu_there(0) else None
    pairs = [p if isinstance(p, tuple | list) else (p, {}) for p in providers]
    if options is not None:
        pairs = [(name, of) for (name, _), of in zip(pairs, options, strict=False)]
    for name, of in pairs:
        if name == CPU:
            return None
        if name in (CUDA, TENSORRT):
            number = int(of.get("device_id", 0))
            if _gpu_there(number):
                return number
    names = ", ".join(str(name) for name, _ in pairs)
    if pairs and CPU not in [name for name, _ in pairs]:
        warnings.warn(
            f"there is nothing to run {names} on: the session runs on the CPU, which is slow", RuntimeWarning, stacklevel=3
        )
    return None


def _gpu_there(number: int) -> bool:
    try:
        open_device(number)
    except DeviceError:
        return False
    return True


def _array(x: Any) -> Any:
    return x._array if isinstance(x, OrtValue) else x if hasattr(x, "shape") else np.asarray(x)


def _memory(device_type: str, device_id: int, element_type: Any, shape: Sequence[int], pointer: int) -> np.ndarray | _OnGpu:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type) if isinstance(element_type, int) else element_type)
    if device_type.lower() != "cpu":
        return _OnGpu(tuple(shape), dtype, device_id, pointer)
    held = type("Memory", (), {})()
    held.__array_interface__ = {"shape": tuple(shape), "typestr": dtype.str, "data": (pointer or 1, False), "version": 3}
    return np.asarray(held)


def _node_arg(value: Any) -> NodeArg:
    return NodeArg(value.name, value.type, list(value.shape or ()))


def _kind(proto: onnx.TypeProto) -> str:
    if proto.HasField("tensor_type"):
        return _type_name(proto.tensor_type.elem_type)
    if proto.HasField("sequence_type"):
        return f"seq({_kind(proto.sequence_type.elem_type)})"
    if proto.HasField("map_type"):
        key_type = onnx.TensorProto.DataType.Name(proto.map_type.key_type).lower()
        return f"map({key_type},{_kind(proto.map_type.value_type)})"
    return ""


def _type_name(elem: int) -> str:
    name = onnx.TensorProto.DataType.Name(elem).lower()
    return f"tensor({name})"


def _digest(path: Path | None, proto: onnx.ModelProto) -> str:
    """Of the model and of the files that it keeps weights in."""
    total = hashlib.sha256(proto.SerializeToString(deterministic=True) if path is None else path.read_bytes())
    for beside in files_beside(proto, path) if path is not None else ():
        with open(beside, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


@memoised
def _compiler() -> str:
    """What the compiler is: its sources, and the tools that it uses."""
    total = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted({*here.glob("**/*.py"), *(here / "kernels").glob("**/*.py")}):  # which may be a link
        total.update(source.read_bytes())
    for tool in ("numpy", "onnx", "numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc-cu12"):
        try:
            total.update(f"{tool} {metadata.version(tool)}".encode())
        except metadata.PackageNotFoundError:
            continue
    return total.hexdigest()
