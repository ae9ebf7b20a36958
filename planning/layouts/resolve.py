"""Resolve the ``[layout]`` of a configuration: actors and shares for the available GPUs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.services import Service
from learner.step_assignment import StepAssignment
from planning.assumptions import (
    ACCELERATORS,
    Assumptions,
    Device,
    backend_of,
    device_of,
    host_link,
    peer_link,
    with_format,
)
from planning.counting import Counts, counts_of
from planning.durations import LINK, as_measured
from planning.gathering import NOTHING, Gathering
from planning.layouts.choose import Choice, choose
from planning.layouts.costs import Costs
from planning.layouts.gpus import Gpus, gpus_of
from planning.layouts.predict import Tasks
from planning.layouts.spec import explicit_fields, with_layout
from planning.placement import Node, kinds_of
from planning.resident_memory import actor_memory, parts_of
from planning.scoring import score_seconds
from planning.stages import passes, stages_of, training_points
from planning.waiting import Waiting
from policy.families import FAMILIES, Family
from policy.types import DTYPES
from rewards import may_use_gpu


@dataclass(frozen=True)
class ResolvedLayout:
    """A configuration with its layout written out; ``choice`` is None if there was none to make."""

    config: RunConfig
    choice: Choice | None


def resolve_layout(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions | None = None
) -> ResolvedLayout:
    """Return the configuration with the best layout on ``gpus`` written out.

    Raises ConfigError, with one line, if there is no GPU or no layout fits.
    """
    if not needs_layout(config):
        return ResolvedLayout(config, None)
    if not gpus:
        mode = config.layout.mode if config.layout else None
        raise ConfigError(
            f"layout.mode = {mode!r}: there is no GPU for {config.model.path}: run it on machines"
            " with GPUs, or set gpus = 0 for services.rollout, learner, encoder and reward to run"
            " on CPUs"
        )
    used_gpus = limit_gpus(gpus, config.layout.gpus if config.layout else None)
    choice = choose(config, used_gpus, costs_of(config, family, used_gpus, given or Assumptions()))
    return ResolvedLayout(with_layout(config, choice.best.numbers), choice)


def needs_layout(config: RunConfig) -> bool:
    """Return True if a layout is requested and not all its values are configured explicitly.

    False also if all services that may use GPUs are explicitly configured to use none.
    """
    if config.layout is None:
        return False
    explicit = explicit_fields(config)
    large_services = [kind for kind in ("rollout", "learner") if kind in explicit]
    gpu_services = [kind for kind in kinds_of(config) if _may_use_gpu(config, kind)]
    if all(explicit[kind].get("gpus") == 0 for kind in gpu_services):
        return False
    all_explicit = all(explicit[kind].keys() >= {"actors", "gpus"} for kind in large_services)
    return not (all_explicit and all("gpus" in explicit[kind] for kind in gpu_services))


def _may_use_gpu(config: RunConfig, kind: str) -> bool:
    labels = config.scorers_of(kind)
    if labels:
        return any(may_use_gpu(s.name) for s in config.rewards.all_scorers if s.label in labels)
    return kind in ("rollout", "learner", "encoder")


def limit_gpus(gpus: Sequence[Gpus], count: int | None) -> list[Gpus]:
    """Return ``gpus`` with at most ``count`` of each kind.

    Raises ConfigError if there are fewer than ``count`` in all.
    """
    available = sum(each.count for each in gpus)
    if count is not None and count > available:
        raise ConfigError(
            f"layout.gpus = {count}, but there are only {available} GPUs: lower it, or add nodes"
        )
    return [replace(each, count=min(each.count, count or each.count)) for each in gpus]


def known_gpus(nodes: Sequence[Node], given: Assumptions | None = None) -> list[Gpus]:
    """Return the whole free GPUs of nodes. Raises ConfigError for a kind of unknown memory."""
    memory = {kind: known.memory_gb for kind, known in ACCELERATORS.items()}
    if given is not None and given.gpu_memory_gb:
        memory |= dict.fromkeys([*memory, given.accelerator or ""], given.gpu_memory_gb)
    return gpus_of(nodes, memory)


def keep_layout(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """Return the configuration for ``--resume``, with recorded values that affect results fixed.

    These values count as configured explicitly; everything else is chosen for the GPUs that are
    available now, with ``services.learner.elastic`` also the learner's replicas. Raises ConfigError
    if weights are to leave GPUs between turns and the recorded run explores ahead.
    """
    if config.layout is None:
        return config
    explicit, services, own = explicit_fields(config), recorded.services, config.services
    learner: dict[str, object] = {}
    if "actors" not in explicit["learner"] and not own.learner.elastic:
        learner["replicas"] = services.learner.replicas
        learner |= (
            {} if "share" in own.learner.model_fields_set else {"share": services.learner.share}
        )
    changed: dict[str, Service] = {"learner": own.learner.model_copy(update=learner)}
    for kind in ("encoder", "reward"):
        if not services.of(kind).gpus and "gpus" not in explicit.get(kind, {"gpus": 0}):
            changed[kind] = own.of(kind).model_copy(update={"gpus": 0.0})
    top: dict[str, object] = {"services": own.model_copy(update=changed)}
    if "explore_ahead" not in config.model_fields_set:
        top["explore_ahead"] = recorded.explore_ahead
        if recorded.explore_ahead and own.takes_turns:
            raise ConfigError(
                "--resume: the layout of the run explores ahead, so that rollout actors and the"
                " learner work at the same time: leave out between_turns = 'host'"
            )
    return config.model_copy(update=top)


# ---- costs


def costs_of(config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions) -> Costs:
    """Return the seconds of tasks and the bytes of actors on each kind of GPU."""
    tasks, memory, parts, known = {}, {}, {}, []
    dtype = DTYPES[config.regenerate.precision]
    for kind in [each.kind for each in gpus]:
        device, backend, counts = on_kind(config, family, kind, given)
        known.append((backend, counts))
        held = actor_memory(config, counts, family, backend, dtype)
        parts[kind] = parts_of(config, counts, backend, held)
        move = {service: each.models / host_link(kind) for service, each in parts[kind].items()}
        tasks[kind] = tasks_of(config, counts, device, move)
        if given.measured:  # measured durations already include gathering
            tasks[kind] = as_measured(config, tasks[kind], given.measured[kind])
        else:
            gathering = gathering_of(config, counts, kind, given.node_gpus)
            tasks[kind] = replace(tasks[kind], gathering=gathering)
        memory[kind] = {
            service: float(sum(size or 0 for size in parts.values()))
            for service, parts in held.items()
        }

    @functools.cache
    def learner(replicas: int) -> float:
        services = config.services.model_copy(
            update={"learner": config.services.learner.model_copy(update={"replicas": replicas})}
        )
        replicated = config.model_copy(update={"services": services})
        # the learner packs in the format of the rollout actors' kind, which is not chosen yet
        held = [
            actor_memory(replicated, counts, family, backend, dtype)["learner"]
            for backend, counts in known
        ]
        # reserve room for exploring ahead, which also keeps the previous policy
        ahead = counts.trained * 4 if not config.explore_ahead and config.plan.regenerate else 0
        return float(max(sum(size or 0 for size in parts.values()) for parts in held) + ahead)

    return Costs(tasks, memory, learner, config.prompts.encode_once, parts)


def on_kind(
    config: RunConfig, family: Family, kind: str, given: Assumptions
) -> tuple[Device, str, Counts]:
    """Return (device, name of the rollout actors' backend, counts) for one kind of GPU."""
    device, name = device_of(config, replace(given, accelerator=kind))
    assert device is not None
    backend, _ = backend_of(as_on_gpus(config), name)
    device = with_format(device, name, backend, given.quantized_peak_tflops)
    return device, backend.name, counts_of(config, family, backend)


def as_on_gpus(config: RunConfig) -> RunConfig:
    """Return ``config`` with a GPU for each rollout actor and learner.

    It stands in for the shares that a layout will assign.
    """
    own, gpu = config.services, {"gpus": 1.0}
    changed = {"rollout": own.rollout.model_copy(update=gpu)}
    services = own.model_copy(update={**changed, "learner": own.learner.model_copy(update=gpu)})
    return config.model_copy(update={"services": services})


def tasks_of(config: RunConfig, counts: Counts, device: Device, move: Mapping[str, float]) -> Tasks:
    """Return the tasks of an iteration in seconds on one device; ``move`` as in ``Tasks``."""
    prompts, explore = config.prompts.per_iteration, config.plan.explore
    seconds = {
        name: stage.seconds(device) * stage.gpus
        for name, stage in stages_of(config, counts)[0].items()
    }
    per_prompt = -(-explore.pool_size // config.explore.chunk_size) if explore else 0
    drawn = [(prompts * (explore.pool_size if explore else 0), config.explored_model)]
    if config.plan.regenerate:
        regenerated = config.selection.keep + config.audit.random_seeds
        drawn.append((prompts * regenerated, config.model))
    return Tasks(
        chunks=prompts * per_prompt,
        prompts=prompts,
        chunk=seconds.get("explore", 0.0) / max(1, prompts * per_prompt),
        regenerate=seconds.get("regenerate", 0.0) / prompts,
        update=seconds["update"] / prompts,
        score=score_seconds(config, drawn, device),
        encode=_encode(config, counts, device),
        move=move,
        waiting=Waiting(config.selection.keep, StepAssignment.of(config.optimizer)),
    )


def _encode(config: RunConfig, counts: Counts, device: Device) -> float:
    """Return the seconds to encode all prompts of an iteration; 0 if all are encoded at the start.

    An editing model encodes each source image with the negative prompt too; other models encode the
    negative prompt once.
    """
    if config.prompts.encode_once:
        return 0.0
    with_negative = FAMILIES[config.model.family].edits and config.guidance.stages
    rows = config.prompts.per_iteration * (2 if with_negative else 1)
    flops = rows * (counts.text_flops + counts.source_flops)
    return flops / (1e12 * device.plain)


def gathering_of(config: RunConfig, counts: Counts, accelerator: str, node: int) -> Gathering:
    """Return what learners on GPUs of this kind gather, with ``node`` GPUs per node."""
    if config.services.learner.shard == "none":
        return NOTHING
    full, scales = config.regenerate, config.guidance
    points, others = training_points(config)
    # passes of one policy over the points of a sample
    passes_per_sample = points / config.optimizer.batch_size
    near = counts.denoiser / peer_link(accelerator)
    return Gathering(
        near_s=near,
        far_s=max(near, counts.denoiser / LINK),
        node=node,
        batch=full.batch_size,
        generate=full.steps * (1 if scales.one_pass else passes(scales.regenerate)),
        train=passes_per_sample * (2 + others) * (1 if scales.one_pass else passes(scales.train)),
        publish=counts.targets / counts.denoiser if config.plan.explore else 0.0,
        images=config.selection.keep + config.audit.random_seeds if config.plan.regenerate else 0,
        samples=config.selection.keep,
    )
