"""Train the small residual classifier of this example: python train.py OUT_FOLDER [--epochs 60]

Needs PyTorch, onnxscript and scikit-learn, and a minute or two of a CPU. Writes digits.onnx, digits.npz and quality.json.

The data are scikit-learn's digits (`load_digits`): 1,797 images of 8×8 pixels, from 0 to 16, of the "Optical Recognition of
Handwritten Digits" set of the UCI Machine Learning Repository (E. Alpaydin and C. Kaynak, 1998; CC BY 4.0). A quarter is held
out. digits.npz has the 448 that are held out with their labels, and 64 of the others, to calibrate with.

The network: a 3×3 convolution to 16 channels, three residual blocks of two 3×3 convolutions to 16, 32 and 48 channels, the last
two of stride 2, the mean over the image, and a product. Batch normalizations are folded into the convolutions. 55,000 weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

HELD_OUT, CALIBRATED = 448, 64


class Layer(nn.Module):
    """A convolution and its batch normalization."""

    def __init__(self, before: int, after: int, size: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))

    def fold(self) -> None:
        self.conv, self.norm = fuse_conv_bn_eval(self.conv, self.norm), nn.Identity()


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first, self.second = Layer(before, after, 3, stride), Layer(after, after, 3)
        self.beside = Layer(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.beside(x) + self.second(F.relu(self.first(x))))


class Digits(nn.Module):
    """(N, 1, 8, 8) in 0…1 → (N, 10)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Layer(1, 16, 3)
        self.body = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 48, 2))
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(F.relu(self.stem(x))).mean((2, 3)))


def moved(x: torch.Tensor) -> torch.Tensor:
    """Each image turned by up to 12 degrees, made up to a tenth larger or smaller, moved by up to a pixel, with some noise."""
    n = len(x)
    turn, size = (torch.rand(n) - 0.5) * 0.42, 1 + (torch.rand(n) - 0.5) * 0.2
    shift = (torch.rand(n, 2) - 0.5) * 0.5
    rows = [torch.stack([size * turn.cos(), -size * turn.sin(), shift[:, 0]], 1),
            torch.stack([size * turn.sin(), size * turn.cos(), shift[:, 1]], 1)]  # fmt: skip
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False) + 0.03 * torch.randn_like(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.uint8)
    x, y = torch.from_numpy(images[HELD_OUT:]), torch.from_numpy(labels[HELD_OUT:]).long()

    network, batch = Digits(), 64
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = args.epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for epoch in range(args.epochs):
        for at in torch.randperm(len(x))[: len(x) // batch * batch].split(batch):
            loss = F.cross_entropy(network(moved(x[at])), y[at], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}, loss {loss.item():.3f}", flush=True)

    network.eval()
    for module in network.modules():
        if isinstance(module, Layer):
            module.fold()
    with torch.no_grad():
        found = network(torch.from_numpy(images[:HELD_OUT])).argmax(1).numpy()
    quality = {"held_out": HELD_OUT, "accuracy": float((found == labels[:HELD_OUT]).mean()), "epochs": args.epochs}
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    held, kept = (np.rint(16 * part).astype(np.uint8) for part in (images[:HELD_OUT], images[HELD_OUT:][:CALIBRATED]))
    np.savez_compressed(args.out / "digits.npz", held_out=held, labels=labels[:HELD_OUT], calibrate=kept)
    torch.onnx.export(network, (torch.zeros(1, 1, 8, 8),), args.out / "digits.onnx", input_names=["image"],
                      output_names=["scores"], opset_version=17, dynamo=False, dynamic_axes={"image": {0: "batch"}})  # fmt: skip


if __name__ == "__main__":
    main()
