"""Submitting: the files that are sent, and the job that Ray runs.

The slow test uses a real head with its dashboard.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import _parser, main
from cluster.jobs import submit as jobs
from cluster.jobs.dashboard import job_client
from configs.load import ConfigError, load
from tests.cluster.head import ROOT, Head, wait_for
from tests.cluster.runs import adapters, tiny_config, write_toml


@pytest.mark.parametrize("resume", ["--resume", "--auto-resume"])
def test_the_entrypoint_survives_a_shell(resume):
    line = jobs.entrypoint("my configs/a b.toml", ['name="x y"', "run_root=/data/$HOME"], resume)
    expected = [
        "python",
        "-m",
        "cluster",
        "train",
        "my configs/a b.toml",
        "--set",
        'name="x y"',
        "--set",
        "run_root=/data/$HOME",
    ]
    assert shlex.split(line) == [*expected, resume]
    assert shlex.split(jobs.entrypoint("a", [], None))[4:] == ["a"]
    options = _parser().parse_args(shlex.split(line)[3:])
    assert (options.config, options.resume, options.overrides) == (
        expected[4],
        resume,
        ['name="x y"', "run_root=/data/$HOME"],
    )


def test_staging_sends_the_tree_and_relative_files(tmp_path, monkeypatch):
    """The tree is sent without outputs of runs and environments, with configuration and relative
    prompt files from elsewhere.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "prompts.txt").write_text("a cat\n")
    file = tmp_path / "run.toml"
    file.write_text(
        'layers = ["models/shapes", "rewards/shapes"]\nname = "x"\n[prompts]\ntrain ='
        ' "mine/prompts.txt"\n'
    )
    into = tmp_path / "out"
    assert jobs.stage(into, str(file), load(str(file))) == "submitted/run.toml"
    assert (into / "submitted" / "run.toml").read_text() == file.read_text()
    assert (into / "mine" / "prompts.txt").read_text() == "a cat\n"
    there = {path.name for path in into.iterdir()}
    assert {*jobs.PACKAGES, "pyproject.toml", ".rayignore"} <= there
    assert not there & {".git", ".venv", "runs", "tests", "docs"}
    assert not list(into.rglob("__pycache__"))
    loaded = subprocess.run(
        [sys.executable, "-m", "cluster", "config", "submitted/run.toml"],
        cwd=into,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert json.loads(loaded.stdout)["name"] == "x", loaded.stderr


def test_source_images_are_sent_with_the_prompt_file(tmp_path, monkeypatch):
    """Images below the folder of the prompt file are sent; those on shared storage stay there."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine/in/a.png", "mine/b.png", "elsewhere/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(name.encode())
    images = ["in/a.png", "./b.png", str(tmp_path / "elsewhere" / "c.png")]
    prompts = tmp_path / "mine" / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x", "image": one}) + "\n" for one in images))
    config = load("quickstart", ['prompts.train="mine/p.jsonl"'])
    jobs.stage(tmp_path / "out", "quickstart", config)
    sent = sorted(str(f.relative_to(tmp_path / "out")) for f in tmp_path.glob("out/mine/**/*.*"))
    assert sent == ["mine/b.png", "mine/in/a.png", "mine/p.jsonl"]
    assert (tmp_path / "out" / "mine" / "in" / "a.png").read_bytes() == b"mine/in/a.png"
    prompts.write_text(json.dumps({"prompt": "x", "image": "../elsewhere/c.png"}) + "\n")
    with pytest.raises(ConfigError, match=r"c.png' is outside the folder of the prompt file"):
        jobs.stage(tmp_path / "again", "quickstart", config)
    # the job reports a missing image within the folder, as it does every missing file
    prompts.write_text(json.dumps({"prompt": "x", "image": "in/../gone.png"}) + "\n")
    jobs.stage(tmp_path / "third", "quickstart", config)


def test_presets_and_files_of_the_tree_keep_their_names(tmp_path):
    assert jobs.stage(tmp_path / "a", "quickstart", load("quickstart")) == "quickstart"
    inside = ROOT / "configs" / "presets" / "quickstart.toml"
    assert (
        jobs.stage(tmp_path / "b", str(inside), load("quickstart"))
        == "configs/presets/quickstart.toml"
    )


@pytest.mark.parametrize("root", [None, "runs", "./somewhere"])
def test_a_job_needs_a_shared_run_root(root):
    given = [] if root is None else [f'run_root="{root}"']
    with pytest.raises(ConfigError, match="run_root = .*absolute path"):
        jobs.check_run_root_of_job(load("quickstart", given))


def test_invalid_commands_are_refused_in_one_line(capsys):
    assert main(["submit", "quickstart"]) == 2
    assert "run_root" in capsys.readouterr().err
    assert main(["scale"]) == 2 and main(["scale", "--rollout", "0"]) == 2
    assert capsys.readouterr().err.count("scale: give --rollout N") == 2
    assert (
        main(
            ["submit", "quickstart", "--set", "run_root=/tmp/x", "--address", "http://127.0.0.1:1"]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "no Ray dashboard answers" in line and "http://HOST:8265" in line


# ---- a real head


@pytest.fixture(scope="module")
def head(undisturbed, tmp_path_factory) -> Iterator[Head]:
    folder = Path("/tmp") / f"sol-rl-head-{os.getpid()}"  # sockets need a short path
    made = Head(folder)
    try:
        made.wait()
        yield made
    finally:
        made.stop()


@pytest.mark.slow
def test_a_submitted_job_is_watched_scaled_stopped_and_resumed(
    head, undisturbed, tiny_sd3_dir, tmp_path
):
    """Every command of a user: submit, status, scale through the dashboard's URL, `ray job stop`,
    submit --resume.
    """
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "far",
        iterations=400,
        checkpoint__every=300,
        services__rollout={"actors": 1, "max_actors": 3},
    )
    file, run = write_toml(config, tmp_path), Path(config.run_root or "") / "far"
    without = {key: value for key, value in head.env.items() if key != "RAY_AUTH_MODE"}
    command = [sys.executable, "-m", "cluster", "submit", str(file), "--address", head.url]
    stranger = subprocess.run(
        command, cwd=ROOT, env=without, capture_output=True, text=True, timeout=300
    )
    assert (
        stranger.returncode == 2
        and stranger.stderr.count("\n") == 1
        and "requires a token" in stranger.stderr
    ), stranger.stderr
    submitted = head.sol_rl("submit", file, "--address", head.url)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.splitlines()[0].removeprefix("submitted: ")
    wait_for(
        lambda: (
            (run / "metrics.jsonl").exists()
            and '"iteration"' in (run / "metrics.jsonl").read_text()
        )
    )

    status = head.sol_rl("status", "--run", "far", "--address", head.url)
    assert (
        status.returncode == 0 and "rollout-0.0" in status.stdout and "of 400 done" in status.stdout
    ), status.stdout + status.stderr
    listed = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "list",
        "actors",
        "--address",
        head.url,
        "--format",
        "json",
        "--detail",
    ]
    actors = json.loads(
        subprocess.run(
            listed, env=head.env, capture_output=True, text=True, timeout=300, check=True
        ).stdout
    )
    # as shown in the dashboard
    states = {actor["name"]: actor["state"] for actor in actors if actor["name"].startswith("far/")}
    assert states == {
        f"far/{kind}-0.0": "ALIVE"
        for kind in ("encoder", "rollout", "reward", "selector", "learner")
    }
    near = head.sol_rl("status", "--address", f"127.0.0.1:{head.gcs}")
    assert near.returncode == 0 and "learner-0.0" in near.stdout, near.stderr
    scaled = head.sol_rl("scale", "--rollout", 2, "--address", head.url)
    assert scaled.returncode == 0 and "rollout: 1 -> 2 actors" in scaled.stdout, (
        scaled.stdout + scaled.stderr
    )
    refused = head.sol_rl("scale", "--rollout", 9, "--address", f"127.0.0.1:{head.gcs}")
    assert refused.returncode == 2 and "max_actors = 3" in refused.stderr

    client = job_client(head.url)
    client.stop_job(job)
    wait_for(lambda: str(client.get_job_status(job)) == "STOPPED", 180)
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    done = int(checkpoint.name[5:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert done == 1 + max(row["iteration"] for row in rows if row["kind"] == "iteration")
    assert done < 400
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"] == "run_stopped"

    more = head.sol_rl(
        "submit",
        file,
        "--address",
        head.url,
        "--resume",
        "--follow",
        "--set",
        f"iterations={done + 1}",
        "--set",
        "services.rollout.actors=2",
    )
    assert more.returncode == 0 and "report:" in more.stdout, more.stdout + more.stderr
    assert (run / "checkpoints" / f"step_{done + 1:06d}").exists()


@pytest.mark.slow
def test_plain_ray_job_submit_trains_the_same_bits(head, undisturbed, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "plain")
    file = write_toml(config, tmp_path)
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--address",
        head.url,
        "--working-dir",
        ".",
    ]
    command += [
        "--runtime-env",
        "deploy/runtime_env.yaml",
        "--",
        "python",
        "-m",
        "cluster",
        "train",
        str(file),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=head.env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = type(undisturbed)(Path(config.run_root or "") / "plain")
    assert adapters(run, 3) == adapters(undisturbed, 3)
    config = tiny_config(tiny_sd3_dir, tmp_path, "inside", run_root="runs")
    file = write_toml(config, tmp_path)
    command[-1] = str(file)
    refused = subprocess.run(
        command, cwd=ROOT, env=head.env, capture_output=True, text=True, timeout=300
    )
    assert refused.returncode != 0 and "would be deleted with it" in refused.stdout + refused.stderr
