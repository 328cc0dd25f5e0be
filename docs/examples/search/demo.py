"""Find sentences by their meaning: python demo.py [--arch sm_86] [--out out]

Compiles the encoder for 1 to 256 sentences at once, asks a library of 256 sentences 128 questions, and draws some of the answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import tccompile

HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "sentences.json").read_text(encoding="utf-8"))
NUMBERS = {word: number for number, word in enumerate(TEXTS["words"])}


def ids(sentences: list[str]) -> np.ndarray:
    """The numbers of their words, (N, 16): 0 where a sentence has ended, 1 for a word that is not known."""
    out = np.zeros((len(sentences), TEXTS["length"]), np.int64)
    for row, sentence in zip(out, sentences, strict=True):
        for place, word in enumerate(sentence.lower().split()[: len(row)]):
            row[place] = NUMBERS.get(word, 1)
    return out


def picture(questions: list[str], scores: np.ndarray, right: list[int]) -> Image.Image:
    """Each question and the three sentences that are nearest to it, with bars as long as they are near, green if it is meant."""
    image = Image.new("RGB", (720, 84 * len(questions)), "white")
    draw, (large, small) = ImageDraw.Draw(image), map(ImageFont.load_default, (16, 14))
    for n, (question, row, meant) in enumerate(zip(questions, scores, right, strict=True)):
        draw.text((8, 84 * n + 6), question, "black", large)
        for k, found in enumerate(np.argsort(-row)[:3]):
            y, colour = 84 * n + 28 + 17 * k, "#3a3" if found == meant else "#aaa"
            draw.rectangle((24, y + 3, 24 + 200 * max(0.0, row[found]), y + 13), colour)
            draw.text((232, y), f"{row[found]:.2f}  {TEXTS['library'][found]}", "#444", small)
    return image


def main(arch: str, out: Path) -> float:
    session = tccompile.Session(tccompile.compile(HERE / "encoder.onnx", archs=[arch], ranges={"batch": (1, 256)}))
    (library,) = session.run(None, {"ids": ids(TEXTS["library"])})  # once; then a question at a time
    vectors = [session.run(None, {"ids": ids([question])})[0][0] for question in TEXTS["questions"]]
    scores = np.stack(vectors) @ library.T
    found = float(np.mean(scores.argmax(1) == TEXTS["right"]))
    print(f"{found:.1%} of {len(scores)} questions find their sentence, on {session.describe()}; drawn: {out / 'search.png'}")
    out.mkdir(parents=True, exist_ok=True)
    picture(TEXTS["questions"][:6], scores[:6], TEXTS["right"][:6]).save(out / "search.png", optimize=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_86", help="the generation to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    main(**vars(parser.parse_args()))
