"""Checks of a configuration that take seconds and run before anything is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.load import ConfigError
from configs.prompts import Prompt, changed_files
from configs.resume import differences
from configs.schema import RunConfig
from configs.sections import Model
from configs.sources import refuse_unreadable
from configs.training import Lora
from planning.layouts.resolve import needs_layout
from policy import frozen
from policy.decoders import check_decoder
from policy.families import FAMILIES, Family, family_for
from policy.families.schedule import fewest_steps
from policy.precision.backends import resolve_backend
from records.rundir import RunDirectory
from rewards import check_settings, resolve
from rewards.base import ScorerSetupError


def check_model(config: RunConfig, explore_steps: Sequence[int] = ()) -> None:
    """Raise ConfigError for a model that is missing or unsuitable, without reading weights.

    ``explore_steps`` are further numbers of explore steps that a measurement tries.
    """
    try:
        family = family_for(config.model)
        family.check_weights()
        check_settings_of_model(config, family, explore_steps)
        if config.lora.init_from is not None:
            check_initial_lora(config.lora, family)
        check_decoder(config, family)
        if config.lora.base != "full" and (why := frozen.missing()) is not None:
            raise ValueError(f"lora.base = {config.lora.base!r}: {why}")
        check_explorers(config)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError([" ".join(str(error).split())]) from None
    except OSError as error:
        raise ConfigError(
            f"model.path: {error.filename or config.model.path}: cannot be read"
            f" ({error.strerror or error})"
        ) from None
    # diffusers and the families compute with the values of these files: wrong types may raise any
    # of these
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.path: the configuration files of {config.model.path!r} do not describe a valid"
            f" model ({type(error).__name__}: {why}): download the pipeline again"
        ) from None


def check_settings_of_model(
    config: RunConfig, family: Family, explore_steps: Sequence[int] = ()
) -> None:
    """Raise ValueError if settings do not suit the model. Reads only its configuration files.

    ``family`` has the settings of ``config.model``, possibly with another path.
    """
    family.check(config.guidance, config.services.learner.shard == "base")
    check_steps(config, family, explore_steps)
    if config.explored_model != config.model:
        check_explored(config.explored_model.model_copy(update={"path": family.model.path}))
    if config.lora.targets:
        from policy.lora import target_modules

        target_modules(family.skeleton(), config.lora.targets)
    unconverted = config.explore.modules_to_not_convert
    layers = layers_on_disk(family) if unconverted else []
    if not all(any(fnmatchcase(name, pattern) for name in layers) for pattern in unconverted):
        from policy.precision.swap import quantize_plan

        quantize_plan(family.skeleton(), family, unconverted)
    if config.lora.base != "full":
        frozen.frozen_rows(family.skeleton(), family, unconverted)


def check_initial_lora(lora: Lora, family: Family) -> None:
    """Raise FileNotFoundError or ValueError if the LoRA to start from does not fit the model."""
    from policy import meta
    from policy.initial_lora import start_from
    from policy.lora import adapter_parameters

    transformer = family.skeleton()
    meta.adapt(transformer, family, lora)
    parameters = adapter_parameters(transformer, "current")
    start_from({key: parameter.detach() for key, parameter in parameters.items()}, lora, family)


def check_steps(config: RunConfig, family: Family, explore_steps: Sequence[int] = ()) -> None:
    """Raise ValueError if the model's schedule does not allow a number of sampling steps."""
    fewest = fewest_steps(family.part_config("scheduler"), family.model.schedule)
    plan = config.plan
    stages = [("evaluate.steps", config.evaluate.steps)]
    if plan.explore is None or plan.regenerate:
        stages.append(("regenerate.steps", config.regenerate.steps))
    if plan.explore is not None:
        stages += [("explore.steps", steps) for steps in (plan.explore.steps, *explore_steps)]
    for key, steps in stages:
        if steps < fewest:
            raise ValueError(
                f"{key}: {steps}: the schedule of {config.model.path!r} stretches to a last sigma"
                f" above 0 (shift_terminal): use at least {fewest}"
            )


def check_prompts(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if prompts do not suit the model.

    Every prompt of an editing family needs a readable image; prompts of other families have none.
    """
    edits = FAMILIES[config.model.family].edits
    for prompt in prompts:
        if edits and prompt.image is None:
            raise ConfigError(
                f"prompts: {prompt.text[:60]!r} has no image to edit, which family"
                f" {config.model.family!r} needs: give a .jsonl file with an 'image' in each line"
            )
        if not edits and prompt.image is not None:
            editors = ", ".join(name for name, family in FAMILIES.items() if family.edits)
            raise ConfigError(
                f"prompts: {prompt.text[:60]!r} has an image, but family {config.model.family!r}"
                " does not edit images: leave out 'image', or use a model that edits images"
                f" ({editors})"
            )
    refuse_unreadable(prompt.image for prompt in prompts if prompt.image is not None)


def layers_on_disk(family: Family) -> list[str]:
    """Return paths of layers that the transformer certainly has, read from its local files.

    A weight matrix with a bias is a linear layer or a convolution. A pattern that matches one of
    these paths is known to be valid without building the model, which would take seconds.
    """
    layers: list[str] = []
    parts, directory = family.transformers, Path(family.directory)
    for part, file in ((p, file) for p in parts for file in (directory / p).glob("*.safetensors")):
        prefix = f"{part}." if len(parts) > 1 else ""
        # a damaged file is reported when it is loaded; here it just contributes no layers
        with suppress(SafetensorError, OSError), safe_open(file, framework="np") as opened:
            names = set(opened.keys())
            biased = (n.removesuffix(".bias") for n in names if n.endswith(".bias"))
            matrices = [path for path in biased if f"{path}.weight" in names]
            layers += (
                prefix + path
                for path in matrices
                if len(opened.get_slice(f"{path}.weight").get_shape()) > 1
            )
    return layers


def check_explored(model: Model) -> None:
    """Raise ValueError if a model cannot generate proxy images of the size in ``model``."""
    try:
        family = family_for(model)
        if family.edits:
            raise ValueError(
                "model.height: a model that edits images must explore at the training size: leave"
                " out explore.height and explore.width"
            )
        family.check()
    except ValueError as error:
        raise ValueError(str(error).replace("model.", "explore.", 1)) from None


def check_explorers(config: RunConfig) -> None:
    """Raise ValueError if rollout actors on CPUs cannot run the configured backend.

    Actors on GPUs, which a layout may still assign, report it themselves when they start.
    """
    rollout = config.services.rollout
    may_get_gpus = "gpus" not in rollout.model_fields_set and needs_layout(config)
    if config.plan.explore is not None and not (rollout.gpus or may_get_gpus):
        resolve_backend(config.plan.explore.backend, "cpu")


def check_scorers(config: RunConfig) -> None:
    """Raise ConfigError for scorers that are unknown, not importable or without their weights."""
    for scorer in config.rewards.all_scorers:
        own = config.services.scorers.get(scorer.label)
        if own is not None and own.runtime_env:
            continue  # its module may exist in its actors' environment only
        try:
            module = resolve(scorer.name).partition(":")[0]
            spec = importlib.util.find_spec(module)
            check_settings(scorer)
        except ScorerSetupError as error:
            raise ConfigError(str(error)) from None
        except ImportError as error:
            advice = "add its directory to PYTHONPATH, or install its dependencies"
            raise ConfigError(
                f"rewards.scorers: {scorer.name!r} cannot be imported ({error}): {advice}"
            ) from None
        if spec is None:
            raise ConfigError(
                f"rewards.scorers: {scorer.name!r}: there is no module {module!r}: put its"
                " directory on PYTHONPATH"
            )


def check_resumable(config: RunConfig, rundir: RunDirectory) -> None:
    """Raise ConfigError if resuming would change results: the configuration or prompts differ."""
    changed = differences(rundir.configuration(), config)
    if changed:
        raise ConfigError(
            f"--resume: {rundir.path} was started with a different configuration:"
            f" {'; '.join(changed)}; use the same configuration, or another name"
        )
    if changed := changed_files(config.prompts, rundir.prompts()):
        raise ConfigError(
            f"--resume: {', '.join(changed)} changed since {rundir.path} was started: restore it,"
            " or use another name"
        )


def problems_of(config: RunConfig, *checks: Callable[[RunConfig], None]) -> list[str]:
    """Run the checks and return the lines of their ConfigErrors."""
    lines: list[str] = []
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            lines += error.lines
    return lines
