"""Options that would silently do something else, and damaged run directories: one line, exit code
2.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from analysis.compare.cells import read_comparison
from analysis.compare.request import Request
from cli.main import main
from cluster.driver import offline
from cluster.driver.evaluation import Evaluation
from configs.load import ConfigError, load
from learner import checkpoint
from records.rundir import RunDirectory
from tests.cluster.runs import tiny_config


@pytest.fixture
def rundir(tiny_sd3_dir, tmp_path) -> RunDirectory:
    config = tiny_config(tiny_sd3_dir, tmp_path, "made")
    made = RunDirectory.of(config)
    made.create(config)
    checkpoint.write(made.checkpoints / "step_000003", {}, {})
    return made


def line(capsys) -> str:
    (only,) = capsys.readouterr().err.splitlines()
    return only


# ---- compare


@pytest.mark.parametrize("key", ["seed", "name", "run_root"])
def test_keys_that_a_comparison_sets_cannot_be_varied(tmp_path, key):
    with pytest.raises(ConfigError, match=f"--vary {key}=1,2: a cell cannot set {key}: "):
        read_comparison(Request("quickstart", vary=(f"{key}=1,2",)))
    file = tmp_path / "mine.toml"
    text = 'base = "quickstart"\n[[cells]]\nname = "a"\n[[cells]]\nname = "b"\n'
    file.write_text(f'{text}set = {{ "{key}" = 1 }}\n')
    with pytest.raises(ConfigError, match=f"cell 'b': set: {key}: a cell cannot set {key}: "):
        read_comparison(Request(str(file)))
    file.write_text(f"{text}[vary]\n{key} = [1, 2]\n")
    with pytest.raises(ConfigError, match=f"vary: {key}: a cell cannot set"):
        read_comparison(Request(str(file)))


def test_the_first_seed_of_a_comparison_can_be_set():
    assert read_comparison(
        Request("quickstart", seeds=2, overrides=("seed=5", "run_root=/x"))
    ).seeds == (5, 6)


# ---- fidelity


def test_a_checkpoint_without_a_run_is_refused(capsys):
    assert main(["fidelity", "quickstart", "--checkpoint", "3"]) == 2
    assert line(capsys) == "fidelity: --checkpoint 3 needs --run DIR, not a configuration"


# ---- evaluate


def test_a_given_prompt_file_is_used_completely(rundir, tmp_path, monkeypatch):
    used = []

    async def scored(rundir, config, path, prompts):
        used.append(len(prompts))
        values = np.zeros((len(prompts), 2))
        result = Evaluation(values, {"a": values}, np.zeros((0, 2, 3, 1, 1), np.uint8))
        return {"base": result, "ema": result}

    monkeypatch.setattr(offline, "_evaluate_all", scored)
    monkeypatch.setattr(offline, "join_or_start_ray", lambda config: False)
    monkeypatch.setattr(offline.ray, "shutdown", lambda: None)  # later tests use it
    for folder, count in (("one", 7), ("two", 9)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hard ones.txt").write_text("a cat\n" * count)
    config, folder = rundir.configuration(), rundir.path / "evaluations"
    assert config.evaluate.prompts == 4

    def evaluated(given: Path | None, name: str, prompts: int) -> str:
        lines = offline.evaluate_run(rundir, config, 3, given and str(given))
        assert used[-1] == prompts
        saved = json.loads((folder / f"{name}.json").read_text())
        assert (saved["prompts"], saved["prompt_file"]) == (
            prompts,
            str(given or config.prompts.test),
        )
        return lines[0]

    one, two = tmp_path / "one" / "hard ones.txt", tmp_path / "two" / "hard ones.txt"
    assert evaluated(None, "compare_step_000003", 4).startswith("step_000003, 4 prompts x 2 seeds")
    for _ in range(2):  # the second run starts after the first
        assert evaluated(one, "compare_step_000003-hard_ones", 7).startswith(
            f"step_000003, {one}, 7 prompts"
        )
    evaluated(two, "compare_step_000003-hard_ones-2", 9)
    assert len(list(folder.glob("*.json"))) == 3
    assert json.loads((folder / "compare_step_000003.json").read_text())["prompts"] == 4


# ---- directories that are no runs


@pytest.mark.parametrize("text", ["[]", '"x"', "3", '{"config": []}', '{"config": 3}', "\xff\xfe"])
@pytest.mark.parametrize("command", ["report", "evaluate", "export", "fidelity"])
def test_a_configuration_of_another_shape(tmp_path, capsys, command, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    given = (
        ["--run", str(tmp_path)]
        if command == "fidelity"
        else [str(tmp_path), *(["out"] if command == "export" else [])]
    )
    assert main([command, *given]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- names that do not exist


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["fidelity", "--run", ""], "no readable run"),
        (["plan", "quickstart", "--from", ""], "no readable run"),
        (["doctor", ""], ": no preset of that name"),
        (["compare", "--runs", "x" * 5000], ": no run found"),
        (["status", "--address", "localhost:-1"], "'-1' is not a port; give host:port of its head"),
        (["scale", "--rollout", "2", "--address", f"{'a' * 70}:1"], "no Ray cluster answers there"),
    ],
)
def test_invalid_names_are_one_line(command, expected, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert main(command) == 2
    assert expected in line(capsys)


def test_a_prompt_file_with_a_zero_byte(rundir, capsys):
    assert main(["evaluate", str(rundir.path), "--prompts", "a\0b"]) == 2
    assert line(capsys) == r"prompts: 'a\x00b' is not a file name"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([f'run_root="{"x" * 5000}"'], "File name too long: set run_root=DIR"),
        (['run_root="/etc/passwd/runs"'], "run root: /etc/passwd is not a directory"),
        (
            ["logging.prometheus_port=9999", 'logging.prometheus_host="a\\u0000b"'],
            "cannot be served (host name must not contain null character)",
        ),
    ],
)
def test_the_doctor_reports_invalid_configurations(settings, expected, capsys):
    given = [part for each in settings for part in ("--set", each)]
    assert main(["doctor", "quickstart", *given]) == 2
    (failed,) = [
        message for message in capsys.readouterr().out.splitlines() if message[:6] == "failed"
    ]
    assert expected in failed


def test_an_undrawable_report_is_one_line(rundir, capsys, monkeypatch):
    def defect(run, live):
        raise KeyError("before")

    monkeypatch.setattr("analysis.report.page.render", defect)
    assert main(["report", str(rundir.path)]) == 2
    message = "the report cannot be drawn from its files (KeyError: 'before')"
    assert line(capsys) == f"{rundir.path}: {message}"


def test_an_unwritable_report_is_one_line(rundir, capsys):
    (rundir.path / "report.html").mkdir()
    assert main(["report", str(rundir.path)]) == 2
    assert line(capsys) == f"{rundir.path / 'report.html'}: cannot be written (Is a directory)"
    shutil.rmtree(rundir.path / "report.html")
    assert main(["report", str(rundir.path)]) == 0


def test_actors_of_full_size_models_have_a_long_start_deadline():
    assert load("sana-sol_rl-hpsv2").services.start_deadline_s == 3600


# ---- settings


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            ["plan", "quickstart", "lora.rank=3", "seed=1"],
            ": settings are given as --set lora.rank=3",
        ),
        (["plan", "quickstart", "--lora.rank=3"], ": settings are given as --set lora.rank=3"),
        (["plan", "quickstart", "--unknown"], ""),
        (["scale", "--rollout=2", "lora.rank=3"], ""),  # the command has no settings
    ],
)
def test_a_setting_without_its_option_is_refused_with_advice(capsys, arguments, advice):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"unrecognized arguments: {' '.join(arguments[2:])}{advice}")


def test_a_comparison_is_not_written_to_a_path_that_no_configuration_can_hold(capsys, tmp_path):
    assert main(["compare", "quickstart", "--out", str(tmp_path / "\udcff")]) == 2
    assert "a path must not be empty" in line(capsys)
    assert not list(tmp_path.iterdir())
