"""A command that re-executes itself, with the template of actors as its fork."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from cluster.runtime import allocator, reexec
from cluster.runtime.template import RAYLET
from tests.cluster.test_template import launch

COMMAND = """
import json, os, sys
from cluster.runtime import reexec, template
from configs.load import load

reexec.reexec()
settled = dict(os.environ)
template.import_for = lambda config: None  # there at once
reexec.fork_template(load("quickstart", sys.argv[1:]))
made = template._running
print(json.dumps({
    "settled": settled, "environment": dict(os.environ), "arguments": sys.argv[1:],
    "path": made[0].path if made else None, "template": made[0].pid if made else None,
    "torch": "torch" in sys.modules,
    "jemalloc": "libjemalloc" in open("/proc/self/maps").read(),
}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def command():
    """Start ``COMMAND`` with settings and variables; return the process and its report."""
    started = []

    def start(*settings, **more):
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | more
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        started.append(process)
        recorded = json.loads(process.stdout.readline())
        return process, env, recorded

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_template_is_a_fork_of_the_command(command, tmp_path):
    """It shares torch with the command, whose own children get the former environment.

    It serves the first Ray that asks, and no other, and ends with that Ray.
    """
    process, env, recorded = command("seed=3", OMP_NUM_THREADS="5")
    assert recorded["arguments"] == ["seed=3"] and recorded["torch"]
    assert recorded["environment"] == env
    expected = {"OMP_NUM_THREADS": "1", **allocator.variables()}
    assert expected.items() <= recorded["settled"].items()
    assert recorded["jemalloc"] == bool(allocator.variables())
    made = psutil.Process(recorded["template"])
    assert made.ppid() == process.pid
    with subprocess.Popen(["sleep", "600"]) as raylet:
        its = {RAYLET: str(raylet.pid), "RAY_JOB_ID": "01000000"}
        for _ in range(2):
            worker, errors = launch(tmp_path, recorded["path"], **its)
            assert (worker["imported"], worker["parent"], errors) == (["ray"], made.pid, "")
            assert worker["threads"] == 1
        other, errors = launch(tmp_path, recorded["path"], **its | {"RAY_JOB_ID": "02000000"})
        assert other["imported"] == [] and "it ended, or uses another version of Ray" in errors
        raylet.kill()
    deadline = time.monotonic() + 60
    while made.status() != psutil.STATUS_ZOMBIE:  # until the command asks for its exit code
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not os.path.exists(os.path.dirname(recorded["path"]))
    assert process.poll() is None


def test_the_template_ends_with_a_killed_command(command):
    process, _, recorded = command()
    made = psutil.Process(recorded["template"])
    process.kill()
    assert psutil.wait_procs([made], 60)[1] == []
    assert not os.path.exists(os.path.dirname(recorded["path"]))


def test_a_command_without_a_template_is_not_re_executed(command):
    """When it joins a cluster, or all actors run on GPUs, nothing is imported for actors."""
    _, env, recorded = command(RAY_ADDRESS="10.0.0.1:6379")
    assert recorded["path"] is None and recorded["settled"] == recorded["environment"] == env
    gpus = [f"services.{kind}.gpus=1" for kind in ("encoder", "rollout", "learner")]
    _, env, recorded = command(*gpus)
    assert recorded["path"] is None and recorded["environment"] == env


def test_the_command_is_re_executed_once(monkeypatch):
    found = []
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "sol-rl", "train"])
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    reexec.reexec()
    ((program, arguments, environment),) = found
    assert (program, arguments) == (
        sys.executable,
        [sys.executable, "-X", "dev", "sol-rl", "train"],
    )
    assert environment["OMP_NUM_THREADS"] == "1"
    before = json.loads(environment[reexec.BEFORE])
    assert before == {"OMP_NUM_THREADS": "4", **dict.fromkeys(allocator.variables())}
    monkeypatch.setenv(reexec.BEFORE, environment[reexec.BEFORE])
    reexec.reexec()
    assert len(found) == 1
