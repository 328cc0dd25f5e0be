"""The compiler of Python for GPUs: Numba-CUDA makes PTX of a kernel's function. The only module of this room that knows it.

What kernels are written in is Numba's too, and comes to them by `kernels/ptx/core.py`. No other module imports Numba or llvmlite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from tccompile.arch import Arch
from tccompile.kernels.spec import Function

Target = tuple[int, int] | tuple[int, int, str]
"""A generation as `Arch.target` gives it."""


def versions() -> dict[str, str]:
    """Numba's versions, by the names of its packages. Raises whatever importing it raises: ImportError, or types of Numba's own
    and AttributeError for what NumPy no longer has."""
    import llvmlite
    import numba
    import numba_cuda
    from numba.cuda.np import arrayobj  # noqa: F401  what a newer NumPy than Numba knows breaks

    return {"numba": numba.__version__, "numba-cuda": numba_cuda.__version__, "llvmlite": llvmlite.__version__}


def oldest() -> tuple[int, int]:
    """The oldest compute capability that it makes code for: the oldest that its NVRTC knows."""
    from numba.cuda.cudadrv import nvrtc

    return min(nvrtc.get_supported_ccs())


def library(function: Function, arch: Arch) -> Any:
    """Numba's library of a kernel's function, as LLVM IR: what `numba.cuda.compile` makes the PTX of one generation from."""
    from numba.cuda import compiler

    options = {
        "device": False,
        "abi": "numba",
        "fastmath": function.fastmath,
        "launch_bounds": (function.threads, function.blocks),
    }
    with quick() as ready:
        if ready:
            return compiler._compile_pyfunc_with_fixup(function.function, function.signature, cc=arch.target, **options)[0]
    return _Recompiled(lambda cc: compiler.compile(function.function, function.signature, cc=cc, **options)[0])


@dataclass(frozen=True)
class _Recompiled:
    """What stands for a library where there is none to be had: each generation's PTX is compiled from the beginning."""

    compile: Callable[[Any], str]

    def get_asm_strs(self, cc: Any) -> list[str]:
        return [self.compile(cc)]


# --- What of the generation it asks ----------------------------------------------------------------------------------


class _Asked(tuple[Any, ...]):
    """A generation's number as Numba sees it while it makes LLVM IR, and asks whether it is at least some other.

    questions  all of them, for good: what Numba compiled for one kernel is part of others, and then it does not ask again
    """

    questions: ClassVar[set[tuple[Any, ...]]] = set()

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        self.questions.add(other)
        return tuple(self) >= other

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return not self >= other

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        raise AssertionError("Numba has no such question")

    __le__ = __gt__


def alike(one: Target, other: Target) -> bool:
    """Whether Numba's questions have the same answers for two generations, so that LLVM IR of one is that of the other."""
    return all((one >= q) == (other >= q) for q in tuple(_Asked.questions))  # other threads may add


# --- In less time ----------------------------------------------------------------------------------------------------

KNOWN_NUMBA = "0.30."
"""Releases of numba-cuda whose insides `quick` knows."""


def _places() -> tuple[tuple[Any, str], ...]:
    """What `quick` replaces: the owner and the name; nothing if this release is not known, or has them elsewhere."""
    try:
        from numba.cuda.compiler import CUDAFlags, _compile_pyfunc_with_fixup  # noqa: F401  what `library` calls
        from numba.cuda.core import inline_closurecall, ir_utils, ssa
        from numba.cuda.core.base import BaseContext
        from numba.cuda.core.targetconfig import TargetConfig
        from numba.cuda.lowering import Lower
        from numba.cuda.typing import npydecl
        from numba_cuda import __version__ as release

        places = (
            (inline_closurecall, "copy"),
            (inline_closurecall.InlineWorker, "inline_function"),
            (CUDAFlags, "compute_capability"),
            (BaseContext, "install_registry"),
            (ir_utils, "compat_list_vars_stmt"),
            (npydecl, "ufunc_find_matching_loop"),
            (TargetConfig, "__eq__"),
            (TargetConfig, "__hash__"),
            (Lower, "_find_singly_assigned_variable"),
            (ssa, "_run_ssa_block_pass"),
        )
    except (ImportError, AttributeError):
        return ()
    return places if release.startswith(KNOWN_NUMBA) and all(hasattr(owner, name) for owner, name in places) else ()


@contextmanager
def quick() -> Iterator[bool]:
    """Numba with some of its functions replaced by ones that do the same in less time: half of what a kernel takes to compile.
    And its questions about the generation are noted, see `_Asked`.

    `inline_function` inlines the IR that it has just made for the one call, not a copy of a copy of it: each block's copy has
    all variables of the function in it. `_find_singly_assigned_variable` goes through a block once, not once for each variable.
    What the others do is below, with each.
    All threads of the process see what is replaced, so Numba's own lock is held until it is put back: no other one compiles
    meanwhile, of this compiler's or of the user's.
    Yields whether this is a release of numba-cuda that the replacements were made for, and all is where it was sought; else
    Numba is as quick as it is.
    """
    places = _places()
    if not places:
        yield False
        return
    from numba.cuda.core import inline_closurecall
    from numba.cuda.core.compiler_lock import global_compiler_lock

    def inline_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, inline_closurecall.copy = inline_closurecall.copy, _AsItIs
        try:
            return inline(self, *args, **kwargs)
        finally:
            inline_closurecall.copy = outer

    with global_compiler_lock:
        before = [getattr(owner, name) for owner, name in places]
        real, inline, number, install, listed, loop, equal, *_ = before
        asked = property(lambda self: _Asked(number.__get__(self) or ()), number.fset, number.fdel)
        new = (
            *(real, inline_function, asked, _install_new(install), _variables_of(listed), _remembered(loop), _flags_equal(equal)),
            *(_flags_hash, _find_singly_assigned_variable, _run_ssa_block_pass),
        )
        try:
            for (owner, name), quicker in zip(places, new, strict=True):
                setattr(owner, name, quicker)
            yield True
        finally:
            for (owner, name), old in zip(places, before, strict=True):
                setattr(owner, name, old)


def _find_singly_assigned_variable(lower: Any) -> None:
    """Numba's `Lower._find_singly_assigned_variable`: which variables are assigned once, and used in that block alone."""
    from numba.cuda.core import ir
    from numba.cuda.core.analysis import compute_use_defs, must_use_alloca

    blocks, found = lower.func_ir.blocks, compute_use_defs(lower.func_ir.blocks)
    used = set().union(*found.usemap.values(), must_use_alloca(blocks))
    assigned = Counter(s.target.name for block in blocks.values() for s in block.find_insts(ir.assign_types))
    once = (name for names in found.defmap.values() for name in names if assigned[name] == 1)
    lower._singly_assigned_vars, lower._blk_local_varmap = set(once) - used, {}


def _flags_equal(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Numba's `TargetConfig.__eq__`, which compares all options, defaults included, only if what was given differs."""

    def quicker(flags: Any, other: Any) -> Any:
        return True if type(flags) is type(other) and flags._values == other._values else equal(flags, other)

    return quicker


def _flags_hash(flags: Any) -> int:
    """Numba's `TargetConfig.__hash__`, which is that of the options' names."""
    kind: Any = type(flags)
    return _hash_of(kind)


@cache
def _hash_of(kind: Any) -> int:
    return hash(tuple(sorted(kind.options)))


def _run_ssa_block_pass(states: Any, block: Any, handler: Any) -> Iterator[Any]:
    """Numba's function of this name, which logs nothing."""
    from numba.cuda.core import ir

    for statement in block.body:
        assigns = isinstance(statement, ir.assign_types)
        yield handler.on_assign(states, statement) if assigns else handler.on_other(states, statement)


def _install_new(install: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Numba's `BaseContext.install_registry`, which looks at the parts of a registry only if there are more of them than before:
    it is asked at each call of each function."""

    def quicker(context: Any, registry: Any) -> None:
        loader = context._registries.get(registry)
        sizes = [len(getattr(registry, name)) for name in loader.registry_items] if loader else None
        if sizes is None or getattr(loader, "installed", None) != sizes:
            install(context, registry)
            context._registries[registry].installed = sizes

    return quicker


def _variables_of(listed: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Numba's `compat_list_vars_stmt`, which takes the variables of an assignment where they are."""
    from numba.cuda.core import ir

    others = (*ir.var_types, *ir.inst_types, dict)

    def collect(values: Iterable[Any], found: list[Any]) -> bool:
        """Append the variables among the values, at any depth; whether there was nothing else that may have any."""
        for value in values:
            kind = type(value)
            if kind is ir.Var:
                found.append(value)
            elif kind is list or kind is tuple:
                if not collect(value, found):
                    return False
            elif isinstance(value, others):
                return False
        return True

    def quicker(statement: Any) -> list[Any]:
        if type(statement) is ir.Assign:
            value, found = statement.value, [statement.target]
            if collect(value._kws.values() if type(value) is ir.Expr else (value,), found):
                return found
        return listed(statement)

    return quicker


_LOOPS: dict[Any, Any] = {}


def _remembered(loop: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Numba's `ufunc_find_matching_loop`, whose results for the same types are the same."""

    def quicker(ufunc: Any, types: Any) -> Any:
        key = ufunc, tuple(types)
        if key not in _LOOPS:
            _LOOPS[key] = loop(ufunc, types)
        return _LOOPS[key]

    return quicker


class _AsItIs:
    """For the module `copy`, where nobody reads the original again."""

    @staticmethod
    def deepcopy(value: Any) -> Any:
        return value
