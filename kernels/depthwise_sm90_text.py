"""The text of depthwise_sm90.py's kernel: one warp has slabs copied and results stored, the others multiply."""

from __future__ import annotations

from tccompile.kernels.depthwise_sm90_walk import PATTERN, Tap, Walk
from tccompile.kernels.text import indented

NUMBERS = (
    "chunks, chunks_m, chunks_s, rows, more, parts_m, parts_s, P, P_m, P_s, across, across_m, across_s, Q, skipped, ended, top, "
    "begin0, begin1, wr, ws, padded, stored"
)


def maps(walk: Walk) -> str:
    """The parameters that are tensor maps."""
    return ", ".join([f"map{f}" for f in range(walk.stride)] + ["map_y"])


def lines(walk: Walk, stages: int, early: bool) -> list[str]:
    """The kernel's source. x, y: (N, H, W, C) by their maps, w: (R, S, C). early: weights do not wait for earlier grids.

    Shared memory: `stages` slabs [column mod stride][row][image][column][channel], then results [slab mod 2][row][image][column]
    [channel], then barriers: for each slab that its rows are there; for each half of the results that all warps are done with a
    slab, of which they have written them there; and for each half that they have been read.
    """
    return [
        "tid = i32(cuda.threadIdx.x)",
        "warp, lane = uniform(i32(tid >> i32(5))), tid & i32(31)",
        "ring = base()",
        f"staged = i32(ring + i32({stages * walk.slab + walk.beyond}))",
        f"full = i32(staged + i32({2 * walk.results}))",
        f"done, free = i32(full + i32({8 * stages})), i32(full + i32({8 * stages + 16}))",
        "if tid == 0:",
        *(f"    barrier_init(i32(full + i32({8 * s})), i32(1))" for s in range(stages)),
        *(f"    barrier_init(i32(done + i32({8 * s})), i32({walk.warps}))" for s in range(2)),
        *(f"    barrier_init(i32(free + i32({8 * s})), i32(1))" for s in range(2)),
        "    fence_barrier_init()",
        *(f"    prefetch_map({name})" for name in maps(walk).split(", ")),
        "cuda.syncthreads()",
        "block = i32(cuda.blockIdx.x)",
        "part = divide(block, chunks_m, chunks_s)",
        f"c0 = i32((block - part * chunks) * i32({walk.channels}))",
        "row = i32(part * rows + divide(i32(part * more), parts_m, parts_s))",
        "last = i32((part + i32(1)) * rows + divide(i32((part + i32(1)) * more), parts_m, parts_s))",
        f"if warp == i32({walk.warps}):",
        *indented(_copying(walk, stages)),
        "else:",
        *([] if early else ["    wait_for_earlier_grids()"]),
        *indented(_multiplying(walk, stages)),
    ]


ON = (
    "if side == i32(1):",
    "    round = i32(i32(1) - round)",
    "side = i32(i32(1) - side)",
    "turn = i32(turn + i32(1))",
    "if turn == i32({stages}):",
    "    turn, parity = i32(0), i32(i32(1) - parity)",
    "i = i32(i + i32({steps}))",
)
"""On to the next slab: its buffer and half of the results, and of each of them whether it is used for an even or odd time."""


def _walking(walk: Walk, stages: int, piece: list[str], slab: list[str]) -> list[str]:
    """Text that does `slab` for each of the block's slabs; i: the step, counted from the one that ends the piece's first rows."""
    on = [line.format(stages=stages, steps=walk.steps) for line in ON]
    return [
        "turn, parity, side, round = i32(0), i32(0), i32(0), i32(0)",
        "while row < last:",
        *indented(_piece(walk, "row", "n", "p0", "q0", "count", "i") + piece),
        "    while i < count:",
        *indented(slab + on, 2),
        "    row = i32(row + count)",
    ]


def _copying(walk: Walk, stages: int) -> list[str]:
    """Text of the warp that has slabs copied and results stored."""
    find = [
        *_piece(walk, "ahead", "its_n", "its_row", "its_column", "its_count", "its_step"),
        "its_step = i32(its_step + asked)",
        f"its_row = i32(i32(its_row + its_step + i32({walk.reach - 1})) * i32({walk.rows}) + top)",  # of x
    ]
    ask = [
        "if ahead < last:",
        f"    barrier, at = i32(full + turn * i32(8)), i32(ring + turn * i32({walk.slab}))",
        "    if lane == 0:",
        f"        barrier_expect(barrier, i32({walk.stride * walk.copied}))",
        *(
            f"        copy_box4(i32(at + i32({f * walk.box})), map{f}, barrier, c0, i32(its_column + begin{f}), its_n, its_row)"
            for f in range(walk.stride)
        ),
        f"    asked = i32(asked + i32({walk.steps}))",
        f"    if i32(its_step + i32({walk.steps})) >= its_count:",
        "        ahead, asked = i32(ahead + its_count), i32(0)",
        *indented(find),
    ]
    store = []
    for step in range(walk.steps):
        store += [
            f"if within(i32(i + i32({step})), i32(0), count):",
            f"    y_row = i32(i32(p0 + i + i32({step})) * i32(2))",
            f"    store_box4(map_y, i32(to + i32({2 * step * walk.line_out})), c0, q0, n, y_row)",
        ]
    slab = [
        "barrier_wait(i32(done + side * i32(8)), round)",
        *ask,
        "if lane == 0:",
        f"    to = i32(staged + side * i32({walk.results}))",
        *indented(store),
        # They must have been read before others come to their place, which may be another block's shared memory.
        "    boxes_read()",
        "    barrier_arrive(i32(free + side * i32(8)))",
    ]
    return [
        "ahead, asked, turn = row, i32(0), i32(0)",  # the slab to come: from which row on, and how many of its steps came
        *find,
        "wait_for_earlier_grids()",
        "let_later_grids_start()",
        f"while turn < i32({stages}):",
        *indented(ask),
        "    turn = i32(turn + i32(1))",
        *_walking(walk, stages, [], slab),
    ]


def _multiplying(walk: Walk, stages: int) -> list[str]:
    """Text of the others."""
    piece = [
        f"column = i32(q0 + along * i32({8 * walk.strips}))",
        f"active = within(i32(c0 + group * i32(8)), i32(0), stored) & within(column, i32(0), {_width(walk)})",
        "empty = select(i32(p0 + count) == P, ended, i32(0))",
        *(f"s{v}_{age}_{j} = zeros()" for v in range(walk.each) for age in range(walk.reach - 1) for j in range(walk.strips)),
    ]
    slab = [
        "barrier_wait(i32(full + turn * i32(8)), parity)",
        "if active:",
        *indented(_Steps(walk).lines()),
        "else:",
        "    barrier_wait(i32(free + side * i32(8)), i32(i32(1) - round))",
        "fence_copies()",
        "sync_warp()",
        "if lane == 0:",
        "    barrier_arrive(i32(done + side * i32(8)))",
    ]
    further = [f"i32(warp >= i32({m * walk.abreast}))" for m in range(1, walk.along)]
    return [
        f"along = i32({' + '.join(further) or 'i32(0)'})",
        f"group = i32(warp - along * i32({walk.abreast}))",
        *_weights(walk),
        *_places(walk),
        *_walking(walk, stages, piece, slab),
    ]


def _piece(walk: Walk, number: str, n: str, row: str, column: str, count: str, first: str) -> list[str]:
    """Text for what a part has of a strip from a row on: image, first row and column of y, rows, and the row that step 0 ends."""
    return [
        f"strip = divide({number}, P_m, P_s)",
        f"{row} = i32({number} - strip * P)",
        f"{n} = divide(strip, across_m, across_s)",
        f"{column} = i32(i32(strip - {n} * across) * i32({walk.window}))",
        *([f"{n} = i32({n} * i32({walk.images}))"] if walk.images > 1 else []),
        f"{count} = i32(min(i32(P - {row}), i32(last - {number})))",
        f"{first} = i32(select({row} == i32(0), skipped, i32(0)) - i32({walk.reach - 1}))",
    ]


def _weights(walk: Walk) -> list[str]:
    """The lane's words of the sparse matrices of weights, w{vector}_{age}_{product}; `which` of every four neighbours they are.

    Of lane (g, t) of 8 × 4 words 0 and 2 belong to channel g for the first row of y, 1 and 3 for the second one; 0 and 1 to the
    product's first two taps, 2 and 3 to the others (PTX ISA, "Matrix fragments for sparse mma.m16n8k32"). Of two taps it has
    neighbours 0 and 1 or else 2 and 3 of the channels from 4 · (t mod 2) on of tap t / 2: the weight, and a zero beside it.
    """
    out = [
        "g, t = lane >> i32(2), lane & i32(3)",
        "own = select(g & i32(1) == i32(0), i32(0xffff), i32(-0x10000))",
        "own = select(t & i32(1) == g >> i32(2), own, i32(0))",
        "which = select(g & i32(2) == i32(0), i32(0x44444444), i32(-0x11111112))",
    ]
    for v in range(walk.each):
        out += [
            f"channel{v} = computed(i32(c0 + i32(group + i32({v * walk.abreast})) * i32(8) + g))",
            f"inside = within(channel{v}, i32(0), padded)",
            f"filters = w + i64(channel{v} & i32(-2)) * i64(2)",
        ]
        for age in range(walk.reach):
            for k in walk.live(age):
                words: list[str] = []
                for pair in range(0, len(walk.products[k]), 2):
                    for row in walk.weights(age, k):
                        words.append(f"w{v}_{age}_{k}_{len(words)}")
                        out += _word(words[-1], row[pair : pair + 2])
                out.append(f"w{v}_{age}_{k} = " + " + ".join(words))
    return [*out, *(f"read{v} = kept(channel{v}, e)" for v in range(walk.each))]


def _word(name: str, taps: list[Tap | None]) -> list[str]:
    """Text for the word of a tap of the filter, of lanes with t < 2, or of another one, where there are such."""
    places = [f"i32(i32(i32({tap[0]}) * wr) + i32(i32({tap[1]}) * ws))" if tap else "i32(0)" for tap in taps]
    there = ["inside" if tap else "i32(0)" for tap in taps]
    place, ok = (f"select(t < i32(2), {near}, {far})" if near != far else near for near, far in (places, there))
    return [f"{name} = take(read_word(filters + i64({place}) * i64(2), {ok}), own, own)"]


def _width(walk: Walk) -> str:
    """Text for the columns of y that a block's rows have."""
    return f"i32({walk.columns})" if walk.images > 1 else "Q"


def _place(walk: Walk, pixel: str) -> str:
    """Text for the byte of the warp's first channels in a pixel of a row."""
    if not walk.swizzle:
        return f"i32(i32({pixel} * i32({walk.pixel})) + i32(group << i32(4)))"
    shift = {64: 0, 32: 1, 16: 2}[walk.channels]
    key = f"({pixel} >> i32({shift})) & i32({walk.groups - 1})"
    return f"i32(i32({pixel} * i32({walk.pixel})) + i32(i32(group ^ i32({key})) << i32(4)))"


def _places(walk: Walk) -> list[str]:
    """Where a lane reads its row of a product's matrices, from a slab's first byte on, and writes its row of results.

    Lanes 8m to 8m + 7 have the 8 pixels of matrix m: of a tap, or of the first or second row of y. Those of other images than a
    row's first one lie further on: apart{strip} bytes.
    """

    def pick(each: list[int]) -> str:
        text = f"i32({each[-1]})"
        for m in reversed(range(len(each) - 1)):
            text = f"select(matrix == i32({m}), i32({each[m]}), {text})" if len(set(each[m:])) > 1 else text
        return text

    out = [f"matrix, first = lane >> i32(3), i32((lane & i32(7)) + along * i32({8 * walk.strips}))"]
    for k, taps in enumerate(walk.products):
        out += [
            f"pixel = i32(first + {pick([s // walk.stride for _, s in taps])})",
            f"row_of_box = {pick([i * walk.line + s % walk.stride * walk.box for i, s in taps])}",
            f"place{k} = computed(i32(row_of_box + {_place(walk, 'pixel')}))",
        ]
    for j in range(walk.strips if walk.images > 1 else 0):
        before = [f"i32(first >= i32({m * walk.window - 8 * j}))" for m in range(1, walk.images)]
        out.append(f"apart{j} = computed(i32(i32({' + '.join(before)}) * i32({PATTERN * walk.pixel})))")
    return [*out, f"mine = computed(i32(i32(staged + {pick([0, walk.line_out])}) + {_place(walk, 'first')}))"]


class _Steps:
    """Text for the steps of a slab: a strip's matrices are read before those of the strip before are multiplied, and its results
    are rounded after those of the next strip have been multiplied.

    Of a slab of one step, a part's first and last rows may be multiplied only for the rows of y that it has (`Walk.spares`).

    parts  vectors of channels of a strip, in turn: (vector, strip)
    last   the age of rows of y whose step is their last one
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.parts = [(v, j) for j in range(walk.strips) for v in range(walk.each)]
        self.last = walk.reach - 1

    def lines(self) -> list[str]:
        walk = self.walk
        out = [
            f"at = i32(ring + turn * i32({walk.slab}))",
            *(f"from{k} = i32(at + place{k})" for k in range(len(walk.products))),
            f"to = i32(mine + side * i32({walk.results}))",
        ]
        if walk.spares:
            return out + self._sparing()
        nest = ""
        for step in range(walk.steps):
            if step:
                out.append(f"{nest}if i32(i + i32({step})) < count:")
                nest += "    "
            text = self._read(step, 0) + self._whole(step, range(walk.reach), f"i32(i + i32({step})) >= 0")
            out += [nest + line for line in text]
        return out

    def _sparing(self) -> list[str]:
        """A slab of one step, by what of it is needed: nothing, rows of y that have begun, those that go on, or all."""
        last, reach = self.last, self.walk.reach
        out = [*self._read(0, 0), "left = i32(count - i)", "if left <= empty:", *indented(self._whole(0, range(0)))]
        for age in range(last):
            out += [f"elif i == i32({age - last}):", *indented(self._whole(0, range(age + 1)))]
        for age in range(last, 0, -1):
            out += [f"elif left == i32({last - age + 1}):", *indented(self._whole(0, range(age, last + 1)))]
        return [*out, "else:", *indented(self._whole(0, range(reach)))]

    def _whole(self, step: int, ages: range, ends: str | None = None) -> list[str]:
        """A step whose first matrices have been read, for rows of y of those ages; `ends`: whether its results are to be kept."""
        free = "barrier_wait(i32(free + side * i32(8)), i32(i32(1) - round))"
        text = []
        for at in range(len(self.parts) + 1):
            if at < len(self.parts):
                text += (self._read(step, at + 1) if ages else []) + self._multiply(at, ages)
                text += [free] if step == at == 0 else []
            if at and (not ages or self.last in ages):
                finish = self._finish(step, at - 1)
                text += [f"if {ends}:", *indented(finish)] if ends else finish
        return text

    def _place(self, v: int, j: int) -> int:
        """The byte of a part in a row."""
        return 8 * j * self.walk.pixel + 16 * v * self.walk.abreast

    def _read(self, step: int, at: int) -> list[str]:
        """The matrices of a part, if there is one."""
        if at == len(self.parts):
            return []
        walk, (v, j), text = self.walk, self.parts[at], []
        for k, taps in enumerate(walk.products):
            lane = f"i32(from{k} + apart{j})" if walk.images > 1 else f"from{k}"
            byte = step * walk.rows * walk.line + self._place(v, j)
            text.append(f"x{k}_{at} = matrices{len(taps)}(i32({lane} + i32({byte})))")
        return text

    def _multiply(self, at: int, ages: range) -> list[str]:
        walk, last, (v, j) = self.walk, self.last, self.parts[at]
        text = [] if ages else [f"d{at} = s{v}_{last - 1}_{j}"]
        for age in reversed(ages):
            before = f"s{v}_{age - 1}_{j}" if age else "zeros()"
            after = f"d{at}" if age == last else f"s{v}_{age}_{j}"
            for k in walk.live(age):
                text.append(f"{after} = multiply{len(walk.products[k])}({before}, w{v}_{age}_{k}, x{k}_{at}, which)")
                before = after
        return text

    def _finish(self, step: int, at: int) -> list[str]:
        """The results of a part, to shared memory."""
        v, j = self.parts[at]
        byte = 2 * step * self.walk.line_out + self._place(v, j)
        put = f"put_turned(i32(to + i32({byte})), y[0], y[1], y[2], y[3])"
        return [f"y = results(d{at}, read{v}, channel{v}, e)", put]
