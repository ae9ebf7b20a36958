"""Sharding the base model in a group of one process: every hook of FSDP2 runs, and every shard is
complete. ``tests/learner/test_group.py`` tests that two processes with half of the base each
compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.training import Lora
from learner.replicas import leave_group, open_store
from planning.sizes import shards_of
from policy.families import Family, family_for
from policy.lora import add_adapters, trainable, use_adapter
from policy.merging import merged, merged_weights
from policy.pass_cost import conditioning_like, held_bytes
from policy.sampling.guidance import Guided, velocity
from policy.sharding import blocks_of, shard_base
from tests.learner.together import stored_base_bytes
from tests.tiny_families import NAMES, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    store, _ = open_store("127.0.0.1", 60)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    leave_group()


def adapted(family: Family, dtype: torch.dtype = torch.float32) -> Any:
    """Return a denoiser with an adapter that is not zero. It is the same for every call."""
    transformer = family.load_transformer("cpu", dtype)
    add_adapters(transformer, Lora(rank=2, alpha=4), family, names=("current",), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in trainable(transformer):
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return transformer


def velocities_and_gradients(
    family: Family, transformer: Any, guided: Guided | None = None
) -> list[torch.Tensor]:
    """Return the velocities with the adapter, with merged weights and without an adapter, then the
    gradients of the adapter.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, *family.latent_shape, generator=generator)
    dtype = next(transformer.parameters()).dtype
    cond = conditioning_like(family, 2, dtype, "cpu")
    cond = cond.with_negative(cond.rows(0))
    rows = cond if guided else cond.split_negative()[0]
    sigma = torch.tensor([0.7, 0.7])

    def current_velocity() -> torch.Tensor:
        return velocity(family, transformer, x, sigma, rows, guided)

    result: list[torch.Tensor] = []
    for name in ("current", None):
        for weights_of in (use_adapter, merged):
            with torch.no_grad(), weights_of(transformer, name):
                result.append(current_velocity())
    with use_adapter(transformer, "current"):
        (current_velocity() - x).square().mean().backward()
    return result + [p.grad for _, p in trainable(transformer) if p.grad is not None]


def assert_same(family: Family, guided: Guided | None = None, checkpointing: bool = False) -> None:
    whole, sharded = adapted(family), adapted(family)
    for each in (whole, sharded):
        if checkpointing:
            each.enable_gradient_checkpointing()
    size = stored_base_bytes(sharded)
    shard_base(sharded, CPU)
    assert stored_base_bytes(sharded) == size
    expected, actual = (
        velocities_and_gradients(family, whole, guided),
        velocities_and_gradients(family, sharded, guided),
    )
    assert len(actual) == len(expected) == 4 + len(trainable(whole))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert not torch.equal(actual[0], actual[2])  # the adapter changes the velocity
    rows = zip(merged_weights(sharded, "current"), merged_weights(whole, "current"), strict=True)
    assert all(one == other and torch.equal(a, b) for (one, a), (other, b) in rows)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_base_of_every_family_gives_the_same_bits(group, name, request):
    """Velocities and gradients are equal, because no family uses a block except by calling its
    forward method.
    """
    assert_same(family_for(tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir"))))


def test_sharded_base_supports_checkpointing_and_guidance(group, tiny_sd3_dir):
    """Gradient checkpointing gathers the shards once more. With guidance, both forward passes run
    before both backward passes.
    """
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    assert_same(family, checkpointing=True)
    assert_same(family, Guided(3.0, False))
    assert_same(family, Guided(3.0, False), checkpointing=True)


def test_gathered_bytes_are_counted(tiny_sd3_dir):
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    transformer = family.load_transformer("cpu", torch.float32)
    blocks = [held_bytes(block) for block in blocks_of(transformer)]
    counted = shards_of(family, torch.float32)
    assert counted.largest == max(blocks)
    assert counted.always + sum(blocks) == held_bytes(transformer)
