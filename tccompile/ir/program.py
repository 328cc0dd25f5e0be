"""The typed program between ONNX and the kernels: tensors with layouts, and the ops in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from tccompile.ir.extent import Extent, Shape, hint
from tccompile.ir.forms import Form, Packed
from tccompile.ir.ops import Op
from tccompile.ir.tensor import Storage, Tensor
from tccompile.ir.weights import Recipe


@dataclass(frozen=True)
class Count:
    """How many elements there are along axes whose extent the data decide.

    tensor  an output that holds it, one int64: it is no result that users see
    limit   there is room for so many; with more an inference has failed
    node    the user's node that decides it
    cuts    outputs that are cut to it, and along which axes
    """

    tensor: str
    limit: Extent
    node: str
    cuts: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Program:
    """One set of input shapes of a model: ops in an order in which they can run.

    inputs, outputs  tensors with the model's own names, dtypes and shapes, row-major and without padding
    constants        how the values of a constant tensor come from the model's weights; logical shape, before the padding
                     and order of axes that its entry in `tensors` says
    storage          of tensors whose precision or scale is a choice of their own, by the tensor that owns the memory. The ops'
                     expressions hold the scales already: this is for whoever looks at memory or asks why
    forms            of constants: other constants that hold the same in another form, which a kernel may read in their place. A
                     plan has those that its steps read
    counts           of elements of outputs that the data decide
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Recipe]
    ops: tuple[Op, ...]
    storage: Mapping[str, Storage] = field(default_factory=dict)
    forms: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    counts: tuple[Count, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs that users see."""
        hidden = {count.tensor for count in self.counts}
        return tuple(name for name in self.outputs if name not in hidden)

    def op_shape(self, op: Op) -> Shape:
        """The shape of what `op` computes, which its epilogue's coordinates range over: y's before the shuffle."""
        y, b = self.tensors[op.y].shape, op.epilogue.shuffle
        return y if b == 1 else (y[0], y[1] * b * b, y[2] // b, y[3] // b)

    def products(self, op: Op) -> int:
        """See `Op.products`."""
        return hint(op.products(self._shapes(op), self.op_shape(op)))

    def flops(self, op: Op) -> int:
        """See `Op.flops`."""
        return hint(op.flops(self._shapes(op), self.op_shape(op)))

    def _shapes(self, op: Op) -> dict[str, Shape]:
        return {name: self.tensors[name].shape for name in op.operands}

    def forms_of(self, op: Op) -> list[Form]:
        """Other forms of the constants that `op` reads."""
        return [form for name in op.inputs for form in self.forms.get(name, ())]

    def packed(self, name: str) -> Packed | None:
        """The form of integers that is all that a plan has of a constant; None if it has the constant itself."""
        return next((form for form in self.forms.get(name, ()) if isinstance(form, Packed) and form.alone), None)

    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each tensor."""
        out: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for name in op.inputs:
                out[name].append(op)
        return out

    def writer(self) -> dict[str, Op]:
        """The op that writes each tensor."""
        return {name: op for op in self.ops for name in op.results}


def needs(program: Program) -> list[list[int]]:
    """For each op the ones that write what it reads."""
    writers: dict[str, list[int]] = {}  # of each storage
    out = []
    for i, op in enumerate(program.ops):
        owners = {program.tensors[name].storage for name in op.inputs}
        out.append(sorted({k for owner in owners for k in writers.get(owner, ())}))
        for name in op.results:
            writers.setdefault(program.tensors[name].storage, []).append(i)
    return out


def earlier(program: Program) -> list[int]:
    """For each op all that must have run before it, by the data they read: bit i of the number stands for op i."""
    out: list[int] = []
    for direct in needs(program):
        out.append(reduce(or_, (out[k] | 1 << k for k in direct), 0))
    return out
