"""Submitting a run as a Ray job: what travels, what is told to Ray, how it is followed.

What travels is the tree that this package lies in (or, where it was installed without one, its
packages), without run outputs and environments, and beside it the configuration and prompt files
that lie elsewhere. ``.rayignore`` and ``deploy/runtime_env.yaml`` say the same to a plain ``ray job
submit``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cluster.jobs.following import follow, said
from configs.load import ConfigError, load
from configs.schema import RunConfig

TREE = Path(__file__).parents[2]
PACKAGES = (
    "configs",
    "policy",
    "rewards",
    "learner",
    "records",
    "planning",
    "analysis",
    "actors",
    "cluster",
    "cli",
    "shapes",
)
LEFT_OUT = (
    ".git", ".venv", "venv", "runs", "build", "dist", "__pycache__", "*.pyc", "*.egg-info", ".pytest_cache", ".ruff_cache", ".hypothesis",
    ".import_linter_cache", "tests", "docs", "checkpoints",
)  # fmt: skip
"""Never sent to a cluster."""
RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {
        "RAY_JOB_STOP_WAIT_TIME_S": (
            "120"
        ),  # an update in hand is finished and a checkpoint written before SIGKILL
        "PYTHONUNBUFFERED": "1",
    },
    "excludes": list(LEFT_OUT),
}
TOKEN_WANTED = (
    "this cluster wants a token: export RAY_AUTH_MODE=token, and put the token in ~/.ray/auth_token"
    " or at RAY_AUTH_TOKEN_PATH"
)
ELSEWHERE = "submitted"
"""Folder, in what travels, of files that lie outside the tree."""
ANSWER_S = (10.0, 120.0)
"""How long a dashboard may take to accept a connection, and to answer."""
URL = ("http://", "https://")


def submit(
    source: str, overrides: Sequence[str], address: str | None, resume: bool
) -> tuple[Any, str]:
    """(client, job id) of a new job that trains ``source``.

    Raises ConfigError for a configuration that cannot be, that names no shared run_root or files
    that do not travel, when nothing answers at ``address``, or when the job is not taken there.
    """
    config = load(source, overrides)
    check_run_root_of_job(config)
    check_files_of_job(config)
    client = client_of(address)
    with tempfile.TemporaryDirectory(prefix="sol-rl-submit-") as folder:
        tree = Path(folder) / "tree"
        try:
            there = stage(tree, source, config)
        except OSError as error:
            raise ConfigError(
                [
                    f"{TREE}: cannot be copied to {folder} to be submitted ({said(error)}); set"
                    " TMPDIR=DIR"
                ]
            ) from None
        job = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        with taken_by(client, tree):
            client.submit_job(
                entrypoint=entrypoint(there, overrides, resume),
                submission_id=job,
                runtime_env={**RUNTIME_ENV, "working_dir": str(tree)},
                metadata={"sol_rl_run": config.name},
            )
    return client, job


@contextmanager
def taken_by(client: Any, tree: Path | None = None) -> Iterator[None]:
    """What a dashboard that answers may still refuse becomes a ConfigError of one line. ``tree``:
    what is to travel.
    """
    from ray.exceptions import AuthenticationError, RayError

    at = f"--address {client.get_address()}"
    try:
        yield
    except AuthenticationError:
        raise ConfigError([f"{at}: {TOKEN_WANTED}"]) from None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RayError) as error:
        mend = (
            f"`ray job list --address {client.get_address()}` tells what is there, the dashboard's"
            " log on the head why"
        )
        if tree is not None and "exceeds the maximum size" in str(error):
            name, size = largest(tree)
            mend = (
                f"the largest is {name!r} ({size / 1e6:.0f} MB): keep it outside {TREE}, and name"
                " it by an absolute path"
            )
        raise ConfigError([f"{at}: the job was not taken ({said(error)}); {mend}"]) from None


def largest(tree: Path) -> tuple[str, int]:
    """The file or folder right below ``tree`` that takes most, and its bytes."""
    sizes = {
        top: sum(file.lstat().st_size for file in (top, *top.rglob("*")) if not file.is_dir())
        for top in tree.iterdir()
    }
    top = max(sizes, key=lambda each: sizes[each])
    return top.name, sizes[top]


def check_run_root_of_job(config: RunConfig) -> None:
    """Raises ConfigError unless run_root is an absolute path; whether it can be written is checked
    where the job runs.
    """
    if config.run_root is None or not os.path.isabs(config.run_root):
        raise ConfigError(
            [
                f"run_root = {config.run_root!r}: a job needs an absolute path on a disk that its"
                " nodes share: --set run_root=/DIR"
            ]
        )


def check_files_of_job(config: RunConfig) -> None:
    """Raises ConfigError for a model, LoRA or scorer's file that is given by a relative path, is
    here, and does not travel.
    """
    named = [("lora.init_from", config.lora.init_from or "")]
    named += [("model.path", config.model.path)] if config.model.path != "shapes" else []
    for kind in ("scorers", "evaluation_scorers"):
        for i, scorer in enumerate(getattr(config.rewards, kind)):
            named += _texts(f"rewards.{kind}.{i}.settings", scorer.settings)
    for key, name in named:
        if name and _is_here(name) and not travels(name):
            raise ConfigError(
                [
                    f"{key} = {name!r}: lies on this machine and is not sent with a job: give an"
                    " absolute path on storage that nodes share"
                ]
            )


def _texts(key: str, value: Any) -> list[tuple[str, str]]:
    """Every text in a scorer's settings, by its dotted key."""
    if isinstance(value, str):
        return [(key, value)]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [found for name, item in items for found in _texts(f"{key}.{name}", item)]


def _is_here(name: str) -> bool:
    try:
        return not Path(name).is_absolute() and Path(name).exists()
    except (OSError, ValueError):
        return False  # a text that can be no path


def travels(name: str) -> bool:
    """Whether the relative path ``name`` is the same file in the tree that a job gets."""
    parts = Path(name).parts
    if ".." in parts or any(fnmatch(part, pattern) for part in parts for pattern in LEFT_OUT):
        return False
    whole = (TREE / "pyproject.toml").exists()
    return (whole or parts[:1] in [(package,) for package in PACKAGES]) and (TREE / name).exists()


def entrypoint(config: str, overrides: Sequence[str], resume: bool) -> str:
    """The job's command line."""
    given = [part for override in overrides for part in ("--set", override)]
    return shlex.join(
        ["python", "-m", "cluster", "train", config, *given, *(["--resume"] if resume else [])]
    )


def stage(into: Path, source: str, config: RunConfig) -> str:
    """Copy what travels to ``into``; returns what the job must give as its configuration. Raises
    ConfigError for prompts elsewhere.
    """
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
                    f"prompts: {name!r} lies outside the directory that is submitted: give a path"
                    " inside it, or an absolute one that nodes share"
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
    """A job client of the dashboard at ``address``, or else of the one that the environment names
    or that Ray finds on this machine.

    Raises ConfigError for an address that is no URL, and when nothing answers.
    """
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """One that does not wait for ever."""

        def _do_request(self, *arguments: Any, **how: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": ANSWER_S, **how})

    at, url = f"--address {address}", address
    if not address:
        url = os.environ.get("RAY_API_SERVER_ADDRESS")
        at = (
            f"RAY_API_SERVER_ADDRESS = {url}"
            if url
            else f"RAY_ADDRESS = {os.environ.get('RAY_ADDRESS', 'not set')}"
        )
    if url and not url.startswith(URL):
        raise ConfigError([f"{at}: the URL of a Ray dashboard is expected, http://HOST:8265"])
    try:
        with _only(url):
            return Client(url)
    except AuthenticationError:
        raise ConfigError([f"{at}: {TOKEN_WANTED}"]) from None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RayError) as error:
        raise ConfigError(
            [
                f"{at}: no Ray dashboard answers ({said(error)}); give --address http://HOST:8265,"
                " its URL"
            ]
        ) from None


@contextmanager
def _only(url: str | None) -> Iterator[None]:
    """Ray lets RAY_API_SERVER_ADDRESS and RAY_ADDRESS go before what it is given; here ``url``
    does.
    """
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    if url:
        os.environ[name] = url
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def ask_through_job(
    address: str, arguments: Sequence[str], show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Run a command of this program on the cluster itself, as a small job with the files of the run
    that is there.

    For whoever reaches only the dashboard. Raises ConfigError when no run was submitted there.
    """
    client = client_of(address)
    with taken_by(client):
        running = [
            job
            for job in client.list_jobs()
            if str(job.status) == "RUNNING" and "-m cluster train" in job.entrypoint
        ]
    if not running:
        raise ConfigError([f"--address {address}: no submitted run is running there"])
    with taken_by(client):
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "cluster", *arguments]),
            runtime_env=running[0].runtime_env or {},
        )
    return follow(client, job, show, say)
