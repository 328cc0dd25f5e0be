"""Programs run in NumPy, op by op: the CPU engine does, and the kernels' tests compare with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tccompile.ir import weights
from tccompile.ir.evaluate import evaluate_expr
from tccompile.ir.expr import identity_view
from tccompile.ir.loops import bodies, in_turn
from tccompile.ir.ops import Carry, Op
from tccompile.ir.program import Program
from tccompile.ir.storage import convert, elements, from_storage, store, to_storage


def compute(op: Op, program: Program, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """What `op` writes, epilogue and shuffle included: y's logical shape, in the type its expression computes in.

    values  the logical arrays it reads, by tensor: in storage type (bf16 as its bits) or in compute type
    """
    typed = {name: _typed(values[name], program, name) for name in op.inputs}
    return finish(op, program, typed, begin(op, program, typed))


def begin(op: Op, program: Program, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """What `op` computes before its epilogue, from values in compute types; None for a Pointwise, which is all epilogue."""
    return op.compute(values, program.op_shape(op))


def finish(op: Op, program: Program, values: Mapping[str, np.ndarray], acc: np.ndarray | None) -> np.ndarray:
    """What `op` writes, from what it computed before its epilogue."""
    shape = program.op_shape(op)
    out = evaluate_expr(op.epilogue.expr, op.epilogue.loads, values, shape, acc)
    out = np.broadcast_to(out, shape)
    b = op.epilogue.shuffle
    if b > 1:
        n, c, p, q = shape
        out = out.reshape(n, b, b, c // (b * b), p, q).transpose(0, 3, 4, 1, 5, 2)  # (N, C, P, i, Q, j)
    return out.reshape(program.tensors[op.y].shape)


def beside(op: Op, program: Program, y: np.ndarray) -> np.ndarray:
    """What `op` writes as a second result, from what the first one holds, in its storage type or its compute type."""
    assert op.also is not None
    return evaluate_expr(op.also.expr, (identity_view(op.y, y.ndim),), {op.y: _typed(y, program, op.y)}, y.shape)


def _typed(values: np.ndarray, program: Program, name: str) -> np.ndarray:
    dtype = program.tensors[name].dtype
    return values if values.dtype == dtype.compute.numpy else from_storage(values, dtype)


Observer = Callable[[str, np.ndarray], None]
"""Called with a tensor's name and its values."""


def unobserved(name: str, values: np.ndarray) -> None:
    """Nobody looks."""


Watcher = Callable[[Op, Mapping[str, np.ndarray], np.ndarray | None, np.ndarray], None]
"""Called with an op, the values that it reads, what it computed before its epilogue (see `begin`), and what it writes."""


def unwatched(op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
    """Nobody looks."""


def evaluate(
    program: Program,
    feeds: Mapping[str, np.ndarray],
    sources: Mapping[str, np.ndarray],
    watch: Watcher = unwatched,
    stored: bool = False,
    turns: int | None = None,
) -> dict[str, np.ndarray]:
    """The program's outputs by name, computed in float32, int64 and bool throughout: nothing is rounded to storage types.

    feeds    the inputs' values by name; sources, the model's weights by name (see `weights.evaluate`)
    watch    sees what each op reads and writes
    stored   round every tensor to its storage type after all
    turns    how often bodies of loops run at most, if that is less than the program says
    """
    tensors = program.tensors
    last = _last_uses(program)
    memory: dict[str, np.ndarray] = {}  # by the tensor that owns the storage
    views = {tensors[name].storage for op in program.ops for name in op.inputs if tensors[name].base}
    plain = program.constants.keys() - views  # whose values are as good where they are

    def put(name: str, values: np.ndarray) -> None:
        owner = tensors[tensors[name].storage]
        if owner.name not in memory:
            memory[owner.name] = np.zeros(owner.span, owner.dtype.compute.numpy)
        if stored:
            values = from_storage(to_storage(values, owner.dtype), owner.dtype)
        store(memory[owner.name], tensors[name], convert(values, owner.dtype.compute.numpy))

    def get(name: str) -> np.ndarray:
        if name in plain:
            return memory[name]
        return elements(memory[tensors[name].storage], tensors[name])

    for name in program.inputs:
        put(name, _typed(np.asarray(feeds[name]), program, name))
    for i in in_turn(program, lambda body: bool(get(body.going).item()), turns):
        op = program.ops[i]
        for name in op.inputs:
            owner = tensors[name].storage
            if owner in program.constants and owner not in memory:
                given = weights.evaluate(program.constants[owner], sources)
                if owner in plain:
                    t = tensors[owner]
                    memory[owner] = np.broadcast_to(convert(given, t.dtype.compute.numpy), t.shape)
                else:
                    put(owner, given)
        read = {name: get(name) for name in op.inputs}
        acc = begin(op, program, read)
        values = finish(op, program, read, acc)
        watch(op, read, acc, values)
        put(op.y, values)
        if op.also is not None:
            put(op.also.y, beside(op, program, get(op.y)))
        for owner in [o for o in memory if last.get(o, -1) <= i]:
            del memory[owner]
    return {name: get(name).copy() for name in program.outputs}


def _last_uses(program: Program) -> dict[str, int]:
    """The op that is the last to use each storage, by its number: what a loop's body does not make, it keeps for all turns."""
    tensors = program.tensors
    last = {tensors[name].storage: i for i, op in enumerate(program.ops) for name in (*op.inputs, *op.results)}
    last |= dict.fromkeys((*program.inputs, *program.outputs), len(program.ops))
    for body in bodies(program):
        own = program.ops[body.first : body.last + 1]
        made = {tensors[op.y].storage for op in own if not (isinstance(op, Carry) and op.stays)}
        last |= {owner: body.last + 1 for owner, i in last.items() if i in body and owner not in made}
    return last


Kept = dict[int, tuple[weights.Recipe, np.ndarray]]
"""What recipes of numbers in 8 bits make, by their identities."""


def rounded_before(program: Program, sources: Mapping[str, np.ndarray], kept: Kept | None = None) -> Program:
    """The program with values in place of the recipes of constants that are rounded to 8 bits: that takes long, in each run.

    kept  what was rounded for other programs of the same recipes; more is added
    """
    found = {name: recipe for name, recipe in program.constants.items() if _is_rounded(recipe)}
    known = {} if kept is None else kept
    made = {name: weights.Literal(_made(recipe, sources, known)) for name, recipe in found.items()}
    return replace(program, constants={**program.constants, **made})


def _made(recipe: weights.Recipe, sources: Mapping[str, np.ndarray], kept: Kept) -> np.ndarray:
    """The values, of which those in 8 bits are made once."""
    if not isinstance(recipe, weights.Transform):
        return weights.evaluate(recipe, sources)
    if id(recipe) in kept:
        return kept[id(recipe)][1]
    args = [_made(a, sources, kept) for a in recipe.args]
    values: np.ndarray = weights.TRANSFORMS[recipe.fn](*args, **dict(recipe.attributes))
    if recipe.fn in ROUNDED:
        kept[id(recipe)] = recipe, values
    return values


def _is_rounded(recipe: weights.Recipe) -> bool:
    """Whether a constant's values are rounded to bytes."""
    return isinstance(recipe, weights.Transform) and (recipe.fn in ROUNDED or any(map(_is_rounded, recipe.args)))


ROUNDED = ("in_bytes", "byte_scales", "float8", "float8_scales", "multiples")
"""Transforms that take longer than to run a product."""
