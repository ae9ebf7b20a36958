"""The data of one update: groups of samples, checked, joined in a fixed order, saved on failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from learner import checkpoint
from learner.nonfinite import NonFiniteTraining
from learner.objectives.base import Record
from policy.sampling.noise import stream_seed
from policy.types import Conditioning


@dataclass(frozen=True)
class Group:
    """One prompt's K samples, or the part of them that this replica trains on."""

    prompt_index: int  # position in the iteration
    cond: Conditioning  # 1 row
    # "latents" float32 [R, *latent], x0, and other recorded arrays [R, ...]
    samples: Record
    rewards: np.ndarray  # float32 [K], of all samples
    rows: range | None = None  # the R of the K samples that are here; None: all

    @property
    def local_rows(self) -> range:
        """The indices of the samples that are here, within 0 .. K."""
        return range(len(self.rewards)) if self.rows is None else self.rows

    def select_local(self, values: np.ndarray) -> np.ndarray:
        """Return the part of ``values`` [K] that belongs to the samples here."""
        return values[self.local_rows.start : self.local_rows.stop]


@dataclass(frozen=True)
class TrainingSamples:
    """The samples that one iteration trains on: S samples of G prompts."""

    data: dict[str, Tensor]  # named tensors [S, ...] on the CPU, as in learner.objectives.Record
    advantages: Tensor  # float32 [S]
    cond: Conditioning  # G rows
    group: Tensor  # int64 [S], row of cond
    seeds: tuple[int, ...]  # [S], seed of the sample's training times and eps
    places: np.ndarray  # int [S] ascending, index among the samples of all replicas
    total: int  # number of samples of all replicas

    def __len__(self) -> int:
        return len(self.advantages)


def check_groups(
    groups: Sequence[Group],
    elsewhere: Mapping[int, np.ndarray],
    latent_shape: Sequence[int],
    paths: bool,
) -> None:
    """Raise ValueError for groups that cannot be trained on.

    ``elsewhere`` has the rewards [K] of prompts whose samples are in other replicas, by prompt
    index. ``paths`` is True if the objective trains on paths of a stochastic solver.
    """
    indices = [*(group.prompt_index for group in groups), *elsewhere]
    if len(set(indices)) != len(indices):
        raise ValueError(f"groups of prompts {indices}: each prompt may occur only once")
    for group in groups:
        count, latents = len(group.select_local(group.rewards)), group.samples["latents"]
        shape = (count, *latent_shape)
        if (
            latents.shape != shape
            or len(group.cond) != 1
            or any(len(rows) != count for rows in group.samples.values())
        ):
            raise ValueError(
                f"prompt {group.prompt_index}: latents {list(latents.shape)} and conditioning of"
                f" {len(group.cond)} rows; expected {list(shape)} for {count} rewards, and 1 row;"
                f" all other arrays need {count} rows"
            )
        missing = {"states", "log_probs"} - group.samples.keys() if paths else set()
        if missing:
            raise ValueError(
                f"prompt {group.prompt_index}: no {' and no '.join(sorted(missing))}: this"
                " objective trains on paths of its stochastic solver: regenerate with that solver"
            )


def join_groups(
    groups: Sequence[Group],
    advantages: Mapping[int, np.ndarray],
    seed: int,
    iteration: int,
    device: torch.device,
) -> TrainingSamples:
    """Join the groups' samples in the order of prompts, with a seed for each sample's points.

    ``advantages`` has float32 [K] for every prompt of the iteration, including those of other
    replicas, as they determine a sample's index in the iteration. Raises NonFiniteTraining.
    """
    _require_finite(groups)
    first, total = dict[int, int](), 0  # index of each prompt's first sample
    for prompt in sorted(advantages):
        first[prompt], total = total, total + len(advantages[prompt])
    counts = torch.tensor([len(group.local_rows) for group in groups], device=device)
    data = {
        name: np.concatenate([np.asarray(group.samples[name], np.float32) for group in groups])
        for name in groups[0].samples
    }
    return TrainingSamples(
        data={name: torch.from_numpy(rows) for name, rows in data.items()},
        advantages=torch.from_numpy(
            np.concatenate([group.select_local(advantages[group.prompt_index]) for group in groups])
        ),
        cond=Conditioning.cat([group.cond for group in groups]).to(device),
        group=torch.arange(len(groups), device=device).repeat_interleave(counts),
        seeds=tuple(
            stream_seed(seed, "train", iteration, group.prompt_index, position)
            for group in groups
            for position in group.local_rows
        ),
        places=np.concatenate(
            [first[group.prompt_index] + np.array(group.local_rows) for group in groups]
        ),
        total=total,
    )


def _require_finite(groups: Sequence[Group]) -> None:
    for group in groups:
        for name, rows in group.samples.items():
            if not np.isfinite(rows).all():
                raise NonFiniteTraining(
                    f"the regenerated {name} of prompt {group.prompt_index} are not finite"
                )


def save_failure_data(
    path: Path | None,
    groups: Sequence[Group],
    advantages: Mapping[int, np.ndarray],
    adapters: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> str:
    """Save the data on which an update failed, with the adapters; return where, or why not."""
    if path is None:
        return "its data were not saved, as no failure directory was given"
    tensors: dict[str, Tensor] = {}
    for group in groups:
        key = f"prompt_{group.prompt_index:04d}"
        tensors |= {f"{key}/{name}": _tensor(rows) for name, rows in group.samples.items()}
        tensors |= {
            f"{key}/rewards": _tensor(group.select_local(group.rewards)),
            f"{key}/advantages": _tensor(group.select_local(advantages[group.prompt_index])),
        }
        tensors |= {f"{key}/cond/{name}": tensor for name, tensor in group.cond.tensors.items()}
    tensors |= {f"adapter/{name}": tensor for name, tensor in adapters.items()}
    try:
        checkpoint.save_tensors(path, tensors, metadata)
    except OSError as error:
        return f"its data could not be saved to {str(path)!r}: {error.strerror or error}"
    return (
        f"its data are in {str(path)!r}: inspect them, then lower optimizer.lr or max_grad_norm,"
        " or fix the scorer, and start again from the last checkpoint"
    )


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
