"""Advantages from the rewards of the samples that are trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.rewards import Advantages


def advantages(
    groups: Sequence[np.ndarray], settings: Advantages
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return (A = (r - mean of the group) / (std + eps), float32 [K_g] per group [K_g]; metrics).

    ``settings`` are resolved (``RunConfig.resolved_advantages``). ``std`` is the standard deviation
    of all rewards of the iteration ("global", arXiv 2604.06916) or of the group ("group", GRPO),
    computed with n, or with n - 1 if ``unbiased``. A group whose rewards are all equal has zero
    advantages and counts in ``zero_std_ratio``. Sums are in float64. Objectives clip advantages
    themselves. Raises ValueError for an empty group or a reward that is not finite: a failed reward
    never enters an advantage.
    """
    if settings.std is None or settings.eps is None:
        raise ValueError(
            f"advantages of std = {settings.std}, eps = {settings.eps}: set both, or use"
            " RunConfig.resolved_advantages"
        )
    if not groups:
        raise ValueError("no groups: an iteration needs at least one prompt with rewards")
    rewards = [np.asarray(group, dtype=np.float64) for group in groups]
    for position, group in enumerate(rewards):
        if group.ndim != 1 or not len(group) or not np.isfinite(group).all():
            raise ValueError(
                f"group {position} has rewards {group.tolist()}: each group needs a finite reward"
                " per sample, at least one"
            )
    everything, less = np.concatenate(rewards), int(settings.unbiased)
    spread = everything.std(ddof=less) if len(everything) > 1 else 0.0
    flat = [bool(group.max() == group.min()) for group in rewards]
    result = []
    for group, without_signal in zip(rewards, flat, strict=True):
        values = np.zeros_like(group)
        if not without_signal:
            std = spread if settings.std == "global" else group.std(ddof=less)
            values = (group - group.mean()) / (std + settings.eps)
        result.append(values.astype(np.float32))
    return result, {"zero_std_ratio": sum(flat) / len(flat)}
