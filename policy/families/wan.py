"""Wan (arXiv 2503.20314), text to video, over diffusers' classes."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from configs.sections import Guidance, Model
from policy.families import joint
from policy.families.base import Diffusers, Family, widened
from policy.families.schedule import TIMESTEPS, flow_match_sigmas, multistep_sigmas, whole_timestep
from policy.types import Conditioning

PIPELINE_UNIT = 16
"""The stock pipeline takes multiples of this only, with any autoencoder."""


class Wan(Family):
    """``WanPipeline`` as a policy: latents [C, 1 + (F - 1)/4, H/f, W/f] of F frames.

    With a multistep scheduler, as published, the transformer is told whole timesteps; with
    ``FlowMatchEulerDiscreteScheduler``, or the schedule "uniform", it is not. A clip of fewer
    frames is the beginning of the longer one, and so is its noise.
    """

    name = "wan"
    pipeline_class = "WanPipeline"
    video = True
    components = {
        "transformer": ("WanTransformer3DModel",),
        "vae": ("AutoencoderKLWan",),
        "scheduler": (
            "UniPCMultistepScheduler",
            "DPMSolverMultistepScheduler",
            "FlowMatchEulerDiscreteScheduler",
        ),
        **joint.text_encoders(1),
    }
    trained = tuple(
        f"{attention}.{part}"
        for attention in ("attn1", "attn2")
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    )
    modules_to_not_convert = ("condition_embedder.*", "proj_out")
    fuse = (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v"))

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if (self.index.get("transformer_2") or [None])[-1] is not None:
            raise ValueError(
                f"model.path: {self.directory!r} has two transformers, one for each half of the"
                " noise levels (Wan 2.2 A14B); only pipelines with one are trained"
            )
        if self.index.get("expand_timesteps"):
            raise ValueError(
                f"model.path: {self.directory!r} tells each token a timestep of its own (Wan 2.2"
                " TI2V), which is not supported: use a model of Wan 2.1"
            )

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        transformer, vae = self.part_config("transformer"), self.part_config("vae")
        factor = vae.get("scale_factor_spatial", 8)
        height, width = self.sizes(max(PIPELINE_UNIT, factor * transformer["patch_size"][1]))
        every = vae.get("scale_factor_temporal", 4)
        frames = (self.clip_frames(every) - 1) // every + 1
        return (transformer["in_channels"], frames, height // factor, width // factor)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["text_dim"]
        return {"prompt_embeds": (self.model.max_sequence_length, width)}

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """prompt_embeds [1, tokens, D], zeros after the prompt's own, which are not masked."""
        embeds, _ = pipe.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.model.max_sequence_length,
        )
        return Conditioning({"prompt_embeds": embeds})

    @cached_property
    def _multistep(self) -> str | None:
        """The multistep scheduler's class, where its schedule is asked for."""
        name = self.index["scheduler"][-1]
        euler = name == "FlowMatchEulerDiscreteScheduler" or self.model.schedule == "uniform"
        return None if euler else name

    def sigmas(self, steps: int) -> Tensor:
        """The scheduler's own, which the pipeline asks for nothing but their number."""
        config, model = self.part_config("scheduler"), self.model
        if self._multistep is not None:
            return multistep_sigmas(config, steps, model.shift, self._multistep)
        schedule = "scheduler" if model.schedule == "own" else model.schedule
        return flow_match_sigmas(config, steps, model.shift, None, 0, schedule)

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype, at = transformer.patch_embedding.weight.dtype, sigma.to(x.device)
        timestep = at.float() * TIMESTEPS if self._multistep is None else whole_timestep(at)
        return widened(
            transformer(
                hidden_states=x.to(dtype),
                timestep=timestep.expand(len(x)),
                encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
                return_dict=False,
            )[0]
        )

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {**super().call_arguments(model, guidance), "num_frames": model.frames}

    def spatial(self, latents: Tensor) -> Tensor:
        """[B, frames * C, H/f, W/f]."""
        return latents.transpose(1, 2).flatten(1, 2)

    def packed(self, spatial: Tensor) -> Tensor:
        return spatial.unflatten(1, (-1, self.latent_shape[0])).transpose(1, 2)

    def smaller_noise(self, noise: Tensor, smaller: Family) -> Tensor:
        return super().smaller_noise(noise[:, :, : smaller.latent_shape[1]], smaller)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """By the mean and the standard deviation of each channel."""
        return joint.by_channel(vae, latents)

    def pixels(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """[B, F, 3, H, W]."""
        return super().pixels(vae, latents).transpose(1, 2)
