"""Train the diffusion model of this example: python train.py OUT_FOLDER [--steps 5000]

Needs PyTorch and scikit-learn, and some minutes of a CPU. Writes diffusion.onnx and quality.json.

The network is told an image of 8×8 pixels with noise on it, how much of it is noise, and a digit, and estimates the noise. The
model is one step of the loop: it estimates the noise with the digit and without, goes beyond the first by what is between them
(guidance, Ho and Salimans 2022), and takes the image to a time with less noise (DDIM, Song et al. 2021). Times go from 1, all
noise, to 0, none: of the image cos(time π / 2) is left, of the noise there is sin(time π / 2). 66,000 weights.

The data are scikit-learn's digits (`load_digits`): see docs/examples/digits, whose classifier measures the result.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

ANY = 10  # in place of a digit: whichever
BATCH = 96
WIDTH, GUIDANCE = 24, 1.0


def left(time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of the image and of the noise there is at a time, for (N,) as (N, 1, 1, 1)."""
    angle = time[:, None, None, None] * (math.pi / 2)
    return angle.cos(), angle.sin()


class Block(nn.Module):
    """Two 3×3 convolutions with a residual; between them the features are scaled and moved by what is known of the image."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.told = nn.GroupNorm(4, width), nn.Linear(2 * WIDTH, 2 * width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        scale, move = self.told(known)[:, :, None, None].chunk(2, 1)
        return x + self.second(F.silu(self.norm(self.first(x)) * (1 + scale) + move))


class Noise(nn.Module):
    """(N, 1, 8, 8) with noise, times (N,), digits (N,) → the noise; half of the work is done at 4×4 pixels"""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(ANY + 1, 2 * WIDTH)
        self.time = nn.Linear(16, 2 * WIDTH)
        self.register_buffer("rates", torch.pi * 2 ** (torch.arange(8) / 2), persistent=False)
        self.head = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.fine, self.last = Block(WIDTH), Block(WIDTH)
        self.coarse = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.tail = nn.Conv2d(WIDTH, 1, 3, padding=1)
        nn.init.zeros_(self.tail.weight)

    def forward(self, x: torch.Tensor, time: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
        waves = time[:, None] * self.rates
        known = F.silu(self.time(torch.cat([waves.sin(), waves.cos()], 1)) + self.digit(digit))
        fine = self.fine(self.head(x), known)
        coarse = F.avg_pool2d(fine, 2)
        for block in self.coarse:
            coarse = block(coarse, known)
        return self.tail(self.last(fine + F.interpolate(coarse, scale_factor=2, mode="nearest"), known))


class Step(nn.Module):
    """One step of the loop: images at `time` → images at `then`"""

    def __init__(self, noise: Noise):
        super().__init__()
        self.noise = noise

    def forward(self, image: torch.Tensor, time: torch.Tensor, then: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
        known, blind = self.noise(
            torch.cat([image, image]), torch.cat([time, time]), torch.cat([digit, torch.full_like(digit, ANY)])
        ).chunk(2)
        noise = known + GUIDANCE * (known - blind)
        (signal, share), (signal_then, share_then) = left(time), left(then)
        clean = ((image - share * noise) / signal.clamp(min=1e-2)).clamp(-1, 1)
        return signal_then * clean + share_then * (image - signal * clean) / share.clamp(min=1e-2)


@torch.no_grad()
def generated(step: Step, digits: torch.Tensor, steps: int, seed: int) -> torch.Tensor:
    """Images of digits, of -1 to 1, from noise."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(digits), 1, 8, 8), np.float32))
    times = torch.linspace(1, 0, steps + 1)
    for time, then in pairwise(times):
        x = step(x, time.expand(len(x)), then.expand(len(x)), digits)
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data = load_digits()
    images = torch.from_numpy(data.images[:, None] / 8 - 1).float()
    labels = torch.from_numpy(data.target)

    network = Noise()
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.steps)
    total = 0.0
    for n in range(1, args.steps + 1):
        at = torch.randint(len(images), (BATCH,))
        x, digit = images[at], torch.where(torch.rand(BATCH) < 0.1, ANY, labels[at])
        time, noise = torch.rand(BATCH), torch.randn_like(x)
        signal, share = left(time)
        loss = F.mse_loss(network(signal * x + share * noise, time, digit), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(network)
        total += loss.item()
        if n % 500 == 0:
            print(f"step {n}, loss {total / 500:.4f}", flush=True)
            total = 0.0

    step = Step(average.module).eval()
    asked = torch.arange(10).repeat_interleave(50)
    made = generated(step, asked, 20, 0)
    spread = float(torch.stack([torch.pdist(made[asked == d].flatten(1)).mean() for d in range(10)]).mean())
    of_data = float(torch.stack([torch.pdist(images[labels == d][:50].flatten(1)).mean() for d in range(10)]).mean())
    nearest = float(torch.cdist(made.flatten(1), images.flatten(1)).min(1).values.mean())
    pairs = torch.cdist(images.flatten(1), images.flatten(1))
    quality = {"steps": args.steps, "spread": spread, "spread_of_data": of_data, "nearest": nearest,
               "nearest_of_data": float(pairs.fill_diagonal_(math.inf).min(1).values.mean())}  # fmt: skip
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    inputs = (torch.zeros(4, 1, 8, 8), torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64))
    names = ["image", "time", "then", "digit"]
    torch.onnx.export(step, inputs, args.out / "diffusion.onnx", input_names=names, output_names=["cleaner"], opset_version=17,
                      dynamo=False, dynamic_axes={name: {0: "batch"} for name in names})  # fmt: skip


if __name__ == "__main__":
    main()
