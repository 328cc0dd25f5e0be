"""diffusers' networks from small configurations, at late timesteps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.zoo.entry import Entry, Torch, images, normal, wake

NOISY = torch.tensor([981])
"""Timesteps of a thousand: where sines and cosines of them are of large angles."""


def _torch(module: torch.nn.Module, inputs: dict[str, torch.Tensor], trace: bool = True, call: Any = None, **fixed: Any) -> Torch:
    run = call or (lambda m, **a: m(**a, **fixed))
    return Torch(wake(module, inputs, run), inputs, () if call else ("sample",), call, trace, fixed=fixed)


def _unet2d(batch: int, timestep: int, _: Path, **more: Any) -> Torch:
    blocks = {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    }
    module = diffusers.UNet2DModel(sample_size=32, layers_per_block=1, norm_num_groups=8, **{**blocks, **more})
    return _torch(module, {"sample": normal(batch, 3, 32, 32), "timestep": torch.full((batch,), timestep)})


def _unet_condition(timestep: int, _: Path, **more: Any) -> Torch:
    module = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **more,
    )
    inputs = {
        "sample": normal(2, 4, 16, 16),
        "timestep": torch.tensor([timestep, timestep]),
        "encoder_hidden_states": normal(2, 16, 64),
    }
    return _torch(module, inputs)


def _sdxl(_: Path) -> Torch:
    module = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=(4, 8),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=64 + 6 * 32,
    )
    inputs = {
        "sample": normal(1, 4, 16, 16),
        "timestep": NOISY,
        "encoder_hidden_states": normal(1, 16, 64),
        "text_embeds": normal(1, 64),
    }
    inputs["time_ids"] = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]])

    def call(module: Any, sample: Any, timestep: Any, encoder_hidden_states: Any, text_embeds: Any, time_ids: Any) -> Any:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return module(sample, timestep, encoder_hidden_states, added_cond_kwargs=added).sample

    return _torch(module, inputs, call=call)


def _controlnet(_: Path) -> Torch:
    module = diffusers.ControlNetModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(16, 32),
    )
    inputs = {
        "sample": normal(1, 4, 16, 16),
        "timestep": NOISY,
        "encoder_hidden_states": normal(1, 16, 64),
        "controlnet_cond": images(32),
    }

    def call(module: Any, **a: Any) -> Any:
        out = module(**a)
        return [*out.down_block_res_samples, out.mid_block_res_sample]

    return _torch(module, inputs, call=call)


def _dit(_: Path) -> Torch:
    module = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        norm_num_groups=8,
        sample_size=16,
        num_embeds_ada_norm=1000,
    )
    return _torch(module, {"hidden_states": normal(1, 4, 16, 16), "timestep": NOISY, "class_labels": torch.tensor([7])})


def _pixart(_: Path) -> Torch:
    module = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=64,
        caption_channels=48,
        sample_size=16,
        use_additional_conditions=False,
    )
    return _torch(module, {"hidden_states": normal(1, 4, 16, 16), "encoder_hidden_states": normal(1, 8, 48), "timestep": NOISY})


def _sd3(_: Path) -> Torch:
    module = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        caption_projection_dim=64,
        pooled_projection_dim=40,
        out_channels=4,
        pos_embed_max_size=24,
    )
    return _torch(
        module,
        {
            "hidden_states": normal(1, 4, 16, 16),
            "encoder_hidden_states": normal(1, 12, 48),
            "pooled_projections": normal(1, 40),
            "timestep": torch.tensor([981.0]),
        },
    )


def _flux(_: Path) -> Torch:
    module = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=48,
        pooled_projection_dim=40,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    ids = torch.stack(torch.meshgrid(torch.arange(1.0), torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1).reshape(64, 3)
    inputs = {
        "hidden_states": normal(1, 64, 16),
        "encoder_hidden_states": normal(1, 12, 48),
        "pooled_projections": normal(1, 40),
        "timestep": torch.tensor([0.981]),
        "img_ids": ids,
        "txt_ids": torch.zeros(12, 3),
        "guidance": torch.tensor([3.5]),
    }
    return _torch(module, inputs)


def _vae(kind: str, part: str, _: Path) -> Torch:
    if kind == "tiny":
        model: Any = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        )
    elif kind == "vq":
        model = diffusers.VQModel(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
            latent_channels=4,
            num_vq_embeddings=64,
        )
    else:
        model = diffusers.AutoencoderKL(
            block_out_channels=(16, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            norm_num_groups=8,
            latent_channels=4,
        )
    module = getattr(model, part)
    inputs = {"x": images(64).clamp(-1, 1) if part == "encoder" else normal(1, 4, 16, 16)}
    return Torch(wake(module, inputs), inputs, trace=True)


def _temporal(_: Path) -> Torch:
    module = diffusers.UNet1DModel(
        block_out_channels=(16, 32),
        sample_size=64,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
        extra_in_channels=16,
        time_embedding_type="fourier",
    )
    return _torch(module, {"sample": normal(1, 4, 64), "timestep": torch.tensor([0.981])})


def _unet3d(_: Path) -> Torch:
    module = diffusers.UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )
    return _torch(module, {"sample": normal(1, 4, 4, 8, 8), "timestep": NOISY, "encoder_hidden_states": normal(1, 8, 64)})


def _prior(_: Path) -> Torch:
    module = diffusers.PriorTransformer(
        num_attention_heads=4, attention_head_dim=16, num_layers=2, embedding_dim=48, num_embeddings=12, additional_embeddings=4
    )
    inputs = {
        "hidden_states": normal(1, 48),
        "timestep": NOISY,
        "proj_embedding": normal(1, 48),
        "encoder_hidden_states": normal(1, 12, 48),
    }
    return Torch(wake(module, inputs, lambda m, **a: m(**a)), inputs, ("predicted_image_embedding",))


ENTRIES = [
    *(
        Entry(f"diffusers.UNet2D.{n}.t{t}", "diffusers", "diffusion", partial(_unet2d, n, t))
        for n, t in ((1, 10), (1, 981), (4, 981))
    ),
    Entry("diffusers.UNet2D.fourier", "diffusers", "diffusion", partial(_unet2d, 1, 981, time_embedding_type="fourier")),
    Entry(
        "diffusers.UNet2D.scale_shift", "diffusers", "diffusion", partial(_unet2d, 1, 981, resnet_time_scale_shift="scale_shift")
    ),
    *(Entry(f"diffusers.UNet2DCondition.t{t}", "diffusers", "diffusion", partial(_unet_condition, t)) for t in (10, 981)),
    Entry("diffusers.UNet2DCondition.sdxl", "diffusers", "diffusion", _sdxl),
    Entry(
        "diffusers.UNet2DCondition.classes", "diffusers", "diffusion", partial(_unet_condition, 981, only_cross_attention=True)
    ),
    Entry("diffusers.ControlNet", "diffusers", "diffusion", _controlnet),
    Entry("diffusers.DiT", "diffusers", "diffusion", _dit),
    Entry("diffusers.PixArt", "diffusers", "diffusion", _pixart),
    Entry("diffusers.SD3", "diffusers", "diffusion", _sd3),
    Entry("diffusers.Flux", "diffusers", "diffusion", _flux),
    *(
        Entry(f"diffusers.VAE.{k}.{p}", "diffusers", "diffusion", partial(_vae, k, p))
        for k in ("kl", "tiny", "vq")
        for p in ("encoder", "decoder")
    ),
    Entry("diffusers.UNet1D", "diffusers", "diffusion", _temporal),
    Entry("diffusers.UNet3D", "diffusers", "diffusion", _unet3d),
    Entry("diffusers.Prior", "diffusers", "diffusion", _prior),
]
