"""Train the word recognizer of this example: python train.py OUT_FOLDER [--epochs 14]

Needs PyTorch, and some minutes of a CPU. Writes words.onnx and quality.json.

The model takes sound, and makes its features itself: a short-time Fourier transform of 256 samples, 80 apart (10 ms), 32 bands as
far apart as the ear hears them, and their logarithms. A GRU of 64 reads these, and says after each frame which word it has heard.
The clips are made by `words.py`: a second of one of eight words each, by another speaker each time, in noise. 19,000 weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from words import LENGTH, NOISE, RATE, WORDS, clip

WINDOW, HOP, BANDS, WIDTH = 256, 80, 32, 64
HELD_OUT, KEPT = 400, 3000


def bands() -> torch.Tensor:
    """(129, BANDS): triangles over the frequencies of a transform, evenly spaced in mel."""
    mel = np.linspace(2595 * np.log10(1 + 80 / 700), 2595 * np.log10(1 + RATE / 2 / 700), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    at = np.arange(WINDOW // 2 + 1)[:, None] * RATE / WINDOW
    rising, falling = (at - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - at) / np.diff(edges)[1:]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling))).float()


class Words(nn.Module):
    """Sound (N, LENGTH) → after each frame, scores of the words (N, frames, 8); and the features (N, frames, BANDS)"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.register_buffer("bands", bands())
        self.norm = nn.BatchNorm1d(BANDS)
        self.gru = nn.GRU(BANDS, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, len(WORDS))

    def features(self, sound: torch.Tensor) -> torch.Tensor:
        parts = torch.stft(sound, WINDOW, HOP, window=self.window, center=False, return_complex=False)
        power = parts.square().sum(-1).transpose(1, 2)
        return (power @ self.bands + 1e-3).log()

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        heard, _ = self.gru(self.norm(features.transpose(1, 2)).transpose(1, 2))
        return self.head(heard)

    def forward(self, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.features(sound)
        return self.scores(features), features


def clips(count: int, seed: int, noise: tuple[float, float] = NOISE) -> tuple[np.ndarray, np.ndarray]:
    """Clips (count, LENGTH), and the numbers of their words."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(WORDS)
    return np.stack([clip([*WORDS][label], rng, noise) for label in labels]), labels


def right(network: Words, sounds: np.ndarray, labels: np.ndarray) -> float:
    """The share of clips of which it tells the word, by what it says in the last tenth of a second."""
    with torch.no_grad():
        found = network(torch.from_numpy(sounds))[0][:, -10:].mean(1).argmax(1).numpy()
    return float((found == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=14)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network = Words()
    sounds, labels = clips(KEPT, 0)
    with torch.no_grad():
        x = torch.cat([network.features(torch.from_numpy(part)) for part in np.array_split(sounds, 20)])
    y = torch.from_numpy(labels)
    print(f"{len(x)} clips of {x.shape[1]} frames", flush=True)

    batch = 64
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=args.epochs * (len(x) // batch))
    for epoch in range(args.epochs):
        for at in torch.randperm(len(x))[: len(x) // batch * batch].split(batch):
            loss = F.cross_entropy(network.scores(x[at])[:, -10:].mean(1), y[at], label_smoothing=0.02)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}, loss {loss.item():.3f}", flush=True)

    network.eval()
    louder = {f"right_in_noise_of_{n}": right(network, *clips(HELD_OUT, 2, (n, n))) for n in (0.1, 0.2)}
    quality = {"held_out": HELD_OUT, "right": right(network, *clips(HELD_OUT, 1)), **louder, "epochs": args.epochs}
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    torch.onnx.export(network, (torch.zeros(1, LENGTH),), args.out / "words.onnx", input_names=["sound"], opset_version=17,
                      output_names=["scores", "features"], dynamo=False, dynamic_axes={"sound": {0: "batch"}})  # fmt: skip


if __name__ == "__main__":
    main()
