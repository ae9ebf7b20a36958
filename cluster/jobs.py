"""Submitting a run as a Ray job: what travels, what is told to Ray, how it is followed.

What travels is the tree that this package lies in (or, where it was installed without one, its packages), without run outputs and
environments, and beside it the configuration and prompt files that lie elsewhere. ``.rayignore`` and ``deploy/runtime_env.yaml`` say
the same to a plain ``ray job submit``.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.load import ConfigError, load
from configs.schema import RunConfig

TREE = Path(__file__).parent.parent
PACKAGES = ("configs", "policy", "rewards", "learner", "actors", "cluster", "shapes")
LEFT_OUT = (
    ".git", ".venv", "venv", "runs", "build", "dist", "__pycache__", "*.pyc", "*.egg-info", ".pytest_cache", ".ruff_cache", ".hypothesis",
    ".import_linter_cache", "tests", "docs",
)  # fmt: skip
"""Never sent to a cluster."""
RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {
        "RAY_JOB_STOP_WAIT_TIME_S": "120",  # an update in hand is finished and a checkpoint written before SIGKILL
        "PYTHONUNBUFFERED": "1",
    },
    "excludes": list(LEFT_OUT),
}
TOKEN_WANTED = (
    "this cluster wants a token: export RAY_AUTH_MODE=token, and put the token in ~/.ray/auth_token or at RAY_AUTH_TOKEN_PATH"
)
ELSEWHERE = "submitted"
"""Folder, in what travels, of files that lie outside the tree."""


def submit(source: str, overrides: Sequence[str], address: str | None, resume: bool) -> tuple[Any, str]:
    """(client, job id) of a new job that trains ``source``.

    Raises ConfigError for a configuration that cannot be, that names no shared run_root, or when nothing answers at ``address``.
    """
    config = load(source, overrides)
    check_run_root_of_job(config)
    client = client_of(address)
    with tempfile.TemporaryDirectory(prefix="sol-rl-submit-") as folder:
        there = stage(Path(folder) / "tree", source, config)
        job = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        client.submit_job(
            entrypoint=entrypoint(there, overrides, resume),
            submission_id=job,
            runtime_env={**RUNTIME_ENV, "working_dir": str(Path(folder) / "tree")},
            metadata={"sol_rl_run": config.name},
        )
    return client, job


def check_run_root_of_job(config: RunConfig) -> None:
    """Raises ConfigError unless run_root is an absolute path; whether it can be written is checked where the job runs."""
    if config.run_root is None or not os.path.isabs(config.run_root):
        raise ConfigError(
            [f"run_root = {config.run_root!r}: a job needs an absolute path on a disk that its nodes share: --set run_root=/DIR"]
        )


def entrypoint(config: str, overrides: Sequence[str], resume: bool) -> str:
    """The job's command line."""
    given = [part for override in overrides for part in ("--set", override)]
    return shlex.join(["python", "-m", "cluster", "train", config, *given, *(["--resume"] if resume else [])])


def stage(into: Path, source: str, config: RunConfig) -> str:
    """Copy what travels to ``into``; returns what the job must give as its configuration. Raises ConfigError for prompts elsewhere."""
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    if (TREE / "pyproject.toml").exists():
        shutil.copytree(TREE, into, ignore=ignore, symlinks=True)
    else:
        for name in PACKAGES:
            shutil.copytree(TREE / name, into / name, ignore=ignore)
    for name in (config.prompts.train, config.prompts.test):
        path = Path(name)
        if not path.is_absolute() and ".." in path.parts:
            raise ConfigError(
                [
                    f"prompts: {name!r} lies outside the directory that is submitted: give a path inside it, or an absolute one that nodes share"
                ]
            )
        if not path.is_absolute() and path.is_file() and not (into / path).exists():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into / path)
    path = Path(source)
    if not path.is_file():
        return source  # a preset
    inside = path.resolve().relative_to(TREE) if path.resolve().is_relative_to(TREE) else None
    if inside is not None and (into / inside).exists():
        return str(inside)
    (into / ELSEWHERE).mkdir(exist_ok=True)
    shutil.copy(path, into / ELSEWHERE / path.name)
    return f"{ELSEWHERE}/{path.name}"


def client_of(address: str | None) -> Any:
    """A job client. Raises ConfigError when nothing answers."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError([f"--address {address or 'not given'}: {TOKEN_WANTED}"]) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(
            [f"--address {address or 'not given'}: no Ray dashboard answers ({said}); give its URL, http://HOST:8265"]
        ) from None


def follow(client: Any, job: str, show: Callable[[str], None]) -> int:
    """Show a job's log until it ends; its exit code as ``sol-rl train`` would have given it."""

    async def tail() -> None:
        async for text in client.tail_job_logs(job):
            show(text)

    asyncio.run(tail())
    info = client.get_job_info(job)
    status = str(info.status)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return 130
    return info.driver_exit_code if info.driver_exit_code in (2, 3, 130) else 3


def ask_through_job(address: str, arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Run a command of this program on the cluster itself, as a small job with the files of the run that is there.

    For whoever reaches only the dashboard. Raises ConfigError when no run was submitted there.
    """
    client = client_of(address)
    running = [job for job in client.list_jobs() if str(job.status) == "RUNNING" and "-m cluster train" in job.entrypoint]
    if not running:
        raise ConfigError([f"--address {address}: no submitted run is running there"])
    job = client.submit_job(
        entrypoint=shlex.join(["python", "-m", "cluster", *arguments]), runtime_env=running[0].runtime_env or {}
    )
    return follow(client, job, show)
