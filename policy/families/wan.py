"""Wan (arXiv 2503.20314), text to video, over diffusers' classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from policy.experts import EXPERTS, experts_of
from policy.families import joint
from policy.families.base import Diffusers, Scale, to_float32
from policy.families.clips import Clips
from policy.lora_files import in_diffusers
from policy.types import Conditioning

ORIGINAL = (
    *((f"attn1.to_{part}", f"self_attn.{part}") for part in "qkv"),
    *((f"attn2.to_{part}", f"cross_attn.{part}") for part in "qkv"),
    ("attn1.to_out.0", "self_attn.o"),
    ("attn2.to_out.0", "cross_attn.o"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("proj_out", "head.head"),
)
"""Parts of module paths in diffusers, and the same in the original code."""


class Wan(Clips, joint.Multistep):
    """``WanPipeline`` as a policy.

    With a multistep scheduler, as published, the transformer receives whole timesteps; with
    ``FlowMatchEulerDiscreteScheduler``, or the schedule "uniform", they are not rounded. All tokens
    of a clip have one timestep. A pipeline with one per token (``expand_timesteps``, Wan 2.2 TI2V
    5B) differs only if the clip starts from a given image, which is not supported here. If a
    pipeline has two transformers (Wan 2.2 A14B), each runs at the timesteps at which the pipeline
    uses it.
    """

    name = "wan"
    pipeline_class = "WanPipeline"
    pipeline_unit = 16
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
    optional = {EXPERTS[1]: components[EXPERTS[0]]}
    trained = joint.SELF_AND_CROSS
    modules_to_not_convert = ("condition_embedder.*", "proj_out")
    fuse = joint.SELF_AND_CROSS_FUSE
    comfyui = True
    euler_schedule = "scheduler"  # the pipeline passes only the number of steps to its scheduler

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if len(self.transformers) > 1:
            self.modules_to_not_convert = tuple(
                f"{part}.{pattern}"
                for part in self.transformers
                for pattern in type(self).modules_to_not_convert
            )

    @staticmethod
    def rename_lora(modules: Sequence[str]) -> dict[str, str]:
        """Return the names of the original code, which diffusers, ComfyUI and others read.

        They are those of diffusers if no module is in a block: its reader of the original names
        then fails.
        """
        if not any(module.startswith("blocks.") for module in modules):
            return in_diffusers(modules)
        names = {}
        for module in modules:
            name = module
            for ours, original in ORIGINAL:
                name = name.replace(ours, original)
            names[module] = f"diffusion_model.{name}"
        return names

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["text_dim"]
        return {"prompt_embeds": (self.model.max_sequence_length, width)}

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode to prompt_embeds [1, tokens, D], padded by zeros, which are not masked."""
        embeds, _ = pipe.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.model.max_sequence_length,
        )
        return Conditioning({"prompt_embeds": embeds})

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        first: Diffusers = experts_of(transformer)[0]
        dtype = first.patch_embedding.weight.dtype
        return to_float32(
            transformer(
                hidden_states=x.to(dtype),
                timestep=self.timestep(sigma.to(x.device)).expand(len(x)),
                encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
                return_dict=False,
            )[0]
        )

    def guidance_scale(self, sigma: Tensor, scale: float, low_noise: float | None) -> Scale:
        if low_noise is None or self.boundary is None:
            return scale
        # compared by the transformer's timestep; rows of one batch may be on both sides
        below = self.timestep(sigma) < self.boundary
        scales = torch.where(below, low_noise, scale)
        return scales.view(-1, *[1] * len(self.latent_shape)) if sigma.ndim else scales

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        low = {} if guidance.low_noise is None else {"guidance_scale_2": guidance.low_noise}
        return {**super().guidance_arguments(model, guidance), **low}

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {**super().call_arguments(model, guidance), "num_frames": model.frames}
