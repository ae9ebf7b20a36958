"""Settings that make a run fit on a GPU that is too small for it, and the presets for 24 GB."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cli.main import main
from configs.load import load
from planning import savings
from planning.assumptions import Assumptions
from planning.layouts.choose import DoesNotFit
from planning.layouts.resolve import needs_layout
from planning.plan import layout_of
from planning.savings import changed, lowers, savings_lines

ONE = Assumptions(accelerator="RTX 4090", gpus=1, node_gpus=1, node_cpus=16)
PRESETS = ("sd35_medium-sol_rl-24gb", "z_image-sol_rl-24gb")


def lines(monkeypatch: pytest.MonkeyPatch, room: float, *overrides: str) -> list[str]:
    """Return the suggestions for a GPU of 24 GB with made-up needs.

    ``room`` is for the text encoders; each image in a pass needs a GB.
    """

    def layout(config: Any, given: Any, nodes: Any) -> Any:
        assert needs_layout(config)  # settings that were left to the layout still are
        encoder = 0 if config.prompts.encode_once else room
        gb = 10 + encoder + config.optimizer.batch_size
        if gb > 24:
            raise DoesNotFit("too large", gb, gb - 24)
        return SimpleNamespace(best=SimpleNamespace(gb=gb))

    monkeypatch.setattr(savings, "layout_of", layout)
    return list(savings_lines(load("sd35_medium-sol_rl-hpsv2", overrides), ONE))


def test_savings_are_added_until_the_run_fits(monkeypatch: pytest.MonkeyPatch):
    assert lines(monkeypatch, 11) == [
        "    34.0 GB, 10.0 short, with --set prompts.encode_once=true: prompts are encoded at the"
        " start and kept in host memory",
        "    18.0 GB, fits, with --set explore.chunk_size=8 --set regenerate.batch_size=8 --set"
        " optimizer.batch_size=8: smaller passes use GPUs less well; results differ in the last"
        " bits",
    ]


def test_savings_in_use_are_not_suggested(monkeypatch: pytest.MonkeyPatch):
    given = ("prompts.encode_once=true", "optimizer.batch_size=4", "services.reward.gpus=0")
    (line,) = lines(monkeypatch, 11, *given, "optimizer.gradient_checkpointing=false")
    assert "fits, with --set optimizer.gradient_checkpointing=true:" in line
    config = load("sd35_medium-sol_rl-hpsv2", given)
    assert not lowers(config, "optimizer.batch_size=8") and lowers(config, "explore.chunk_size=8")
    assert changed(config, {"explore.chunk_size": "8"}).explore.chunk_size == 8


def test_missing_savings_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(savings, "SAVINGS", savings.SAVINGS[:1])
    assert lines(monkeypatch, 99)[-1] == (
        "  no other option saves memory: use fewer pixels or a larger GPU"
    )


def test_the_plan_command_suggests_savings(capsys: pytest.CaptureFixture[str]):
    """SD3.5 Medium's counts are stored, so the test counts nothing."""
    where = ["--accelerator", "RTX 4090", "--gpus", "1"]
    assert main(["plan", "sd35_medium-sol_rl-hpsv2", *where]) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    # with both sides in host memory between turns; together they need 34.6 GB
    message = (
        "29.8 GB on a RTX 4090 of 24 GB, 5.8 GB short; it fits with prompts.encode_once = true"
    )
    assert message in first
    assert "22.4 GB, fits, with --set prompts.encode_once=true:" in second


def tried_bases(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[str]:
    """Return the bases that are counted where nothing helps, and what the learner compiles with
    each.
    """
    tried: list[str] = []

    def layout(config: Any, given: Any, nodes: Any) -> Any:
        tried.append(f"{config.lora.base} {config.regenerate.compile}")
        raise DoesNotFit("too large", 99, 75)

    monkeypatch.setattr(savings, "layout_of", layout)
    recorded = list(savings_lines(load("sd35_large-sol_rl-hpsv2", overrides), ONE))
    if "int8 False" in tried:
        (line,) = (line for line in recorded if "int8" in line)
        assert '--set regenerate.compile=false --set lora.base="int8": ' in line
    return sorted(set(tried))


def test_a_packed_base_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    """The preset compiles, which excludes packing and shards: both changes are suggested
    together.
    """
    assert tried_bases(monkeypatch) == ["full False", "full True", "int8 False", "nf4 False"]


def test_incompatible_savings_are_skipped(monkeypatch: pytest.MonkeyPatch):
    assert tried_bases(monkeypatch, "explore.backend=bf16") == ["full False", "full True"]


def test_a_sharded_base_is_the_last_saving_and_replaces_packing(monkeypatch: pytest.MonkeyPatch):
    """Only with GPUs for two replicas, and only if the base may be whole."""
    tried: list[tuple[str, str]] = []

    def layout(config: Any, given: Any, nodes: Any) -> Any:
        tried.append((config.lora.base, config.services.learner.shard))
        several = config.services.learner.shard == "none" or given.gpus > 1
        raise DoesNotFit("too large", 99 if several else 0, 75 if several else 0)

    monkeypatch.setattr(savings, "layout_of", layout)
    config = load("flux1-sol_rl-hpsv2")
    four = Assumptions(accelerator="RTX 4090", gpus=4, node_gpus=4, node_cpus=16)
    message = list(savings_lines(config, four))
    assert tried[-1] == ("full", "base") and ("nf4", "none") in tried
    assert '--set services.learner.shard="base": each learner replica holds a part' in message[-2]
    message = list(savings_lines(config, ONE))
    assert tried[-1] == ("full", "base") and "shard" not in message[-2]
    shards = 'services.learner.shard="base"'
    eager = "regenerate.compile=false"
    for other in ("services.learner.replicas=1", "lora.base=nf4"):
        assert not lowers(load("flux1-sol_rl-hpsv2", [eager, other]), shards)
    assert lowers(load("flux1-sol_rl-hpsv2", [eager]), shards)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_for_24_gb_fits_there(name: str):
    choice = layout_of(load(name), ONE)
    assert choice is not None and 16 < choice.best.gb < 24
