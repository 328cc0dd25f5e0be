"""By which power tensors grow with what a model is fed: products of two activations as the square, of three as the cube.

A layer of weights makes twice as much of what is twice as large; normalizations and functions like tanh make the same of it. A
product of activations, as in attention without a softmax, goes up by far more, and down: what was seen of its range with
some inputs says little of others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tccompile.ir.expr import Expr
from tccompile.ir.program import Program
from tccompile.precision.positions import BOUNDED

MIXED = 2.0
"""From this power on what was seen of a range says little."""


def growth(program: Program) -> dict[str, float]:
    """The power for each tensor, by the one that owns its storage; 0 for what stays as it is."""
    tensors = program.tensors
    found = {name: float(tensors[name].dtype.is_float) for name in program.inputs}

    def of(name: str) -> float:
        return found.get(tensors[name].storage, 0.0)

    for op in program.ops:
        if tensors[op.y].dtype.is_float:
            loads = [of(view.tensor) for view in op.views]
            begun = op.growth(of, lambda expr, acc: _power(expr, (), acc))
            power = _power(op.epilogue.expr, loads, begun)
            owner = tensors[op.y].storage
            found[owner] = max(power, found.get(owner, power))  # parts of it, perhaps
    return found


def _power(e: Expr, loads: Sequence[float], acc: float) -> float:
    """The power of an expression, with those of what it loads and of `acc`."""
    if e.fn in BOUNDED or _clips(e):
        return 0.0
    args = [_power(a, loads, acc) for a in e.args]
    match e.fn:
        case "acc":
            return acc
        case "load":
            return loads[e.value]  # type: ignore[index]
        case "const":
            return 0.0
        case "mul":
            return sum(args)
        case "div":
            return args[0] - args[1]
        case "reciprocal":
            return -args[0]
        case "sqrt" | "rsqrt":
            return args[0] / (2 if e.fn == "sqrt" else -2)
        case "pow":
            exponent = e.args[1]
            return args[0] * float(exponent.value or 0) if exponent.fn == "const" else args[0]
        case "where":
            return max(args[1:])
    return max(args)


def _clips(e: Expr) -> bool:
    """Whether an expression is clipped between two constants."""

    def within(e: Expr, outer: str, inner: tuple[str, ...]) -> bool:
        rest = [a for a in e.args if a.fn != "const"]
        return e.fn == outer and len(rest) == 1 and rest[0].fn in inner and (len(rest[0].args) == 1 or _has_const(rest[0]))

    return within(e, "min", ("max", "relu")) or within(e, "max", ("min",))


def _has_const(e: Expr) -> bool:
    return any(a.fn == "const" for a in e.args)
