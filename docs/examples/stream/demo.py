"""Put a stream's background out of focus: python demo.py [--arch sm_86] [--out out]

Compiles the model for frames of one size, runs two seconds of frames through it into the same arrays, and draws some of them into
out/stream.png: as the camera gives them, where the person is, and as they are shown. Runs on the GPU if there is one, else on the
CPU engine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image
from scenes import HEIGHT, WIDTH, stream

import tccompile

HERE = Path(__file__).parent
SEED, DRAWN = 9, 10  # whom we see, and how many frames apart those are that are drawn


def main(arch: str, out: Path) -> float:
    plan = tccompile.compile(HERE / "stream.onnx", {"frame": (1, HEIGHT, WIDTH, 3)}, archs=[arch])
    session = tccompile.Session(plan)
    shown, person = np.empty((1, HEIGHT, WIDTH, 3), np.uint8), np.empty((1, HEIGHT, WIDTH), np.float32)
    columns, overlaps, took = [], [], 0.0
    for number, (frame, truth) in enumerate(stream(SEED)):
        start = time.perf_counter()
        session.run(None, {"frame": frame[None]}, {"shown": shown, "person": person})  # no new arrays, frame after frame
        took += time.perf_counter() - start
        found = person[0] > 0.5
        overlaps.append((found & (truth > 0)).sum() / (found | (truth > 0)).sum())
        if number % DRAWN == 0:
            mask = np.repeat((255 * person[0, ..., None]).astype(np.uint8), 3, 2)
            columns.append(np.concatenate([frame, mask, shown[0]]))
    iou = float(np.mean(overlaps))
    each = 1000 * took / len(overlaps)
    print(f"intersection over union {iou:.3f} in {len(overlaps)} frames, {each:.1f} ms a frame, on {session.describe()}")
    picture = Image.fromarray(np.concatenate(columns, axis=1))
    out.mkdir(parents=True, exist_ok=True)
    picture.quantize(128).save(out / "stream.png", optimize=True)
    print("drawn:", out / "stream.png")
    return iou


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_86", help="the generation to build for")
    parser.add_argument("--out", type=Path, default=Path("out"))
    main(**vars(parser.parse_args()))
