"""Source text for kernels: pointwise expressions as straight-line Python, division by launch arguments, compiling the text.

The text calls the names of `names()` and those of its scope: see `text.KernelText`. Memory is touched through intrinsics only,
such as those of ptx/memory.py, so that a test can run the text as it is, with their meaning in Python.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tccompile.ir.expr import FUNCTIONS, Expr, const, is_sum, is_whole, substitute, walk
from tccompile.ir.extent import Extent, Open, ceil_div
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.spec import F32, I32, Value

COMPUTE = {DType.F32: "f32", DType.I64: "i64", DType.BOOL: "boolean"}
"""The names of the compute types in generated text."""

APPROXIMATE = ("sigmoid", "silu", "swish", "mish", "hard_swish", "softsign", "gelu", "gelu_tanh", "elu", "selu", "celu")
"""Functions whose divisions need not be exact to the last bit: `a / b` is `quick_div` in them."""

RECIPROCAL = ("sigmoid", "silu", "swish")
"""Those that divide by 1 + exp(x): `a / b` is a times the reciprocal, by one instruction, and `exp` is `quick_exp`."""

COARSE = {name: f"coarse_{name}" for name in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh")}
"""Functions where 8 bits are stored of what is made of them: errors of some 3e-4 of x are far below a step. They take half of a
factor as well, which they multiply by anyway."""


# --- Expressions as JSON -----------------------------------------------------------------------------------------------


def encode(expr: Expr) -> Value:
    """The expression as nested tuples of strings and numbers: (fn, dtype, value, args…)."""
    value: Value | None = expr.value
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)  # JSON has no inf and nan
    return (expr.fn, expr.dtype.value, value if value is not None else "", *map(encode, expr.args))  # type: ignore[return-value]


def decode(text: Any) -> Expr:
    fn, dtype, value, *args = text
    if value == "" and isinstance(value, str):
        value = None
    elif isinstance(value, str):
        value = float(value)
    return Expr(fn, tuple(map(decode, args)), value, DType(dtype))


def unrounded(expr: Expr, dtype: DType) -> Expr:
    """The expression without the rounding that storing it as a float of 8 bits does: to the nearest number, saturated."""
    if dtype not in FLOAT8 or expr.fn != "on_grid":
        return expr
    inside, *steps = expr.args
    limits = [inside.args[1], inside.args[0].args[1]] if inside.fn == "min" and inside.args[0].fn == "max" else []
    own = [dtype.eps, dtype.least_normal * dtype.eps, dtype.largest, dtype.lowest]
    return inside.args[0].args[0] if [e.value for e in (*steps, *limits)] == own else expr


def coarse(expr: Expr, dtype: DType) -> Expr:
    """The expression with functions that are as exact as 8 bits need, where it is stored in so many; and with their quotients
    by a step as their products with its reciprocal."""
    if dtype.bits != 8 or dtype is DType.BOOL:
        return expr
    for e in reversed(walk(expr)):  # quotients before what they are of
        x, step = e.args if e.fn == "ratio" and e.args[1].fn == "const" else (e, const(1.0))
        if x.fn in COARSE:
            half = const(0.5 / step.value)  # type: ignore[operator]
            return coarse(substitute(expr, {e: Expr(COARSE[x.fn], (x.args[0], half))}), dtype)
    return expr


# --- Constants as arguments ------------------------------------------------------------------------------------------

SCALARS = 32
"""Constants of one expression that are arguments, at most: a launch has 4 KiB of them before sm_70, and others need some."""

LIFTED = {DType.F32: ("add", "sub", "mul", "div", "ratio", *COARSE.values()), DType.I64: ("add", "sub"), DType.BOOL: ()}
"""Functions whose constant operands become arguments, by type: see `lifted`."""


def lifted(expr: Expr) -> tuple[Expr, tuple[I32 | F32, ...]]:
    """The expression with constants as arguments of the launch, and their values: models that differ by them share codes.

    A constant is lifted where its value makes no difference to the code: one operand of an instruction that takes it from the
    arguments' memory as well as from its own text. These stay in the text:

    - zero, infinity and NaN, and in products and quotients powers of two: the compiler leaves out or replaces the operation;
    - bounds of `min`, `max` and comparisons: a constant that is no NaN saves the test for one; bounds follow types, not data;
    - operands of all other functions, such as exponents and divisors of remainders, which decide what is computed;
    - 64-bit integers beyond 32 bits, floats beyond float32, and what is more than `SCALARS`.

    What sizes decide that are known late is always lifted.

    Equal parts of the expression get the same arguments, so that they are still computed once; equal constants of different
    parts get one each, as they may differ in another model.
    """
    lift = _Lift()
    return lift.visit(expr)[1], tuple(lift.args)


class _Lift:
    """See `lifted`."""

    def __init__(self) -> None:
        self.args: list[I32 | F32] = []
        self.made: dict[tuple[Any, ...], tuple[int, Expr]] = {}  # by what a part is made of: its number, and what it becomes
        self.seen: dict[int, tuple[int, Expr]] = {}  # by the identity of an `Expr`

    def visit(self, expr: Expr) -> tuple[int, Expr]:
        """The number of the part, the same for equal ones, and what it becomes."""
        if (found := self.seen.get(id(expr))) is None:
            parts = [self.visit(a) for a in expr.args]
            key = (expr.fn, expr.dtype, repr(expr.value), *(number for number, _ in parts))
            if key not in self.made:
                self.made[key] = len(self.made), self.of(expr, [part for _, part in parts])
            found = self.seen[id(expr)] = self.made[key]
        return found

    def of(self, expr: Expr, args: list[Expr]) -> Expr:
        if expr.fn == "cast" and expr.dtype is DType.F32 and args[0].fn == "const" and args[0].dtype is DType.I64:
            value = args[0].value or 0
            if not isinstance(value, Open) and abs(value) <= 1 << 24:  # as a float it is the same number
                return const(float(value))
        if all(a.fn == "const" and not isinstance(a.value, Open) for a in args):
            return replace(expr, args=tuple(args))
        return replace(expr, args=tuple(self.scalar(a) if _lifts(expr.fn, a) and len(self.args) < SCALARS else a for a in args))

    def scalar(self, leaf: Expr) -> Expr:
        value: Any = leaf.value
        self.args.append(F32(value) if leaf.dtype is DType.F32 else I32(value))
        return Expr("scalar", (), len(self.args) - 1, leaf.dtype)


def _lifts(fn: str, leaf: Expr) -> bool:
    """Whether an operand of `fn` is a constant that becomes an argument."""
    value: Any = leaf.value
    if leaf.fn == "const" and isinstance(value, Open):
        return True
    if leaf.fn != "const" or fn not in LIFTED[leaf.dtype] or not value:
        return False
    if leaf.dtype is DType.I64:
        return -(2**31) <= value < 2**31
    return 2.0**-126 <= abs(value) < 2.0**127 and (fn in ("add", "sub") or abs(math.frexp(value)[0]) != 0.5)


# --- Expressions as text ---------------------------------------------------------------------------------------------


class Lines:
    """Assignments, one operation each; the same operation is computed once."""

    def __init__(self, scalars: Sequence[str] = ()) -> None:
        """scalars: the names of the arguments that `lifted` gave."""
        self.scalars = scalars
        self.narrow: dict[
            str, str
        ] = {}  # names of int64 that hold no more than int32 or bytes do, and what converts them quickly
        self.lines: list[str] = []
        self.known: dict[str, str] = {}

    def let(self, text: str) -> str:
        """The name that holds the value of `text`."""
        if text not in self.known:
            self.known[text] = f"v{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """What is added within it is a block of its own, whose names mean nothing behind it."""
        mark, before = len(self.lines), dict(self.known)
        yield
        self.lines[mark:] = [head, *(f"    {line}" for line in self.lines[mark:])]
        new = {f"# {text}": name for text, name in self.known.items() if text not in before}
        self.known = before | new

    def value(self, expr: Expr, leaf: Callable[[Expr], str]) -> str:
        """The name that holds the expression's value; `leaf` gives that of an `acc` or a `load`."""
        match expr.fn:
            case "acc" | "load":
                return leaf(expr)
            case "const":
                return self.let(constant(expr.value, expr.dtype))
            case "scalar":
                assert isinstance(expr.value, int)
                return self.let(f"{COMPUTE[expr.dtype]}({self.scalars[expr.value]})")
            case "cast":
                (x,) = expr.args
                if expr.dtype is DType.I64 and x.fn == "saturate" and all(abs(e.value) < 2**31 for e in x.args[1:]):  # type: ignore[arg-type]
                    return self._rounded(x, leaf, "whole") or self.let(f"narrow_to_int({self.value(x, leaf)})")
                return self.cast(self.value(x, leaf), x.dtype, expr.dtype)
            case "ratio" | "saturate" if expr.dtype is DType.F32:
                if expr.fn == "saturate" and (name := self._rounded(expr, leaf, "rounded")):
                    return name
                given = [self.value(a, leaf) for a in expr.args]
                if expr.fn == "ratio":
                    given.append(self.let(f"f32(1) / {given[1]}"))
                    if is_sum(expr.args[0]):
                        return self.let(f"{given[0]} * {given[2]}")
                return self.let(f"{expr.fn}({', '.join(given)})")
        function = FUNCTIONS[expr.fn]
        args = [(self.value(a, leaf), a.dtype) for a in expr.args]
        body = ast.parse(function.body, mode="eval").body
        name, dtype = self._node(body, dict(zip(function.params, args, strict=True)), args[-1][1], _division(expr.fn))
        return self.cast(name, dtype, expr.dtype)

    def byte(self, expr: Expr, leaf: Callable[[Expr], str]) -> str:
        """The name that holds the value of an expression in int64, or something else whose lowest byte is the same."""
        if expr.fn == "cast" and expr.args[0].fn == "saturate" and (name := self._rounded(expr.args[0], leaf, "bits")):
            return name
        return self.value(expr, leaf)

    def unrounded(self, expr: Expr, leaf: Callable[[Expr], str], dtype: DType) -> str:
        """The name of a float32 that rounded to an integer and saturated to `dtype`, of a byte, is the value of an expression."""
        low, high = float(dtype.lowest), float(dtype.largest)
        x = expr.args[0] if expr.fn == "cast" and expr.args[0].fn == "saturate" else expr
        within = x is expr or all(low <= e.value <= high for e in x.args[1:])  # type: ignore[operator]
        if x.dtype is DType.F32 and is_whole(x) and within:
            if x.fn == "saturate" and x.args[0].fn == "round" and [e.value for e in x.args[1:]] == [low, high]:
                x = x.args[0]
            return self.value(x.args[0] if x.fn == "round" else x, leaf)
        stored = self.stored(self.value(expr, leaf), expr.dtype, dtype)
        bits = self.let(f"({stored} - i64({int(low)})) & i64(255)")  # modulo 256, as other stores have it
        return self.let(f"narrow_to_float({bits} + i64({int(low)}))")

    def _rounded(self, expr: Expr, leaf: Callable[[Expr], str], how: str) -> str | None:
        """A float rounded, moved by a zero point and saturated to bytes, as a float ("rounded"), int64 ("whole"), or an int64 of
        which the lowest byte counts ("bits"): rounding comes last, as the limits are integers. None where `expr` is something
        else."""
        x, *limits = expr.args
        x, zero = x.args if x.fn == "add" else (x, None)
        if zero == const(0.0):
            zero = None
        if x.fn != "round" or any(abs(e.value) > 1024 for e in limits) or (zero and zero.fn not in ("const", "scalar")):  # type: ignore[arg-type]
            return None
        ends = [self.value(e, leaf) for e in limits]
        by = self.value(zero, leaf) if zero else ""
        if zero:
            ends = [self.let(f"{e} - {by}") for e in ends]
        name = self.let(f"{how}_within({', '.join([self.value(x.args[0], leaf), *ends])})")
        if not zero:
            return name
        return self.let(f"{name} + {by}" if how == "rounded" else f"{name} + narrow_to_int({by})")

    def cast(self, name: str, source: DType, target: DType) -> str:
        if source is target:
            return name
        if target is DType.BOOL:
            return self.let(f"{name} != {COMPUTE[source]}(0)")
        if source is DType.BOOL:
            return self.let(f"select({name}, {COMPUTE[target]}(1), {COMPUTE[target]}(0))")
        if target is DType.F32:
            return self.let(f"{self.narrow.get(name, 'to_float')}({name})")
        return self.let(f"to_int({name})")

    def stored(self, name: str, source: DType, target: DType) -> str:
        """The value as `memory.store(target)` takes it, rounded as `reference.storage.to_storage` does."""
        if source is DType.F32 and target is DType.U64:
            return self.let(f"to_unsigned({name})")
        value = self.cast(name, source, DType.BOOL if target is DType.BOOL else target.compute)
        if target is DType.BOOL:
            return self.cast(value, DType.BOOL, DType.I64)
        if source is DType.F32 and not target.is_float and target is not DType.I64:
            bits = 8 * target.size
            low, high = (0, 2**bits - 1) if target.value.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            return self.let(f"maximum(minimum({value}, i64({high})), i64({low}))")
        return value

    def loaded(self, name: str, source: DType) -> str:
        """What `memory.load(source)` gave, in the compute type."""
        if not source.is_float and (source.size < 4 or source is DType.I32):
            self.narrow[name] = "byte_to_float" if source.size == 1 else "narrow_to_float"
        return self.let(f"{name} != i64(0)") if source is DType.BOOL else name

    def _node(self, node: ast.expr, env: dict[str, tuple[str, DType]], like: DType, division: str) -> tuple[str, DType]:
        match node:
            case ast.Name(id):
                return env[id]
            case ast.Constant(value):
                return self.let(constant(value, like)), like
            case ast.UnaryOp(op, operand):
                a, dtype = self._node(operand, env, like, division)
                if dtype is DType.BOOL:
                    return self.let(f"{a} == boolean(0)"), dtype
                return self.let(f"{'-' if isinstance(op, ast.USub) else '~'}{a}"), dtype
            case ast.BinOp(left, op, right):
                (a, dtype), (b, _) = self._node(left, env, like, division), self._node(right, env, like, division)
                return self.let(_binary(type(op), a, b, dtype, division)), dtype
            case ast.Compare(left, [op], [right]):
                (a, _), (b, _) = self._node(left, env, like, division), self._node(right, env, like, division)
                return self.let(f"{a} {_COMPARE[type(op)]} {b}"), DType.BOOL
            case ast.Call(ast.Name(name), args):
                given = [self._node(a, env, like, division) for a in args]
                quick = "quick_exp" if name == "exp" and division == "over" else name
                return self._builtin(quick, [g[0] for g in given], given[-1][1])
        raise AssertionError(f"a function's body has {ast.dump(node)}")

    def _builtin(self, name: str, args: list[str], dtype: DType) -> tuple[str, DType]:
        if name == "logical_not":
            return self.let(f"{args[0]} == boolean(0)"), DType.BOOL
        if dtype is not DType.F32:
            if name in ("floor", "ceil", "rint"):
                return args[0], dtype
            if name in ("isnan", "isinf"):
                return self.let("boolean(0)"), DType.BOOL
            if dtype is DType.BOOL and name in ("minimum", "maximum"):
                return self.let(_binary(ast.BitAnd if name == "minimum" else ast.BitOr, args[0], args[1], dtype)), dtype
        prefix = "" if dtype is DType.F32 or name in ("where", "minimum", "maximum") else "int_"
        call = self.let(f"{prefix}{'select' if name == 'where' else name}({', '.join(args)})")
        return call, DType.BOOL if name in ("isnan", "isinf") else dtype


_COMPARE: dict[type, str] = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
_BINARY: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}


def _division(fn: str) -> str:
    """What `a / b` is in a function, beside the operator."""
    return "over" if fn in RECIPROCAL else "quick_div" if fn in APPROXIMATE else ""


def _binary(op: type, a: str, b: str, dtype: DType, division: str = "") -> str:
    if dtype is DType.BOOL:  # without branches, and without a trip through integers
        logic: dict[type, str] = {
            ast.BitAnd: f"select({a}, {b}, {a})",
            ast.BitOr: f"select({a}, {a}, {b})",
            ast.BitXor: f"{a} != {b}",
        }
        return logic[op]
    if op is ast.Div and dtype is DType.I64:
        return f"int_trunc_div({a}, {b})"
    if op is ast.Div and division:
        return f"{division}({a}, {b})"
    return f"{a} {_BINARY[op]} {b}"


def constant(value: Any, dtype: DType) -> str:
    """A literal of a compute type."""
    if dtype is DType.F32:
        value = float(value)
        return f"f32({value!r})" if math.isfinite(value) else f"f32({'-' * (value < 0)}{abs(value)!s})"
    return f"i64({int(value)})" if dtype is DType.I64 else f"boolean({int(value)})"


class Parameters:
    """Names for the parameters of generated code, in the order in which they are taken; `name` has their number for {}."""

    def __init__(self, name: str = "a{}") -> None:
        self.name = name
        self.kinds: list[str] = []

    def take(self, kind: str = "int") -> str:
        """The next parameter: "int" (32 bits), "float" (float32) or "address"."""
        self.kinds.append(kind)
        return self.name.format(len(self.kinds) - 1)

    def scalars(self, expr: Expr) -> list[str]:
        """Those of an expression whose constants were `lifted`, after all that has been taken."""
        kinds = {e.value: "float" if e.dtype is DType.F32 else "int" for e in walk(expr) if e.fn == "scalar"}
        return [self.take(kinds[k]) for k in range(len(kinds))]

    def divider(self) -> tuple[str, str, str]:
        """A divisor and its reciprocal: see `divider`."""
        return self.take(), self.take(), self.take()

    @property
    def signature(self) -> dict[str, str]:
        """The parameters taken so far, as a `KernelText` has them."""
        return {self.name.format(i): kind for i, kind in enumerate(self.kinds)}


def tuple_of(parameters: Sequence[str]) -> str:
    """The text of a tuple of names, in pieces: Numba does not know the bytecode of calls and tuples of more than 30."""
    return " + ".join(f"({', '.join(parameters[i : i + 30])},)" for i in range(0, len(parameters), 30)) or "()"


def types_of(kinds: Sequence[str]) -> tuple[Any, ...]:
    """The Numba types of parameters of these kinds: see `text.KernelText`."""
    from tccompile.kernels.ptx.core import types

    table = {"address": types.int64, "map": types.uint64, "int": types.int32, "float": types.float32}
    return tuple(table[kind] for kind in kinds)


# --- Division by what is known at launch -------------------------------------------------------------------------------


def divider(d: Extent) -> tuple[Extent, Extent]:
    """(multiplier, shift) with n // d == n * multiplier >> shift for 0 <= n < 2**31 (Granlund and Montgomery, 1994).

    The multiplier is given as the signed number of its 32 bits, as a launch argument takes it.
    """
    shift = 31 + (d - 1).bit_length()
    multiplier = ceil_div(1 << shift, d)
    return (multiplier + (1 << 31)) % (1 << 32) - (1 << 31), shift


def split(out: Lines, number: str, dividers: list[tuple[str, str, str]]) -> list[str]:
    """The names of the digits of `number` in mixed radix, outermost first; `dividers` are those of all digits but the first."""
    digits = []
    for n, multiplier, shift in reversed(dividers):
        whole = out.let(f"divide({number}, {multiplier}, {shift})")
        digits.append(out.let(f"i32({number} - {whole} * {n})"))
        number = whole
    return [number, *reversed(digits)]


# --- Compiling -------------------------------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """What generated text may call. Imports Numba."""
    from tccompile.kernels import device_math
    from tccompile.kernels.ptx.core import cuda, f32, i32, u64

    return {
        **device_math.NAMES, "f32": f32, "i32": i32, "i64": device_math.i64, "u64": u64, "boolean": device_math.boolean,
        "cuda": cuda, "inf": math.inf, "nan": math.nan,
    }  # fmt: skip


def definition(name: str, params: Sequence[str], lines: Sequence[str]) -> str:
    """The text of a function."""
    return f"def {name}({', '.join(params)}):\n" + "".join(f"    {line}\n" for line in lines)


def execute(text: str, scope: dict[str, Any], name: str) -> Any:
    """The function `name` that `text` defines over `scope`."""
    scope = dict(scope)
    exec(compile(text, f"<generated {name}>", "exec"), scope)
    return scope[name]
