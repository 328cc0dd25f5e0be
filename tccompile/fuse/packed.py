"""y = x · (q - z) * s, of integers q of 4 or 8 bits, zero points z and scales s of blocks of K  =>  the same, of q as they are

Such weights are constants of floats in a program, made by a recipe. Where the recipe shows the integers, the weights get a form
that has these, and their scales and zero points (`forms.Packed`): a kernel's config may read it in their place. It does not
matter how a model says it: by DequantizeLinear, by MatMulNBits, or by operators one by one. What moves elements or joins them is
done to integers, zero points and scales alike; how large blocks are shows where each element's scale comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tccompile.ir import packed
from tccompile.ir.extent import round_up
from tccompile.ir.forms import Packed
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import TRANSFORMS, Literal, Recipe, Source, Transform, evaluate, extents, leaves, transform

MOVES = ("concat", "expand", "flip", "pad", "reshape", "slice", "take", "transpose")
"""Transforms whose results are elements of what they are given, or the zeros of `pad`."""

ONE = np.ones((), np.float32)

MANY = 1 << 31
"""Marks: the product of two such numbers is a 64-bit integer."""

LEAST = 1 << 12
"""Weights of which a form of their own is worth its constants."""


def pack(program: Program, weights: Mapping[str, np.ndarray]) -> Program:
    """The program with a form of integers of each constant matrix that products multiply by and that is made of such.

    weights  the model's
    """
    names = dict.fromkeys(op.b for op in program.ops if isinstance(op, Gemm) and op.b in program.constants)
    tensors, constants, forms = dict(program.tensors), dict(program.constants), dict(program.forms)
    known: dict[Any, int | None] = {}
    for name in names:
        w, recipe = tensors[name], constants[name]
        if not w.dtype.is_float or w.rank != 2 or math.prod(w.shape) < LEAST or not _has_integers(recipe):
            continue
        parts = apart(recipe)
        found = None if parts is None else _form(name, parts, w.shape, weights, known)
        if found is None:
            continue
        form, made = found
        for part, (own, dtype) in zip(form.tensors, made, strict=True):
            tensors[part], constants[part] = dense(part, extents(own)[0], dtype), own
        forms[name] = *forms.get(name, ()), form
    return replace(program, tensors=tensors, constants=constants, forms=forms)


def _has_integers(recipe: Recipe) -> bool:
    """Whether some of the model's integers are in what a constant is made of."""
    return any(isinstance(leaf, Source) and np.dtype(leaf.dtype).kind in "iu" for leaf in leaves(recipe))


# --- Taking a recipe apart ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Recipes of one shape: integers, what stands for 0 of each (None: 0), what each is multiplied by (None: 1). A number that
    stands for 0 of all is a literal without axes."""

    q: Recipe
    zero: Recipe | None = None
    scale: Recipe | None = None

    @property
    def one_zero(self) -> bool:
        return isinstance(self.zero, Literal) and self.zero.values.ndim == 0

    def each(self, change: Callable[[Recipe], Recipe]) -> Parts:
        zero = self.zero if self.zero is None or self.one_zero else change(self.zero)
        return Parts(change(self.q), zero, self.scale and change(self.scale))


def apart(recipe: Recipe) -> Parts | None:
    """What a recipe's floats are integers, zero points and scales of, whatever was rounded; None if they are not."""
    if not isinstance(recipe, Transform):
        return None
    fn, args, given = recipe.fn, recipe.args, dict(recipe.attributes)
    if fn in ("rounded", "cast"):
        return _differences(args[0]) if _is_integer(args[0]) else apart(args[0])
    if fn == "concat":
        return _joined([apart(a) for a in args], given["axis"])
    if fn in MOVES:
        inner = apart(args[0])
        if inner is not None and inner.one_zero and fn == "pad" and inner.scale is None:
            return None  # what is added is 0, and not what stands for it
        return inner and inner.each(lambda part: transform(fn, part, *args[1:], **given))
    if fn in ("mul", "div"):
        return _scaled(recipe)
    if fn == "sub" and (inner := apart(args[0])) is not None and inner.zero is None and inner.scale is None:
        return _shaped(Parts(inner.q, _zero(args[1])), extents(recipe)[0])
    return None


def _differences(recipe: Recipe) -> Parts:
    """Integers, or the difference of two where that is what they are."""
    if isinstance(recipe, Transform) and recipe.fn == "sub":
        q, zero = recipe.args
        return _shaped(Parts(q, _zero(zero)), extents(recipe)[0])
    return Parts(recipe)


def _zero(recipe: Recipe) -> Recipe:
    """What stands for 0: a literal without axes where it is one whole number."""
    if isinstance(recipe, Literal) and recipe.values.size:
        first = recipe.values.reshape(-1)[0]
        if first % 1 == 0 and (recipe.values == first).all():
            return Literal(first.astype(np.int32))
    return recipe


def _scaled(recipe: Transform) -> Parts | None:
    """A product or a quotient of what has integers in it with what has none."""
    a, b = recipe.args
    inner, other = apart(a), b
    if inner is None and recipe.fn == "mul":
        inner, other = apart(b), a
    if inner is None or _is_integer(other):
        return None
    scale = _in_float32(other)
    if recipe.fn == "div":
        scale = transform("div", Literal(ONE), scale)
    shape = extents(recipe)[0]
    whole = _shaped(Parts(inner.q, inner.zero, scale), shape)
    if inner.scale is None or whole.scale is None:
        return whole
    return replace(whole, scale=transform("mul", _expanded(inner.scale, shape), whole.scale))


def _in_float32(recipe: Recipe) -> Recipe:
    return recipe if _kind(recipe) == "float32" else transform("cast", recipe, dtype="float32")


def _shaped(parts: Parts, shape: tuple[int, ...]) -> Parts:
    """The parts broadcast to a shape."""
    return parts.each(lambda part: _expanded(part, shape))


def _expanded(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    return recipe if extents(recipe)[0] == shape else transform("expand", recipe, shape=shape)


def _joined(parts: list[Parts | None], axis: int) -> Parts | None:
    found = [p for p in parts if p is not None]
    if len(found) < len(parts):
        return None
    zero = scale = None
    zeros_ = [p.zero for p in found]
    if all(p.one_zero for p in found) and len({int(z.values) for z in zeros_ if isinstance(z, Literal)}) == 1:
        zero = zeros_[0]
    elif any(zeros_):
        zeros = (p.zero or _expanded(Literal(np.zeros((), np.int32)), extents(p.q)[0]) for p in found)
        whole = (_expanded(z, extents(p.q)[0]) for z, p in zip(zeros, found, strict=True))
        zero = transform("concat", *(transform("cast", z, dtype="float32") for z in whole), axis=axis)
    if any(p.scale for p in found):
        scales = (p.scale or _expanded(Literal(ONE), extents(p.q)[0]) for p in found)
        scale = transform("concat", *scales, axis=axis)
    kinds = {_kind(p.q) for p in found}
    qs = [p.q if len(kinds) == 1 else transform("cast", p.q, dtype="int32") for p in found]
    return Parts(transform("concat", *qs, axis=axis), zero, scale)


def _kind(recipe: Recipe) -> str:
    """NumPy's name of the type of a recipe's values, where no two types meet."""
    while isinstance(recipe, Transform):
        given = dict(recipe.attributes)
        if "dtype" in given:
            return str(given["dtype"])
        if recipe.fn == "rounded":
            return "float16"
        recipe = recipe.args[0]
    return recipe.dtype if isinstance(recipe, Source) else recipe.values.dtype.name


def _are_halves(recipe: Recipe) -> bool:
    """Whether a recipe's floats are numbers of float16, as it moves such and does nothing else."""
    if isinstance(recipe, Transform) and recipe.fn in (*MOVES, "cast"):
        return _kind(recipe) == "float16" or all(map(_are_halves, recipe.args if recipe.fn == "concat" else recipe.args[:1]))
    return not isinstance(recipe, Transform) and _kind(recipe) == "float16"


def _is_integer(recipe: Recipe) -> bool:
    return np.dtype(_kind(recipe)).kind in "iu"


# --- The form ----------------------------------------------------------------------------------------------------------


def _form(
    name: str, parts: Parts, shape: tuple[int, ...], weights: Mapping[str, np.ndarray], known: dict[Any, int | None]
) -> tuple[Packed, list[tuple[Recipe, DType]]] | None:
    """The form of weights (N, K), and its constants' recipes and types; None if it takes no such blocks or integers.

    known  sizes of blocks by how recipes are made, which many layers share
    """
    ones = Literal(ONE)
    scale = parts.scale or _expanded(ones, shape)
    of_each = [scale] if parts.zero is None or parts.one_zero else [scale, parts.zero]
    alike = *map(_skeleton, of_each), shape
    if alike not in known:
        known[alike] = block_of(of_each, shape[1])
    block = known[alike]
    fits = None if block is None else _bits(evaluate(parts.q, weights))
    if block is None or fits is None:
        return None
    bits, offset = fits
    first = {"starts": (0, 0), "ends": (None, None), "steps": (1, block)}
    dtype = DType.F16 if _are_halves(scale) and packed.per(block) > 1 else DType.F32  # a row of a group has a word at least
    made = [
        (transform("packed_values", parts.q, bits=bits, block=block, offset=offset), DType.U8),
        (transform("packed_scales", transform("slice", scale, **first), block=block, dtype=dtype.value), dtype),
    ]
    zero, one = "", offset
    if parts.zero is not None and parts.one_zero:
        one += int(evaluate(parts.zero, {}))
    elif parts.zero is not None:
        zero = f"{name}.zeros"
        of_blocks = transform("packed_zeros", transform("slice", parts.zero, **first), block=block, offset=offset)
        try:
            evaluate(of_blocks, weights)
        except ValueError:
            return None
        made.append((of_blocks, DType.U8))
    if not 0 <= one < 256:
        return None
    return Packed(f"{name}.integers", f"{name}.scales", zero, bits, block, one), made


def _bits(q: np.ndarray) -> tuple[int, int] | None:
    """How many bits integers take, and what is added to them so that they count from 0; None if they take more than 8."""
    low, high = int(q.min()), int(q.max())
    for bits in (4, 8):
        if low >= 0 and high < 1 << bits:
            return bits, 0
        if -(1 << bits - 1) <= low and high < 1 << bits - 1:
            return bits, 1 << bits - 1
    return None


def block_of(recipes: list[Recipe], k: int) -> int | None:
    """How many neighbours along K share an element of each recipe (N, K): a size of blocks that the form has; else None."""
    run = 0  # the greatest common divisor of where others begin
    for recipe in recipes:
        marks, _ = _marks(recipe)
        run = math.gcd(run, *np.flatnonzero((marks[:, 1:] != marks[:, :-1]).any(0)) + 1)
    if run == 0:
        return round_up(k, packed.CHUNK)
    return run if run % packed.CHUNK == 0 else next((b for b in packed.BLOCKS if run % b == 0), None)


def _marks(recipe: Recipe) -> tuple[np.ndarray, int]:
    """Numbers that tell elements apart which come from different ones, whatever their values; and how many there may be."""
    if not isinstance(recipe, Transform) or not _passes(recipe):
        shape = extents(recipe)[0]
        size = math.prod(shape)
        return np.arange(size).reshape(shape) + 1, size + 1  # 0 is what `pad` adds
    if recipe.fn in ("mul", "div"):
        (a, many), (b, more) = (_fewer(*_marks(arg)) for arg in recipe.args)
        return a * more + b, many * more
    if recipe.fn == "cast":
        return _marks(recipe.args[0])
    given = dict(recipe.attributes)
    if recipe.fn == "concat":
        marks, total = [], 0
        for x, count in map(_marks, recipe.args):
            marks.append(x + total)
            total += count
        return TRANSFORMS["concat"](*marks, **given), total
    x, count = _marks(recipe.args[0])
    others = [a.values for a in recipe.args[1:] if isinstance(a, Literal)]  # where `take` takes from
    return TRANSFORMS[recipe.fn](x, *others, **given), count


def _passes(recipe: Transform) -> bool:
    """Whether it is known from which elements each of a recipe's comes."""
    taken = recipe.fn == "take" and not isinstance(recipe.args[1], Literal)
    return recipe.fn in (*MOVES, "cast", "mul", "div") and not taken


def _fewer(marks: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Marks whose products with as many others are 64-bit integers."""
    if count < MANY:
        return marks, count
    found, numbers = np.unique(marks, return_inverse=True)
    return numbers.reshape(marks.shape), len(found)


def _skeleton(recipe: Recipe) -> Any:
    """A recipe without names and values, by which those that are made alike are equal."""
    if isinstance(recipe, Transform):
        return recipe.fn, recipe.attributes, tuple(map(_skeleton, recipe.args))
    return extents(recipe)[0] if isinstance(recipe, Source) else (extents(recipe)[0], id(recipe.values))
