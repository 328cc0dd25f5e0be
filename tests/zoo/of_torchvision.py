"""torchvision's networks. Its compiled operators are not needed: they are declared, which importing it asks for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.zoo.entry import Entry, Torch, images, normal, wake

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")
for _name, _arguments, _result in (
    ("qnms", "Tensor dets, Tensor scores, float iou_threshold", "Tensor"),
    (
        "deform_conv2d",
        "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
        "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask",
        "Tensor",
    ),
    ("_deform_conv2d_backward", "Tensor grad, Tensor x", "Tensor"),
    (
        "roi_align",
        "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, "
        "bool aligned",
        "Tensor",
    ),
    ("_roi_align_backward", "Tensor grad, Tensor x", "Tensor"),
    ("roi_pool", "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width", "(Tensor, Tensor)"),
    ("_roi_pool_backward", "Tensor grad, Tensor x", "Tensor"),
    (
        "ps_roi_align",
        "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio",
        "(Tensor, Tensor)",
    ),
    ("_ps_roi_align_backward", "Tensor grad, Tensor x", "Tensor"),
    (
        "ps_roi_pool",
        "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width",
        "(Tensor, Tensor)",
    ),
    ("_ps_roi_pool_backward", "Tensor grad, Tensor x", "Tensor"),
):
    if not hasattr(torch.ops.torchvision, _name):
        _DECLARED.define(f"{_name}({_arguments}) -> {_result}")

import torchvision  # noqa: E402

CLASSIFY = {
    "alexnet": 224,
    "convnext_tiny": 128,
    "densenet121": 96,
    "efficientnet_b0": 128,
    "efficientnet_b3": 96,
    "efficientnet_v2_s": 96,
    "googlenet": 128,
    "inception_v3": 160,
    "maxvit_t": 224,
    "mnasnet0_5": 128,
    "mobilenet_v2": 160,
    "mobilenet_v3_large": 128,
    "mobilenet_v3_small": 224,
    "regnet_x_400mf": 128,
    "regnet_y_400mf": 128,
    "resnet18": 128,
    "resnet50": 96,
    "resnext50_32x4d": 96,
    "shufflenet_v2_x1_0": 128,
    "squeezenet1_1": 128,
    "swin_t": 128,
    "swin_v2_t": 128,
    "vgg11_bn": 64,
    "vit_b_32": 224,
    "wide_resnet50_2": 64,
}
SEGMENT = {
    "deeplabv3_mobilenet_v3_large": 128,
    "lraspp_mobilenet_v3_large": 160,
    "fcn_resnet50": 64,
    "deeplabv3_resnet50": 64,
}
VIDEO = {
    "r3d_18": (8, 64),
    "mc3_18": (8, 64),
    "r2plus1d_18": (8, 64),
    "s3d": (16, 96),
    "swin3d_t": (8, 64),
    "mvit_v2_s": (16, 224),
}
BACKBONES = {"fasterrcnn_mobilenet_v3_large_320_fpn": 160, "retinanet_resnet50_fpn": 96, "ssdlite320_mobilenet_v3_large": 320}


def _network(name: str, size: int, trace: bool, _: Path, outputs: tuple[str, ...] = ()) -> Torch:
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    options |= {"weights_backbone": None} if name in SEGMENT else {}
    if name.startswith(("googlenet", "inception")):
        options["aux_logits"] = False
    module = torchvision.models.get_model(name, weights=None, **options)
    inputs = {"x": images(size)}
    return Torch(wake(module, inputs), inputs, outputs, trace=trace)


def _video(name: str, frames: int, size: int, _: Path) -> Torch:
    inputs = {"x": images(size, batch=frames).transpose(0, 1)[None].contiguous()}
    return Torch(wake(torchvision.models.get_model(name, weights=None), inputs), inputs, trace=name != "mvit_v2_s")


def _backbone(name: str, size: int, _: Path) -> Torch:
    """A detector's features and heads, before boxes are chosen from them."""
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None)

    def heads(module: torch.nn.Module, x: torch.Tensor) -> list:
        features = list(module.backbone(x).values())
        head = module.head if hasattr(module, "head") else module.rpn.head
        return [head(features), features[-1]]

    inputs = {"x": images(size)}
    return Torch(wake(model, inputs, heads), inputs, call=heads, trace=True)


def _raft(name: str, height: int, width: int, updates: int, _: Path) -> Torch:
    inputs = {"first": images((height, width)).clamp(-1, 1), "second": images((height, width), seed=2).clamp(-1, 1)}

    def flow(module: torch.nn.Module, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return module(first, second, num_flow_updates=updates)[-1]

    return Torch(wake(torchvision.models.get_model(name, weights=None), inputs, flow), inputs, call=flow, trace=True)


def _feature_pyramid(_: Path) -> Torch:
    from torchvision.ops import FeaturePyramidNetwork

    sizes = {"c2": (16, 32), "c3": (32, 16), "c4": (64, 8)}
    module = FeaturePyramidNetwork([16, 32, 64], 32)
    inputs = {name: normal(1, channels, size, size, seed=size) for name, (channels, size) in sizes.items()}

    def pyramid(module: torch.nn.Module, **features: torch.Tensor) -> list:
        return list(module(features).values())

    return Torch(wake(module, inputs, pyramid), inputs, call=pyramid)


ENTRIES = [
    *(
        Entry(f"torchvision.{n}", "torchvision", "classification", partial(_network, n, size, i % 8 != 0))
        for i, (n, size) in enumerate(CLASSIFY.items())
    ),
    *(
        Entry(f"torchvision.{n}", "torchvision", "segmentation", partial(_network, n, s, True, outputs=("out",)))
        for n, s in SEGMENT.items()
    ),
    *(Entry(f"torchvision.{n}", "torchvision", "video", partial(_video, n, *s)) for n, s in VIDEO.items()),
    *(Entry(f"torchvision.{n}.heads", "torchvision", "detection", partial(_backbone, n, s)) for n, s in BACKBONES.items()),
    Entry("torchvision.raft_small", "torchvision", "optical flow", partial(_raft, "raft_small", 128, 160, 6)),
    Entry("torchvision.raft_large", "torchvision", "optical flow", partial(_raft, "raft_large", 128, 128, 3)),
    Entry("torchvision.feature_pyramid", "torchvision", "detection", _feature_pyramid),
]
