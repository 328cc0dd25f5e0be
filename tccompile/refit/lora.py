"""Adapters of low rank (LoRA) merged into the weights that they are for: W + scale · up · down.

Files name what they hold as peft does (`….lora_A.weight`, `….lora_B.weight`), as diffusers (the same, or `….lora.down.weight`),
or as kohya's scripts (`lora_unet_….lora_down.weight`, `….alpha`). `down` and `up` are often called A and B. How much an adapter
counts is alpha / rank, where alpha is an array of the file, or in peft's `adapter_config.json` beside it.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tccompile.errors import UnsupportedError, UsageError
from tccompile.ir.halves import rows_at_once, scratch
from tccompile.ir.program import Program
from tccompile.ir.weights import Recipe, Source, Transform
from tccompile.plan.format import Exported
from tccompile.refit.constants import THREADS
from tccompile.refit.names import Called
from tccompile.refit.safetensors import SafeTensors

KINDS = {
    "lora_A": "down", "lora_down": "down", "lora.down": "down",
    "lora_B": "up", "lora_up": "up", "lora.up": "up",
}  # fmt: skip
PATTERN = re.compile(r"(?P<module>.+)[._](?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(\.default)?\.weight")
ALPHA = re.compile(r"(?P<module>.+)\.alpha")

DIFFUSERS = "lora_adapter_metadata"
"""Where diffusers keeps in a file what peft writes beside it."""

COMPONENTS = (
    "lora_unet_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_te_", "lora_transformer_", "unet.", "text_encoder.",
    "text_encoder_2.", "text_encoder_3.", "transformer.",
)  # fmt: skip
"""What tools put in front of the names of modules of several models in one file."""

PREFIXES = ("base_model.model.", *COMPONENTS)
"""What tools put in front of a module's name."""

NOTHING_TOLD = Exported()


@dataclass(frozen=True)
class Adapter:
    """What is added to one module's weights: factor · up · down, as (outputs, rank, …) and (rank, inputs, …)."""

    module: str
    down: np.ndarray
    up: np.ndarray
    factor: float


@dataclass(frozen=True)
class Place:
    """An initializer that is the weights of a product.

    names       what adapters may call it: the initializer's name, that of its module, or those of nodes that multiply by it
    transposed  whether it lies as (inputs, outputs); None if it is read both ways, or in another order
    folded      whether it is something else than the module's own weight
    """

    weight: str
    names: tuple[str, ...]
    transposed: bool | None
    folded: bool = False


# --- The file --------------------------------------------------------------------------------------------------------


def read_adapters(path: Path) -> list[Adapter]:
    """The adapters in a file. Raises UsageError for a broken one, UnsupportedError for other kinds of adapters."""
    arrays = SafeTensors(path)
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name in arrays:
        if match := PATTERN.fullmatch(name):
            parts.setdefault(match["module"], {})[KINDS[match["kind"]]] = arrays[name]
        elif match := ALPHA.fullmatch(name):
            parts.setdefault(match["module"], {})["alpha"] = arrays[name]
        else:
            raise UnsupportedError(f"{path}: {name!r} is no part of a LoRA adapter (lora_A and lora_B, or lora_down and lora_up)")
    if not parts:
        raise UsageError(f"{path} holds no adapters")
    config = _config(path, arrays.metadata)
    return [_adapter(path, module, part, _of_component(config, module)) for module, part in parts.items()]


def _adapter(path: Path, module: str, part: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Adapter:
    down, up = part.get("down"), part.get("up")
    if down is None or up is None:
        raise UsageError(f"{path}: of {module!r} only a part is there: {', '.join(sorted(part))}")
    if (
        down.ndim < 2
        or up.ndim < 2
        or down.shape[0] != up.shape[1]
        or any(n != 1 for n in up.shape[2:])
        or not down.size * up.size
    ):
        raise UsageError(f"{path}: {module!r} is no product of up {up.shape} and down {down.shape}")
    rank, alpha = down.shape[0], part.get("alpha")
    if alpha is not None and alpha.size != 1:
        raise UsageError(f"{path}: the alpha of {module!r} has the shape {alpha.shape}; it must be a number")
    if alpha is not None:
        factor = float(alpha.reshape(())) / rank
    elif "lora_alpha" in config:
        factor = _alpha(path, config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    else:
        factor = 1.0
    if not math.isfinite(factor):
        raise UsageError(f"{path}: the alpha of {module!r} is not finite")
    return Adapter(module, down.astype(np.float32), up.astype(np.float32), factor)


def _config(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What peft writes of adapters beside them, or diffusers into their file; nothing where neither is there."""
    beside = path.with_name("adapter_config.json")
    where = f"{path}: lora_adapter_metadata" if DIFFUSERS in metadata else f"{beside}"
    try:
        text = metadata[DIFFUSERS] if DIFFUSERS in metadata else beside.read_text(encoding="utf-8") if beside.is_file() else "{}"
        config = json.loads(text)
        if type(config) is not dict:
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: cannot be read: {error}") from None
    for key, value in config.items():
        if not _is_plain(key.rpartition(".")[2], value):
            raise UnsupportedError(f"{where}: {key} is {value!r}, which is more than up · down: merge the adapters with peft")
    return config


OTHERWISE = (
    "use_dora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "layer_replication",
)  # fmt: skip
"""What makes of peft's LoRA something else than a sum of weights, where it is set."""

STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""How peft begins an adapter without changing the model's own weights, which others do: PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA."""


def _is_plain(key: str, value: Any) -> bool:
    """Whether what a configuration says leaves an adapter a product that is added to weights."""
    if key == "peft_type":
        return bool(value == "LORA")
    if key == "init_lora_weights":
        return value in STARTS
    return key not in OTHERWISE or not value


def _of_component(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """What a configuration says of the component that a module is in: of a pipeline's, it has `unet.lora_alpha`."""
    component = module.partition(".")[0] + "."
    return {key.removeprefix(component): value for key, value in config.items() if "." not in key or key.startswith(component)}


def _alpha(path: Path, config: Mapping[str, Any], module: str) -> float:
    """The alpha of a module; its patterns are regular expressions for the ends of modules' names."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config["lora_alpha"]
    try:
        ends = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
        alpha = next(ends, alpha)
    except (AttributeError, re.error) as error:
        raise UsageError(f"{path}: the alpha_pattern of its configuration cannot be read: {error}") from None
    if type(alpha) not in (int, float):
        raise UsageError(f"{path}: its configuration has no lora_alpha that is a number: cannot be read for {module!r}")
    return float(alpha)


# --- Where they belong -----------------------------------------------------------------------------------------------


def places(programs: Iterable[Program], exported: Exported = NOTHING_TOLD) -> list[Place]:
    """The initializers that are weights of products, and what the exporter told of them."""
    found: dict[str, Place] = {}
    products = ((p, op, name) for p in programs for op in p.ops for name in op.multiplied if name in p.constants)
    for program, op, name in products:
        for source, transposed in _sources(program.constants[name]):
            if len(source.shape) > 1:
                names = source.name, *filter(None, [exported.modules.get(source.name)])
                known = found.get(source.name, Place(source.name, names, transposed, source.name in exported.folded))
                both = transposed if known.transposed == transposed else None
                found[source.name] = replace(known, names=(*known.names, *op.nodes), transposed=both)
    return list(found.values())


def _sources(recipe: Recipe, turned: bool | None = False) -> Iterable[tuple[Source, bool | None]]:
    """The weights that a constant is made of, and whether their last two axes are the other way round in it; None for others."""
    if isinstance(recipe, Source):
        yield recipe, turned
    elif isinstance(recipe, Transform):
        if recipe.fn == "transpose":
            axes = dict(recipe.attributes)["axes"]
            swaps = (*axes[:-2], *axes[:-3:-1]) == tuple(range(len(axes)))
            turned = not turned if swaps and turned is not None else None  # nothing is known of others, as in ConvTranspose
        for arg in recipe.args:
            yield from _sources(arg, turned)


def _plain(name: str) -> str:
    """A name as they are compared: without what a tool puts in front, and with one sign between its parts."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    name = re.sub(r"\.(weight|base_layer\.weight)$", "", name)
    name = re.sub(r"/(MatMul|Gemm|Conv)(_\d+)?$", "", name)
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")


def assigned(adapters: Iterable[Adapter], known: Iterable[Place], called: Mapping[str, Called]) -> list[tuple[Adapter, Place]]:
    """Each adapter with the weights that it is for: by a map of what weights are called, or by their names.

    A file may be for several models, as those of a pipeline: what is for others is left out, with a RuntimeWarning.
    Raises UsageError for an adapter that belongs to none, or may belong to several, or to one that another is for as well.
    """
    known = list(known)
    mapped = {there.name: weight for weight, there in called.items()}
    out: list[tuple[Adapter, Place]] = []
    index, by_weight = _Index(known), {place.weight: place for place in known}
    said = ((a, by_weight.get(mapped.get(a.module, ""))) for a in adapters)
    found = [(a, index.called(a.module) if place is None else [place]) for a, place in said]
    for adapter, fits in _of_this_model(found):
        if len(fits) != 1:
            several = f"it may be for {', '.join(repr(p.weight) for p in fits)}" if fits else "no product's weight is called so"
            raise UsageError(f'the adapter {adapter.module!r}: {several}; say it with --map: {{"WEIGHT": "{adapter.module}"}}')
        if twice := next((other.module for other, place in out if place is fits[0]), None):
            raise UsageError(
                f"the adapters {twice!r} and {adapter.module!r} seem to be for one weight, {fits[0].weight!r}; say it with --map"
            )
        out.append((adapter, fits[0]))
    return out


def _of_this_model(found: list[tuple[Adapter, list[Place]]]) -> list[tuple[Adapter, list[Place]]]:
    """Adapters with the places that they fit, without those for models of which no adapter fits, if others do."""
    here = {_component(adapter) for adapter, fits in found if fits}
    if not here:
        return found
    others = sorted({_component(adapter) for adapter, _ in found} - here)
    if others:
        count = sum(_component(adapter) in others for adapter, _ in found)
        named = ", ".join(f"{name}…" for name in others)
        warnings.warn(f"{count} adapters are for other models ({named}) and were left out", RuntimeWarning, stacklevel=2)
    return [(adapter, fits) for adapter, fits in found if _component(adapter) in here]


def _component(adapter: Adapter) -> str:
    return next((name for name in COMPONENTS if adapter.module.startswith(name)), "")


class _Index:
    """Places by what they are called, so that each name is taken apart once, however many adapters there are.

    own    by the weight's own name; `nodes`, by other names; `ends`, by each end of all of them
    """

    def __init__(self, known: Iterable[Place]):
        self.own: dict[str, list[Place]] = {}
        self.nodes: dict[str, list[Place]] = {}
        self.ends: dict[str, list[Place]] = {}
        for place in known:
            own, *nodes = names = list(map(_plain, place.names))
            self.own.setdefault(own, []).append(place)
            for node in set(nodes):
                self.nodes.setdefault(node, []).append(place)
            for end in {end for name in names for end in _ends(name)}:
                self.ends.setdefault(end, []).append(place)

    def called(self, module: str) -> list[Place]:
        """The weights that are called as the module; or whose nodes are; or of which one name ends with the other."""
        wanted = _plain(module)
        if found := self.own.get(wanted) or self.nodes.get(wanted):
            return found
        whole = (name for name in _ends(wanted) if name in self.own or name in self.nodes)
        shorter = (place for name in whole for place in (*self.own.get(name, ()), *self.nodes.get(name, ())))
        return list({place.weight: place for place in (*self.ends.get(wanted, ()), *shorter)}.values())


def _ends(name: str) -> Iterator[str]:
    """A name without its first parts: one, two, and so on."""
    while "_" in name:
        name = name.partition("_")[2]
        yield name


# --- Merging ---------------------------------------------------------------------------------------------------------


def merged(
    weights: Mapping[str, np.ndarray],
    known: Iterable[Place],
    adapters: Iterable[Adapter],
    scale: float,
    called: Mapping[str, Called] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The weights that adapters change, with these merged, by name: see `added`."""
    return added(weights, assigned(adapters, known, called), scale)


def added(weights: Mapping[str, np.ndarray], adapters: Sequence[tuple[Adapter, Place]], scale: float) -> dict[str, np.ndarray]:
    """The weights of these places with their adapters, by name: in float32, and then in the weight's own type.

    Raises UsageError and UnsupportedError where they do not fit.
    """
    if not math.isfinite(scale):
        raise UsageError(f"adapters cannot be merged {scale} times; give a finite number")
    for adapter, place in adapters:
        _check_fits(adapter, place, weights[place.weight])
    with ThreadPoolExecutor(THREADS) as threads:
        made = threads.map(lambda one: _sum(weights[one[1].weight], one[0], bool(one[1].transposed), scale), adapters)
        return dict(zip((place.weight for _, place in adapters), made, strict=True))


def _check_fits(adapter: Adapter, place: Place, w: np.ndarray) -> None:
    if w.dtype.kind != "f":
        raise UnsupportedError(f"the adapter {adapter.module!r} is for {place.weight!r}, which is of {w.dtype.name}")
    if place.folded:
        raise UnsupportedError(
            f"the adapter {adapter.module!r} is for {place.weight!r}, which is not that module's alone: several modules share "
            "it, or the model's exporter has folded a normalization into it: merge the adapter before the model is exported"
        )
    if place.transposed is None:
        raise UnsupportedError(
            f"the adapter {adapter.module!r} is for {place.weight!r}, of whose axes it is not known which are outputs: "
            "merge it before the model is exported"
        )
    own, outputs = _own(w, place.transposed).shape, len(adapter.up)
    inputs = adapter.down.size // len(adapter.down)
    if outputs * inputs != w.size or own[0] != outputs:
        raise UsageError(
            f"the adapter {adapter.module!r} is for weights of {outputs}×{inputs}, and {place.weight!r} has "
            f"{'×'.join(map(str, own))}: say which it is for with --map"
        )


def _own(w: np.ndarray, transposed: bool) -> np.ndarray:
    """A weight as the module has it: its outputs first."""
    return w.swapaxes(-1, -2) if transposed else w


def _sum(w: np.ndarray, adapter: Adapter, transposed: bool, scale: float) -> np.ndarray:
    """W + scale · factor · up · down."""
    left = adapter.up.reshape(len(adapter.up), -1) * np.float32(scale * adapter.factor)
    right = adapter.down.reshape(len(adapter.down), -1)
    out = np.empty(w.shape, w.dtype)
    into, old = (_own(out, transposed), _own(w, transposed))
    if transposed and w.ndim == 2:
        left, right, into, old = right.T, left.T, out, w
    few = max(SMALL // right.size, 1)  # of which BLAS makes no threads: NumPy has it multiply so many rows after the other
    step = rows_at_once(-(-len(left) // few), few * right.shape[1]) * few
    for i in range(0, len(left), step):
        lines = left[i : i + step]
        delta = scratch(len(lines) * right.shape[1])[0].reshape(len(lines), -1)
        whole = len(lines) // few * few
        np.matmul(lines[:whole].reshape(-1, few, lines.shape[1]), right, out=delta[:whole].reshape(-1, few, right.shape[1]))
        np.matmul(lines[whole:], right, out=delta[whole:])
        delta = delta.reshape(-1, *into.shape[1:])
        np.add(delta, old[i : i + step], out=delta, casting="same_kind")
        into[i : i + step] = delta
    return out


SMALL = 1 << 18
"""Multiplications up to which OpenBLAS makes no threads."""
