"""`sol-rl submit`: a run as a Ray job, and the files that are sent along with it.

Sent are the source tree (or, where there is none, the installed packages) without run outputs and
environments, and the configuration and prompt files that lie elsewhere. ``.rayignore`` and
``deploy/runtime_env.yaml`` say the same to a plain ``ray job submit``; a test compares them.
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
from typing import TYPE_CHECKING, TypedDict

from cluster.jobs.dashboard import client_of, refusals
from cluster.jobs.job_log import output_of, short_line
from configs.load import ConfigError, load
from configs.prompts import read_prompts
from configs.schema import RunConfig

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

TREE = Path(__file__).parents[2]
PACKAGES = (
    "configs", "policy", "rewards", "learner", "records", "planning", "analysis", "actors",
    "cluster", "simulator", "cli", "shapes",
)  # fmt: skip
LEFT_OUT = (
    ".git", ".venv", "venv", "runs", "build", "dist", "__pycache__", "*.pyc", "*.egg-info",
    ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", "tests", "docs",
    "checkpoints",
)  # fmt: skip
"""Never sent to a cluster."""


class RuntimeEnv(TypedDict):
    """The part of Ray's runtime_env that is the same for every run."""

    env_vars: dict[str, str]
    excludes: list[str]


RUNTIME_ENV: RuntimeEnv = {
    "env_vars": {
        # before SIGKILL the update in hand is finished and a checkpoint written
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
        "PYTHONUNBUFFERED": "1",
    },
    "excludes": list(LEFT_OUT),
}
ELSEWHERE = "submitted"
"""The folder for files from outside the tree, in what is sent."""


def submit(
    source: str, overrides: Sequence[str], address: str | None, resume: bool
) -> tuple[JobSubmissionClient, str]:
    """(client, job id) of a new job that trains ``source``.

    Raises ConfigError for an invalid configuration, a run_root that is not shared, files that are
    not sent, an ``address`` where nothing answers, or a job that is refused there.
    """
    config = load(source, overrides)
    check_run_root_of_job(config)
    check_files_of_job(config)
    client = client_of(address)
    with _staged(source, config) as (tree, there), refusals(client, _too_large(tree)):
        job = client.submit_job(
            entrypoint=entrypoint(there[0], overrides, resume),
            submission_id=f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            runtime_env={**RUNTIME_ENV, "working_dir": str(tree)},
            metadata={"sol_rl_run": config.name},
        )
    return client, job


def check_through_job(
    address: str,
    source: str | None,
    overrides: Sequence[str],
    options: Sequence[str],
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """The exit code of ``sol-rl doctor`` on the cluster, as a small job with the files that a run
    would have there; what it would refuse is for the doctor to say. Raises ConfigError for an
    invalid configuration, prompt files that cannot be sent, or an ``address`` that takes no job.
    """
    config = load(source, overrides) if source else None
    client = client_of(address)
    with _staged(source, config) as (tree, there), refusals(client, _too_large(tree)):
        job = client.submit_job(
            entrypoint=shlex.join(
                ["python", "-m", "cluster", "doctor", *there, *set_options(overrides), *options]
            ),
            runtime_env={**RUNTIME_ENV, "working_dir": str(tree)},
        )
    return output_of(client, job, show, say)


@contextmanager
def _staged(source: str | None, config: RunConfig | None) -> Iterator[tuple[Path, list[str]]]:
    """A copy of what is sent, and the job's configuration argument, if there is one."""
    with tempfile.TemporaryDirectory(prefix="sol-rl-submit-") as folder:
        tree = Path(folder) / "tree"
        try:
            if source and config:
                there = [stage(tree, source, config)]
            else:
                there = []
                stage_tree(tree)
        except OSError as error:
            raise ConfigError(
                f"{TREE}: cannot be copied to {folder} to be submitted"
                f" ({short_line(error)}); set TMPDIR=DIR"
            ) from None
        yield tree, there


def _too_large(tree: Path) -> Callable[[Exception], str | None]:
    """The advice where Ray refuses ``tree`` for its size: the file or folder that takes most."""

    def advice(error: Exception) -> str | None:
        if "exceeds the maximum size" not in str(error):
            return None
        sizes = {
            top.name: sum(f.lstat().st_size for f in (top, *top.rglob("*")) if not f.is_dir())
            for top in tree.iterdir()
        }
        name = max(sizes, key=lambda each: sizes[each])
        return (
            f"the largest is {name!r} ({sizes[name] / 1e6:.0f} MB): keep it outside {TREE}, and"
            " name it by an absolute path"
        )

    return advice


def check_run_root_of_job(config: RunConfig) -> None:
    """Raises ConfigError unless run_root is an absolute path; the job checks that it can write."""
    if config.run_root is None or not os.path.isabs(config.run_root):
        raise ConfigError(
            f"run_root = {config.run_root!r}: a job needs an absolute path on a disk that its"
            " nodes share: --set run_root=/DIR"
        )


def check_files_of_job(config: RunConfig) -> None:
    """Raises ConfigError for a model, LoRA or scorer's file that is on this machine only.

    That is one with a relative path that exists here and is not sent.
    """
    named = [("lora.init_from", config.lora.init_from or "")]
    named += [("model.path", config.model.path)] if config.model.path != "shapes" else []
    for kind in ("scorers", "evaluation_scorers"):
        for i, scorer in enumerate(getattr(config.rewards, kind)):
            named += _texts(f"rewards.{kind}.{i}.settings", scorer.settings)
    for key, name in named:
        if name and _is_here(name) and not travels(name):
            raise ConfigError(
                f"{key} = {name!r}: lies on this machine and is not sent with a job: give an"
                " absolute path on storage that nodes share"
            )


def _texts(key: str, value: object) -> list[tuple[str, str]]:
    """Every string in a scorer's settings, with its dotted key."""
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
        return False  # a string that cannot be a path


def travels(name: str) -> bool:
    """Whether the relative path ``name`` is the same file in the tree that a job gets."""
    parts = Path(name).parts
    if ".." in parts or any(fnmatch(part, pattern) for part in parts for pattern in LEFT_OUT):
        return False
    whole = (TREE / "pyproject.toml").exists()
    return (whole or parts[:1] in [(package,) for package in PACKAGES]) and (TREE / name).exists()


def entrypoint(config: str, overrides: Sequence[str], resume: bool) -> str:
    """The job's command line."""
    resumes = ["--resume"] if resume else []
    return shlex.join(
        ["python", "-m", "cluster", "train", config, *set_options(overrides), *resumes]
    )


def set_options(overrides: Sequence[str]) -> list[str]:
    """``overrides`` as options of a command."""
    return [part for override in overrides for part in ("--set", override)]


def stage_tree(into: Path) -> None:
    """Copy the source tree, or the installed packages, to ``into``."""
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    if (TREE / "pyproject.toml").exists():
        shutil.copytree(TREE, into, ignore=ignore, symlinks=True)
    else:
        for name in PACKAGES:
            shutil.copytree(TREE / name, into / name, ignore=ignore)


def stage(into: Path, source: str, config: RunConfig) -> str:
    """Copy what is sent to ``into``; returns the job's configuration argument.

    Raises ConfigError for prompt files outside of the directory that is submitted, and for images
    to edit there that are not given by absolute paths.
    """
    stage_tree(into)
    for name in (config.prompts.train, config.prompts.test):
        path = Path(name)
        if not path.is_absolute() and ".." in path.parts:
            raise ConfigError(
                f"prompts: {name!r} lies outside the directory that is submitted: give a path"
                " inside it, or an absolute one that nodes share"
            )
        if not path.is_absolute() and path.is_file() and not (into / path).exists():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into / path)
            _stage_sources(into, name)
    path = Path(source)
    if not path.is_file():
        return source  # a preset
    inside = path.resolve().relative_to(TREE) if path.resolve().is_relative_to(TREE) else None
    if inside is not None and (into / inside).exists():
        return str(inside)
    (into / ELSEWHERE).mkdir(exist_ok=True)
    shutil.copy(path, into / ELSEWHERE / path.name)
    return f"{ELSEWHERE}/{path.name}"


def _stage_sources(into: Path, name: str) -> None:
    """Copy what the prompts of a file edit, as far as it lies below the file."""
    folder = Path(name).absolute().parent
    below = Path(name).parent
    for image in dict.fromkeys(prompt.image for prompt in read_prompts(name) if prompt.image):
        inside = Path(os.path.normpath(image))
        if inside.is_relative_to(folder) and inside.is_file():
            target = into / below / inside.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(inside, target)
        elif ".." in image.parts:
            raise ConfigError(
                f"prompts: {name!r}: the image {str(image)!r} lies outside the folder of the"
                " prompt file, which is submitted: give a path inside it, or an absolute one"
            )
