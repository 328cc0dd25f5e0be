"""PyTorch modules: `tccompile.torch.compile(module, example_inputs)` gives a callable that takes and returns tensors.

    import tccompile.torch

    fast = tccompile.torch.compile(network.eval(), (x,))
    y = fast(x)                       # tensors on the GPU are read and written there, on PyTorch's current stream
    network.load_state_dict(tuned)
    fast.refit()                      # takes the module's weights as they are now; nothing is compiled
    fast.plan.save("network.plan")    # which tcrun and tccompile.Session run without PyTorch

The module is captured by torch.export and written as ONNX by PyTorch's exporter, without its optimizer: that would fold weights
into others, and leave their names on what came of it. The extra `torch` brings what this needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tccompile.errors import DeviceError, InputError, UnsupportedError, UsageError, extra
from tccompile.ir.types import ELEMENTS, DType
from tccompile.ir.weights import digest
from tccompile.plan.file import Plan
from tccompile.refit.constants import together
from tccompile.runtime.arrays import DeviceBuffer
from tccompile.runtime.session import Session

with extra("torch"):
    import onnxscript  # noqa: F401 - which PyTorch's exporter needs
    import torch
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
    from torch.utils import _pytree as pytree
    from torch.utils._sympy.numbers import int_oo

    from tccompile import pipeline
    from tccompile.load.model import sources

__all__ = ["Compiled", "compile"]


def compile(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    device: str = "auto",
    archs: Sequence[str] | None = None,
    **options: Any,
) -> Compiled:
    """Compile a module into a plan, and open a session that runs it.

    example_inputs  what the module is called with: tensors, or lists, tuples and dictionaries of them; `example_keywords`, by
                    name. Calls take the same, in the same shapes. Numbers, strings and None become part of the plan
    dynamic_shapes  which extents the example leaves open, as for torch.export. The plan is for all sizes that there are in
                    `torch.export.Dim(name, min=1, max=64)`, or for those that `entries`, `shapes` or `ranges` say
    device          where it runs, as for `Session`: "auto" is the CPU, with a warning, where there is no GPU
    archs           GPU generations to build for; by default that of the GPU here, and where it runs on the CPU, none: such a plan
                    runs on no GPU, and takes no options but shapes and precision
    options         the others of `tccompile.compile`

    Raises UsageError, UnsupportedError and ModelError as `tccompile.compile` does, and UnsupportedError with what PyTorch says
    where it cannot capture or export the module.
    """
    _check_module(module)
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise UsageError(f"example inputs are a tuple, as (x,), not a {type(example_inputs).__name__}")
    captured = _captured(module, tuple(example_inputs), dict(example_keywords or {}), dynamic_shapes)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{type(module).__name__}.onnx"
        inputs, outputs = _exported(captured, path)
        if dynamic_shapes is not None and not options.keys() & {"entries", "shapes", "ranges"}:
            options["ranges"] = _ranges(captured)
        plan = _plan(path, _archs(device) if archs is None else archs, options)
        own = _weights(module).keys() & plan.origin.weights
        constants = {name: sources(path)[name] for name in _whole(plan, own) - own}
    return Compiled(module, plan, Session(plan, device), _Signature(captured, inputs, outputs), constants)


def _check_module(module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a {type(module).__name__} is no torch.nn.Module; give the module itself")
    if name := next((name or type(part).__name__ for name, part in module.named_modules() if part.training), None):
        raise UsageError(
            f"{name} is in training mode, in which dropout and batch normalization compute something else: call module.eval()"
        )


def _archs(device: str) -> Sequence[str]:
    """The generation of the GPU that is there; nothing if there is none, or if the CPU was asked for."""
    from tccompile.runtime.driver import open_device
    from tccompile.runtime.generations import native

    if device == "cpu":
        return ()
    try:
        return native(open_device(int(device.partition(":")[2] or 0)).cc)
    except (DeviceError, ValueError):  # which the session says, if it is not content with the CPU
        return ()


def _plan(path: Path, archs: Sequence[str], options: Mapping[str, Any]) -> Plan:
    if archs:
        return pipeline.compile(path, archs=archs, **options)
    if others := sorted(options.keys() - {"shapes", "precision", "ranges"}):
        raise UsageError(
            f"{others[0]} is for building machine code, and there is no GPU here to build for: give archs, as ['sm_90a']"
        )
    return pipeline.without_code(path, **options)


def _ranges(captured: ExportedProgram) -> dict[str, tuple[int, int]]:
    """The sizes that are open, by the names that the exporter gives them."""
    for symbol, bounds in captured.range_constraints.items():
        if bounds.upper >= int_oo:
            raise UsageError(
                f"the size {symbol} has no end: give it one, as torch.export.Dim(name, min=1, max=64), or say which sizes the "
                "plan is for (entries)"
            )
    return {str(symbol): (max(int(b.lower), 1), int(b.upper)) for symbol, b in captured.range_constraints.items()}


def _captured(module: torch.nn.Module, arguments: tuple, keywords: dict, dynamic_shapes: Any) -> ExportedProgram:
    """What the module computes. Raises UnsupportedError where torch.export cannot tell, or where the module keeps a state."""
    with torch.no_grad():
        captured = _by_torch("torch.export", torch.export.export, module, arguments, keywords, dynamic_shapes=dynamic_shapes)
        # Only now the signature says what is written in place
        signature = _by_torch("torch.export", captured.run_decompositions, {}).graph_signature
    for what, names in (("buffer", signature.buffers_to_mutate), ("input", signature.user_inputs_to_mutate)):
        if names:
            raise UnsupportedError(
                f"{type(module).__name__} writes into its {what} {next(iter(names.values()))!r}, and a plan keeps nothing from "
                "one call to the next: make it an input and a result"
            )
    _check_types(captured)
    return captured


def _check_types(captured: ExportedProgram) -> None:
    """Hold what goes in and comes out to what ONNX has: the exporter writes complex numbers as pairs, and fails at others."""
    made = {node.name: node.meta.get("val") for node in captured.graph.nodes}
    for spec in captured.graph_signature.output_specs:
        if not isinstance(spec.arg, TensorArgument) and getattr(spec.arg, "value", 0) is not None:
            raise UnsupportedError(
                f"the module returns a number that is no tensor ({_shown_argument(spec.arg)}): return tensors only"
            )
    for specs in (captured.graph_signature.input_specs, captured.graph_signature.output_specs):
        for spec in specs:
            value = made.get(getattr(spec.arg, "name", ""))
            if isinstance(value, torch.Tensor) and value.is_complex():
                raise UnsupportedError(f"{spec.arg.name!r} is complex: take and return torch.view_as_real of it")


def _shown_argument(argument: Any) -> str:
    return str(argument.value) if isinstance(argument, ConstantArgument) else argument.name


def _exported(captured: ExportedProgram, path: Path) -> tuple[list[str], list[str]]:
    """Write the ONNX file. The names of the inputs of what was exported, and of its results: some are inputs, or come twice, and
    are no outputs of the file."""
    how = {"dynamo": True, "optimize": False, "verbose": False, "external_data": True}
    program = _by_torch("torch.onnx.export", torch.onnx.export, captured, (), **how)
    graph = program.model.graph
    inputs, results = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
    made = {v.name: v for v in graph.outputs if v.name not in inputs}
    graph.outputs[:] = made.values()
    program.save(path, external_data=True)
    return inputs, results


def _by_torch(what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What a function of PyTorch's returns; what it raises becomes an UnsupportedError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about PyTorch's own insides
            return function(*args, **keywords)
    except Exception as error:
        raise UnsupportedError(f"{what} does not take the module: {_says(error)}") from error


def _says(error: BaseException) -> str:
    """The first line of what an error says, of the one that caused it if there is one."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no more is known")
    return f"{line} ({type(error).__name__})"


class _Signature:
    """How a module's arguments become a plan's inputs, and a plan's outputs the module's results.

    names     the input that each leaf of the arguments is, None for one that is no tensor
    results   the output or input that each leaf of the results is; None for what is no tensor, and is as `given`
    taken     how the leaves make the arguments; `returned`, the results
    """

    def __init__(self, captured: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]):
        arguments = [s.arg for s in captured.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        results = [s.arg for s in captured.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
        left = iter(inputs)
        self.names = [next(left) if isinstance(a, TensorArgument) else None for a in arguments]
        self._fixed = [(i, a.name, a.value) for i, a in enumerate(arguments) if not isinstance(a, TensorArgument)]
        left = iter(outputs)
        self.results = [next(left) if isinstance(a, TensorArgument) else None for a in results]
        self.given = [getattr(a, "value", None) for a in results]
        assert captured.call_spec.in_spec is not None and captured.call_spec.out_spec is not None
        self.taken, self.returned = captured.call_spec.in_spec, captured.call_spec.out_spec
        self._taken, self._returned = _tree(self.taken), _tree(self.returned)
        self._known = _is_known(self._returned)

    def leaves(self, arguments: tuple, keywords: Mapping[str, Any]) -> list[Any]:
        """The tensors, numbers and others that arguments are made of. Raises InputError where they are made otherwise."""
        leaves: list[Any] = []
        if not _take(self._taken, (arguments, keywords), leaves):
            names = self.taken.child(1).context
            known = {name: keywords[name] for name in names} if keywords.keys() == set(names) else keywords
            leaves, found = pytree.tree_flatten((arguments, known))
            if found != self.taken:
                raise InputError(f"the arguments are {_shown(found)}, and the module was compiled for {_shown(self.taken)}")
        for place, name, constant in self._fixed:
            if leaves[place] != constant:
                raise InputError(
                    f"{name} is {leaves[place]!r}, and was {constant!r} when the module was compiled: compile it for that, too"
                )
        return leaves

    def made(self, outputs: Mapping[str | None, torch.Tensor]) -> Any:
        """What the module returns, of inputs and outputs by name."""
        leaves = [given if name is None else outputs[name] for name, given in zip(self.results, self.given, strict=True)]
        if self._known:
            return _given(self._returned, iter(leaves))
        return pytree.tree_unflatten(leaves, self.returned)


Tree = tuple[Any, Sequence[Any], Sequence[Any]]
"""A node of a structure: its type, its keys, and the nodes below; None for a leaf."""


def _tree(spec: pytree.TreeSpec) -> Tree | None:
    """PyTorch's description, as one that a call is compared with in a tenth of the time."""
    if spec.is_leaf():
        return None
    keys = spec.context if spec.type is dict else range(spec.num_children)
    return spec.type, tuple(keys), tuple(_tree(spec.child(i)) for i in range(spec.num_children))


def _take(tree: Tree | None, value: Any, leaves: list[Any]) -> bool:
    """Append the leaves of tuples, lists and dictionaries; False if the value is made of something else, or otherwise."""
    if tree is None:
        leaves.append(value)
        return True
    kind, keys, children = tree
    if kind not in (tuple, list, dict) or type(value) is not kind or len(value) != len(keys):
        return False
    if kind is dict and not all([key in value for key in keys]):
        return False
    return all([_take(child, value[key], leaves) for key, child in zip(keys, children, strict=True)])


def _is_known(tree: Tree | None) -> bool:
    return tree is None or (tree[0] in (tuple, list, dict) and all(map(_is_known, tree[2])))


def _given(tree: Tree | None, leaves: Iterator[Any]) -> Any:
    """Tuples, lists and dictionaries of leaves, in a tenth of PyTorch's time."""
    if tree is None:
        return next(leaves)
    kind, keys, children = tree
    made = [_given(child, leaves) for child in children]
    return made if kind is list else tuple(made) if kind is tuple else dict(zip(keys, made, strict=True))


def _shown(spec: pytree.TreeSpec) -> str:
    """A structure as a person writes it: (…, …, key=…)."""
    arguments, keywords = pytree.tree_unflatten(["…"] * spec.num_leaves, spec)
    return f"({', '.join([*(_plain(a) for a in arguments), *(f'{k}={_plain(v)}' for k, v in keywords.items())])})"


def _plain(tree: Any) -> str:
    return str(tree).replace("'…'", "…")


SHAPES = 256
"""Of inputs, for which a callable knows what its outputs are."""


class Compiled:
    """A module as a plan: it is called as the module is.

    module   what was compiled, whose weights `refit` takes
    plan     what it was compiled into
    session  what runs that

    Tensors on the GPU are read where they lie, on PyTorch's current stream, which the results are ready on, too. Where all lie on
    the host, so do the results. No gradients pass through it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: Plan,
        session: Session,
        signature: _Signature,
        constants: Mapping[str, np.ndarray],
    ):
        """See `compile`.

        constants  what makes constants of the plan together with the module's weights, and is none of these
        """
        self.module, self.plan, self.session, self._constants = module, plan, session, constants
        self._signature = signature
        program = plan.entries[0].program
        self._inputs = [name if name in program.inputs else None for name in signature.names]
        self._outputs = program.outputs
        self._bits = [program.tensors[name].dtype is DType.BF16 for name in program.outputs]
        plain = pytree.tree_structure((("…",) * len(self._inputs), {}))
        self._plain = all(self._inputs) and signature.taken == plain
        plainly = signature.results == [*program.outputs]
        self._single = plainly and signature.returned.is_leaf()
        self._tuple = plainly and signature.returned == pytree.tree_structure(("…",) * len(self._outputs))
        self._digests = {name: digest(_values(t)) for name, t in _weights(module).items() if name in plan.origin.weights}
        self._same = _aliases(module, self._digests)
        self._made: dict[tuple, list[tuple[str, torch.Size, torch.dtype]]] = {}
        """What outputs are for inputs of a layout that the session has run."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module returns for these arguments.

        Raises InputError for arguments that are not as those that the module was compiled for, and where gradients are asked for.
        """
        if self._plain and not keywords and len(arguments) == len(self._inputs):
            leaves: Sequence[Any] = arguments
        else:
            leaves = self._signature.leaves(arguments, keywords)
        tensors = {name: leaf for name, leaf in zip(self._inputs, leaves, strict=True) if name is not None}
        on_gpu, no_gradients = 0, not torch.is_grad_enabled()
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"input {name!r} is a {type(tensor).__name__}; give a torch.Tensor")
            if not (no_gradients or not tensor.requires_grad):
                raise InputError(
                    f"input {name!r} asks for gradients, which do not pass through a plan: call it in torch.no_grad()"
                )
            on_gpu += tensor.is_cuda
        results = self._run_on_gpu(tensors, on_gpu == len(tensors)) if on_gpu else self._run_on_host(tensors)
        if self._single:
            return results[0]
        if self._tuple:
            return tuple(results)
        given = dict(zip(self._signature.names, leaves, strict=True))
        return self._signature.made(given | dict(zip(self._outputs, results, strict=True)))

    def _run_on_host(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        made = self.session.run(None, {name: _array(tensor) for name, tensor in tensors.items()})
        results = zip(made, self._bits, strict=True)
        return [torch.from_numpy(y).view(torch.bfloat16) if bits else torch.from_numpy(y) for y, bits in results]

    def _run_on_gpu(self, tensors: Mapping[str, torch.Tensor], all_there: bool) -> list[torch.Tensor]:
        """The outputs on a GPU: PyTorch's own memory, once it is known what they are for these inputs, which takes it less time
        than to take over arrays."""
        device = next(tensor.device for tensor in tensors.values() if tensor.is_cuda)
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # its handle, without the object around it
        feeds = {name: tensor if tensor.is_contiguous() else tensor.contiguous() for name, tensor in tensors.items()}
        layout = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in feeds.values()])
        known = self._made.get(layout)
        if known is None:
            plain = {name: tensor.detach() for name, tensor in feeds.items()}
            made = [torch.from_dlpack(y) for y in self.session.run(None, plain, stream=stream)]
            if all_there and not self.plan.entries[0].program.counts:
                if len(self._made) >= SHAPES:
                    self._made.clear()
                self._made[layout] = [(name, y.shape, y.dtype) for name, y in zip(self._outputs, made, strict=True)]
            return made
        results = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in known]
        inputs = {name: _buffer(tensor) for name, tensor in feeds.items()}
        outputs = {name: _buffer(y) for (name, _, _), y in zip(known, results, strict=True)}
        self.session._run_apart(inputs, outputs, stream)
        return results

    def refit(self) -> None:
        """Take the weights of the module as they are now: those that have changed, as `Session.refit` does.

        Raises UsageError and VerificationError as that does, and UsageError where weights have gone, or are apart that were one:
        then nothing has changed.
        """
        there = _weights(self.module)
        if gone := next((name for name in (*self._digests, *self._same) if name not in there), None):
            raise UsageError(f"the module has no weight {gone!r} any more, which the plan has: compile it again")
        values = {name: _values(there[name]) for name in (*self._digests, *self._same)}
        digests = {name: digest(v) for name, v in values.items()}
        for name, one in self._same.items():
            if digests[name] != digests[one]:
                raise UsageError(
                    f"{name!r} and {one!r} were one weight when the module was compiled, and differ: compile it again"
                )
        changed = {name for name, old in self._digests.items() if digests[name] != old}
        if changed:
            known = {**self._constants, **values}
            self.session.refit({name: known[name] for name in _whole(self.plan, changed)})
            self._digests = {name: digests[name] for name in self._digests}


def _whole(plan: Plan, names: Collection[str]) -> set[str]:
    """These weights, and all that make constants of the plan with them, or with those."""
    found = set(names)
    while len(more := together(plan, found)) > len(found):
        found = more
    return found


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, by all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _aliases(module: torch.nn.Module, known: Collection[str]) -> dict[str, str]:
    """The names of weights that the plan has under another name, and which."""
    tensors = _weights(module)
    places = {_place(tensors[name]): name for name in known}
    return {n: places[_place(t)] for n, t in tensors.items() if n not in known and _place(t) in places}


def _place(tensor: torch.Tensor) -> tuple:
    return str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _values(tensor: torch.Tensor) -> np.ndarray:
    """A weight as `Session.refit` takes it."""
    host = tensor.detach().cpu()
    return (host.float() if host.dtype is torch.bfloat16 else host).contiguous().numpy()


TYPES = {getattr(torch, t.value): t for t in ELEMENTS if hasattr(torch, t.value)}
"""Ours of PyTorch's."""


def _buffer(tensor: torch.Tensor) -> DeviceBuffer:
    """A contiguous tensor on the GPU as a session takes it."""
    return DeviceBuffer(tensor.data_ptr(), tensor.shape, TYPES[tensor.dtype], True, tensor)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the host as `Session.run` takes it; nothing is copied."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
