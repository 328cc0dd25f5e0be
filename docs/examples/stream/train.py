"""Train the segmentation network of this example: python train.py OUT_FOLDER [--steps 1200]

Needs PyTorch, and some minutes of a CPU. Writes stream.onnx and quality.json.

The network says for each pixel whether it is of a person: a small U-net, three times halved, of 35,000 weights. The model around
it takes a frame as a camera gives it, bytes (1, H, W, 3), and gives one back in which all but the person is out of focus. The
frames are drawn by `scenes.py`, each of another person in another room. Quality is intersection over union in scenes that were
held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scenes import HEIGHT, WIDTH, Scene
from torch import nn
from torch.nn import functional as F

HELD_OUT, KEPT, BATCH = 64, 1500, 10


def layer(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def doubled(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Person(nn.Module):
    """(N, 3, H, W) of -1 to 1 → (N, 1, H, W): above 0 where a person is"""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.fourth, self.eighth = layer(3, 8, 2), layer(8, 20, 2), layer(20, 32, 2)
        self.middle = nn.Sequential(layer(32, 32), layer(32, 32))
        self.to_fourth, self.to_second = layer(32 + 20, 16), layer(16 + 8, 8)
        self.head = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.second(x)
        quarter = self.fourth(half)
        out = self.middle(self.eighth(quarter))
        out = self.to_fourth(torch.cat([doubled(out), quarter], 1))
        out = self.to_second(torch.cat([doubled(out), half], 1))
        return doubled(self.head(out))


class Focus(nn.Module):
    """Frames (N, H, W, 3) uint8 → the same with the room out of focus, and how far each pixel is the person (N, H, W)"""

    def __init__(self, person: Person):
        super().__init__()
        self.person = person

    def forward(self, frame: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = frame.permute(0, 3, 1, 2).float()
        share = torch.sigmoid(2 * self.person(x / 127.5 - 1))
        room = F.avg_pool2d(x * (1 - share), 4) / (F.avg_pool2d(1 - share, 4) + 1e-3)  # in which there is nobody
        room = F.avg_pool2d(F.pad(room, (2, 2, 2, 2), "replicate"), 5, 1)
        shown = share * x + (1 - share) * doubled(doubled(room))
        return shown.clamp(0, 255).round().permute(0, 2, 3, 1).to(torch.uint8), share[:, 0]


def scenes(seeds: range) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame of each scene (N, 3, H, W), of -1 to 1, and where the person is (N, 1, H, W)."""
    made = [Scene(seed).frame(seed % 97 / 10) for seed in seeds]
    frames, truth = (torch.from_numpy(np.stack(v)) for v in zip(*made, strict=True))
    return frames.permute(0, 3, 1, 2).contiguous(), truth[:, None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    frames, truth = scenes(range(1000, 1000 + KEPT))
    print(f"{len(frames)} scenes", flush=True)
    network = Person()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=args.steps)
    for step in range(1, args.steps + 1):
        at = torch.randint(len(frames), (BATCH,))
        x, y = frames[at].float() / 127.5 - 1, truth[at].float()
        if step % 2:
            x, y = x.flip(3), y.flip(3)
        loss = F.binary_cross_entropy_with_logits(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)

    model = Focus(network).eval()
    frames, truth = scenes(range(HELD_OUT))
    with torch.no_grad():
        found = model(frames.permute(0, 2, 3, 1))[1] > 0.5
    there = truth[:, 0] > 0
    union = (found | there).sum((1, 2)).float()
    quality = {"held_out": HELD_OUT, "iou": float(((found & there).sum((1, 2)) / union).mean()), "steps": args.steps}
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    example = torch.zeros(1, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    axes = {1: "height", 2: "width"}
    torch.onnx.export(model, (example,), args.out / "stream.onnx", input_names=["frame"], output_names=["shown", "person"],
                      opset_version=17, dynamo=False, dynamic_axes={"frame": axes})  # fmt: skip


if __name__ == "__main__":
    main()
