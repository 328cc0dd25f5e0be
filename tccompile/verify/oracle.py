"""`tccompile --verify`: a plan beside ONNX Runtime, per output and per tensor, and the certificate that comes of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from tccompile.custom.files import added
from tccompile.errors import DeviceError, InputError, UsageError, VerificationError
from tccompile.ir.feeds import read_arrays, samples, seeded
from tccompile.ir.metric import relative_error
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.reference import evaluate
from tccompile.ir.storage import from_storage
from tccompile.load.classical import class_names
from tccompile.load.custom import undefined
from tccompile.load.cut import Part
from tccompile.load.model import Tuned, load, parsed, read, sources, with_small_weights
from tccompile.lower.graph import lower
from tccompile.plan.file import Plan
from tccompile.plan.format import Certificate
from tccompile.plan.weights import fill
from tccompile.precision.positions import ranges_of
from tccompile.precision.ranges import why_too_long
from tccompile.precision.real_inputs import in_batches
from tccompile.quantize.known import held
from tccompile.rewrites import rewrite
from tccompile.runtime.cpu import CpuEngine
from tccompile.runtime.session import Session
from tccompile.terminal import plain
from tccompile.verify.certificate import Result, certificate, numbers, results_text
from tccompile.verify.wide import in_float32

if TYPE_CHECKING:
    from tccompile.pipeline import Model

SEED = 1
"""Of the inputs that a certificate is made of; other ones than what tensors' ranges are measured with."""


@dataclass(frozen=True)
class Layer:
    """How far a tensor between inputs and outputs is from ONNX Runtime's, on the CPU engine, and the node that writes it."""

    entry: int
    node: str
    tensor: str
    dtype: str
    error: float

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "error": self.error if math.isfinite(self.error) else None}


@dataclass(frozen=True)
class Verification:
    """The plan with its certificates, each output's error on each device, and each tensor's if they were asked for."""

    plan: Plan
    results: tuple[Result, ...]
    layers: tuple[Layer, ...]

    @property
    def passed(self) -> bool:
        """Whether each output's error is within its bound; NaN never is."""
        return all(r.passed for r in self.results)

    def __str__(self) -> str:
        return "\n".join(filter(None, (layers_text(self.layers), results_text(self.results))))

    def to_json(self) -> dict[str, Any]:
        """What `tccompile --verify --json` prints: whether it passed, each output's error and bound, and the tensors'."""
        verified = {"passed": self.passed, "outputs": [r.to_json() for r in self.results]}
        return {"verify": verified | ({"layers": [x.to_json() for x in self.layers]} if self.layers else {})}


def verify(
    model: Model,
    plan: Plan,
    bound: float,
    data: Path | None = None,
    layers: bool = False,
    input_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    calibrate: Path | None = None,
) -> Verification:
    """Run the plan beside ONNX Runtime in fp32, on the CPU engine, and on the first GPU if there is one that can.

    Where ONNX Runtime has not all operators, `References` take its place.

    calibrate  a file of inputs by which the plan was quantized: those that were held back are looked at, too
    bound  what ‖out - ref‖ / ‖ref‖ may be, for each output
    data   a file of inputs, to look at beside the seeded ones; `layers`: every tensor that the model has too, on seeded inputs
    input_ranges  of the seeded ones, by the input's name, where the model does not tell them
    Raises UsageError without ONNX Runtime, or if it does not run the model; InputError for data that fit no entry.
    """
    oracle = References(model) if undefined(parsed(model)[0], added()) else Oracle(model)
    whole = fill(plan, sources(model))
    results: list[Result] = []
    certificates: list[Certificate] = []
    found: list[Layer] = []
    used = data is None
    with ExitStack() as stack:
        sessions = [stack.enter_context(Session(whole, "cpu"))]
        with suppress(DeviceError):
            sessions.append(stack.enter_context(Session(whole, "gpu")))
        for number, entry in enumerate(plan.entries):
            program = entry.program
            ranges = ranges_of(program, input_ranges)
            random = f"entry {number}, seed {SEED}", seeded(program, SEED, ranges)
            real = [] if calibrate is None else held_back(program, calibrate)
            sets = [] if data is None else _sets(program, data)
            used |= bool(sets)
            kept = [(f"entry {number}, held back from calibration, set {i}", feeds) for i, feeds in enumerate(real)]
            given = [(f"{data.name}, set {i}", feeds) for i, feeds in enumerate(sets) if data is not None]
            compared = [_compare(sessions, oracle, program, *run, bound) for run in (random, *kept, *given)]
            results += [result for _, errors in compared for one in errors for result in one]
            (reference, own), errors = compared[0], [errors[-1] for _, errors in compared[1 : 1 + len(real)]]
            if program.counts:
                why = "the data decide how much some outputs have"
            elif made := certificate(plan, number, SEED, ranges, reference, own[-1], oracle.name, errors):
                certificates.append(made)
                why = ""
            else:
                why = "from random inputs something is computed that is not finite (--input-range NAME=LOW..HIGH gives others)"
            if why:
                warnings.warn(f"entry {number}: {why}; it gets no certificate", RuntimeWarning, stacklevel=2)
            if layers:
                found += _layers(whole, number, random[1], oracle)
    if not used:
        raise InputError(f"{data}: the arrays fit the inputs of no entry, neither alone nor as a row of them nor as a batch")
    return Verification(replace(plan, certificates=tuple(certificates)), tuple(results), tuple(found))


def _compare(
    sessions: Sequence[Session],
    oracle: Oracle | References,
    program: Program,
    inputs: str,
    feeds: Mapping[str, np.ndarray],
    bound: float,
) -> tuple[dict[str, np.ndarray], list[list[Result]]]:
    """The oracle's outputs, and how far each session's are from them, output by output."""
    reference, results = oracle.run(program, feeds, program.results), []
    for session in sessions:
        outputs = dict(zip(program.results, session.run(None, feeds), strict=True))
        errors = {n: _off(numbers(outputs[n], program, n), reference[n]) for n in program.results}
        results.append([Result(n, session.describe(), inputs, error, bound) for n, error in errors.items()])
    return reference, results


def _off(values: np.ndarray, reference: np.ndarray) -> float:
    """The error; infinite where there are more or fewer of them, and NaN where the reference has no number to compare with."""
    if reference.size and reference.dtype.kind == "f" and not np.isfinite(reference).any():
        return math.nan
    return relative_error(values, reference) if values.shape == reference.shape else math.inf


def _sets(program: Program, data: Path) -> list[dict[str, np.ndarray]] | list[Mapping[str, np.ndarray]]:
    """The user's inputs as the program takes them, in the same ways as for measuring; none if it takes them in none."""
    arrays = read_arrays(data, program.inputs)
    return samples(program, arrays) or in_batches(program, arrays) or []


def held_back(program: Program, data: Path) -> list[Mapping[str, np.ndarray]]:
    """Of the inputs by which a model was quantized those that were held back, as the program takes them; none if it does not, or
    if running it on the CPU takes too long."""
    arrays = read_arrays(data, program.inputs)
    if why_too_long(program):
        return []
    if runs := samples(program, arrays):
        return [*runs[len(runs) - held(len(runs)) :]]
    return in_batches(program, arrays, held) or []


def ranges_in(data: Path, plan: Plan) -> dict[str, tuple[float, float]]:
    """Ranges of a plan's float inputs over which numbers have about the mean and the variance of those in a file of inputs."""
    ranges = {}
    for name, array in read_arrays(data, plan.entries[0].program.inputs).items():
        finite = array[np.isfinite(array)].astype(np.float64) if array.dtype.kind == "f" else np.empty(0)
        if finite.size:
            middle, wide = finite.mean(), math.sqrt(3) * finite.std()
            ranges[name] = max(float(middle - wide), float(finite.min())), min(float(middle + wide), float(finite.max()))
    return ranges


def _layers(plan: Plan, number: int, feeds: Mapping[str, np.ndarray], oracle: Oracle | References) -> list[Layer]:
    """Each float tensor that an op writes and that the model has under the same name and shape."""
    program = plan.entries[number].program
    names = [op.y for op in program.ops if op.y in oracle.tensors and op.y not in program.outputs]
    if not names:  # for which ONNX Runtime would give all outputs
        return []
    reference = oracle.run(program, feeds, names)
    found: dict[str, Layer] = {}
    nodes = {op.y: op.nodes[-1] for op in program.ops}

    def observe(name: str, stored: np.ndarray) -> None:
        t = program.tensors[name]
        if name in reference and t.dtype.is_float and reference[name].shape == t.shape:
            scale = program.storage[t.storage].scale if t.storage in program.storage else 1.0
            values = numbers(stored, program, name) / scale
            found[name] = Layer(number, nodes[name], name, t.dtype.value, relative_error(values, reference[name]))

    CpuEngine(plan, plan.entries[number], plan.entries[number].sections[0], observe=observe).run(feeds)
    return list(found.values())


class Oracle:
    """The model in ONNX Runtime on the CPU, without its optimizations."""

    def __init__(self, model: Model) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UsageError("--verify needs onnxruntime, which is not installed: pip install onnxruntime") from None
        self.runtime = onnxruntime
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        self.proto, self.path = with_small_weights(model)
        self.tensors = {name for node in self.proto.graph.node for name in node.output}
        self.classes = {node.output[0]: class_names(node) for node in self.proto.graph.node if node.op_type == "ZipMap"}
        self.widened = False
        try:
            self._session = self._open(self.proto if isinstance(model, onnx.ModelProto | Part | Tuned) else str(model))
        except UsageError:
            if (plain := in_float32(self.proto, sources(model))) is None:
                raise
            self.proto, self.widened = plain, True
            self.name += " (bf16 and float64 as fp32)"
            self._session = self._open(plain)

    def _open(self, model: Any) -> Any:
        options = self.runtime.SessionOptions()
        if self.path is not None:  # where a model that comes from memory has its weights
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.path.parent))
        options.graph_optimization_level = self.runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
            return self.runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # it raises types of its own, and protobuf's for models beyond 2 GB
            raise UsageError(f"{self.name} does not take the model: {error}; compile it without verifying") from None

    def run(self, program: Program, feeds: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
        """The tensors by name, as float64 where they are floats."""
        session = self._session
        if not set(names) <= {o.name for o in session.get_outputs()}:
            watched = onnx.ModelProto()
            watched.CopyFrom(self.proto)
            there = {o.name for o in watched.graph.output}
            watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
            session = self._open(watched)
        given = {n: feeds[n] if feeds[n].dtype != np.uint16 else from_storage(feeds[n], program.tensors[n].dtype) for n in feeds}
        if self.widened:
            given = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in given.items()}
        try:
            values = session.run(list(names), given)
        except Exception as error:
            raise VerificationError(f"{self.name} fails on these inputs: {error}") from None
        return {name: self._array(name, v) for name, v in zip(names, values, strict=True)}

    def _array(self, name: str, value: Any) -> np.ndarray:
        """An output as the plan gives it: of a list of maps, the array that they were made of."""
        if name not in self.classes:
            return np.asarray(value)
        return np.array([[row[c] for c in self.classes[name]] for row in value], np.float32)


class References:
    """In the place of an `Oracle`, for a model with operators of the user's that ONNX Runtime has not: their references, and all
    else in NumPy in fp32, before anything is fused."""

    def __init__(self, model: Model) -> None:
        self.name = f"NumPy {np.__version__} and the user's references"
        self._model = read(model)
        self.tensors = {name for node in self._model.proto.graph.node for name in node.output}

    def run(self, program: Program, feeds: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
        """See `Oracle.run`; names that no tensor has any more are left out."""
        plain = lower(rewrite(load(self._model, {name: program.tensors[name].shape for name in program.inputs})))
        found: dict[str, np.ndarray] = {}

        def watch(op: Op, values: Mapping[str, np.ndarray], acc: np.ndarray | None, y: np.ndarray) -> None:
            if op.y in names:
                found[op.y] = y

        with np.errstate(all="ignore"):
            return evaluate(plain, feeds, self._model.weights, watch) | found


def layers_text(layers: Sequence[Layer]) -> str:
    lines = [f"{'error':>9}  {'type':8}  tensor, and the node that computes it"] if layers else []
    for x in layers:
        error = f"{x.error:9.2e}" if math.isfinite(x.error) else "      NaN"
        lines.append(f"{error}  {x.dtype:8}  {x.tensor}" + (f"  ({x.node})" if x.node != x.tensor else ""))
    return "\n".join(map(plain, lines))
