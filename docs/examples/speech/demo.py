"""Tell which word is said: python demo.py [--arch sm_86] [--out out]

Compiles the recognizer, features included, hears 96 clips of a second, and draws eight of them into out/speech.png: what it hears
(32 bands, from low to high), and below which word it takes it for after each 10 ms. Runs on the GPU if there is one, else on the
CPU engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from words import LENGTH, WORDS, clip

import tccompile

HERE = Path(__file__).parent
NAMES, CLIPS = [*WORDS], 96


def column(features: np.ndarray, scores: np.ndarray, label: int) -> Image.Image:
    """A clip's features, (frames, 32), the probabilities that its scores are, (frames, 8), and the word that is said in red."""
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    sound = (features - features.min()) / np.ptp(features)
    image = Image.new("RGB", (206, 236), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
    for rows, high, y in ((sound.T[::-1], 128, 0), (shares.T, 96, 134)):
        image.paste(Image.fromarray((255 - 255 * rows).astype(np.uint8)).resize((158, high), Image.Resampling.NEAREST), (40, y))
    for n, name in enumerate(NAMES):
        draw.text((2, 132 + 12 * n), name, "#d00" if n == label else "#888", font)
    return image


def main(arch: str, out: Path) -> float:
    plan = tccompile.compile(HERE / "words.onnx", {"sound": (1, LENGTH)}, archs=[arch])
    session = tccompile.Session(plan)
    rng = np.random.default_rng(1)
    labels = [n % len(NAMES) for n in range(CLIPS)]
    heard = [session.run(None, {"sound": clip(NAMES[label], rng)[None]}) for label in labels]
    words = [int(scores[0, -10:].mean(0).argmax()) for scores, _ in heard]
    right = float(np.mean(np.equal(words, labels)))
    print(f"{right:.1%} of {len(words)} words are right, on {session.describe()}")
    picture = Image.new("RGB", (4 * 206, 2 * 236), "white")
    for n in range(8):
        (scores,), (features,) = heard[n]
        picture.paste(column(features, scores, labels[n]), (n % 4 * 206, n // 4 * 236))
    out.mkdir(parents=True, exist_ok=True)
    picture.save(out / "speech.png", optimize=True)
    print("drawn:", out / "speech.png")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_86", help="the generation to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    main(**vars(parser.parse_args()))
