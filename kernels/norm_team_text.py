"""The text of norm_team.py's kernel, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.ir.types import DType
from tccompile.kernels.norm_split import LANES
from tccompile.kernels.text import indented

PARTS = 4
"""Groups of copies to shared memory: the first are summed up while the last are on their way."""

BATCH = 9
"""Pairs of other blocks' records that a thread reads at once from memory."""

AT_ONCE = 4
"""Sums in shared memory that a thread reads at once."""

ORIGINS = ((3, 7), (8, 29), (13, 53))
"""Pixels of an origin: so many sixteenths of them and so many more, away from an image's edge."""


@dataclass(frozen=True)
class Writer:
    """Writes the kernel's text. Thread (t, g) of T × V: pixels first, first + T … of its block's, up to `end`, and vector g.

    Of its pixels those below `kept` are in shared memory, the others are read twice.
    Shared memory, in rows of W = 8 V floats, one for each channel: from P on sums of deviations, a row for each t, and as many of
    squares; from A on those of T / subs rows of these together, subs rows, and as many; from O, M and R on a row of origins, of
    means and of scales; from E on sums of groups, two rows, for the others of the cluster. Then x: vectors at `slots` and steps
    of it, for k < kept. Sums of a group are added up by `lanes` threads of a warp.

    x        x's type
    depth    loops over an image's pixels
    grouped  whether a group has several channels
    cluster  whether a team is a cluster, which holds all of its image
    rows     pixels that a thread stores at once
    """

    x: DType
    depth: int
    grouped: bool
    cluster: bool
    rows: int

    def lines(self) -> list[str]:
        return [
            *self._places(),
            *self._share(),
            "item = team if team < teams else items",
            "while item < items:",
            *indented(self._item()),
            *indented([*self._copied(), *self._sums(), *self._block_sums()]),
            "    arrive(counter, tid)",
            "    await_all(counter, B, tid)",
            *indented([*self._moments(), *self._results()]),
            "    leave(counter, B, tid)",
            "    item = i32(item + teams)",
        ]

    # --- Where everything lies

    def _places(self) -> list[str]:
        """The thread's numbers, and the addresses in shared memory."""
        vector = LANES * self.x.size
        return [
            "tid, block, grid = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)",
            "shared = cuda.shared.array(0, f32)",
            "threads, W = i32(T * V), i32(V * 8)",
            "t = quotient(tid, V)",
            "g = i32(tid - t * V)",
            "subs = i32(max(i32(1), T >> 3))",
            "sub = quotient(tid, W) if T >= 8 else i32(0)",
            "own_ch = i32(tid - sub * W) if sub < subs else W",
            "G, at_once = quotient(W, share), quotient(threads, lanes)",
            "own_group = quotient(tid, lanes)",
            "lane = i32(tid - own_group * lanes)",
            "P = i32(shared_address(shared))",
            "A = i32(P + threads * 64)",
            "O = i32(A + subs * W * 8)",
            "M = i32(O + W * 4)",
            "R = i32(M + W * 4)",
            "E = i32(R + W * 4)",
            f"slots = i32(E + W * 8 + tid * {vector})",
            f"step = i32(threads * {vector})",
        ]

    def _share(self) -> list[str]:
        """The block's share of an item's pixels. A GPU that runs fewer blocks has smaller teams, or ones that take more items."""
        return [
            "B = i32(min(blocks, grid))",
            "pairs = i32(B + 1) >> 1",
            "team, teams = quotient(block, B), quotient(grid, B)",
            "block = i32(block - team * B)",
            "chunk = quotient(i32(K + B - 1), B)",
            "begin = i32(min(K, i32(block * chunk)))",
            "end = i32(min(K, i32(begin + chunk)))",
            "kept = i32(min(end, i32(begin + held)))",
            f"quarter = quotient(i32(held + {PARTS} * T - 1), i32({PARTS} * T))",  # of what shared memory has room for
            "quarter, quarter_bytes = i32(quarter * T), i32(quarter * step)",
            "first = i32(begin + t)",
        ]

    def _item(self) -> list[str]:
        size = self.x.size
        return [
            "image = quotient(item, tiles)",
            "c = i32(((item - image * tiles) * V + g) * 8)",
            f"base = x + (i64(image) * i64(xn) + i64(c)) * i64({size})",
            f"start = x + (i64(image) * i64(xn) + i64(item - image * tiles) * i64(W)) * i64({size})",
            "inside = i32(c < present)",
            "bytes_inside = i32(inside << 4)",
            "counter = counters + i64(item) * i64(8)",
        ]

    def _address(self, k: str) -> str:
        """The thread's vector of pixel k."""
        offset = f"i64({k}) * i64(wk[0])" if self.depth == 1 else f"inner({k}, wk)"
        return f"base + {offset} * i64({self.x.size})"

    # --- What is read

    def _copied(self) -> list[str]:
        """Has pixels copied to shared memory, and keeps origins there, each the median of three pixels.

        Origins are asked for first: behind the pixels they would come last.
        """
        asked = self._origins()
        return [
            "ch = tid",
            *asked,
            "if t == 0:",
            "    ahead(c, e)",
            *self._copies(),
            "while ch < W:",
            "    keep(i32(O + ch * 4), maximum(minimum(e0, e1), minimum(maximum(e0, e1), e2)))",
            "    ch = i32(ch + threads)",
            "    if ch < W:",
            *indented(asked, 2),
            "cuda.syncthreads()",
        ]

    def _origins(self) -> list[str]:
        """Reads three pixels' values for channel ch, of its group's first channel: e0, e1, e2."""
        pixels = [f"i64(min(i32(K - 1), i32((K >> 4) * i32({m}) + i32({o}))))" for m, o in ORIGINS]
        offsets = [f"{p} * i64(wk[0])" if self.depth == 1 else f"inner(i32({p}), wk)" for p in pixels]
        return [
            "at = i32(quotient(ch, share) * share) if share > 1 else ch",
            "there = i32(ch < W and i32(i32(item - image * tiles) * W + at) < present)",
            *(f"e{i} = element(start + ({o} + i64(at)) * i64({self.x.size}), there)" for i, o in enumerate(offsets)),
        ]

    def _copies(self) -> list[str]:
        return [
            "k, part, slot = first, i32(0), slots",
            f"while part < {PARTS}:",
            "    part = i32(part + 1)",
            "    stop = i32(min(kept, i32(begin + part * quarter)))",
            "    while k < stop:",
            f"        at = {self._address('k')}",
            *(f"        copy(i32(slot + {b}), at + i64({b}), bytes_inside)" for b in range(0, LANES * self.x.size, 16)),
            "        k = i32(k + T)",
            "        slot = i32(slot + step)",
            "    commit()",
        ]

    def _stream(self, far: str, body: list[str]) -> list[str]:
        """Reads `rows` pixels k, k + T … from memory, as w0 …, those at `far` meanwhile, and goes on with these."""

        def ahead(k: str) -> list[str]:
            lines = []
            for r in range(self.rows):
                inside = f"i32(kept <= k{r} and k{r} < end) & inside"
                lines.append(f"k{r} = i32({k} + i32({r}) * T)")
                lines.append(f"next{r} = read_words({self._address(f'max(k{r}, i32(0))')}, i32({inside}))")
            return lines

        return [
            *ahead("k"),
            "while k >= kept and k < end:",
            *(f"    w{r} = next{r}" for r in range(self.rows)),
            f"    far = i32({far})",
            *indented([*ahead("far"), *body]),
            "    k = far",
        ]

    # --- Statistics

    def _sums(self) -> list[str]:
        """The thread's sums of deviations, and of their squares."""
        lines = [
            "part = i32(0)",
            f"h, sums = own8(i32(O + g * 32)), ({'f32(0), ' * 2 * LANES})",
            f"while part < {PARTS}:",
            *(line for p in range(PARTS) for line in (f"    if part == {p}:", f"        landed{p}()")),
            "    k, slot = i32(first + part * quarter), i32(slots + part * quarter_bytes)",
            "    part = i32(part + 1)",
            "    stop = i32(min(kept, i32(begin + part * quarter)))",
            "    while k < stop:",
            "        two = i32(k + T < stop)",
            "        a, b = held_words(slot, i32(1)), held_words(i32(slot + step), two)",
            "        sums = deviations(sums, h, a)",
            "        if two != 0:",
            "            sums = deviations(sums, h, b)",
            "        k = i32(k + 2 * T)",
            "        slot = i32(slot + 2 * step)",
        ]
        if self.cluster:  # it holds all of them
            return lines
        taken = [(f"if k + i32({r}) * T < end:", f"    sums = deviations(sums, h, w{r})") for r in range(self.rows)]
        return [
            *lines,
            "k = i32(kept + t)",
            *self._stream(f"k + i32({self.rows}) * T", [line for pair in taken for line in pair]),
        ]

    def _block_sums(self) -> list[str]:
        """The block's sums: of threads, of some rows of threads' and of all, for each channel, and those of groups."""
        lane_sums = [", ".join(f"sums[{i + first}]" for i in range(LANES)) for first in (0, LANES)]
        pass_on = ["keep(i32(E + group * 4), s1)", "keep(i32(E + (W + group) * 4), s2)"]
        return [
            f"keep8(i32(P + tid * 32), {lane_sums[0]})",
            f"keep8(i32(P + (threads + tid) * 32), {lane_sums[1]})",
            "cuda.syncthreads()",
            "ch, far = own_ch, i32(threads * 32)",
            "while ch < W:",
            "    s1, s2 = f32(0), f32(0)",
            *indented(_added("sub", "subs", "T", "P + ({r} * W + ch) * 4")),
            "    at = i32(A + (sub * W + ch) * 4)",
            "    keep(at, s1)",
            "    keep(i32(at + subs * W * 4), s2)",
            "    ch = i32(ch + threads)",
            "cuda.syncthreads()",
            "first_group, far = i32(0), i32(subs * W * 4)",
            "while first_group < G:",
            "    group = i32(first_group + own_group)",
            "    in_group = i32(own_group < at_once and group < G)",
            "    s1, s2 = f32(0), f32(0)",
            *indented([*self._of_group(), *TOGETHER]),
            "    if lane == 0 and in_group != 0:",
            *indented(pass_on if self.cluster else [f"put2({_record('block')}, s1, s2)"], 2),
            "    first_group = i32(first_group + at_once)",
        ]

    def _of_group(self) -> list[str]:
        """The lane's part of a group's sums in this block."""
        if not self.grouped:
            return ["if in_group != 0:", *indented(_added("lane", "lanes", "subs", "A + ({r} * W + group) * 4"))]
        of_rows = _added("i32(0)", "i32(1)", "subs", "A + ({r} * W + group * share + i) * 4")
        return ["i = lane", "while i < share and in_group != 0:", *indented(of_rows), "    i = i32(i + lanes)"]

    def _moments(self) -> list[str]:
        """The mean and the scale of each channel, from the sums of the whole team."""
        known = [
            "origin = own(i32(O + ch * 4))",
            "keep(i32(M + ch * 4), origin + d)",
            "keep(i32(R + ch * 4), scale)",
        ]
        return [
            "first_group, inverse = i32(0), f32(1) / (f32(K) * f32(share))",
            "while first_group < G:",
            "    group = i32(first_group + own_group)",
            "    in_group = i32(own_group < at_once and group < G)",
            "    s1, s2 = f32(0), f32(0)",
            "    i = lane",
            *indented([*self._of_team(), *TOGETHER]),
            "    d = s1 * inverse",
            "    scale = f32(1) / sqrt(maximum(s2 - s1 * d, f32(0)) * inverse + eps)",
            "    i = lane",
            "    while i < share and in_group != 0:",
            "        ch = i32(group * share + i)",
            *indented(known, 2),
            "        i = i32(i + lanes)",
            "    first_group = i32(first_group + at_once)",
            "done(counter, tid)",
            "cuda.syncthreads()",
        ]

    def _of_team(self) -> list[str]:
        """The lane's part of a group's sums in all blocks of the team."""
        if self.cluster:
            return [
                "while i < B and in_group != 0:",
                "    s1 += theirs(i32(E + group * 4), i)",
                "    s2 += theirs(i32(E + (W + group) * 4), i)",
                "    i = i32(i + lanes)",
            ]
        lines = [f"at = {_record('0')}", "while i < pairs and in_group != 0:"]
        for u in range(BATCH):
            lines += [f"    r{u} = i32(i + i32({u}) * lanes)"]
            lines += [f"    a{u}, b{u}, c{u}, d{u} = get4(at + i64(r{u}) * i64(16), i32(r{u} < pairs))"]
        for u in range(BATCH):
            other = f"i32(2 * r{u} + 1) < B"  # a number of blocks may be odd
            lines += [f"    s1 += a{u} + select({other}, c{u}, f32(0))", f"    s2 += b{u} + select({other}, d{u}, f32(0))"]
        return [*lines, f"    i = i32(i + i32({BATCH}) * lanes)"]

    # --- Results

    def _results(self) -> list[str]:
        """Stores what is read again, from the last pixel on, and then what shared memory holds."""
        rows = self.rows
        lines = ["means, scales = own8(i32(M + g * 32)), own8(i32(R + g * 32))"]
        if not self.cluster:
            turns = f"quotient(i32(max(end - k, i32(0)) + {rows} * T - 1), i32({rows} * T))"
            lines += [
                "k = i32(kept + t)",
                f"k = i32(k + ({turns} - 1) * {rows} * T)",  # the last
                *self._stream(f"k - i32({rows}) * T", [self._store("w{r}", "end")]),
            ]
        held = "held_words(i32(slot + i32({r}) * step), i32(k + i32({r}) * T < kept))"
        return [
            *lines,
            "k, slot = first, slots",
            "while k < kept:",
            f"    {self._store(held, 'kept')}",
            f"    k = i32(k + i32({rows}) * T)",
            f"    slot = i32(slot + i32({rows}) * step)",
        ]

    def _store(self, words: str, limit: str) -> str:
        results = " + ".join(f"scaled({words.format(r=r)}, means, scales)" for r in range(self.rows))
        return f"store({results}, i32(image * K + k), T, i32(image * K + {limit}), c, e)"


TOGETHER = (
    "half = lanes >> i32(1)",
    "while half > 0:",
    "    o1 = shuffle(s1, half)",
    "    o2 = shuffle(s2, half)",
    "    s1, s2, half = s1 + o1, s2 + o2, half >> i32(1)",
)
"""Adds up s1 and s2 of `lanes` neighbours."""


def _record(block: str) -> str:
    """The address of what a block passes on of a group."""
    return f"statistics + ((i64(item) * i64(G) + i64(group)) * i64(pairs) * i64(2) + i64({block})) * i64(8)"


def _added(first: str, step: str, limit: str, place: str) -> list[str]:
    """Adds up the sums at `place` of {r}, for r = first, first + step …, some at a time: s1 and s2."""
    text = [f"r = {first}", f"while r < {limit}:"]
    for u in range(AT_ONCE):
        text += [f"    r{u} = i32(r + i32({u}) * {step})", f"    at = i32({place.format(r=f'min(r{u}, i32({limit} - 1))')})"]
        text += [f"    a{u}, b{u} = own(at), own(i32(at + far))"]
    for u in range(AT_ONCE):
        inside = f"r{u} < {limit}"
        text += [f"    s1 += select({inside}, a{u}, f32(0))", f"    s2 += select({inside}, b{u}, f32(0))"]
    return [*text, f"    r = i32(r + i32({AT_ONCE}) * {step})"]
