"""Settings that ``sol-rl plan --faster`` suggests: which are tried, kept and printed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cli.main import main
from configs.load import ConfigError, load
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.savings import changed
from simulator import speedups
from simulator.speedups import SPEEDUPS, Speedup


def plan_of(config: RunConfig) -> Any:
    """Return a made-up plan: 100 s, less 20 % or 0.5 % by settings; one of them is impossible."""
    if config.prompts.encode_once:
        raise ConfigError("there is no room in host memory")
    seconds = 100.0
    seconds *= 0.8 if config.optimizer.compile else 1
    seconds *= 0.995 if config.optimizer.deal == "even" else 1
    seconds *= 0.8 if config.explore_ahead else 1
    gpus = [SimpleNamespace(count=6), SimpleNamespace(count=2)]
    return SimpleNamespace(
        config=config,
        scenarios=SimpleNamespace(mine=seconds),
        outlook=SimpleNamespace(gpus=gpus, fullest_gb=seconds / 2),
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    planned: list[RunConfig] = []

    def plan(config: RunConfig, given: Any, nodes: Any) -> Any:
        planned.append(config)
        return plan_of(config)

    monkeypatch.setattr(speedups, "make_plan", plan)
    monkeypatch.setattr(speedups, "run", lambda mine: SimpleNamespace(iteration=mine))
    return planned


def found(config: RunConfig) -> list[str]:
    return [each.line for each in speedups.speedups(config, plan_of(config), Assumptions())]


def test_settings_are_kept_if_they_gain_a_percent(made_up: list[RunConfig]):
    """1,000 iterations of 80 s on 8 GPUs take 177.8 GPU-hours."""
    assert found(load("sana-sol_rl-hpsv2")) == [
        "      80.0 s, 178 GPU-hours, 40.0 GB on the fullest GPU, with --set"
        " optimizer.compile=true: training is compiled; results differ by rounding",
        "      64.0 s, 142 GPU-hours, 32.0 GB on the fullest GPU, with --set explore_ahead=1:"
        " seeds are ranked by a policy that is one update old",
    ]
    last = made_up[-1]
    assert last.optimizer.compile and last.optimizer.deal == "random"


def test_settings_of_the_run_are_not_tried(made_up: list[RunConfig]):
    """The presets compile exploring and regenerating, and two settings are given."""
    config = load("sana-sol_rl-hpsv2", ["explore_ahead=1", "optimizer.compile=true"])
    assert not found(config)
    assert len(made_up) == len(SPEEDUPS) - 4


def test_every_setting_is_possible():
    config = load("sana-sol_rl-hpsv2")
    for speedup in SPEEDUPS:
        key, _, value = speedup.setting.partition("=")
        assert changed(config, {key: value})


def test_without_a_prediction_nothing_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "quickstart", "--faster"]) == 2
    assert capsys.readouterr() == (
        "",
        "--faster: no service requests a GPU, so there is no prediction\n",
    )
    assert main(["plan", "quickstart", "--faster", "--from", "runs/x"]) == 2
    assert "leave out --from" in capsys.readouterr().err


def test_suggestions_follow_the_plan(
    made_up: list[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("planning.plan.make_plan", lambda config, *given: plan_of(config))
    monkeypatch.setattr("planning.steps.step_lines", lambda config: ["a table"])
    monkeypatch.setattr("cli.plan._print", lambda options, plan, lines: print("\n".join(lines)))
    assert main(["plan", "sana-sol_rl-hpsv2", "--faster"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "a table" and out[2].startswith("faster      by prediction")
    assert [line.split(" s,")[0].strip() for line in out[3:]] == ["80.0", "64.0"]


@pytest.mark.slow
def test_compiled_training_is_predicted_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The command prints the same seconds as a plan with that setting."""
    only = Speedup("optimizer.compile=true", "what it changes")
    monkeypatch.setattr(speedups, "SPEEDUPS", (only,))
    command = ["plan", "sana-sol_rl-hpsv2", "--gpus", "8", "--accelerator", "B200", "--json"]
    assert main([*command, "--faster"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main([*command, "--set", only.setting]) == 0
    after = json.loads(capsys.readouterr().out)
    (row,) = before["faster"]
    assert row["iteration_s"] == after["iteration_s"] < 0.9 * before["iteration_s"]
    assert row["setting"] == only.setting and "faster" not in after
