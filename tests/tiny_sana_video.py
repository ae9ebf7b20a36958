"""A SanaVideoPipeline directory with random weights, like ``tests.tiny_sd3``.

Clips are 5 frames of 32x32, the smallest of the stock pipeline: latents [4, 2, 8, 8].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_qwen_image import randomise
from tests.tiny_sana import BLOCKS, gemma_tokenizer, tiny_gemma
from tests.tiny_wan import tiny_video_vae


@pytest.fixture(scope="session")
def tiny_sana_video_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_sana_video(tmp_path_factory.mktemp("tiny_sana_video"))


def make_tiny_sana_video(path: str | Path, seed: int = 0, euler: bool = False) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights.

    ``euler`` replaces the scheduler.
    """
    import torch
    from diffusers import (
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        SanaVideoPipeline,
        SanaVideoTransformer3DModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = SanaVideoTransformer3DModel(**BLOCKS, rope_max_seq_len=32)
        randomise(transformer)
        scheduler: Any = DPMSolverMultistepScheduler(
            flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
        )
        if euler:
            scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        pipe = SanaVideoPipeline(
            transformer=transformer,
            scheduler=scheduler,
            vae=tiny_video_vae(),
            text_encoder=tiny_gemma(),
            tokenizer=gemma_tokenizer(),
        )
        pipe.save_pretrained(str(path))
    return Path(path)
