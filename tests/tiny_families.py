"""The tiny pipelines of all families: their model settings, and calls of stock diffusers that match
a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from configs.sections import Guidance, Model

if TYPE_CHECKING:
    from policy.families import Family
    from policy.families.text import PromptEncoder
    from policy.types import Conditioning

VIDEO = ("wan", "sana_video")
EDITING = ("flux_kontext", "qwen_image_edit")
NAMES = (
    *("sd3", "flux", "flux_kontext", "sana", "qwen_image", "qwen_image_edit"),
    *("z_image", "flux2", "flux2_klein", *VIDEO),
)
TWINS = {"flux": "flux_kontext", "qwen_image": "qwen_image_edit", "flux2": "flux2_klein"}
"""Pairs of families whose denoisers have the same class."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sd3": {"height": 16, "width": 16, "max_sequence_length": 12},
    "flux": {"height": 16, "width": 16, "max_sequence_length": 12, "guidance": 3.5},
    "flux_kontext": {"height": 16, "width": 16, "max_sequence_length": 12, "guidance": 2.5},
    "sana": {
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "complex_human_instruction": False,
    },
    "qwen_image": {"height": 16, "width": 16, "max_sequence_length": 16},
    "qwen_image_edit": {"height": 32, "width": 32, "max_sequence_length": 40},
    "z_image": {"height": 16, "width": 16, "max_sequence_length": 40},
    "flux2": {"height": 16, "width": 16, "max_sequence_length": 24, "guidance": 4.0},
    "flux2_klein": {"height": 16, "width": 16, "max_sequence_length": 24},
    "wan": {"height": 16, "width": 16, "frames": 5, "max_sequence_length": 12},
    "sana_video": {
        "height": 32,
        "width": 32,
        "frames": 5,
        "max_sequence_length": 12,
        "complex_human_instruction": False,
    },
}
SOLVER = {name: "dpmpp_2m" if name.startswith("sana") else "euler" for name in NAMES}
"""The solver of the stock pipeline."""
PROMPTS = ["a red circle", "two blue crosses above a green square"]
SEEDS = [11, 2**40 + 3, 7]
PIPELINES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "flux_kontext": "FluxKontextPipeline",
    "sana": "SanaPipeline",
    "qwen_image": "QwenImagePipeline",
    "qwen_image_edit": "QwenImageEditPlusPipeline",
    "z_image": "ZImagePipeline",
    "flux2": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "wan": "WanPipeline",
    "sana_video": "SanaVideoPipeline",
}
TEXT_MODULES = {name: {"sd3": 3, "flux": 2, "flux_kontext": 2}.get(name, 1) for name in NAMES}
"""Number of text encoders per family."""


def one_of_twins(second: bool, *more: Any) -> list[Any]:
    """Return values of ``name``: all families, with one of each pair of twins marked slow.

    ``second`` chooses which one. Two tests that choose differently cover all families in the quick
    suite. ``more``: values of further parameters.
    """
    left_out = TWINS if second else TWINS.values()
    slow = pytest.mark.slow
    return [pytest.param(name, *more, marks=slow if name in left_out else ()) for name in NAMES]


def tiny_model(name: str, directory: Path, **changes: Any) -> Model:
    """Return [model] for the tiny pipeline of a family."""
    return Model.model_validate(
        {"family": name, "path": str(directory), **SETTINGS[name], **changes}
    )


def stock_pipeline(name: str, directory: Path) -> Any:
    """Load diffusers' own pipeline, silent and with frozen weights, as in the families.

    torch multiplies a non-contiguous input by weights that require gradients as one product, not
    one per row of the batch, and its sums differ in the last bit on some CPUs (AMD with AVX-512).
    Clips are decoded one at a time, as in the families, for the same reason.
    """
    import diffusers
    import torch

    from policy.families import FAMILIES

    pipe = getattr(diffusers, PIPELINES[name]).from_pretrained(directory)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    if FAMILIES[name].video:
        pipe.vae.enable_slicing()
    return pipe


def source_for(prompt: str, height: int, width: int) -> np.ndarray:
    """Return a source image for a prompt, uint8 [3, H, W]: waves, which look alike at a smaller
    size.
    """
    chance = np.random.default_rng(len(prompt))
    rows, columns = np.mgrid[:height, :width] / 8
    waves = [np.sin(a * rows + b * columns + c) for a, b, c in chance.uniform(0, 3, (3, 3))]
    return np.uint8(np.stack(waves) * 100 + 128)


def encode(
    family: Family,
    prompts: list[str],
    negative: str | None = None,
    text: PromptEncoder | None = None,
) -> Conditioning:
    """Encode each prompt as a row, with a source image of its own if the family edits images.

    ``text`` are the text encoders, if they are loaded already.
    """
    import torch

    size = family.model.height, family.model.width
    images = [source_for(prompt, *size) for prompt in prompts] if family.edits else None
    text = text or family.load_text("cpu", torch.float32, negative)
    return text.encode(prompts, images)


@contextmanager
def sources_as_large_as_drawn(model: Model) -> Iterator[None]:
    """Let Qwen's pipeline encode sources at the size of the output instead of 1024x1024 pixels."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

    with mock.patch.object(stock, "VAE_IMAGE_SIZE", model.height * model.width):
        yield


def stock_call(
    pipe: Any, model: Model, prompt: str, noise: Any, steps: int, output_type: str, **more: Any
) -> Any:
    """Return what the stock pipeline generates from given noises, without classifier-free guidance.

    The result is latents, PIL images, or lists of PIL images, which are clips. A pipeline that
    edits gets ``source_for`` the prompt.
    """
    from policy.families import FAMILIES

    if FAMILIES[model.family].edits and "image" not in more:
        source = source_for(prompt, model.height, model.width)
        more["image"] = Image.fromarray(np.ascontiguousarray(source.transpose(1, 2, 0)))
    if model.family == "flux_kontext":
        more["_auto_resize"] = False  # to one of its own sizes, all of about 1024x1024 pixels
    how: dict[str, Any] = FAMILIES[model.family].call_arguments(model, Guidance())
    if model.family == "sd3":
        how["sigmas"] = np.linspace(1, 1 / steps, steps).tolist()
    kept: dict[str, Any] = {}
    if model.family.startswith("flux2") and output_type == "latent":
        # one pipeline returns packed latents, the other returns them as its autoencoder takes them
        how["callback_on_step_end"] = lambda *found: kept.update(found[-1]) or {}
    what, kind = ("frames", "videos") if FAMILIES[model.family].video else ("images", "images")
    with sources_as_large_as_drawn(model):
        found = pipe(
            prompt=prompt,
            **{f"num_{kind}_per_prompt": len(noise)},
            num_inference_steps=steps,
            latents=noise,
            output_type=output_type,
            **{**how, **more},
        )
    return kept["latents"].transpose(1, 2).reshape(noise.shape) if kept else found[what]


def as_array(images: Sequence[Any]) -> np.ndarray:
    """Return PIL images as uint8 [B, 3, H, W], and lists of them as [B, F, 3, H, W]."""
    found = [as_array(one) if isinstance(one, list) else np.asarray(one) for one in images]
    return np.stack(found) if isinstance(images[0], list) else np.moveaxis(np.stack(found), -1, 1)


@dataclass
class Tiny:
    """A family and the stock pipeline on one tiny directory; each part is loaded on first use."""

    name: str
    directory: Path

    def other(self, **changes: Any) -> Family:
        """Return the family with other model settings."""
        from policy.families import family_for

        return family_for(tiny_model(self.name, self.directory, **changes))

    @cached_property
    def family(self) -> Family:
        return self.other()

    @cached_property
    def pipe(self) -> Any:
        return stock_pipeline(self.name, self.directory)

    @cached_property
    def denoiser(self) -> Any:
        import torch

        return self.family.load_transformer("cpu", torch.float32)

    @cached_property
    def encoded(self) -> Conditioning:
        """Conditioning of PROMPTS, one row each."""
        return encode(self.family, PROMPTS)

    def stock(self, steps: int, output_type: str, **more: Any) -> Any:
        """Return what the stock pipeline generates for the first prompt at SEEDS."""
        from policy.sampling.noise import noise_for

        noise = noise_for(SEEDS, self.family.latent_shape)
        return stock_call(
            self.pipe, self.family.model, PROMPTS[0], noise, steps, output_type, **more
        )

    def ours(self, steps: int, solver: str) -> Any:
        """Return the family's latents for the same prompt and seeds."""
        from policy.sampling.sample import sample

        return sample(
            self.family,
            self.denoiser,
            self.encoded.rows(0).repeat(len(SEEDS)),
            SEEDS,
            steps,
            solver,
        )
