"""Runs a kernel's PTX as it was compiled, without a GPU: all threads of a block at once in NumPy, block after block.

For kernels whose bodies are Python that Numba compiles (`simulator` runs those of generated text). Of the threads that can run,
those at the lowest address do, so that a warp's come together again where its branches join. What is asynchronous comes as late
as it may: cp.async when its group is waited for, the copy engine's boxes when nobody can run otherwise. Products of wgmma are
there at once. Memory is `memory.Memory`, which knows what may be accessed; shared memory and registers begin as NaN.
Of shared memory `races.Races` knows who may access it when, whoever comes first here.

Where grids start before those ahead of them have ended, a thread that has not waited for these may touch nothing but constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from tccompile.arch import Arch, Feature
from tccompile.emit import cache as kernels
from tccompile.emit.compile import _key as compile_key
from tccompile.emit.ptx import ptx_text
from tccompile.ir.extent import round_up
from tccompile.ir.program import Program
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.types import DType
from tccompile.kernels import family
from tccompile.kernels.spec import F32, I32, Code, Im2colMap, Launch, TiledMap, Work
from tests.kernels.memory import SPACE, Memory
from tests.kernels.races import BESIDE, Races

SHARED = 1 << 62
"""Generic addresses of shared memory."""

MAPS = 1 << 61
STEP = 32  # bytes of K that a wgmma takes
"""The address of a launch's first tensor map; others lie 128 bytes apart."""

WINDOW = 1 << 18
"""From the addresses of a block's shared memory to those of the next one of its cluster."""

NAMES = 16
"""Barriers of a block by name. Those of a cluster's blocks are numbered one block after the other, and its own comes last."""

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

FLOAT8 = {"e4m3": DType.E4M3, "e5m2": DType.E5M2, "e4m3x2": DType.E4M3, "e5m2x2": DType.E5M2}
"""What instructions call floats of 8 bits, and two of them."""

DIGITS = 14
"""Of Tensor Cores' sums of floats of 8 bits."""

Step = Callable[[np.ndarray], Any]
"""Executes an instruction in the threads of a mask."""

Box = tuple[int, np.ndarray, np.ndarray, np.ndarray]
"""Elements that the copy engine moves: their buffer, for each the byte there and whether it is in the array, and where every 16
bytes of them lie in shared memory, swizzled by that."""


def warps_of(mask: np.ndarray) -> np.ndarray:
    """The numbers of warps that threads of a mask are of."""
    return np.flatnonzero(np.bincount(np.flatnonzero(mask) // 32))


def cut(sums: np.ndarray) -> np.ndarray:
    """Sums with their first `DIGITS` binary digits, in float32."""
    mantissa, exponent = np.frexp(sums)
    return np.ldexp(np.trunc(mantissa * 2.0**DIGITS), exponent - DIGITS).astype(np.float32)


def dtype_of(kind: str) -> Any:
    """NumPy's type of a PTX one."""
    letter, bits = kind[0], int(kind[1:])
    return np.dtype({"f": "f", "s": "i"}.get(letter, "u") + str(bits // 8))


# --- Text to statements ----------------------------------------------------------------------------------------------


@dataclass
class Parsed:
    """An entry: (guard, opcode, operands) or a label each, kinds of registers, and parameters' kinds."""

    statements: list[tuple[str | None, str, list[str]] | str] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # names in shared memory, and where they lie
    sizes: list[int] = field(default_factory=list)
    params: list[str] = field(default_factory=list)


def parse(text: str) -> Parsed:
    """PTX of one entry. Registers that are declared in inner braces get names of their own."""
    out = Parsed()
    head, _, body = text.partition("{\n")
    out.params = re.findall(r"\.param \.(\w+) ", head)
    declared = re.findall(r"\.shared (?:\.align \d+ )?\.b(\d+) ([\w$]+)\[(\d*)\]", text)
    for bits, name, count in sorted(declared, key=lambda d: not d[2]):  # what the launch gives comes last
        out.shared[name] = sum(out.sizes)
        out.sizes.append(-(-int(bits) // 8 * int(count or 0) // 128) * 128)
    scopes: list[dict[str, str]] = [{}]
    i, number = 0, 0
    while True:
        while body[i].isspace():
            i += 1
        if body[i] == "{":
            scopes.append({})
            i += 1
        elif body[i] == "}":
            scopes.pop()
            i += 1
            if not scopes:
                return out
        elif label := re.compile(r"([\w$]+):").match(body, i):
            out.statements.append(label[1])
            i = label.end()
        else:
            end = body.index(";", i)
            line, i = body[i:end].strip(), end + 1
            if line.startswith(".reg"):
                _, kind, names = line.split(None, 2)
                for name in (n.strip() for n in names.split(",")):
                    if numbered := re.fullmatch(r"(%\w+?)<(\d+)>", name):
                        out.registers |= {f"{numbered[1]}{k}": kind[1:] for k in range(int(numbered[2]))}
                    else:
                        number += 1
                        scopes[-1][name] = f"{name}@{number}"
                        out.registers[f"{name}@{number}"] = kind[1:]
                continue
            if line.startswith("."):  # .loc, .pragma, .shared
                continue
            names = {k: v for scope in scopes for k, v in scope.items()}
            line = re.sub(r"(?<![\w$.%@])[a-zA-Z_]\w*(?![\w$.:])", lambda m: names.get(m[0], m[0]), line)  # noqa: B023
            guard = None
            if line.startswith("@"):
                guard, line = line[1:].split(None, 1)
                bare = guard.lstrip("!")
                guard = guard.replace(bare, names.get(bare, bare))
            opcode, _, rest = line.partition(" ") if " " in line else line.partition("\t")
            opcode = opcode.strip()
            operands = [o.strip() for o in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\[\{]+", rest) if o.strip(" ,\t\n")]
            out.statements.append((guard, opcode, operands))


# --- A block ---------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int, copies: int, actors: int) -> None:
        """`copies`: the actor that copies are which it counts."""
        self.count = self.pending = count
        self.bytes, self.phases, self.copies = 0, 0, copies
        self.left, self.known = np.zeros((2, actors), np.int32)  # what those know who arrive, and who have waited

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than a barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1
            self.left[self.copies] = self.phases
            self.known = self.left.copy()


class Machine:
    """A launch: its instructions bound to registers of all threads of a block."""

    def __init__(self, launch: Launch, text: str, memory: Memory, early: bool = False, beyond: bool = False) -> None:
        """`early`: other grids may still run when this one starts. `beyond`: as `run` has it."""
        self.beyond = beyond
        self.parsed, self.memory = parse(text), memory
        self.grid, self.smem = launch.grid, launch.smem
        clusters = re.search(r"\.reqnctapercluster (\d+)", text)
        self.blocks = int(clusters[1]) if clusters else 1
        each = launch.block if self.blocks == 1 else round_up(launch.block, 128)  # threads, some of which there are not
        self.n = self.blocks * each
        self.rank = np.arange(self.n) // each
        self.there = np.arange(self.n) % each < launch.block
        self.windows = self.rank * WINDOW
        self.early, self.waited, self.ahead = early, np.zeros(self.n, bool), set[int]()
        assert not (early and "ld.global.nc" in text), "ptxas moves ld.global.nc ahead of griddepcontrol.wait"
        constants = {memory.program.tensors[name].storage for name in memory.program.constants}
        self.constant = {at // SPACE for name, at in memory.base.items() if name in constants}  # numbers of buffers
        self.maps: list[TiledMap | Im2colMap] = []
        args: list[int | float] = []
        for arg in launch.args:
            if isinstance(arg, TiledMap | Im2colMap):
                args.append(MAPS + 128 * len(self.maps))
                self.maps.append(arg)
            else:
                args.append(arg.value if isinstance(arg, I32 | F32) else memory.pointer(arg))  # type: ignore[arg-type]
        assert len(args) == len(self.parsed.params)
        self.args = [
            np.array([a if k[0] == "f" else int(a) & (1 << int(k[1:])) - 1], dtype_of(k)).view(UNSIGNED[int(k[1:]) // 8])
            for a, k in zip(args, self.parsed.params, strict=True)
        ]
        self.size = sum(self.parsed.sizes) + launch.smem
        self.shared = np.zeros(self.blocks * self.size, np.uint8)
        self.files: dict[int, np.ndarray] = {}
        self.registers: dict[str, np.ndarray] = {}
        by_size: dict[int, list[str]] = {}
        for name, kind in self.parsed.registers.items():
            by_size.setdefault(1 if kind == "pred" else int(kind[1:]) // 8, []).append(name)
        for size, names in by_size.items():
            self.files[size] = np.zeros((len(names), self.n), bool if size == 1 else UNSIGNED[size])
            self.registers |= dict(zip(names, self.files[size], strict=True))
        tid, one = np.arange(self.n, dtype=np.uint32) % np.uint32(each), np.ones(1, np.uint32)
        self.block = {axis: np.zeros(self.n, np.uint32) for axis in "xyz"}
        self.special = {"%tid.x": tid, "%ntid.x": one * launch.block, "%laneid": tid % 32, "%dynamic_smem_size": one * self.smem}
        self.special |= {"%cluster_ctarank": self.rank.astype(np.uint32)}
        self.special |= {f"%ctaid.{a}": self.block[a] for a in "xyz"}
        self.special |= {f"%nctaid.{a}": one * g for a, g in zip("xyz", self.grid, strict=True)}
        self.labels: dict[str, int] = {}
        statements: list[tuple[str | None, str, list[str]]] = []
        for statement in self.parsed.statements:
            if isinstance(statement, str):
                self.labels[statement] = len(statements)
            else:
                statements.append(statement)
        self.joins = set(self.labels.values())
        self.unit = 4  # bytes of shared memory that no access divides
        self.code = [(" ".join((s[1], *s[2])), self.bind(i, *s)) for i, s in enumerate(statements)]

    # Operands

    def source(self, operand: str, kind: str) -> np.ndarray:
        """The values of an operand: of all threads, or one for all."""
        if kind == "pred":
            return self.registers[operand] if operand in self.registers else np.array([int(operand) != 0])
        t = dtype_of(kind)
        if operand in self.registers:
            r = self.registers[operand]
            assert r.itemsize >= t.itemsize
            return r.view(t)[:: r.itemsize // t.itemsize]  # a wider register's low bits
        if operand in self.special:
            return self.special[operand].view(t)
        if operand in self.parsed.shared:
            return (self.parsed.shared[operand] + self.windows).astype(np.uint64)
        if operand[:2] == "0f":
            return np.array([int(operand[2:], 16)], np.uint32).view(t)
        return np.array([int(operand.rstrip("U"), 0) & (1 << 8 * t.itemsize) - 1], UNSIGNED[t.itemsize]).view(t)

    def target(self, operand: str) -> Callable[[Any, np.ndarray], None]:
        """Assigns to a register; narrower unsigned values are extended by zeros, signed ones by their sign."""
        r = self.registers[operand]
        kinds = {
            np.dtype(k + str(r.itemsize)): r.view(k + str(r.itemsize))
            for k in "uif"
            if r.dtype != bool and (k != "f" or r.itemsize > 1)
        }

        def assign(values: Any, mask: np.ndarray) -> None:
            view = kinds.get(values.dtype)
            if view is None:
                signed = values.dtype.kind == "i"
                view = r if r.dtype == bool else kinds[np.dtype(("i" if signed else "u") + str(r.itemsize))]
                values = values.astype(view.dtype)
            np.copyto(view, values, where=mask)

        return assign

    def address(self, operand: str) -> Callable[[], np.ndarray]:
        """[register + offset], as 64-bit numbers."""
        m = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        assert m, operand
        base, offset = m[1], int(m[2] or "0", 0)
        if base in self.parsed.shared:
            return lambda: self.parsed.shared[base] + offset + self.windows
        r = self.registers[base]
        return lambda: np.broadcast_to(r.astype(np.int64) + offset, (self.n,))

    # Memory

    def read(self, space: str, at: np.ndarray, size: int) -> np.ndarray:
        """(threads, size) bytes."""
        spread = np.arange(size)
        if space == "shared":
            return self.shared[self.lies(at, size)[:, None] + spread]
        out = np.empty((len(at), size), np.uint8)
        for k, mine, offset in self.places(at, size):
            out[mine] = self.memory.buffers[k].view(np.uint8)[offset[:, None] + spread]
        return out

    def write(self, space: str, at: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        spread = np.arange(size)
        if space == "shared":
            self.shared[self.lies(at, size)[:, None] + spread] = data
            return
        for k, mine, offset in self.places(at, size):
            self.memory.buffers[k].view(np.uint8)[offset[:, None] + spread] = data[mine]
            np.add.at(self.memory.written[k], offset[:, None] + spread, 1)

    def lies(self, at: np.ndarray, size: int) -> np.ndarray:
        """Where in `shared` so many bytes at addresses in shared memory are."""
        block, inside = at // WINDOW, at % WINDOW
        assert (at % size == 0).all(), "an access that is not aligned"
        assert ((block >= 0) & (block < self.blocks) & (inside + size <= self.size)).all(), "an access outside shared memory"
        return block * self.size + inside

    def places(self, at: np.ndarray, size: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For each buffer: its number, which threads access it, and where."""
        numbers = at // SPACE
        out = []
        for k in np.unique(numbers):
            mine = np.flatnonzero(numbers == k)
            offset = at[mine] % SPACE - SPACE // 2
            assert 0 <= k < len(self.memory.buffers), "an access outside all tensors"
            assert (offset % size == 0).all(), "an access that is not aligned"
            inside = (offset >= 0) & (offset + size <= self.memory.buffers[k].nbytes)
            assert inside.all(), f"an access {offset[~inside][:1]} bytes into {self.memory.buffers[k].nbytes}"
            out.append((int(k), mine, offset))
        return out

    def touch(self, who: np.ndarray, buffers: np.ndarray, writes: bool) -> None:
        """Threads access buffers of these numbers; `ahead` are those that some read before they waited."""
        if self.early and not self.waited[who].all():
            ahead = {*buffers[~self.waited[who]].tolist()}
            assert ahead <= self.constant and not writes, f"before griddepcontrol.wait: {self.code[self.here][0]}"
            self.ahead |= ahead

    def order(self, who: np.ndarray, at: np.ndarray, size: int, writes: bool, beside: str = "", counted: Any = None) -> None:
        """Threads access shared memory, or what they start does: what goes on `beside` until they wait for it, or a copy that an
        mbarrier counts."""
        actor = warps = who // 32
        if counted:
            actor, time = (np.full(len(who), v) for v in (counted.copies, counted.phases + 1))
        elif beside:
            actor, time = self.races.beside(beside, warps), self.committed[beside][who] + 1
        else:
            time = self.races.known[warps, warps]
        found = self.races.access(warps, self.lies(at, 1), size, writes, actor, time)
        assert found is None, f"a race: {self.code[self.here][0]} by warps {np.unique(warps)}, and {found}"

    def finish(self, what: str, mask: np.ndarray, pending: int) -> None:
        """Threads have waited for all groups that they committed but for the last ones."""
        for warp in warps_of(mask):
            threads = slice(32 * warp, 32 * warp + 32)
            time = self.committed[what][threads][mask[threads]].min() - pending
            self.races.done(warp, what, time)
            for number, known in self.given.get(warp // 4, ()) if what == "wgmma" else ():
                if number <= time:
                    self.races.take(np.array([warp]), known)

    # Running

    def run_block(self, number: int, until_waited: bool = False) -> None:
        """Or the blocks of a cluster, as one: `number` is that of the first.

        until_waited  no further than to where all threads have waited for earlier grids
        """
        x, y, _ = self.grid
        for axis, value in zip("xyz", (number % x, number // x % y, number // (x * y)), strict=True):
            self.block[axis][:] = value + self.rank * (axis == "x")
        for size, registers in self.files.items():
            registers[:] = True if size == 1 else ~registers.dtype.type(0)
        self.shared[:] = 0xFF
        self.races = Races(self.n, len(self.shared), self.unit)
        self.committed = {what: np.zeros(self.n, np.int32) for what in BESIDE}  # groups, by thread
        self.given: dict[int, list[tuple[int, np.ndarray]]] = {}  # of warpgroups: groups that took all registers
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, tuple[np.ndarray, int, np.ndarray]] = {}  # barrier → who waits, how many arrived, what they know
        self.expected: dict[int, int] = {}
        self.apart = {size: np.zeros(self.n, bool) for size in (32, 128)}  # who waits for the rest of a warp or warpgroup
        self.reduced: list[tuple[np.ndarray, Any, Any]] = []
        self.copies: list[Callable[[], None]] = []
        self.stores: list[list[Callable[[], None]]] = [[] for _ in range(self.n)]  # of boxes, by thread
        self.groups: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(self.n)]
        self.pc, self.blocked = np.zeros(self.n, np.int64), np.zeros(self.n, bool)
        self.waited = np.zeros(self.n, bool)
        end = len(self.code)
        self.pc[~self.there] = end
        while not (until_waited and self.waited.all()):
            ready = ~self.blocked & (self.pc < end)
            if not ready.any():
                if (self.pc >= end).all():
                    assert self.waited.any() or not self.early, "no thread waits for the grids before"
                    for store in [store for stores in self.stores for store in stores]:
                        store()
                    return
                assert self.copies, f"all threads wait, at {self.waiting()}"
                self.copies.pop(0)()
                continue
            at = int(self.pc[ready].min())
            mask = ready & (self.pc == at)
            while True:
                if self.code[at][1](mask):  # a jump, a wait or an end: it has set pc
                    break
                at += 1
                if at >= end or at in self.joins:
                    self.pc[mask] = at
                    break

    def waiting(self) -> set[str]:
        return {self.code[p][0] for p in self.pc[self.pc < len(self.code)]}

    def wake(self) -> None:
        """Those who wait for an mbarrier look again."""
        held = self.apart[32] | self.apart[128]
        for mask, *_ in self.named.values():
            held |= mask
        self.blocked[~held] = False

    # Instructions

    def bind(self, number: int, guard: str | None, opcode: str, operands: list[str]) -> Step:
        """The instruction in the place `number`. Executing it gives True if it has set pc."""
        parts = opcode.split(".")
        bound = getattr(self, f"do_{parts[0]}", None)
        if bound is None:
            raise ValueError(f"an instruction that no kernel had before: {opcode} {', '.join(operands)}")
        always: Step = bound(parts, operands)
        jumps = parts[0] in ("bra", "ret")
        p, wanted = self.registers[guard.lstrip("!")] if guard else None, guard and guard[0] != "!"

        def step(mask: np.ndarray) -> bool:
            self.here = number
            if p is not None:
                if jumps:
                    self.pc[mask] = number + 1
                mask = mask & (p == wanted)
                if not mask.any():
                    return jumps
            return bool(always(mask))

        return step

    def do_bra(self, parts: list[str], operands: list[str]) -> Step:
        to = self.labels[operands[0]]

        def step(mask: np.ndarray) -> bool:
            self.pc[mask] = to
            return True

        return step

    def do_ret(self, parts: list[str], operands: list[str]) -> Step:
        def step(mask: np.ndarray) -> bool:
            self.pc[mask] = len(self.code)
            self.release()
            return True

        return step

    def nothing(self, parts: list[str], operands: list[str]) -> Step:
        return lambda mask: None

    do_fence = do_membar = do_prefetch = do_setmaxnreg = nothing

    def do_griddepcontrol(self, parts: list[str], operands: list[str]) -> Step:
        return (lambda mask: np.copyto(self.waited, True, where=mask)) if parts[1] == "wait" else self.nothing(parts, operands)

    # Arithmetic

    def plain(self, operands: list[str], kind: str, compute: Callable[..., np.ndarray]) -> Step:
        assign, sources = self.target(operands[0]), [self.source(o, kind) for o in operands[1:]]
        return lambda mask: assign(compute(*sources), mask)

    def do_mov(self, parts: list[str], operands: list[str]) -> Step:
        kind, (to, source) = parts[-1], operands
        if to[0] == "{" or source[0] == "{":
            half = f"u{int(kind[1:]) // 2}"
            if to[0] == "{":
                names = [n.strip() for n in to[1:-1].split(",")]
                whole, assigns = self.source(source, kind), [None if n == "_" else self.target(n) for n in names]

                def split(mask: np.ndarray) -> None:
                    pair = np.ascontiguousarray(np.broadcast_to(whole, (self.n,))).view(dtype_of(half)).reshape(-1, 2)
                    for assign, values in zip(assigns, pair.T, strict=True):
                        if assign:
                            assign(values, mask)

                return split
            low, high = (self.source(n.strip(), half) for n in source[1:-1].split(","))
            assign, t = self.target(to), dtype_of(f"u{kind[1:]}")
            bits = int(kind[1:]) // 2
            return lambda mask: assign(low.astype(t) | high.astype(t) << t.type(bits), mask)
        if kind == "pred":
            return self.plain(operands, "pred", lambda a: a)
        return self.plain(operands, f"u{kind[1:]}" if kind[0] == "b" else kind, lambda a: a)

    def do_cvta(self, parts: list[str], operands: list[str]) -> Step:
        by = np.uint64(0 if "global" in parts else SHARED)
        return self.plain(operands, "u64", (lambda a: a - by) if parts[1] == "to" else (lambda a: a + by))

    def of_pairs(self, base: str, half: np.dtype[Any], operands: list[str]) -> Step:
        """Of two halves of each word."""
        functions: dict[str, Callable[..., np.ndarray]] = {
            "mul": np.multiply, "sub": np.subtract, "fma": lambda a, b, c: a.astype(np.float64) * b + c, "max": np.maximum,
        }  # fmt: skip
        assign, words = self.target(operands[0]), [self.source(o, "u32") for o in operands[1:]]

        def step(mask: np.ndarray) -> None:
            pairs = (np.ascontiguousarray(np.broadcast_to(v, (self.n,))).view(half) for v in words)
            assign(functions[base](*pairs).astype(half).view(np.uint32), mask)

        return step

    def binary(self, parts: list[str], operands: list[str]) -> Step:
        base, kind = parts[0], parts[-1]
        if kind in ("f16x2", "s16x2", "u16x2"):
            return self.of_pairs(base, dtype_of(kind[:3]), operands)
        if kind == "pred":
            return self.plain(operands, "pred", {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[base])
        kind = f"u{kind[1:]}" if kind[0] == "b" else kind
        t = dtype_of(kind)
        if "wide" in parts:
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            w = dtype_of(wide)
            if base == "mad":
                assign, c = self.target(operands[0]), self.source(operands[3], wide)
                a, b = (self.source(o, kind) for o in operands[1:3])
                return lambda mask: assign(a.astype(w) * b.astype(w) + c, mask)
            return self.plain(operands, kind, lambda a, b: a.astype(w) * b.astype(w))
        if "hi" in parts:
            bits = 8 * t.itemsize
            high = np.frompyfunc(lambda a, b: int(a) * int(b) >> bits, 2, 1)
            return self.plain(operands, kind, lambda a, b: high(a, b).astype(t))
        if base == "shl":
            assign, a, by = self.target(operands[0]), self.source(operands[1], kind), self.source(operands[2], "u32")
            return lambda mask: assign(a << by.astype(t), mask)
        if base == "shr":
            assign, a, by = self.target(operands[0]), self.source(operands[1], kind), self.source(operands[2], "u32")
            return lambda mask: assign(a >> by.astype(t), mask)
        if base == "fma" or (base == "mad" and t.kind == "f"):
            return self.plain(operands, kind, lambda a, b, c: (a.astype(np.float64) * b.astype(np.float64) + c).astype(t))
        if base in ("div", "rem") and t.kind != "f":
            exact = np.frompyfunc(
                lambda a, b: 0 if not b else abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1), 2, 1
            )
            rest = np.frompyfunc(lambda a, b: 0 if not b else abs(int(a)) % abs(int(b)) * (1 if a >= 0 else -1), 2, 1)
            f = exact if base == "div" else rest
            return self.plain(operands, kind, lambda a, b: f(a, b).astype(t))
        functions: dict[str, Callable[..., np.ndarray]] = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "mad": lambda a, b, c: a * b + c,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative,
            "min": np.fmin if t.kind == "f" else np.minimum, "max": np.fmax if t.kind == "f" else np.maximum,
            "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt,
            "tanh": lambda a: np.tanh(a).astype(np.float16).astype(t),  # to 11 digits
        }  # fmt: skip
        return self.plain(operands, kind, functions[base])

    do_add = do_sub = do_mul = do_mad = do_fma = do_min = do_max = do_div = do_rem = do_and = do_or = do_xor = binary
    do_shl = do_shr = do_neg = do_abs = do_ex2 = do_lg2 = do_rcp = do_sqrt = do_tanh = binary

    def do_popc(self, parts: list[str], operands: list[str]) -> Step:
        return self.plain(operands, "u32", np.bitwise_count)

    def do_not(self, parts: list[str], operands: list[str]) -> Step:
        if parts[-1] == "pred":
            return self.plain(operands, "pred", np.logical_not)
        return self.binary(parts, operands)

    def do_lop3(self, parts: list[str], operands: list[str]) -> Step:
        table = int(operands[4], 0)

        def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
            out = np.zeros_like(a)
            for i in (i for i in range(8) if table >> i & 1):
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return out

        return self.plain(operands[:4], "u32", look_up)

    def do_bfe(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        assign, a = self.target(operands[0]), self.source(operands[1], kind)
        at, n = (self.source(o, "u32") for o in operands[2:])
        bits, t = int(kind[1:]), dtype_of(kind)
        return lambda mask: assign((a << (bits - at - n).astype(t)) >> (bits - n).astype(t), mask)

    def do_bfi(self, parts: list[str], operands: list[str]) -> Step:
        kind = f"u{parts[-1][1:]}"
        assign, (a, b) = self.target(operands[0]), (self.source(o, kind) for o in operands[1:3])
        at, n = (self.source(o, "u32") for o in operands[3:])
        t = dtype_of(kind)

        def step(mask: np.ndarray) -> None:
            field_ = (t.type(1) << n.astype(t)) - t.type(1)
            assign((b & ~(field_ << at.astype(t))) | (a & field_) << at.astype(t), mask)

        return step

    def do_prmt(self, parts: list[str], operands: list[str]) -> Step:
        assign = self.target(operands[0])
        a, b, selector = (self.source(o, "u32") for o in operands[1:])

        def step(mask: np.ndarray) -> None:
            both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
            out = np.zeros(1, np.uint32)
            for k in range(4):
                pick = (selector >> np.uint32(4 * k) & np.uint32(15)).astype(np.uint64)
                assert (np.broadcast_to(pick, self.n)[mask] < 8).all()  # the others' are nobody's
                out = out | ((both >> pick * np.uint64(8)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * k)
            assign(out, mask)

        return step

    def do_setp(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        kind = f"u{kind[1:]}" if kind[0] == "b" else kind
        compare = {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
            "neu": lambda a, b: ~(a == b) | np.isnan(a) | np.isnan(b), "leu": lambda a, b: ~(a > b),
            "ltu": lambda a, b: ~(a >= b),
            "geu": lambda a, b: ~(a < b), "gtu": lambda a, b: ~(a <= b), "equ": lambda a, b: ~((a < b) | (a > b)),
            "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        }[parts[1]]  # fmt: skip
        assign, (a, b) = self.target(operands[0]), (self.source(o, kind) for o in operands[1:3])
        if parts[1] == "ne" and kind[0] == "f":  # ordered
            return lambda mask: assign((a < b) | (a > b), mask)
        if len(operands) == 3:
            return lambda mask: assign(compare(a, b), mask)
        join = {"and": np.logical_and, "or": np.logical_or}[parts[2]]
        other, wanted = self.registers[operands[3].lstrip("!")], operands[3][0] != "!"
        return lambda mask: assign(join(compare(a, b), other == wanted), mask)

    def do_selp(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        kind = f"u{kind[1:]}" if kind[0] == "b" else kind
        assign, (a, b) = self.target(operands[0]), (self.source(o, kind) for o in operands[1:3])
        p = self.registers[operands[3]]
        return lambda mask: assign(np.where(p, a, b), mask)

    def do_cvt(self, parts: list[str], operands: list[str]) -> Step:
        to, kind = parts[-2:]
        if parts[1] == "pack":
            return self.pack_saturated(parts, operands)
        if to in FLOAT8 or kind in FLOAT8:
            return self.floats_of_8_bits(parts, operands)
        if to in ("f16x2", "bf16x2"):
            high, low = (self.source(o, "f32") for o in operands[1:])
            assign, half = self.target(operands[0]), DType.F16 if to == "f16x2" else DType.BF16

            def pack(mask: np.ndarray) -> None:
                rounded = (to_storage(v, half).view(np.uint16) for v in (low, high))
                words = [np.broadcast_to(v, (self.n,)).astype(np.uint32) for v in rounded]
                assign(words[0] | words[1] << np.uint32(16), mask)

            return pack
        t, rounds = dtype_of(to), {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
        rounding = next((rounds[p] for p in parts if p in rounds), None)
        if dtype_of(kind).kind == "f" and t.kind != "f":
            info = np.iinfo(t)
            assert rounding
            return self.plain(
                operands, kind, lambda a: np.clip(np.nan_to_num(rounding(a.astype(np.float64))), info.min, info.max).astype(t)
            )
        return self.plain(operands, kind, (lambda a: rounding(a).astype(t)) if rounding else (lambda a: a.astype(t)))

    def pack_saturated(self, parts: list[str], operands: list[str]) -> Step:
        """Two int32 as bytes, the second of them the lowest, below the lower half of the last operand."""
        to, rest = parts[3], ["cvt", "pack", "sat", parts[3], "s32", "b32"]
        assert parts == rest and to in ("u8", "s8")
        assign, (high, low) = self.target(operands[0]), (self.source(o, "s32") for o in operands[1:3])
        above, limits = self.source(operands[3], "u32"), np.iinfo(dtype_of(to))

        def step(mask: np.ndarray) -> None:
            first, second = (np.clip(v, limits.min, limits.max).astype(np.uint8).astype(np.uint32) for v in (low, high))
            assign(first | second << np.uint32(8) | above << np.uint32(16), mask)

        return step

    def floats_of_8_bits(self, parts: list[str], operands: list[str]) -> Step:
        """Two of them become two halves, or are what two float32 are rounded to; the second of these comes first."""
        to, kind = parts[-2:]
        assign = self.target(operands[0])
        if kind in FLOAT8:
            assert parts == ["cvt", "rn", "f16x2", kind]
            pair = self.source(operands[1], "u16")

            def widen(mask: np.ndarray) -> None:
                halves = (
                    from_storage((pair >> np.uint16(8 * k) & np.uint16(255)).astype(np.uint8), FLOAT8[kind]) for k in (0, 1)
                )
                words = [np.broadcast_to(h.astype(np.float16).view(np.uint16), (self.n,)).astype(np.uint32) for h in halves]
                assign(words[0] | words[1] << np.uint32(16), mask)

            return widen
        relu = parts[3] == "relu"
        assert parts == ["cvt", "rn", "satfinite", *["relu"] * relu, to, "f32"]
        high, low = (self.source(o, "f32") for o in operands[1:])

        def round_(mask: np.ndarray) -> None:
            values = (np.maximum(v, np.float32(0)) if relu else v for v in (low, high))
            first, second = (np.broadcast_to(to_storage(v, FLOAT8[to]), (self.n,)).astype(np.uint16) for v in values)
            assign(first | second << np.uint16(8), mask)

        return round_

    # Loads and stores

    def accessed(self, parts: list[str]) -> tuple[str, int, Any]:
        spaces = (p.removesuffix("::cluster") for p in parts)
        space = next((s for s in spaces if s in ("global", "shared", "param")), "global")  # of none: an address in any memory
        t = dtype_of(parts[-1])
        n = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        if space == "shared":
            self.unit = min(self.unit, n * t.itemsize)
        return space, n, t

    def do_ld(self, parts: list[str], operands: list[str]) -> Step:
        space, n, t = self.accessed(parts)
        assigns = [self.target(o.strip()) for o in operands[0].strip("{}").split(",")]
        assert len(assigns) == n
        if space == "param":
            value = self.args[int(re.search(r"_param_(\d+)", operands[1])[1])]  # type: ignore[index]
            return lambda mask: assigns[0](value.astype(UNSIGNED[t.itemsize]).view(t), mask)
        address = self.address(operands[1])

        def step(mask: np.ndarray) -> None:
            who = np.flatnonzero(mask)
            if space == "global":
                self.touch(who, address()[who] // SPACE, writes=False)
            else:
                self.order(who, address()[who], n * t.itemsize, writes=False)
            values = self.read(space, address()[who], n * t.itemsize).view(t)
            whole = np.zeros(self.n, t)
            for assign, column in zip(assigns, values.T, strict=True):
                whole[who] = column
                assign(whole, mask)

        return step

    def do_st(self, parts: list[str], operands: list[str]) -> Step:
        space, n, t = self.accessed(parts)
        address = self.address(operands[0])
        kind = f"u{8 * t.itemsize}"
        sources = [self.source(o.strip(), kind) for o in operands[1].strip("{}").split(",")]
        assert len(sources) == n

        def step(mask: np.ndarray) -> None:
            who = np.flatnonzero(mask)
            if space == "global":
                self.touch(who, address()[who] // SPACE, writes=True)
            else:
                self.order(who, address()[who], n * t.itemsize, writes=True)
            data = np.stack([np.broadcast_to(s, (self.n,))[who] for s in sources], 1)
            self.write(space, address()[who], np.ascontiguousarray(data).view(np.uint8))

        return step

    def do_atom(self, parts: list[str], operands: list[str]) -> Step:
        assert parts[-3:] == ["global", "add", "u32"]
        assign, address, value = self.target(operands[0]), self.address(operands[1]), self.source(operands[2], "u32")

        def step(mask: np.ndarray) -> None:
            at, by, out = address(), np.broadcast_to(value, (self.n,)), np.zeros(self.n, np.uint32)
            self.touch(np.flatnonzero(mask), at[mask] // SPACE, writes=True)
            for i in np.flatnonzero(mask):
                out[i] = np.uint32(self.memory.atomic_add(int(at[i]), int(by[i].view(np.int32))) & 0xFFFFFFFF)
            assign(out, mask)

        return step

    # Warps

    def lanes(self, mask: np.ndarray) -> np.ndarray:
        """The lanes of all warps in a mask, a row each."""
        whole = mask.reshape(-1, 32)
        assert (whole.all(1) | ~whole.any(1)).all(), "a warp exchanges values without some of its threads"
        return np.flatnonzero(mask).reshape(-1, 32)

    def do_vote(self, parts: list[str], operands: list[str]) -> Step:
        assert parts[1:] in (["sync", "any", "pred"], ["sync", "ballot", "b32"])
        assign, p, any_of = self.target(operands[0]), self.source(operands[1], "pred"), parts[2] == "any"

        def step(mask: np.ndarray) -> None:
            rows, out = self.lanes(mask), np.zeros(self.n, bool if any_of else np.uint32)
            votes = np.broadcast_to(p, (self.n,))[rows]
            out[rows] = votes.any(1, keepdims=True) if any_of else np.packbits(votes, 1, "little").view(np.uint32)
            assign(out, mask)

        return step

    def do_shfl(self, parts: list[str], operands: list[str]) -> Step:
        assign, a = self.target(operands[0]), self.source(operands[1], "u32")
        by = self.source(operands[2], "u32")
        own = int(operands[3], 0) >> 8  # the bits of a lane's number that stay its own: of which group of the warp it is
        assert parts[2] in ("bfly", "idx") and (parts[2] == "idx" or own == 0)

        def step(mask: np.ndarray) -> None:
            rows, out = self.lanes(mask), np.zeros(self.n, np.uint32)
            given = np.broadcast_to(by, (self.n,))[rows].astype(np.int64)
            other = rows % 32 & own | given & ~own if parts[2] == "idx" else rows % 32 ^ given
            out[rows] = np.take_along_axis(a[rows], other.astype(np.int64), 1)
            assign(out, mask)

        return step

    def do_ldmatrix(self, parts: list[str], operands: list[str]) -> Step:
        assigns = [self.target(o.strip()) for o in operands[0].strip("{}").split(",")]
        n = len(assigns)
        assert f"x{n}" in parts
        address, turned = self.address(operands[1]), "trans" in parts

        def step(mask: np.ndarray) -> None:
            rows = self.lanes(mask)
            asking = rows[:, : 8 * n].ravel()
            at = address()[asking]
            early = self.races.stale(asking // 32, self.lies(at, 1), 16) & self.beyond
            self.order(asking[~early], at[~early], 16, writes=False)
            data = self.read("shared", at, 16)
            data[early] = 0xFF  # NaN
            halves = data.view(np.uint16).reshape(-1, n, 8, 8)
            halves = halves.swapaxes(2, 3) if turned else halves
            words = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, n, 32)
            for i, assign in enumerate(assigns):
                out = np.zeros(self.n, np.uint32)
                out[rows] = words[:, i]
                assign(out, mask)

        return step

    def do_stmatrix(self, parts: list[str], operands: list[str]) -> Step:
        words = [self.registers[o.strip()] for o in operands[1].strip("{}").split(",")]
        address, n = self.address(operands[0]), len(words)
        assert f"x{n}" in parts
        turned = "trans" in parts

        def step(mask: np.ndarray) -> None:
            rows = self.lanes(mask)
            data = np.stack([w[rows] for w in words], 1)  # a row of each matrix is four lanes' words
            halves = np.ascontiguousarray(data).view(np.uint16).reshape(-1, 8, 8)
            halves = np.ascontiguousarray(halves.swapaxes(1, 2) if turned else halves)
            giving = rows[:, : 8 * n].ravel()
            self.order(giving, address()[giving], 16, writes=True)
            self.write("shared", address()[giving], halves.reshape(-1, 8).view(np.uint8))

        return step

    def elements(self, registers: list[np.ndarray], rows: np.ndarray, kind: str = "f16") -> np.ndarray:
        """What is in words of lanes, as float32 or int64: (warps, 8, 4, registers, elements of a word)."""
        words = np.ascontiguousarray(np.stack([r[rows] for r in registers], -1))
        if kind == "f16":
            values = words.view(np.float16).astype(np.float32)
        elif kind == "bf16":
            values = (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif kind in FLOAT8:
            values = from_storage(words.view(np.uint8), FLOAT8[kind])
        elif kind in ("s8", "u8"):
            values = words.view(kind.replace("s", "i").replace("8", "1")).astype(np.int64)
        else:
            assert kind == "tf32", kind
            values = (words & np.uint32(0xFFFFE000)).view(np.float32)
        return values.reshape(len(rows), 8, 4, len(registers), -1)

    def left(self, registers: list[np.ndarray], rows: np.ndarray, kind: str = "f16") -> np.ndarray:
        """The left operand of a warp's product, (warps, 16, K): half as many registers as a row has words, for two rows.

        One register is of 8 rows, (warps, 8, K).
        """
        elements = self.elements(registers, rows, kind)
        k, each = len(registers) // 2, elements.shape[-1]
        if not k:
            return elements.reshape(-1, 8, 4 * each)
        return elements.reshape(-1, 8, 4, k, 2, each).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 4 * k * each)

    def do_mma(self, parts: list[str], operands: list[str]) -> Step:
        sparse = parts[1].startswith("sp::ordered_metadata")
        shape, (sums, kind, other, same) = parts[3 + sparse], parts[-4:]
        if {kind, other} <= {"s8", "u8"}:
            known = (("m16n8k64", True), ("m8n8k16", False), ("m16n8k32", False))
            assert (shape, sparse) in known and sums == same == "s32", parts
        elif {kind, other} <= {"e4m3", "e5m2"}:
            assert (shape, sums, same, sparse) == ("m16n8k32", "f32", "f32", False), parts
        else:
            assert shape in (("m16n8k16", "m16n8k32") if sparse else ("m16n8k8", "m16n8k16")), parts
            assert (sums, other, same) == ("f32", kind, "f32") and (kind == "f16" or not sparse), parts
        number = np.float32 if sums == "f32" else np.int32
        a, b, c = ([self.registers[n.strip()] for n in o.strip("{}").split(",")] for o in operands[1:4])
        assigns = [self.target(n.strip()) for n in operands[0].strip("{}").split(",")]
        which, selected = (self.registers[operands[4]], int(operands[5], 16)) if sparse else (None, 0)

        def step(mask: np.ndarray) -> None:
            rows = self.lanes(mask)
            right = self.elements(b, rows, other).transpose(0, 3, 2, 4, 1).reshape(len(rows), -1, 8)
            left = self.left(a, rows, kind)
            if which is not None:
                left = unpacked(left.reshape(16 * len(rows), -1), which[rows], selected).reshape(len(rows), 16, -1)
            product = (left @ right).reshape(len(rows), -1, 8, 4, 2)
            for i, assign in enumerate(assigns):
                out = np.zeros(self.n, number)
                total = c[i].view(number)[rows] + product[:, i // 2, :, :, i % 2].reshape(-1, 32).astype(number)
                out[rows] = cut(total) if kind in FLOAT8 else total
                assign(out, mask)

        return step

    def do_dp4a(self, parts: list[str], operands: list[str]) -> Step:
        kinds = ["i1" if kind == "s32" else "u1" for kind in parts[1:]]
        a, b, c = (self.source(o, "b32") for o in operands[1:])
        assign = self.target(operands[0])

        def step(mask: np.ndarray) -> None:
            bytes_a, bytes_b = (
                np.ascontiguousarray(np.broadcast_to(v, (self.n,))).view(kind).reshape(self.n, 4).astype(np.int32)
                for v, kind in zip((a, b), kinds, strict=True)
            )
            assign((bytes_a * bytes_b).sum(1, dtype=np.int32) + c.view(np.int32), mask)

        return step

    # Barriers of the block

    def do_bar(self, parts: list[str], operands: list[str]) -> Step:
        if parts[1] == "warp":
            return partial(self.meet, size=32)
        reduces = parts[1] == "red"
        at = 1 if reduces else 0
        number = self.source(operands[at], "u32")
        count = int(operands[at + 1]) if len(operands) > at + 1 and operands[at + 1].isdigit() else 0
        p = self.registers[operands[-1].lstrip("!")] if reduces else None
        assign = self.target(operands[0]) if reduces else None

        def step(mask: np.ndarray) -> Any:
            self.lanes(mask)
            names = number + NAMES * self.rank
            for name in np.unique(names[mask]):
                mine = mask & (names == name)
                who, arrived, known = self.named.get(int(name), (np.zeros(self.n, bool), 0, 0))
                known = np.maximum(known, self.races.leave(warps_of(mine)))
                self.named[int(name)] = (who if parts[1] == "arrive" else who | mine, arrived + int(mine.sum()), known)
                self.expected[int(name)] = count
            if parts[1] != "arrive":
                self.blocked[mask] = True
                self.pc[mask] = self.here + 1
            if p is not None:
                self.reduced.append((mask, p[mask].any(), assign))
            self.release()
            return True if parts[1] != "arrive" else None

        return step

    def do_barrier(self, parts: list[str], operands: list[str]) -> Step:
        """Of the cluster: what happens between arriving and waiting is taken for what came before."""
        if parts[2] == "arrive":
            return self.nothing(parts, operands)

        def step(mask: np.ndarray) -> bool:
            who, arrived, known = self.named.get(NAMES * self.blocks, (np.zeros(self.n, bool), 0, 0))
            known = np.maximum(known, self.races.leave(warps_of(mask)))
            self.named[NAMES * self.blocks] = who | mask, arrived + int(mask.sum()), known
            self.expected[NAMES * self.blocks] = 0
            self.blocked[mask] = True
            self.pc[mask] = self.here + 1
            self.release()
            return True

        return step

    def do_mapa(self, parts: list[str], operands: list[str]) -> Step:
        return self.plain(operands, "u32", lambda at, block: at % np.uint32(WINDOW) + block * np.uint32(WINDOW))

    def meet(self, mask: np.ndarray, size: int) -> bool:
        """Those in the mask wait for the rest of their warps, or warpgroups."""
        apart = self.apart[size]
        apart |= mask
        self.blocked[mask] = True
        self.pc[mask] = self.here + 1
        groups = range(0, self.n, size)
        whole = [(apart | (self.pc >= len(self.code)))[first : first + size].all() for first in groups]
        there = np.repeat(whole, size)[: self.n] & apart
        apart &= ~there
        self.blocked[there] = False
        return True

    def release(self) -> None:
        """Lets go of those at barriers that are complete."""
        for name, (who, arrived, known) in list(self.named.items()):
            counted = (self.rank == name // NAMES) | (name == NAMES * self.blocks)
            needed = self.expected[name] or int((counted & (self.pc < len(self.code))).sum())
            assert arrived <= needed, "more threads at a barrier than it counts"
            if arrived == needed:
                del self.named[name]
                self.blocked[who] = False
                self.races.take(warps_of(who), known)
                for mask, _, assign in self.reduced:
                    assign(np.array([any(value for _, value, _ in self.reduced)]), mask)
                self.reduced = []

    # mbarriers

    def do_mbarrier(self, parts: list[str], operands: list[str]) -> Step:
        what = parts[1]
        if what == "try_wait":
            assign, address, parity = self.target(operands[0]), self.address(operands[1]), self.source(operands[2], "u32")

            def wait(mask: np.ndarray) -> Any:
                at, phase = address(), np.broadcast_to(parity, (self.n,))
                done = np.array([bool(mask[i]) and self.barriers[int(at[i])].phases % 2 != phase[i] for i in range(self.n)])
                assign(np.ones(1, bool), done)
                self.order(np.flatnonzero(mask), at[mask], 8, writes=False)
                for where in np.unique(at[done]):
                    self.races.take(warps_of(done & (at == where)), self.barriers[int(where)].known)
                self.pc[mask] = self.here
                self.pc[done] = self.here + 1
                self.blocked[mask & ~done] = True
                return True

            return wait
        address = self.address(operands[0 if what == "init" else 1])
        value = self.source(operands[-1], "u32") if what == "init" or "expect_tx" in parts else None

        def step(mask: np.ndarray) -> None:
            at = address()
            self.order(np.flatnonzero(mask), at[mask], 8, writes=what == "init")
            for where in np.unique(at[mask]) if what != "init" else ():
                left = self.barriers[int(where)].left
                np.maximum(left, self.races.leave(warps_of(mask & (at == where))), out=left)
            for i in np.flatnonzero(mask):
                number = 0 if value is None else int(np.broadcast_to(value, (self.n,))[i])
                if what == "init":
                    copies = self.races.copies(int(at[i]))
                    self.barriers[int(at[i])] = Barrier(number, copies, self.races.known.shape[1])
                    continue
                barrier = self.barriers[int(at[i])]
                barrier.bytes += number
                barrier.pending -= 1
                barrier.settle()
            self.wake()

        return step

    # Copies

    def do_cp(self, parts: list[str], operands: list[str]) -> Step:
        if parts[2] == "commit_group":

            def commit(mask: np.ndarray) -> None:
                self.committed["cp.async"][mask] += 1
                for i in np.flatnonzero(mask):
                    self.groups[i].append([])

            return commit
        if parts[2] == "wait_group":
            pending = int(operands[0])

            def wait(mask: np.ndarray) -> None:
                self.finish("cp.async", mask, pending)
                for i in np.flatnonzero(mask):
                    while len(self.groups[i]) > pending + 1:
                        for copy in self.groups[i].pop(0):
                            copy()

            return wait
        if parts[2:5] == ["bulk", "wait_group", "read"]:
            left = int(operands[0])

            def read(mask: np.ndarray) -> None:
                self.finish("stores", mask, left)
                for i in np.flatnonzero(mask):
                    while len(self.stores[i]) > left:
                        self.stores[i].pop(0)()

            return read
        if parts[2:5] == ["bulk", "shared::cluster", "global"] and operands[1][-1] == "]" and "," not in operands[1]:
            return self.copy_run(operands)
        if parts[2] == "bulk":  # each box that is stored is a group of its own
            if parts[3] == "commit_group":
                return lambda mask: None
            return self.copy_box(operands, parts[5] == "global", parts[-1] == "multicast::cluster")
        assert parts[1:5] == ["async", "cg", "shared", "global"] and operands[2] == "16"
        to, source, count = self.address(operands[0]), self.address(operands[1]), self.source(operands[3], "u32")

        def step(mask: np.ndarray) -> None:
            at, where, size = to(), source(), np.broadcast_to(count, (self.n,))
            copying = np.flatnonzero(mask & (size > 0))
            self.touch(copying, where[copying] // SPACE, writes=False)
            self.order(np.flatnonzero(mask), at[mask], 16, writes=True, beside="cp.async")
            for i in np.flatnonzero(mask):
                self.groups[i][-1].append(partial(self.copy16, int(at[i]), int(where[i]), int(size[i])))

        return step

    def copy16(self, to: int, source: int, size: int) -> None:
        assert size in (0, 16)
        data = self.read("global", np.array([source]), 16) if size else np.zeros((1, 16), np.uint8)
        self.write("shared", np.array([to]), data)

    def copy_run(self, operands: list[str]) -> Step:
        """Neighbours in memory, by the copy engine."""
        to, source, barrier = (self.address(operands[i]) for i in (0, 1, 3))
        count = self.source(operands[2], "u32")

        def step(mask: np.ndarray) -> None:
            for i in np.flatnonzero(mask):
                n = int(np.broadcast_to(count, (self.n,))[i])
                lie, at = int(to()[i]) + 16 * np.arange(n // 16), int(source()[i]) + 16 * np.arange(n // 16)
                assert n % 16 == 0
                self.touch(np.array([i]), at[:1] // SPACE, writes=False)
                counted = self.barriers[int(barrier()[i])]
                self.order(np.full(len(lie), i), lie, 16, writes=True, counted=counted)
                self.copies.append(partial(self.place_run, lie, at, counted))

        return step

    def place_run(self, lie: np.ndarray, at: np.ndarray, barrier: Barrier) -> None:
        self.write("shared", lie, self.read("global", at, 16))
        barrier.bytes -= 16 * len(lie)
        barrier.settle()
        self.wake()

    def copy_box(self, operands: list[str], stores: bool, to_several: bool) -> Step:
        to_blocks = self.source(operands.pop(), "u16") if to_several else None
        mapped, shared = operands[:2] if stores else operands[1::-1]
        name, coordinates = re.fullmatch(r"\s*(\S+)\s*,\s*\{(.*)\}\s*", mapped.strip("[]")).groups()  # type: ignore[union-attr]
        to, barrier, which = self.address(shared), self.address(shared if stores else operands[2]), self.registers[name]
        at = [self.source(c.strip(), "s32") for c in coordinates.split(",")]
        taps = [self.source(c.strip(), "u16") for o in operands[3:] for c in o[1:-1].split(",")]  # im2col's, in its window

        def step(mask: np.ndarray) -> None:
            for i in np.flatnonzero(mask):
                map_ = self.maps[(int(which[i]) - MAPS) // 128]
                corner, tap = ([int(np.broadcast_to(c, (self.n,))[i]) for c in cs] for cs in (at, taps))
                box = self.pixels(map_, corner, tap, int(to()[i])) if tap else self.box(map_, corner, int(to()[i]))
                self.touch(np.array([i]), np.array([box[0]]), writes=stores)
                who = np.full(len(box[3]), i)
                if stores:
                    self.order(who, box[3], 16, writes=False, beside="stores")
                    self.committed["stores"][i] += 1
                    self.stores[i].append(partial(self.put, *box))
                    continue
                bits = 1 << int(self.rank[i]) if to_blocks is None else int(to_blocks[i])
                for block in (b for b in range(self.blocks) if bits >> b & 1):
                    further = (block - int(self.rank[i])) * WINDOW
                    counted, lie = self.barriers[int(barrier()[i]) + further], box[3] + further
                    self.order(who, lie, 16, writes=True, counted=counted)
                    self.copies.append(partial(self.place, *box[:3], lie, counted))

        return step

    def pixels(self, map_: Im2colMap, corner: list[int], tap: list[int], at: int) -> Box:
        """The pixels that a tap of the filter meets in windows from that at the corner on, whose first elements go along rows
        from the map's lower corner to its upper one."""
        c, w, h, n = corner
        rows = []
        for _ in range(map_.pixels):
            rows.append((w + tap[0], h + tap[1], n))
            w += map_.steps[0]
            if w > map_.extents[1] - 1 + map_.upper[0]:
                w, h = map_.lower[0], h + map_.steps[1]
                if h > map_.extents[2] - 1 + map_.upper[1]:
                    h, n = map_.lower[1], n + 1
        channels = np.broadcast_to(np.arange(c, c + map_.channels), (len(rows), map_.channels))
        places = (channels, *(np.broadcast_to(v[:, None], channels.shape) for v in np.array(rows).T))
        return self.lay(map_, places, map_.extents, map_.strides, 0, at, map_.channels)

    def box(self, map_: TiledMap, corner: list[int], at: int) -> Box:
        """A box of an array's elements."""
        assert set(map_.steps) == {1}
        grids = np.meshgrid(*(c + np.arange(n) for c, n in zip(corner[::-1], map_.box[::-1], strict=True)), indexing="ij")
        return self.lay(map_, tuple(grids[::-1]), map_.extents, map_.strides, map_.bytes, at, map_.box[0])

    def lay(self, map_: Any, places: Any, extents: Any, strides: Any, first: int, at: int, wide: int) -> Box:
        """Elements of `places`, innermost coordinate first, as the copy engine lays them down in rows of `wide` ones."""
        t = self.memory.program.tensors[map_.tensor]
        size = t.dtype.size
        assert size * wide % 16 == 0 and at % (8 * map_.swizzle or 128) == 0
        assert size * wide <= 512 and map_.swizzle in (0, size * wide), "rows that are narrower or wider than their swizzle"
        k, base = divmod(self.memory.base[t.storage] + t.offset * size + first, SPACE)
        assert base % 16 == 0 and not any(s % 16 for s in strides), "a map that cannot be encoded"
        inside, offset = np.ones(places[0].shape, bool), np.full(places[0].shape, base - SPACE // 2)
        for g, n, s in zip(places, extents, (size, *strides), strict=True):
            inside &= (g >= 0) & (g < n)
            offset = offset + g * s
        lie = at + 16 * np.arange(inside.size * size // 16)
        return k, offset.ravel(), inside.ravel(), lie ^ (lie >> 7 & max(map_.swizzle // 16 - 1, 0)) << 4

    def place(self, k: int, offset: np.ndarray, inside: np.ndarray, lie: np.ndarray, barrier: Barrier) -> None:
        """A box of elements to shared memory, zeros outside the array."""
        data = self.memory.buffers[k].view(UNSIGNED[self.memory.buffers[k].itemsize])
        box = np.where(inside, data[np.where(inside, offset, 0) // data.itemsize], 0).astype(data.dtype)
        self.write("shared", lie, box.view(np.uint8).reshape(-1, 16))
        barrier.bytes -= box.nbytes
        barrier.settle()
        self.wake()

    def put(self, k: int, offset: np.ndarray, inside: np.ndarray, lie: np.ndarray) -> None:
        """A box of elements from shared memory to the array, what of it lies there."""
        elements = self.read("shared", lie, 16).reshape(-1, self.memory.buffers[k].itemsize)
        self.write("global", k * SPACE + SPACE // 2 + offset[inside], elements[inside])

    # wgmma

    def matrix(self, first: int, descriptor: int, rows: int, k_major: bool, kind: str, wide: int = STEP) -> np.ndarray:
        """What a descriptor leads to, for the warpgroup from a thread on: (rows, `wide` bytes of K). Rows of K are as wide as the
        swizzle, 32 to 128 bytes; others 128. Without one, 8 rows of 16 bytes lie side by side, and `leading` bytes on the next
        16 of K."""
        width = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
        assert k_major or width == 128
        start, leading, stride = (descriptor >> s & 0x3FFF for s in (0, 16, 32))
        r, k = np.arange(rows)[:, None], np.arange(wide // 16 if k_major else wide // 2)  # 16 bytes of K at once, or one half
        if k_major:
            at = (start << 4) + r // 8 * (stride << 4) + r % 8 * width + k * (16 if width > 16 else leading << 4)
        else:
            assert kind in ("f16", "bf16")
            at = (start << 4) + r // 64 * (leading << 4) + k // 8 * (stride << 4) + k % 8 * 128 + r % 64 * 2
        at = (at ^ (at >> 7 & width // 16 - 1) << 4) + self.windows[first]
        of = first + np.arange(at.size) % 4 * 32  # who asks: each place for one of the four warps
        self.order(of, at.ravel(), 16 if k_major else 2, writes=False, beside="wgmma")
        found, number = self.read("shared", at.ravel(), 16 if k_major else 2), np.int64 if kind in ("s8", "u8") else np.float32
        if kind in FLOAT8:
            return from_storage(found, FLOAT8[kind]).reshape(rows, -1)
        if kind == "bf16":
            return from_storage(found.view(np.uint16), DType.BF16).reshape(rows, -1)
        return found.view({"f16": np.float16, "s8": np.int8, "u8": np.uint8}[kind]).astype(number).reshape(rows, -1)

    def do_wgmma(self, parts: list[str], operands: list[str]) -> Step:
        if parts[1] == "fence":
            return partial(self.meet, size=128)
        if parts[1] == "commit_group":
            return lambda mask: np.add.at(self.committed["wgmma"], np.flatnonzero(mask), 1)
        if parts[1] == "wait_group":
            return lambda mask: self.finish("wgmma", mask, int(operands[0]))
        sparse = parts[2] == "sp"
        shape, sums, *kinds = parts[4 + sparse :]
        integers, floats8 = sums == "s32", {*kinds} <= {*FLOAT8}
        assert {*kinds} <= {"s8", "u8"} if integers else floats8 or (sums, kinds[0]) in (("f32", "f16"), ("f32", "bf16")), parts
        assert integers or floats8 or kinds[0] == kinds[1], parts
        depth = (32 if integers or floats8 else 16) << sparse
        columns = int(re.fullmatch(rf"m64n(\d+)k{depth}", shape)[1])  # type: ignore[index]
        which, selected = (self.registers[operands[3]], int(operands[4])) if sparse else (None, 0)
        del operands[3 : 3 + 2 * sparse]
        number = np.int32 if integers else np.float32
        names = [n.strip() for n in operands[0].strip("{}").split(",")]
        assigns, acc = [self.target(n) for n in names], [self.registers[n].view(number) for n in names]
        words = [self.registers[n.strip()] for n in operands[1].strip("{}").split(",")]
        from_registers, right, more = operands[1][0] == "{", self.registers[operands[2]], self.registers[operands[3]]
        turned = [bool(int(o)) for o in operands[6:]] or [False, False]  # those of 8 bits have no such operands
        assert len(operands) == (4 if integers else 6 if floats8 else 6 + len(turned))

        def step(mask: np.ndarray) -> None:
            for first in range(0, self.n - 127, 128):
                if not mask[first]:
                    continue
                who = np.arange(first, first + 128)
                assert mask[who].all(), "a warpgroup multiplies without some of its threads"
                rows = who.reshape(4, 32)
                if from_registers:
                    a = self.left(words, rows, kinds[0]).reshape(64, -1)
                else:
                    a = self.matrix(first, int(words[0][first]), 64, not turned[0], kinds[0])
                if which is not None:  # when it is done, all warps have got as far as to give it what they have read
                    a = unpacked(a, which[rows], selected)
                    group = int(self.committed["wgmma"][first]) + 1
                    self.given.setdefault(first // 128, []).append((group, self.races.leave(rows[:, 0] // 32)))
                b = self.matrix(first, int(right[first]), columns, not turned[-1], kinds[1], 2 * STEP if sparse else STEP)
                # (row of the warp's 8, which 8, column of 8 by pairs)
                product = (a @ b.T).reshape(4, 2, 8, columns // 8, 4, 2)
                of = np.zeros(self.n, bool)
                of[who] = True
                for i, assign in enumerate(assigns):
                    out = np.zeros(self.n, number)
                    out[who] = product[:, i % 4 // 2, :, i // 4, :, i % 2].reshape(128)
                    if more[first]:
                        out[who] += acc[i][who]
                    assign(cut(out) if floats8 else out, of)

        return step


def unpacked(given: np.ndarray, which: np.ndarray, selected: int) -> np.ndarray:
    """The left operand of wgmma.sp or mma.sp, (16 · warps, K), from the half of it that is given and words of (warps, 32 lanes)
    with the places of its elements (PTX ISA, "Sparse matrix storage")."""
    rows, warps = len(given), len(given) // 16
    nibbles = which.astype(np.uint32).reshape(warps, 8, 4, 1) >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    if given.dtype == np.float32 and given.shape[1] <= 16:  # 16 bits: one or two lanes of four, each of 4 fours of two rows
        lanes = given.shape[1] // 8
        halves = nibbles[:, :, lanes * selected : lanes * (selected + 1)].reshape(warps, 8, lanes, 2, 4)
        fours = halves.transpose(0, 3, 1, 2, 4).reshape(rows, 4 * lanes)
    else:
        assert selected == 0, "all lanes say places of elements of 8 bits"
        fours = nibbles.reshape(warps, 8, 2, 2, 8).transpose(0, 3, 1, 2, 4).reshape(rows, 16)
    near, far = fours & 3, fours >> 2
    assert (near < far).all(), "places that are no two of four, in ascending order"
    out = np.zeros((rows, fours.shape[1], 4), given.dtype)
    for place, value in ((near, given[:, ::2]), (far, given[:, 1::2])):
        np.put_along_axis(out, place[..., None].astype(np.int64), value[..., None], 2)
    return out.reshape(rows, -1)


def compiled(code: Code, arch: Arch) -> str:
    """The PTX of a kernel as its modules are now, whatever a test has made of them."""
    return ptx_text(family(code.kernel).build(arch, **dict(code.params)), arch, "kernel")


@cache
def ptx_of(code: Code, arch: Arch) -> str:
    """The PTX of a kernel, from the cache of kernels if it was made before of the same sources: several tests run one kernel."""
    key = compile_key(code, arch, "PTX for the machine")
    if kept := kernels.get(key):
        return kept.decode()
    text = compiled(code, arch)
    kernels.put(key, text.encode())
    return text


def run(work: Work, program: Program, values: Mapping[str, np.ndarray], y: str, arch: Arch, beyond: bool = False) -> Memory:
    """Run a kernel's launches as they are compiled for a generation.

    beyond  matrices are read beyond what has arrived, where no result looks: what comes too early is NaN, and no race
    """
    memory = Memory(program, values, y, work.scratch, work.counters)
    with np.errstate(all="ignore"):
        for launch in work.launches:
            machine = Machine(launch, ptx_of(launch.code, arch), memory, arch.has(Feature.EARLY_START), beyond)
            for number in range(0, math.prod(launch.grid), machine.blocks):
                machine.run_block(number)
    return memory
