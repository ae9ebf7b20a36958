"""A new backend or a new objective needs only one file and one row in a table. Everything else uses
them automatically.
"""

import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

import configs.backends
import configs.objectives
import learner.objectives
import policy.precision
from configs.load import load
from configs.lookup import load_class
from configs.objectives import SETTINGS
from learner.objectives import build_objective
from planning.assumptions import Assumptions, backend_of, device_of, with_format
from policy import meta
from policy.families import family_for
from policy.precision.backends import (
    Backend,
    finer_backend,
    precision_levels,
    resolve_backend,
    wire_formats,
)
from policy.precision.wire import assemble
from tests.tiny_families import tiny_model

FILE = """
from policy.precision.emulated import EmulatedNVFP4


class Coarse(EmulatedNVFP4):
    name = "coarse"
    wire_format = "nvfp2"
    wire_version = 7
    bits = 2.5
    auto_on = "cuda"
    capability = (9, 0)
    speedup = 8
"""
ROW = '    "coarse": "policy.precision.coarse:Coarse",\n'


def with_row(module, before: str, row: str) -> dict:
    """Execute a module with one more row in its table, and return its names."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(before) == 1
    result: dict = {"__name__": module.__name__}
    exec(compile(source.replace(before, row + before), module.__file__, "exec"), result)
    return result


@pytest.fixture
def coarse(monkeypatch, tmp_path):
    """The new backend, added by its file and its row before all others."""
    (tmp_path / "coarse.py").write_text(FILE)
    monkeypatch.setattr(policy.precision, "__path__", [*policy.precision.__path__, str(tmp_path)])
    names = with_row(configs.backends, '    "te_nvfp4": ', ROW)
    assert TypeAdapter(names["BackendName"]).validate_python("coarse") == "coarse"
    backends = {name: load_class(row, Backend)() for name, row in names["BACKENDS"].items()}
    monkeypatch.setattr("policy.precision.backends.BACKENDS", backends)
    monkeypatch.setattr("planning.assumptions.BACKENDS", backends)
    yield backends["coarse"]
    sys.modules.pop("policy.precision.coarse")


def test_new_backend_needs_only_a_file_and_a_row(coarse, name, directory):
    assert precision_levels()[0] == ("coarse",)
    assert finer_backend("coarse", ("fp8", "emulated_nvfp4"), "fp32") == "emulated_nvfp4"
    assert resolve_backend("coarse", "cpu") == (coarse, "coarse: as configured")
    assert resolve_backend("auto", "cuda")[0] is coarse
    assert resolve_backend("auto", "cpu")[0].name == "emulated_nvfp4"
    assert wire_formats()["nvfp2"] == 7
    assert assemble([], 0, "nvfp2")[0].format_version == 7
    config = load("sd35_medium-sol_rl-pickscore", ["services.rollout.gpus=1"])
    assert backend_of(config, "H100")[0] is coarse
    device, accelerator = device_of(config, Assumptions(accelerator="H100"))
    assert device is not None
    assert with_format(device, accelerator, coarse).quantized_tflops == 8 * 989.5
    family = family_for(tiny_model(name, directory))
    _, rows, layers = meta.meta_explorer(family, coarse, (), torch.float32)
    assert set(layers) == {row.name for row in rows if row.quantized} != set()


TWIN = """
from typing import Literal

from learner.objectives.diffusion_nft import DiffusionNFT, DiffusionNFTSettings


class TwinSettings(DiffusionNFTSettings):
    name: Literal["twin"] = "twin"


class Twin(DiffusionNFT):
    Settings = TwinSettings
"""


def test_new_objective_needs_only_a_file_and_a_row(monkeypatch, tmp_path):
    (tmp_path / "twin.py").write_text(TWIN)
    path = [*learner.objectives.__path__, str(tmp_path)]
    monkeypatch.setattr(learner.objectives, "__path__", path)
    row = '    "twin": "learner.objectives.twin:Twin",\n'
    names = with_row(configs.objectives, '    "diffusion_nft": ', row)
    settings = TypeAdapter(names["Objective"]).validate_python({"name": "twin", "beta": 0.5})
    monkeypatch.setattr(learner.objectives, "OBJECTIVES", names["OBJECTIVES"])
    objective = build_objective(settings)
    assert type(objective).__name__ == "Twin" and settings.beta == 0.5
    assert type(build_objective(SETTINGS["diffusion_nft"]())).__name__ == "DiffusionNFT"
    sys.modules.pop("learner.objectives.twin")
