"""The batch script for Slurm, with stand-ins for Slurm, Ray and the run.

docs/cluster.md says what was tried with Slurm itself.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.head import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "sol-rl.sbatch"
RUN = """[ "$CODE" = TERM ] && trap 'exit 130' TERM
printf '%s\\n' "$@" > arguments
echo "$RAY_ADDRESS $(stat -c %a "$RAY_AUTH_TOKEN_PATH")" > found
while [ "$CODE" = TERM ]; do /bin/sleep 0.05; done
exit "$CODE"
"""
STEP = """printf '%s\n' "$*" >> steps
case "$HEAD_FAILS $*" in
    1*--relative=0*) exit 1;;
    lost*--relative=1*) while [ "$1" != bash ]; do shift; done; exec "$@";;
esac
exec /bin/sleep 60
"""

HEALTHY = """[ -z "$HEAD_FAILS" ] || exit 1
[ "$(wc -l < steps)" -ge $((SLURM_JOB_NUM_NODES > 1 ? 2 : 1)) ]
"""
"""Ray's health check: the head runs once ``srun`` was called for each step."""


@pytest.fixture
def job(tmp_path):
    """Return a function that starts the script; the run ends with ``code``, or at SIGTERM."""
    programs = {
        ".venv/bin/sol-rl": RUN,
        ".venv/bin/ray": HEALTHY,
        ".venv/bin/python": f'exec {sys.executable} "$@"',
        "bin/srun": STEP,
        "bin/squeue": 'echo "$STATE"',
        "bin/scontrol": 'echo "$@" >> asked',
        "bin/sleep": "exit 0",
    }
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)

    def start(
        code: object, state: str = "RUNNING", restarts: int = 0, **variables: str
    ) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path),
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2",
            "SLURM_RESTART_COUNT": str(restarts), "CODE": str(code), "STATE": state,
            "SLURM_JOB_NUM_NODES": "3", "HEAD_FAILS": "", **variables,
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


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True if the process has a handler for the signal."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(row.split()[1], 16) for row in rows if row.startswith("SigCgt"))
    return bool(mask >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (2, "RUNNING", 0, False),  # a wrong configuration stays wrong
        (3, "RUNNING", 9, True),
        (3, "RUNNING", 10, False),
        (137, "RUNNING", 0, True),  # the driver was killed
        (130, "RUNNING", 99, True),  # the time limit
        (130, "COMPLETING", 0, False),  # cancelled by its user
    ],
)
def test_a_job_goes_back_to_the_queue_if_that_helps(job, tmp_path, code, state, restarts, requeued):
    process = job(code, state, restarts)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert asked(tmp_path) == ["requeue 7"] * requeued


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
    process = job(0, HEAD_FAILS="1")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Ray did not start on the first node" in out
    assert not (tmp_path / "found").exists() and not list((tmp_path / ".ray").iterdir())


def test_other_nodes_put_a_job_without_its_first_node_back_into_the_queue(job, tmp_path):
    """The script is lost with that node, and Slurm, told not to kill the job, leaves it so."""
    process = job(0, HEAD_FAILS="lost", HEAD_LOST_S="1")
    deadline = time.monotonic() + 60
    while not asked(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert asked(tmp_path) == ["requeue 7"]


def test_sigterm_reaches_the_run_which_is_awaited(job, tmp_path):
    process = job("TERM")
    deadline = time.monotonic() + 60
    while not (tmp_path / "found").exists() or not catches(process.pid, signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@180` does
    process.communicate(timeout=60)
    assert process.returncode == 130 and asked(tmp_path) == ["requeue 7"]
