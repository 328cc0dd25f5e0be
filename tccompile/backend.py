"""ONNX's backend API (`onnx.backend.base`): prepare, run_model, run_node, is_compatible and supports_device.

    import tccompile.backend as backend
    rep = backend.prepare(onnx.load("model.onnx"), device="CUDA")  # or CPU
    y, = rep.run([x])

A plan has static shapes, and this API says the inputs' shapes only when it runs: a model is compiled on its first run, and
again for inputs of other shapes. What decides the shape of a result (a Reshape's shape, a Slice's starts, …; see
`valid.DECIDES`) is compiled in with its value, so other values compile again too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tccompile.errors import DeviceError, InputError, TccompileError, UsageError, extra
from tccompile.ir.metadata import part
from tccompile.options import Options
from tccompile.runtime.session import Session

with extra("compiler"):
    import onnx
    import onnx.helper
    import onnx.numpy_helper
    import onnx.shape_inference
    from onnx.backend.base import Backend, BackendRep, namedtupledict

    from tccompile.load.boundary import tensor_of
    from tccompile.load.nodes import subgraphs
    from tccompile.load.opset import NEWEST
    from tccompile.load.valid import DECIDES
    from tccompile.pipeline import check, compile_model, without_code

KEPT = 8
"""Sessions that a prepared model keeps, one for each set of shapes; the oldest goes first."""


class Prepared(BackendRep):
    """A model and the sessions that run it. Raises UnsupportedError and ModelError on the first run of each set of shapes."""

    def __init__(self, model: onnx.ModelProto, device: str, precision: str, jobs: int | None) -> None:
        self.model, self.precision, self.jobs = model, precision, jobs
        self.gpu = _gpu(device)
        weights = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
        self.inputs = [v.name for v in model.graph.input if v.name not in weights]
        self.outputs = [v.name for v in model.graph.output]
        self._bound = deciding(model) & set(self.inputs)
        self._sessions: dict[tuple, Session] = {}

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, a named tuple of arrays. `inputs`: arrays in the model's order, or by name; a single array for one."""
        feeds = self._feeds(inputs)
        bound = {name: feeds[name] for name in self.inputs if name in self._bound and isinstance(feeds.get(name), np.ndarray)}
        rest = {name: x for name, x in feeds.items() if name not in bound}
        shapes = {name: x.shape for name, x in tensors_of(rest).items()}
        key = (*shapes.items(), *((name, x.dtype.str, x.shape, x.tobytes()) for name, x in bound.items()))
        if key not in self._sessions:
            if len(self._sessions) >= KEPT:
                self._sessions.pop(next(iter(self._sessions))).close()
            self._sessions[key] = self._session(shapes, bound)
        session = self._sessions[key]
        results = session.run(self.outputs, {name: each(x, stored) for name, x in rest.items()})
        types = {v.name: tensor_of(v.type).tensor_type.elem_type for v in self.model.graph.output}
        named = namedtupledict("Outputs", self.outputs)
        return named(*(each(y, partial(typed, types[name])) for name, y in zip(self.outputs, results, strict=True)))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Those that run it now."""
        return tuple(self._sessions.values())

    def _feeds(self, inputs: Any) -> dict[str, np.ndarray]:
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            arrays = [inputs] if isinstance(inputs, np.ndarray | np.generic) else list(inputs)
            if len(arrays) > len(self.inputs):
                raise InputError(f"{len(arrays)} inputs; the model has {len(self.inputs)}: {', '.join(self.inputs)}")
            given = dict(zip(self.inputs, arrays, strict=False))
        kinds = np.ndarray | np.generic | None
        whole = [one for x in given.values() for one in (x if isinstance(x, list | tuple) else [x])]
        if others := [type(x).__name__ for x in whole if not isinstance(x, kinds)]:
            raise InputError(f"an input is a {others[0]}; give NumPy arrays")
        return {name: each(x, np.asarray) for name, x in given.items()}

    def _session(self, shapes: Mapping[str, tuple[int, ...]], bound: Mapping[str, np.ndarray]) -> Session:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for value in [v for v in model.graph.input if v.name in bound]:
            model.graph.input.remove(value)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in bound.items())
        if self.gpu is None:
            return Session(without_code(model, shapes, self.precision), "cpu")
        from tccompile.runtime.driver import open_device
        from tccompile.runtime.generations import native

        gpu = open_device(self.gpu)  # kept until the session has it: to make its context again would take 0.2 s
        options = Options((shapes,), native(gpu.cc), self.precision, jobs=self.jobs)
        return Session(compile_model(model, options), f"gpu:{self.gpu}")


class TccompileBackend(Backend):
    """What this module's functions are methods of: for `onnx.backend.test.BackendTest` and others that want a class."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """The model, ready to run on "CPU", "CUDA" or "CUDA:1".

        precision  as for `tccompile.compile`
        jobs       processes that compile kernels; None for one a core
        """
        precision, jobs = kwargs.pop("precision", Options.precision), kwargs.pop("jobs", None)
        if kwargs:
            raise UsageError(f"unknown argument {next(iter(kwargs))!r}; prepare takes model, device, precision and jobs")
        if not isinstance(model, onnx.ModelProto):
            raise UsageError(f"prepare takes an onnx.ModelProto, not a {type(model).__name__}: use onnx.load")
        return Prepared(model, device, precision, jobs)

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model can be compiled, as far as can be said without its inputs."""
        try:
            return cls.supports_device(device) and not check(model, Options()).missing
        except TccompileError:
            return False

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """One node of ONNX's newest operator set (or of `opset_version`), on these inputs.

        outputs_info  the NumPy type and the shape of each output, for operators whose types do not follow from their inputs
        """
        opset = kwargs.pop("opset_version", None)
        names = [name for name in node.input if name]
        feeds = dict(zip(names, map(np.asarray, inputs), strict=True))
        elem = onnx.helper.np_dtype_to_tensor_dtype
        given = [onnx.helper.make_tensor_value_info(n, elem(x.dtype), x.shape) for n, x in feeds.items()]
        version = opset or min(NEWEST, onnx.defs.onnx_opset_version())
        if outputs_info is not None:
            types: dict[str, int] = {n: int(elem(np.dtype(info[0]))) for n, info in zip(node.output, outputs_info, strict=True)}
        else:
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            found = onnx.shape_inference.infer_node_outputs(schema, node, {v.name: v.type for v in given})
            types = {n: t.tensor_type.elem_type for n, t in found.items()}
        made = [onnx.helper.make_tensor_value_info(n, types.get(n, 0), None) for n in node.output if n]
        graph = onnx.helper.make_graph([node], node.op_type, given, made)
        imports = [onnx.helper.make_opsetid(node.domain, version)]
        return cls.prepare(onnx.helper.make_model(graph, opset_imports=imports), device, **kwargs).run(feeds)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models can run on "CPU", "CUDA" or "CUDA:1" here."""
        try:
            number = _gpu(device)
            if number is not None:
                from tccompile.runtime.driver import open_device

                open_device(number)
        except (DeviceError, UsageError):
            return False
        return True


prepare = TccompileBackend.prepare
run_model = TccompileBackend.run_model
run_node = TccompileBackend.run_node
is_compatible = TccompileBackend.is_compatible
supports_device = TccompileBackend.supports_device


def _gpu(device: str) -> int | None:
    """The number of the GPU that "CUDA:1" means, None for "CPU"."""
    name, _, number = device.partition(":")
    if name not in ("CPU", "CUDA") or not (number.isdecimal() or not number):
        raise UsageError(f"unknown device {device!r}; choose CPU, CUDA, or CUDA:N")
    return int(number or 0) if name == "CUDA" else None


def deciding(model: onnx.ModelProto) -> set[str]:
    """The tensors whose values decide shapes: inputs in DECIDES, and what those are computed from, but not through Shape."""
    found: set[str] = set()
    for node in reversed(list(_nodes(model.graph))):
        if found.intersection(node.output) and node.op_type not in ("Shape", "Size"):
            found.update(node.input)
        else:
            found.update(node.input[i] for i in DECIDES.get(node.op_type, ()) if i < len(node.input))
    return found - {""}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, each after those of the graphs inside it."""
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _nodes(inner)
        yield node


def each(x: Any, of_one: Callable[[Any], Any]) -> Any:
    """An array by a function; of a sequence, a list of what it makes of each; None of what is not there."""
    if isinstance(x, list | tuple):
        return [of_one(one) for one in x]
    return None if x is None else of_one(x)


def tensors_of(feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that inputs are made of, by the names that plans call them."""
    out = dict[str, np.ndarray]()
    for name, x in feeds.items():
        if isinstance(x, list):
            out |= {part(name, i): one for i, one in enumerate(x)}
        elif x is not None:
            out[name] = x
    return out


def stored(x: np.ndarray) -> np.ndarray:
    """What NumPy does not have as sessions take it: floats as their bits, integers as those of 8."""
    if x.dtype.isbuiltin == 1:
        return x
    integers = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}
    return x.astype(integers[x.dtype.name]) if x.dtype.name in integers else x.view(f"u{x.itemsize}")


def typed(elem: int, y: Any) -> np.ndarray:
    """A session's array as NumPy has ONNX's type."""
    y = np.asarray(y)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem)
    if dtype.isbuiltin == 1:
        return y
    return y.astype(dtype) if "int" in dtype.name else y.view(dtype)
