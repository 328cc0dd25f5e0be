"""tccompile: from ONNX to NVIDIA Tensor Cores, ahead of time.

    plan = tccompile.compile("model.onnx")     # needs the extra `compiler`, and no GPU
    plan.save("model.plan")

    session = tccompile.Session("model.plan")  # needs NumPy and a driver
    y, = session.run(None, {"input": x})
    session.refit(tccompile.weights("tuned.onnx"))

Also `check`, what of a model is not supported; `verify`, a plan beside ONNX Runtime; `inspect`, what is in a plan; and
`import tccompile.ort as ort`, ONNX Runtime's Python API on plans. Every error is one of `tccompile.errors`.

What is imported here is imported when it is first used, so that running a plan imports no compiler.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tccompile import errors as errors
    from tccompile.api import check as check
    from tccompile.api import inspect as inspect
    from tccompile.api import verify as verify
    from tccompile.custom.operators import op as op
    from tccompile.load.model import sources as weights
    from tccompile.pipeline import compile as compile
    from tccompile.plan.file import Plan as Plan
    from tccompile.rewrites.own import rewrite as rewrite
    from tccompile.runtime.session import Session as Session
    from tccompile.runtime.session import Value as Value

__version__ = "0.1.0"

__all__ = ["Plan", "Session", "Value", "check", "compile", "errors", "inspect", "op", "rewrite", "verify", "weights"]

_WHERE = {
    "Plan": ("tccompile.plan.file", "Plan"),
    "Session": ("tccompile.runtime.session", "Session"),
    "Value": ("tccompile.runtime.session", "Value"),
    "check": ("tccompile.api", "check"),
    "compile": ("tccompile.pipeline", "compile"),
    "errors": ("tccompile.errors", None),
    "inspect": ("tccompile.api", "inspect"),
    "op": ("tccompile.custom.operators", "op"),
    "rewrite": ("tccompile.rewrites.own", "rewrite"),
    "verify": ("tccompile.api", "verify"),
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


if not TYPE_CHECKING:  # to whom any name would be one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _WHERE[name]
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if name not in NEED_COMPILER or (error.name or "").startswith("tccompile"):
                raise
            return _told_when_called(name, error)
        return found if attribute is None else getattr(found, attribute)


def _told_when_called(name: str, missing: ModuleNotFoundError) -> Any:
    """In place of a function that cannot be imported: it is there, as `hasattr` and `help` find it, and says what to install."""

    def function(*args: Any, **kwargs: Any) -> Any:
        message = f"{NEED_COMPILER[name]} needs {missing.name}, which is not installed: pip install 'tccompile[compiler]'"
        raise ModuleNotFoundError(message, name=missing.name) from missing

    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__
    function.__doc__ = f"Not installed: {NEED_COMPILER[name]} needs the extra `compiler` (pip install 'tccompile[compiler]')."
    return function


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """The package, whose functions keep their names where a module inside is called the same, as `check` and `verify`.

    Importing such a module would put it in the function's place.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
