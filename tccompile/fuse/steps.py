"""What rounds a product, or what a norm makes of bytes, to bytes divides its scales and constants by the step in place of every
result.

round((s · acc + b + c · r) / k)  =>  round(s/k · acc + b/k + c/k · r), which is the same but for the last bit of a float
round((x · c · s + b) / k)        =>  round(x · (c/k · s) + b/k), where s is a constant for each channel
saturate(round(relu(x)), 0, …)    =>  saturate(round(x), 0, …), and so of other bounds that are rounded to the type's, or beyond
saturate(round(x) + 0, …)         =>  saturate(round(x), …)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tccompile.fuse.editor import Editor, fits, tidy
from tccompile.ir.expr import Expr, View, call, const, is_sum, load, substitute, walk
from tccompile.ir.ops import Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, transform


def in_steps(program: Program) -> Program:
    e = Editor(program)
    for i, op in enumerate(e.ops):
        if op is not None and (op.multiplied or isinstance(op, Pointwise)):
            expr, views = _Steps(e, op).of(op.epilogue.expr)
            epilogue = replace(tidy(expr, views), shuffle=op.epilogue.shuffle)
            if expr is not op.epilogue.expr and fits(epilogue):
                e.put(i, replace(op, epilogue=epilogue))
    return e.result()


class _Steps:
    """The expression of one op under change, and what it loads."""

    def __init__(self, e: Editor, op: Op) -> None:
        self.e, self.views = e, list(op.epilogue.loads)

    def of(self, expr: Expr) -> tuple[Expr, tuple[View, ...]]:
        """The expression with each of its quotients that are rounded in steps, innermost first."""
        for rounded in [x for x in walk(expr) if x.fn == "round" and x.args[0].fn == "ratio"]:
            (total, step) = rounded.args[0].args
            if step.fn == "const" and step.value and step.value > 0 and (is_sum(total) or self.is_scaled(total)):  # type: ignore[operator]
                before, now = len(self.views), self.divided(total, float(step.value))  # type: ignore[arg-type]
                if now is None:
                    del self.views[before:]
                else:
                    return self.of(substitute(expr, {rounded: call("round", now)}))
        return _without_limits(expr), tuple(self.views)

    def is_scaled(self, x: Expr) -> bool:
        """Whether it is multiplied by a constant for each channel, as by a norm, and not rounded since: a quotient's last bit
        says nothing of it, either."""
        if x.fn == "mul" and any(a.fn == "load" and a.dtype is DType.F32 and self.recipe(a) is not None for a in x.args):
            return True
        return x.fn not in ("round", "saturate", "floor", "ceil") and any(map(self.is_scaled, x.args))

    def recipe(self, x: Expr) -> Recipe | None:
        """What the constant that is loaded is made by; None for what is no constant."""
        return self.e.constants.get(self.views[x.value].tensor)  # type: ignore[index]

    def divided(self, x: Expr, step: float) -> Expr | None:
        """x / step by no more operations than x takes, or None."""
        match x.fn:
            case "const":
                return const(float(np.float32(x.value) / np.float32(step)))  # type: ignore[arg-type]
            case "load":
                return self.constant(x, step)
            case "mul":
                for k, factor in enumerate(x.args):
                    other, more = _without_factor(x.args[1 - k]) if factor.fn == "load" else (x.args[1 - k], 1.0)
                    if factor.fn in ("const", "load") and (of := self.divided(factor, step / more)) is not None:
                        if of.fn == "const" and of.value == 1:
                            return other
                        return call("mul", *((of, other) if k == 0 else (other, of)))
                return None
            case "add" | "sub":
                parts = [self.divided(a, step) or self.scaled(a, step) for a in x.args]
                return None if None in parts else call(x.fn, *parts)  # type: ignore[arg-type]
            case "relu" | "min" | "max":
                parts = [self.divided(a, step) for a in x.args]
                return None if None in parts else call(x.fn, *parts)  # type: ignore[arg-type]
        return None

    def scaled(self, x: Expr, step: float) -> Expr | None:
        """A sum or tensor that is added, as a multiplication that comes with the addition: one in place of the quotient's."""
        inverse = float(np.float32(1) / np.float32(step))
        return call("mul", x, inverse) if x.fn in ("acc", "load") and x.dtype is DType.F32 else None

    def constant(self, x: Expr, step: float) -> Expr | None:
        """A constant that is loaded, divided by the step."""
        view = self.views[x.value]  # type: ignore[index]
        tensor, recipe = self.e.tensors[view.tensor], self.e.constants.get(view.tensor)
        if recipe is None or tensor.dtype is not DType.F32 or tensor.base is not None:
            return None
        name = f"{tensor.name}/{step!r}"
        if name not in self.e.tensors:
            self.e.add_constant(replace(tensor, name=name), transform("div", recipe, Literal(np.array(step, np.float32))))
        self.views.append(replace(view, tensor=name))
        return load(len(self.views) - 1)


def _without_factor(x: Expr) -> tuple[Expr, float]:
    """A number without a positive constant that it is multiplied by, and that constant; 1 if there is none."""
    if x.fn == "mul":
        for k, factor in enumerate(x.args):
            if factor.fn == "const" and float(factor.value or 0) > 0:
                return x.args[1 - k], float(factor.value)  # type: ignore[arg-type]
    return x, 1.0


NEAR = 0.499
"""What is so close to a byte's limit is rounded to it."""


def _without_limits(expr: Expr) -> Expr:
    """The expression without what bounds a number that is rounded and then bounded more closely by the limits of a type, and
    without a zero point of 0."""
    found = {}
    for x in walk(expr):
        if x.fn == "saturate":
            rounded, least, most = x.args[0], float(x.args[1].value), float(x.args[2].value)  # type: ignore[arg-type]
            moved = 0.0
            if rounded.fn == "add" and rounded.args[1].fn == "const":
                rounded, moved = rounded.args[0], float(rounded.args[1].value)  # type: ignore[arg-type]
            if rounded.fn == "round":
                within = call("round", _unbounded(rounded.args[0], least - moved + NEAR, most - moved - NEAR))
                found[x] = Expr("saturate", (call("add", within, moved) if moved else within, *x.args[1:]), None, x.dtype)
    changed = {x: other for x, other in found.items() if other != x}
    return substitute(expr, changed) if changed else expr


def _unbounded(x: Expr, least: float, most: float) -> Expr:
    """A number without bounds at or beyond these two, which it is to have itself."""
    if x.fn == "ratio" and x.args[1].fn == "const" and (step := float(x.args[1].value or 0)) > 0:  # type: ignore[arg-type]
        return call("ratio", _unbounded(x.args[0], least * step, most * step), x.args[1])
    if x.fn == "relu" or (x.fn in ("min", "max") and x.args[1].fn == "const"):
        inner = _unbounded(x.args[0], least, most)
        bound = 0.0 if x.fn == "relu" else float(x.args[1].value)  # type: ignore[arg-type]
        kept = bound < most if x.fn == "min" else bound > least
        return call(x.fn, inner, *x.args[1:]) if kept else inner
    return x
