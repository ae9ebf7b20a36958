"""Fixtures: model families and adapters on the tiny pipelines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.sections import Model
from configs.training import Lora
from policy.families import Family, family_for
from policy.lora import add_adapters, load_adapter_state
from policy.sampling.sample import sample
from policy.types import Conditioning
from tests.tiny_families import NAMES
from tests.tiny_sd3 import TINY_HEIGHT, TINY_SEQUENCE, TINY_WIDTH

SEEDS = [1, 2, 3]
LORA = Lora(rank=4, alpha=8)


@pytest.fixture(params=NAMES)
def name(request) -> str:
    """The name of each model family in turn."""
    return request.param


@pytest.fixture
def directory(name, request) -> Path:
    """The directory of the family's tiny pipeline."""
    return request.getfixturevalue(f"tiny_{name}_dir")


@pytest.fixture(scope="session")
def tiny_model(tiny_sd3_dir: Path) -> Model:
    return Model(
        path=str(tiny_sd3_dir),
        height=TINY_HEIGHT,
        width=TINY_WIDTH,
        max_sequence_length=TINY_SEQUENCE,
    )


@pytest.fixture(scope="session")
def family(tiny_model: Model) -> Family:
    return family_for(tiny_model)


@pytest.fixture(scope="session")
def cond(family: Family) -> Conditioning:
    """The conditioning of two encoded prompts."""
    return family.load_text("cpu", torch.float32).encode(
        ["a red circle", "two blue crosses above a green square"]
    )


@pytest.fixture
def transformer(family: Family) -> torch.nn.Module:
    return family.load_transformer("cpu", torch.float32)


@pytest.fixture
def adapted(family: Family, transformer: torch.nn.Module) -> torch.nn.Module:
    """The transformer with the adapters current, old and ema. All are equal and have B = 0."""
    add_adapters(transformer, LORA, family, seed=1)
    return transformer


@pytest.fixture(scope="session")
def randomise() -> Callable[[torch.nn.Module, str, int], dict[str, torch.Tensor]]:
    """A function that sets random weights A and B in an adapter and returns them."""

    def fill(transformer: torch.nn.Module, name: str, seed: int) -> dict[str, torch.Tensor]:
        from policy.lora import adapter_state

        generator = torch.Generator().manual_seed(seed)
        state = {
            key: torch.randn(value.shape, generator=generator) * 0.2
            for key, value in adapter_state(transformer, name).items()
        }
        load_adapter_state(transformer, name, state)
        return state

    return fill


def latents(family, transformer, cond):
    return sample(family, transformer, cond.rows(0).repeat(3), SEEDS, 3, "euler")
