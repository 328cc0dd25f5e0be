"""Operators of the user's own: what `tc.op` makes of a Python function, and what a node of a model gives it."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.custom.digest import digest_of, plain
from tccompile.errors import OperatorError, TccompileError
from tccompile.ir.extent import Extent, Open, Shape, whole

STANDARD = ("", "ai.onnx", "ai.onnx.ml")
"""Domains whose operators are the standard's."""

DTYPES = ("float32", "float16", "bfloat16", "float64", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
"""What tensors of a model may hold."""

LAYOUTS = ("any", "rows", "channels")
FLOATS = ("float32", "any")


@dataclass(frozen=True)
class Shaped:
    """A tensor as rules see it: its extents and the type that the model gives it, as "float32"."""

    shape: Shape
    dtype: str

    def like(self, shape: Sequence[int] | None = None, dtype: str | None = None) -> Shaped:
        """A tensor of the same extents and type, or of those that are given."""
        return Shaped(self.shape if shape is None else tuple(shape), self.dtype if dtype is None else dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        size = 1
        for n in self.shape:
            size *= n
        return size


Rule = Callable[..., Any]
"""A user's function that says something of an operator; its parameters are names of tensors and attributes."""


@dataclass(frozen=True)
class Program:
    """A Numba-CUDA kernel of an operator, and how it is launched.

    since    the oldest generation that it is for, "sm_80"; one such as "sm_90a" is the only one; empty for any
    grid     blocks: a number, two or three, or a rule for them; threads, of a block
    shared   bytes of dynamic shared memory, or a rule for them
    scratch  a rule for a tensor of working memory, the kernel's parameter `scratch`; or None
    """

    function: FunctionType
    since: str
    grid: Any
    threads: int
    shared: Any
    scratch: Rule | None

    def suits(self, arch: Arch) -> bool:
        """Whether a generation can run it."""
        return not self.since or self.since == arch.name or (not ARCHS[self.since].suffix and ARCHS[self.since].cc <= arch.cc)


@dataclass(eq=False)
class Operator:
    """An operator of the user's.

    name       as the model has it: "acme::Foo"
    meaning    the function that takes its tensors and attributes: that of values, or the reference of a kernel
    out        a rule for its outputs
    elementwise  whether `meaning` computes elements from values
    programs   its kernels, the one for the oldest GPUs first; none of an elementwise one
    layout     how axes lie in what kernels read and write: "any", or the last one ("rows") or the second ("channels") innermost
    floats     how floats are stored there: "float32", or "any" as precision has them
    """

    name: str
    meaning: FunctionType
    out: Rule
    elementwise: bool
    programs: tuple[Program, ...] = ()
    layout: str = "any"
    floats: str = "float32"
    _outputs: dict[Any, tuple[Shaped, ...]] = field(default_factory=dict, repr=False)

    def __call__(self, *arguments: Any) -> Any:
        """What it computes: the reference of arrays, or of an elementwise operator its function, of values."""
        return self.meaning(*arguments)

    def on(
        self, since: str, *, grid: Any, threads: int = 256, shared: Any = 0, scratch: Rule | None = None
    ) -> Callable[[Any], Operator]:
        """Decorates another kernel of the operator, for this generation of GPUs (as "sm_80") and newer ones; for "sm_90a" alone,
        whose code no other runs.

        Its parameters are those of the first kernel, in any order; for the rest see `op`.
        """

        def decorate(function: Any) -> Operator:
            if self.elementwise:
                raise _wrong(function, f"{self.name} is elementwise, and needs no kernel")
            if since not in ARCHS:
                raise _wrong(function, f"unknown GPU generation {since!r}; choose from {', '.join(ARCHS)}")
            if any(p.since == since for p in self.programs):
                raise _wrong(function, f"{self.name} has a kernel for {since} already")
            made = Program(plain(function), since, grid, threads, shared, scratch)
            _check_program(self, made)
            order = ["", *ARCHS]
            self.programs = tuple(sorted((*self.programs, made), key=lambda p: order.index(p.since)))
            return self

        return decorate

    # --- What it is made of

    @property
    def domain(self) -> str:
        return self.name.partition("::")[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Its tensors and attributes, in order."""
        return tuple(inspect.signature(self.meaning).parameters)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that a kernel writes: its parameters that are nothing else."""
        own = inspect.signature(self.programs[0].function).parameters
        return tuple(name for name in own if name not in (*self.parameters, "scratch"))

    def program(self, arch: Arch) -> Program:
        """The kernel for a generation."""
        return next(p for p in reversed(self.programs) if p.suits(arch))

    @cached_property
    def digest(self) -> str:
        """Of all that is said of it."""
        programs = [(p.function, p.since, p.grid, p.threads, p.shared, p.scratch) for p in self.programs]
        return digest_of(self.name, self.meaning, self.out, self.elementwise, programs, self.layout, self.floats)[:32]

    # --- A node of it

    def bound(self, tensors: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        """What each parameter stands for: the first ones for the node's tensors, the others for attributes, or their defaults.

        tensors  anything, None for one that is left out. Raises OperatorError for what does not fit
        """
        parameters = inspect.signature(self.meaning).parameters
        names = list(parameters)
        if len(tensors) > len(names):
            raise self.wrong(f"the node has {len(tensors)} inputs, and the operator takes ({', '.join(names)})")
        found = dict(zip(names, tensors, strict=False))
        for name in attributes:
            if name in found or name not in names:
                why = "is an input of the node, too" if name in found else f"is none of ({', '.join(names)})"
                raise self.wrong(f"the node's attribute {name!r} {why}")
        for name in names:
            given = found.get(name) if name in found else attributes.get(name)
            if given is None:
                if parameters[name].default is inspect.Parameter.empty:
                    raise self.wrong(f"the node gives no {name!r}, neither as an input nor as an attribute")
                given = parameters[name].default
            found[name] = given
        return found

    def shapes(self, bound: Mapping[str, Any]) -> tuple[Shaped, ...]:
        """Its outputs, by its rule."""
        tensors = [value for value in bound.values() if isinstance(value, Shaped)]
        late = any(isinstance(n, Open) for t in tensors for n in t.shape)  # which are called alike in many ranges
        key = tuple((name, repr(value)) for name, value in bound.items())
        if late or key not in self._outputs:
            made = self.asked(self.out, bound)
            outputs = self._checked(made if isinstance(made, tuple | list) else (made,))
            if late:
                return outputs
            self._outputs[key] = outputs
        return self._outputs[key]

    def _checked(self, outputs: Sequence[Any]) -> tuple[Shaped, ...]:
        for t in outputs:
            if not isinstance(t, Shaped):
                raise _wrong(self.out, f"the rule for {self.name}'s outputs gives {t!r}: give x.like(), or several of these")
            if t.dtype not in DTYPES:
                raise _wrong(self.out, f"an output of type {t.dtype!r}; choose from {', '.join(DTYPES)}")
            if not all(hasattr(n, "__index__") and 0 <= n < 1 << 31 for n in t.shape):
                raise _wrong(self.out, f"an output of extents {t.shape}; they are integers from 0 to 2^31 - 1")
            if t.size >= 1 << 40:
                raise _wrong(self.out, f"an output of {t.size} elements; fewer than 2^40 are supported")
        if not self.elementwise and len(outputs) != len(self.outputs):
            names = ", ".join(self.outputs)
            raise _wrong(self.out, f"the rule gives {len(outputs)} outputs of {self.name}, and its kernel writes ({names})")
        return tuple(replace(t, shape=tuple(map(whole, t.shape))) for t in outputs)

    def asked(self, rule: Any, known: Mapping[str, Any]) -> Any:
        """What a rule says, called with those parameters that it has; anything else is what it is."""
        if not callable(rule):
            return rule
        names = list(inspect.signature(rule).parameters)
        if unknown := [name for name in names if name not in known]:
            raise _wrong(rule, f"a rule of {self.name} asks for {unknown[0]!r}; there are {', '.join(known)}")
        with blamed_on_user(rule, self.name):
            return rule(*(known[name] for name in names))

    def results(
        self, reads: Sequence[np.ndarray | None], types: Sequence[str], attributes: Mapping[str, Any]
    ) -> list[np.ndarray]:
        """See `ir.ops.custom.Meaning`."""
        shaped = [None if x is None else Shaped(x.shape, t) for x, t in zip(reads, types, strict=True)]
        wanted = self.shapes(self.bound(shaped, attributes))
        with blamed_on_user(self.meaning, self.name):
            made = self.meaning(**self.bound(reads, attributes))
        arrays = [np.asarray(y) for y in (made if isinstance(made, tuple | list) else (made,))]
        if [y.shape for y in arrays] != [t.shape for t in wanted]:
            shapes = [[y.shape for y in arrays], [t.shape for t in wanted]]
            raise _wrong(self.meaning, f"the reference of {self.name} gives {shapes[0]}, and its rule says {shapes[1]}")
        for y in arrays:
            if y.dtype.kind not in "biuf":
                raise _wrong(self.meaning, f"the reference of {self.name} gives {y.dtype}; numbers and booleans are meant")
        return arrays

    def wrong(self, what: str) -> OperatorError:
        """An error about the operator, at its function's line."""
        return _wrong(self.meaning, f"{self.name}: {what}")


def op(
    name: str,
    *,
    out: Rule,
    elementwise: bool = False,
    grid: Any = None,
    reference: Any = None,
    threads: int = 256,
    shared: Any = 0,
    scratch: Rule | None = None,
    layout: str = "any",
    floats: str = "float32",
) -> Callable[[Any], Operator]:
    """Makes an operator of a model, "domain::Name", of the function that it decorates.

    out          a function of the operator's tensors and attributes, or some of them, by name: what its outputs are, as x.like()
    elementwise  the function takes values and numbers, and gives the outputs' (as by `tc.exp`); else it is a Numba-CUDA kernel
    grid         of a kernel: its blocks, 1 to 3 numbers or a function as `out`, which also may ask for outputs
    reference    of a kernel: a function of arrays that gives what the kernel writes. Its parameters are the operator's
    threads      of a block; shared: bytes of dynamic shared memory; scratch: working memory, as x.like(…). Both may be functions
    layout       in what order axes lie in memory: "any", "rows" (the last one innermost) or "channels" (the second one)
    floats       "float32": a kernel's floats are stored as float32; "any": also as float16

    A kernel's parameters are the operator's tensors and attributes, its outputs (by any other names) and `scratch`.
    Raises OperatorError for what does not fit.
    """

    def decorate(decorated: Any) -> Operator:
        function = plain(decorated)
        _check_said(function, name, elementwise, grid, reference, layout, floats)
        if elementwise:
            return Operator(name, function, out, True)
        made = Operator(name, plain(reference), out, False, layout=layout, floats=floats)
        made.programs = (Program(function, "", grid, threads, shared, scratch),)
        _check_program(made, made.programs[0])
        if not made.outputs:
            raise _wrong(function, f"{name}'s kernel has no parameter beside those of its reference: it would write nothing")
        return made

    return decorate


def _check_said(function: Any, name: str, elementwise: bool, grid: Any, reference: Any, layout: str, floats: str) -> None:
    domain, separator, own = name.partition("::")
    if not isinstance(function, FunctionType):
        raise OperatorError(f"{name} is made of {function!r}; tc.op decorates a function")
    if not separator or not own or domain in STANDARD:
        raise _wrong(function, f"an operator called {name!r}: write domain::Name, with a domain of your own")
    if elementwise and not (grid is None and reference is None):
        raise _wrong(function, f"{name} is elementwise: its function says what it computes, and takes neither grid nor reference")
    if not elementwise and (grid is None or not callable(reference)):
        raise _wrong(function, f"{name}'s kernel needs grid=, and reference=, what it computes in NumPy; or say elementwise=True")
    if layout not in LAYOUTS or floats not in FLOATS:
        raise _wrong(function, f"layout={layout!r}, floats={floats!r}: choose from {LAYOUTS} and {FLOATS}")
    for of in (function, plain(reference)) if reference else (function,):
        kinds = {p.kind for p in inspect.signature(of).parameters.values()}
        if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise _wrong(of, f"{name} takes all its parameters by name: *args and **kwargs stand for none")


def _check_program(operator: Operator, program: Program) -> None:
    own, function = list(inspect.signature(program.function).parameters), program.function
    if not (isinstance(program.threads, int) and 1 <= program.threads <= 1024):
        raise _wrong(function, f"{operator.name}: {program.threads!r} threads a block; there are 1 to 1024")
    if ("scratch" in own) != (program.scratch is not None):
        raise _wrong(function, f"{operator.name}: scratch= says what the parameter `scratch` is: give both or none")
    if operator.programs and program is not operator.programs[0]:
        outputs = {name for name in own if name not in (*operator.parameters, "scratch")}
        if outputs != set(operator.outputs):
            raise _wrong(function, f"{operator.name}: its first kernel writes ({', '.join(operator.outputs)})")


# --- Errors ------------------------------------------------------------------------------------------------------------


def place_of(function: Any) -> str:
    """Where a function stands: its file and line."""
    code = getattr(plain(function), "__code__", None)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}: " if code else ""


def _shown(path: str) -> str:
    """A path as it is shortest to write from here."""
    near = os.path.relpath(path) if os.path.exists(path) else ".."
    return path if near.startswith("..") else near


def _wrong(function: Any, what: str) -> OperatorError:
    return OperatorError(f"{place_of(function)}{what}")


@contextmanager
def blamed_on_user(function: Any, name: str) -> Iterator[None]:
    """Raises whatever a user's function raises as an OperatorError that names the line."""
    try:
        yield
    except (TccompileError, MemoryError):
        raise
    except Exception as error:
        raise OperatorError(f"{line_of(error, function)}{name}: {type(error).__name__}: {error}") from error


def line_of(error: BaseException, function: Any) -> str:
    """The line of the user's file where an error came up: the innermost one in the file that the function is in."""
    path = plain(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{_shown(path)}:{lines[-1]}: " if lines else place_of(function)


def bytes_of(t: Shaped) -> Extent:
    """The bytes of a dense tensor."""
    return t.size * (2 if t.dtype == "bfloat16" else np.dtype(t.dtype).itemsize)
