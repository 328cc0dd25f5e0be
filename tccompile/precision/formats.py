"""Program → Program: which tensors are stored in fp16, which times a power of two, and which in fp32.

Arithmetic is always fp32 (Tensor Cores multiply fp16 and accumulate fp32); the choice is what lies in memory. With "fp16"
every float tensor between the model's inputs and outputs is fp16, and so are the weights of Conv, Gemm, Mlp and Rnn, because
Tensor Cores read both; weights are rounded such that their sums stay, as what they multiply is often of one sign. Biases, scales
and interpolation weights are few, are read by fp32 code, and stay fp32. So do masks of Attention: -inf and the lowest float32
mean different things where they mask a whole row; and what decision trees compare with their thresholds. With "fp32" nothing
changes. With "bf16" it is bf16 in the place of fp16, but for positions: its range is fp32's, so that no values have to be seen.
"mixed" is "fp16" but for tensors whose values it would lose. From the values they take (ranges.py; estimate.py where nothing
can be run):

  within reach of overflow, or mostly subnormal   stored times a power of two, which is exact: the op that writes it and those
                                                  that read it multiply in fp32, in expressions they evaluate anyway
  too wide for fp16 at any scale, a product of    stored in fp32
  activations that needs one (growth.py), or
  read by an op that none can be taken out of
  computed with such that rounding it moves the   stored in fp32, and what it is computed from, as far as that counts
  result by much more, as in a difference         (sensitivity.py)
  an angle, a position, a whole number            stored in fp32, whatever was seen (positions.py)
  results of exp and the like                     stored in fp32, whatever was seen: other inputs may give far larger ones
  elements that a huge constant replaces          stored in fp32, whatever was seen: other inputs may have some to replace
  by an estimate, extremely large or small        stored in fp32, and multiplied in it: such estimates may be far off

What is compared for equality with fp32 values, as ArgMax compares elements with the largest, is fp32 in any mode; and so are
single numbers, which scale or shift whole tensors, as those of DynamicQuantizeLinear do, and whole numbers that 16 bits may not
reach, as sums of products of bytes are before they are scaled.

Nodes that the user names keep what they read and write in fp32 in any mode. Other convolutions and matrix products read a copy
of an fp32 tensor in fp16, scaled if need be: what is too small for it drowns in their sums in any case. Where it might not, as
weights are as far apart, or what is summed is not known or not all channels, they multiply in fp32, on CUDA cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType

import numpy as np

from tccompile.errors import UsageError
from tccompile.fuse.editor import tidy, without_dead_code
from tccompile.ir.expr import ACC, Epilogue, Expr, View, call, cast, const, identity_view, load, substitute, walk
from tccompile.ir.ops import (
    Attention,
    Conv,
    Custom,
    Gemm,
    Norm,
    Op,
    Places,
    Pointwise,
    Pool,
    Reduce,
    Resize,
    Scatter,
    Suppress,
    Trees,
)
from tccompile.ir.ops.carry import Carry
from tccompile.ir.program import Program
from tccompile.ir.tensor import Storage, Tensor, factor_text
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, transform
from tccompile.precision.channels import with_powers
from tccompile.precision.growth import MIXED, growth
from tccompile.precision.positions import LEAST, computed_of, divisors, positions, read_in_full, whole_numbers
from tccompile.precision.ranges import Spread, loss
from tccompile.refit.held import EVEN, LOSS, terms_of

HEADROOM = 2.0**13
"""Magnitudes from here on are beyond fp16: it ends at 65504, and other inputs than those seen may give 8 times as much."""

STEP = 8
"""Scales are powers of 2**STEP, so that neighbours have the same one and the factors cancel; a scaled tensor's largest
magnitude is at most 2**STEP, which leaves as much room above as a range of 2**22 below it."""

STEEP = ("exp", "expm1", "sinh", "cosh", "pow")
"""Functions that leave fp16's range soon after their argument leaves 1; powers with a constant exponent do not count."""

FAR = 16
"""The binary logarithm of the greatest scale that an estimate is believed for: fp16 loses what is 22 octaves below it."""

MANY = 32
"""Terms of a sum from which on its weights are rounded such that they add up: among few, each that goes the longer way counts."""

PARTS = 2.0**-4
"""How far a result may move when what it is computed from is rounded to fp16, for that to be a product made of parts, which are
some 30 times as exact."""

SMALL = 1 << 16
"""Elements up to which a constant gets a scaled copy, so that an expression needs no factor."""


def precision(
    program: Program,
    mode: str,
    ranges: Mapping[str, Spread] | None = None,
    fp32: Collection[str] = (),
    raised: Mapping[int, str] = MappingProxyType({}),
    bytes_count: bool = True,
) -> Program:
    """The program with the dtype and scale of each internal float tensor chosen; constants get both in their recipes.

    ranges  of tensors by the one that owns the storage, for "mixed"
    fp32    names of nodes, or patterns as for files, whose tensors are stored in fp32
    raised  ops, by position, whose tensors are, with the reason
    bytes_count  whether it counts which of two bytes a value is rounded to that lies halfway
    Raises UsageError for a name that no node has.
    """
    half, ranges = DType.BF16 if mode == "bf16" else DType.F16, ranges or {}
    if mode == "mixed" and any(values.apart is not None for values in ranges.values()):
        results = {owner: values for owner, values in ranges.items() if owner not in program.constants}
        program, ranges = with_powers(program, ranges, _measured(program, half, results).wide)
    choice = _measured(program, half, ranges)
    if mode == "mixed":
        choice.widen_steep()
        choice.widen_replaced()
    if mode in ("mixed", "bf16"):
        choice.widen_positions(bytes_count)
    if mode == "fp16":
        choice.widen_whole()
    choice.widen_gathered()
    for pattern in fp32:
        choice.name(pattern)
    for i, op in enumerate(program.ops):
        if isinstance(op, Custom) and (op.floats == "float32" or mode == "bf16"):
            choice.keep(i, f"fp32: {op.operator} takes it so")
        elif isinstance(op, Carry) and op.role != "pick":  # rounded again in each iteration, it would drift
            choice.keep(i, f"fp32: {op.loop!r} carries it")
    for i, reason in raised.items():
        choice.keep(i, reason)
    choice.read_in_full()
    if mode == "fp32":
        return _with_products_in_full(program, choice)
    choice.widen_equal()
    choice.close()
    program = _with_copies(program, choice)
    program = _scaled(program, {name: s.scale for name, s in choice.storage.items() if s.scale != 1.0})
    program = with_storage(program, lambda t: choice.dtype(t, program.constants))
    return without_dead_code(_with_products_in_full(replace(program, storage=choice.storage), choice))


def _measured(program: Program, half: DType, ranges: Mapping[str, Spread]) -> _Choice:
    """What is chosen by the values that tensors take."""
    choice = _Choice(program, half)
    for owner, values in ranges.items():
        if choice.is_free(owner):
            choice.measure(owner, values)
    return choice


def _with_products_in_full(program: Program, choice: _Choice) -> Program:
    """The program with marks on the results of products of float32 that are not to be made of parts."""
    storage = dict(program.storage)
    for op in program.ops:
        y = program.tensors[op.y].storage
        why = choice.in_full.get(op.nodes[0])
        floats = program.tensors[op.y].dtype.is_float  # for bytes parts are as good
        if why and floats and isinstance(op, Conv | Gemm) and all(program.tensors[n].dtype is DType.F32 for n in op.operands):
            told = storage.get(y, Storage(why if why.startswith("fp32") else f"fp32: {why}"))
            storage[y] = replace(told, in_full=True)
    return replace(program, storage=storage)


def with_storage(program: Program, storage: Callable[[Tensor], DType]) -> Program:
    """The program with each tensor stored as `storage` says; a view and its base must get the same answer."""
    tensors = {name: replace(t, dtype=storage(t)) for name, t in program.tensors.items()}
    terms = {name: terms_of(op, program.tensors[name]) for op in program.ops for name in op.multiplied}
    constants = dict(program.constants)
    for name, recipe in program.constants.items():
        t = tensors[name]
        if t.dtype is DType.F16 and math.prod(t.shape[t.rank - terms.get(name, 0) :]) >= MANY:
            constants[name] = transform("rounded", recipe, terms=terms[name])
        elif t.dtype is not program.tensors[name].dtype and t.dtype is not DType.BF16:  # which NumPy does not have
            constants[name] = transform("cast", recipe, dtype=t.dtype.value)
    return replace(program, tensors=tensors, constants=constants)


def storage_note(program: Program, mode: str) -> str:
    """How floats are stored, in a line."""
    scaled = sum(s.scale != 1.0 for s in program.storage.values())
    note = f"floats between inputs and outputs are stored in {'fp16' if mode == 'mixed' else mode}"
    if not program.storage or mode == "fp32":
        return note
    return f"{note}, but for {len(program.storage) - scaled} tensors in fp32 and {scaled} scaled: --explain says why"


# --- The choice ------------------------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """What is chosen for each tensor that owns storage; `half` as it is for all others between inputs and outputs.

    half    fp16 or bf16
    wide    tensors in fp32; of those, fp16 would lose the values of `lost`, which has the scale at which it keeps the largest
    unsure  of those, tensors whose size is a far estimate, so that no scale is sure to keep them
    exact   ops that read their operands in fp32, by position
    even    constants whose norms for each input channel are of about one size
    sensitive  nodes of products with an operand that they must read in fp32
    in_full  nodes of products that, if of float32, are not to be made of parts, with the reason
    """

    program: Program
    half: DType
    storage: dict[str, Storage] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    exact: set[int] = field(default_factory=set)
    even: set[str] = field(default_factory=set)
    sensitive: set[tuple[str, str]] = field(default_factory=set)
    in_full: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.program
        self.operands = {name for op in p.ops for name in op.multiplied}
        self.outside = {*p.inputs, *p.outputs}
        self.masks = {p.tensors[op.mask].storage for op in p.ops if isinstance(op, Attention) and op.mask is not None}
        self.masks |= {p.tensors[op.x].storage for op in p.ops if isinstance(op, Trees | Places)}
        self.masks |= {p.tensors[name].storage for op in p.ops if isinstance(op, Suppress) for name in (op.boxes, op.scores)}
        multiply = {name for op in p.ops if op.multiplies for name in (*op.operands, op.y)}
        numbers = {name for name, t in p.tensors.items() if t.base is None and t.size == 1}
        self.numbers = numbers - {p.tensors[name].storage for name in multiply}
        self.divisors = divisors(p)
        self.growth = growth(p)
        self.of_inputs = computed_of(p, p.inputs)
        self.readers: dict[str, list[Op]] = {}
        for op in p.ops:
            for name in op.inputs:
                self.readers.setdefault(p.tensors[name].storage, []).append(op)

    def is_free(self, owner: str) -> bool:
        """Whether its storage is ours to choose: no model input or output, no mask, and no constant that fp32 code reads."""
        if (
            owner not in self.program.tensors
            or owner in self.outside | self.masks
            or self.program.tensors[owner].dtype is not DType.F32
        ):
            return False
        return owner not in self.program.constants or owner in self.operands

    def dtype(self, t: Tensor, constants: Collection[str]) -> DType:
        stays = t.dtype is not DType.F32 or t.storage in self.outside | self.masks | self.numbers | self.wide
        return t.dtype if stays or (t.name in constants and t.name not in self.operands) else self.half

    def name(self, pattern: str) -> None:
        """Keep the tensors of the nodes that the user means in fp32."""
        found = [i for i, op in enumerate(self.program.ops) if any(fnmatchcase(n, pattern) for n in op.nodes)]
        if not found:
            raise UsageError(f"--fp32 {pattern}: no node has this name; tccompile --explain lists them")
        for i in found:
            self.keep(i, f"fp32 as asked for {self.program.ops[i].nodes[0]!r}")

    def keep(self, i: int, reason: str) -> None:
        """Keep what an op reads and writes in fp32."""
        op = self.program.ops[i]
        self.exact.add(i)
        self.in_full[op.nodes[0]] = reason
        for owner in dict.fromkeys(self.program.tensors[name].storage for name in (*op.inputs, op.y)):
            if self.is_free(owner) and owner not in self.wide:
                self._widen(owner, reason)

    def _widen(self, owner: str, reason: str) -> None:
        if owner in self.storage:
            self.lost[owner] = self.storage[owner].scale
        self.storage[owner] = Storage(reason)
        self.wide.add(owner)

    def measure(self, owner: str, values: Spread) -> None:
        """Choose by the values that the tensor takes."""
        if values.spread <= EVEN:
            self.even.add(owner)
        v = values.magnitudes
        if owner in self.divisors and v.size and v.min() < LEAST:
            self._widen_with(owner, f"fp32: it divides, and has values of {v.min():.1e}")
        fits = values.largest < HEADROOM or values.bound <= DType.F16.largest
        need = values.need
        if need is not None and any(need.node in op.nodes for op in self.readers.get(owner, ())):  # of what is fused here too
            self._widen_with(owner, f"fp32: rounded to fp16, it would move what {need.node!r} makes of it by {need.moved:.0e}")
            if need.exact:
                self.sensitive.add((need.node, owner))
            if need.moved > PARTS:
                writers = (op for op in self.program.ops if self.program.tensors[op.y].storage == owner)
                self.in_full |= {op.nodes[0]: f"{need.node!r} depends on its last digits" for op in writers}
        if fits and values.loss <= LOSS:
            return
        what = f"values of {_middle(v):.1e}" if fits else f"values up to {values.largest:.1e}"
        if values.estimated:
            what = f"{what}, by an estimate from the weights"
        most = values.bound if math.isfinite(values.bound) and not values.estimated else values.largest
        power = -STEP * math.ceil((math.frexp(most)[1] - STEP) / STEP)
        scale = 2.0 ** max(min(power, 48), -120)
        scaled, largest = v * scale, most * scale
        if values.estimated and abs(power) > FAR:
            self.unsure.add(owner)
        ends = largest > 2.0**STEP or float(np.float16(largest)) / scale > DType.F32.largest  # rounded up
        if owner in self.wide:
            self.lost[owner] = scale
        elif ((scaled < LEAST) & (v >= LEAST)).mean() > 1 / 64 or loss(scaled) > LOSS or ends:
            self._widen(owner, f"fp32: {what}, most around {_middle(v):.1e}; fp16 is not as wide at any scale")
            self.lost[owner] = scale
        elif self.growth.get(owner, 0.0) >= MIXED:
            self._widen(owner, f"fp32: {what}; a product of activations: other inputs make it far smaller or larger")
            self.lost[owner] = scale
        elif owner in self.of_inputs:
            self._widen(owner, f"fp32: {what}; computed of inputs alone: others make it far smaller or larger")
            self.lost[owner] = scale
        elif owner in self.unsure:
            self._widen(owner, f"fp32: {what}, which may be far off")
            self.lost[owner] = scale
        elif blocker := self._blocker(owner):
            self._widen(owner, f"fp32: {what}, and {type(blocker).__name__} {blocker.nodes[0]!r} takes no scale")
            self.lost[owner] = scale
        else:
            self.storage[owner] = Storage(f"fp16 times {factor_text(scale)}: {what}", scale)

    def widen_steep(self) -> None:
        """fp32 for results of functions in which a range that was seen says little of others, their sums and copies."""
        steep: dict[str, str] = {}
        for op in self.program.ops:
            owner, e = self.program.tensors[op.y].storage, op.epilogue.expr
            while e.fn in ("mul", "add", "sub", "div", "cast") and e.args[-1].fn in ("const", "load"):
                e = e.args[0]
            of = (steep[o] for name in op.inputs if (o := self.program.tensors[name].storage) in steep)
            if e.fn in STEEP and not (e.fn == "pow" and e.args[1].fn == "const"):
                why = f"{e.fn} of {op.nodes[0]!r}"
            elif e.fn in ("acc", "load") and isinstance(op, Pointwise | Reduce | Pool):
                why = next(of, "")
            else:
                why = ""
            if why and self.is_free(owner):
                steep[owner] = why
                if owner not in self.storage:
                    self._widen(owner, f"fp32: {why}, which other inputs make far larger")

    def widen_replaced(self) -> None:
        """fp32 for results that have a constant beyond fp16 in the place of some elements, and their copies: -inf is another
        number where it is an output, and where it fills a whole row of a softmax."""
        replaced: dict[str, str] = {}
        for op in self.program.ops:
            owner = self.program.tensors[op.y].storage
            if any(_may_be_huge(e) for e in _values(op.epilogue.expr)):
                why = f"{op.nodes[-1]!r} puts numbers beyond fp16 in the place of others"
            else:
                of = (replaced[o] for name in op.inputs if (o := self.program.tensors[name].storage) in replaced)
                why = next(of, "") if _selects(op) else ""
            if why and self.is_free(owner):
                replaced[owner] = why
                if owner not in self.wide:
                    self._widen(owner, f"fp32: {why}")

    def widen_equal(self) -> None:
        """fp32 for what is compared for equality with fp32, and for what it is a copy or an element of."""
        tensors = self.program.tensors
        for op in self.program.ops:
            for e in walk(op.epilogue.expr):
                if e.fn != "equal" or any(a.fn != "load" or a.dtype is not DType.F32 for a in e.args):
                    continue
                compared = [tensors[op.views[a.value].tensor] for a in e.args]  # type: ignore[index]
                if any(self.dtype(t, self.program.constants) is DType.F32 for t in compared):
                    for t in compared:
                        self._widen_with(t.storage, f"fp32: {op.nodes[0]!r} compares it with fp32")

    def _widen_with(self, owner: str, reason: str) -> None:
        """fp32 for a tensor, and for what it is a copy or elements of."""
        tensors, rest = self.program.tensors, [owner]
        while rest:
            owner = rest.pop()
            if self.is_free(owner) and owner not in self.wide:
                self._widen(owner, reason)
                for op in self.program.ops:
                    if tensors[op.y].storage == owner and _selects(op):
                        rest += [tensors[name].storage for name in op.inputs]

    def _blocker(self, owner: str) -> Op | None:
        """An op that means something else, by more than a factor, when the tensor is scaled."""
        # Views are no matter: they are scaled where they are read.
        for op in self.readers.get(owner, ()):
            mine = any(self.program.tensors[name].storage == owner for name in op.operands)
            if mine and not isinstance(op, Conv | Gemm | Attention | Pool | Reduce | Norm | Resize):
                return op
        plain = (op for op in self.program.ops if not op.takes_epilogue)
        return next((op for op in plain if self.program.tensors[op.y].storage == owner), None)

    def widen_positions(self, bytes_count: bool) -> None:
        """fp32 for what is read for its angle or as an integer, and for whole numbers: see `positions`."""
        found = positions(self.program, 2.0**self.half.digits, bytes_count)
        self.exact |= found.exact
        for owner, reason in found.wide.items():
            if owner not in self.wide:
                self._widen_with(owner, reason)

    def widen_whole(self) -> None:
        """fp32 for whole numbers that fp16 may not reach, as sums of products of bytes do before they are scaled."""
        most = self.half.largest
        for name, bound in whole_numbers(self.program).items():
            if bound > most:
                self._widen_with(self.program.tensors[name].storage, f"fp32: whole numbers that may exceed {most:.0f}")

    def widen_gathered(self) -> None:
        """fp32 for what updates are added or multiplied to one after the other: in fp16, a sum of ones ends at 2048."""
        for op in self.program.ops:
            if isinstance(op, Scatter) and op.combine in ("add", "mul"):
                self._widen_with(self.program.tensors[op.y].storage, f"fp32: {op.nodes[0]!r} gathers sums or products there")

    def read_in_full(self) -> None:
        """No parts for products that are read for their angle or as integers."""
        self.in_full |= {self.program.ops[i].nodes[0]: why for i, why in read_in_full(self.program).items()}

    def close(self) -> None:
        """What must multiply fp32 has fp32 weights too."""
        for i, op in enumerate(self.program.ops):
            if not isinstance(op, Conv | Gemm) or not all(self.program.tensors[n].dtype.is_float for n in op.operands):
                continue
            owners = [self.program.tensors[n].storage for n in op.operands]
            far = any(o in self.lost for o in owners) and (op.operands[1] not in self.even or getattr(op, "groups", 1) > 1)
            far = far or any(o in self.unsure for o in owners)
            loose = [o for o in owners if self.growth.get(o, 0.0) >= MIXED or o in self.of_inputs]
            far = far or any(not 2.0**-STEP <= self.lost.get(o, 1.0) <= 2.0**STEP for o in loose)
            if i not in self.exact and not far and not any((op.nodes[0], o) in self.sensitive for o in owners):
                continue
            self.exact.add(i)
            for name in op.operands:
                if name in self.program.constants and name not in self.wide:
                    self._widen(name, f"fp32: weights of {op.nodes[0]!r}, which reads fp32")


def _selects(op: Op) -> bool:
    """Whether what the op writes are elements of what it reads."""
    match op:
        case Reduce(combine=combine):
            pre = op.pre.args[2] if op.pre.fn == "where" and op.pre.args[1].fn == "const" else op.pre  # NaN is passed over
            return combine in ("min", "max") and pre == op.epilogue.expr == ACC
        case Pool(kind=kind):
            return kind == "max" and op.epilogue.expr == ACC
    return isinstance(op, Pointwise) and op.epilogue.expr == load(0)


def _values(e: Expr) -> Iterator[Expr]:
    """An expression, and those that its result may be the very value of, or a sum, a product or a copy of."""
    yield e
    if e.fn in ("add", "sub", "mul", "div", "cast", "neg", "min", "max", "where"):
        for a in e.args[e.fn == "where" :]:
            yield from _values(a)


def _may_be_huge(e: Expr) -> bool:
    """Whether the expression puts a finite constant that fp16 does not hold in the place of elements."""
    huge = (abs(a.value) for a in e.args[1:] if a.fn == "const" and isinstance(a.value, float) and math.isfinite(a.value))
    return e.fn == "where" and e.dtype is DType.F32 and any(value > DType.F16.largest for value in huge)


def _middle(v: np.ndarray) -> float:
    return float(np.median(v.astype(np.float64))) if v.size else 0.0  # the sum of two float32 may be too large for one


# --- Copies for Tensor Cores -----------------------------------------------------------------------------------------


def _with_copies(program: Program, choice: _Choice) -> Program:
    """Copies in 16 bits of fp32 tensors for those ops on Tensor Cores that need not read fp32."""
    tensors, constants = dict(program.tensors), dict(program.constants)
    kind = "bf16" if choice.half is DType.BF16 else "fp16"
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        if isinstance(op, Conv | Gemm | Attention) and i not in choice.exact:
            for name in op.operands:
                t = tensors[name]
                if t.storage not in choice.wide or (isinstance(op, Attention) and t.storage in choice.lost):
                    continue
                short = replace(t, name=f"{name}.{kind}", base=None, offset=0)
                if short.name not in tensors:
                    tensors[short.name] = short
                    if (scale := choice.lost.get(t.storage, 1.0)) != 1.0:
                        reason = f"a copy in {kind} times {factor_text(scale)} for Tensor Cores"
                        choice.storage[short.name] = Storage(reason, scale)
                    if name in constants:
                        constants[short.name] = constants[name]
                        choice.operands.add(short.name)
                    else:
                        copy = Epilogue(load(0), (identity_view(name, t.rank),))
                        ops.append(Pointwise(nodes=op.nodes[:1], y=short.name, epilogue=copy))
                op = op.renamed({name: short.name})
        ops.append(op)
    return replace(program, tensors=tensors, constants=constants, ops=tuple(ops))


# --- Scales ----------------------------------------------------------------------------------------------------------


def _scaled(program: Program, scales: Mapping[str, float]) -> Program:
    """The program with each tensor's memory holding its values times a scale, given by the tensor that owns the storage."""
    if not scales:
        return program
    scaler = _Scaler(program, scales)
    ops = tuple(map(scaler.op, program.ops))
    for name in program.constants:
        if name in scales:
            scaler.constants[name] = _times_constant(program, name, scales[name])
    return without_dead_code(replace(program, tensors=scaler.tensors, constants=scaler.constants, ops=ops))


def _times_constant(program: Program, name: str, factor: float) -> Recipe:
    return transform("mul", program.constants[name], Literal(np.array(factor, np.float32)))


class _Scaler:
    """Moves the scales of the tensors that an op reads and writes into its expressions."""

    def __init__(self, program: Program, scales: Mapping[str, float]):
        self.program, self.scales = program, scales
        self.tensors, self.constants = dict(program.tensors), dict(program.constants)
        self.loads: list[View] = []

    def scale(self, name: str) -> float:
        return self.scales.get(self.program.tensors[name].storage, 1.0)

    def op(self, op: Op) -> Op:
        own, y = [self.scale(name) for name in op.operands], self.scale(op.y)
        if all(scale == 1.0 for scale in (*own, y, *(self.scale(v.tensor) for v in op.views))):
            return op
        self.loads = [replace(v, fill=v.fill * self.scale(v.tensor)) for v in op.views]
        acc = 1.0 / math.prod(own)
        if isinstance(op, Attention):
            q, k, v, *_ = own
            op, acc = replace(op, scale=op.scale / (q * k)), 1.0 / v
        if isinstance(op, Norm) and acc != 1.0:
            op, acc = replace(op, eps=op.eps * own[0] ** 2), 1.0  # (x - mean) / sqrt(variance + eps) with all of it scaled
        if isinstance(op, Reduce) and acc != 1.0 and (op.pre != ACC or op.combine == "mul"):
            op, acc = replace(op, pre=substitute(op.pre, {ACC: self.times(ACC, acc)})), 1.0
        leaf: dict[Expr, Expr] = {}
        for x in walk(op.epilogue.expr):
            if x.fn == "acc" and acc != 1.0:
                leaf[x] = self.times(x, acc)
            elif x.fn == "load" and (scale := self.scale(op.views[x.value].tensor)) != 1.0:  # type: ignore[index]
                leaf[x] = call("mul", x, 1.0 / scale)
        expr = substitute(op.epilogue.expr, leaf)
        expr = self.times(cast(expr, DType.F32), y) if y != 1.0 else expr
        return replace(op, epilogue=replace(tidy(expr, self.loads), shuffle=op.epilogue.shuffle))

    def times(self, x: Expr, factor: float) -> Expr:
        """x * factor"""
        taken = self._taken(x, factor)
        return call("mul", x, factor) if taken is None else taken

    def _taken(self, x: Expr, factor: float) -> Expr | None:
        """x * factor without one operation more, or None: the factor goes where another is, or into a constant."""

        def into(*places: int) -> Expr | None:
            new = {i: self._taken(x.args[i], factor) for i in places}
            if any(a is None for a in new.values()):
                return None
            return replace(x, args=tuple(new.get(i) or a for i, a in enumerate(x.args)))

        match x.fn:
            case "const":
                return const(x.value * factor)  # type: ignore[operator]
            case "load":
                return self._constant(self.loads[x.value], factor)  # type: ignore[index]
            case "mul":
                for i in (0, 1):
                    if x.args[1 - i].fn == "const" and x.args[1 - i].value * factor == 1.0:  # type: ignore[operator]
                        return x.args[i]
                return into(1) or into(0)
            case "relu" | "leaky_relu" | "neg" | "abs" | "div":
                return into(0)
            case "add" | "sub" | "min" | "max":
                return into(0, 1)
            case "where":
                return into(1, 2)
        return None

    def _constant(self, view: View, factor: float) -> Expr | None:
        """What the view reads of a constant times `factor`, from a constant of its own."""
        t = self.tensors[view.tensor]
        ours = view.tensor in self.program.constants and self.scale(view.tensor) == 1.0
        if not ours or t.dtype is not DType.F32 or t.size > SMALL:
            return None
        name = f"{view.tensor}*{factor_text(factor)}"
        if name not in self.constants:
            self.tensors[name] = replace(t, name=name)
            self.constants[name] = _times_constant(self.program, view.tensor, factor)
        self.loads.append(replace(view, tensor=name, fill=view.fill * factor))
        return load(len(self.loads) - 1)
