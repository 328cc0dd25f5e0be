"""What multiplies the stages of a ring and holds the sums: wgmma, with the sums in registers."""

from __future__ import annotations

from typing import Any

from tccompile.kernels.parts.operands import STEP, Operand, Places
from tccompile.kernels.parts.part import Part
from tccompile.kernels.parts.promotion import Promotion
from tccompile.kernels.parts.ring import Ring
from tccompile.kernels.ptx import hopper as hw
from tccompile.kernels.ptx import mma
from tccompile.kernels.ptx.atoms import group_atom
from tccompile.kernels.ptx.core import cuda, i32, inline, u32, u64

OFFSETS = 0x3FFFF
"""The bits of a shared address that say where in its block it lies; those above say which block of the cluster."""


class Accumulator(Part):
    """The sums of 64 rows of a warpgroup by all columns, in fp32 or of integers in int32: one tuple in each thread's registers.

    zero()                                   the tuple before the first stage is multiplied
    operands(base, warp)                     where the operands of a warp's warpgroup lie in the ring's first stage
    multiply(acc, operands, slot, k, first)  the sums with those of the ring's stage `slot`, multiplied from here on: stage k of a
                                             tile's, which replaces what `acc` holds if it is the `first` one
    wait_last(), wait()                      until all stages but the one begun last have been multiplied, or all
    at_once                                  whether a stage has been multiplied when `multiply` returns
    multiply_short(operands, slot)           the sums of a stage of which only the last `short` bytes of K count, as `multiply`
    sparse                                   whether the left operand is

    short    if not 0: of an operand that is not sparse
    places   of a left operand that is sparse, which a thread has in registers while it is multiplied. Then there are instead
             load(operands, slot)                            those of a stage
             multiply(acc, operands, slot, k, first, own)    as above; `own`: the stage's
             wait_last(before, k), wait(before, k)           as above; `before`: those of a stage that is kept until then
             none()                                          in place of some that are kept
    blocks   of 64 rows each that a warpgroup has one after the other, of such an operand: there are as many tuples then, in one
    """

    at_once = False
    load: Any
    none: Any

    def __init__(
        self, left: Operand, right: Operand, ring: Ring, places: Places | None = None, blocks: int = 1, short: int = 0
    ) -> None:
        super().__init__()
        of_right = right.steps[::2] if places else right.steps  # twice as much of K as there is of a sparse left operand
        steps, kinds = tuple(zip(left.steps, of_right, strict=True)), (left.kind, right.kind)
        sums, words = group_atom(*kinds).acc, places.words if places else 0
        multiplied = hw.multiply(right.extent, steps, (left.k_major, right.k_major), kinds, self.at_once and not words, words)
        left_half, right_half = hw.descriptor(*left.layout), hw.descriptor(*right.layout)
        left_at, group_bytes, right_at = ring.first + left.at, blocks * left.group_bytes, ring.first + right.at
        stage_units = ring.stage_bytes >> 4

        @inline
        def operands(base, warp):
            a = left_half | u64((base + left_at + (warp >> 2) * group_bytes & OFFSETS) >> 4)
            b = right_half | u64((base + right_at & OFFSETS) >> 4)
            return a, b

        @inline
        def multiply(acc, operands, slot, k, first):
            at = u64(slot * stage_units)
            return multiplied(acc, operands[0] + at, operands[1] + at, i32(k - first))

        self.zero, self.operands, self.multiply = hw.accumulators(right.extent, sums), operands, multiply
        self.sparse = places is not None
        self.wait_last, self.wait = hw.wgmma_wait_last, hw.wgmma_wait_all
        if short:
            kind, zero = (left.k_major, right.k_major), self.zero
            of_short = hw.multiply(right.extent, steps[-short // STEP :], kind, kinds, self.at_once)

            @inline
            def multiply_short(operands, slot):
                at = u64(slot * stage_units)
                return of_short(zero(), operands[0] + at, operands[1] + at, i32(0))

            self.multiply_short = multiply_short
        if places:
            self._read_places(places, operands, multiplied, ring, blocks)
            if blocks > 1:
                self._multiply_blocks(left.group_bytes >> 4, places)

    def _multiply_blocks(self, units: int, places: Places) -> None:
        """Take two blocks of a sparse left operand, `units` of 16 bytes apart."""
        one, load, none, zero = self.multiply, self.load, self.none, self.zero
        next_places = places.group_bytes

        @inline
        def zeros():
            return zero(), zero()

        @inline
        def loads(operands, slot):
            a, b, at = operands
            return load(operands, slot), load((a, b, u32(at + next_places)), slot)

        @inline
        def multiply(acc, operands, slot, k, first, own):
            a, b, at = operands
            further = u64(a + u64(units)), b, at
            return one(acc[0], operands, slot, k, first, own[0]), one(acc[1], further, slot, k, first, own[1])

        @inline
        def nones():
            return none(), none()

        self.zero, self.load, self.multiply, self.none = zeros, loads, multiply, nones
        self.wait_last, self.wait = (hw.wgmma_wait_kept_twice(pending, places.words) for pending in (2, 0))

    def _read_places(self, places: Places, dense: Any, multiplied: Any, ring: Ring, blocks: int) -> None:
        """Take the places of a sparse left operand from shared memory."""
        words = places.words
        at, group_bytes, own_bytes = ring.first + places.at, blocks * places.group_bytes, 4 * words
        load_words, stage_bytes, stage_units = hw.load_places(words), ring.stage_bytes, ring.stage_bytes >> 4

        @inline
        def operands(base, warp):
            a, b = dense(base, warp)
            return a, b, u32(base + at + (warp >> 2) * group_bytes + (i32(cuda.threadIdx.x) & 127) * own_bytes)

        @inline
        def load(operands, slot):
            return load_words(u32(operands[2] + slot * stage_bytes))

        @inline
        def multiply(acc, operands, slot, k, first, own):
            of_stage = u64(slot * stage_units)
            return multiplied(acc, operands[0] + of_stage, operands[1] + of_stage, i32(k - first), own)

        @inline
        def no_word():
            return (u32(0),)

        @inline
        def no_words():
            return u32(0), u32(0)

        self.operands, self.load, self.multiply, self.none = operands, load, multiply, no_word if words == 1 else no_words
        self.wait_last, self.wait = hw.wgmma_wait_kept(1, words), hw.wgmma_wait_kept(0, words)


class Promoted(Accumulator):
    """The same for products whose sums are rough (`Atom.rough`): a stage's are made by themselves, and added to the others in
    fp32. That takes twice the registers. While a warpgroup waits for its products and adds them up, another one multiplies.

    With a sparse left operand, two stages have as many products as one, and whoever multiplies asks for
    nothing()        sums before the first of two stages, as `zero` of all
    add(acc, part)   those of two stages with the others

    in_pairs  whether the sums of two stages are made at once, of an operand that is not sparse. Whoever multiplies asks for
    begin(operands, slot)        the sums of a stage, which are made from here on
    end(acc, part, operands, slot)  those with the sums of another stage, added to the others
    """

    at_once = True

    def __init__(
        self,
        left: Operand,
        right: Operand,
        ring: Ring,
        places: Places | None = None,
        blocks: int = 1,
        short: int = 0,
        in_pairs: bool = False,
    ) -> None:
        super().__init__(left, right, ring, places, blocks, short)
        nothing, of_stage, add = self.zero, self.multiply, hw.add(right.extent)
        self.zero, self.nothing, self.add, self.in_pairs = mma.zeros(right.extent // 2), nothing, add, in_pairs
        if places:
            return

        @inline
        def multiply(acc, operands, slot, k, first):
            return add(acc, of_stage(nothing(), operands, slot, first, first))

        @inline
        def there():
            pass

        self.multiply, self.wait_last, self.wait = multiply, there, there
        if in_pairs:
            begun = Accumulator(left, right, ring).multiply

            @inline
            def begin(operands, slot):
                return begun(nothing(), operands, slot, i32(0), i32(0))

            @inline
            def end(acc, part, operands, slot):
                return add(acc, of_stage(part, operands, slot, i32(1), i32(0)))

            self.begin, self.end = begin, end


class Overlapped(Accumulator):
    """The same where a stage's sums are added to the others while the next one's are made, in three times the registers: for a
    warpgroup that others leave alone. Whoever multiplies asks for

    begin(operands, slot)   the sums of a stage, which are made from here on
    add_before(acc, part)   those of the stage before the one begun last, with the others
    add_last(acc, part)     those of the stage begun last
    """

    def __init__(self, left: Operand, right: Operand, ring: Ring, short: int = 0) -> None:
        super().__init__(left, right, ring, short=short)
        nothing, of_stage = self.zero, self.multiply

        @inline
        def begin(operands, slot):
            return of_stage(nothing(), operands, slot, i32(0), i32(0))

        self.zero, self.begin = mma.zeros(right.extent // 2), begin
        self.add_before, self.add_last = hw.add_made(right.extent, 1), hw.add_made(right.extent, 0)


def accumulator(
    left: Operand,
    right: Operand,
    ring: Ring,
    places: Places | None = None,
    blocks: int = 1,
    short: int = 0,
    promotion: Promotion | None = None,
) -> Accumulator:
    """What holds the sums of two operands' product; `places`, `blocks`: of a left one that is sparse; `promotion`: when sums that
    are rough are added to the others; `short`: bytes at the end of a row that count in the first stage, if not all."""
    if promotion is Promotion.MEANWHILE:
        return Overlapped(left, right, ring, short)
    if promotion:
        return Promoted(left, right, ring, places, blocks, short, promotion is Promotion.OF_PAIRS)
    return Accumulator(left, right, ring, places, blocks, short)


class BlocksAccumulator(Part):
    """The sums of several blocks of 64 rows of a warpgroup, each by all columns, in fp32 or of integers in int32: a tuple for
    each block, of which each thread has its part in registers.

    columns      of the product; kinds, types of the operands' elements
    descriptors  the constant parts of those of both operands, which are K-major: see `hopper.descriptor`
    places       bytes from the left operand's address to the first row of each block
    steps        for each wgmma, the bytes from the start of both operands to its 32 bytes of K

    zero()                             the tuples before anything is multiplied
    multiply(acc, left, right, more)   the sums with the product of what lies at these addresses, multiplied from here on; if
                                       `more` is 0 it replaces what `acc` holds
    wait_before(), wait()              until all products but the one begun last have been made, or all
    """

    def __init__(
        self,
        columns: int,
        descriptors: tuple[int, int],
        places: tuple[int, ...],
        steps: tuple[tuple[int, int], ...],
        kinds: tuple[str, str] = ("f16", "f16"),
    ) -> None:
        super().__init__()
        left_half, right_half = descriptors
        multiplied = _by_blocks(hw.multiply(columns, steps, (True, True), kinds), places)

        @inline
        def multiply(acc, left, right, more):
            return multiplied(acc, hw.operand(u64(left_half), left), hw.operand(u64(right_half), right), more)

        self.zero, self.multiply = _zeros(hw.accumulators(columns, group_atom(*kinds).acc), len(places)), multiply
        self.wait_before, self.wait = hw.wgmma_wait(len(places)), hw.wgmma_wait_all


class PromotedBlocks(Part):
    """The same for products whose sums are rough (`Atom.rough`): those of some taps are made by themselves, and added to the
    others in fp32. While a warpgroup waits for its products and adds them up, another one multiplies.

    steps  of these taps
    times  how often there are such, along and down
    apart  bytes of the left operand from some taps to the next along, and to the first of those below; and of the right one
    pairs  whether the sums of two such are made at once; of an odd number of these, the first are by themselves
    """

    def __init__(
        self,
        columns: int,
        descriptors: tuple[int, int],
        places: tuple[int, ...],
        steps: tuple[tuple[int, int], ...],
        kinds: tuple[str, str],
        times: tuple[int, int],
        apart: tuple[int, int, int],
        pairs: bool = False,
    ) -> None:
        super().__init__()
        (left_half, right_half), (along, down) = descriptors, times
        next_along, next_down, next_right = (n >> 4 for n in apart)
        add, second = hw.multiply_added(columns, (steps,), kinds, places), tuple((a, b + apart[2]) for a, b in steps)
        add_two = hw.multiply_added(columns, (steps, second), kinds, places) if pairs else None
        odd, each = pairs and along * down % 2 == 1, 2 if pairs else 1

        @inline
        def further(a, column):
            a, column = a + u64(next_along), i32(column + 1)
            if column == along:
                a, column = a + u64(next_down - along * next_along), i32(0)
            return a, column

        @inline
        def multiply(acc, left, right, more):
            a, b, column = hw.operand(u64(left_half), left), hw.operand(u64(right_half), right), i32(0)
            rounds = hw.computed(i32(along * down))  # a loop, as there are no registers for what several rounds have made
            if odd:
                acc = add(acc, (a,), b)
                a, column = further(a, column)
                b, rounds = b + u64(next_right), i32(rounds - 1)
            while rounds > 0:
                if pairs:
                    first = a
                    a, column = further(a, column)
                    acc = add_two(acc, (first, a), b)
                else:
                    acc = add(acc, (a,), b)
                a, column = further(a, column)
                b, rounds = b + u64(each * next_right), i32(rounds - each)
            return acc

        @inline
        def there():
            pass

        self.zero, self.multiply = _zeros(mma.zeros(columns // 2), len(places)), multiply
        self.wait_before, self.wait = there, there


def _zeros(zero: Any, blocks: int) -> Any:
    """The device function () → a tuple for each block."""
    rest = _zeros(zero, blocks - 1) if blocks > 1 else None

    @inline
    def one():
        return (zero(),)

    @inline
    def several():
        first = (zero(),)
        return first + rest()

    return several if blocks > 1 else one


def _by_blocks(multiplied: Any, places: tuple[int, ...]) -> Any:
    """The device function (acc, a, b, more) → the sums of each block, of which `acc` has a tuple; a, b: descriptors."""
    units = places[0] >> 4
    rest = _by_blocks(multiplied, places[1:]) if len(places) > 1 else None

    @inline
    def one(acc, a, b, more):
        return (multiplied(acc[0], a + u64(units), b, more),)

    @inline
    def several(acc, a, b, more):
        first = (multiplied(acc[0], a + u64(units), b, more),)
        return first + rest(acc[1:], a, b, more)

    return several if len(places) > 1 else one
