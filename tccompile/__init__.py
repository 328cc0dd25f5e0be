"""tccompile: from ONNX to NVIDIA Tensor Cores, ahead of time.

    plan = tccompile.compile("model.onnx")     # needs the extra `compiler`, and no GPU
    plan.save("model.plan")

    session = tccompile.Session("model.plan")  # needs NumPy and a driver
    y, = session.run(None, {"input": x})
    session.refit(tccompile.weights("tuned.onnx"))

What is imported here is imported when it is first used, so that running a plan imports no compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tccompile.custom.operators import op as op
    from tccompile.load.model import sources as weights
    from tccompile.pipeline import compile as compile
    from tccompile.plan.format import Plan as Plan
    from tccompile.rewrites.own import rewrite as rewrite
    from tccompile.runtime.session import Session as Session

__version__ = "0.1.0"

__all__ = ["Plan", "Session", "compile", "op", "rewrite", "weights"]

_WHERE = {
    "Plan": ("tccompile.plan.format", "Plan"),
    "Session": ("tccompile.runtime.session", "Session"),
    "compile": ("tccompile.pipeline", "compile"),
    "op": ("tccompile.custom.operators", "op"),
    "rewrite": ("tccompile.rewrites.own", "rewrite"),
    "weights": ("tccompile.load.model", "sources"),
}

OF_VALUES = (
    "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "erf", "floor", "ceil", "round", "relu", "sigmoid", "silu", "gelu", "softplus",
    "where", "minimum", "maximum", "clip", "isnan", "astype", "index", "size",
)  # fmt: skip
"""Functions that the functions of elementwise operators call, as tc.sin: see tccompile/custom/values.py."""

_WHERE |= {name: ("tccompile.custom.values", name) for name in OF_VALUES}


NEED_COMPILER = {"compile": "compiling", "rewrite": "rewriting graphs", "weights": "reading a model's weights"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name not in NEED_COMPILER or (error.name or "").startswith("tccompile"):
            raise
        message = f"{NEED_COMPILER[name]} needs {error.name}, which is not installed: pip install 'tccompile[compiler]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
