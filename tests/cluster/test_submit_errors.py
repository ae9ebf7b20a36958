"""Refused calls of ``sol-rl submit``, ``status`` and ``scale``: one line, exit code 2."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from cli.main import main
from cluster.jobs import dashboard
from cluster.jobs import submit as jobs
from configs.load import ConfigError, load
from tests.cluster.head import ROOT, free_port
from tools.fuzz.servers import listening

HERE = "http://head:8265"


class Refusing:
    """A dashboard that answers, but accepts no job."""

    def __init__(self, error):
        self.error = error

    def get_address(self):
        return HERE

    def submit_job(self, **how):
        raise self.error

    list_jobs = submit_job


def line(capsys) -> str:
    (only,) = capsys.readouterr().err.splitlines()
    return only


def refused() -> Exception:
    from ray.exceptions import RpcError

    return RpcError("no connection", 14)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Request failed with status code 500: <html>\n<body>no</body>."),
            "status code 500: <html>); `ray job list",
        ),
        (RuntimeError(""), "(RuntimeError)"),
        (ConnectionResetError("reset by peer"), "reset by peer"),
        (
            ValueError(
                "Package size (812.00MiB) exceeds the maximum size of 500.00MiB. To exclude"
            ),
            "move it out of",
        ),
        (refused(), "no connection"),
    ],
)
def test_a_refused_job_is_one_line(monkeypatch, capsys, error, message):
    def small(into, source, config):
        (into / "photos").mkdir(parents=True)
        (into / "photos" / "a.bin").write_bytes(bytes(3_000_000))
        return source

    monkeypatch.setattr(jobs, "job_client", lambda address: Refusing(error))
    monkeypatch.setattr(jobs, "stage", small)
    assert main(["submit", "quickstart", "--set", "run_root=/data", "--address", HERE]) == 2
    recorded = line(capsys)
    assert (
        recorded.startswith(f"--address {HERE}: the job was not accepted (") and message in recorded
    )
    assert ("'photos' (3 MB)" in recorded) == isinstance(error, ValueError)


def test_a_disk_too_full_to_stage_on_is_one_line(monkeypatch, capsys):
    def full(into, source, config):
        raise shutil.Error("No space left on device")

    monkeypatch.setattr(jobs, "job_client", lambda address: Refusing(None))
    monkeypatch.setattr(jobs, "stage", full)
    assert main(["submit", "quickstart", "--set", "run_root=/data", "--address", HERE]) == 2
    assert "No space left on device" in line(capsys)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "head:8265", "ray://head:10001", "auto"])
def test_an_address_that_is_not_a_url_is_refused(monkeypatch, capsys, address):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert main(["submit", "quickstart", "--set", "run_root=/data", "--address", address]) == 2
    assert (
        line(capsys)
        == f"--address {address}: expected the URL of a Ray dashboard, http://HOST:8265"
    )
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    assert main(["submit", "quickstart", "--set", "run_root=/data"]) == 2
    assert line(capsys).startswith(f"RAY_API_SERVER_ADDRESS = {address}: expected the URL")


def test_the_address_option_takes_precedence_over_the_environment(monkeypatch, capsys):
    """Ray's own client gives precedence to the environment."""
    given, other = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.setenv(name, other)
        assert main(["submit", "quickstart", "--set", "run_root=/data", "--address", given]) == 2
        recorded = line(capsys)
        assert given in recorded and other not in recorded
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    assert main(["submit", "quickstart", "--set", "run_root=/data"]) == 2
    assert f"RAY_ADDRESS = {other}: no Ray dashboard answers" in line(capsys)


@pytest.mark.parametrize(
    "arguments", [["status"], ["status", "--run", "x"], ["scale", "--rollout", "2"]]
)
@pytest.mark.parametrize("way", ["environment", "option"])
def test_status_and_scale_accept_a_dashboard_url(monkeypatch, way, arguments):
    requested = []
    monkeypatch.setattr(
        dashboard,
        "ask_through_job",
        lambda address, given, show, say: requested.append((address, given)) or 0,
    )
    if way == "environment":
        monkeypatch.setenv("RAY_ADDRESS", HERE)
        assert main(arguments) == 0
    else:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
        assert main([*arguments, "--address", HERE]) == 0
    assert requested == [(HERE, arguments)]


@pytest.mark.parametrize(("patience", "attempts"), [(60.0, 3), (-1.0, 1)])
def test_submitting_waits_for_a_cluster_that_has_just_started(monkeypatch, patience, attempts):
    """As `ray up` returns, no node has an agent yet that starts jobs. Ray's answer is copied."""
    answer = "Request failed with status code 500: No available agent to submit job, please try"
    calls = []

    class Starting:
        def __init__(self, url):
            pass

        def submit_job(self, **job):
            calls.append(job)
            if len(calls) < 3:
                raise RuntimeError(answer)
            return "job-1"

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Starting)
    monkeypatch.setattr(dashboard, "AGENT_S", patience)
    monkeypatch.setattr(dashboard.time, "sleep", lambda seconds: None)
    client = dashboard.job_client(HERE)
    if attempts == 3:
        assert client.submit_job(entrypoint="a") == "job-1"
    else:
        with pytest.raises(RuntimeError, match="No available agent"):
            client.submit_job(entrypoint="a")
    assert calls == [{"entrypoint": "a"}] * attempts


@pytest.mark.parametrize("given", [[], ["quickstart", "--set", "run_root=/data"]])
def test_the_doctor_job_gets_the_files_of_a_run(monkeypatch, given):
    """Even before there is any run."""
    submitted = {}

    class Client:
        def submit_job(self, entrypoint, runtime_env):
            tree = Path(runtime_env["working_dir"])
            submitted.update(entrypoint=entrypoint, has=(tree / "cli" / "doctor.py").exists())
            return "job-1"

    monkeypatch.setattr(jobs, "job_client", lambda address: Client())
    monkeypatch.setattr(jobs, "config_errors", lambda *_: nullcontext())
    monkeypatch.setattr(jobs, "follow_command_output", lambda client, job, show, say: 2)
    assert main(["doctor", *given, "--json", "--address", HERE]) == 2
    expected = " ".join(["python -m cluster doctor", *given, "--json"])
    assert submitted == {"entrypoint": expected, "has": True}


def test_a_refused_status_request_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        dashboard,
        "job_client",
        lambda address: Refusing(RuntimeError("Request failed with status code 502: bad gateway")),
    )
    assert main(["status", "--address", HERE]) == 2
    assert "502: bad gateway" in line(capsys)


# ---- files that are not sent


def scorer(key: str, settings: str) -> str:
    return f"rewards.{key}=[{{name = 'clipscore', settings = {settings}}}]"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.path=weights/model", "model.path = 'weights/model'"),
        ("lora.init_from=weights/model", "lora.init_from = 'weights/model'"),
        (
            scorer("scorers", "{checkpoint = 'checkpoints/HPS.pt'}"),
            "rewards.scorers.0.settings.checkpoint = 'checkpoints/HPS.pt'",
        ),
        (
            scorer("evaluation_scorers", "{architecture = {files = ['../up.pt']}}"),
            "rewards.evaluation_scorers.0.settings.architecture.files.0 = '../up.pt'",
        ),
    ],
)
def test_local_files_that_are_not_sent_are_refused(tmp_path, monkeypatch, capsys, override, key):
    here = tmp_path / "here"
    (here / "weights" / "model").mkdir(parents=True)
    (here / "checkpoints").mkdir()
    for file in (here / "checkpoints" / "HPS.pt", tmp_path / "up.pt"):
        file.write_bytes(b"")
    monkeypatch.chdir(here)
    monkeypatch.setattr(
        jobs,
        "job_client",
        lambda address: pytest.fail("asked before the configuration was looked at"),
    )
    assert main(["submit", "quickstart", "--set", "run_root=/data", "--set", override]) == 2
    recorded = line(capsys)
    assert recorded.startswith(key)
    assert recorded.endswith("give an absolute path on storage that nodes share")


@pytest.mark.parametrize(
    "override",
    [
        "model.path=/data/model",
        "model.path=owner/name",
        scorer("scorers", "{checkpoint = 'shapes/clip'}"),
    ],
)
def test_files_on_the_nodes_are_accepted(monkeypatch, override):
    monkeypatch.chdir(ROOT)
    jobs.check_files_of_job(load("quickstart", [override]))


def test_weights_in_the_tree_are_not_sent(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    for name in ("configs/presets", "checkpoints", "mine/checkpoints"):
        (tree / name).mkdir(parents=True)
        (tree / name / "x").write_text("")
    (tree / "pyproject.toml").write_text("")
    monkeypatch.setattr(jobs, "TREE", tree)
    monkeypatch.chdir(tree)
    jobs.stage(
        tmp_path / "out",
        "quickstart",
        load("quickstart", ["prompts.train=configs/presets/x", "prompts.test=configs/presets/x"]),
    )
    assert not list((tmp_path / "out").rglob("checkpoints"))
    assert (tmp_path / "out" / "configs" / "presets" / "x").exists()
    with pytest.raises(ConfigError, match="lora.init_from = 'mine/checkpoints/x'"):
        jobs.check_files_of_job(load("quickstart", ["lora.init_from=mine/checkpoints/x"]))
    jobs.check_files_of_job(load("quickstart", ["lora.init_from=configs/presets/x"]))  # sent


def test_a_node_without_the_dependencies_is_reported(tmp_path):
    """Its Python was not set up for this project, such as the one from which Ray was started."""
    command = [sys.executable, "-S", "-m", "cluster", "doctor"]
    done = subprocess.run(
        command, cwd=ROOT, env={"HOME": str(tmp_path)}, capture_output=True, text=True
    )
    (recorded,) = done.stderr.splitlines()
    assert done.returncode == 2 and "start Ray on every node from the environment with" in recorded


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_a_listener_that_is_not_a_ray_head_is_refused(monkeypatch, capsys, answer):
    """Ray would query it for minutes. ``None``: it accepts the connection and sends nothing."""
    monkeypatch.setattr("cluster.jobs.live_runs.LISTENER_S", 0.5)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with listening(answer) as port:
        assert main(["status", "--address", f"127.0.0.1:{port}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--address 127.0.0.1:{port}: ")
    message = "is not the head of a Ray cluster", "no Ray cluster answers there"
    # one that closes at once may do so before it was asked
    assert any(words in line for words in (message if answer is not None else ["(timed out)"]))
