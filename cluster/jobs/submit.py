"""Submit a run as a Ray job, together with the files that it needs (`sol-rl submit`).

The job gets the source tree (the installed packages if there is no tree) without run outputs and
environments, and the configuration and prompt files that are outside of it. ``.rayignore`` and
``deploy/runtime_env.yaml`` configure the same for a plain ``ray job submit``; a test compares them.
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

from cluster.jobs.dashboard import config_errors, job_client
from cluster.jobs.job_log import follow_command_output, short_line
from configs.load import ConfigError, load
from configs.paths import exists, is_dir, is_file
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
"""Patterns of names that are never sent to a cluster."""


class RuntimeEnv(TypedDict):
    """Part of Ray's runtime_env that is the same for every run."""

    env_vars: dict[str, str]
    excludes: list[str]


RUNTIME_ENV: RuntimeEnv = {
    "env_vars": {
        # time before SIGKILL to finish the current update and write a checkpoint
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
        "PYTHONUNBUFFERED": "1",
    },
    "excludes": list(LEFT_OUT),
}
ELSEWHERE = "submitted"
"""Folder of the sent copy that contains files from outside the tree."""


def submit(
    source: str, overrides: Sequence[str], address: str | None, resume: str | None = None
) -> tuple[JobSubmissionClient, str]:
    """Submit a job that trains ``source``; return (client, job id).

    ``resume``: the option of ``sol-rl train`` that says whether it continues a run, or None.

    Raises ConfigError if the configuration is invalid, run_root is not an absolute path, a file is
    not sent with the job, nothing answers at ``address``, or the job is refused there.
    """
    config = load(source, overrides)
    check_run_root_of_job(config)
    check_files_of_job(config)
    client = job_client(address)
    with _staged(source, config) as (tree, there), config_errors(client, _too_large(tree)):
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
    """Run ``sol-rl doctor`` on the cluster as a small job; return its exit code.

    The job gets the files that a run would get. Problems that would stop the run are reported by
    the doctor, not raised here. Raises ConfigError if the configuration is invalid, prompt files
    cannot be sent, or ``address`` takes no job.
    """
    config = load(source, overrides) if source else None
    client = job_client(address)
    with _staged(source, config) as (tree, there), config_errors(client, _too_large(tree)):
        job = client.submit_job(
            entrypoint=shlex.join(
                ["python", "-m", "cluster", "doctor", *there, *set_options(overrides), *options]
            ),
            runtime_env={**RUNTIME_ENV, "working_dir": str(tree)},
        )
    return follow_command_output(client, job, show, say)


@contextmanager
def _staged(source: str | None, config: RunConfig | None) -> Iterator[tuple[Path, list[str]]]:
    """Yield a temporary copy of what is sent, and the job's configuration argument, if any."""
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
    """Return a function that names the largest entry of ``tree`` if Ray refuses its size."""

    def advice(error: Exception) -> str | None:
        if "exceeds the maximum size" not in str(error):
            return None
        sizes = {
            top.name: sum(f.lstat().st_size for f in (top, *top.rglob("*")) if not is_dir(f))
            for top in tree.iterdir()
        }
        name = max(sizes, key=lambda entry: sizes[entry])
        return (
            f"the largest is {name!r} ({sizes[name] / 1e6:.0f} MB): move it out of {TREE}, and use"
            " its absolute path"
        )

    return advice


def check_run_root_of_job(config: RunConfig) -> None:
    """Raise ConfigError unless run_root is an absolute path; the job checks that it is writable."""
    if config.run_root is None or not os.path.isabs(config.run_root):
        raise ConfigError(
            f"run_root = {config.run_root!r}: a job needs an absolute path on a disk that its"
            " nodes share: --set run_root=/DIR"
        )


def check_files_of_job(config: RunConfig) -> None:
    """Raise ConfigError if a model, a LoRA or a scorer's file is on this machine only.

    This holds for relative paths that exist here and are not sent with the job.
    """
    named = [("lora.init_from", config.lora.init_from or "")]
    named += [("model.path", config.model.path)] if config.model.path != "shapes" else []
    for kind in ("scorers", "evaluation_scorers"):
        for i, scorer in enumerate(getattr(config.rewards, kind)):
            named += _texts(f"rewards.{kind}.{i}.settings", scorer.settings)
    for key, name in named:
        if name and _is_here(name) and not is_sent_with_job(name):
            raise ConfigError(
                f"{key} = {name!r}: is on this machine and is not sent with a job: give an"
                " absolute path on storage that nodes share"
            )


def _texts(key: str, value: object) -> list[tuple[str, str]]:
    """Return (dotted key, string) for every string in a scorer's settings."""
    if isinstance(value, str):
        return [(key, value)]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [text for name, item in items for text in _texts(f"{key}.{name}", item)]


def _is_here(name: str) -> bool:
    try:
        return not Path(name).is_absolute() and exists(Path(name))
    except (OSError, ValueError):
        return False  # a string that cannot be a path


def is_sent_with_job(name: str) -> bool:
    """Return True if the relative path ``name`` is the same file in the tree that a job gets."""
    parts = Path(name).parts
    if ".." in parts or any(fnmatch(part, pattern) for part in parts for pattern in LEFT_OUT):
        return False
    is_tree = exists(TREE / "pyproject.toml")
    return (is_tree or parts[:1] in [(package,) for package in PACKAGES]) and exists(TREE / name)


def entrypoint(config: str, overrides: Sequence[str], resume: str | None) -> str:
    """Return the job's command line; ``resume`` as in ``submit``."""
    options = [*set_options(overrides), *filter(None, [resume])]
    return shlex.join(["python", "-m", "cluster", "train", config, *options])


def set_options(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` as ``--set`` options of a command."""
    return [part for override in overrides for part in ("--set", override)]


def stage_tree(into: Path) -> None:
    """Copy the source tree, or the installed packages, to ``into``."""
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    if exists(TREE / "pyproject.toml"):
        shutil.copytree(TREE, into, ignore=ignore, symlinks=True)
    else:
        for name in PACKAGES:
            shutil.copytree(TREE / name, into / name, ignore=ignore)


def stage(into: Path, source: str, config: RunConfig) -> str:
    """Copy what is sent to ``into``; return the job's configuration argument.

    Raises ConfigError for relative paths of prompt files, or of their images to edit, that lead out
    of the directory that is sent.
    """
    stage_tree(into)
    for name in (config.prompts.train, config.prompts.test):
        path = Path(name)
        if not path.is_absolute() and ".." in path.parts:
            raise ConfigError(
                f"prompts: {name!r} is outside the directory that is submitted: give a path inside"
                " it, or an absolute one that nodes share"
            )
        if not path.is_absolute() and is_file(path) and not exists(into / path):
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into / path)
            _stage_sources(into, name)
    path = Path(source)
    if not is_file(path):
        return source  # a preset
    inside = path.resolve().relative_to(TREE) if path.resolve().is_relative_to(TREE) else None
    if inside is not None and exists(into / inside):
        return str(inside)
    (into / ELSEWHERE).mkdir(exist_ok=True)
    shutil.copy(path, into / ELSEWHERE / path.name)
    return f"{ELSEWHERE}/{path.name}"


def _stage_sources(into: Path, name: str) -> None:
    """Copy the source images of a prompt file that are in its folder or below.

    Raises ConfigError for a relative path that leads out of that folder.
    """
    folder = Path(name).absolute().parent
    below = Path(name).parent
    for image in dict.fromkeys(prompt.image for prompt in read_prompts(name) if prompt.image):
        inside = Path(os.path.normpath(image))
        if inside.is_relative_to(folder) and is_file(inside):
            target = into / below / inside.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(inside, target)
        elif ".." in image.parts and not inside.is_relative_to(folder):
            raise ConfigError(
                f"prompts: {name!r}: the image {str(image)!r} is outside the folder of the prompt"
                " file, which is submitted: give a path inside it, or an absolute one"
            )
