"""Offline commands on a finished run: evaluate its checkpoints, export its LoRA."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
from pathlib import Path

import ray

from cluster.driver.connect import ends_with_ray, join_or_start_ray
from cluster.driver.evaluation import Evaluation, evaluate
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.load import ConfigError
from configs.paths import exists
from configs.prompts import Prompt, prompt_file, read_prompts
from configs.schema import RunConfig
from learner import checkpoint
from planning.preflight import check_model, check_prompts, check_scorers
from policy.families import FAMILIES
from policy.lora import ADAPTERS
from policy.lora_files import ENDING, adapter_file, save_diffusers_lora
from records.errors import InputsLost, RunFailed, StateLost
from records.rundir import RunDirectory, write_json
from records.tables import aligned


def export_run(
    rundir: RunDirectory, config: RunConfig, out: Path, weights: str, step: int | None
) -> list[str]:
    """Write adapter ``weights`` (ema, current, old) as a LoRA directory; return its file names.

    ``pipe.load_lora_weights(out)`` loads it. Raises ConfigError if the checkpoint or the adapter
    does not exist or the directory cannot be written, RunFailed if the checkpoint is damaged.
    """
    try:
        files, _ = checkpoint.read(checkpoint.find(rundir, step))
    except checkpoint.CheckpointError as error:
        raise RunFailed(str(error)) from None
    state = files.get(adapter_file(weights))
    if state is None:
        raise ConfigError(
            f"--weights {weights}: this run's objective has no such adapter; available:"
            f" {', '.join(sorted(files))}"
        )
    try:
        return save_diffusers_lora(
            out, state, config.lora, FAMILIES[config.model.family].rename_lora
        )
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror or error}): give another directory"
        ) from None


def evaluate_run(
    rundir: RunDirectory, config: RunConfig, step: int | None, given: str | None
) -> list[str]:
    """Score base, trained, old and EMA weights on equal prompts and seeds; return table lines.

    The scores are also written to ``evaluations/compare_<step>.json`` in the run directory, with
    the images in a directory beside it. If a prompt file is ``given``, all of its prompts are used,
    and the scores are written to ``compare_<step>-<file>.json``.

    Raises ConfigError if something does not exist or cannot be written, RunFailed if the checkpoint
    is damaged or the actors fail.
    """
    path = checkpoint.find(rundir, step)
    prompts = _checked_prompts(config, given)
    target = _target(rundir.path / "evaluations", path.name, given)
    try:
        checkpoint.read(path)
    except checkpoint.CheckpointError as error:
        raise RunFailed(str(error)) from None
    _require_writable(target)
    join_or_start_ray(config)
    try:
        with ends_with_ray("repeat the evaluation"):
            results = asyncio.run(_evaluate_all(rundir, config, path, prompts))
        return _write_results(config, path, prompts, given, target, results)
    # an evaluation has no checkpoint to return to
    except (StateLost, InputsLost) as loss:
        raise RunFailed(f"{loss}: repeat the evaluation") from None
    except OSError as error:
        raise RunFailed(f"{error.filename or rundir.path}: {error.strerror or error}") from None
    finally:
        ray.shutdown()  # pyright: ignore[reportUnknownMemberType]


def _require_writable(target: Path) -> None:
    """Raise ConfigError if ``target`` cannot be written: now, not after hours of evaluation."""
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".writable-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{target.parent}: cannot be written ({error.strerror or error}): evaluate needs to"
            " write its results there"
        ) from None


def _write_results(
    config: RunConfig,
    path: Path,
    prompts: list[Prompt],
    prompts_path: str | None,
    target: Path,
    results: dict[str, Evaluation],
) -> list[str]:
    """Write scores and images; return the lines of the table."""
    base = results["base"].rewards
    rows = {name: result.row(None if name == "base" else base) for name, result in results.items()}
    saved_step, images = checkpoint.step_of(path), target.with_suffix("")
    images.mkdir(exist_ok=True)
    for name, result in results.items():
        result.save_images(images / name, saved_step, prompts, config.model)
    file = str(prompt_file(prompts_path or config.prompts.test).absolute())
    noises = config.evaluate.noises
    write_json(
        target, {"prompt_file": file, "prompts": len(prompts), "noises": noises, "weights": rows}
    )
    title = path.name if prompts_path is None else f"{path.name}, {prompts_path}"
    return _table(
        rows, f"{title}, {len(prompts)} prompts x {noises} seeds, {config.evaluate.steps} steps"
    )


def _checked_prompts(config: RunConfig, prompts_path: str | None) -> list[Prompt]:
    """Return the prompts of an evaluation.

    Raises ConfigError if they, the model or the scorers cannot be used.
    """
    prompts = (
        read_prompts(config.prompts.test)[: config.evaluate.prompts]
        if prompts_path is None
        else read_prompts(prompts_path)
    )
    check_model(config)
    check_prompts(config, prompts)
    check_scorers(config)
    return prompts


def _target(folder: Path, checkpoint_name: str, prompts_path: str | None) -> Path:
    """Return the file for the scores.

    Scores on the same prompt file are overwritten; a number is appended to the name to keep those
    on another prompt file of the same name.
    """
    if prompts_path is None:
        return folder / f"compare_{checkpoint_name}.json"
    file = prompt_file(prompts_path).absolute()
    stem = f"compare_{checkpoint_name}-{re.sub(r'[^A-Za-z0-9_-]+', '_', file.stem)[:100]}"
    for number in itertools.count(1):
        target = folder / f"{stem}{f'-{number}' if number > 1 else ''}.json"
        if not exists(target) or _prompt_file_of(target) == str(file):
            return target
    raise AssertionError("numbers end")


def _prompt_file_of(scores: Path) -> object:
    """Return the prompt file that existing scores name, or None if they cannot be read."""
    try:
        return json.loads(scores.read_bytes())["prompt_file"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


async def _evaluate_all(
    rundir: RunDirectory, config: RunConfig, path: Path, prompts: list[Prompt]
) -> dict[str, Evaluation]:
    services = ActorServices(config, rundir, rundir.event)
    services.only("encoder", "reward", "learner")
    try:
        await services.encode_once([], prompts)
        await services.start()
        await services.learner.load(path.name, str(path))
        present = [name for name in ADAPTERS if exists(path / f"{adapter_file(name)}{ENDING}")]
        return {
            name: await evaluate(config, services, prompts, name) for name in ("base", *present)
        }
    finally:
        await services.stop()


def _table(rows: dict[str, Metrics], title: str) -> list[str]:
    scorers = sorted(key for key in rows["base"] if key.startswith("reward/eval/"))
    heads = [
        "weights",
        "reward",
        "std err",
        "gain",
        "std err",
        *(key.removeprefix("reward/eval/") for key in scorers),
    ]
    body: list[list[str]] = []
    for name, row in rows.items():
        gain = (
            [f"{row['eval/gain']:+.4f}", f"{row['eval/gain_stderr']:.4f}"]
            if "eval/gain" in row
            else ["", ""]
        )
        body.append(
            [
                name,
                f"{row['reward/eval_mean']:.4f}",
                f"{row['eval/stderr']:.4f}",
                *gain,
                *(f"{row[key]:.4f}" for key in scorers),
            ]
        )
    return [title, *aligned([heads, *body], right=True)]
