"""``sol-rl fidelity`` on the tiny random model: its files, and full agreement of a proxy equal to
the truth.
"""

import json
import logging
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from analysis.fidelity.density import density_chart
from analysis.fidelity.measure import run
from analysis.fidelity.results import Measurement, Rewards, halves_of, summarise, tables
from analysis.measuring import backends, hide_loading_bars
from cli.main import main
from configs.load import ConfigError
from configs.sections import Selection
from learner.fidelity import conditional_density
from learner.trainer import Trainer
from policy.lora import adapter_state, load_adapter_state
from records.rundir import RunDirectory
from tests.cluster.runs import tiny_config, write_toml

NOISES = 24


@pytest.fixture
def config(tiny_sd3_dir, tmp_path):
    # one chunk for all seeds on both sides, so that batches, and with them the last bits, are equal
    return tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "faithful",
        explore__chunk_size=NOISES,
        regenerate__batch_size=NOISES,
    )


def test_full_precision_at_full_steps_is_the_truth_itself(config, tmp_path):
    message: list[str] = []
    out = tmp_path / "out"
    steps = (1, config.regenerate.steps)
    lines = run(
        config,
        Measurement(2, NOISES, steps, ("emulated_nvfp4", "fp32"), threads=1),
        out,
        message.append,
    )
    summary = json.loads((out / "fidelity.json").read_text())
    raw = json.loads((out / "rewards.json").read_text())
    rows = {(row["backend"], row["steps"]): row["measures"] for row in summary["rows"]}
    assert list(rows) == [(backend, n) for backend in ("emulated_nvfp4", "fp32") for n in steps]
    assert raw["proxies"][f"fp32/{steps[1]}"] == raw["truth"]
    assert rows["fp32", steps[1]] == summary["perfect"]
    assert raw["proxies"]["emulated_nvfp4/1"] != raw["proxies"]["fp32/1"] != raw["truth"]
    # a random ranking of 24 seeds has a tau of standard error 0.145 (0.10 over two prompts); NVFP4
    # at full steps ranks far better than that
    assert 0.3 < rows["emulated_nvfp4", steps[1]]["kendall_tau"]["mean"] < 1
    assert len(message) == 5 and message[0].startswith("truth: 48 images")
    assert any(re.match(r"\| fp32, 3 steps +\| 1\.000 \[1\.000, 1\.000\]", line) for line in lines)
    ET.fromstring((out / "density.svg").read_text())


def test_the_seeds_that_the_run_itself_would_choose_are_measured(config):
    """A run that keeps 4 of 8 chooses 2 best and 2 worst; the paper's 8 and 12 do not fit."""
    proxy, truth = np.arange(16.0).reshape(2, 8), np.arange(16.0).reshape(2, 8)
    small = config.model_copy(update={"selection": Selection(keep=4)})
    measured = Rewards(truth, {("fp32", 2): proxy[:, ::-1]}, {})
    summary = summarise(small, Measurement(2, 8, (2,), ("fp32",)), measured)
    assert summary["halves"] == (2, 4)
    # the worst seeds in the place of the best: ranks 7 and 8 of 8, and all contrast lost twice
    (row,) = summary["rows"]
    assert row["measures"]["top2_rank"]["mean"] == 7.5
    assert row["measures"]["contrast2"]["mean"] == -1
    assert summary["perfect"]["contrast4"]["mean"] == 1
    assert (
        "top/bottom-2" in "".join(tables(summary)) and "top8_rank" not in summary["no_information"]
    )
    assert halves_of(config.model_copy(update={"selection": Selection(keep=24)}), 96) == (4, 8, 12)


def test_the_same_command_twice_gives_the_same_numbers(config, tmp_path):
    expected = Measurement(2, NOISES, (2,), ("emulated_nvfp4",), threads=1)
    for name in ("a", "b"):
        run(config, expected, tmp_path / name, lambda text: None)
    assert (tmp_path / "a" / "rewards.json").read_text() == (
        tmp_path / "b" / "rewards.json"
    ).read_text()


def test_a_trained_policy_is_measured_with_its_own_weights(config, tmp_path, capsys):
    rundir = RunDirectory.of(config)
    rundir.create(config)
    trainer = Trainer(config)
    state = adapter_state(trainer.transformer, "old")
    noise = torch.Generator().manual_seed(0)
    load_adapter_state(
        trainer.transformer,
        "old",
        {k: v + 0.3 * torch.randn(v.shape, generator=noise) for k, v in state.items()},
    )
    trainer.save(rundir.checkpoints / "step_000002", {})
    command = [
        "fidelity",
        "--run",
        str(rundir.path),
        "--prompts",
        "1",
        "--seeds",
        str(NOISES),
        "--steps",
        "3",
        "--backends",
        "fp32",
    ]
    assert main(command) == 0
    trained = json.loads((rundir.path.parent / "faithful-fidelity" / "rewards.json").read_text())
    # learner and explorer hold the same trained weights
    assert trained["proxies"]["fp32/3"] == trained["truth"]
    run(config, Measurement(1, NOISES, (3,), ("fp32",)), tmp_path / "base", lambda text: None)
    assert json.loads((tmp_path / "base" / "rewards.json").read_text())["truth"] != trained["truth"]
    assert main([*command, "--checkpoint", "7"]) == 2
    assert "no checkpoint 7" in capsys.readouterr().err
    assert (
        main([*command, "--set", "regenerate.steps=2", "--set", "explore.scale_search=false"]) == 0
    )
    other = json.loads((rundir.path.parent / "faithful-fidelity" / "fidelity.json").read_text())
    assert other["truth"]["steps"] == 2
    assert other["explore"]["scale_search"] is False
    assert other["checkpoint"] == "step_000002"
    capsys.readouterr()
    assert main([*command, "--set", "lora.rank=8", "--set", "explore.steps=5"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "--set lora.rank: 4 -> 8: the policy was trained with that; what can be set is in seed,"
        " prompts, explore"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fidelity"], "--run DIR"),
        (["fidelity", "quickstart", "--run", "x"], "--run DIR"),
        (["fidelity", "quickstart", "--steps", "0"], "--steps 0: must be above 0"),
        (
            ["fidelity", "quickstart", "--seeds", "10"],
            "--seeds 10: selection.keep = 24 needs at least 24: give more seeds, or --set",
        ),
        (
            ["fidelity", "quickstart", "--backends", "nvfp3"],
            "--backends: 'nvfp3' is unknown: use auto, te_nvfp4",
        ),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(tmp_path.iterdir())


def test_the_backend_chosen_by_auto_is_named(monkeypatch):
    monkeypatch.setattr("analysis.measuring.device", lambda: torch.device("cpu"))
    message: list[str] = []
    assert list(backends(("auto", "fp8", "emulated_nvfp4"), message.append)) == [
        "emulated_nvfp4",
        "fp8",
    ]
    (line,) = message
    assert line.startswith("emulated_nvfp4 (auto: there is no NVFP4 kernel for cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path='/no/such'", "no directory '/no/such'"),
        ("model.family='flux'", "but family 'flux' is a FluxPipeline"),
        (
            "lora.targets=['attn.query']",
            ("no linear layer of the transformer has a name that ends in 'attn.query'"),
        ),
        ("explore.modules_to_not_convert=['*.nothing']", "'*.nothing' matches no module"),
    ],
)
def test_an_invalid_model_is_one_line_before_loading(config, tmp_path, capsys, override, message):
    file = write_toml(config, tmp_path)
    assert (
        main(
            [
                "fidelity",
                str(file),
                "--prompts",
                "1",
                "--seeds",
                str(NOISES),
                "--set",
                override,
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line and not (tmp_path / "o").exists()


def test_only_prompts_with_missing_rewards_cause_a_warning():
    def shown(text: str) -> bool:
        record = logging.makeLogRecord({"msg": text, "levelno": logging.WARNING})
        return all(handler.filter(record) for handler in logging.getLogger("diffusers").handlers)

    cut = (
        "The following part of your input was truncated because `max_sequence_length` is set to  1"
        " tokens: "
    )
    hide_loading_bars()
    assert logging.getLogger("diffusers").handlers
    assert [shown(text) for text in (f"{cut}['']", f"{cut}['a tail']", "something else ['']")] == [
        False,
        True,
        True,
    ]


def test_too_many_prompts_are_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="has only 4: use fewer"):
        run(config, Measurement(prompts=5), tmp_path / "out", lambda text: None)


def test_tables_contain_the_values_of_the_arrays(config):
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((6, 96)).astype(np.float32)
    rewards = Rewards(truth, {("emulated_nvfp4", 6): -truth}, {})
    lines = tables(summarise(config, Measurement(prompts=6), rewards))
    text = "\n".join(lines)
    assert re.search(r"emulated_nvfp4, 6 steps +\| -1\.000 \[-1\.000, -1\.000\]", text)
    # reversed: the best twelve by proxy are the true worst
    assert "90.5 [90.5, 90.5] / 6.5 [6.5, 6.5]" in text
    assert "6.5 [6.5, 6.5] / 90.5 [90.5, 90.5]" in text  # the true ranking itself
    assert "48.5 / 48.5" in text  # random


def test_the_chart_shows_a_perfect_proxy_as_a_rising_diagonal():
    truth = np.random.default_rng(0).standard_normal((2, 96))
    chart = ET.fromstring(
        density_chart({"perfect & <exact>": conditional_density(truth, truth, 4)}, "t", 96)
    )
    dark = [
        r
        for r in chart.iter("{http://www.w3.org/2000/svg}rect")
        if r.get("fill") == density_colour(4 / 8)
    ]
    places = [(float(r.get("x")), float(r.get("y"))) for r in dark if r.get("stroke") is None]
    assert len(places) == 4
    # points further right are also further up
    assert sorted(places) == sorted(places, key=lambda place: -place[1])
    ends = [
        float(text.get("x")) + 7 * len(text.text)
        for text in chart.iter("{http://www.w3.org/2000/svg}text")
        if not text.get("text-anchor")
    ]
    # letters are 7 pixels wide at 11 or 14: nothing is cut off, with one panel either
    assert max(ends) <= float(chart.get("width"))


def density_colour(share: float) -> str:
    """Return the color of a share: 0.5 is half way between #f7fbff and #08306b."""
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}"
        for a, b in zip((247, 251, 255), (8, 48, 107), strict=True)
    )
