"""Every family's denoiser with adapters, compiled: which graphs there are, what they compute."""

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


def families(*quick: str) -> list[Any]:
    """Values of ``name``: a family of every class of denoisers; but for ``quick`` they are slow."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in NAMES
        if name not in TWINS.values()
    ]


def inputs_of(family: Family, dtype: torch.dtype):
    """x, sigma and conditioning of ROWS images."""
    cond = conditioning_like(family, ROWS, dtype, "cpu")
    generator = torch.Generator().manual_seed(5)
    for tensor in cond.tensors.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return noise_for(range(ROWS), family.latent_shape), torch.full((ROWS,), 0.5), cond


@pytest.mark.parametrize("name", families("sd3", "sana"))
@torch.no_grad()
def test_merged_weights_run_the_bare_models_graphs(name, directory, randomise, graphs):
    """Whatever is merged, and however often, the graphs are those of the first pass, and their
    operations those of the model without adapters; what they draw has the bits of new weights.
    """
    family = family_for(tiny_model(name, directory))
    transformer = family.load_transformer("cpu", torch.bfloat16)
    given = inputs_of(family, torch.bfloat16)
    family.velocity(compiled(transformer, CPU), *given)
    bare = set(graphs)
    torch._dynamo.reset()
    graphs.clear()
    add_adapters(transformer, LORA, family)
    denoiser, drawn, first = compiled(transformer, CPU), [], []
    for seed, adapter in enumerate(("old", "ema", None, "old")):
        if adapter is not None:
            randomise(transformer, adapter, seed)
        with merged(transformer, adapter):
            drawn.append(family.velocity(denoiser, *given))
            assert torch.equal(drawn[-1], family.velocity(transformer, *given))
        first = first or list(graphs)
        assert set(first) == bare and graphs == first
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == 4


@torch.no_grad()
def test_adapted_blocks_of_one_kind_are_one_graph(graphs):
    """However deep the model is: the shipped one has more blocks than kinds of blocks."""
    family = family_for(Model(path="shapes", height=32, width=32, max_sequence_length=1))
    transformer = family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, LORA, family)
    with merged(transformer, "old"):
        family.velocity(compiled(transformer, CPU), *inputs_of(family, torch.float32))
    assert len(graphs) == 2 < len(transformer.transformer_blocks)


@pytest.mark.parametrize("name", families("wan"))
def test_training_has_a_graph_per_policy_and_no_more(name, directory, graphs, monkeypatch):
    """Three policies, in batches of two sizes, with a share of the blocks computed again: a second
    iteration makes no graph, and both have the bits of eager ones, as nothing is fused here.
    """
    settings = {"lr": 1e-2, "batch_size": 3, "gradient_checkpointing": 0.5}
    regenerate = {"steps": 4, "precision": "bf16"}
    eager, trainer = (
        trainer_of(name, directory, regenerate=regenerate, optimizer=settings | {"compile": c})
        for c in (False, True)
    )
    first, real, again = 0, checkpointing.checkpoint, []
    monkeypatch.setattr(
        checkpointing, "checkpoint", lambda *a, **more: again.append(a) or real(*a, **more)
    )
    for iteration in (1, 2):
        expected = eager.update(iteration, groups_of(eager))
        recomputed = len(again)
        assert trainer.update(iteration, groups_of(trainer)) == expected
        assert trainer.checksum() == eager.checksum()
        assert len(again) == 2 * recomputed > 0
        again.clear()
        first = first or len(graphs)
    assert len(graphs) == first
