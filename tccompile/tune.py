"""Measuring kernels on this machine's GPU: what fills the timing tables.

Each candidate of an op becomes a plan of one step, repeated: the op several times, one after the other, in one CUDA graph. As
in a network, every repetition reads constants of its own, which nothing has read since the GPU's L2 cache was filled with
something else, while what the step before would have made lies where it was. Values are random. The time is the median of
graph launches, by events around them, divided by the repetitions.

Results are compared on a sample of elements, each with the median of what the candidates give there; one that is further
away than rounding explains is reported, and never chosen.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit.job import Job, SpillError
from tccompile.emit.many import emit
from tccompile.emit.pack import Build, section
from tccompile.errors import DeviceError, LaunchError, UsageError
from tccompile.fuse.groups import join_groups
from tccompile.fuse.sparse import offered
from tccompile.ir.forms import Form, Packed, Sparse
from tccompile.ir.ops import Attention, Conv, Gemm, Op, Rnn
from tccompile.ir.packed import unpacked
from tccompile.ir.program import Program
from tccompile.ir.storage import elements, from_storage, pack_constant, to_storage
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.ir.weights import Source, evaluate, sources_of
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Work
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Image
from tccompile.schedule.choose import Candidate, Choice, candidates, is_sparse, uncopied
from tccompile.schedule.place import place
from tccompile.schedule.timings import FORMAT, Table, Timing, is_current, key, read, source, with_times, write

if TYPE_CHECKING:
    from tccompile.runtime.driver import Device
    from tccompile.runtime.gpu import GpuEngine

COUNT = 12
"""Candidates that are measured for each op."""

NEAR = 2.0
"""Of the least estimate, up to which a kernel's cheapest config is measured whatever comes before it."""

REPETITIONS = 16
"""Steps in a measured graph: enough for a launch's own time to vanish; fewer where they take long or much memory."""

SAMPLE = 1 << 16
"""Elements of a result that are compared."""

TOLERANCE = {
    DType.F16: 4e-3, DType.BF16: 2e-2, DType.F32: 1e-3, DType.E4M3: 2e-2, DType.E5M2: 4e-2, DType.I8: 2e-2, DType.U8: 2e-2,
}  # fmt: skip
"""Relative L2 distance from the candidates' median: what another order of additions, or fp16 operands, can bring about. Of sums
that differ in their last digits some become another byte."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Result:
    """What was measured of a candidate: the median time in microseconds, or what is wrong with it."""

    candidate: Candidate
    us: float
    wrong: str | None = None


@dataclass(frozen=True)
class Trial:
    """An op of a program, its candidates, the cheapest first, and how many of them to measure."""

    op: Op
    program: Program
    ranked: Sequence[Candidate]
    count: int


Compiled = tuple[Candidate, Sequence[Work]]
"""A candidate, and its launches for each repetition of the op."""


# --- Tables --------------------------------------------------------------------------------------------------------------


def gpu_to_measure(archs: Sequence[str]) -> tuple[Device, Arch]:
    """The first GPU, and the generation whose code runs best on it, which must be one of `archs`.

    Raises DeviceError if there is no GPU, UsageError if the code asked for is none that it would take.
    """
    from tccompile.runtime.driver import open_device
    from tccompile.runtime.generations import native

    try:
        gpu = open_device()
    except DeviceError as error:
        raise DeviceError(
            f"tuning measures kernels on a GPU: {error}; tune on a machine that has one, and hand the times "
            "to this one with --timing-cache FILE"
        ) from error
    name = next(iter(native(gpu.cc)), "no generation")
    if name not in archs:
        raise UsageError(f"{gpu} runs code for {name}, which is not among --arch {','.join(archs)}: there is nothing to tune")
    return gpu, ARCHS[name]


def tune(
    programs: Sequence[Program],
    gpu: Device,
    arch: Arch,
    path: Path,
    progress: Progress,
    jobs: int | None = None,
    count: int = COUNT,
) -> Table:
    """Measure every distinct op of the programs that has a choice, `count` candidates of each, and write the table to `path`
    after each op.

    What the file at `path` already holds for this GPU and the kernels' present sources is not measured again.
    Raises UsageError if the file is no table, or another GPU's.
    """
    table = read(path) if path.exists() else Table(gpu.name, arch.name, {}, FORMAT)
    if (table.gpu, table.arch) != (gpu.name, arch.name):
        raise UsageError(
            f"{path} holds times of {table.arch} code on {table.gpu}, and this GPU is {gpu.name}: give it a file of its own"
        )
    write(table, path)
    trials = trials_of(programs, arch, table, count)
    for done, (trial, results) in enumerate(measure(list(trials.values()), gpu, arch, progress, jobs)):
        progress("tune", done, len(trials))
        right = [r for r in results if r.wrong is None]
        for r in results:
            if r.wrong is not None:
                name, config = r.candidate.kernel.name, dict(r.candidate.config)
                warnings.warn(f"{trial.op.nodes[0]}: {name} {config} is left out: {r.wrong}", RuntimeWarning, stacklevel=2)
        times = [Timing(r.candidate.kernel.name, r.candidate.config, r.us, source(r.candidate.kernel)) for r in right]
        table = with_times(table, key(trial.op, trial.program), times)
        write(table, path)
    return table


def trials_of(programs: Sequence[Program], arch: Arch, table: Table, count: int = COUNT) -> dict[str, Trial]:
    """What is to be measured, by key: each op once, if it has a choice and the table does not know it yet."""
    kernels = {k.name: k for k in KERNELS}
    found: dict[str, Trial] = {}
    for program in programs:
        for op in (*program.ops, *(conv for _, conv in uncopied(program).values())):
            name = key(op, program)
            if name in found or (name in table.ops and is_current(table.ops[name], kernels)):
                continue
            ranked = candidates(op, program, arch)
            if len(ranked) > 1 and program.tensors[op.y].size:
                found[name] = Trial(op, program, ranked, count)
    return found


def worth_measuring(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The `count` cheapest, and among them the cheapest one of each kernel that is near the least estimate: estimates know better
    which of a kernel's configs is the fastest than which kernel is, above all on GPUs that they are not fitted to."""
    firsts: dict[tuple[str, bool], int] = {}  # 2:4 weights are as good as another kernel
    for number, c in enumerate(ranked):
        if c.cost <= NEAR * ranked[0].cost:
            firsts.setdefault((c.kernel.name, is_sparse(c.config)), number)
    numbers = sorted(range(len(ranked)), key=lambda n: (n not in firsts.values(), n))[:count]
    return [ranked[n] for n in sorted(numbers)]


# --- Measuring -----------------------------------------------------------------------------------------------------------


def measure(
    trials: Sequence[Trial], gpu: Device, arch: Arch, progress: Progress, jobs: int | None = None
) -> Iterator[tuple[Trial, list[Result]]]:
    """Compile what is worth measuring, then run it, one trial after the other.

    Raises LaunchError, which names the kernel, if one breaks the GPU's context.
    """
    programs = [repeated(t.op, t.program, _repetitions(t)) for t in trials]
    compiled, images = _compiled(trials, programs, arch, progress, jobs)
    flush = _Flush(gpu)
    for trial, program, kept in zip(trials, programs, compiled, strict=True):
        yield trial, _results(program, trial, kept, images, arch, flush)


def _compiled(
    trials: Sequence[Trial], programs: Sequence[Program], arch: Arch, progress: Progress, jobs: int | None
) -> tuple[list[list[Compiled]], Mapping[Job, Image]]:
    """What to measure in each trial, with its launches, and their code. Where a config's code spills registers, others move up
    into its place: a kernel must not be left out of a table because its cheapest config is."""
    ranked = [list(t.ranked) for t in trials]
    works: dict[tuple[int, int], list[Work]] = {}
    while True:
        picked: list[list[Compiled]] = []
        for number, (trial, program) in enumerate(zip(trials, programs, strict=True)):
            picked.append([])
            for c in worth_measuring(ranked[number], trial.count):
                if (number, id(c)) not in works:
                    works[number, id(c)] = [c.kernel.work(op, program, c.config, arch) for op in program.ops]
                picked[-1].append((c, works[number, id(c)]))
        todo = list(dict.fromkeys(job for of_trial in picked for _, w in of_trial for job in _jobs(w, arch)))
        try:
            return picked, emit(todo, lambda done, total: progress("emit", done, total), jobs)
        except SpillError as error:
            spilled = set(error.jobs)
        for of_trial, left in zip(picked, ranked, strict=True):
            gone = {id(c) for c, w in of_trial if spilled.intersection(_jobs(w, arch))}
            left[:] = [c for c in left if id(c) not in gone]


def _jobs(works: Sequence[Work], arch: Arch) -> list[Job]:
    """What must be compiled for an op's launches."""
    return list(dict.fromkeys((launch.code, arch, "cubin") for work in works for launch in work.launches))


def _repetitions(trial: Trial) -> int:
    tensors = trial.program.tensors
    owners = {tensors[n].storage for n in trial.op.inputs} & set(trial.program.constants)
    owners |= {name for form in trial.program.forms_of(trial.op) for name in form.tensors}
    size = sum(tensors[n].nbytes for n in owners)
    slowest = max(c.cost for c in worth_measuring(trial.ranked, trial.count))
    return max(2, min(REPETITIONS, int(4000 / slowest), (1 << 30) // max(size, 1)))


def repeated(op: Op, program: Program, times: int) -> Program:
    """The op several times, each with constants and a result of its own. What it reads beside constants and model inputs
    becomes a constant too, one for all."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Source] = {}
    ops, outputs = [], []
    for i in range(times):
        names = {}
        for name in (*op.inputs, *op.results):
            t = program.tensors[name]
            own = f"#{i}" if name in op.results else f"@{i}" if t.storage in program.constants else ""
            names[name] = name + own
            base = t.base and t.base + own
            tensors[name + own] = replace(t, name=name + own, base=base)
            if base and t.base:
                tensors[base] = replace(program.tensors[t.base], name=base)
            if name not in op.results and t.storage not in program.inputs:
                constants[t.storage + own] = Source(t.storage, (), "")
        ops.append(op.renamed(names))
        outputs += [names[op.y]] * (op.y in program.outputs)
    inputs = tuple(n for n in program.inputs if n in op.inputs)
    forms: dict[str, tuple[Form, ...]] = {}
    for (name, form), i in product(_packed(op, program).items(), range(times)):
        of_one = form.renamed({part: f"{part}@{i}" for part in form.tensors})
        for part, other in zip(form.tensors, of_one.tensors, strict=True):
            tensors[other], constants[other] = replace(program.tensors[part], name=other), Source(part, (), "")
        forms[f"{name}@{i}"] = (of_one,)
    whole = join_groups(Program(inputs, tuple(outputs), tensors, constants, tuple(ops)))
    whole = offered(whole, [f"{name}@{i}" for name in _sparse(op, program) for i in range(times)])
    return replace(whole, forms={**whole.forms, **forms})


def _packed(op: Op, program: Program) -> dict[str, Packed]:
    """The op's constants that are known as integers in blocks."""
    return {name: form for name in op.operands for form in program.forms.get(name, ()) if isinstance(form, Packed)}


def _sparse(op: Op, program: Program) -> list[str]:
    """The op's constants that are 2:4."""
    return [name for name in op.operands if any(isinstance(form, Sparse) for form in program.forms.get(name, ()))]


def _results(
    program: Program,
    trial: Trial,
    kept: Sequence[Compiled],
    images: Mapping[Job, Image],
    arch: Arch,
    flush: _Flush,
) -> list[Result]:
    from tccompile.runtime.driver import Memory
    from tccompile.runtime.gpu import GpuEngine
    from tccompile.runtime.loaded import Loaded

    data = _data(trial.op, trial.program)
    used = dict.fromkeys(images[job] for _, works in kept for job in _jobs(works, arch))
    index = {image: i for i, image in enumerate(used)}
    entries = [_entry(program, c, works, arch, images, index) for c, works in kept]
    weights = {n: data[recipe.name] for n, recipe in program.constants.items() if isinstance(recipe, Source)}
    weights |= _forms(program, data)
    plan = Plan("tune", {}, tuple(entries), tuple(index), weights)
    y = program.tensors[program.ops[-1].y]
    memory = {n: Memory(flush.gpu, len(data[n]), n) for n in program.inputs}
    result = Memory(flush.gpu, y.nbytes, "the result")
    addresses = {n: m.address for n, m in memory.items()} | dict.fromkeys(program.outputs, result.address)
    times, samples = [], []
    with flush.gpu as cu:
        for name, m in memory.items():
            cu.cuMemcpyHtoD(m.address, np.frombuffer(data[name], np.uint8).ctypes.data, len(data[name]))
    for (candidate, _), entry in zip(kept, entries, strict=True):
        try:
            engine = GpuEngine(Loaded(plan, entry, flush.gpu, arch.name))
            try:
                samples.append(_sample(engine, addresses, y, result.address if program.outputs else None))
                times.append(flush.time(engine, addresses) / len(program.ops))
            finally:
                engine.close()
        except LaunchError as error:
            raise LaunchError(f"{candidate.kernel.name} {dict(candidate.config)}: {error}") from error
    for m in (*memory.values(), result):
        m.close()
    wrong = disagreement(samples, _roughest(trial.op, trial.program, y.dtype))
    return [Result(c, round(us, 3), w) for (c, _), us, w in zip(kept, times, wrong, strict=True)]


def _entry(
    program: Program,
    candidate: Candidate,
    works: Sequence[Work],
    arch: Arch,
    images: Mapping[Job, Image],
    index: Mapping[Image, int],
) -> Entry:
    """The steps of a candidate, each after the one before."""
    placement = place(program, works)
    choices = [Choice(candidate.kernel, candidate.config, w, candidate.cost, "measured now") for w in works]
    made = section(Build(arch.name, "cubin", choices, placement), images, index)
    chain = tuple(replace(step, after=(i - 1,) if i else ()) for i, step in enumerate(made.steps))
    return Entry(program, (replace(made, steps=chain),))


def _data(op: Op, program: Program) -> dict[str, bytes | memoryview]:
    """Bytes for the storage of all that the op reads: the constants that do not depend on the model's weights as they are,
    everything else random, such that sums keep to the range of fp16."""
    data: dict[str, bytes | memoryview] = {}
    for name in op.inputs:
        t = program.tensors[program.tensors[name].storage]
        recipe = program.constants.get(t.name)
        if recipe is not None and not sources_of(recipe):
            data[t.name] = pack_constant(t, evaluate(recipe, {}))
        elif t.dtype.is_float:
            fan_in = 1
            if isinstance(op, Conv) and name == op.w:
                fan_in = math.prod(t.shape[1:])
            elif (isinstance(op, Gemm) and name == op.b) or (isinstance(op, Rnn) and name == op.r):
                fan_in = t.shape[-1]
            data[t.name] = _random(t, fan_in**-0.5)
        elif isinstance(op, Rnn):
            steps = program.tensors[op.x].shape[0]
            data[t.name] = pack_constant(t, np.full(t.shape, steps, t.dtype.numpy))  # sequences of all steps
        elif t.dtype.size == 1 and isinstance(op, (Conv, Gemm)) and name in op.operands:  # zeros would save power, and so time
            data[t.name] = _in_padding_zeros(t, np.resize(_bytes(), t.span).view(t.dtype.numpy))
        else:
            data[t.name] = pack_constant(t, np.resize(_normal() > 0, t.shape).astype(t.dtype.numpy))
    for name in _sparse(op, program):
        data[name] = _pruned(program.tensors[name], data[name])
    for name, form in _packed(op, program).items():
        data |= _integers(name, form, program)
    return data


def _integers(name: str, form: Packed, program: Program) -> dict[str, memoryview]:
    """The bytes of random integers in blocks, their scales and zero points, and of the weights that they are."""
    w, values, scales = (program.tensors[part] for part in (name, form.tensor, form.scales))
    own = {form.tensor: np.resize(_normal().view(np.uint8), values.shape)}  # all bytes, but for those of exponents
    own[form.scales] = np.full(scales.shape, w.shape[1] ** -0.5 / (1 << form.bits - 2), scales.dtype.numpy)
    if form.zeros:
        own[form.zeros] = np.full(program.tensors[form.zeros].shape, 1 << form.bits - 1, np.uint8)
    zeros = own[form.zeros] if form.zeros else form.zero
    (n, k) = w.shape
    own[name] = unpacked((n, k), own[form.tensor], own[form.scales], zeros, form.bits, form.block)
    return {part: pack_constant(program.tensors[part], x) for part, x in own.items()}


def _pruned(t: Tensor, data: bytes | memoryview) -> memoryview:
    """The bytes of weights with two zeros in every four along their second axis, in all ways in turn."""
    values = np.array(np.frombuffer(data, t.dtype.numpy))
    fours = np.moveaxis(elements(values, t), 1, -1)
    for i, kept in enumerate(combinations(range(4), 2)):
        for k in {*range(4)} - {*kept}:
            fours[..., 4 * i + k :: 24] = 0
    return values.view(np.uint8).data


@cache
def _normal() -> np.ndarray:
    """Random numbers, a prime number of them: repeated they do not come back at the same places of rows."""
    return np.random.default_rng(0).standard_normal(1_000_003, np.float32)


@cache
def _bytes() -> np.ndarray:
    """As many random bytes."""
    return np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)


def _random(t: Tensor, deviation: float) -> memoryview:
    """Random numbers as the bytes of a tensor's storage, made in the order in which they lie there; zeros in its padding."""
    numbers = _of_8_bits(t.dtype) if t.dtype in FLOAT8 else to_storage(_normal() * np.float32(deviation), t.dtype)
    return _in_padding_zeros(t, np.resize(numbers, t.span))


@cache
def _of_8_bits(dtype: DType) -> np.ndarray:
    """As many random floats of 8 bits, which take a while to make. Such numbers have a scale beside them; smaller ones would be
    subnormal, of fewer digits."""
    return to_storage(_normal(), dtype)


def _in_padding_zeros(t: Tensor, values: np.ndarray) -> memoryview:
    """The bytes of a tensor's storage, with zeros in its padding."""
    if t.span > t.size:
        everything, values = values, np.zeros_like(values)
        elements(values, t)[...] = elements(everything, t)
    return values.view(np.uint8).data


def _forms(program: Program, data: Mapping[str, bytes | memoryview]) -> dict[str, bytes | memoryview]:
    """The bytes of other forms of weights, which are equal in all repetitions."""
    made: dict[tuple[int, ...], bytes | memoryview] = {}
    out = {}
    for w, every in program.forms.items():
        source, t = program.constants[w], program.tensors[w]
        forms = [form for form in every if not isinstance(form, Packed)]  # which is in `data`
        assert isinstance(source, Source)
        values = elements(np.frombuffer(data[source.name], t.dtype.numpy), t)
        if t.dtype in FLOAT8:
            values = from_storage(values, t.dtype)
        for name in (name for form in forms for name in form.tensors):
            own = program.tensors[name]
            if own.shape not in made:
                made[own.shape] = pack_constant(own, evaluate(program.constants[name], {source.name: values}))
            out[name] = made[own.shape]
    return out


def _sample(engine: GpuEngine, addresses: Mapping[str, int], y: Tensor, where: int | None) -> np.ndarray:
    """Run once in memory full of NaN; a sample of the result's elements, in float64."""
    stream = int(engine.stream.value)
    engine.fill_arena(0xFF)
    if where is not None:
        with engine.device as cu:
            cu.cuMemsetD8(where, 0xFF, y.nbytes)
            cu.cuCtxSynchronize()
    engine.launch(addresses, stream)
    engine.synchronize(stream)
    if where is None:
        storage = engine.program.tensors[y.storage]
        begin = engine.section.offsets[storage.name]
        memory = engine.read_arena(begin, storage.nbytes)
    else:
        memory = np.empty(y.nbytes, np.uint8)
        with engine.device as cu:
            cu.cuMemcpyDtoH(memory.ctypes.data, where, y.nbytes)
    rng = np.random.default_rng(1)
    picked = np.unravel_index(rng.choice(y.size, SAMPLE) if y.size > SAMPLE else np.arange(y.size), y.shape)
    found = elements(memory.view(y.dtype.numpy), y)[picked]
    return np.asarray(from_storage(found, y.dtype), np.float64)


def _roughest(op: Op, program: Program, y: DType) -> DType:
    """The type whose tolerance counts: of the result; or of attention's operands, as its weights are rounded to their type."""
    kinds = {program.tensors[name].dtype for name in op.operands} & {*FLOAT8} if isinstance(op, Attention) else set()
    return max(kinds, default=y, key=TOLERANCE.__getitem__)


def disagreement(samples: Sequence[np.ndarray], dtype: DType) -> list[str | None]:
    """For each result what is wrong with it, or None: its distance from the element-wise median of all, as ‖a − b‖ / ‖b‖.

    Infinities and NaN, which functions of random values may give, must be in the same places. Of two that differ both are wrong.
    """
    if not samples:
        return []
    ordered, middle = np.sort(np.stack(samples), axis=0), len(samples) - 1
    low, high = ordered[middle // 2], ordered[(middle + 1) // 2]
    median = np.where(low == high, low, low / 2 + high / 2)
    norm, limit = float(np.linalg.norm(median[np.isfinite(median)])), TOLERANCE.get(dtype, 0.0)
    wrong: list[str | None] = []
    for sample in samples:
        same = (sample == median) | (np.isnan(sample) & np.isnan(median))
        with np.errstate(invalid="ignore"):
            distance = float(np.linalg.norm(np.where(same, 0.0, sample - median))) / (norm or 1.0)
        wrong.append(None if distance <= limit else f"its result differs from the other candidates' by {distance:.1e}")
    return wrong


class _Flush:
    """Times graphs whose constants are not in the GPU's L2 cache: memory of twice its size is written before each launch."""

    def __init__(self, gpu: Device):
        from tccompile.runtime.driver import Handle, Memory

        self.gpu = gpu
        with gpu as cu:
            self.memory = Memory(gpu, 2 * max(gpu.attribute("L2_CACHE_SIZE"), 1 << 20), "emptying the cache")
            self.events = [[Handle(gpu, cu.cuEventCreate(0), "cuEventDestroy") for _ in range(2)] for _ in range(50)]

    def time(self, engine: GpuEngine, addresses: Mapping[str, int]) -> float:
        """Median of launches of the graph, in microseconds, after some to warm up."""
        stream = int(engine.stream.value)
        start = time.perf_counter()
        for _ in range(2):
            engine.launch(addresses, stream)
        engine.synchronize(stream)
        count = max(5, min(len(self.events), int(0.02 / (time.perf_counter() - start))))
        with self.gpu as cu:
            for begin, end in self.events[:count]:
                cu.cuMemsetD8Async(self.memory.address, 0, self.memory.size, stream)
                cu.cuEventRecord(begin.value, stream)
                engine.launch(addresses, stream)
                cu.cuEventRecord(end.value, stream)
            engine.synchronize(stream)
            return 1e3 * float(np.median([cu.cuEventElapsedTime(b.value, e.value) for b, e in self.events[:count]]))
