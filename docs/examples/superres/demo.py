"""Enlarge a photograph three times with a plan: compile, run, compare with bicubic, and write a picture of all three.

    python demo.py [--arch sm_86,sm_90a] [--out out]

Runs on the GPU if there is one, else on the CPU engine. The photograph (a cat, by Stéfan van der Walt, CC0, as scikit-image
ships it) was held out when the network was trained: see train.py.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
SCALE = 3


def run(command: str, *args: str) -> None:
    """Run one of our commands as a user would, and show it."""
    print("$", command, *args, flush=True)
    subprocess.run([Path(sys.executable).parent / command, *args], check=True)


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """In dB, over all channels of 8-bit images, three pixels at the borders left out."""
    a, b = (v[SCALE:-SCALE, SCALE:-SCALE].astype(np.float64) for v in (image, truth))
    return 10 * math.log10(255**2 / np.mean((a - b) ** 2))


def side_by_side(images: list[np.ndarray], top: int, left: int, size: int) -> Image.Image:
    """The same square of each image, enlarged twice so that a difference shows, with white between."""
    gap = 8
    picture = Image.new("RGB", (len(images) * (2 * size + gap) - gap, 2 * size), "white")
    for k, image in enumerate(images):
        part = Image.fromarray(image[top : top + size, left : left + size])
        picture.paste(part.resize((2 * size, 2 * size), Image.Resampling.NEAREST), (k * (2 * size + gap), 0))
    return picture


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_75,sm_86,sm_89,sm_90a", help="generations to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    truth = np.asarray(Image.open(HERE / "chelsea.png").convert("RGB"))
    height, width = (n // SCALE for n in truth.shape[:2])
    small = Image.fromarray(truth).resize((width, height), Image.Resampling.BICUBIC)
    image = (np.asarray(small, np.float32) / 255).transpose(2, 0, 1)[None]
    np.save(args.out / "input.npy", np.ascontiguousarray(image))

    model, plan = str(HERE / "superres_x3.onnx"), str(args.out / "superres.plan")
    run("tccompile", model, "-o", plan, "--shape", f"image=1x3x{height}x{width}", "--arch", args.arch)
    run("tcrun", plan, str(args.out / "input.npy"), "-o", str(args.out / "output.npy"), "--bench", "--iterations", "10")

    output = np.load(args.out / "output.npy")[0].transpose(1, 2, 0)
    ours = (output.clip(0, 1) * 255).round().astype(np.uint8)
    bicubic = np.asarray(small.resize((width * SCALE, height * SCALE), Image.Resampling.BICUBIC))
    nearest = np.asarray(small.resize((width * SCALE, height * SCALE), Image.Resampling.NEAREST))
    print(f"PSNR against the photograph: ours {psnr(ours, truth):.2f} dB, bicubic {psnr(bicubic, truth):.2f} dB")
    side_by_side([nearest, bicubic, ours], 40, 120, 150).save(args.out / "demo.png")
    print(f"{args.out / 'demo.png'}: input, bicubic, ours")


if __name__ == "__main__":
    main()
