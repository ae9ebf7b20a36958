"""Seeds and their noise: the source of all randomness of a run, derived from its run seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PURPOSES: tuple[str, ...] = (
    "explore",  # initial noises that are explored, selected and trained on
    "train",  # training times and fresh noise of the objective
    "evaluate",  # fixed initial noises of held-out prompts
    "selection",  # random selection
    "lora",  # initial adapter weights
    "prompts",  # order of prompts
    "audit",  # random noises of the audit
    "shuffle",  # order of training pairs
    "fidelity",  # noises of rank-agreement measurements
    "test",
    "sde",  # fresh noise of a stochastic solver's steps, one stream per sample
    "identity",  # initial noises that learner and rollout actors both sample from
)
"""Purposes of seeds. The position determines the top byte of a seed: append, never reorder."""

MASK_64 = 2**64 - 1


def stream_seed(run_seed: int, purpose: str, *index: int) -> int:
    """Return the 64-bit seed of a run for a purpose and an index.

    The top 8 bits are the purpose's number, the others are bits of blake2b(purpose, run_seed,
    index). Seeds of different purposes differ by construction, for any run seeds and indices. A
    million seeds of one purpose collide with a probability of 1e-5. Raises ValueError for a purpose
    that is not in PURPOSES.
    """
    top, name = _named(purpose, run_seed, index)
    return top | int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")


def stream_seeds(count: int, run_seed: int, purpose: str, *index: int) -> tuple[int, ...]:
    """Return ``stream_seed`` with 0, 1, ... ``count`` - 1 as the last index."""
    top, name = _named(purpose, run_seed, index)
    prefix, parts = hashlib.blake2b(name, digest_size=7), []
    for last in range(count):
        digest = prefix.copy()
        digest.update(b"/%d" % last)
        parts.append(digest.digest())
    # converted at once, as a run may need a hundred thousand; the number is the eighth byte of each
    joined = bytes([top >> 56]).join([*parts, b""])
    return tuple(np.frombuffer(joined, "<u8").tolist())


def _named(purpose: str, run_seed: int, index: Sequence[int]) -> tuple[int, bytes]:
    """Return (purpose's number in the top 8 bits, message to hash); raise ValueError if unknown."""
    if purpose not in PURPOSES:
        raise ValueError(
            f"unknown seed purpose {purpose!r}: use one of {', '.join(PURPOSES)}, or append it to"
            " PURPOSES"
        )
    message = "/".join(str(int(part)) for part in (run_seed, *index))
    return (PURPOSES.index(purpose) + 1) << 56, f"{purpose}/{message}".encode()


def noise_for(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return standard normal noise, float32 [B, *shape] on the CPU.

    Row i depends only on seeds[i] and shape. The generator is numpy's Philox with the seed as its
    key, so all 64 bits are used; torch's CPU generator keeps only the low 32 bits of a seed, and
    its normal sampling depends on the instruction set.
    """
    import torch  # imported here, so that actors that only derive seeds start without it

    generators = (np.random.Generator(np.random.Philox(key=int(seed) & MASK_64)) for seed in seeds)
    rows = [generator.standard_normal(tuple(shape), np.float32) for generator in generators]
    return (
        torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, *shape), dtype=torch.float32)
    )
