"""The tiny pipelines of all families side by side: their model settings, and how stock diffusers is called to match a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.sections import Model

NAMES = ("sd3", "flux", "sana")
SETTINGS: dict[str, dict[str, Any]] = {
    "sd3": {"height": 16, "width": 16, "max_sequence_length": 12},
    "flux": {"height": 16, "width": 16, "max_sequence_length": 12, "guidance": 3.5},
    "sana": {"height": 32, "width": 32, "max_sequence_length": 12, "complex_human_instruction": False},
}
SOLVER = {"sd3": "euler", "flux": "euler", "sana": "dpm2"}
"""The solver that is the stock pipeline's."""
PIPELINES = {"sd3": "StableDiffusion3Pipeline", "flux": "FluxPipeline", "sana": "SanaPipeline"}


def tiny_model(name: str, directory: Path, **changes: Any) -> Model:
    """[model] for the tiny pipeline of a family."""
    return Model.model_validate({"family": name, "path": str(directory), **SETTINGS[name], **changes})


def stock_pipeline(name: str, directory: Path) -> Any:
    """diffusers' own pipeline, quiet."""
    import diffusers

    pipe = getattr(diffusers, PIPELINES[name]).from_pretrained(directory)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_call(pipe: Any, model: Model, prompt: str, noise: Any, steps: int, output_type: str, **more: Any) -> Any:
    """What the stock pipeline draws without classifier-free guidance from given noises: latents or PIL pictures."""
    how: dict[str, Any] = {
        "sd3": {"sigmas": np.linspace(1, 1 / steps, steps).tolist(), "guidance_scale": 1.0},
        "flux": {"guidance_scale": model.guidance},
        "sana": {"guidance_scale": 1.0, "use_resolution_binning": False},
    }[model.family]
    if model.family == "sana" and not model.complex_human_instruction:
        how["complex_human_instruction"] = None
    return pipe(
        prompt,
        num_images_per_prompt=len(noise),
        height=model.height,
        width=model.width,
        num_inference_steps=steps,
        max_sequence_length=model.max_sequence_length,
        latents=noise,
        output_type=output_type,
        **{**how, **more},
    ).images


def as_array(pictures: Sequence[Any]) -> np.ndarray:
    """uint8 [B, 3, H, W] of PIL pictures."""
    return np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)
