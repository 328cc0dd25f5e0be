"""timm's networks, by their smallest names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import timm

from tests.zoo.entry import Entry, Torch, images, wake

NETWORKS = {
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 96, "num_heads": 3},
    "cait_xxs24_224": {"depth": 3},
    "coat_tiny": {},
    "coat_lite_tiny": {},
    "convit_tiny": {"depth": 4},
    "convmixer_768_32": {"depth": 4, "dim": 96},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "crossvit_tiny_240": {},
    "cspresnet50": {"size": 96},
    "darknet53": {"size": 96},
    "davit_tiny": {"size": 224},
    "deit_tiny_distilled_patch16_224": {"depth": 3},
    "dla34": {"size": 96},
    "dpn48b": {"size": 96},
    "edgenext_xx_small": {"size": 128},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "efficientnet_lite0": {"size": 128},
    "efficientvit_b0": {"size": 128},
    "efficientvit_m0": {},
    "eva02_tiny_patch14_224": {"depth": 3},
    "fasternet_t0": {"size": 128},
    "fastvit_t8": {"size": 128},
    "focalnet_tiny_srf": {"size": 96},
    "gcvit_xxtiny": {},
    "ghostnet_100": {"size": 128},
    "ghostnetv2_100": {"size": 128},
    "hgnetv2_b0": {"size": 96},
    "hiera_tiny_224": {},
    "hrnet_w18_small": {"size": 96},
    "inception_next_atto": {"size": 128},
    "lcnet_050": {"size": 128},
    "levit_128s": {},
    "mambaout_femto": {"size": 128},
    "coatnet_nano_rw_224": {},
    "maxvit_rmlp_pico_rw_256": {},
    "poolformer_s12": {"size": 96},
    "caformer_s18": {"size": 96},
    "mixer_s32_224": {"depth": 3},
    "resmlp_12_224": {"depth": 3},
    "gmlp_ti16_224": {"depth": 3},
    "mobilenetv4_conv_small": {"size": 128},
    "mobilenetv4_hybrid_medium": {"size": 128},
    "mobileone_s0": {"size": 96},
    "mobilevit_xxs": {"size": 128},
    "mobilevitv2_050": {"size": 128},
    "mvitv2_tiny": {},
    "nest_tiny_jx": {},
    "nextvit_small": {"size": 128},
    "nfnet_l0": {"size": 96},
    "dm_nfnet_f0": {"size": 64},
    "pit_ti_224": {},
    "pvt_v2_b0": {"size": 128},
    "regnetz_b16": {"size": 96},
    "repvgg_a0": {"size": 96},
    "repvit_m0_9": {"size": 128},
    "res2net50_26w_4s": {"size": 96},
    "resnest14d": {"size": 96},
    "resnetv2_50": {"size": 96},
    "resnet18d": {"size": 96},
    "resnetaa50d": {"size": 96},
    "rexnet_100": {"size": 128},
    "seresnext26d_32x4d": {"size": 96},
    "ecaresnet26t": {"size": 96},
    "selecsls42b": {"size": 96},
    "sequencer2d_s": {"layers": (1, 1, 1, 1)},
    "shvit_s1": {"size": 128},
    "skresnet18": {"size": 96},
    "starnet_s1": {"size": 128},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 2, 1)},
    "swinv2_tiny_window8_256": {"depths": (1, 1, 2, 1)},
    "swinv2_cr_tiny_ns_224": {"depths": (1, 1, 2, 1)},
    "tiny_vit_5m_224": {},
    "tnt_s_patch16_224": {"depth": 3},
    "tresnet_m": {"size": 96},
    "twins_svt_small": {"size": 224},
    "twins_pcpvt_small": {"size": 224},
    "vit_tiny_patch16_224": {"depth": 3},
    "vit_tiny_r_s16_p8_224": {"depth": 3},
    "vit_relpos_small_patch16_224": {"depth": 3},
    "vit_small_patch14_dinov2": {"depth": 2, "img_size": 224},
    "vit_small_patch16_dinov3": {"depth": 2, "size": 160},
    "samvit_base_patch16": {"depth": 3, "embed_dim": 96, "num_heads": 3, "global_attn_indexes": (2,), "img_size": 256},
    "visformer_tiny": {},
    "vovnet39a": {"size": 96},
    "volo_d1_224": {"layers": (1, 1, 2, 1)},
    "xception41": {"size": 96},
    "xcit_nano_12_p16_224": {},
    "halonet26t": {"size": 128},
    "botnet26t_256": {},
    "lambda_resnet26t": {"size": 128},
    "bat_resnext26ts": {"size": 256},
    "gcresnet33ts": {"size": 96},
    "eca_halonext26ts": {"size": 128},
    "lamhalobotnet50ts_256": {},
    "vitamin_small_224": {},
    "rdnet_tiny": {"size": 96},
    "tf_efficientnet_b0": {"size": 128},
    "mixnet_s": {"size": 128},
    "spnasnet_100": {"size": 128},
    "hardcorenas_a": {"size": 128},
    "tinynet_e": {},
}


def _network(name: str, options: dict, trace: bool, _: Path) -> Torch:
    options = dict(options)
    size = options.pop("size", None)
    if size is not None and name.startswith(("davit", "twins", "swin", "focalnet")):
        options["img_size"] = size
        if name.startswith(("davit", "focalnet", "twins")):
            options.pop("img_size")
    module = timm.create_model(name, pretrained=False, **options)
    size = size or options.get("img_size") or module.default_cfg["input_size"][-1]
    if hasattr(module, "set_fast_attn"):
        module.set_fast_attn(True)
    inputs = {"x": images(size)}
    return Torch(wake(module, inputs), inputs, trace=trace)


ENTRIES = [
    Entry(f"timm.{name}", "timm", "classification", partial(_network, name, options, i % 10 != 0))
    for i, (name, options) in enumerate(NETWORKS.items())
]
