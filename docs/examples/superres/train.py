"""Train the ×3 super-resolution network of this example: python train.py OUT_FOLDER [--minutes 4]

Needs a GPU, PyTorch and scikit-image, whose photographs are the training set; the cat (`skimage.data.chelsea`) is held out.
Writes superres_x3.onnx, quality.json (PSNR on the held-out photograph, ours and bicubic's), chelsea.png, and calibration.npz
(parts of photographs of the training set, to quantize the network with).

The network: a 3×3 convolution to 40 channels, six residual blocks of two 3×3 convolutions (as in EDSR, Lim et al. 2017: no
batch normalisation), a 3×3 convolution to 27 channels, depth-to-space by 3 (Shi et al. 2016), added to the bilinearly
enlarged input. 184,000 weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import skimage
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

SCALE = 3
PHOTOGRAPHS = (
    "astronaut",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "retina",
    "camera",
    "brick",
    "grass",
    "gravel",
    "coins",
    "moon",
)
HELD_OUT = "chelsea"


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)  # every block starts as the identity
        nn.init.zeros_(self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu(self.first(x)))


class SuperResolution(nn.Module):
    """(N, 3, H, W) in 0…1 → (N, 3, 3·H, 3·W)"""

    def __init__(self, channels: int = 40, blocks: int = 6):
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.tail = nn.Conv2d(channels, 3 * SCALE * SCALE, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enlarged = F.interpolate(x, scale_factor=SCALE, mode="bilinear", align_corners=False)
        return enlarged + F.pixel_shuffle(self.tail(self.body(self.head(x))), SCALE)


def photograph(name: str) -> np.ndarray:
    """(H, W, 3) uint8, its sides multiples of 3"""
    image = getattr(skimage.data, name)()
    image = np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image[..., :3]
    h, w = (n // SCALE * SCALE for n in image.shape[:2])
    return np.ascontiguousarray(image[:h, :w])


def reduced(image: np.ndarray) -> np.ndarray:
    """The photograph at a third of its size, by Pillow's bicubic filter."""
    h, w = image.shape[:2]
    return np.asarray(Image.fromarray(image).resize((w // SCALE, h // SCALE), Image.Resampling.BICUBIC))


def shrunk(image: np.ndarray, factor: float) -> np.ndarray:
    """A smaller copy, whose details are other ones: more training data from few photographs."""
    h, w = (int(n * factor) // SCALE * SCALE for n in image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.LANCZOS))


def tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255


def parts() -> np.ndarray:
    """(12, 3, 40, 40) in 0…1: two parts of each of six reduced photographs, which nobody has rights in (NASA's, and CC0)."""
    rng, out = np.random.default_rng(0), []
    for name in ("astronaut", "coffee", "rocket", "brick", "grass", "gravel"):
        small = reduced(photograph(name))
        for _ in range(2):
            y, x = (int(rng.integers(0, n - 39)) for n in small.shape[:2])
            out.append(small[y : y + 40, x : x + 40].transpose(2, 0, 1).astype(np.float32) / 255)
    return np.stack(out)


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """In dB, over all channels of 8-bit images, three pixels at the borders left out."""
    a, b = (v[SCALE:-SCALE, SCALE:-SCALE].astype(np.float64) for v in (image, truth))
    return 10 * math.log10(255**2 / np.mean((a - b) ** 2))


def batch(pairs: list[tuple[torch.Tensor, torch.Tensor]], size: int, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    small, large = [], []
    areas = torch.tensor([float(s.shape[1] * s.shape[2]) for s, _ in pairs]).sqrt()
    for k in torch.multinomial(areas, size, replacement=True).tolist():
        s, t = pairs[k]
        y, x = (int(torch.randint(0, n - patch + 1, ())) for n in s.shape[1:])
        s = s[:, y : y + patch, x : x + patch]
        t = t[:, y * SCALE : (y + patch) * SCALE, x * SCALE : (x + patch) * SCALE]
        turn, flip = int(torch.randint(0, 4, ())), bool(torch.randint(0, 2, ()))
        s, t = (torch.rot90(v.flip(2) if flip else v, turn, (1, 2)) for v in (s, t))
        order = torch.randperm(3)
        small.append(s[order])
        large.append(t[order])
    return torch.stack(small), torch.stack(large)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    photographs = []
    for name in PHOTOGRAPHS:
        try:
            photographs.append(photograph(name))
        except Exception as error:  # not every scikit-image ships every photograph
            print(f"without {name}: {error}")
    images = [shrunk(p, f) if f < 1 else p for p in photographs for f in (1, 0.8, 0.6, 0.45) if min(p.shape[:2]) * f > 160]
    pairs = [(tensor(reduced(p)).cuda(), tensor(p).cuda()) for p in images]
    network = SuperResolution().cuda()
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.Adam(network.parameters(), lr=8e-4)
    start, step = time.time(), 0
    while (done := (time.time() - start) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 8e-4 * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        small, large = batch(pairs, 48, 40)
        with torch.autocast("cuda", torch.bfloat16):
            out = network(small)
        loss = F.l1_loss(out.float(), large)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
        step += 1
        if step % 1000 == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)
    model = average.module.cpu().eval()
    truth = photograph(HELD_OUT)
    small = reduced(truth)
    with torch.no_grad():
        ours = (model(tensor(small)[None])[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    bicubic = np.asarray(Image.fromarray(small).resize(truth.shape[1::-1], Image.Resampling.BICUBIC))
    quality = {"photograph": HELD_OUT, "psnr_ours": psnr(ours, truth), "psnr_bicubic": psnr(bicubic, truth), "steps": step}
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    Image.fromarray(truth).save(args.out / "chelsea.png", optimize=True)
    np.savez_compressed(args.out / "calibration.npz", image=parts())
    example = torch.zeros(1, 3, small.shape[0], small.shape[1])
    path, axes = args.out / "superres_x3.onnx", {2: "height", 3: "width"}
    torch.onnx.export(model, (example,), path, input_names=["image"], output_names=["enlarged"], opset_version=17, dynamo=False,
                      dynamic_axes={"image": axes})  # fmt: skip


if __name__ == "__main__":
    main()
