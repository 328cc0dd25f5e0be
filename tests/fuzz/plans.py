"""Plans that are not what they were: fields of the decoded header and bytes of the file changed, all digests right again.

    python -m tests.fuzz.plans                    100,000 of them, on all cores
    python -m tests.fuzz.plans 500 --first 1200   so many from number 1200 on; a number gives the same plan each time

A plan must be refused by an error of ours, or be one that can be written again and run: by the CPU engine, in the order of its
steps and in any other that its edges allow, with the results that its program has where each tensor has memory of its own.
Reading takes at most 5 seconds, and no more memory than `--memory` allows. Code and a launch's integers nobody runs here.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import onnx

from tccompile import pipeline
from tccompile.arch import ARCHS
from tccompile.errors import InputError, LaunchError, TccompileError
from tccompile.ir.loops import bodies, in_turn
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, store, to_storage
from tccompile.ir.types import DType
from tccompile.load import unroll
from tccompile.plan import codec
from tccompile.plan.file import PREFIX, Plan, from_bytes, to_bytes
from tccompile.plan.format import Entry, Family, Section
from tccompile.plan.rules import check_member
from tccompile.runtime.cpu import CpuEngine
from tests.gpu import cases
from tests.gpu.build import build_plan, variants
from tests.plans import without_code
from tests.random_graphs import Graph
from tests.ranges import models
from tests.rewrites.common import Net
from tests.small import image, plan

SECONDS = 5.0
LARGE = 1 << 16
"""Elements of a program beyond which it is read, but not run."""


# --- Plans to begin with ---------------------------------------------------------------------------------------------


def _ops() -> list[Program]:
    """One op each, of every kind."""
    f32, i64 = DType.F32, DType.I64
    return [
        cases.conv("conv", (1, 6, 5, 5), 8, (3, 3), stride=2, ep="bias residual relu", to="tail"),
        cases.conv("depthwise", (1, 8, 5, 5), 8, (3, 3), groups=8),
        cases.gemm("gemm", (3, 9), 5, ep="bias"),
        cases.mlp("mlp", (1, 9), 4, 5),
        cases.pool("pool", (1, 5, 6, 6), "max", (3, 3), stride=2, pad=1),
        cases.pool("mean", (1, 5, 6, 6), "mean", (2, 3), stride=2, dtype=f32),
        cases.reduce("reduce", (2, 5, 3, 3), (2, 3), ep="mean"),
        cases.rnn("rnn", "lstm", 3, 2, 6, given="hc"),
        cases.attention("attention", (1, 2, 5, 8), 6, causal=1),
        cases.softmax("softmax", (4, 9), 1),
        cases.norm("norm", (2, 8, 3, 3), (2, 3), groups=2),
        cases.resize("resize", (1, 3, 4, 4), {2: (8, 2), 3: (6, 2)}),
        cases.cumulate("cumulate", (2, 5), 1, "add"),
        cases.top_k("top_k", (4, 9), 1, 3),
        cases.places("places", 9, 5),
        cases.suppress("suppress", 1, 2, 9),
        cases.scatter("scatter", (9, 4), (6, 4), ("i", 1), "min", i64),
    ]


def counted() -> onnx.ModelProto:
    """Outputs that are cut to what there is in the data."""
    net = Net(x=(3, 4))
    where = net("NonZero", "x")
    return net.out(where, net("GatherND", "x", net("Transpose", where, perm=[1, 0]))).model()


def ranged() -> Plan:
    """A plan of families, for batches of 2 to 9 and rows of 3 to 20."""
    g = models.Graph()
    y = g.op("Concat", "x", g.op("Relu", g.op("MatMul", "x", g.weight(8, 8))), axis=1)
    model = g.model("x", onnx.TensorProto.FLOAT, ["n", "rows", 8], g.op("Transpose", y, perm=[0, 2, 1]))
    return pipeline.without_code(model, precision="fp32", ranges={"n": (2, 9), "rows": (3, 20)})


def looped() -> Plan:
    """A plan with a loop that stays one."""
    inputs = [onnx.helper.make_tensor_value_info(*value) for value in (("i", 7, ()), ("c", 9, ()), ("a", 1, (3, 4)))]
    nodes = [onnx.helper.make_node("Mul", ["a", "x"], ["b"]), onnx.helper.make_node("Tanh", ["b"], ["d"])]
    outputs = [inputs[1], *(onnx.helper.make_tensor_value_info(name, 1, (3, 4)) for name in ("d", "b"))]
    net = Net(x=(3, 4))
    body = onnx.helper.make_graph(nodes, "body", inputs, outputs)
    net.out(*net("Loop", np.array(5), np.array(True), net("Relu", "x"), outputs=2, body=body))
    with mock.patch.multiple(unroll, LONG=0, LONG_COUNTED=0):
        return without_code(net.model(), ("sm_75",))


@cache
def seeds() -> tuple[bytes, ...]:
    """Files of small plans: each kind of op, programs of some, views, several generations, weights that were left out."""
    found = [plan(), plan(left_out=["w1", "table"])]
    for program in _ops():
        (op,) = program.ops
        chosen = variants(type(op).__name__, program, [ARCHS["sm_90a"], ARCHS["sm_75"]], "cubin", True)
        images = {job: image(job[1].name, job[2]) for v in chosen[:1] for job in v.jobs}
        found.append(build_plan(op.nodes[0], program, chosen[:1], images))
    found += [without_code(counted(), ("sm_75",)), looped(), ranged()]
    for seed in range(40):
        made = without_code(Graph(seed).model(), ("sm_75",))
        if _elements(made.entries[0].program) < LARGE // 8 and len(found) < 24:
            found.append(made)
    return tuple(map(to_bytes, found))


@cache
def mapped() -> tuple[bytes, ...]:
    """Those with several tensors in the arena."""
    plans = ((file, from_bytes(file)) for file in seeds())
    with_entries = ((file, read) for file, read in plans if not read.families)
    return tuple(file for file, read in with_entries if any(len(s.offsets) > 2 for e in read.entries for s in e.sections))


def _elements(program: Program) -> int:
    return sum(t.span for t in program.tensors.values())


# --- Changes ---------------------------------------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 16, 255, 256, 65535, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 0.5, 1e300)
OTHERS: tuple[Any, ...] = (None, True, "", "x", "nan", "\x1b[2J", "\ud800", [], [0], {}, {"_": "Int"})
NEAR = ("offsets", "after", "tensors", "loads", "scratch", "counters", "arena", "ops", "at", "formulas", "sizes", "$")
"""Parts of a header that say where things lie and in what order: changed more often than others."""


def split(file: bytes) -> tuple[dict, list[bytes]]:
    """A file's header, and the bytes of its sections."""
    _, _, _, length, _, _ = PREFIX.unpack_from(file)
    header = json.loads(zlib.decompress(file[PREFIX.size : PREFIX.size + length]))
    at, out = PREFIX.size + length, []
    for section in header["sections"]:
        at = -(-at // 256) * 256
        out.append(file[at : at + section["length"]])
        at += section["length"]
    return header, out


def join(header: dict | bytes, sections: list[bytes]) -> bytes:
    """The file of a header and sections, with the header's digest; `header` says the sections' own."""
    text = header if isinstance(header, bytes) else codec.dumps(header)
    stored = zlib.compress(text, 1)
    magic, version = PREFIX.unpack_from(seeds()[0])[:2]
    out = PREFIX.pack(magic, version, 0, len(stored), len(text), hashlib.sha256(stored).digest()) + stored
    for section in sections:
        out = out.ljust(-(-len(out) // 256) * 256, b"\0") + section
    return out


def changed(number: int) -> bytes:
    """The file of this number."""
    rng = random.Random(number)
    change = _map if rng.random() < 0.4 else _field
    file = rng.choice(seeds() if change is _field else mapped())
    header, sections = split(file)
    match rng.randrange(10 if change is _field else 1000):
        case 0:
            return _bytes(rng, file)
        case 1:
            return join(_bytes(rng, codec.dumps(header)), sections)
        case 2 if sections:
            at = rng.randrange(len(sections))
            sections[at] = _bytes(rng, sections[at])
            digest = {"length": len(sections[at]), "sha256": hashlib.sha256(sections[at]).hexdigest()}
            header["sections"][at] |= digest if rng.random() < 0.9 else {"length": len(sections[at])}
            return join(header, sections)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change(rng, header)
    try:
        return join(header, sections)
    except (TypeError, ValueError):  # keys that no JSON has
        return join(codec.dumps(split(file)[0])[:-1], sections)


def _bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, cut, repeated, or replaced."""
    out = bytearray(data or b"x")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, n = rng.randrange(len(out) or 1), rng.choice((1, 2, 17, 300))
        match rng.randrange(5):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if rng.random() < 0.2:
                del out[at:]
            case 2:
                del out[at : at + n]
            case 3:
                out[at:at] = out[max(at - n, 0) : at] or b"x"
            case _:
                out[at : at + n] = rng.randbytes(n)
    return bytes(out)


def _field(rng: random.Random, header: dict) -> None:
    """One value of the header changed a little or much, removed, repeated, renamed, or exchanged with one of its kind."""
    places = list(_places(header))
    near = [p for p in places if any(name in p[2] for name in NEAR)]
    node, key, path = rng.choice(near if near and rng.random() < 0.7 else places)
    alike = [p for p in places if p[2][-1] == path[-1] and p[2] != path]
    other, name, _ = rng.choice(alike or places)
    value = node[key]
    match rng.randrange(8):
        case 0 | 1 | 2 if type(value) is int:
            node[key] = rng.choice((value + 1, value - 1, value * 2, value // 2, value + 16, value - 16, value + 256, 0))
        case 3 if type(value) is int:
            node[key] = rng.choice(NUMBERS)
        case 0 | 1 | 2 | 4:
            node[key] = copy.deepcopy(other[name])
        case 5:
            del node[key]
        case 6 if isinstance(node, list):
            node.insert(rng.randrange(len(node) + 1), copy.deepcopy(value))
        case 6:
            node[rng.choice(("x", "_", "w1", "cat", "base", "reverse"))] = node.pop(key)
        case _:
            node[key] = rng.choice((*NUMBERS, *OTHERS))


def _map(rng: random.Random, header: dict) -> None:
    """Tensors moved in the arena, edges removed or drawn, steps exchanged: without launches, whose addresses would move too."""
    entry = rng.choice(header["plan"]["entries"])
    section = rng.choice(entry["sections"])
    section["arch"], steps, offsets = "cpu", section["steps"], section["offsets"]
    in_line = rng.random() < 0.5  # then only what is in use at the same time matters
    for i, step in enumerate(steps):
        step["launches"] = []
        step["after"] = [i - 1] * (i > 0) if in_line else step["after"]
    at, step = rng.randrange(len(steps)), rng.choice(steps)
    match rng.randrange(8):
        case 0 | 1 if offsets:
            near = rng.choice((*offsets.values(), *(s["scratch"][0] for s in steps if "scratch" in s), 0))
            offsets[rng.choice(list(offsets))] = max(near + 16 * rng.choice((0, 0, 1, -1, 16, rng.randrange(-32, 33))), 0)
        case 2:
            step["scratch"] = [16 * rng.randrange(section["arena"] // 16 + 1), rng.choice((4, 100, 256))]
        case 3 if step["after"]:
            step["after"].remove(rng.choice(step["after"]))
        case 4:
            steps[at]["after"] = sorted(rng.sample(range(at), rng.randrange(at + 1)))
        case 5 if at:
            ops = entry["program"]["ops"]
            ops[at - 1], ops[at] = ops[at], ops[at - 1]
            steps[at - 1]["after"], steps[at]["after"] = steps[at]["after"], steps[at - 1]["after"]
        case _:
            tensors = list(entry["program"]["tensors"].values())
            one = rng.choice([t for t in tensors if "base" in t] or tensors)
            one["offset"] = max(one.get("offset", 0) + rng.choice((-8, 8, 1, 16)), 0)


def _places(header: dict) -> Iterator[tuple[Any, Any, tuple]]:
    """Every value: what holds it, its key there, and the way to it."""
    rest: list[tuple[Any, tuple]] = [(header, ())]
    while rest:
        node, path = rest.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            yield node, key, (*path, key)
            if isinstance(node[key], dict | list):
                rest.append((node[key], (*path, key)))


# --- What must hold --------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Not an error that anybody catches."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(file: bytes, rng: random.Random) -> str:
    """What comes of a file, "refused", "read" or "run"; what is wrong with how the file was taken is raised as AssertionError."""
    with limited(SECONDS):
        try:
            read = from_bytes(file)
            for name in read.weights:
                read.weight(name)
        except LaunchError as error:
            raise AssertionError(f"reading it takes too much memory: {error}") from error
        except TccompileError:
            return "refused"
    assert from_bytes(to_bytes(read)).entries[0].sections == read.entries[0].sections, "it is not what is written of it"
    entries = [*read.entries[:2], *filter(None, (member(read, family, rng) for family in read.families[:2]))]
    runs = [run(read, entry, section, rng) for entry in entries for section in entry.sections[:2]]
    return "run" if any(runs) else "read"


def member(read: Plan, family: Family, rng: random.Random) -> Entry | None:
    """The entry of a family for sizes of it; None if it is refused."""
    try:
        with limited(SECONDS):
            entry = family.at([rng.choice(size.all) for size in family.sizes])
            check_member(read, entry)
            return entry
    except TccompileError:
        return None


def run(read: Plan, entry: Entry, section: Section, rng: random.Random) -> bool:
    """Whether the section could be run. Raises AssertionError if it gives other results than its program."""
    program = entry.program
    if _elements(program) > LARGE or section.arena > LARGE * 8 or not all(n in read.weights for n in _read(program)):
        return False
    random_values = np.random.default_rng(rng.randrange(1 << 32))
    feeds = {n: _feed(program, n, random_values) for n in program.inputs}
    with limited(4 * SECONDS):
        want = _result(lambda: alone(read, program, feeds))
        for order in (list(section.steps), *(_order(section, program, rng) for _ in range(2))):
            moved = replace(section, steps=tuple(order))
            got = _result(lambda moved=moved: CpuEngine(read, entry, moved, check_padding=False).run(feeds))
            assert got == want, f"{section.arch}: {_difference(got, want)}, steps {[s.op for s in order]}"
    return isinstance(want, dict)


def _read(program: Program) -> set[str]:
    return {program.tensors[n].storage for op in program.ops for n in op.inputs} & program.constants.keys()


def _feed(program: Program, name: str, values: np.random.Generator) -> np.ndarray:
    t = program.tensors[name]
    return to_storage(values.standard_normal(t.shape).astype(np.float32) * 2, t.dtype)


def _result(f: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, bytes] | str:
    """Outputs as bytes, or the kind of a documented error."""
    try:
        return {name: np.ascontiguousarray(a).tobytes() for name, a in f().items()}
    except (InputError, LaunchError) as error:
        return type(error).__name__


def _difference(got: dict[str, bytes] | str, want: dict[str, bytes] | str) -> str:
    if isinstance(got, str) or isinstance(want, str):
        return f"{got if isinstance(got, str) else 'results'}, not {want if isinstance(want, str) else 'results'}"
    return f"other values of {[name for name in want if got.get(name) != want[name]]}"


def _order(section: Section, program: Program, rng: random.Random) -> list:
    """The steps in another order that their edges allow; those of a loop's body in a row."""
    rest = [[step] for step in section.steps]
    for body in reversed(bodies(program)):
        rest[body.first : body.last + 1] = [[step for own in rest[body.first : body.last + 1] for step in own]]
    out, done = list[Any](), set[int]()
    while rest:
        ready = [own for own in rest if done.issuperset(a for s in own for a in s.after if a not in {s.op for s in own})]
        chosen = rng.choice((ready[-1], rng.choice(ready)))
        out += chosen
        done.update(step.op for step in chosen)
        rest.remove(chosen)
    return out


def alone(read: Plan, program: Program, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the program says: its ops in order, each storage in memory of its own, full of NaN at first."""
    tensors, memory = program.tensors, dict[str, np.ndarray]()
    for name, t in tensors.items():
        if t.base is None:
            memory[name] = np.full(t.span * t.dtype.size, 0xFF, np.uint8).view(t.dtype.numpy)
    for name in _read(program):
        memory[name] = np.frombuffer(read.weight(name), tensors[name].dtype.numpy)
    for name in program.inputs:
        memory[name] = np.ascontiguousarray(feeds[name], tensors[name].dtype.numpy).reshape(-1)
    with np.errstate(all="ignore"):
        for i in in_turn(program, lambda body: bool(elements(memory[tensors[body.going].storage], tensors[body.going]).item())):
            op = program.ops[i]
            values = {name: elements(memory[tensors[name].storage], tensors[name]) for name in op.inputs}
            y = tensors[op.y]
            store(memory[y.storage], y, to_storage(compute(op, program, values), y.dtype))
    return {name: memory[name].reshape(tensors[name].shape) for name in program.outputs}


# --- Many ------------------------------------------------------------------------------------------------------------


def tried(number: int) -> tuple[str, str]:
    """What comes of a number's plan, and what is wrong with that, if anything."""
    try:
        return outcome(changed(number), random.Random(number)), ""
    except TooLong:
        return "wrong", f"number {number}: it takes longer than {SECONDS} s"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"number {number}: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"


def _limit(memory: int) -> None:
    seeds()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--memory", type=int, default=2 << 30, help="bytes of address space, what Python takes included")
    given = parser.parse_args()
    begin, counts, wrong = time.monotonic(), Counter[str](), 0
    with ProcessPoolExecutor(given.jobs, initializer=_limit, initargs=(given.memory,)) as pool:
        numbers = range(given.first, given.first + given.count)
        for done, (what, message) in enumerate(pool.map(tried, numbers, chunksize=50), 1):
            counts[what] += 1
            if message:
                wrong += 1
                print(message, flush=True)
            if done % 5000 == 0:
                print(f"{done}: {dict(counts)}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{given.count} plans: {dict(counts)}; {wrong} taken wrongly; at most {largest} MiB a process")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
