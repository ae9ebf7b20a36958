"""Cost of the learner's passes relative to the bare model: ``python -m bench passes``.

Multiplications, kernels and the bytes that kernels move are counted for the published architectures
with the settings of the presets, on tensors without data, so the counts hold on any machine.
Seconds are predicted by ``policy.precision.cost``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from configs.load import MODELS, load
from configs.schema import RunConfig
from configs.section import Tree
from planning.plan import open_architecture
from policy.checkpointing import checkpoint_blocks
from policy.families import Family
from policy.lora import use_adapter
from policy.merging import merged
from policy.meta import META, adapt, meta_denoiser
from policy.pass_cost import conditioning_like, count_cost
from policy.precision.accelerators import ACCELERATORS, Accelerator
from policy.precision.cost import Step, rates_of, seconds
from policy.types import DTYPES

GPUS = ("H200", "B200")
HOW_TO_READ = (
    "beside the bare model: its own forward pass, or forward and backward pass to its inputs, with"
    " no adapter; regenerating merges once for all steps of a call"
)
COUNTS = ("flops", "small", "kernels", "bytes", "attention", "heads")
"""Fields of ``Step`` that add up and are not zero in a learner."""


def plus(first: Step, second: Step, times: int = 1) -> Step:
    """Return the sum of the first step and ``times`` times the second."""
    sums = {name: getattr(first, name) + times * getattr(second, name) for name in COUNTS}
    return Step(**sums)


def passes_of(config: RunConfig, family: Family) -> dict[str, dict[str, Step]]:
    """Return the cost of one call at the run's sizes, by pass and form.

    The forms are "bare", "own" (one separate adapter) and "merged" (the adapter merged into the
    weights).
    """
    dtype = DTYPES[config.regenerate.precision]
    transformer = meta_denoiser(family, dtype)
    checkpoint_blocks(transformer, config.optimizer.recomputed)
    inputs = {
        rows: (
            torch.empty(rows, *family.latent_shape, device=META),
            conditioning_like(family, rows, dtype),
        )
        for rows in (config.regenerate.batch_size, config.optimizer.batch_size)
    }

    def forward() -> None:
        x, cond = inputs[config.regenerate.batch_size]
        with torch.no_grad():
            family.velocity(transformer, x, torch.tensor(0.5), cond)

    def forward_and_backward() -> None:
        x, cond = inputs[config.optimizer.batch_size]
        x = x.clone().requires_grad_()  # so that the bare model has a backward pass
        times = torch.full((len(x),), 0.5, device=META)
        family.velocity(transformer, x, times, cond).square().mean().backward()

    def merge_and_forward() -> None:
        with merged(transformer, "current"):
            forward()

    steps = config.regenerate.steps - 1
    bare = {"forward": count_cost(forward), "training": count_cost(forward_and_backward)}
    adapt(transformer, family, config.lora)
    with use_adapter(transformer, "current"):
        own = {"forward": count_cost(forward)}
        transformer.zero_grad(set_to_none=True)
        own["training"] = count_cost(forward_and_backward)
    regenerating = count_cost(merge_and_forward)
    with merged(transformer, "current"):
        step = count_cost(forward)
    return {
        **{name: {"bare": bare[name], "own": own[name]} for name in bare},
        "regenerating": {
            "bare": plus(bare["forward"], bare["forward"], steps),
            "merged": plus(regenerating, step, steps),
        },
    }


def share(form: Step, bare: Step, accelerator: Accelerator) -> float:
    """Return the additional time relative to the bare pass: 0.1 is 10 percent."""
    gpu_rates = rates_of(accelerator, "bf16")
    assert gpu_rates is not None
    return seconds(form, gpu_rates) / seconds(bare, gpu_rates) - 1


def as_rows(passes: dict[str, dict[str, Step]]) -> list[Tree]:
    """Return a row per form of each pass other than the bare one."""
    rows = []
    for name, forms in passes.items():
        bare, *others = forms.values()
        for form in others:
            row: Tree = {"pass": name}
            for what in ("flops", "kernels", "bytes"):
                row[what] = getattr(form, what) / getattr(bare, what) - 1
            rows.append(row | {gpu: share(form, bare, ACCELERATORS[gpu]) for gpu in GPUS})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON with ``--json``; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench passes", description=HOW_TO_READ)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="presets or TOML files")
    options = parser.parse_args(arguments)
    results: dict[str, list[Tree]] = {}
    for model in options.models:
        config = load(f"{model}-sol_rl-hpsv2" if model in MODELS else model)
        with open_architecture(config) as (family, _):
            results[model] = as_rows(passes_of(config, family))
        if options.json:
            continue
        for row in results[model]:
            numbers = "  ".join(
                f"{name} {value:+.1%}" for name, value in row.items() if isinstance(value, float)
            )
            print(f"{model:12} {row['pass']:13} {numbers}", flush=True)
    print(json.dumps(results, indent=1) if options.json else HOW_TO_READ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
