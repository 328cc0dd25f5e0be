"""Adapters of low rank (LoRA) merged into the weights that they are for: W + scale · up · down.

Files name what they hold as peft does (`….lora_A.weight`, `….lora_B.weight`), as diffusers (the same, or `….lora.down.weight`),
or as kohya's scripts (`lora_unet_….lora_down.weight`, `….alpha`). `down` and `up` are often called A and B. How much an adapter
counts is alpha / rank, where alpha is an array of the file, or in peft's `adapter_config.json` beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tccompile.errors import UnsupportedError, UsageError
from tccompile.ir.program import Program
from tccompile.ir.weights import Recipe, Source, Transform
from tccompile.refit.names import Called
from tccompile.refit.safetensors import SafeTensors

KINDS = {
    "lora_A": "down", "lora_down": "down", "lora.down": "down",
    "lora_B": "up", "lora_up": "up", "lora.up": "up",
}  # fmt: skip
PATTERN = re.compile(r"(?P<module>.+)[._](?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(\.default)?\.weight")
ALPHA = re.compile(r"(?P<module>.+)\.alpha")

PREFIXES = (
    "base_model.model.", "lora_unet_", "lora_te1_", "lora_te2_", "lora_te_", "lora_transformer_", "unet.", "text_encoder.",
    "transformer.",
)  # fmt: skip
"""What tools put in front of a module's name."""


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

    names       what adapters may call it: the initializer's name, or those of nodes that multiply by it
    transposed  whether it lies as (inputs, outputs); None if it is read both ways, or in another order
    """

    weight: str
    names: tuple[str, ...]
    transposed: bool | None


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
    config = _config(path.with_name("adapter_config.json"))
    return [_adapter(path, module, part, config) for module, part in parts.items()]


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
        factor = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    else:
        factor = 1.0
    if not math.isfinite(factor):
        raise UsageError(f"{path}: the alpha of {module!r} is not finite")
    return Adapter(module, down.astype(np.float32), up.astype(np.float32), factor)


def _config(path: Path) -> Mapping[str, Any]:
    """What peft writes of adapters beside them; nothing where it is not there."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if type(config) is not dict or type(config.get("lora_alpha", 1)) not in (int, float):
            raise ValueError("it has no lora_alpha that is a number")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    for key in ("alpha_pattern", "use_dora"):
        if config.get(key):
            raise UnsupportedError(f"{path}: {key} is not supported; merge the adapters with peft")
    return config


# --- Where they belong -----------------------------------------------------------------------------------------------


def places(programs: Iterable[Program]) -> list[Place]:
    """The initializers that are weights of products."""
    found: dict[str, Place] = {}
    products = ((p, op, name) for p in programs for op in p.ops for name in op.multiplied if name in p.constants)
    for program, op, name in products:
        for source, transposed in _sources(program.constants[name]):
            if len(source.shape) > 1:
                known = found.get(source.name, Place(source.name, (source.name,), transposed))
                both = transposed if known.transposed == transposed else None
                found[source.name] = Place(source.name, (*known.names, *op.nodes), both)
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

    Raises UsageError for an adapter that belongs to none, or may belong to several, or to one that another is for as well.
    """
    known = list(known)
    mapped = {there.name: weight for weight, there in called.items()}
    out: list[tuple[Adapter, Place]] = []
    for adapter in adapters:
        fits = [place for place in known if place.weight == mapped.get(adapter.module)] or _by_name(adapter, known)
        if len(fits) != 1:
            several = f"it may be for {', '.join(repr(p.weight) for p in fits)}" if fits else "no product's weight is called so"
            raise UsageError(f'the adapter {adapter.module!r}: {several}; say it with --map: {{"WEIGHT": "{adapter.module}"}}')
        if twice := next((other.module for other, place in out if place is fits[0]), None):
            raise UsageError(
                f"the adapters {twice!r} and {adapter.module!r} seem to be for one weight, {fits[0].weight!r}; say it with --map"
            )
        out.append((adapter, fits[0]))
    return out


def _by_name(adapter: Adapter, known: Iterable[Place]) -> list[Place]:
    """The weights that are called as the adapter's module; or whose nodes are; or of which one name ends with the other."""
    wanted = _plain(adapter.module)
    by_rank: tuple[list[Place], ...] = [], [], []
    for place in known:
        own, *nodes = map(_plain, place.names)
        if own == wanted:
            by_rank[0].append(place)
        if wanted in nodes:
            by_rank[1].append(place)
        if any(name.endswith(f"_{wanted}") or wanted.endswith(f"_{name}") for name in (own, *nodes)):
            by_rank[2].append(place)
    return next(filter(None, by_rank), [])


# --- Merging ---------------------------------------------------------------------------------------------------------


def merged(
    weights: Mapping[str, np.ndarray],
    known: Iterable[Place],
    adapters: Iterable[Adapter],
    scale: float,
    called: Mapping[str, Called] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The weights that adapters change, with these merged, by name: in float32, and then in the weight's own type.

    Raises UsageError where they do not fit.
    """
    if not math.isfinite(scale):
        raise UsageError(f"adapters cannot be merged {scale} times; give a finite number")
    out: dict[str, np.ndarray] = {}
    for adapter, place in assigned(adapters, known, called):
        w = weights[place.weight]
        if w.dtype.kind != "f":
            raise UnsupportedError(f"the adapter {adapter.module!r} is for {place.weight!r}, which is of {w.dtype.name}")
        if place.transposed is None:
            raise UnsupportedError(
                f"the adapter {adapter.module!r} is for {place.weight!r}, of whose axes it is not known which are outputs: "
                "merge it before the model is exported"
            )
        delta = adapter.up.reshape(len(adapter.up), -1) @ adapter.down.reshape(len(adapter.down), -1)
        delta *= np.float32(scale * adapter.factor)
        own = (*w.shape[:-2], w.shape[-1], w.shape[-2]) if place.transposed else w.shape
        if delta.size != w.size or own[0] != len(adapter.up):
            raise UsageError(
                f"the adapter {adapter.module!r} is for weights of {len(adapter.up)}×{delta.size // len(adapter.up)}, and "
                f"{place.weight!r} has {'×'.join(map(str, own))}: say which it is for with --map"
            )
        delta = delta.reshape(own)
        delta = delta.swapaxes(-1, -2) if place.transposed else delta
        out[place.weight] = (w.astype(np.float32) + delta).astype(w.dtype)
    return out
