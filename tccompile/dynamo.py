"""`torch.compile(module, backend="tccompile")`: each part of a module that PyTorch captures becomes a plan. For inference.

PyTorch divides a module where it cannot capture it, and runs what lies between itself. A part that tccompile does not take it
runs itself, too, and a RuntimeWarning says why. The extra `torch` brings what this needs, and tells PyTorch the backend's name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tccompile.errors import UnsupportedError, extra
from tccompile.torch import Compiled, compile

with extra("torch"):
    import torch
    from torch.utils._sympy.numbers import int_oo

__all__ = ["backend"]


def backend(
    graph: torch.fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What PyTorch calls with each part: `torch.compile(module, backend="tccompile", options={"precision": "fp16"})`.

    options  those of `tccompile.torch.compile`

    Extents that `torch._dynamo.mark_dynamic(x, axis, min=1, max=64)` leaves open are a range of one plan. Of other open sizes
    each value gets a plan of its own, when it first comes. Weights that have changed since the last call are taken over.
    """
    tensors = [e for e in examples if isinstance(e, torch.Tensor)]
    try:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise UnsupportedError("gradients are asked for, which do not pass through a plan: call it in torch.no_grad()")
        runner = _Runner(graph, examples, dict(options or {}))
        runner.prepare([e.node.hint if isinstance(e, torch.SymInt) else e for e in examples])  # int(e) would fix what it is
    except UnsupportedError as error:
        warnings.warn(f"PyTorch runs a part of the module itself: {error}", RuntimeWarning, stacklevel=2)
        return graph.forward
    return runner


@dataclass(frozen=True)
class _Size:
    """A size among the arguments: where it stands, and the tensor and axis that has it, if it has ends."""

    place: int
    tensor: int | None = None
    axis: int = 0
    low: int = 0
    high: int = 0


class Part(torch.nn.Module):
    """A part of a module as one of its own, which has the weights and takes the other tensors."""

    def __init__(self, graph: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor], taken: Sequence[int]) -> None:
        super().__init__()
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self.graph, self.taken, self.places = graph, tuple(taken), {i: names[i] for i in weights}
        self.count, self.sizes = len(names), dict[int, int | tuple[int, int]]()
        for place, tensor in weights.items():
            self.put(place, tensor)

    def put(self, place: int, tensor: torch.Tensor) -> None:
        """Have another tensor as a weight."""
        if isinstance(tensor, torch.nn.Parameter):
            self.register_parameter(self.places[place], tensor)
        else:
            self.register_buffer(self.places[place], tensor)

    def forward(self, *tensors: torch.Tensor) -> Any:
        arguments: list[Any] = [None] * self.count
        for place, tensor in zip(self.taken, tensors, strict=True):
            arguments[place] = tensor
        for place, name in self.places.items():
            arguments[place] = getattr(self, name)
        for place, size in self.sizes.items():
            arguments[place] = size if isinstance(size, int) else arguments[size[0]].shape[size[1]]
        return self.graph(*arguments)


class _Runner:
    """The plans of a part: one, or one for each value of sizes without ends."""

    def __init__(self, graph: torch.fx.GraphModule, examples: Sequence[Any], options: dict[str, Any]) -> None:
        self._options = options
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # PyTorch marks a module's own tensors so, since they lie where they lie
        static = {i for i, e in enumerate(examples) if hasattr(e, "_dynamo_static_input_type")}
        tensors = [i for i, e in enumerate(examples) if isinstance(e, torch.Tensor)]
        self._taken = [i for i in tensors if i not in static]
        fakes = {i: nodes[i].meta["example_value"] for i in self._taken}
        sizes = [_size(i, e, fakes) for i, e in enumerate(examples) if i not in tensors]
        self._free = [s.place for s in sizes if s.tensor is None]
        self._part = Part(graph, {i: examples[i] for i in sorted(static)}, self._taken).eval()
        self._part.sizes |= {s.place: (s.tensor, s.axis) for s in sizes if s.tensor is not None}
        self._dynamic = _dynamic(fakes, {s.place: s for s in sizes if s.tensor is not None}, examples)
        self._plans: dict[tuple[int, ...], Compiled] = {}
        self._seen = {i: (examples[i], _version(examples[i])) for i in static}

    def prepare(self, arguments: Sequence[Any]) -> Compiled:
        """The plan for these arguments. Raises UnsupportedError."""
        key = tuple(arguments[i] for i in self._free)
        if key not in self._plans:
            self._part.sizes |= dict(zip(self._free, key, strict=True))
            tensors = tuple(arguments[i].detach() for i in self._taken)
            with torch._guards.tracing(None):
                self._plans[key] = compile(self._part, tensors, dynamic_shapes=self._dynamic, **self._options)
        return self._plans[key]

    def __call__(self, *arguments: Any) -> Any:
        changed = [i for i, (t, v) in self._seen.items() if arguments[i] is not t or _version(t) != v]
        if changed:
            self._refit({i: arguments[i] for i in changed})
        plan = self._plans.get(tuple([arguments[i] for i in self._free])) or self.prepare(arguments)
        return plan(*[arguments[i] for i in self._taken])

    def _refit(self, changed: Mapping[int, torch.Tensor]) -> None:
        for place, tensor in changed.items():
            self._part.put(place, tensor)
        for plan in self._plans.values():
            plan.refit()
        self._seen |= {i: (t, _version(t)) for i, t in changed.items()}


def _version(tensor: torch.Tensor) -> int:
    """Changes when the tensor's values do."""
    return 0 if tensor.is_inference() else tensor._version


def _size(place: int, example: Any, fakes: Mapping[int, torch.Tensor]) -> _Size:
    """A size among the arguments, with the tensor that has it, if the user has said what it may be."""
    if not isinstance(example, torch.SymInt):
        return _Size(place)
    bounds = example.node.shape_env.bound_sympy(example.node.expr)
    if bounds.upper >= int_oo or not example.node.expr.is_Symbol:
        return _Size(place)
    for tensor, fake in fakes.items():
        for axis, extent in enumerate(fake.shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr == example.node.expr:
                return _Size(place, tensor, axis, max(int(bounds.lower), 1), int(bounds.upper))
    return _Size(place)


def _dynamic(fakes: Mapping[int, torch.Tensor], sizes: Mapping[int, _Size], examples: Sequence[Any]) -> Any:
    """For torch.export: the tensors' extents that are sizes with ends; None if there are none."""
    if not sizes:
        return None
    dims = {examples[i].node.expr: torch.export.Dim(str(examples[i].node.expr), min=s.low, max=s.high) for i, s in sizes.items()}
    known = [{axis: dims[n.node.expr] for axis, n in enumerate(f.shape) if _is_one(n, dims)} for f in fakes.values()]
    return (tuple(known),)  # of `*tensors`


def _is_one(extent: Any, dims: Mapping[Any, Any]) -> bool:
    return isinstance(extent, torch.SymInt) and extent.node.expr in dims
