"""Settings of the training objectives: one class per paper, its defaults the paper's.

The formulas live in ``learner/objectives``, one file per objective; here is only what a person may write under
``[objective]``. No torch, so that a typo is found before anything heavy is imported.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DiffusionNFTSettings(BaseModel):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(default=1.0, gt=0, le=10, description="mixing strength of the implicit positive and negative policies")
    kl: float = Field(default=1e-4, ge=0, description="weight of the squared velocity distance to the reference (adapters off)")
    advantage_clip: float = Field(default=5.0, gt=0, description="advantages are clipped to [-c, c] and scaled by 1/c")
    times_per_sample: int = Field(default=6, ge=1, description="training times drawn per sample from the regeneration schedule")
