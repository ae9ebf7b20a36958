"""Who sits on which GPU: asked for in a word, or by the numbers of ``services``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Section


class Layout(Section):
    """Numbers of actors and their shares, chosen when a run starts; ``services`` by hand wins."""

    mode: Literal["auto", "shared", "split"] = Field(
        default="auto",
        description=(
            "shared: rollout actors and learner replicas take turns on each GPU; split: GPUs of"
            " their own; auto: what is predicted to be fastest of what fits"
        ),
    )
    gpus: int | None = Field(
        default=None, ge=1, description="GPUs to use; None: all that the cluster or machine has"
    )
