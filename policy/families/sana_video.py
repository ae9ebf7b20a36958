"""SANA-Video (arXiv 2509.24695) over diffusers' classes: SANA with Wan's autoencoder."""

from __future__ import annotations

from torch import Tensor

from configs.sections import Guidance, Model
from policy.families.base import Diffusers, to_float32
from policy.families.clips import Clips
from policy.families.sana import PIPELINE_UNIT, Sana
from policy.types import Conditioning


class SanaVideo(Clips, Sana):
    """``SanaVideoPipeline`` as a policy; prompts, schedule and timesteps are those of ``Sana``."""

    name = "sana_video"
    pipeline_class = "SanaVideoPipeline"
    pipeline_unit = PIPELINE_UNIT
    native = False
    components = {
        **Sana.components,
        "transformer": ("SanaVideoTransformer3DModel",),
        "vae": ("AutoencoderKLWan",),
    }
    modules_to_not_convert = (
        "time_embed.*",
        "caption_projection.*",
        "*.ff.conv_depth",
        "*.ff.conv_temp",
        "proj_out",
    )

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.patch_embedding.weight.dtype
        return to_float32(
            transformer(
                x.to(dtype),
                encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
                encoder_attention_mask=cond.tensors["prompt_attention_mask"].to(x.device, dtype),
                timestep=self.timestep(sigma.to(x.device)).expand(len(x)),
                return_dict=False,
            )[0]
        )

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {**super().call_arguments(model, guidance), "frames": model.frames}
