"""The greedy part of NonMaxSuppression, on every generation.

Boxes are taken in rounds of some thousands, the best first; a round is two launches. In the first one many blocks compare boxes:
of 256 boxes of the round each block finds which of 32 better ones of the round cover them, a word of bits each, or whether any of
32 boxes does that earlier rounds have kept. In the second one a block for each class of each image decides, 256 boxes at a time.
A box that no kept one covers waits as long as a better box of the 256 covers it about which nothing is decided; if none does, it
is kept. So this takes as many turns as the longest chain of boxes that cover each other has links, and not one for each box.

What a frame takes depends on what is seen in it. Launches end at once where as many boxes are kept as are asked for, and at
the first boxes whose scores are no more than `least`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import const
from tccompile.ir.extent import Extent, ceil_div, hint, least, most, round_up
from tccompile.ir.ops import Op, Suppress
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.lines import padding_filled, refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import F32, I32, Arg, Config, Launch, Ptr, Scratch, Value, Work, code, traffic_us
from tccompile.kernels.text import Called, DeviceText, KernelText, TextKernel, indented, intrinsic, parameters

TILE = 256
"""Boxes that are compared with others, and decided, at once: a thread each."""

WORD = 32
"""Better boxes that they are compared with: bits of a word."""

WORDS = TILE // WORD

TEAMS = 4
"""Threads for each box of a tile that is decided: each looks at a part of its words."""

AHEAD = 8
"""Words that such a thread asks for before it looks at the first."""

ROUNDS = (1024, 2048, 4096)
"""Boxes of a round."""

ROOM = 32 << 20
"""Bytes of words that a round of more than the fewest boxes may have, of all classes and images."""

SEEN = 0.1
"""Of the boxes that have a score above `least`, as the estimate takes it: of most frames it is fewer."""


class SuppressKernel(TextKernel):
    """Every Suppress."""

    name = "suppress"
    realises = Suppress

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Suppress)
        if not all(program.tensors[name].dtype.is_float for name in (op.boxes, op.scores)):
            return "its boxes or scores are no floats"
        return refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Suppress)
        for boxes in ROUNDS:
            rounds = _Rounds(op, program, boxes)
            if boxes > ROUNDS[0] and most(rounds.lines) * rounds.units * TILE * 4 > ROOM:
                return
            yield {"round": boxes}
            if rounds.count == 1:
                return

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Suppress)
        rounds, rate = _Rounds(op, program, config["round"]), measured(arch)
        lines, boxes = hint(rounds.lines), hint(program.tensors[op.y].shape[2])
        seen = int(boxes * (1.0 if op.least is None or op.least < 0 else SEEN))
        kept, tiles = min(hint(op.most), seen // 4), ceil_div(seen, TILE)
        used = ceil_div(seen, rounds.boxes)
        pairs = lines * seen * (min(seen, rounds.boxes) / 2 + kept * (used - 1) / max(2 * used, 1))
        compared = pairs * 25 / (arch.sms * 128 * rate.cycles_us) + used * 3.0  # instructions; what a block waits for
        words = 4 * seen * min(seen, rounds.boxes) / (2 * WORD)  # bytes, which one multiprocessor reads
        waves = max(1.0, lines * TILE * TEAMS / (arch.sms * arch.threads_sm))
        decided = waves * (tiles * 4.0 + words / (32 * rate.cycles_us))
        return 2 * rounds.count * rate.launch_us + traffic_us(op, program, arch) + compared + decided

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Suppress)
        y = program.tensors[op.y]
        first = padding_filled(op, program, const(False, DType.BOOL), arch)
        if not y.size:
            return Work(first)
        rounds, later = _Rounds(op, program, config["round"]), list[Launch]()
        inputs = [program.tensors[name] for name in (op.boxes, op.scores, op.order)]
        params: dict[str, Value] = {name: t.dtype.value for name, t in zip(("boxes", "scores", "order"), inputs, strict=True)}
        params |= {"y": y.dtype.value, "above": op.least is not None, "centred": op.centred}
        room = least(op.most, y.shape[2])
        own: list[Arg] = [*(Ptr(t.name) for t in (*inputs, y)), *(Scratch(at) for at in rounds.places(room))]
        strides: list[Arg] = [I32(s) for t in (*inputs, y) for s in t.strides]
        limits: list[Arg] = [F32(op.iou), F32(max(abs(op.iou) * 1e-6, 1e-36)), F32(0.0 if op.least is None else op.least)]
        each = max(1, min(rounds.units, 8 * arch.sms // max(hint(rounds.lines), 1)))
        for at in range(rounds.count):
            numbers = [I32(n) for n in (y.shape[1], y.shape[2], room, at * rounds.boxes, rounds.boxes, rounds.units)]
            for phase, blocks, threads in (("compare", each, TILE), ("decide", 1, TILE * TEAMS)):
                args = (*own, *numbers, I32(each if phase == "compare" else int(at + 1 < rounds.count)), *strides, *limits)
                later.append(Launch(code(self.name, phase=phase, **params), (rounds.lines * blocks, 1, 1), threads, args))
        return Work((*first, *later), scratch=rounds.scratch(room))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        return _Writer(**params).text()


class _Rounds:
    """How boxes are taken, and what lies in the workspace.

    lines  classes of all images
    boxes  of a round: so many tiles
    units  of a line and a round: 32 boxes that are compared with the boxes of one tile, which are no better
    count  rounds
    """

    def __init__(self, op: Suppress, program: Program, boxes: int) -> None:
        images, classes, count = program.tensors[op.y].shape
        self.lines: Extent = images * classes
        self.count = max(1, ceil_div(most(count), boxes))
        self.boxes = round_up(ceil_div(most(count), self.count), TILE)
        tiles = self.boxes // TILE
        self.units = WORDS * tiles * (tiles + 1) // 2

    def places(self, room: Extent) -> tuple[Extent, Extent, Extent, Extent]:
        """Where these begin: words of units; for later rounds, which boxes are kept, how many, and which ones these cover."""
        kept = self.lines * self.units * TILE * 4
        if self.count == 1:
            return 0, 0, 0, 0
        numbers = kept + self.lines * room * 4
        return 0, kept, numbers, numbers + self.lines * 4

    def scratch(self, room: Extent) -> Extent:
        if self.count == 1:
            return self.lines * self.units * TILE * 4
        return self.places(room)[-1] + self.lines * self.boxes


STRIDES = "boxes_n, boxes_i, boxes_k, scores_n, scores_c, scores_i, order_n, order_c, order_i, y_n, y_c, y_i"


def _overlap() -> DeviceText:
    """The device function of two boxes and a limit → 1 if they have more than that of their union in common, and else 0.

    Boxes are (a, b, -c, -d), the least coordinates and the greatest ones, so that both ends of what they have in common are
    maxima; s is their area. Products are rounded before they are added up, as on a CPU. The quotient is taken where it is so near
    to the limit, as far as `doubt` of the union, that rounding decides.
    """
    lines = [
        "wide = larger(a0, a1) + larger(c0, c1)",
        "high = larger(b0, b1) + larger(d0, d1)",
        "common = product(wide, high)",
        "union = s0 + s1 - common",
        "sound = (wide < f32(0)) & (common > f32(0))",
        "more = common - product(limit, union)",
        "over = sound & (more > f32(0))",
        "if sound & ((absolute(more) > union * doubt + f32(1e-37)) == boolean(0)):",
        "    over = common / union > limit",
        "return select(over, i32(1), i32(0))",
    ]
    scope = {"product": intrinsic("ptx.simt.product")}
    return DeviceText("overlap", "a0, b0, c0, d0, s0, a1, b1, c1, d1, s1, limit, doubt", lines, scope)


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """Writes the text of one phase, "compare" or "decide"; the others are types, whether scores have a limit, and `centred`."""

    phase: str
    boxes: str
    scores: str
    order: str
    y: str
    above: bool
    centred: bool

    def text(self) -> KernelText:
        compares = self.phase == "compare"
        signature = {
            **parameters("address", "boxes, scores, order, y, words, kept, numbers, covered"),
            **parameters("int", f"classes, count, room, first, span, units, {'each' if compares else 'goes_on'}, {STRIDES}"),
            **parameters("float", "limit, doubt, least"),
        }
        lines = ["t = i32(cuda.threadIdx.x)", f"line = i32({'cuda.blockIdx.x // each' if compares else 'cuda.blockIdx.x'})"]
        lines += ["image = i32(line // classes)", "part = i32(line - image * classes)"]
        for name in ("scores", "order", "y"):
            size = DType(getattr(self, name)).size
            lines.append(f"{name}_line = {name} + i64(image) * (i64({name}_n) * {size}) + i64(part) * (i64({name}_c) * {size})")
        lines += ["list = kept + i64(line) * (i64(room) * 4)", "flags = covered + i64(line) * i64(span)"]
        lines.append("many = i32(number_at(numbers + i64(line) * 4, i32(first > 0)))")
        lines += self._compare() if compares else self._decide()
        return KernelText(signature, lines, self._scope(compares), TILE if compares else TILE * TEAMS)

    def _scope(self, compares: bool) -> dict[str, Called]:
        scope: dict[str, Called] = {
            "score_at": intrinsic("ptx.memory.load", DType(self.scores), 1, True),
            "number_at": intrinsic("ptx.memory.load", DType.I32, 1, True),
            "put_number": intrinsic("ptx.memory.store", DType.I32),
            "flag": intrinsic("ptx.memory.store", DType.U8),
        }
        if compares:
            return scope | {
                "coordinate": intrinsic("ptx.memory.load", DType(self.boxes)),
                "box_at": intrinsic("ptx.memory.load", DType(self.order), 1, True),
                "product": intrinsic("ptx.simt.product"),
                "overlap": _overlap(),
            }
        return scope | {
            "flag_at": intrinsic("ptx.memory.load", DType.U8, 1, True),
            "put": intrinsic("ptx.memory.store", DType(self.y)),
            "ballot": intrinsic("ptx.simt.ballot"),
            "bits_of": intrinsic("ptx.simt.count_bits"),
        }

    # --- What both read ----------------------------------------------------------------------------------------------

    def _score(self, name: str, at: str, inside: str) -> str:
        size = DType(self.scores).size
        return f"{name} = score_at(scores_line + i64({at}) * (i64(scores_i) * {size}), i32({inside}))"

    def _below(self, score: str) -> str:
        """Whether this score, and with it all that follow, is none of a box that is kept."""
        return f"({score} <= least)" if self.above else "boolean(0)"

    # --- Comparing ---------------------------------------------------------------------------------------------------

    def _compare(self) -> list[str]:
        """Blocks blockIdx.x // each = line take its units in turn; behind those of the round come those of boxes kept before."""
        return [
            f"corner = cuda.shared.array({5 * WORD}, f32)",
            f"tiles = i32(span // {TILE})",
            "unit = i32(cuda.blockIdx.x - line * each)",
            f"end = select(many < room, i32(units + ((many + {WORD - 1}) // {WORD}) * tiles), i32(0))",
            "while unit < end:",
            "    before = unit >= units",
            "    rest, tile = unit, i32(0)",
            "    if before:",
            "        rest = i32((unit - units) // tiles)",
            "        tile = i32(unit - units - rest * tiles)",
            "    else:",
            f"        while rest >= {WORDS} * (tile + 1):",
            f"            rest = i32(rest - {WORDS} * (tile + 1))",
            "            tile = i32(tile + 1)",
            f"    head = i32(first + tile * {TILE})",
            f"    row = i32(rest * {WORD} + select(before, i32(0), first))",
            "    end_of_rows = select(before, many, count)",
            *indented([self._score("lead", "head", "head < count")]),
            f"    if (head < count) & (row < end_of_rows) & ({self._below('lead')} == boolean(0)):",
            *indented(self._unit(), 2),
            "    unit = i32(unit + each)",
        ]

    def _unit(self) -> list[str]:
        """Text that compares the boxes of a tile, from `head` on, with 32 from `row` on, of the round or of those kept before."""
        pair = ", ".join(f"corner[{k * WORD} + j]" for k in range(5))
        return [
            "cuda.syncthreads()",  # the block's last unit has been read
            "own = i32(head + t)",
            f"if t < {WORD}:",
            "    other = i32(row + t)",
            "    row_there = other < end_of_rows",
            "    if before:",
            "        other = i32(number_at(list + i64(other) * 4, i32(row_there)))",
            *indented(self._box("other", "row_there")),
            *indented(_sound("row_there")),
            *(f"    corner[{k * WORD} + t] = {name}" for k, name in enumerate("abcds")),
            *self._box("own", "own < count"),
            *_sound("own < count"),
            "cuda.syncthreads()",
            "lower, upper = i32(0), i32(0)",
            "if (own < count) & (before | (row < own)):",
            f"    for step in range({WORD // 2}):",
            "        j = i32(step)",
            f"        over = overlap({pair}, a, b, c, d, s, limit, doubt)",
            "        lower = i32(lower | (over << j))",
            f"        j = i32(step + {WORD // 2})",
            f"        over = overlap({pair}, a, b, c, d, s, limit, doubt)",
            "        upper = i32(upper | (over << i32(step)))",
            "if before:",
            "    if (lower | upper) != 0:",
            f"        flag(flags + i64(tile * {TILE} + t), i64(1))",
            "else:",
            f"    better = maximum(minimum(i32(own - row), i32({WORD})), i32(0))",  # of the 32
            f"    lower = i32(lower & ((i32(1) << minimum(better, i32({WORD // 2}))) - 1))",
            f"    upper = i32(upper & ((i32(1) << maximum(i32(better - {WORD // 2}), i32(0))) - 1))",
            f"    word = i32(((upper ^ {2**15}) - {2**15}) * {2**16} + lower)",
            f"    put_number(words + ((i64(line) * i64(units) + i64(unit)) * {TILE} + i64(t)) * 4, i64(word))",
        ]

    def _box(self, at: str, inside: str) -> list[str]:
        """Text that reads the box at a place of the order: a, b, c, d as `overlap` takes them."""
        size, item = DType(self.boxes).size, DType(self.order).size
        lines = [f"which = box_at(order_line + i64({at}) * (i64(order_i) * {item}), i32({inside}))"]
        lines.append("which = maximum(minimum(which, i64(count) - 1), i64(0))")
        lines.append(f"place = boxes + i64(image) * (i64(boxes_n) * {size}) + i64(which) * (i64(boxes_i) * {size})")
        lines += [f"v{k} = coordinate(place + {k} * (i64(boxes_k) * {size}))" for k in range(4)]
        if self.centred:
            lines += ["wide, high = v2 / f32(2), v3 / f32(2)", "a, b, c, d = v0 - wide, v1 - high, -(v0 + wide), -(v1 + high)"]
            return lines
        return [*lines, "a, b, c, d = minimum(v0, v2), minimum(v1, v3), -maximum(v0, v2), -maximum(v1, v3)"]

    # --- Deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> list[str]:
        """Block: a line."""
        size = DType(self.y).size
        return [
            f"stays = cuda.shared.array({ROUNDS[-1] // WORD}, i32)",  # of the round's boxes that are decided
            f"hits = cuda.shared.array({TEAMS * TILE}, i32)",
            f"now = cuda.shared.array({4 * WORDS}, i32)",  # open and kept boxes of the tile, of this turn and the last one
            f"own, team = i32(t % {TILE}), i32(t // {TILE})",
            f"warp, lane = i32(t // {WORD}), i32(t % {WORD})",
            "tile, head, end = i32(0), first, minimum(i32(first + span), count)",
            "going = select(many < room, i32(1), i32(0))",
            self._score("lead", "head", "head < count"),
            "while (head < end) & (going != 0):",
            f"    if {self._below('lead')}:",
            "        many, going = room, i32(0)",
            "    else:",
            *indented([*self._covered(), *self._turns(), *self._settled()], 2),
            "at = i32(head + t)",
            "while at < end:",
            f"    put(y_line + i64(at) * (i64(y_i) * {size}), i64(0))",
            f"    at = i32(at + {TILE * TEAMS})",
            "if (t == 0) & (goes_on != 0):",
            "    put_number(numbers + i64(line) * 4, i64(many))",
        ]

    def _covered(self) -> list[str]:
        """Text that finds which boxes of a tile are covered by kept ones of earlier tiles, and of earlier rounds.

        w…: the words of the thread's box, of the boxes of its own tile.
        """
        step, last = 4 * TILE, ROUNDS[-1] // WORD - 1
        own = [
            f"w{k} = i32(number_at(column + i64({WORDS} * tile + {k}) * {step}, i32((team == 0) & (where < end))))"
            for k in range(WORDS)
        ]
        ask, look = list[str](), list[str]()
        for k in range(AHEAD):
            ask.append(f"n{k} = i32(at + {k * TEAMS})")
            ask.append(f"x{k} = i32(number_at(column + i64(n{k}) * {step}, i32(n{k} < {WORDS} * tile)))")
            look.append(f"hit = i32(hit | (x{k} & stays[minimum(n{k}, i32({last}))]))")
        return [
            "where = i32(head + own)",
            f"column = words + ((i64(line) * i64(units) + i64(tile * (tile + 1)) * {WORDS // 2}) * {TILE} + i64(own)) * 4",
            self._score("score", "where", "where < end"),
            self._score("lead", f"i32(head + {TILE})", f"head + {TILE} < count"),  # of the next tile
            "hit = i32(flag_at(flags + i64(where - first), i32((first > 0) & (where < end))))",
            *own,
            "at = team",
            f"while at < {WORDS} * tile:",
            *indented([*ask, *look]),
            f"    at = i32(at + {AHEAD * TEAMS})",
            "hits[t] = hit",
            "cuda.syncthreads()",
        ]

    def _turns(self) -> list[str]:
        """Text that decides about the boxes of a tile. What this turn reads, the one before has written."""
        candidate = "(where < end) & (score > least)" if self.above else "(where < end)"
        hit = " | ".join(f"hits[own + {k * TILE}]" for k in range(TEAMS))
        waits = " | ".join(f"(w{k} & now[turn + {k}])" for k in range(WORDS))
        covered = " | ".join(f"(w{k} & now[turn + {WORDS + k}])" for k in range(WORDS))
        return [
            "opened, kept_now, turn, left = i32(0), i32(0), i32(0), i32(1)",
            f"if t < {TILE}:",
            f"    opened = select({candidate} & (({hit}) == 0), i32(1), i32(0))",
            "    word = ballot(opened)",
            "    if lane == 0:",
            "        now[warp] = word",
            f"        now[warp + {WORDS}] = i32(0)",
            "cuda.syncthreads()",
            "while left != 0:",
            f"    left = i32({' | '.join(f'now[turn + {k}]' for k in range(WORDS))})",
            f"    if t < {TILE}:",
            f"        waits, free = i32({waits}), i32({covered}) == 0",
            "        kept_now = select((opened != 0) & (waits == 0) & free, i32(1), kept_now)",
            "        opened = select((opened != 0) & (waits != 0) & free, i32(1), i32(0))",
            "        word, other = ballot(opened), ballot(kept_now)",
            "        if lane == 0:",
            f"            now[{2 * WORDS} - turn + warp] = word",
            f"            now[{3 * WORDS} - turn + warp] = other",
            f"    turn = i32({2 * WORDS} - turn)",
            "    cuda.syncthreads()",
        ]

    def _settled(self) -> list[str]:
        """Text that writes what is decided about a tile, and goes on to the next."""
        size = DType(self.y).size
        return [
            "total, before = i32(0), many",
            *(
                line
                for k in range(WORDS)
                for line in (
                    f"found = bits_of(now[turn + {WORDS + k}])",
                    f"before = i32(before + select(warp > {k}, found, i32(0)))",
                    "total = i32(total + found)",
                )
            ),
            f"if t < {TILE}:",
            f"    before = i32(before + bits_of(i32(now[turn + {WORDS} + warp] & ((i32(1) << lane) - 1))))",
            "    stay = (kept_now != 0) & (before < room)",
            "    if where < end:",
            f"        put(y_line + i64(where) * (i64(y_i) * {size}), select(stay, i64(1), i64(0)))",
            "    if goes_on != 0:",
            "        flag(flags + i64(where - first), i64(0))",
            "        if stay:",
            "            put_number(list + i64(before) * 4, i64(where))",
            f"if t < {WORDS}:",
            f"    stays[{WORDS} * tile + t] = now[turn + {WORDS} + t]",
            "many = minimum(i32(many + total), room)",
            "going = select(many < room, i32(1), i32(0))",
            f"tile, head = i32(tile + 1), i32(head + {TILE})",
            "cuda.syncthreads()",
        ]


def _sound(inside: str) -> list[str]:
    """Text that makes s, the area of a box; where it is none, nothing has anything in common with the box."""
    return [
        "s = product(-c - a, -d - b)",
        f"a = select(({inside}) & (s > f32(0)), a, f32(inf))",
    ]
