"""Somebody before a camera in a room: frames as a webcam gives them, drawn with NumPy, and where the person is in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

HEIGHT, WIDTH = 96, 128
Y, X = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)


def _cloth(rng: np.random.Generator, cells: int, strength: float) -> np.ndarray:
    """(HEIGHT, WIDTH, 3) of 0…1: a colour, with patches of others that go over into each other, and sometimes stripes."""
    coarse = rng.uniform(0, 1, 3) + strength * rng.standard_normal((cells + 1, cells + 1, 3))
    coarse = 0.5 * coarse + 0.5 * coarse.mean(-1, keepdims=True)
    y, x = Y * cells / HEIGHT, X * cells / WIDTH
    i, j = y.astype(int), x.astype(int)
    v, u = (y - i)[..., None], (x - j)[..., None]
    out = (1 - v) * ((1 - u) * coarse[i, j] + u * coarse[i, j + 1]) + v * ((1 - u) * coarse[i + 1, j] + u * coarse[i + 1, j + 1])
    if rng.random() < 0.4:
        turn, far = rng.uniform(0, np.pi), rng.uniform(3, 14)
        out += 0.15 * np.sign(np.sin((X * np.cos(turn) + Y * np.sin(turn)) * 2 * np.pi / far))[..., None] * rng.uniform(0, 1, 3)
    return out


def _oval(x: float, y: float, wide: float, high: float) -> np.ndarray:
    """Below 1 inside of an ellipse."""
    return ((X - x) / wide) ** 2 + ((Y - y) / high) ** 2


class Scene:
    """A room and a person, each with colours of its own."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.room = _cloth(rng, 4, 0.25)
        for _ in range(rng.integers(3, 9)):  # pictures, shelves, lamps
            x, y, wide, high = rng.uniform(0, WIDTH), rng.uniform(0, HEIGHT), *rng.uniform(4, 26, 2)
            round_, box = _oval(x, y, wide, high) < 1, (abs(X - x) < wide) & (abs(Y - y) < high)
            self.room[box if rng.random() < 0.7 else round_] = _cloth(rng, 3, 0.1)[0, 0] + rng.normal(0, 0.05, 3)
        tone, red = rng.uniform(0.25, 0.95), rng.uniform(0.7, 0.9)
        self.skin = np.array([tone, tone * red, tone * red * rng.uniform(0.7, 0.95)])
        self.hair, self.shirt = rng.uniform(0, 0.6) * rng.uniform(0.5, 1, 3), _cloth(rng, 5, 0.12)
        self.size, self.locks, self.light = rng.uniform(0.8, 1.25), rng.uniform(1.05, 1.4), rng.uniform(0.6, 1.15)
        self.middle, self.sway, self.phase = rng.uniform(0.3, 0.7) * WIDTH, rng.uniform(4, 22), rng.uniform(0, 6)

    def frame(self, time: float) -> tuple[np.ndarray, np.ndarray]:
        """The frame (HEIGHT, WIDTH, 3) uint8 at a time in seconds, and where the person is, (HEIGHT, WIDTH) of 0 and 1."""
        s = self.size
        x = self.middle + self.sway * np.sin(0.9 * time + self.phase)
        y, lean = 40 + 3 * np.sin(1.7 * time + self.phase), 5 * np.sin(1.3 * time)
        head = _oval(x + lean, y, 13 * s, 17 * s) < 1
        hair = (_oval(x + lean, y - 4 * s, 14 * s * self.locks, 17 * s * self.locks) < 1) & (y + (self.locks - 1) * 60 * s > Y)
        neck = (abs(X - x - lean / 2) < 6 * s) & (y < Y) & (y + 28 * s > Y)
        body = (_oval(x, y + 58 * s, 34 * s, 36 * s) < 1) | ((abs(X - x) < 34 * s) & (y + 58 * s < Y))
        picture = self.room.copy()
        picture[hair], picture[neck] = self.hair, self.skin * 0.85
        picture[body] = self.shirt[body]
        picture[head & ~(hair & (y - 7 * s > Y))] = self.skin
        for side in (-5, 5):
            picture[_oval(x + lean + side * s, y - 1, 1.8 * s, 1.4 * s) < 1] = 0.1
        picture[_oval(x + lean, y + 8 * s, 4 * s, 1.2 * s) < 1] = self.skin * 0.6
        shade = self.light * (1 + 0.25 * (X / WIDTH - 0.5))[..., None]
        picture = picture * shade + 0.02 * self.rng.standard_normal(picture.shape)
        return (picture.clip(0, 1) * 255).astype(np.uint8), (head | hair | neck | body).astype(np.uint8)


def stream(seed: int, seconds: float = 2, rate: int = 25) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The frames of some seconds, and the truth about each."""
    scene = Scene(seed)
    for number in range(round(seconds * rate)):
        yield scene.frame(number / rate)
