"""The compiled denoiser of every family, with adapters: its graphs and its results."""

from typing import Any

import pytest
import torch

import policy.checkpointing as checkpointing
from configs.sections import Model
from policy.families import Family, family_for
from policy.lora import add_adapters
from policy.merging import merged
from policy.pass_cost import conditioning_like
from policy.precision.compiling import compiled
from policy.sampling.noise import noise_for
from tests.policy.conftest import LORA
from tests.policy.test_families_training import groups_of, trainer_of
from tests.tiny_families import NAMES, TWINS, tiny_model

CPU = torch.device("cpu")
ROWS = 2


def families(*fast: str) -> list[Any]:
    """Return the values of ``name``: one family of every class of denoisers. All except ``fast``
    are marked slow.
    """
    return [
        pytest.param(name, marks=() if name in fast else pytest.mark.slow)
        for name in NAMES
        if name not in TWINS.values()
    ]


def inputs_of(family: Family, dtype: torch.dtype):
    """Return x, sigma and conditioning of ROWS images."""
    cond = conditioning_like(family, ROWS, dtype, "cpu")
    generator = torch.Generator().manual_seed(5)
    for tensor in cond.tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return noise_for(range(ROWS), family.latent_shape), torch.full((ROWS,), 0.5), cond


@pytest.mark.parametrize("name", families("sd3", "sana"))
@torch.no_grad()
def test_merged_weights_use_the_graphs_of_the_model_without_adapters(
    name, directory, randomise, graphs
):
    """Whatever is merged, and however often, only the graphs of the first pass exist, and their
    operations are those of the model without adapters. Results use the newly merged weights bit for
    bit.
    """
    family = family_for(tiny_model(name, directory))
    transformer = family.load_transformer("cpu", torch.bfloat16)
    inputs = inputs_of(family, torch.bfloat16)
    family.velocity(compiled(transformer, CPU), *inputs)
    graphs_without_adapters = set(graphs)
    torch._dynamo.reset()
    graphs.clear()
    add_adapters(transformer, LORA, family)
    denoiser, velocities, first = compiled(transformer, CPU), [], []
    for seed, adapter in enumerate(("old", "ema", None, "old")):
        if adapter is not None:
            randomise(transformer, adapter, seed)
        with merged(transformer, adapter):
            velocities.append(family.velocity(denoiser, *inputs))
            assert torch.equal(velocities[-1], family.velocity(transformer, *inputs))
        first = first or list(graphs)
        assert set(first) == graphs_without_adapters and graphs == first
    assert len({tuple(velocity.flatten().tolist()) for velocity in velocities}) == 4


@torch.no_grad()
def test_adapted_blocks_of_one_kind_share_one_graph(graphs):
    """The number of graphs does not depend on the depth of the model: the shipped model has more
    blocks than kinds of blocks.
    """
    family = family_for(Model(path="shapes", height=32, width=32, max_sequence_length=1))
    transformer = family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, LORA, family)
    with merged(transformer, "old"):
        family.velocity(compiled(transformer, CPU), *inputs_of(family, torch.float32))
    assert len(graphs) == 2 < len(transformer.transformer_blocks)


@pytest.mark.parametrize("name", families("wan"))
def test_second_training_iteration_makes_no_new_graph(name, directory, graphs, monkeypatch):
    """Training uses three policies, two batch sizes, and recomputes a share of the blocks. The
    second iteration makes no new graph. Both iterations equal eager ones bit for bit, because the
    test compiler fuses nothing.
    """
    settings = {"lr": 1e-2, "batch_size": 3, "gradient_checkpointing": 0.5}
    regenerate = {"steps": 4, "precision": "bf16"}
    eager, trainer = (
        trainer_of(name, directory, regenerate=regenerate, optimizer=settings | {"compile": c})
        for c in (False, True)
    )
    first, real, recomputed_calls = 0, checkpointing.checkpoint, []
    monkeypatch.setattr(
        checkpointing,
        "checkpoint",
        lambda *a, **more: recomputed_calls.append(a) or real(*a, **more),
    )
    for iteration in (1, 2):
        expected = eager.update(iteration, groups_of(eager))
        recomputed = len(recomputed_calls)
        assert trainer.update(iteration, groups_of(trainer)) == expected
        assert trainer.checksum() == eager.checksum()
        assert len(recomputed_calls) == 2 * recomputed > 0
        recomputed_calls.clear()
        first = first or len(graphs)
    assert len(graphs) == first
