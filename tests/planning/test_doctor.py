"""``sol-rl doctor`` without a cluster: lines for given facts, then the command on this machine."""

import fcntl
import json
import socket
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cli.main import main
from configs.load import load
from planning import checks, doctor
from planning.facts import Facts, examine

PACKAGES = {"sol-rl": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"}
FACTS = Facts(
    host="a",
    node="1234567890",
    python="3.11.9",
    packages=PACKAGES,
    cores=8,
    free_gb=30.0,
    gpus={"NVIDIA B200": 2},
    backends=("te_nvfp4", "bf16"),
    shared=True,
)
OTHER = replace(FACTS, host="b", node="abcdef", bandwidth_mb_s=900.0)


def outcomes(facts: list[Facts], *overrides: str) -> dict[str, tuple[str, str]]:
    config = load("quickstart", ["run_root=/data", *overrides])
    return {
        check.name: (check.outcome, check.line()) for check in checks.check_nodes(config, facts)
    }


JUDGE = "http://judge:8000/v1"


@pytest.mark.parametrize(
    ("silent", "outcome", "line"),
    [
        ([], "ok", "answers"),
        (["b"], "note", "no route, asked from b: scoring would wait if its actors were there:"
         " services.reward.labels"),
        (["a", "b"], "failed", "no route, asked from a, b: check the URL, or"
         " start it: a run would wait 600 s"),
    ],
)  # fmt: skip
def test_the_doctor_asks_the_servers_of_scorers(silent, outcome, line):
    """``url`` of a scorer of one's own may be anything."""
    own = '{name = "mine:score", settings = {url = "http://other/"}}'
    judge = f'{{name = "http", settings = {{url = "{JUDGE}", plain_http = true}}}}'
    facts = [
        replace(each, servers={JUDGE: "no route"} if each.host in silent else {})
        for each in (FACTS, OTHER)
    ]
    found = outcomes(facts, f"rewards.scorers=[{judge}, {own}]")
    assert [name for name in found if name.startswith("server")] == [f"server {JUDGE}"]
    assert found[f"server {JUDGE}"] == (outcome, f"{outcome:6}  server {JUDGE}: {line}")


def test_the_doctor_asks_them_from_this_machine_too(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    scorers = f'rewards.scorers=[{{name = "http", settings = {{url = "{url}"}}}}]'
    assert main(["doctor", "quickstart", "--set", scorers]) == 2
    (line,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("failed"))
    host = socket.gethostname()
    assert line.startswith(f"failed  server {url}: did not answer ([Errno 111] ")
    assert f"refused), asked from {host}: check the URL, or start it" in line
    assert [*examine(load("quickstart", [scorers])).servers] == [url]  # as on a node


def test_equal_nodes_pass_the_doctor():
    found = outcomes([FACTS, OTHER], "services.rollout.gpus=1")
    assert {outcome for outcome, _ in found.values()} == {"ok"}
    assert "python 3.11.9, torch 2.13.0 on 2 nodes" in found["versions"][1]
    assert "4, 2 requested" in found["GPUs"][1]
    assert found["bandwidth"][1] == "ok      bandwidth: 900 MB/s to b"
    assert "machine a (node 12345678)" in found


@pytest.mark.parametrize(
    ("change", "name", "outcome", "message"),
    [
        ({"packages": {**PACKAGES, "torch": "2.12.0"}}, "versions", "failed",
         "torch is 2.13.0 on a, 2.12.0 on b: install the same versions on all nodes"),
        ({"python": "3.12.1"}, "versions", "failed", "python is 3.11.9 on a, 3.12.1 on b"),
        ({"shared": False}, "shared directory", "failed", "/data is a different directory on b"),
        ({"writable": "Permission denied"}, "shared directory", "failed",
         "not writable on b (Permission denied)"),
        ({"locked": False}, "shared directory", "note",
         "locks in /data do not reach b: a second driver of a run there is not refused"),
        ({"clock": -7.5}, "clocks", "failed", "at most 7.50 s apart (b): run an NTP client"),
        ({"bandwidth_mb_s": 12.0}, "bandwidth", "note", "12 MB/s to b: publishing is limited"),
        ({"problems": ("model.path: there is not a directory '/m'",)},
         "model and scorers on every node", "failed",
         "b: model.path: there is not a directory '/m'"),
        ({"store_on_disk": "/tmp/ray"}, "shared memory", "note",
         "object store in /tmp/ray on b: /dev/shm is too small for it"),
        ({"ray_disk": "/tmp/ray is 97% full"}, "disk of Ray", "note",
         "/tmp/ray is 97% full on b: remove old sessions"),
        ({"kernels": "Triton is missing"}, "GPUs", "note", "b: Triton is missing"),
    ],
)  # fmt: skip
def test_a_node_that_differs_is_named(change, name, outcome, message):
    found = outcomes([FACTS, replace(OTHER, **change)])
    assert found[name][0] == outcome and message in found[name][1]
    assert [key for key, (recorded, _) in found.items() if recorded != "ok"] == [name]


def test_hundreds_of_nodes_share_lines():
    nodes = [replace(OTHER, host=f"n{n}", free_gb=100.0 + (n - 70) ** 2) for n in range(200)]
    nodes[150] = replace(nodes[150], gpus={"NVIDIA H200": 8}, problems=("no model",))
    for n in (3, 4, 5, 199, 17):
        nodes[n] = replace(nodes[n], problems=("no model", "no prompts"), writable="read-only",
                           packages={**PACKAGES, "torch": "2.12.0"}, kernels="no compiler",
                           servers={JUDGE: "no route"}, locked=False)  # fmt: skip
    judge = f'{{name = "http", settings = {{url = "{JUDGE}", plain_http = true}}}}'
    found = outcomes(nodes, f"rewards.scorers=[{judge}]")
    lines = {name: line.partition(": ")[2] for name, (_, line) in found.items()}
    assert len(lines) == 11 and max(map(len, lines.values())) < 200
    assert lines["199 machines"] == (
        "n0, n1, n2 and 196 more: 8 cores, 100.0 GB free or more, 2 x NVIDIA B200; supported"
        " backends: te_nvfp4, bf16"
    )
    assert lines["machine n150 (node abcdef)"].startswith(
        "8 cores, 6500.0 GB free, 8 x NVIDIA H200"
    )
    assert lines["versions"] == (
        "torch is 2.13.0 on n0, 2.12.0 on n3, n4, n5 and 2 more: install the same versions on all"
        " nodes"
    )
    assert lines["GPUs"].startswith("406; n3, n4, n5 and 2 more: no compiler")
    assert lines["model and scorers on every node"] == (
        "n3, n4, n5 and 3 more: no model; n3, n4, n5 and 2 more: no prompts"
    )
    assert lines["shared directory"].startswith("not writable on n3, n4, n5 and 2 more (read-only)")
    assert ": no route, asked from n3, n4, n5 and 2 more: " in found[f"server {JUDGE}"][1]


def test_a_few_nodes_are_named_one_by_one():
    """Four machines have a line each, although they are of one kind."""
    four = [replace(OTHER, host=host, problems=("no model",)) for host in "abcd"]
    found = outcomes(four)
    assert sum(name.startswith("machine ") for name in found) == 4
    assert found["model and scorers on every node"][1].endswith(": a, b, c, d: no model")
    five = outcomes([*four, replace(four[0], host="e")])
    assert five["model and scorers on every node"][1].endswith(": a, b, c and 2 more: no model")
    assert [name for name in five if "machine" in name] == ["5 machines"]


def test_missing_gpus_are_reported():
    bare = replace(FACTS, gpus={})
    found = outcomes([bare], "services.rollout.gpus=1", "services.rollout.actors=3")
    assert found["GPUs"] == (
        "failed",
        "failed  GPUs: 0 available, but the configuration requests 3: give --address of a cluster"
        " with enough GPUs, or a configuration for CPUs",
    )
    flux = checks.check_nodes(load("flux1-sol_rl-hpsv2"), [bare])
    assert next(check for check in flux if check.name == "GPUs").outcome == "failed"


def test_this_machine_passes_the_doctor_for_the_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok ", "note ")) for line in lines) and len(lines) >= 9
    assert any("supported backends" in line and "emulated_nvfp4" in line for line in lines)
    assert list(tmp_path.iterdir()) == []  # it leaves no files


def test_failed_checks_have_exit_code_2_and_advice(tmp_path, capsys):
    settings = [
        "model.path=/no/model", f"run_root={tmp_path}", "services.rollout.actors=100000",
        "prompts.test=shapes/prompts/train.jsonl", "services.reward.gpus=1",
        "rewards.scorers=[{name = 'shpes'}]",
    ]  # fmt: skip
    words = [word for each in settings for word in ("--set", each)]
    assert main(["doctor", "quickstart", *words, "--json"]) == 2
    recorded = json.loads(capsys.readouterr().out)
    failed = {
        check["name"]: check["found"]
        for check in recorded["checks"]
        if check["outcome"] == "failed"
    }
    assert not recorded["ok"]
    assert set(failed) == {"prompts", "model", "scorers", "GPUs", "actors", "free memory"}
    assert "did you mean 'shapes'" in failed["scorers"]
    assert "360 held-out prompts are among" in failed["prompts"]
    assert "services.rollout.actors = 100000: this machine has" in failed["actors"]


def test_a_port_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load("quickstart", [f"logging.prometheus_port={port}"])
        (check,) = [c for c in doctor.check_configuration(config) if c.name == "metrics port"]
    assert check.outcome == "failed" and f"127.0.0.1:{port} cannot be served" in check.found


@pytest.mark.parametrize(
    ("mode", "file", "token", "joined", "outcome", "message"),
    [
        ("token", 0o600, "", True, "ok", "requested"),
        ("token", None, "x", True, "ok", "requested"),  # as KubeRay gives it
        ("token", 0o644, "", True, "note", "chmod 600"),
        ("disabled", None, "", True, "note", "anyone who can reach the dashboard can run code"),
        ("", None, "", True, "note", "anyone who can reach the dashboard can run code"),
        ("disabled", None, "", False, "note", "loopback"),
        ("", None, "", False, "ok", "none needed yet"),
    ],
)
def test_the_token_is_checked(mode, file, token, joined, outcome, message, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
        (tmp_path / ".ray" / "auth_token").chmod(file)
    check = doctor.check_token(joined, tmp_path)
    assert check.outcome == outcome and message in check.line()


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [("", "", "failed"), ("RAY_AUTH_TOKEN", "x", "ok"), ("RAY_AUTH_TOKEN_PATH", "/t", "ok"),
     ("RAY_AUTH_MODE", "disabled", "note")],
)  # fmt: skip
def test_the_token_of_a_user_without_a_home(name, value, outcome, monkeypatch):
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    if name:
        monkeypatch.setenv(name, value)
    assert doctor.check_token(joined=False).outcome == outcome


def test_a_setting_without_a_configuration_is_refused(capsys):
    assert main(["doctor", "--set", "seed=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_node_says_whether_it_sees_the_drivers_lock(tmp_path):
    mark = tmp_path / ".doctor-1"
    assert examine(mark=str(mark)).locked  # another directory, which is reported as such
    with mark.open("w") as file:
        assert not examine(mark=str(mark)).locked
        fcntl.flock(file, fcntl.LOCK_EX)
        assert examine(mark=str(mark)).locked
    assert examine().locked
