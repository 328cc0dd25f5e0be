"""Functions that take the place of Numba's own while it compiles a kernel, and do the same in less time: see `numba.quick`.

Each function here is given Numba's own and gives the one that is quicker. They know numba-cuda's insides, of the releases that
`numba.KNOWN_NUMBA` names.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple


class Place(NamedTuple):
    """What is replaced: an attribute of a module or a class; and what makes the new one of the old one."""

    owner: Any
    name: str
    quicker: Callable[[Any], Any]


def places() -> tuple[Place, ...]:
    """All that is replaced. Raises ImportError or AttributeError where Numba has it elsewhere."""
    from numba.core.types.functions import BaseFunction
    from numba.cuda import lowering
    from numba.cuda.core import analysis, base, inline_closurecall, interpreter, ir, ir_utils, postproc, ssa, typed_passes
    from numba.cuda.core import typeinfer as inference
    from numba.cuda.core.targetconfig import TargetConfig
    from numba.cuda.lowering import Lower
    from numba.cuda.typing import npydecl

    return (
        Place(inline_closurecall.InlineWorker, "inline_function", _inline_function),
        Place(interpreter, "Flow", _flow),
        Place(lowering, "new_error_context", _new_error_context),
        Place(inference, "new_error_context", _new_error_context),
        Place(postproc.PostProcessor, "run", _post_process),
        Place(analysis, "compute_live_map", lambda _: _compute_live_map),
        Place(typed_passes.NopythonRewrites, "run_pass", lambda _: _rewrite_typed),
        Place(ir.Inst, "_rec_list_vars", _rec_list_vars),
        Place(ssa, "_run_ssa", lambda _: _run_ssa),
        Place(ssa, "_run_ssa_block_pass", lambda _: _run_ssa_block_pass),
        Place(BaseFunction, "get_call_type", _get_call_type),
        Place(base, "_has_loc", _has_loc),
        Place(base.BaseContext, "install_registry", _install_registry),
        Place(ir_utils, "compat_list_vars_stmt", _compat_list_vars_stmt),
        Place(npydecl, "ufunc_find_matching_loop", _ufunc_find_matching_loop),
        Place(TargetConfig, "__eq__", _flags_equal),
        Place(TargetConfig, "__hash__", lambda _: _flags_hash),
        Place(Lower, "_find_singly_assigned_variable", lambda _: _find_singly_assigned_variable),
    )


# --- Inlining ----------------------------------------------------------------------------------------------------------


def _inline_function(inline: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's `InlineWorker.inline_function`, which makes a function's IR once for all its calls in a kernel, and inlines a copy
    of it for each, with its variables renamed as they are copied. Numba makes it for each call, and inlines a copy of a copy, in
    which each block has all variables of the function once more. That of a module's functions serves other kernels, too."""
    own: dict[Any, Any] = {}

    def quicker(worker: Any, caller: Any, block: Any, i: int, function: Any, arg_typs: Any = None) -> Any:
        if arg_typs is not None:
            return inline(worker, caller, block, i, function, arg_typs)
        made = _OF_MODULES if _is_lasting(function) else own
        if function not in made:
            made[function] = worker.run_untyped_passes(function)
            worker.validator(made[function])
        worker.flags.enable_ssa = False  # as making the IR leaves it
        return None, None, None, _inlined(caller, block, i, made[function])

    return quicker


_OF_MODULES: dict[Any, Any] = {}
"""The IR of functions that are there as long as the process."""


def _is_lasting(function: Any) -> bool:
    """Whether it is a function of one of the kernels' modules, which takes nothing from another function's call."""
    module = sys.modules.get(function.__module__ or "")
    ours = function.__module__ is not None and function.__module__.startswith("tccompile.kernels.")
    return ours and function.__closure__ is None and function.__globals__ is getattr(module, "__dict__", None)


def _inlined(caller: Any, block: Any, i: int, callee: Any) -> list[tuple[int, Any]]:
    """Numba's `InlineWorker.inline_ir` where no types are known yet, of a callee that stays as it is: the blocks that are new in
    the caller, with their labels."""
    from numba.cuda.core import inline_closurecall as inlining
    from numba.cuda.core import ir, ir_utils

    statement, scope = block.body[i], block.scope
    offset = 1 + max(ir_utils._the_max_label.next(), max(caller.blocks))
    blocks = ir_utils.simplify_CFG(ir_utils.add_offset_to_labels(_renamed(callee, scope), offset))
    ir_utils._the_max_label.update(max(blocks))
    args = inlining._get_callee_args(statement.value, callee.func_id.func, statement.loc, caller)
    inlining._replace_args_with(blocks, args)

    after, label = ir.Block(scope, block.loc), ir_utils.next_label()
    after.body, block.body = block.body[i + 1 :], [*block.body[:i], ir.Jump(min(blocks), statement.loc)]
    caller.blocks[label] = after
    order = ir_utils.find_topo_order(blocks)
    inlining._replace_returns(blocks, statement.target, label)
    definitions = caller._definitions.get(statement.target.name, [])
    if statement.value in definitions:
        definitions.remove(statement.value)
    for name in order:
        inlining._add_definitions(caller, blocks[name])
        caller.blocks[name] = blocks[name]
    return [(label, after), *((name, blocks[name]) for name in order)]


def _renamed(function: Any, scope: Any) -> dict[int, Any]:
    """A copy of a function's blocks in another scope, to which its variables are added under names of this copy's own."""
    from numba.cuda.core import inline_closurecall, ir

    identity, variables, holding = function.func_id, dict[str, Any](), {ir.Var, ir.Expr, list, tuple}
    prefix, free = f"{identity.func_qualname}${next(identity._unique_ids)}", {*identity.func.__code__.co_freevars}

    def renamed(value: Any) -> Any:
        """A value of a type that is or holds variables, with these renamed."""
        kind = type(value)
        if kind is ir.Var:
            name = value.name
            if name not in variables:
                own = inline_closurecall._created_inlined_var_name(prefix, name)
                variables[name] = value if name in free else scope.redefine(own, loc=value.loc)
            return variables[name]
        if kind is ir.Expr:
            new = object.__new__(kind)
            kws = {key: renamed(part) if type(part) in holding else part for key, part in value._kws.items()}
            new.__dict__.update(op=value.op, loc=value.loc, _kws=kws)
            return new
        return kind([renamed(part) if type(part) in holding else part for part in value])

    def copied(statement: Any) -> Any:
        new = object.__new__(type(statement))
        if type(statement) is ir.Del:
            new.__dict__.update(value=renamed(ir.Var(scope, statement.value, statement.loc)).name, loc=statement.loc)
        else:
            parts = statement.__dict__.items()
            new.__dict__.update({name: renamed(value) if type(value) in holding else value for name, value in parts})
        return new

    blocks = {}
    for label, block in function.blocks.items():
        blocks[label] = ir.Block(scope, block.loc)
        blocks[label].body = [*map(copied, block.body)]
    return blocks


# --- Reading bytecode ----------------------------------------------------------------------------------------------------


class _Flowed(NamedTuple):
    """What is known of a function's bytecode, as Numba's `Flow` has it after `run`."""

    block_infos: Any
    cfgraph: Any

    def run(self) -> None:
        """There is nothing left to do."""


_FLOWS: dict[Any, _Flowed] = {}
MOST_FLOWS = 4096
"""Code objects whose flow is kept."""


def _flow(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Numba's class `Flow`, which goes through a code object once: functions made by the same text share it, whatever values
    they close over."""

    def quicker(bytecode: Any) -> Any:
        code = bytecode.func_id.func.__code__
        if code not in _FLOWS:
            flow = of(bytecode)
            flow.run()
            if len(_FLOWS) >= MOST_FLOWS:
                _FLOWS.clear()
            _FLOWS[code] = _Flowed(flow.block_infos, flow.cfgraph)
        return _FLOWS[code]

    return quicker


def _new_error_context(context: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's function of this name, which puts a message together only where there is an error to add it to."""

    class Quicker:
        __slots__ = ("args", "kwargs")

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
            if kind is None:
                return None
            whole = context(*self.args, **self.kwargs)
            whole.__enter__()
            return whole.__exit__(kind, error, trace)

    return Quicker


# --- What is alive -------------------------------------------------------------------------------------------------------


def _post_process(run: Callable[..., None]) -> Callable[..., None]:
    """Numba's `PostProcessor.run`, which finds the variables that are alive at each block only for generators, the only ones that
    ask for them."""

    def quicker(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        from numba.cuda.core import postproc, transforms

        function = processor.func_ir
        if function.is_generator:
            return run(processor, emit_dels, extend_lifetimes)
        function.blocks = transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime = postproc.VariableLifetime(function.blocks)
        function.generator_info = None
        if emit_dels:
            processor._insert_var_dels(extend_lifetimes=extend_lifetimes)
        return None

    return quicker


def _compute_live_map(graph: Any, blocks: dict[int, Any], used: dict[int, set[str]], defined: dict[int, set[str]]) -> Any:
    """Numba's function of this name: the variables that are alive where each block begins. It goes through the blocks as they
    follow each other, so that few rounds find all."""
    order = [label for label in graph.topo_order() if label in blocks]
    order += [label for label in blocks if label not in {*order}]
    reached: dict[int, set[str]] = {label: set() for label in blocks}  # what is defined or used on some way to the block's end
    alive = {label: {*used[label]} for label in blocks}
    grew = True
    while grew:
        grew = False
        for label in order:
            own = reached[label]
            before = len(own)
            own |= defined[label] | used[label]
            for earlier, _ in graph.predecessors(label):
                own |= reached[earlier]
            grew = grew or len(own) != before
    grew = True
    while grew:
        grew = False
        for label in reversed(order):
            for earlier, _ in graph.predecessors(label):
                own = alive[earlier]
                before = len(own)
                own |= (alive[label] & reached[earlier]) - defined[earlier]
                grew = grew or len(own) != before
    return alive


def _rewrite_typed(passed: Any, state: Any) -> bool:
    """Numba's `NopythonRewrites.run_pass`, which says nowhere what variables end: nothing that it rewrites asks for it."""
    from numba.cuda.core import postproc, rewrites

    processor = postproc.PostProcessor(state.func_ir)
    processor.run()
    rewrites.rewrite_registry.apply("after-inference", state)
    processor.remove_dels()
    return True


# --- Variables that are assigned once ------------------------------------------------------------------------------------


def _run_ssa(blocks: dict[int, Any]) -> dict[int, Any]:
    """Numba's function of this name, which for each variable goes through the blocks that have it, not through all."""
    from numba.cuda.core import ir, ssa
    from numba.cuda.core.analysis import compute_cfg_from_blocks

    if not blocks:
        return {}
    graph = compute_cfg_from_blocks(blocks)
    frontiers, violators = ssa._iterated_domfronts(graph), ssa._find_defs_violators(blocks, graph)
    assigned: dict[str, set[int]] = {name: set() for name in violators}
    having: dict[str, set[int]] = {name: set() for name in violators}
    for label, block in blocks.items():
        for statement in block.body:
            for name in {variable.name for variable in statement.list_vars()} & violators.keys():
                having[name].add(label)
            if isinstance(statement, ir.assign_types) and statement.target.name in assigned:
                assigned[statement.target.name].add(label)
    variables, out = ssa._CacheListVars(), dict(blocks)
    for name in violators:
        joins = set().union(*(frontiers[label] for label in assigned[name]))  # where versions of it may meet
        some = {label: block for label, block in out.items() if label in having[name] or label in joins}
        some, definitions = ssa._fresh_vars(some, name)
        out.update(ssa._fix_ssa_vars(some, name, definitions, graph, frontiers, variables))
    return out


def _run_ssa_block_pass(states: Any, block: Any, handler: Any) -> Iterator[Any]:
    """Numba's function of this name, which logs nothing."""
    from numba.cuda.core import ir

    for statement in block.body:
        assigns = isinstance(statement, ir.assign_types)
        yield handler.on_assign(states, statement) if assigns else handler.on_other(states, statement)


def _find_singly_assigned_variable(lower: Any) -> None:
    """Numba's `Lower._find_singly_assigned_variable`: which variables are assigned once, and used in that block alone. It goes
    through a block once, not once for each variable."""
    from numba.cuda.core import ir
    from numba.cuda.core.analysis import compute_use_defs, must_use_alloca

    blocks, found = lower.func_ir.blocks, compute_use_defs(lower.func_ir.blocks)
    used = set().union(*found.usemap.values(), must_use_alloca(blocks))
    assigned = Counter(s.target.name for block in blocks.values() for s in block.find_insts(ir.assign_types))
    once = (name for names in found.defmap.values() for name in names if assigned[name] == 1)
    lower._singly_assigned_vars, lower._blk_local_varmap = set(once) - used, {}


def _rec_list_vars(listed: Callable[[Any, Any], list[Any]]) -> Callable[[Any, Any], list[Any]]:
    """Numba's `Inst._rec_list_vars`, which calls nothing for a variable, and asks of a type once what its values may hold."""
    from numba.cuda.core import ir

    var, expr, bare = ir.Var, ir.Expr, {str, int, float, bool, type(None), ir.Loc, ir.Const, ir.Global, ir.FreeVar, FunctionType}

    def collect(parts: Iterable[Any], found: list[Any], instruction: Any) -> None:
        for part in parts:
            kind = type(part)
            if kind is var:
                found.append(part)
            elif kind in bare:
                continue
            elif kind is expr:
                collect(part._kws.values(), found, part)
            elif kind is list or kind is tuple:
                collect(part, found, instruction)
            elif kind is dict:
                collect(part.values(), found, instruction)
            else:
                found += listed(instruction, part)

    def quicker(instruction: Any, value: Any) -> list[Any]:
        found: list[Any] = []
        collect((value,), found, instruction)
        return found

    return quicker


def _compat_list_vars_stmt(listed: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Numba's function of this name, which takes the variables of an assignment where they are."""
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


# --- Types -------------------------------------------------------------------------------------------------------------


def _get_call_type(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's `BaseFunction.get_call_type`, which looks for a function's implementation once for the same types."""

    def quicker(function: Any, context: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        known = function.__dict__.setdefault("_known_calls", {})
        key = context, args, tuple(kws.items())
        if key not in known:
            known[key] = resolve(function, context, args, kws)
        return known[key]

    return quicker


def _has_loc(has: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Numba's function of this name, which takes a function's signature apart once."""
    return cache(has)


_LOOPS: dict[Any, Any] = {}


def _ufunc_find_matching_loop(loop: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Numba's function of this name, whose results for the same types are the same."""

    def quicker(ufunc: Any, types: Any) -> Any:
        key = ufunc, tuple(types)
        if key not in _LOOPS:
            _LOOPS[key] = loop(ufunc, types)
        return _LOOPS[key]

    return quicker


def _install_registry(install: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Numba's `BaseContext.install_registry`, which looks at the parts of a registry only if there are more of them than before:
    it is asked at each call of each function."""

    def quicker(context: Any, registry: Any) -> None:
        loader = context._registries.get(registry)
        sizes = [len(getattr(registry, name)) for name in loader.registry_items] if loader else None
        if sizes is None or getattr(loader, "installed", None) != sizes:
            install(context, registry)
            context._registries[registry].installed = sizes

    return quicker


# --- Flags -------------------------------------------------------------------------------------------------------------


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
