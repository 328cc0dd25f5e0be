"""Words as a vocal tract makes them, more or less: pulses or noise through resonators whose frequencies glide.

python words.py yes OUT.wav       # hear one
"""

from __future__ import annotations

import sys
import wave

import numpy as np

RATE, LENGTH = 8000, 8000  # samples a second, and of one clip
NOISE = (0.003, 0.1)  # of a clip, as a part of full scale
SOUNDS = {
    "a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410), "u": (300, 870, 2240),
    "w": (290, 610, 2150), "y": (260, 2070, 3020), "l": (360, 1300, 2700), "r": (310, 1060, 1380), "n": (250, 1450, 2300),
    "m": (250, 1000, 2100), "s": (2900, 3500, 3800), "f": (1500, 2500, 3500), "h": (700, 1500, 2500),
}  # fmt: skip
"""What resounds in each, in Hz."""
NOISY = "sfh"
WORDS = {"yes": "yes", "no": "nou", "one": "wan", "five": "faif", "hello": "helou", "lamp": "lam", "menu": "menyu", "row": "rou"}


def voice(rng: np.random.Generator) -> dict[str, float]:
    """A speaker: the pitch, how long the throat is, how fast it speaks."""
    return {"pitch": rng.uniform(85, 240), "size": rng.uniform(0.88, 1.15), "speed": rng.uniform(0.8, 1.25)}


def _tract(source: np.ndarray, tracks: np.ndarray, widths: tuple[float, ...]) -> np.ndarray:
    """The source through a chain of resonators, whose frequencies are given for each sample."""
    out = source
    for track, width in zip(tracks, widths, strict=True):
        r = np.exp(-np.pi * width / RATE)
        a1, a2 = 2 * r * np.cos(2 * np.pi * track / RATE), -r * r
        gain, y1, y2, y = 1 - a1 - a2, 0.0, 0.0, np.empty_like(out)
        for i, (x, a, g) in enumerate(zip(out.tolist(), a1.tolist(), gain.tolist(), strict=True)):
            y1, y2 = g * x + a * y1 + a2 * y2, y1
            y[i] = y1
        out = y
    return out


def spoken(word: str, speaker: dict[str, float], rng: np.random.Generator) -> np.ndarray:
    """A word, as long as it takes, with a greatest value of 1."""
    sounds = WORDS[word]
    lengths = [int(RATE * rng.uniform(0.08, 0.13) / speaker["speed"]) for _ in sounds]
    total = sum(lengths)
    middles = np.cumsum(lengths) - np.array(lengths) / 2
    at = np.arange(total)
    tracks = np.stack([np.interp(at, middles, [SOUNDS[s][k] for s in sounds]) for k in range(3)]) * speaker["size"]
    noisy = np.interp(at, middles, [float(s in NOISY) for s in sounds])
    pitch = speaker["pitch"] * (1 + 0.12 * np.sin(np.pi * at / total) - 0.15 * at / total) * (1 + 0.01 * rng.standard_normal())
    turns = np.cumsum(pitch / RATE)
    pulses = np.diff(np.floor(turns), prepend=0.0) * 12
    source = (1 - noisy) * pulses + noisy * rng.standard_normal(total)
    sound = _tract(source, np.minimum(tracks, 3900), (70, 100, 160))
    loud = np.sqrt(np.convolve(sound**2, np.ones(240) / 240, "same"))  # of which resonators at high frequencies make too much
    sound *= np.minimum(1, np.minimum(at, total - 1 - at) / 160) / (loud + 0.3 * np.median(loud)) ** 0.9
    return sound / np.abs(sound).max()


def clip(word: str, rng: np.random.Generator, noise: tuple[float, float] = NOISE) -> np.ndarray:
    """A second of somebody who says a word somewhere in it, (LENGTH,) float32: near or far, in more or less noise."""
    sound = spoken(word, voice(rng), rng)[:LENGTH]
    out = rng.standard_normal(LENGTH) * rng.uniform(*noise)
    start = rng.integers(0, LENGTH - len(sound) + 1)
    out[start : start + len(sound)] += sound * rng.uniform(0.3, 0.9)
    return out.astype(np.float32)


if __name__ == "__main__":
    made = clip(sys.argv[1], np.random.default_rng())
    with wave.open(sys.argv[2], "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((made.clip(-1, 1) * 32767).astype("<i2").tobytes())
