"""What ``optimizer.compile`` gains a training pass with adapters, and how it changes gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from bench.architectures import Case
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.passes import BATCH, CPU_REPEATS, REPEATS, Run, training, within
from bench.gpu_check.setting import FAMILIES, Setting, change, measure_each
from bench.timing import Ratio, interleave
from configs.training import Lora
from learner.update import COMPILE
from policy.families.base import Diffusers
from policy.lora import add_adapters, trainable, use_adapter
from policy.meta import META, adapt
from policy.pass_cost import conditioning_like, count_cost
from policy.precision.accelerators import accelerator_of
from policy.precision.compiling import compiled, compiler_missing
from policy.precision.cost import rates_of, seconds

LEAST_S = 25.0
"""Minimum remaining seconds to start compiling a forward and a backward pass.

In ten minutes for all sections there is time for the smaller architectures only.
"""


def measure(setting: Setting) -> Iterator[Item]:
    """Measure one architecture of each family; without a GPU, where compiling is slow, only one."""
    names = FAMILIES if setting.gpu else FAMILIES[:1]
    return measure_each(setting, names, LEAST_S, partial(_gain, setting))


def _gain(setting: Setting, case: Case, _: str) -> Iterator[Item]:
    """Compare passes of training, eager and compiled: their seconds and their gradients."""
    device = setting.device
    if (missing := compiler_missing(device)) is not None:
        yield LeftOut(case.name, missing)
        return
    with torch.random.fork_rng(devices=[device] if setting.gpu else []):
        torch.manual_seed(0)
        transformer: Diffusers = case.build(device, setting.dtype)
    add_adapters(transformer, Lora(), case.family, names=("current",))
    change(transformer)
    transformer.enable_gradient_checkpointing()
    models: dict[str, nn.Module] = {
        "eager": transformer,
        "compiled": compiled(transformer, device, COMPILE, trains=True),
    }
    inputs = case.inputs(BATCH, device)
    runs: dict[str, Run] = {
        form: within(partial(use_adapter, transformer, "current"), training(case, model, inputs))
        for form, model in models.items()
    }
    gradients = {form: _gradient(transformer, run) for form, run in runs.items()}  # compiles too
    times = interleave(runs, REPEATS if setting.gpu else CPU_REPEATS)
    ratio = Ratio.of(times, "eager", "compiled")
    eager = gradients["eager"]
    yield Finding(
        f"{case.name}, training compiled",
        ratio.value,
        "x eager",
        {"architecture": case.name},
        {
            "low": ratio.low,
            "high": ratio.high,
            "eager seconds": ratio.seconds / BATCH,
            "apart": float((gradients["compiled"] - eager).norm() / eager.norm()),
            **_predicted(case),
        },
        "forward and backward, blocks computed again",
    )


def _gradient(transformer: nn.Module, run: Run) -> Tensor:
    """Return the gradient of the adapter after ``run``, flat float32 [D] on the CPU."""
    run()
    gradients = (p.grad for _, p in trainable(transformer, "current"))
    return torch.cat([g.float().flatten().cpu() for g in gradients if g is not None])


def _predicted(case: Case) -> dict[str, float]:
    """Return the predicted gain; empty for a GPU that is not in the list of accelerators."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    accelerator = accelerator_of(name)
    rates = rates_of(accelerator, "bf16") if accelerator else None
    if rates is None:
        return {}
    blank: Diffusers = case.build("meta", torch.bfloat16)
    adapt(blank, case.family, Lora())
    blank.enable_gradient_checkpointing()
    x = torch.empty(BATCH, *case.family.latent_shape, device=META)
    cond = conditioning_like(case.family, BATCH, torch.bfloat16)
    sigma = torch.tensor(0.5)
    with use_adapter(blank, "current"):
        cost = count_cost(training(case, blank, (x, sigma, cond)))
    return {"predicted": seconds(cost, rates) / seconds(cost, rates, compiled=True)}
