"""One iteration of tiny models on the CPU, and again on the simulated GPU.

Run as ``python -m tests.simulated_gpu.iteration LIBRARY CASES``, where CASES is a JSON list of
[id, family, directory, settings]. Prints a JSON object per case: how far the results on the two
devices are apart, and how often the host waited for the GPU in each stage.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.schema import RunConfig
from learner.batch import Group
from learner.trainer import Trainer
from policy.device import torch_release
from policy.explorer import Explorer
from policy.families import Family, family_for
from policy.precision.backends import BACKENDS, Backend
from policy.sampling.guidance import Guided
from policy.types import Conditioning
from tests.learner.tiny import tiny_config
from tests.simulated_gpu import NORMS_CHANNELS_LAST
from tests.simulated_gpu.install import install
from tests.simulated_gpu.tensor import waits
from tests.tiny_families import SOLVER, encode, tiny_model

SEEDS = [5, 2**40 + 3, 9]
STEPS = 3
ON_CPU = {"torch_nvfp4": "emulated_nvfp4"}
"""Backends in the place of those that need a GPU."""
Settings = Mapping[str, Mapping[str, Any]]


@dataclass
class Iteration:
    """Results of one iteration, and the number of waits in each of its stages."""

    results: dict[str, Any] = field(default_factory=dict)
    waits: dict[str, dict[str, int]] = field(default_factory=dict)

    def stage(self, name: str, run: Callable[[], Any]) -> Any:
        """Return what ``run`` returns, and keep the waits of this stage."""
        waits.clear()
        result = run()
        self.waits[name] = dict(waits)
        return result


def config_of(name: str, directory: Path, settings: Settings) -> RunConfig:
    """Return a configuration with few steps; ``settings`` has values by table and key."""
    tables: dict[str, dict[str, Any]] = {
        # in FP32 rounding hides nothing
        "regenerate": {"steps": STEPS, "precision": "fp32", "batch_size": 2},
        "explore": {"pool_size": 8, "backend": "fp8", "steps": STEPS, "solver": SOLVER[name]},
        "objective": {"times_per_sample": 2, "kl": 0.1},
    }
    if settings.get("objective"):
        tables["objective"] = {}
    for table, values in settings.items():
        tables[table] = {**tables.get(table, {}), **values}
    config = tiny_config(directory, **tables)
    return config.model_copy(update={"model": tiny_model(name, directory)})


def backend_on(device: torch.device, config: RunConfig) -> Backend:
    """Return the configured backend, or its substitute on the CPU."""
    name = config.explore.backend
    return BACKENDS[ON_CPU.get(name, name) if device.type == "cpu" else name]


def iteration(config: RunConfig, device: torch.device) -> Iteration:
    """Encode, explore, regenerate, update, publish, save and load on a device."""
    family, done, explore = family_for(config.model), Iteration(), config.explore
    cond = done.stage("encode", lambda: encoded(family, device))
    explorer = Explorer(family, backend_on(device, config), (), device, torch.bfloat16)
    trainer = trainer_of(config, family, device)
    publish = publisher(trainer, explorer)
    done.stage("publish", lambda: publish(0))
    guided = Guided.of(config.guidance, "explore")

    def proxies(seeds: list[int]) -> np.ndarray:
        return explorer.explore(cond, seeds, STEPS, explore.solver, guided)[0]

    done.results["proxies"] = done.stage("explore", lambda: proxies(SEEDS))
    samples, images = done.stage("regenerate", lambda: trainer.generator.generate(cond, SEEDS[:2]))
    group = Group(0, cond, samples, np.float32([0.0, 1.0]))
    metrics = done.stage("update", lambda: trainer.update(0, [group]))
    done.stage("publish again", lambda: publish(1))
    done.results |= {"images": images, "proxies of version 1": proxies(SEEDS[:1])}
    done.results |= {f"sample {key}": np.asarray(value) for key, value in samples.items()}
    done.results |= {f"encoded {key}": value.numpy() for key, value in cond.tensors.items()}
    done.results |= {key: np.asarray(value) for key, value in metrics.items()}
    done.results |= checkpoint(trainer, Path(config.model.path) / f"checkpoint-{device.type}", done)
    return done


def encoded(family: Family, device: torch.device) -> Conditioning:
    """Return the conditioning of a prompt, on the CPU, by text encoders on a device."""
    text = family.load_text(device, torch.float32, None)
    return encode(family, ["a red circle"], text=text).to(device="cpu")


def trainer_of(config: RunConfig, family: Family, device: torch.device) -> Trainer:
    """Return a trainer; if weights leave the GPU between turns, they have been away."""
    offload = config.services.learner.between_turns == "host"
    trainer = Trainer(config, family, device=device, offload=offload)
    if trainer.offload is not None:
        trainer.offload.to_device()
        trainer.offload.to_host()
        trainer.offload.to_device()
    return trainer


def publisher(trainer: Trainer, explorer: Explorer) -> Callable[[int], None]:
    """Return a function that packs a version of the policy and loads it into the explorer."""

    def publish(version: int) -> None:
        manifest, shards, _ = trainer.export(version, explorer.backend.name)
        received = [shard.copy() for shard in shards]
        for shard in received:
            shard.setflags(write=False)  # as in the object store
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explorer.load(manifest, received)

    return publish


def checkpoint(trainer: Trainer, path: Path, done: Iteration) -> dict[str, np.ndarray]:
    """Save the trainer, load it again and return the tensors of each file as one array."""
    done.stage("save", lambda: trainer.save(path, {}))
    done.stage("load", lambda: trainer.load(path))
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    return {
        name: torch.cat([tensors[key].double().flatten() for key in sorted(tensors)]).numpy()
        for name, tensors in files.items()
    }


def apart(first: dict[str, Any], second: dict[str, Any]) -> dict[str, float]:
    """Return, for results that are not equal, the norm of the difference by that of ``first``.

    It is infinite for a result of only one of the two, or of another shape.
    """
    found = {}
    for name in {**first, **second}:
        a, b = (np.float64(each.get(name, np.nan)) for each in (first, second))
        if a.shape != b.shape:
            found[name] = float("inf")
        elif not np.array_equal(a, b, equal_nan=True):
            found[name] = float(np.linalg.norm(a - b) / np.linalg.norm(a))
    return found


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Let a CPU choose the kernels whose sums are those on the simulated GPU.

    Attention is by matrix products there. Until torch 2.15 group norms copy what is not contiguous,
    where those of a CPU have a kernel for the channels-last images of autoencoders.
    """
    group_norm = functional.group_norm
    copies = torch_release() < NORMS_CHANNELS_LAST

    def contiguous(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return group_norm(x.contiguous() if copies else x, *args, **options)

    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(functional, "group_norm", contiguous):
        yield


def main(library: str, cases: str) -> None:
    """Print a line for each case."""
    torch.set_num_threads(1)
    # before the first backward pass, which starts a thread for each device
    install(Path(library), capability=(10, 0))
    for name, family, directory, settings in json.loads(cases):
        config = config_of(family, Path(directory), settings)
        with kernels_of_a_gpu():
            expected = iteration(config, torch.device("cpu"))
        found = iteration(config, torch.device("cuda"))
        difference = apart(expected.results, found.results)
        print(json.dumps({"id": name, "apart": difference, "waits": found.waits}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
