"""Helpers for tests of plans: tiny pipelines of every family, and configurations of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from policy import pass_cost
from policy.families import Family
from policy.sampling.noise import noise_for
from tests.cluster.runs import tiny_config
from tests.tiny_families import SETTINGS


class Directories:
    """Directories of tiny pipelines by family, each made on first use."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request = request

    def __getitem__(self, name: str) -> Path:
        return self.request.getfixturevalue(f"tiny_{name}_dir")


def run_of(name: str, directory: Path, root: Path, **changes: Any) -> RunConfig:
    model = {f"model__{key}": value for key, value in SETTINGS[name].items()}
    return tiny_config(directory, root, name, model__family=name, **model, **changes)


def of_work(family: Family, rows: int) -> tuple[torch.Tensor, Any]:
    return noise_for(range(rows), family.latent_shape), pass_cost.conditioning_like(
        family, rows, torch.float32, "cpu"
    )
