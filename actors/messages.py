"""What crosses between processes. Pixels, samples and weights travel beside these, by object
reference.

Walk of one unit: the driver sends an ``ExploreChunk`` to a rollout actor, gets back an ``Explored``
and two references (images uint8 [B, 3, H, W], a record of samples), hands the image reference to a
reward actor, gets ``Scores``, and when a prompt's pool is scored asks the selector for a
``Chosen``. A record is a dict of arrays with one row per sample: "latents" float32 [B, ...], and
whatever else the learner recorded for its objective; nobody between its maker and the learner looks
in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, order=True)
class ChunkKey:
    """Names a unit of exploration. Same key, same result: whoever computes it, however often."""

    iteration: int
    prompt: int  # position within the iteration, 0 .. prompts.per_iteration - 1
    chunk: int  # position within the prompt's pool
    version: int  # policy version that must compute it


@dataclass(frozen=True)
class ExploreChunk:
    """Generate one picture per seed with the explorer's current weights."""

    key: ChunkKey
    seeds: tuple[int, ...]  # [B] 64-bit, one initial noise each
    steps: int
    solver: str
    return_latents: bool  # True where the explored samples themselves are trained on


@dataclass(frozen=True)
class Explored:
    """Answer to an ``ExploreChunk``; the pictures come beside it, by reference."""

    key: ChunkKey
    count: int  # B
    seconds: float


@dataclass(frozen=True)
class Scores:
    """Raw scores of one batch per scorer label. NaN marks a sample whose scoring failed; it is
    never a reward.
    """

    values: dict[str, np.ndarray]  # label -> float32 [B]
    failures: tuple[str, ...] = ()  # one line per scorer that failed
    parts: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # "label/part" -> float32 [B], where a scorer tells its parts
    seconds: float = 0.0
    work: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # label -> pictures that its scorer was asked for, its seconds


@dataclass(frozen=True)
class Chosen:
    """Which of a prompt's explored noises to train on, and which to audit."""

    train: tuple[int, ...]  # indices into the prompt's pool, ascending, K of them
    audit: tuple[int, ...] = ()  # random indices, some of `train` among them


@dataclass(frozen=True)
class Rows:
    """Samples of a training group: rows of one record that travels by reference."""

    record: int  # position among the records sent beside
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt's samples with the rewards they were given at the quality they are trained on."""

    prompt: int  # position within the iteration
    rewards: np.ndarray  # float32 [K]
    samples: tuple[Rows, ...]  # K rows in all, in the order of `rewards`
    metadata: dict[str, Any] = field(default_factory=dict)
