"""How a pattern's ops are launched at all sizes: what kernels say of its program with open extents, held to what they say of
fixed ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import Open, UndecidedError
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.kernels.spec import Config, Joint, Kernel, Work
from tccompile.plan.formulas import Formula, Maker, computed, drawn, filler
from tccompile.ranges.alike import Pattern
from tccompile.ranges.box import Box, Point, corners, opened, scattered
from tccompile.schedule.choose import Candidate, Whole, seen, uncopied

HELD, HELD_IN_ALL = 4, 8
"""Sizes at random, besides the least and the greatest ones, at which launches are compared with those for fixed shapes: of a
part's own launches, and of those that all parts have."""

Key = tuple[str, str]
"""A kernel and its config, as text."""


def key_of(c: Candidate | Whole) -> Key:
    """What tells candidates apart."""
    return c.kernel.name, repr(sorted(c.config.items()))


class Launches:
    """The launches of a pattern's ops for all sizes of a box, each compared with those for fixed shapes at some of its points.

    whole  those for a larger box, which are taken where there are any: they follow from the sizes by one rule here, too
    """

    def __init__(self, pattern: Pattern, box: Box, arch: Arch, held: int, whole: Launches | None = None):
        self.box, self.arch, self.whole, self.sizes = box, arch, whole, opened(box)
        self.program = pattern.at(self.sizes)
        self._points = dict.fromkeys((*corners(box)[:1], *corners(box)[-1:], *scattered(box, held)))
        self._pattern, self._fixed = pattern, dict[Point, Program]()
        self._rules: dict[tuple[tuple[int, ...], bool, Key], tuple[Sequence[Formula], Maker] | UndecidedError] = {}
        self._held: set[tuple[Hashable, Key]] = set()

    def of(self, numbers: tuple[int, ...], direct: bool, kernel: Kernel | Joint, config: Config) -> Work:
        """The launches of the op of that number, or of several; `direct`: of what it is where it reads what it would read a copy
        of.

        Raises UndecidedError if they do not follow from the sizes by one rule.
        """
        if self.whole is not None:
            with suppress(UndecidedError):
                formulas, fill = self.whole.rule(numbers, direct, kernel, config)
                return fill(computed(formulas, self.sizes))  # type: ignore[no-any-return]
        formulas, fill = self.rule(numbers, direct, kernel, config)
        return fill(computed(formulas, self.sizes))  # type: ignore[no-any-return]

    def of_asked(self, number: int, kernel: Kernel, config: Config) -> Work:
        """The launches of one of `Known.ops`: of the program's ops, and behind them of those that may read an input directly."""
        behind = number - len(self.program.ops)
        if behind < 0:
            return self.of((number,), False, kernel, config)
        return self.of(([*uncopied(self.program)][behind],), True, kernel, config)

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Of each of `Known.ops` what is the same for those that are alike at all sizes."""
        return [seen(op, self.program) for op in (*self.program.ops, *(conv for _, conv in uncopied(self.program).values()))]

    def rule(
        self, numbers: tuple[int, ...], direct: bool, kernel: Kernel | Joint, config: Config
    ) -> tuple[Sequence[Formula], Maker]:
        """The launches as formulas of the sizes, and what makes them of what these give."""
        key = numbers, direct, _key(kernel, config)
        if key not in self._rules:
            try:
                self._rules[key] = self._rule(numbers, direct, kernel, config)
            except UndecidedError as why:
                self._rules[key] = why
        if isinstance(made := self._rules[key], UndecidedError):
            raise made
        return made

    def _rule(
        self, numbers: tuple[int, ...], direct: bool, kernel: Kernel | Joint, config: Config
    ) -> tuple[Sequence[Formula], Maker]:
        ops = _direct(self.program, numbers, direct)
        work = _open_work(ops, self.program, kernel, config, self.arch)
        formulas, tree = drawn(work, [size.name for size in self.box])
        fill = filler(tree)
        what = tuple(seen(op, self.program) for op in ops), _key(kernel, config)
        for point in self._points if what not in self._held else ():
            program = self._at(point)
            own, made = _direct(program, numbers, direct), fill(computed(formulas, point))
            there = _work(own, program, kernel, config, self.arch)
            more = len(made.launches) - len(there.launches)  # padding is filled first, at sizes that have none, too
            made = replace(made, launches=made.launches[max(more, 0) :])
            alike = [a.code for a in made.launches] == [b.code for b in there.launches]  # else a constant is lifted at all sizes
            if more < 0 or (alike and made != there):
                raise UndecidedError(f"{kernel.name} does not say by one rule how it is launched")
        self._held.add(what)
        return formulas, fill

    def _at(self, point: Point) -> Program:
        if point not in self._fixed:
            self._fixed[point] = self._pattern.at(point)
        return self._fixed[point]


def _key(kernel: Kernel | Joint, config: Config) -> Key:
    return key_of(Candidate(0.0, kernel, config)) if isinstance(kernel, Kernel) else key_of(Whole(0.0, kernel, config))


def _direct(program: Program, numbers: Sequence[int], direct: bool) -> list[Op]:
    """Ops of a program; `direct`: of what another one copies for it."""
    return [uncopied(program)[k][1] if direct else program.ops[k] for k in numbers]


def _work(ops: Sequence[Op], program: Program, kernel: Kernel | Joint, config: Config, arch: Arch) -> Work:
    if isinstance(kernel, Joint):
        return kernel.work(ops, program, config, arch)
    return kernel.work(ops[0], program, config, arch)


def _open_work(ops: Sequence[Op], program: Program, kernel: Kernel | Joint, config: Config, arch: Arch) -> Work:
    """What the kernel says of a program with open extents."""
    try:
        refusal = kernel.supports(ops, program, arch) if isinstance(kernel, Joint) else kernel.supports(ops[0], program, arch)
        if refusal is None:
            work = _work(ops, program, kernel, config, arch)
            if not any(_is_open(launch.code.params) for launch in work.launches):
                return work
            refusal = f"{kernel.name}'s code would be another one at each size"
    except (TypeError, AttributeError) as error:  # what takes an int for granted
        raise UndecidedError(f"{kernel.name} takes fixed sizes ({error})") from error
    raise UndecidedError(refusal)


def _is_open(value: Any) -> bool:
    """Whether an open extent is among a code's parameters."""
    return isinstance(value, Open) or (isinstance(value, tuple) and any(map(_is_open, value)))
