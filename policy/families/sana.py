"""SANA (arXiv 2410.10629) over diffusers' classes.

A linear-attention transformer on the latents of a deep-compression autoencoder.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from configs.sections import Guidance, Model
from policy.families.base import Diffusers, Family, widened
from policy.families.sana_native import native_state
from policy.families.schedule import TIMESTEPS, flow_match_sigmas, multistep_sigmas, whole_timestep
from policy.types import Conditioning

PIPELINE_UNIT = 32
"""The stock pipeline takes multiples of this only, with any autoencoder."""


class Sana(Family):
    """``SanaPipeline`` as a policy: latents [C, H/f, W/f], f = 32 in the published models.

    With its own ``DPMSolverMultistepScheduler`` the schedule starts below sigma = 1 and the
    transformer is told whole timesteps; with ``FlowMatchEulerDiscreteScheduler``, or the schedule
    "uniform", neither. With ``model.native_path`` it is told whole timesteps in any schedule, as in
    the code that its weights come from.
    """

    name = "sana"
    pipeline_class = "SanaPipeline"
    components = {
        "transformer": ("SanaTransformer2DModel",),
        "vae": ("AutoencoderDC",),
        "scheduler": ("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": (),
        "tokenizer": (),
    }
    native = True
    trained = tuple(
        f"{attention}.{part}"
        for attention in ("attn1", "attn2")
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    )
    modules_to_not_convert = (
        "time_embed.*",
        "caption_projection.*",
        "patch_embed.*",
        "*.ff.conv_depth",
        "proj_out",
    )
    fuse = (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v"))

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        transformer = self.part_config("transformer")
        factor = 2 ** (len(self.part_config("vae")["encoder_block_out_channels"]) - 1)
        height, width = self.sizes(math.lcm(PIPELINE_UNIT, factor * transformer["patch_size"]))
        return (transformer["in_channels"], height // factor, width // factor)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        tokens = self.model.max_sequence_length
        return {
            "prompt_embeds": (tokens, self.part_config("transformer")["caption_channels"]),
            "prompt_attention_mask": (tokens,),
        }

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """prompt_embeds [1, tokens, D] and prompt_attention_mask [1, tokens] of zeros and ones."""
        embeds, mask, _, _ = pipe.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.model.max_sequence_length,
            complex_human_instruction=self._instruction,
        )
        return Conditioning(
            {"prompt_embeds": embeds, "prompt_attention_mask": mask.to(embeds.dtype)}
        )

    @cached_property
    def _instruction(self) -> list[str] | None:
        """What the stock pipeline puts before a prompt unless told otherwise."""
        if not self.model.complex_human_instruction:
            return None
        import diffusers

        call = getattr(diffusers, self.pipeline_class).__call__
        return inspect.signature(call).parameters["complex_human_instruction"].default

    @cached_property
    def _whole_timesteps(self) -> bool:
        multistep = self.index["scheduler"][-1] == "DPMSolverMultistepScheduler"
        return multistep and self.model.schedule != "uniform"

    def sigmas(self, steps: int) -> Tensor:
        """The pipeline's flow sigmas; for the Euler scheduler of linspace(1, 1/steps, steps)."""
        config = self.part_config("scheduler")
        if not self._whole_timesteps:
            return flow_match_sigmas(config, steps, self.model.shift, schedule=self.model.schedule)
        return multistep_sigmas(config, steps, self.model.shift, self.index["scheduler"][-1])

    def timestep(self, sigma: Tensor) -> Tensor:
        """float32 in [0, 1000], whole where the scheduler's are, or the native code's."""
        if self._whole_timesteps:
            return whole_timestep(sigma)
        told = sigma.float() * TIMESTEPS
        return told if self.model.native_path is None else told.floor()

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The denoiser; ``model.native_path`` in the place of the pipeline's weights."""
        if self.model.native_path is None:
            return super().load_transformer(device, dtype)
        transformer = self.skeleton()
        state = native_state(Path(self.model.native_path), transformer)
        state = {name: value.to(dtype) for name, value in state.items()}
        # assigned: the skeleton is on the meta device and has no memory to copy into
        transformer.load_state_dict(state, assign=True)
        return transformer.to(device).eval().requires_grad_(False)

    def check_weights(self) -> None:
        """Also checks names and shapes in the native file, where there is one."""
        super().check_weights()
        if self.model.native_path is not None:
            native_state(Path(self.model.native_path), self.skeleton())

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.patch_embed.proj.weight.dtype
        timestep = self.timestep(sigma.to(x.device)) * transformer.config.timestep_scale
        return widened(
            transformer(
                x.to(dtype),
                encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
                encoder_attention_mask=cond.tensors["prompt_attention_mask"].to(x.device, dtype),
                timestep=timestep.expand(len(x)),
                return_dict=False,
            )[0]
        )

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        found = {**super().call_arguments(model, guidance), "use_resolution_binning": False}
        if not model.complex_human_instruction:
            found["complex_human_instruction"] = None
        return found

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        return latents / vae.config.scaling_factor
