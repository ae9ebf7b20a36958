"""Validation of settings that depend on each other; an error is one line that names the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from configs.objective import PathSettings
from configs.sections import Precision, Solver

if TYPE_CHECKING:
    from configs.schema import RunConfig


def check_combinations(run: RunConfig) -> None:
    """Raise ValueError, naming the key, if settings contradict each other."""
    for check in (
        *(_check_selection, _check_size, _check_base, _check_stages, _check_random_seeds),
        *(_check_share, _check_shards, _check_turns),
        *(_check_objective, _check_trained_steps, _check_paths, _check_guidance, _check_scorers),
    ):
        check(run)


def _check_selection(run: RunConfig) -> None:
    """Raise ValueError if ``selection.keep`` exceeds the pool, or is odd for best and worst."""
    keep, pool = run.selection.keep, run.explore.pool_size
    if run.plan.explore is not None and keep > pool:
        raise ValueError(
            f"selection.keep: {keep} samples cannot be kept out of explore.pool_size ="
            f" {pool}: lower keep or raise pool_size"
        )
    if run.selection.rule == "best_worst" and keep % 2:
        raise ValueError(
            f"selection.keep: {keep} is odd, but rule 'best_worst' keeps equal numbers of best"
            " and worst: use an even number"
        )


def _check_stages(run: RunConfig) -> None:
    """Raise ValueError for settings that need two stages if the arm has only one."""
    if run.plan.explore is not None and run.plan.regenerate:
        return
    action = "trains on the explored images themselves" if run.plan.explore else "explores nothing"
    why = f"arm {run.arm!r} {action}"
    if run.explored_model != run.model:
        key = "height" if run.explore.height is not None else "frames"
        raise ValueError(
            f"explore.{key}: {why}, so it cannot explore at another size: leave explore.height,"
            " explore.width and explore.frames out"
        )
    if run.explore_ahead:
        raise ValueError(f"explore_ahead: {why}, so it cannot explore with an older policy: use 0")
    if audit_key := run.audit.two_stage_key:
        raise ValueError(f"{audit_key}: {why}, so there is nothing to audit: leave it out")
    if run.explore.decoder == "tiny":
        raise ValueError(
            f"explore.decoder: {why}, so there are no proxy images to decode: use 'full'"
        )


def _check_random_seeds(run: RunConfig) -> None:
    """Raise ValueError if the random seeds of the audit cannot be drawn or cannot be compared."""
    seeds, pool = run.audit.random_seeds, run.explore.pool_size
    if seeds > pool:
        raise ValueError(f"audit.random_seeds: {seeds} is more than explore.pool_size = {pool}")
    if seeds and (compared := run.rewards.comparing_labels):
        raise ValueError(
            f"audit.random_seeds: {compared[0]} compares images of a prompt with each other, and"
            " images of random seeds must not change the scores of the selected ones: use 0"
        )


def _check_objective(run: RunConfig) -> None:
    """Raise ValueError if the objective cannot be used with the arm or the solver."""
    objective, plan = run.objective, run.plan
    if plan.solver not in objective.solvers:
        kind = (
            "stochastic paths and their log-probabilities"
            if objective.stochastic
            else "samples of a deterministic solver"
        )
        raise ValueError(
            f"regenerate.solver: {plan.solver!r} with objective {objective.name!r}, which trains on"
            f" {kind}: use {' or '.join(objective.solvers)}, or leave it out"
        )
    if objective.stochastic and not plan.regenerate:
        why = (
            "quantized"
            if run.arm == "naive_quant"
            else "made by rollout actors with merged, rounded weights"
        )
        raise ValueError(
            f"arm: {run.arm!r} with objective {objective.name!r}: its samples are {why}, but it"
            " needs the exact log-probability of their paths under the trained policy: use"
            " 'sol_rl' or 'diffusionnft'"
        )
    if objective.one_noise_per_group and plan.explore is not None and not run.explore.paths:
        raise ValueError(
            f"objective.shared_noise: arm {run.arm!r} selects among initial noises, but with a"
            " shared one there is nothing to select: use explore.paths = true, or shared_noise ="
            " false"
        )


def _check_trained_steps(run: RunConfig) -> None:
    """Raise ValueError if sampling has too few steps for the objective or its window."""
    objective, steps = run.objective, run.regenerate.steps
    if not objective.trained_steps(steps):
        raise ValueError(
            f"regenerate.steps: with {steps} objective {objective.name!r} has no step to train"
            " on: use more steps"
        )
    window = objective.window if isinstance(objective, PathSettings) else None
    if window is not None and window.start + window.size > steps:
        raise ValueError(
            f"objective.window: {window.size} steps from step {window.start} on, but"
            f" regenerate.steps is {steps}: the window must end there or before"
        )


def _check_paths(run: RunConfig) -> None:
    """Raise ValueError if the paths that are trained on cannot be explored."""
    if not run.explore.paths or run.plan.explore is None:
        return
    objective, steps, full = run.objective, run.explore.steps, run.regenerate.steps
    if not isinstance(objective, PathSettings):
        raise ValueError(
            f"explore.paths: objective {objective.name!r} does not train on stochastic paths: leave"
            " it out"
        )
    if run.explored_model != run.model:
        raise ValueError(
            "explore.paths: the noise of a path's steps is that of full-size images: leave"
            " explore.height, explore.width and explore.frames out"
        )
    stop = objective.last_stop(full)
    # the stochastic steps must be explored unchanged; only the steps after them may be fewer
    fewest = min(stop + 1, full)
    if not fewest <= steps <= full:
        allowed = f"{fewest} to {full}" if fewest < full else f"{full}"
        raise ValueError(
            f"explore.steps: {steps}, but paths of {full} steps are stochastic up to step {stop},"
            f" and these steps are all explored: use {allowed}, or explore.paths = false"
        )


def _check_guidance(run: RunConfig) -> None:
    """Raise ValueError if no stage uses ``low_noise``, or if paths get another scale in training.

    The densities of a path's steps are those of the guidance that they were sampled with.
    """
    guidance, solver = run.guidance, run.plan.solver
    if guidance.low_noise is not None and not guidance.stages:
        raise ValueError(
            f"guidance.low_noise: {guidance.low_noise:g} without guidance: no stage has a scale"
            " above 1"
        )
    if solver not in get_args(Solver) and guidance.train != guidance.regenerate:
        raise ValueError(
            f"guidance.train: {guidance.train:g} is not guidance.regenerate ="
            f" {guidance.regenerate:g}: with {solver!r} the objective needs the densities of"
            " the steps as they were sampled: use equal values"
        )


def _check_scorers(run: RunConfig) -> None:
    """Raise ValueError if ``services.scorers`` names a scorer that does not exist."""
    labels = [scorer.label for scorer in run.rewards.all_scorers]
    if unknown := sorted(run.services.scorers.keys() - set(labels)):
        raise ValueError(
            f"services.scorers.{unknown[0]}: unknown scorer; available: {', '.join(labels)}"
        )


def _check_share(run: RunConfig) -> None:
    """Raise ValueError if a learner replica would have nothing to train on."""
    learner, prompts = run.services.learner, run.prompts.per_iteration
    samples = prompts * run.selection.keep
    if learner.share == "prompts" and learner.replicas > prompts:
        raise ValueError(
            f"services.learner.replicas: {learner.replicas} cannot share prompts.per_iteration"
            f" = {prompts}: each needs at least one prompt, or part of one with"
            " services.learner.share = 'samples'"
        )
    if learner.replicas > samples:
        raise ValueError(
            f"services.learner.replicas: {learner.replicas} cannot share {samples} samples"
            " (prompts.per_iteration x selection.keep): each needs at least one"
        )


def _check_shards(run: RunConfig) -> None:
    """Raise ValueError for settings that do not support sharded frozen weights."""
    learner = run.services.learner
    if learner.shard == "none":
        return
    key = "services.learner.shard: 'base'"
    # a layout sets the number of replicas later, unless the user has set it
    undecided = run.layout is not None and "replicas" not in learner.model_fields_set
    if learner.replicas == 1 and not undecided:
        raise ValueError(
            f"{key} with one replica has nothing to shard: set services.learner.replicas"
        )
    if run.lora.base != "full":
        raise ValueError(
            f"{key} with lora.base = {run.lora.base!r}: packed weights are not sharded: use"
            " 'full', or shard = 'none'"
        )
    if compiles := run.learner_compile_key:
        raise ValueError(
            f"{key} with {compiles}: blocks that gather their weights are not compiled: use"
            " false, or shard = 'none'"
        )


def _check_turns(run: RunConfig) -> None:
    """Raise ValueError for settings that do not support weights in host memory between turns."""
    services = run.services
    for kind in ("rollout", "learner"):
        if getattr(services, kind).between_turns == "host" and run.explore_ahead:
            raise ValueError(
                f"services.{kind}.between_turns: 'host' with explore_ahead = 1: rollout actors"
                " and learner then work at the same time: use 'stay', or explore_ahead = 0"
            )
    if services.learner.between_turns == "stay":
        return
    key = "services.learner.between_turns: 'host'"
    if services.learner.shard != "none":
        raise ValueError(
            f"{key} with services.learner.shard = {services.learner.shard!r}: shards cannot"
            " move to host memory: use 'stay', or shard = 'none'"
        )
    if run.lora.base != "full":
        raise ValueError(
            f"{key} with lora.base = {run.lora.base!r}: packed weights are small and cannot"
            " move: use 'stay', or 'full'"
        )


def _check_base(run: RunConfig) -> None:
    """Raise ValueError for settings that do not support packed (quantized) frozen weights."""
    base, plan = run.lora.base, run.plan
    if base == "full":
        return
    if plan.explore is not None and plan.explore.backend in get_args(Precision):
        raise ValueError(
            f"lora.base: {base!r} with exploring in {plan.explore.backend}: rollout actors"
            " would not use the quantized base that is trained: use a backend that quantizes, or"
            " 'full'"
        )
    if run.audit.action == "finer_backend":
        raise ValueError(
            f"lora.base: {base!r} with audit.action = 'finer_backend', which may explore"
            " unquantized: use 'warn', or 'full'"
        )
    if compiles := run.learner_compile_key:
        raise ValueError(
            f"lora.base: {base!r} with {compiles}: packed weights are not compiled: use false, or"
            " 'full'"
        )


def _check_size(run: RunConfig) -> None:
    """Raise ValueError if the size of proxy images or clips does not fit that of full ones.

    Proxy noise is derived from full-size noise in whole blocks, and from its first frames.
    """
    sizes = {side: getattr(run.explore, side) for side in ("height", "width")}
    if None in sizes.values() and any(sizes.values()):
        raise ValueError("explore.height: only one side is set: set both or neither")
    for side, pixels in sizes.items():
        full = getattr(run.model, side)
        if pixels is not None and full % pixels:
            raise ValueError(
                f"explore.{side}: {pixels} does not divide model.{side} = {full}: initial noise of"
                " full images is reduced in whole blocks"
            )
    frames, full = run.explore.frames, run.model.frames
    if full is None and run.rewards.frames is not None:
        raise ValueError(
            f"rewards.frames: {run.rewards.frames} without model.frames: images have no frames:"
            " leave it out"
        )
    if frames is not None and full is None:
        raise ValueError(
            f"explore.frames: {frames} without model.frames: images have no frames: leave it out"
        )
    if frames is not None and full is not None and frames > full:
        raise ValueError(
            f"explore.frames: {frames} is more than model.frames = {full}: proxy clips are the"
            " first frames of full ones"
        )
