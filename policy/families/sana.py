"""SANA (arXiv 2410.10629) over diffusers' classes.

It is a linear-attention transformer on the latents of a deep-compression autoencoder.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from configs.sections import Guidance, Model
from policy.families import joint
from policy.families.base import Diffusers, to_float32
from policy.families.sana_native import native_state
from policy.types import Conditioning

PIPELINE_UNIT = 32
"""The stock pipeline requires heights and widths to be multiples of this number of pixels.

This is so with any autoencoder.
"""


class Sana(joint.Multistep):
    """``SanaPipeline`` as a policy: latents [C, H/f, W/f], f = 32 in the published models.

    With the published ``DPMSolverMultistepScheduler`` the schedule starts below sigma = 1 and the
    transformer receives whole timesteps; with ``FlowMatchEulerDiscreteScheduler``, or the schedule
    "uniform", neither is the case. With ``model.native_path`` it receives whole timesteps in any
    schedule, as in the code that these weights come from.
    """

    name = "sana"
    pipeline_class = "SanaPipeline"
    components = {
        "transformer": ("SanaTransformer2DModel",),
        "vae": ("AutoencoderDC",),
        "scheduler": ("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler"),
        **joint.text_encoders(1),
    }
    native = True
    trained = joint.SELF_AND_CROSS
    modules_to_not_convert = (
        "time_embed.*",
        "caption_projection.*",
        "patch_embed.*",
        "*.ff.conv_depth",
        "proj_out",
    )
    fuse = joint.SELF_AND_CROSS_FUSE

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
        """Encode to prompt_embeds [1, tokens, D], prompt_attention_mask [1, tokens] of 0 and 1."""
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
        """The stock pipeline's default instruction before a prompt, None if it is disabled."""
        if not self.model.complex_human_instruction:
            return None
        return (
            inspect.signature(self.stock.__call__).parameters["complex_human_instruction"].default
        )

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the timestep, float32 in [0, 1000].

        It is a whole number if those of the scheduler or of the native code are.
        """
        timestep = super().timestep(sigma)
        return timestep if self.model.native_path is None else timestep.floor()

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Load the denoiser, with the weights of ``model.native_path`` if it is set."""
        if self.model.native_path is None:
            return super().load_transformer(device, dtype)
        transformer = self.skeleton()
        state = native_state(Path(self.model.native_path), transformer)
        state = {name: value.to(dtype) for name, value in state.items()}
        # assign, as the skeleton is on the meta device and has no memory to copy into
        transformer.load_state_dict(state, assign=True)
        return transformer.to(device).eval().requires_grad_(False)

    def check_weights(self) -> None:
        """Check as the base class does, and the names and shapes in the native file, if set."""
        super().check_weights()
        if self.model.native_path is not None:
            native_state(Path(self.model.native_path), self.skeleton())

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.patch_embed.proj.weight.dtype
        timestep = self.timestep(sigma.to(x.device)) * transformer.config.timestep_scale
        return to_float32(
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
        arguments = {**super().call_arguments(model, guidance), "use_resolution_binning": False}
        if not model.complex_human_instruction:
            arguments["complex_human_instruction"] = None
        return arguments

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        return latents / vae.config.scaling_factor
