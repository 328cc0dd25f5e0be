"""Draw digits out of noise: python demo.py [--arch sm_86] [--out out]

Compiles one step of the loop, runs it 20 times from noise to images, draws what comes of it into out/diffusion.png, and asks the
classifier of docs/examples/digits whether the digits are those that were asked for. Runs on the GPU if there is one, else on the
CPU engine.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

import tccompile

HERE = Path(__file__).parent
EACH, STEPS, SIZE = 8, 20, 5  # of each digit, steps of the loop, how large a pixel is drawn


def main(arch: str, out: Path) -> float:
    asked = np.arange(10).repeat(EACH)
    n = len(asked)
    shapes = {"image": (n, 1, 8, 8), "time": (n,), "then": (n,), "digit": (n,)}
    step = tccompile.Session(tccompile.compile(HERE / "diffusion.onnx", shapes, archs=[arch]))
    images = np.random.default_rng(0).standard_normal((n, 1, 8, 8), np.float32)
    times = np.linspace(1, 0, STEPS + 1, dtype=np.float32)
    cleaner, rows = np.empty_like(images), [images[::EACH].copy()]
    for time, then in pairwise(times):
        feeds = {"image": images, "time": np.full(n, time), "then": np.full(n, then), "digit": asked}
        step.run(None, feeds, {"cleaner": cleaner})
        images, cleaner = cleaner, images  # what was made is read next, and what was read is written over
        if round(float(then) * STEPS) % 4 == 0:
            rows.append(images[::EACH].copy())

    model = HERE.parent / "digits" / "digits.onnx"
    reader = tccompile.Session(tccompile.compile(model, {"image": (n, 1, 8, 8)}, archs=[arch]))
    (scores,) = reader.run(None, {"image": (images.clip(-1, 1) + 1) / 2})
    right = float((scores.argmax(1) == asked).mean())
    print(f"{right:.1%} of {n} digits are read as those that were asked for, on {step.describe()}")
    rows += [images[k::EACH] for k in range(1, 7)]  # above the first of each digit on its way from noise, below others
    tiles = np.pad(np.stack(rows)[:, :, 0], ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=1)
    picture = Image.fromarray((127.5 - 127.5 * tiles.clip(-1, 1)).astype(np.uint8).transpose(0, 2, 1, 3).reshape(-1, 100))
    out.mkdir(parents=True, exist_ok=True)
    picture.resize((100 * SIZE, picture.height * SIZE), Image.Resampling.NEAREST).save(out / "diffusion.png", optimize=True)
    print("drawn:", out / "diffusion.png")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_86", help="the generation to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    main(**vars(parser.parse_args()))
