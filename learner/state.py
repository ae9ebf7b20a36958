"""The state that training changes, saved and restored exactly: adapters, optimizer and counters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from configs.schema import RunConfig
from configs.section import Tree
from learner import checkpoint
from learner.trained_adapter import TrainedAdapter
from policy.lora import adapter_state, load_adapter_state
from policy.lora_files import adapter_file

WEIGHT = "weight/"


class Counts(NamedTuple):
    """Number of updates, and number of the last iteration (None before the first)."""

    done: int
    last_iteration: int | None


class LearnerState:
    """The adapters of one transformer and the optimizer of the trained one."""

    def __init__(
        self,
        config: RunConfig,
        transformer: nn.Module,
        names: tuple[str, ...],
        trained: TrainedAdapter,
    ) -> None:
        """``names`` are the names of the adapters."""
        self._config, self._transformer = config, transformer
        self._names, self._trained = names, trained

    def adapters(self) -> dict[str, Tensor]:
        """Return a copy of all adapters on the CPU, with names "ADAPTER/PARAMETER"."""
        states = {name: adapter_state(self._transformer, name) for name in self._names}
        return {
            f"{name}/{key}": tensor
            for name, state in states.items()
            for key, tensor in state.items()
        }

    def checksum(self) -> str:
        """Return the xxh3-128 of all adapters in hex; equal checksums mean equal bits."""
        digest = xxhash.xxh3_128()
        for tensor in self.adapters().values():
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def save(self, path: str | Path, counts: Counts, extra_state: Tree) -> None:
        """Write a checkpoint as described in ``Trainer.save``."""
        # without the trained weights, which are saved as the adapter "current"
        optimizer = {
            key: value for key, value in self._trained.state().items() if not key.startswith(WEIGHT)
        }
        files = {adapter_file(name): adapter_state(self._transformer, name) for name in self._names}
        state = {"seed": self._config.seed, **counts._asdict(), "extra": extra_state}
        checkpoint.write(path, {**files, "optimizer": optimizer}, state)
        checkpoint.prune(Path(path).parent, self._config.checkpoint.keep_last)

    def load(self, path: str | Path) -> tuple[Counts, Tree]:
        """Restore a checkpoint; return its counters and its extra state.

        Raises CheckpointError before anything has changed.
        """
        files, state = checkpoint.read(path)
        counts = _counts(path, state)
        if state["seed"] != self._config.seed:
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r} is of run seed {state['seed']}, but this run has seed"
                f" {self._config.seed}: use the same seed"
            )
        for name in self._names:
            file = adapter_file(name)
            checkpoint.require_same(
                files.get(file, {}),
                adapter_state(self._transformer, name),
                f"checkpoint {str(path)!r}, {file}",
            )
        optimizer = files.get("optimizer", {})
        self._check_optimizer(path, optimizer, counts.done)
        for name in self._names:
            load_adapter_state(self._transformer, name, files[adapter_file(name)])
        # the trained weights were loaded by the line above; add the moments of the file
        weights = {
            key: value for key, value in self._trained.state().items() if key.startswith(WEIGHT)
        }
        self._trained.load_state({**weights, **optimizer})
        return counts, state["extra"]

    def _check_optimizer(self, path: str | Path, tensors: dict[str, Tensor], done: int) -> None:
        if not tensors and not done:  # AdamW has no moments before its first step
            return
        requested: dict[str, Tensor] = {}
        for name, parameter in self._trained.parameters.items():
            requested |= {
                f"exp_avg/{name}": parameter.detach(),
                f"exp_avg_sq/{name}": parameter.detach(),
                f"step/{name}": torch.zeros(()),
            }
        checkpoint.require_same(tensors, requested, f"checkpoint {str(path)!r}, optimizer")


def _counts(path: str | Path, state: Tree) -> Counts:
    """Return the counters of a checkpoint. Raises CheckpointError if they are missing."""
    done, last = (state.get(key) for key in ("done", "last_iteration"))
    if (
        not state.keys() >= {"seed", "extra"}
        or type(done) is not int
        or type(last) not in (int, type(None))
    ):
        raise checkpoint.CheckpointError(
            f"checkpoint {str(path)!r}: its {checkpoint.STATE} does not contain the position of"
            " the learner: resume from an earlier checkpoint"
        )
    return Counts(done, last)
