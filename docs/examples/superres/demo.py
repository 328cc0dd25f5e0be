"""Enlarge a photograph three times, compare with bicubic, draw both: python demo.py [--arch sm_86,sm_90a] [--out out]

Runs on the GPU if there is one, else on the CPU engine. The photograph (a cat, by Stéfan van der Walt, CC0, as scikit-image
ships it) was held out when the network was trained: see train.py.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

HERE, SCALE = Path(__file__).parent, 3


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
    parts = [np.repeat(np.repeat(image[top : top + size, left : left + size], 2, 0), 2, 1) for image in images]
    apart = [np.pad(part, ((0, 0), (0, 8), (0, 0)), constant_values=255) for part in parts]
    return Image.fromarray(np.concatenate(apart, 1)[:, :-8])


def main(arch: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    truth = np.asarray(Image.open(HERE / "chelsea.png").convert("RGB"))
    height, width = (n // SCALE for n in truth.shape[:2])
    small = Image.fromarray(truth).resize((width, height), Image.Resampling.BICUBIC)
    np.save(out / "input.npy", np.ascontiguousarray((np.asarray(small, np.float32) / 255).transpose(2, 0, 1)[None]))

    model, plan = str(HERE / "superres_x3.onnx"), str(out / "superres.plan")
    run("tccompile", model, "-o", plan, "--shape", f"image=1x3x{height}x{width}", "--arch", arch)
    run("tcrun", plan, str(out / "input.npy"), "-o", str(out / "output.npy"), "--bench", "--iterations", "10")

    ours = (np.load(out / "output.npy")[0].transpose(1, 2, 0).clip(0, 1) * 255).round().astype(np.uint8)
    ways = (Image.Resampling.NEAREST, Image.Resampling.BICUBIC)
    nearest, bicubic = (np.asarray(small.resize(truth.shape[1::-1], way)) for way in ways)
    side_by_side([nearest, bicubic, ours], 40, 120, 150).save(out / "demo.png")  # the input, bicubic, ours
    print(f"PSNR: ours {psnr(ours, truth):.2f} dB, bicubic {psnr(bicubic, truth):.2f} dB; drawn: {out / 'demo.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_75,sm_86,sm_89,sm_90a", help="generations to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    main(**vars(parser.parse_args()))
