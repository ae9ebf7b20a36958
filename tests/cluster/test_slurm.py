"""The batch script for Slurm, with stand-ins for Slurm, Ray and the run.

docs/cluster.md says what was tried with Slurm itself.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.head import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "sol-rl.sbatch"
RUN = """[ "$CODE" = TERM ] && trap 'kill -0 $(cat rays) && touch ray_lived; exit 130' TERM
printf '%s\\n' "$@" > arguments
echo "$RAY_ADDRESS $(stat -c %a "$RAY_AUTH_TOKEN_PATH")" > found
echo >> runs
while [ "$CODE" = TERM ]; do /bin/sleep 0.05; done
if [ "$HEAD" = dies ]; then
    [ -z "$LATE" ] || exit "$CODE"
    until [ "$(wc -l < heads)" = "$(wc -l < runs)" ]; do /bin/sleep 0.05; done
    while kill -0 "$(tail -1 heads)" 2> /dev/null; do /bin/sleep 0.05; done
fi
exit "$CODE"
"""
STEP = """printf '%s\n' "$*" >> steps
case "$HEAD $*" in
    fails*--relative=0*) exit 1;;
    dies*--relative=0*)
        echo $$ >> heads
        until [ "$(wc -l < heads)" = "$(wc -l 2> /dev/null < runs)" ]; do /bin/sleep 0.05; done
        until [ "$(cat waits 2> /dev/null | wc -l)" -ge "${LATE:-0}" ]; do /bin/sleep 0.05; done
        exit 1;;
    lost*--relative=1*|real*) while [ "$1" != bash ]; do shift; done; echo $$ >> tasks; exec "$@";;
esac
exec /bin/sleep 60
"""
RAY = """if [ "$1" = start ]; then
    echo $$ >> rays
    exec /bin/sleep 60
fi
case "$HEAD" in
    fails|lost|slow) exit 1;;
    real) [ -s rays ];;
    *) [ "$(wc -l < steps)" -ge $((SLURM_JOB_NUM_NODES > 1 ? 2 : 1)) ];;
esac
"""
"""Its health check: the head runs once ``srun`` was called for each step."""

SLEEP = """case "$1" in
    60) exec /bin/sleep "${END_S:-0}";;
    1) echo >> waits; [ -z "$LATE" ] || exec /bin/sleep 0.1;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that starts the script; the run ends with ``code``, or at SIGTERM."""
    programs = {
        ".venv/bin/sol-rl": RUN,
        ".venv/bin/ray": RAY,
        ".venv/bin/python": f'exec {sys.executable} "$@"',
        "bin/srun": STEP,
        "bin/squeue": 'echo "$STATE"',
        "bin/scontrol": 'echo "$@" >> asked',
        "bin/sleep": SLEEP,
    }
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)

    def start(code: object, state: str = "RUNNING", **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path),
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2",
            "SLURM_RESTART_COUNT": "99", "CODE": str(code), "STATE": state,
            "SLURM_JOB_NUM_NODES": "3", "HEAD": "", "LATE": "", **variables,
        }  # fmt: skip
        command = ["bash", str(SCRIPT), "quickstart", "--set", "name=a b"]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=out, text=True, start_new_session=True
        )

    return start


def asked(folder: Path) -> list[str]:
    """Return what was asked of ``scontrol``."""
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


def heads(folder: Path) -> int:
    """Return how many times Ray was started on the first node."""
    return (folder / "steps").read_text().count("--relative=0 bash")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def numbers(file: Path) -> list[int]:
    """Return the process ids in a file; none if it does not exist."""
    return [int(line) for line in file.read_text(encoding="utf-8").split()] if file.exists() else []


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True if the process has a handler for the signal."""
    rows = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (mask,) = (int(row.split()[1], 16) for row in rows if row.startswith("SigCgt"))
    return bool(mask >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("code", "state", "failures", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (2, "RUNNING", 0, False),  # a wrong configuration stays wrong
        (3, "RUNNING", 0, True),
        (3, "RUNNING", 9, True),
        (3, "RUNNING", 10, False),
        (137, "RUNNING", 0, True),  # the driver was killed
        (130, "RUNNING", 10, True),  # the time limit
        (130, "COMPLETING", 0, False),  # cancelled by its user
    ],
)
def test_a_job_goes_back_to_the_queue_if_that_helps(job, tmp_path, code, state, failures, requeued):
    """However often it was there without a failure, as after a preemption."""
    before = tmp_path / ".ray" / "slurm-7-failures"
    if failures:
        before.parent.mkdir()
        before.write_text("\n" * failures)
    process = job(code, state)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert asked(tmp_path) == ["requeue 7"] * requeued
    assert not before.exists()  # Slurm ends the script of a job that goes back to the queue


def test_failures_of_a_job_are_counted(job, tmp_path):
    counted = tmp_path / ".ray" / "slurm-7-failures"
    for code, lines in ((3, 1), (130, 1), (137, 2)):
        (tmp_path / "asked").unlink(missing_ok=True)
        process = job(code, END_S="60")
        wait_for(lambda: asked(tmp_path) == ["requeue 7"])
        os.killpg(process.pid, signal.SIGKILL)  # as Slurm does
        process.communicate(timeout=60)
        assert counted.read_text() == "\n" * lines


def test_the_run_gets_the_arguments_and_a_cluster_with_a_token(job, tmp_path):
    out, _ = job(0).communicate(timeout=60)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    defaults = ["train", "--auto-resume", "--set", "services.wait_for_nodes_s=600"]
    assert arguments == [*defaults, "quickstart", "--set", "name=a b"]
    address, mode = (tmp_path / "found").read_text().split()
    assert mode == "600" and f"--address {address}" in out
    assert not list((tmp_path / ".ray").iterdir())  # the token ends with the job


@pytest.mark.parametrize("nodes", [1, 3])
def test_every_node_runs_one_task(job, tmp_path, nodes):
    """Of the tasks of one step, Slurm would tell the end of the last one only."""
    job(0, SLURM_JOB_NUM_NODES=str(nodes)).communicate(timeout=60)
    steps = [line for line in (tmp_path / "steps").read_text().splitlines() if "--nodes" in line]
    placed = [" ".join(option for option in step.split()[5:8]) for step in steps]
    expected = ["--nodes=1 --ntasks=1 --relative=0", "--nodes=2 --ntasks=2 --relative=1"]
    assert sorted(placed) == expected[: 1 if nodes == 1 else 2]


def test_a_job_whose_head_does_not_start_ends(job, tmp_path):
    """The tasks on the other nodes wait for the head for as long as the job lives."""
    process = job(0, HEAD="fails")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Ray did not start on the first node" in out
    assert heads(tmp_path) == 4
    assert not (tmp_path / "found").exists() and not list((tmp_path / ".ray").iterdir())


@pytest.mark.parametrize(("code", "starts", "requeued"), [(0, 1, 0), (2, 1, 0), (3, 4, 1)])
def test_a_head_that_dies_is_started_again(job, tmp_path, code, starts, requeued):
    """With a run that continues; the job keeps its nodes until that has not helped."""
    process = job(code, HEAD="dies")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code and asked(tmp_path) == ["requeue 7"] * requeued
    assert heads(tmp_path) == starts and len((tmp_path / "runs").read_text()) == starts
    assert out.count("Ray ended on the first node") == starts - 1


def test_a_head_is_started_again_if_the_run_ends_before_it(job, tmp_path):
    """A run notices the end of Ray at once, and Slurm that of the step later."""
    process = job(3, HEAD="dies", LATE="2")
    process.communicate(timeout=60)
    assert heads(tmp_path) == 4 and len((tmp_path / "runs").read_text()) == 4


def test_a_job_that_is_stopped_after_a_failure_does_not_wait_for_its_head(job, tmp_path):
    process = job(3, LATE="1")
    wait_for(lambda: (tmp_path / "waits").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert len((tmp_path / "waits").read_text()) < 20 and asked(tmp_path) == ["requeue 7"]


def test_other_nodes_put_a_job_without_its_first_node_back_into_the_queue(job, tmp_path):
    """The script is lost with that node, and Slurm, told not to kill the job, leaves it so."""
    process = job(0, HEAD="lost", HEAD_LOST_S="1")
    wait_for(lambda: bool(asked(tmp_path)))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert asked(tmp_path) == ["requeue 7"]


def test_sigterm_reaches_the_run_which_is_awaited(job, tmp_path):
    process = job("TERM")
    wait_for(lambda: (tmp_path / "found").exists())
    process.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@180` does
    process.communicate(timeout=60)
    assert process.returncode == 130 and asked(tmp_path) == ["requeue 7"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_preempted_run_has_its_cluster_until_it_has_ended(job, tmp_path, nodes):
    """Slurm sends SIGTERM to the tasks of steps, not to the script."""
    process = job("TERM", HEAD="real", SLURM_JOB_NUM_NODES=str(nodes))
    wait_for(lambda: len(numbers(tmp_path / "rays")) == nodes and (tmp_path / "found").exists())
    tasks, rays = numbers(tmp_path / "tasks"), numbers(tmp_path / "rays")
    assert len(tasks) == nodes
    for task in tasks:  # Ray goes on
        os.kill(task, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130 and asked(tmp_path) == ["requeue 7"]
    assert (tmp_path / "ray_lived").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*tasks, *rays])


def test_a_job_that_is_stopped_while_its_cluster_starts_goes_back_to_the_queue(job, tmp_path):
    process = job(0, HEAD="slow")
    wait_for(lambda: (tmp_path / "steps").exists() and catches(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130 and asked(tmp_path) == ["requeue 7"]
    assert not (tmp_path / "found").exists()
