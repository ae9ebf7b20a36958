"""Stored counts of models, and counting only what a setting changes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from configs.load import EDITORS, MODELS, load
from planning import counting
from planning.plan import open_architecture
from policy.precision.backends import BACKENDS
from tools.count_models import ONE_GPU

KEPT = (
    *(f"{model}-sol_rl-hpsv2" for model in MODELS),
    *(f"{model}-sol_rl-vlm_edit" for model in EDITORS),
    *ONE_GPU,
)


@pytest.mark.parametrize("name", KEPT)
def test_counts_of_every_preset_are_stored(name):
    """In the formats that GPUs explore in, so that a plan is immediate."""
    config = load(name)
    assert all(
        counting.key_of(config, backend) in counting.kept_rows()
        for backend in ("torch_nvfp4", "fp8", "bf16")
    )
    other = load(name, ["lora.rank=8"])
    assert counting.key_of(other, "fp8") not in counting.kept_rows()


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("explore.chunk_size=5", "explored"),
        ("regenerate.batch_size=5", "regenerated"),
        ("optimizer.batch_size=5", "trained"),
        ("optimizer.gradient_checkpointing=0.5", "trained"),
    ],
)
def test_a_setting_changes_one_part_of_the_stored_counts(monkeypatch, setting, part):
    counted: list[str] = []

    def recorded(name: str, *_: object) -> dict[str, None]:
        counted.append(name)
        return dict.fromkeys(counting.PARTS[name].counts)

    monkeypatch.setattr(counting, "_count_part", recorded)
    backend = BACKENDS["torch_nvfp4"]
    config = load("sana-sol_rl-hpsv2")
    with open_architecture(config) as (family, _):
        before = counting.counts_of(config, family, backend)
        after = counting.counts_of(load("sana-sol_rl-hpsv2", [setting]), family, backend)
    assert counted == [part]
    for name, parts in counting.PARTS.items():
        for field in parts.counts:
            expected = None if name == part else getattr(before, field)
            assert getattr(after, field) == expected, field


def test_the_parts_fill_all_counts_once():
    filled = [field for part in counting.PARTS.values() for field in part.counts]
    assert sorted(filled) == sorted(field.name for field in fields(counting.Counts))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["explore.chunk_size=3", "regenerate.batch_size=3"])
def test_parts_of_stored_counts_equal_counting_all(setting):
    config, backend = load("sd35_medium-sol_rl-24gb", [setting]), BACKENDS["fp8"]
    with open_architecture(config) as (family, _):
        assert counting.counts_of(config, family, backend) == counting.count(
            config, family, backend
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_stored_counts_are_up_to_date(model):
    config = load(f"{model}-sol_rl-hpsv2")
    with open_architecture(config) as (family, _):
        for backend in ("torch_nvfp4", "fp8", "bf16"):
            kept = counting.counts_of(config, family, BACKENDS[backend])
            assert kept == counting.count(config, family, BACKENDS[backend])
