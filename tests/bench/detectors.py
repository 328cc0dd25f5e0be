"""torchvision's detectors beside PyTorch: `python -m tests.bench.detectors [ssd300_vgg16 …]`, on a GPU, with torchvision.

With `--plans FOLDER` what is exported and compiled lies in a folder; `--build` makes it there and ends, and needs no GPU.

Each is exported as torch.onnx.export does it by tracing, compiled, and run on images of noise. Weights are random; norms take
the images' statistics, and the last layers are scaled, so that scores spread. Times are medians: of the plan by CUDA events
around launches of its graph, of PyTorch by events around whole calls, whose results lie on the GPU. PyTorch runs as it is, by
autocast to fp16, and with its backbone compiled. Boxes are held to PyTorch's in fp32 (`matched`): those of
a plan in fp32, and those of the plan that is timed, beside PyTorch's own by autocast. A random network keeps few of its boxes to
0.99 when it is rounded to fp16, whoever runs it. Of boxes that are found, masks are held to PyTorch's, too, at 0.99 of the union
of what is above one half, and keypoints to within a pixel.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
from torchvision.models import detection

import tccompile
from tccompile.runtime.session import Session

CLASSES, LEAST, CLEAR, CALLS = 21, 0.1, 1e-2, 30
SIZES = {"ssd300_vgg16": (300, 300), "ssdlite320_mobilenet_v3_large": (320, 320)}
"""Of images; others are 480×640."""

SPREAD = {
    "cls_logits": 2.0, "bbox_pred": 0.3, "bbox_reg": 0.3, "cls_score": 2.0, "classification_head.module_list": 2.0,
    "regression_head.module_list": 0.5, "box_predictor.bbox_pred": 0.7,
}  # fmt: skip
"""By the end of a last layer's name, the standard deviation of what it gives."""


def image(size: tuple[int, int], seed: int) -> torch.Tensor:
    """Noise of several scales."""
    generator, out = torch.Generator().manual_seed(seed), torch.zeros(1, 3, *size)
    for cells in (4, 8, 16, 32):
        noise = torch.rand(1, 3, cells, cells, generator=generator)
        out += torch.nn.functional.interpolate(noise, size, mode="bilinear") / cells**0.5
    return ((out - out.min()) / (out.max() - out.min()))[0]


def detector(name: str, size: tuple[int, int]) -> torch.nn.Module:
    """The model, whose scores spread."""
    torch.manual_seed(0)
    own: dict[str, Any] = {} if name in SIZES else {"min_size": min(size), "max_size": max(size)}
    own["box_score_thresh" if "rcnn" in name else "score_thresh"] = LEAST
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES, **own).eval()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = None
        norm.reset_running_stats()
    with torch.no_grad():
        model.backbone(model.transform([image(size, seed) for seed in range(100, 104)])[0].tensors)
    model.eval()
    heads = getattr(model, "roi_heads", None)
    later = {part: pool for part in ("mask_roi_pool", "keypoint_roi_pool") if (pool := getattr(heads, part, None)) is not None}
    for part in later:  # what is made of boxes takes long, and scales nothing
        setattr(heads, part, None)
    for end, spread in SPREAD.items():
        found = [m for n, m in model.named_modules() if _is_last(n, end) and isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
        if found:
            low = 4.0 if end == "cls_logits" and "retinanet" in name else 0.0  # a class of its own is rare
            _scale(model, found, spread, low, image(size, 7))
    for part, pool in later.items():
        setattr(heads, part, pool)
    return model


def _is_last(name: str, end: str) -> bool:
    if end.endswith("module_list"):  # of SSDlite, a layer's second part
        return end in name and re.search(r"module_list\.\d+(\.1)?$", name) is not None
    return name.endswith(end) and (end != "bbox_pred" or "box_predictor" not in name)


def _scale(model: torch.nn.Module, layers: list[torch.nn.Module], spread: float, low: float, x: torch.Tensor) -> None:
    made: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda m, given, out: made.append(out.flatten())) for m in layers]
    with torch.no_grad():
        model([x])
        for hook in hooks:
            hook.remove()
        values = torch.cat(made)
        factor = spread / float(values.std())
        for layer in layers:
            layer.weight.mul_(factor)  # type: ignore[operator]
            if layer.bias is not None:
                layer.bias.mul_(factor).sub_(float(values.mean()) * factor + low)  # type: ignore[operator, union-attr]


def exported(model: torch.nn.Module, x: torch.Tensor) -> tuple[onnx.ModelProto, list[str]]:
    """The model as the exporter by tracing writes it, and the names of its outputs."""
    with torch.no_grad():
        names = list(model([x])[0])
    file = io.BytesIO()
    how = {"opset_version": 17, "dynamo": False, "input_names": ["image"], "output_names": names}
    torch.onnx.export(model, ([x],), file, **how)
    return onnx.load_from_string(file.getvalue()), names


def matched(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> tuple[list[tuple[int, int]], int]:
    """Which of the reference's boxes are found, at 0.99 of their union, as places in both; and of how many.

    These are those clear of the least score, and of the last one's where the number of boxes is limited. Which of two of nearly
    equal scores stays, where they overlap, is for rounding to say: it need not be found.
    """
    floor = max(LEAST, float(want["scores"].min(initial=1))) + CLEAR
    clear = np.flatnonzero(want["scores"] > floor)
    found = []
    for i in clear:
        box, same = want["boxes"][i], np.flatnonzero(got["labels"] == want["labels"][i])
        others = got["boxes"][same]
        low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
        common = np.prod(np.maximum(high - low, 0), 1)
        union = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], 1) - common
        if (common >= 0.99 * union).any():
            found.append((int(same[np.argmax(common / np.maximum(union, 1e-9))]), int(i)))
    return found, len(clear)


def described(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> str:
    """How many boxes are found, and of these, how many in the same place of the list, and with the same mask or keypoints."""
    found, of = matched(got, want)
    text = f"{len(found)} of {of} ({sum(a == b for a, b in found)} in place"
    if "masks" in want:
        pairs = [(got["masks"][a] > 0.5, want["masks"][b] > 0.5) for a, b in found]
        text += f", {sum((a & b).sum() >= 0.99 * (a | b).sum() for a, b in pairs)} masks"
    if "keypoints" in want:
        gaps = [np.abs(got["keypoints"][a] - want["keypoints"][b])[:, :2].max(1) for a, b in found]
        text += f", {sum(int((gap < 1).sum()) for gap in gaps)} of {sum(len(gap) for gap in gaps)} keypoints"
    return text + ")"


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds of a call, the median."""
    for _ in range(5):
        run()
    times = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def peers(model: torch.nn.Module, x: torch.Tensor) -> dict[str, float]:
    """PyTorch's times on the GPU."""

    def half() -> Any:
        with torch.autocast("cuda", torch.float16):
            return model([x])

    with torch.inference_mode():
        times = {"fp32": timed(lambda: model([x])), "fp16": timed(half)}
        model.backbone = torch.compile(model.backbone, mode="reduce-overhead")
        times["fp16, compiled backbone"] = timed(half)
    return times


def built(name: str, folder: Path, precisions: list[str], arch: str) -> None:
    """Puts the model, the names of its outputs and its plans into the folder, where they are not there yet."""
    size = SIZES.get(name, (480, 640))
    if not (folder / f"{name}.pt").exists():
        model = detector(name, size)
        proto, names = exported(model, image(size, 1))
        onnx.save(proto, folder / f"{name}.onnx")
        torch.save((model, names), folder / f"{name}.pt")
    for precision in precisions:
        path = folder / f"{name}.{precision}.plan"
        if not path.exists():
            begin = time.perf_counter()
            plan = tccompile.compile(folder / f"{name}.onnx", archs=[arch], precision=precision)
            plan.save(path)
            print(f"{name}, {precision}: {len(plan.images)} kernels, built in {time.perf_counter() - begin:.0f} s", flush=True)


def measure(name: str, folder: Path, precisions: list[str]) -> None:
    size = SIZES.get(name, (480, 640))
    x = image(size, 1)
    model, names = torch.load(folder / f"{name}.pt", weights_only=False)
    model.cuda()
    ours = {}
    for precision in precisions:
        with Session(folder / f"{name}.{precision}.plan", "gpu") as session, torch.inference_mode():
            for seed in (1, 2, 3):
                given = image(size, seed)
                got = dict(zip(names, session.run(names, {"image": given.numpy()}), strict=True))
                want = _of(model, given)
                with torch.autocast("cuda", torch.float16):
                    half = _of(model, given)
                print(f"{name}, {precision}, image {seed}: {described(got, want)}; autocast {described(half, want)}")
            ours[precision] = median(session.bench(CALLS, {"image": x.numpy()}))
            print(f"{name}, {precision}: {ours[precision]:.3f} ms", flush=True)
    times = peers(model, x.cuda())
    best = min(times.values())
    text = ", ".join(f"{how} {ms:.2f}" for how, ms in times.items())
    faster = ", ".join(f"{how} {best / ms:.2f}" for how, ms in ours.items())
    print(f"{name}, PyTorch: {text} ms; times as fast: {faster}", flush=True)


def _of(model: torch.nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    """What PyTorch makes of an image."""
    return {key: y.cpu().numpy() for key, y in model([x.cuda()])[0].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ["ssd300_vgg16", "retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"]
    parser.add_argument("models", nargs="*", default=default, help="names in torchvision.models.detection")
    parser.add_argument("--precision", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--plans", type=Path, help="a folder for models and plans, of which those that are there are taken")
    parser.add_argument("--build", action="store_true", help="only put them there")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as made:
        folder = args.plans or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            built(name, folder, args.precision, args.arch)
            if not args.build:
                measure(name, folder, args.precision)


if __name__ == "__main__":
    main()
