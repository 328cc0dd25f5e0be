"""transformers' models from small configurations. Positions are late in the context where a model takes them."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.zoo.entry import Entry, Torch, audio, images, mask, normal, tokens, wake

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KV = {"num_key_value_heads": 2, "max_position_embeddings": 32768}

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": KV,
    "Llama3": {
        **KV,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "LlamaYarn": {
        **KV,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "Qwen2": KV,
    "Qwen3": {**KV, "head_dim": 32},
    "Qwen3Moe": {**KV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
    "Qwen2Moe": {
        **KV,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "Gemma": {**KV, "head_dim": 32},
    "Gemma2": {**KV, "head_dim": 32, "query_pre_attn_scalar": 32},
    "Gemma3Text": {**KV, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "Mistral": KV,
    "Mixtral": {**KV, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi": KV,
    "Phi3": {**KV, "original_max_position_embeddings": 32768, "pad_token_id": 0},
    "StableLm": KV,
    "Olmo": KV,
    "Olmo2": KV,
    "Olmoe": {**KV, "num_experts": 4, "num_experts_per_tok": 2},
    "Granite": KV,
    "Starcoder2": KV,
    "Cohere": KV,
    "Cohere2": KV,
    "Glm": {**KV, "head_dim": 32},
    "Glm4": {**KV, "head_dim": 32},
    "Nemotron": {**KV, "head_dim": 32},
    "Helium": {**KV, "head_dim": 32},
    "SmolLM3": KV,
    "Persimmon": KV,
    "GPTNeoX": KV,
    "GPTNeoXJapanese": {},
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "max_position_embeddings": 32768},
    "GPTJ": {"n_positions": 32768, "n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "CodeGen": {"n_positions": 2048, "n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "GPT2": {"n_positions": 1024, "n_embd": 128, "n_layer": 2, "n_head": 4},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "GPTBigCode": {"n_positions": 1024, "n_embd": 128, "n_layer": 2, "n_head": 4},
    "OPT": {"ffn_dim": 256, "word_embed_proj_dim": 128, "max_position_embeddings": 2048},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "XGLM": {"d_model": 128, "num_layers": 2, "attention_heads": 4, "ffn_dim": 256},
    "BioGpt": {},
    "DeepseekV3": {
        **KV,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "Mamba": {"state_size": 8},
    "Ministral": {**KV, "head_dim": 32},
    "Exaone4": {**KV},
    "Arcee": KV,
    "Ernie4_5": {**KV, "head_dim": 32},
    "HunYuanDenseV1": {**KV, "head_dim": 32},
    "GptOss": {**KV, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Apertus": KV,
    "DiffLlama": KV,
    "Lfm2": {**KV, "layer_types": ["conv", "full_attention"]},
    "BitNet": KV,
    "Bamba": KV,
}
CLASS = {"Llama3": "Llama", "LlamaYarn": "Llama", "GPT2": "GPT2LMHead", "Gemma3Text": "Gemma3", "Gemma3": "Gemma3"}
CONFIG = {"Llama3": "Llama", "LlamaYarn": "Llama"}
LATE = {"GPT2": 1000, "GPTBigCode": 1000, "CodeGen": 2000}

ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
    "Albert": {"embedding_size": 64},
    "Electra": {"embedding_size": 64},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 64},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 32,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "MPNet": {},
    "XLMRoberta": {},
    "Camembert": {},
    "ConvBert": {"embedding_size": 64},
    "FNet": {},
    "SqueezeBert": {"embedding_size": 128},
    "MobileBert": {"embedding_size": 64, "intra_bottleneck_size": 64},
    "ModernBert": {
        "max_position_embeddings": 8192,
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "RoFormer": {"embedding_size": 128},
    "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "XLNet": {"d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 256},
    "BigBird": {"attention_type": "original_full"},
    "Nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 32},
    "Funnel": {"block_sizes": [1, 1, 1], "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 256, "num_decoder_layers": 1},
    "LayoutLM": {},
    "Ernie": {},
    "MegatronBert": {},
    "RemBert": {},
    "Splinter": {},
    "IBert": {"quant_mode": False},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4},
    "MT5": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4},
    "Bart": {},
    "Marian": {},
    "Pegasus": {},
    "MBart": {},
    "M2M100": {},
    "LongT5": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4, "local_radius": 7},
    "Blenderbot": {},
}
HALVES = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "init_std": 0.08,
    "decoder_start_token_id": 2,
}

IMAGE = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 192,
    "image_size": 64,
    "patch_size": 8,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}
VISION: dict[str, dict[str, Any]] = {
    "ViT": {},
    "DeiT": {},
    "Beit": {"use_relative_position_bias": True, "use_absolute_position_embeddings": False},
    "Data2VecVision": {"use_relative_position_bias": True},
    "ViTMSN": {},
    "Dinov2": {"layerscale_value": 0.3},
    "Dinov2WithRegisters": {"layerscale_value": 0.3},
    "DINOv3ViT": {"layerscale_value": 0.3},
    "IJepa": {},
    "Swin": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "Swinv2": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "DonutSwin": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "ConvNext": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1], "size": 96, "layer_scale_init_value": 0.3},
    "ConvNextV2": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1], "size": 96},
    "ResNet": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1], "embedding_size": 16},
    "RegNet": {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1], "embedding_size": 16, "groups_width": 8},
    "MobileNetV1": {"size": 96},
    "MobileNetV2": {"size": 96},
    "Bit": {"hidden_sizes": [32, 64], "depths": [1, 1], "embedding_size": 32, "num_groups": 8},
    "PoolFormer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "size": 96},
    "Segformer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "size": 96, "num_attention_heads": [1, 2, 4, 8]},
    "Pvt": {
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "patch_sizes": [4, 2, 2, 2],
        "num_attention_heads": [1, 2, 4, 8],
    },
    "PvtV2": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 8]},
    "Cvt": {"embed_dim": [16, 32, 48], "depth": [1, 1, 1], "num_heads": [1, 2, 3]},
    "FocalNet": {"embed_dim": 32, "depths": [1, 1, 1, 1], "patch_size": 4},
    "Levit": {
        "image_size": 224,
        "size": 224,
        "hidden_sizes": [64, 96, 128],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [16, 16, 16],
        "patch_size": 16,
    },
    "MobileViT": {
        "image_size": 128,
        "size": 128,
        "hidden_sizes": [48, 64, 80],
        "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 320],
        "num_attention_heads": 4,
    },
    "MobileViTV2": {"image_size": 128, "size": 128, "width_multiplier": 0.5},
    "SwiftFormer": {"size": 96, "embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "layer_scale_init_value": 0.3},
    "EfficientNet": {"image_size": 96, "size": 96, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "Hiera": {"embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "image_size": [64, 64], "patch_size": [7, 7]},
    "TextNet": {"size": 96},
    "Siglip": {"vision": True},
    "CLIPVision": {"vision": True},
    "VitDet": {"window_size": 4, "use_relative_position_embeddings": True},
}


def _config(name: str, given: dict[str, Any], **more: Any) -> Any:
    """A configuration of what is given, and of those small extents that it knows, as its authors left the rest."""
    kind = getattr(transformers, f"{name}Config")
    known = (
        set(inspect.signature(kind.__init__).parameters)
        | set(getattr(kind, "attribute_map", {}))
        | set(getattr(kind, "__annotations__", {}))
    )
    probe = kind()
    small = {k: v for k, v in more.items() if k in known or hasattr(probe, k) or k == "attn_implementation"}
    mapped = getattr(kind, "attribute_map", {})
    small = {k: v for k, v in small.items() if mapped.get(k, k) not in given or mapped.get(k) is None}
    return kind(**{**small, **given})


def _decoder(name: str, given: dict[str, Any], _: Path) -> Torch:
    """Logits of 16 tokens at the end of the context."""
    config = _config(CONFIG.get(name, name), given, **SMALL)
    kind = CLASS.get(name, name)
    found = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}Model")
    module = found._from_config(config) if hasattr(found, "_from_config") else found(config)
    inputs = {"input_ids": tokens(1000, 16)}
    if "position_ids" in inspect.signature(module.forward).parameters:
        late = LATE.get(name, getattr(config, "max_position_embeddings", 2048)) - 24
        inputs["position_ids"] = torch.arange(late, late + 16)[None]
    if name in ("Bloom", "Mpt", "OPT", "XGLM", "BioGpt", "Falcon"):
        inputs["attention_mask"] = torch.ones(1, 16, dtype=torch.int64)
    return Torch(
        wake(module, inputs, lambda m, **a: m(**a, use_cache=False)), inputs, ("logits",), trace=True, fixed={"use_cache": False}
    )


def _decode_step(name: str, position: int, _: Path) -> Torch:
    """One token behind a cache of keys and values."""
    config = _config(CONFIG.get(name, name), DECODERS[name], **SMALL)
    kind = CLASS.get(name, name)
    module = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inputs = {"input_ids": tokens(1000, 1), "position_ids": torch.tensor([[position]])}
    inputs["attention_mask"] = torch.ones(1, 33, dtype=torch.int64)
    for i in range(config.num_hidden_layers):
        inputs[f"past_{i}_key"] = normal(1, heads, 32, dim, seed=2 * i)
        inputs[f"past_{i}_value"] = normal(1, heads, 32, dim, seed=2 * i + 1)

    def step(module: torch.nn.Module, input_ids: Any, position_ids: Any, attention_mask: Any, **past: Any) -> list:
        cache = transformers.DynamicCache()
        for i in range(config.num_hidden_layers):
            cache.update(past[f"past_{i}_key"], past[f"past_{i}_value"], i)
        out = module(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True
        )
        return [out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))]

    return Torch(wake(module, inputs, step), inputs, call=step, trace=True)


def _encoder(name: str, given: dict[str, Any], _: Path) -> Torch:
    module = getattr(transformers, f"{name}Model")(_config(name, given, **SMALL, max_position_embeddings=512))
    inputs = {"input_ids": tokens(997, 32, batch=2) + 3}
    if "attention_mask" in inspect.signature(module.forward).parameters:
        inputs["attention_mask"] = mask(2, 32, 20)
    if "token_type_ids" in inspect.signature(module.forward).parameters and getattr(module.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(32) > 12).long()[None].repeat(2, 1)
    return Torch(wake(module, inputs, lambda m, **a: m(**a)), inputs, ("last_hidden_state",), trace=True)


def _seq2seq(name: str, given: dict[str, Any], _: Path) -> Torch:
    small = {**SMALL, **HALVES}
    for gone in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        small.pop(gone)
    config = _config(name, given, **small)
    found = getattr(transformers, f"{name}ForConditionalGeneration", None) or transformers.MarianMTModel
    module = found(config)
    inputs = {
        "input_ids": tokens(997, 24) + 3,
        "attention_mask": mask(1, 24, 20),
        "decoder_input_ids": tokens(997, 12, seed=2) + 3,
    }
    return Torch(
        wake(module, inputs, lambda m, **a: m(**a, use_cache=False)), inputs, ("logits",), trace=True, fixed={"use_cache": False}
    )


def _vision(name: str, given: dict[str, Any], trace: bool, _: Path) -> Torch:
    given = dict(given)
    size, vision = given.pop("size", 64), given.pop("vision", False)
    config = _config(f"{name}Vision" if vision and not name.endswith("Vision") else name, given, **IMAGE)
    found = getattr(
        transformers, f"{name}VisionModel" if vision and not name.endswith("Vision") else f"{name}Model", None
    ) or getattr(transformers, f"{name}Backbone")
    module = found(config)
    inputs = {"pixel_values": images(size)}
    outputs = ("feature_maps",) if found.__name__.endswith("Backbone") else ("last_hidden_state",)
    return Torch(wake(module, inputs), inputs, outputs, trace=trace)


def _heads(kind: str, config: Any, inputs: dict[str, torch.Tensor], outputs: tuple[str, ...], trace: bool = True) -> Torch:
    module = getattr(transformers, kind)(config)
    return Torch(wake(module, inputs, lambda m, **a: m(**a)), inputs, outputs, trace=trace)


def _dpt(_: Path) -> Torch:
    config = transformers.DPTConfig(
        **{**IMAGE, "num_hidden_layers": 4, "patch_size": 16},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 32, 48, 64],
        fusion_hidden_size=32,
        readout_type="project",
    )
    return _heads("DPTForDepthEstimation", config, {"pixel_values": images(64)}, ("predicted_depth",))


def _depth_anything(size: int, _: Path) -> Torch:
    backbone = transformers.Dinov2Config(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=size,
        patch_size=14,
        layerscale_value=0.5,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        apply_layernorm=True,
        reshape_hidden_states=False,
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=96,
        neck_hidden_sizes=[16, 32, 48, 64],
        fusion_hidden_size=32,
        head_hidden_size=16,
    )
    spec = _heads("DepthAnythingForDepthEstimation", config, {"pixel_values": images(size)}, ("predicted_depth",))
    spec.module.head.conv3.bias.fill_(2.0)  # the depth is positive where a ReLU ends the network
    return spec


def _glpn(_: Path) -> Torch:
    config = transformers.GLPNConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32, num_attention_heads=[1, 2, 4, 8]
    )
    return _heads("GLPNForDepthEstimation", config, {"pixel_values": images(96)}, ("predicted_depth",))


def _segformer(_: Path) -> Torch:
    config = transformers.SegformerConfig(
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=64,
        num_attention_heads=[1, 2, 4, 8],
        num_labels=21,
    )
    return _heads("SegformerForSemanticSegmentation", config, {"pixel_values": images(128)}, ("logits",))


def _upernet(_: Path) -> Torch:
    backbone = transformers.ConvNextConfig(
        hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 2, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=64, auxiliary_in_channels=64, auxiliary_channels=32, num_labels=21
    )
    return _heads("UperNetForSemanticSegmentation", config, {"pixel_values": images(128)}, ("logits",))


def _yolos(_: Path) -> Torch:
    config = transformers.YolosConfig(**{**IMAGE, "image_size": [96, 128]}, num_detection_tokens=20)
    return _heads("YolosForObjectDetection", config, {"pixel_values": images((96, 128))}, ("logits", "pred_boxes"))


def _detr(kind: str, _: Path) -> Torch:
    backbone = transformers.ResNetConfig(
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 1, 1],
        embedding_size=16,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"] if kind != "Detr" else ["stage4"],
    )
    small = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_queries": 20,
    }
    if kind == "RTDetr":
        backbone = transformers.RTDetrResNetConfig(
            hidden_sizes=[16, 32, 64, 96],
            depths=[1, 1, 1, 1],
            embedding_size=16,
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )
        small |= {
            "encoder_hidden_dim": 64,
            "encoder_in_channels": [32, 64, 96],
            "decoder_in_channels": [64, 64, 64],
            "encoder_layers": 1,
            "anchor_image_size": [128, 128],
        }
    config = getattr(transformers, f"{kind}Config")(use_timm_backbone=False, backbone_config=backbone, backbone=None, **small)
    return _heads(f"{kind}ForObjectDetection", config, {"pixel_values": images(128)}, ("logits", "pred_boxes"))


def _mask2former(_: Path) -> Torch:
    backbone = transformers.SwinConfig(
        image_size=64,
        embed_dim=32,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.MaskFormerConfig(
        backbone_config=backbone,
        decoder_config=transformers.DetrConfig(
            d_model=64,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=10,
        ),
        fpn_feature_size=64,
        mask_feature_size=64,
        num_labels=5,
    )
    return _heads(
        "MaskFormerForInstanceSegmentation",
        config,
        {"pixel_values": images(64)},
        ("class_queries_logits", "masks_queries_logits"),
    )


def _clip(name: str, _: Path) -> Torch:
    text = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **({"projection_dim": 48} if name == "CLIP" else {})
    )
    ids = tokens(997, 16, batch=2)
    ids[:, -1] = 999
    inputs = {
        "input_ids": ids,
        "pixel_values": images(64, batch=2),
        **({"attention_mask": mask(2, 16, 12)} if name == "CLIP" else {}),
    }
    return _heads(f"{name}Model", config, inputs, ("logits_per_image", "text_embeds", "image_embeds"))


def _speech(name: str, given: dict[str, Any], _: Path) -> Torch:
    conv = {
        "conv_dim": [32, 32, 32],
        "conv_stride": [5, 4, 4],
        "conv_kernel": [10, 8, 4],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    config = _config(
        name,
        given,
        **{**SMALL, **conv, "hidden_size": 96, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False},
    )
    module = getattr(transformers, f"{name}Model")(config)
    return Torch(wake(module, inputs := {"input_values": audio(16000)}), inputs, ("last_hidden_state",), trace=True)


def _whisper(part: str, _: Path) -> Torch:
    config = transformers.WhisperConfig(
        vocab_size=1000,
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        num_mel_bins=40,
        max_source_positions=100,
        init_std=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    module = transformers.WhisperForConditionalGeneration(config)
    inputs = {"input_features": normal(1, 40, 200), "decoder_input_ids": tokens(997, 12) + 3}
    if part == "encoder":
        return Torch(
            wake(module.model.encoder, inputs := {"input_features": inputs["input_features"]}),
            inputs,
            ("last_hidden_state",),
            trace=True,
        )
    return Torch(wake(module, inputs, lambda m, **a: m(**a)), inputs, ("logits",), trace=True, fixed={"use_cache": False})


def _speecht5_hifigan(_: Path) -> Torch:
    config = transformers.SpeechT5HifiGanConfig(upsample_initial_channel=64, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8])
    return Torch(wake(transformers.SpeechT5HifiGan(config), inputs := {"spectrogram": normal(1, 40, 80)}), inputs, trace=True)


def _encodec(part: str, _: Path) -> Torch:
    config = transformers.EncodecConfig(
        num_filters=8, hidden_size=32, codebook_dim=32, codebook_size=64, upsampling_ratios=[4, 4], num_lstm_layers=1
    )
    model = transformers.EncodecModel(config)
    module = getattr(model, part)
    inputs = {"x": audio(3200)[:, None] if part == "encoder" else normal(1, 32, 60)}
    return Torch(wake(module, inputs), inputs, trace=True)


def _vits(_: Path) -> Torch:
    """The decoder of a text-to-speech network: its vocoder."""
    config = transformers.VitsConfig(
        hidden_size=64,
        flow_size=32,
        spectrogram_bins=65,
        upsample_initial_channel=64,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=128,
    )
    return Torch(wake(transformers.VitsModel(config).decoder, inputs := {"x": normal(1, 32, 50)}), inputs, trace=True)


def _ast(_: Path) -> Torch:
    config = transformers.ASTConfig(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=192,
        max_length=128,
        num_mel_bins=64,
        initializer_range=0.08,
    )
    return _heads("ASTForAudioClassification", config, {"input_values": normal(1, 128, 64)}, ("logits",))


def _time_series(name: str, _: Path) -> Torch:
    if name == "PatchTST":
        config = transformers.PatchTSTConfig(
            num_input_channels=3,
            context_length=64,
            patch_length=8,
            patch_stride=8,
            prediction_length=16,
            d_model=64,
            num_attention_heads=4,
            ffn_dim=128,
            num_hidden_layers=2,
        )
        return _heads("PatchTSTForPrediction", config, {"past_values": normal(2, 64, 3)}, ("prediction_outputs",))
    config = transformers.PatchTSMixerConfig(
        num_input_channels=3, context_length=64, patch_length=8, patch_stride=8, prediction_length=16, d_model=32, num_layers=2
    )
    return _heads("PatchTSMixerForPrediction", config, {"past_values": normal(2, 64, 3)}, ("prediction_outputs",))


def _sam(_: Path) -> Torch:
    vision = transformers.SamVisionConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=128,
        patch_size=16,
        output_channels=32,
        window_size=4,
        global_attn_indexes=[1],
        num_pos_feats=16,
        mlp_dim=128,
    )
    return Torch(
        wake(
            transformers.SamModel(transformers.SamConfig(vision_config=vision)).vision_encoder,
            inputs := {"pixel_values": images(128)},
        ),
        inputs,
        ("last_hidden_state",),
        trace=True,
    )


def _trocr(_: Path) -> Torch:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**IMAGE),
        transformers.TrOCRConfig(
            vocab_size=1000,
            d_model=96,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=192,
            cross_attention_hidden_size=96,
        ),
    )
    inputs = {"pixel_values": images(64), "decoder_input_ids": tokens(997, 8) + 3}
    return _heads("VisionEncoderDecoderModel", config, inputs, ("logits",))


def _superpoint(_: Path) -> Torch:
    config = transformers.SuperPointConfig(
        encoder_hidden_sizes=[16, 16, 32, 32], decoder_hidden_size=32, keypoint_decoder_dim=65, descriptor_decoder_dim=32
    )
    model = transformers.SuperPointForKeypointDetection(config)
    return Torch(wake(model.encoder, inputs := {"x": images(96, channels=1)}), inputs, trace=True)


def _swin2sr(_: Path) -> Torch:
    config = transformers.Swin2SRConfig(
        image_size=32, embed_dim=32, depths=[2, 2], num_heads=[2, 2], window_size=8, upscale=2, patch_size=1
    )
    return _heads("Swin2SRForImageSuperResolution", config, {"pixel_values": images(32)}, ("reconstruction",))


def _vitmatte(_: Path) -> Torch:
    backbone = transformers.VitDetConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
        num_channels=4,
        out_features=["stage2"],
        residual_block_indices=[1],
        window_size=2,
        window_block_indices=[0],
    )
    config = transformers.VitMatteConfig(
        backbone_config=backbone, hidden_size=64, fusion_hidden_sizes=[32, 16, 8, 8], convstream_hidden_sizes=[8, 16, 32]
    )
    return _heads("VitMatteForImageMatting", config, {"pixel_values": images(64, channels=4)}, ("alphas",))


def _entries(kinds: dict[str, dict[str, Any]], kind: str, build: Any, *more: Any) -> list[Entry]:
    return [
        Entry(f"transformers.{name}", "transformers", kind, partial(build, name, given, *more)) for name, given in kinds.items()
    ]


def _owl(_: Path) -> Torch:
    """Boxes for texts; of the last text nothing is there, and its scores are the lowest float32."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 64}
    config = transformers.Owlv2Config(
        text_config={**small, "vocab_size": 100, "max_position_embeddings": 16},
        vision_config={**small, "image_size": 64, "patch_size": 8},
        projection_dim=64,
    )
    module = transformers.Owlv2ForObjectDetection(config)
    ids = tokens(98, 24).reshape(3, 8) + 1
    ids[:, 5], ids[2] = 99, 0
    inputs = {"input_ids": ids, "pixel_values": images(64), "attention_mask": mask(3, 8, 6)}
    outputs = ("logits", "pred_boxes", "objectness_logits")
    return Torch(wake(module, inputs, lambda m, **a: m(**a)), inputs, outputs, trace=True)


OTHERS = {
    "Owlv2": ("detection", _owl),
    "DPT": ("depth", _dpt),
    "DepthAnything": ("depth", partial(_depth_anything, 126)),
    "DepthAnything.small": ("depth", partial(_depth_anything, 70)),
    "GLPN": ("depth", _glpn),
    "Segformer.segment": ("segmentation", _segformer),
    "UperNet": ("segmentation", _upernet),
    "MaskFormer": ("segmentation", _mask2former),
    "Yolos": ("detection", _yolos),
    "Detr": ("detection", partial(_detr, "Detr")),
    "ConditionalDetr": ("detection", partial(_detr, "ConditionalDetr")),
    "DeformableDetr": ("detection", partial(_detr, "DeformableDetr")),
    "RTDetr": ("detection", partial(_detr, "RTDetr")),
    "CLIP": ("image and text", partial(_clip, "CLIP")),
    "Siglip.both": ("image and text", partial(_clip, "Siglip")),
    "Whisper": ("speech", partial(_whisper, "all")),
    "Whisper.encoder": ("speech", partial(_whisper, "encoder")),
    "HifiGan": ("speech", _speecht5_hifigan),
    "Encodec.encoder": ("speech", partial(_encodec, "encoder")),
    "Encodec.decoder": ("speech", partial(_encodec, "decoder")),
    "Vits.decoder": ("speech", _vits),
    "AST": ("speech", _ast),
    "PatchTST": ("time series", partial(_time_series, "PatchTST")),
    "PatchTSMixer": ("time series", partial(_time_series, "PatchTSMixer")),
    "Sam.encoder": ("segmentation", _sam),
    "TrOCR": ("image and text", _trocr),
    "SuperPoint.encoder": ("detection", _superpoint),
    "Swin2SR": ("super-resolution", _swin2sr),
    "VitMatte": ("segmentation", _vitmatte),
}
SPEECH = {
    "Wav2Vec2": {},
    "Hubert": {},
    "WavLM": {"num_buckets": 32, "max_bucket_distance": 64},
    "Data2VecAudio": {"conv_pos_kernel_size": 19, "num_conv_pos_embeddings": 2},
    "Wav2Vec2Conformer": {"position_embeddings_type": "rotary"},
    "Wav2Vec2Conformer.relative": {"position_embeddings_type": "relative"},
    "UniSpeech": {},
    "SEW": {"squeeze_factor": 2},
}

ENTRIES = [
    *_entries(DECODERS, "language, late positions", _decoder),
    *(
        Entry(f"transformers.{n}.step{p}", "transformers", "language, a step with a cache", partial(_decode_step, n, p))
        for n, p in (
            ("Llama", 32),
            ("Llama", 8000),
            ("Llama", 30000),
            ("Qwen2", 30000),
            ("Gemma3Text", 30000),
            ("Mistral", 30000),
            ("Phi3", 30000),
        )
    ),
    *_entries(ENCODERS, "language, encoder", _encoder),
    *_entries(SEQ2SEQ, "language, both", _seq2seq),
    *(
        Entry(f"transformers.{n}", "transformers", "image", partial(_vision, n, g, i % 10 != 0))
        for i, (n, g) in enumerate(VISION.items())
    ),
    *(Entry(f"transformers.{n}", "transformers", "speech", partial(_speech, n.partition(".")[0], g)) for n, g in SPEECH.items()),
    *(Entry(f"transformers.{n}", "transformers", kind, build) for n, (kind, build) in OTHERS.items()),
]
