"""Gradients of shallow models in BF16, compared with FP32, by family.

A kernel with a wrong backward pass is detected here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bench.architectures import Case
from bench.gpu_check.findings import Finding, Item
from bench.gpu_check.setting import FAMILIES, NEWER, Setting, change, free, measure_each
from configs.section import Tree
from configs.training import Lora
from policy.attention import without_cudnn_attention
from policy.device import allow_tf32, synchronize
from policy.families.base import Diffusers
from policy.lora import add_adapters, use_adapter

BATCH, DEPTH, LEAST_S = 2, 2, 10.0
SIGMA = 0.5
"""1000 times this is exact in BF16: timesteps are rounded before their sines are computed."""
DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
"""Keys for the number of blocks in configurations of diffusers."""


def measure(setting: Setting) -> Iterator[Item]:
    """Measure every family as a learner computes gradients, then with torch's choice of attention.

    The latter comes last: its kernel may read invalid memory, which kills the process.
    """

    def as_trained(case: Case, _: str) -> Iterator[Item]:
        yield _finding(case, setting, "as trained", without_cudnn_attention(setting.device))

    yield from measure_each(
        setting, (*FAMILIES, *(NEWER if setting.gpu else ())), LEAST_S, as_trained
    )
    for name in FAMILIES if setting.gpu else ():
        with setting.case(name) as case:
            yield _finding(case, setting, "torch's own choice", nullcontext())
        free()


def _finding(
    case: Case, setting: Setting, form: str, attention: AbstractContextManager[None]
) -> Finding:
    """Return the relative distance of the BF16 gradient from the FP32 one."""
    with attention:
        actual = _gradient(case, setting, torch.bfloat16)
    allow_tf32(setting.device, False)
    with without_cudnn_attention(setting.device):
        expected = _gradient(case, setting, torch.float32)
    allow_tf32(setting.device, True)
    return Finding(
        f"{case.name}, gradient of the adapter in BF16, {form}, off that in FP32",
        float((actual - expected).norm() / expected.norm()),
        "share",
        {"architecture": case.name, "form": form},
        {"norm": float(expected.norm())},
        f"{DEPTH} blocks of each kind",
    )


def _gradient(case: Case, setting: Setting, dtype: torch.dtype) -> Tensor:
    """Return the adapter's gradient of a mean square, flat [D], with gradient checkpointing.

    Weights are rounded to BF16 for every ``dtype``, so that only the arithmetic differs.
    """
    config: Tree = case.part["config"]
    shallow = {key: min(DEPTH, config[key]) for key in DEPTHS if key in config}
    with torch.random.fork_rng(devices=[setting.device] if setting.gpu else []):
        torch.manual_seed(0)
        transformer: Diffusers = case.build(setting.device, torch.bfloat16, **shallow)
    transformer.to(dtype)
    add_adapters(transformer, Lora(), case.family, names=("current",))
    change(transformer)
    transformer.enable_gradient_checkpointing()
    x, _, cond = case.inputs(BATCH, setting.device)
    sigmas = torch.full((BATCH,), SIGMA, device=setting.device)
    with use_adapter(transformer, "current"):
        velocity = case.family.velocity(transformer, x, sigmas, cond.to(dtype=dtype))
        (velocity - x).square().mean().backward()
    synchronize(setting.device)
    grads = [p.grad for p in transformer.parameters() if p.grad is not None]
    return torch.cat([grad.float().flatten() for grad in grads]).cpu()
