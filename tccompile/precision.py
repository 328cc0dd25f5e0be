"""Program → Program: which tensors are stored in fp16.

Arithmetic is always fp32 (Tensor Cores multiply fp16 and accumulate fp32); the choice is what lies in memory. With "fp16"
every float tensor between the model's inputs and outputs is fp16, and so are the weights of Conv, Gemm and Rnn, because
Tensor Cores read both; biases, scales and interpolation weights are few, are read by fp32 code, and stay fp32. So do masks of
Attention: -inf and the lowest float32 mean different things where they mask a whole row. With "fp32" nothing changes. A finer
choice, tensor by tensor, is a different answer of `storage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tccompile.expr import DType
from tccompile.program import Attention, Conv, Gemm, Op, Program, Rnn, Tensor
from tccompile.weights import transform


def precision(program: Program, mode: str) -> Program:
    """The program with the dtype of each internal float tensor chosen; constants get the cast in their recipe."""
    operands = {name for op in program.ops for name in multiplied(op)}
    outside = {*program.inputs, *program.outputs}
    masks = {program.tensors[op.mask].storage for op in program.ops if isinstance(op, Attention) and op.mask is not None}

    def storage(t: Tensor) -> DType:
        stays = (
            t.dtype is not DType.F32 or t.storage in outside | masks or (t.name in program.constants and t.name not in operands)
        )
        return t.dtype if stays or mode == "fp32" else DType.F16

    return with_storage(program, storage)


def multiplied(op: Op) -> tuple[str, ...]:
    """The operands that Tensor Cores read as weights."""
    match op:
        case Conv(w=w):
            return (w,)
        case Gemm(b=b):
            return (b,)
        case Rnn(r=r):
            return (r,)
    return ()


def with_storage(program: Program, storage: Callable[[Tensor], DType]) -> Program:
    """The program with each tensor stored as `storage` says; a view and its base must get the same answer."""
    tensors = {name: replace(t, dtype=storage(t)) for name, t in program.tensors.items()}
    constants = {
        name: recipe
        if tensors[name].dtype is program.tensors[name].dtype
        else transform("cast", recipe, dtype=tensors[name].dtype.value)
        for name, recipe in program.constants.items()
    }
    return replace(program, tensors=tensors, constants=constants)
