"""Benchmark of sampling relative to the bare transformer, and of emulated NVFP4 relative to FP32.

The transformer calls of one sampling are recorded and replayed alone: with the same inputs and the
same number of calls, without solver, casts and noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.timing import Options, Ratio, interleave
from configs.prompts import read_prompts
from learner.publish import export_policy
from learner.trainer import Trainer
from policy.device import threads
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import resolve_backend
from policy.sampling.noise import stream_seed
from policy.sampling.sample import sample

GOAL = 1.03
EMULATED = "emulated_nvfp4"


def measure(options: Options) -> list[Ratio]:
    """Return sampling over bare forward passes (FP32), and exploring in emulated NVFP4 over FP32.

    Both explorers decode images.
    """
    with threads(options.config.services.rollout.threads):
        return [_sampling(options), _emulation(options)]


def _sampling(options: Options) -> Ratio:
    config = options.config
    family = family_for(config.model)
    transformer = family.load_transformer("cpu", torch.float32)
    cond = _conditioning(options).repeat(options.batch)

    def sampling() -> Any:
        return sample(
            family, transformer, cond, _seeds(options), config.explore.steps, config.explore.solver
        )

    calls = _recorded(transformer, sampling)

    @torch.no_grad()
    def bare() -> None:
        for args, named in calls:
            transformer(*args, **named)

    times = interleave({"bare forward": bare, "sampling step": sampling}, options.repeats)
    per_step = {
        name: [seconds / config.explore.steps for seconds in values]
        for name, values in times.items()
    }
    note = (
        f"batch {options.batch}, threads {torch.get_num_threads()}, solver {config.explore.solver}"
    )
    return Ratio.of(per_step, "sampling step", "bare forward", GOAL, note)


def _recorded(transformer: nn.Module, run: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of every call of ``transformer`` during ``run``."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = transformer.register_forward_pre_hook(
        lambda module, args, named: calls.append((args, named)), with_kwargs=True
    )
    try:
        run()
    finally:
        handle.remove()
    return calls


def _emulation(options: Options) -> Ratio:
    cond, plan = _conditioning(options), options.config.explore
    explorers = {backend: _explorer(options, backend) for backend in ("fp32", EMULATED)}

    def exploring(backend: str) -> Any:
        return lambda: explorers[backend].explore(cond, _seeds(options), plan.steps, plan.solver)

    times = interleave({backend: exploring(backend) for backend in explorers}, options.repeats)
    return Ratio.of(
        times, EMULATED, "fp32", note=f"explore {plan.steps} steps, batch {options.batch}, decoded"
    )


def _explorer(options: Options, name: str) -> Explorer:
    """Return an explorer with the base model's weights, published as in a run."""
    config = options.config
    backend, _ = resolve_backend(name, "cpu")
    explorer = Explorer(
        family_for(config.model),
        backend,
        config.explore.modules_to_not_convert,
        "cpu",
        torch.float32,
    )
    trainer = Trainer(config)
    adapter, size = trainer.objective.sampling_adapter, config.publish.shard_mb * 2**20
    explorer.load(
        *export_policy(
            trainer.transformer,
            adapter,
            explorer.plan,
            backend,
            0,
            size,
            config.explore.scale_search,
        )
    )
    return explorer


def _conditioning(options: Options) -> Any:
    prompt = read_prompts(options.config.prompts.train)[0].text
    return family_for(options.config.model).load_text("cpu", torch.float32).encode([prompt])


def _seeds(options: Options) -> list[int]:
    return [stream_seed(options.config.seed, "test", n) for n in range(options.batch)]
