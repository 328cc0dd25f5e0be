"""Kernels whose code is text: what they give, and what the compiler makes of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tccompile.arch import Arch
from tccompile.kernels.codegen import definition, execute, names, tuple_of, types_of
from tccompile.kernels.spec import Function, Kernel, Value


class Called:
    """A device function that text calls."""


@dataclass(frozen=True)
class Intrinsic(Called):
    """A device function that text calls and that is no text itself: instructions, by where they stand in `kernels/`.

    name  "ptx.simt.shuffle" is `shuffle` in kernels/ptx/simt.py: what says what it does stands there
    args  what the function of that name takes to make the device function: for "ptx.memory.load" a type and a number of elements.
          Without arguments the name is that of the device function itself
    """

    name: str
    args: tuple[Any, ...] = ()


def intrinsic(name: str, *args: Any) -> Intrinsic:
    """The device function of that name; with arguments, the one that the function of that name makes of them."""
    return Intrinsic(name, args)


@dataclass(frozen=True)
class DeviceText(Called):
    """A device function as text, which is expanded where it is called.

    params  its parameters, as they stand between the parentheses of `def`
    lines   its body, Python that Numba can compile; it may call what `codegen.names()` holds, and what `scope` does
    """

    name: str
    params: str
    lines: Sequence[str]
    scope: Scope


Scope = Mapping[str, Called]
"""The functions that a text calls, by the names that it calls them."""

Kinds = str | tuple[str, ...]
"""The kind of a kernel's parameter, or those of the elements of one that is a tuple."""


@dataclass(frozen=True)
class KernelText:
    """A kernel as text: what the compiler compiles, and what the tests run thread by thread in Python.

    signature  its parameters by name, in the order of the launch's arguments: of each the kind, or a tuple of kinds for a
               parameter that is a tuple of as many arguments. "address" is an int64, "map" the address of a tensor map (uint64),
               "int" an int32, "float" a float32
    lines      its body, as of a `DeviceText`
    threads, blocks, cluster  as of a `Function`
    """

    signature: Mapping[str, Kinds]
    lines: Sequence[str]
    scope: Scope
    threads: int
    blocks: int = 1
    cluster: int = 1


def parameters(kind: str, names: str) -> dict[str, Kinds]:
    """A part of a signature: parameters of one kind, whose names are separated by commas."""
    return dict.fromkeys(names.split(", "), kind)


class TextKernel(Kernel):
    """A kernel family whose code is text, written for each `Code.params`.

    The compiler, the tests that run it thread by thread (tests/kernels/simulator.py) and those that run its PTX all take what
    `source` gives.
    """

    @abstractmethod
    def source(self, arch: Arch, **params: Value) -> KernelText:
        """The code for one `Code.params`. It names instructions and imports none: no Numba here either."""

    def build(self, arch: Arch, **params: Value) -> Function:
        return compiled(self.source(arch, **params))


# --- Text to functions -----------------------------------------------------------------------------------------------


def indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    """The lines of a block within a block."""
    return ["    " * levels + line for line in lines]


def device_code(text: DeviceText) -> str:
    """The definition of a device function."""
    return definition(text.name, [text.params], text.lines)


def kernel_code(text: KernelText) -> str:
    """The definition of a kernel, named `kernel`, whose parameters are the launch's arguments one by one."""
    params: list[str] = []
    tuples: list[str] = []
    for name, kinds in text.signature.items():
        if isinstance(kinds, str):
            params.append(name)
        else:
            elements = [f"{name}_{i}_" for i in range(len(kinds))]
            params += elements
            tuples.append(f"{name} = {tuple_of(elements)}")
    return definition("kernel", params, [*tuples, *text.lines])


def kinds_of(text: KernelText) -> list[str]:
    """The kinds of the launch's arguments, one by one."""
    return [kind for kinds in text.signature.values() for kind in ((kinds,) if isinstance(kinds, str) else kinds)]


def compiled(text: KernelText) -> Function:
    """The kernel for Numba. Imports Numba."""
    from tccompile.kernels.ptx.core import types

    scope = {name: device_function(called) for name, called in text.scope.items()}
    function = execute(kernel_code(text), {**names(), **scope}, "kernel")
    signature = types.void(*types_of(kinds_of(text)))
    return Function(function, signature, text.threads, text.blocks, cluster=text.cluster)


def device_function(called: Called) -> Any:
    """The device function for Numba. Imports Numba."""
    if isinstance(called, Intrinsic):
        module, _, name = called.name.rpartition(".")
        found = getattr(import_module(f"tccompile.kernels.{module}"), name)
        return found(*called.args) if called.args else found
    from tccompile.kernels.ptx.core import inline

    assert isinstance(called, DeviceText)
    scope = {name: device_function(inner) for name, inner in called.scope.items()}
    return inline(execute(device_code(called), {**names(), **scope}, called.name))
