"""What an entry of the registry is, and what makes a PyTorch module with random weights worth comparing.

Runs where the libraries are installed; tccompile is not imported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Entry:
    """A model: its name, the library that it comes from, what kind it is, and what builds it.

    build(folder) gives a `Torch` to export, or the ONNX model's bytes and its inputs by name.
    """

    name: str
    library: str
    kind: str
    build: Callable[[Path], Any]


@dataclass
class Torch:
    """A PyTorch module, its inputs by name in the order of its arguments, and which of its outputs are exported.

    outputs  attributes of what the module returns; empty: whatever tensors it returns
    trace    by the older exporter, which traces, and by the newer one only where that fails; `opset` as it is asked for
    """

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    outputs: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    trace: bool = False
    opset: int = 18
    fixed: dict[str, Any] = field(default_factory=dict)


class Wrapped(torch.nn.Module):
    """A module that takes its inputs by name and returns a tuple of tensors."""

    def __init__(self, spec: Torch) -> None:
        super().__init__()
        self.module = spec.module
        self.names, self.outputs, self.fixed, self.call = tuple(spec.inputs), spec.outputs, spec.fixed, spec.call

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.names, args, strict=True))
        if self.call:
            result = self.call(self.module, **named)
        else:
            result = self.module(*args) if len(args) == 1 and not self.fixed else self.module(**named, **self.fixed)
        if self.outputs:
            result = [getattr(result, name) if hasattr(result, name) else result[name] for name in self.outputs]
        return tuple(tensors(result))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in tensors(part)] if isinstance(value, Sequence) else []


# --- Weights ----------------------------------------------------------------------------------------------------------


def wake(module: torch.nn.Module, inputs: dict[str, torch.Tensor], call: Callable[..., Any] | None = None) -> torch.nn.Module:
    """Give values to what initialisers leave at zero, one or next to nothing, and statistics to batch norms.

    Blocks that end in zeros compute nothing, and gains of one hide which gain is read.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(p: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator) * std

    with torch.no_grad():
        for name, p in module.named_parameters():
            if not p.is_floating_point() or not p.numel():
                continue
            low, high = float(p.min()), float(p.max())
            if low == high == 0 or (low == high and abs(low) < 1e-3):
                gain = p.dim() >= 2 and p.shape[0] > 1 and "token" not in name and "pos" not in name
                scale = any(part in name for part in ("gamma", "layer_scale", ".ls1", ".ls2"))
                std = math.sqrt(1 / max(1, p[0].numel())) if gain else 0.1
                p.copy_(0.2 + normal(p, 0.05) if scale else normal(p, std))
            elif low == high == 1 and p.numel() > 1:
                p.copy_(1 + normal(p, 0.2))
        _batch_statistics(module, inputs, call, normal)
    return module.eval()


def _batch_statistics(module: torch.nn.Module, inputs: dict[str, Any], call: Any, normal: Any) -> None:
    """Those of the inputs, as after training, where they are enough to have any; else near 0 and 1."""
    norms = [m for m in module.modules() if getattr(m, "running_mean", None) is not None]
    for m in norms:
        m.running_mean.copy_(normal(m.running_mean, 0.1))
        m.running_var.copy_(1 + normal(m.running_var, 0.2).abs())
    if not norms:
        return
    saved = copy.deepcopy({k: v for k, v in module.state_dict().items() if "running_" in k})
    module.eval()

    def measure(m: torch.nn.Module, args: tuple, _: Any = None) -> None:
        x = args[0]
        axes = [i for i in range(x.dim()) if i != 1]
        if x.dim() < 2 or x.shape[1] != m.running_mean.numel() or x.numel() // x.shape[1] < 8:
            return
        m.running_mean.copy_(x.mean(axes))
        m.running_var.copy_(x.var(axes) + 1e-3)

    hooks = [m.register_forward_pre_hook(measure) for m in norms]
    several = {name: _several(value) for name, value in inputs.items()}
    try:
        call(module, **several) if call else module(*several.values())
    except Exception:
        module.load_state_dict(saved, strict=False)
    finally:
        for hook in hooks:
            hook.remove()


def _several(value: torch.Tensor) -> torch.Tensor:
    """More images than one: what a deep layer has of one alone is too little to have statistics of."""
    if value.dim() != 4 or value.shape[0] != 1 or value.shape[2] * value.shape[3] > 256 * 256:
        return value
    return torch.cat([value, *(images(tuple(value.shape[2:]), channels=value.shape[1], seed=seed) for seed in range(2, 8))])


# --- Inputs -----------------------------------------------------------------------------------------------------------


def images(size: int | tuple[int, int] = 224, batch: int = 1, channels: int = 3, seed: int = 1) -> torch.Tensor:
    """Smooth fields with edges and noise, normalised as images are."""
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, channels, 8, 8, generator=generator)
    fine = torch.randn(batch, channels, height, width, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return smooth + 0.3 * (smooth > 0.5) + 0.2 * fine


def tokens(vocabulary: int, length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def mask(batch: int, length: int, valid: int) -> torch.Tensor:
    """Ones, and zeros behind: a padded row."""
    out = torch.ones(batch, length, dtype=torch.int64)
    out[-1, valid:] = 0
    return out


def audio(samples: int, batch: int = 1) -> torch.Tensor:
    """A sum of tones and noise."""
    t = torch.arange(samples) / 16000
    tone = sum(torch.sin(2 * math.pi * f * t) / n for n, f in enumerate((220.0, 440.5, 1333.0), 1))
    return (tone + 0.1 * normal(batch, samples)).float()


def numpy(inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in inputs.items()}
