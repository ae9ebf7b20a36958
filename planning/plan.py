"""``sol-rl plan``: the resources that a run needs and the time of an iteration, without loading it.

Sizes and operations are counted on the architecture (``policy.pass_cost``); actors are placed by
``planning.placement``. The seconds of a stage come from ``policy.precision.cost``: denoiser passes
and decoding alone, without scoring, transfers and publishing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.assumptions import Assumptions, Device, backend_of, device_of, with_format
from planning.counting import counts_of
from planning.layouts.arms import arms_of
from planning.layouts.choose import Candidate, Choice
from planning.layouts.gpus import Gpus, assign_gpus
from planning.layouts.limits import refuse_too_many
from planning.layouts.predict import bound, gathered, predict
from planning.layouts.recomputation import with_recomputation
from planning.layouts.report import Outlook
from planning.layouts.resolve import (
    as_on_gpus,
    costs_of,
    known_gpus,
    limit_gpus,
    needs_layout,
    resolve_layout,
)
from planning.layouts.scenario import Scenarios, one_more, scenario_of
from planning.layouts.spec import configured_layout
from planning.object_store import NOTHING_SENT, object_store_bytes
from planning.placement import Node, NoRoom, needs_of, place
from planning.preflight import check_settings_of_model
from planning.resident_memory import actor_memory
from planning.sizes import WireBytes
from planning.stages import Stage, stages_of
from policy.decoders import check_decoder
from policy.families import Family, family_for
from policy.families.architectures import find_by_hub_id, write_configs
from policy.families.files import is_local
from policy.types import DTYPES

MOST_NODES = 64
GB = 1e9


@dataclass(frozen=True)
class Plan:
    """All values that ``planning.report`` prints; sizes are in bytes.

    ``memory`` has the bytes of one actor, by service and purpose.
    """

    config: RunConfig
    source: str
    backend: str
    why: str
    quantized_weights: int
    all_weights: int
    trained: int
    memory: dict[str, dict[str, int | None]]
    broadcast: int  # bytes of a version, sent to a new rollout actor
    changing: int  # bytes of it that are sent again after every update
    store: dict[str, int]
    stages: dict[str, Stage]
    evaluation: Stage
    device: Device | None
    nodes: Sequence[Node] = ()
    placed: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None  # why there is no placement
    outlook: Outlook | None = None  # None: the GPUs are unknown, or there are none
    scenarios: Scenarios | None = None  # input of a simulation; None without an outlook


def make_plan(
    config: RunConfig, given: Assumptions | None = None, nodes: Sequence[Node] | None = None
) -> Plan:
    """Return the plan of a run on ``nodes``, or on the smallest sufficient number of assumed nodes.

    Loads no weights. Raises ConfigError if the configuration cannot be planned.
    """
    given = given or Assumptions()
    refuse_too_many(config, MOST_NODES * given.node_cpus, MOST_NODES * given.node_gpus, nodes)
    try:
        with open_architecture(config) as (family, source):
            gpus = _gpus(config, given, nodes)
            if len(gpus) == 1 and given.accelerator is None:
                given = replace(given, accelerator=gpus[0].kind)
            requested = with_recomputation(config, family, gpus, given)
            final = resolve_layout(requested, family, gpus, given)
            plan = _plan(final.config, family, source, given, nodes)
            return _with_outlook(plan, requested, final.choice, family, gpus, given)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from None


def layout_of(
    config: RunConfig, given: Assumptions, nodes: Sequence[Node] | None = None
) -> Choice | None:
    """Return only the layout that ``make_plan`` would choose, or None if there is none to choose.

    Raises DoesNotFit if no layout fits, ConfigError for other faults of the configuration, and
    ValueError or FileNotFoundError for a model that is unsuitable or missing.
    """
    with open_architecture(config) as (family, _):
        gpus = _gpus(config, given, nodes)
        return resolve_layout(
            with_recomputation(config, family, gpus, given), family, gpus, given
        ).choice


def _gpus(config: RunConfig, given: Assumptions, nodes: Sequence[Node] | None) -> Sequence[Gpus]:
    """Return the GPUs that a layout may use, or as many as hold the configured shares.

    The result is empty if no service has a share of a GPU, or if the kind of the given GPUs is
    unknown and no layout has to be chosen.
    """
    requested = given.gpus or (config.layout.gpus if config.layout else None)
    if nodes is not None:
        try:
            return limit_gpus(known_gpus(nodes, given), requested)
        except ConfigError:
            if needs_layout(config):
                raise
            return []
    device, name = device_of(as_on_gpus(config) if needs_layout(config) else config, given)
    if device is None or name is None:
        if given.gpus:
            raise ConfigError(
                f"--gpus {given.gpus}: no service requests a GPU: --set layout.mode=auto chooses a"
                " layout on GPUs"
            )
        return []
    single = Gpus(name, 1, device.memory_gb, given.node_cpus / given.node_gpus)
    if requested or needs_layout(config):
        return [replace(single, count=requested or given.node_gpus)]
    numbers = configured_layout(config)
    counts = range(1, MOST_NODES * given.node_gpus + 1)
    sufficient = (count for count in counts if assign_gpus(numbers, [replace(single, count=count)]))
    return [replace(single, count=count) for count in (next(sufficient, 0),) if count]


def _with_outlook(
    plan: Plan,
    requested: RunConfig,
    choice: Choice | None,
    family: Family,
    gpus: Sequence[Gpus],
    given: Assumptions,
) -> Plan:
    """Return the plan with its prediction, unchanged if the actors' GPUs are unknown."""
    numbers = choice.best.numbers if choice else configured_layout(plan.config)
    assigned = assign_gpus(numbers, gpus) if gpus else None
    if assigned is None or not any("learner" in each.actors for each in assigned):
        return plan
    costs = costs_of(plan.config, family, gpus, given)
    tasks, arms = costs.tasks, arms_of(requested, family, gpus, given)
    free_exploring = {kind: replace(each, chunk=0.0) for kind, each in tasks.items()}
    own = Candidate(numbers, predict(numbers, assigned, tasks), None)
    scenario = scenario_of(plan.config, own, family, gpus, given, costs)
    outlook = Outlook(
        gpus,
        scenario.prediction,
        bound(tasks, gpus),
        predict(numbers, assigned, free_exploring).iteration,
        {arm: each.prediction for arm, each in arms.found.items()},
        choice,
        arms_not=arms.why_not,
        fullest_gb=max(costs.held_gb(each, numbers) for each in assigned),
        gathered=gathered(numbers, tasks),
    )
    more = one_more(requested, family, gpus, given) if choice else {}
    predicted = [each for each in choice.table if each.prediction] if choice else []
    table = [scenario_of(requested, each, family, gpus, given, costs) for each in predicted]
    scenarios = Scenarios(scenario, arms.found, more, table)
    gpus_of_stage = {
        stage: float(sum(each.count for each in assigned if kind in each.actors)) or 1.0
        for stage, kind in (
            ("explore", "rollout"),
            ("regenerate", "learner"),
            ("update", "learner"),
        )
    }
    stages = {name: replace(stage, gpus=gpus_of_stage[name]) for name, stage in plan.stages.items()}
    evaluation = replace(plan.evaluation, gpus=gpus_of_stage["update"])
    return replace(plan, stages=stages, evaluation=evaluation, outlook=outlook, scenarios=scenarios)


@contextmanager
def open_architecture(config: RunConfig) -> Iterator[tuple[Family, str]]:
    """Yield (family, source of its architecture), with published files for a known hub id.

    A local directory takes precedence. Raises ValueError or FileNotFoundError for a model that is
    missing or unsuitable.
    """
    model = config.model
    known = None if is_local(model) else find_by_hub_id(model.path)
    with tempfile.TemporaryDirectory(prefix="sol-rl-plan-") as scratch:
        if known is not None:
            path = str(write_configs(known[1], scratch))
            model = model.model_copy(update={"path": path})
        try:
            family = family_for(model)
            check_settings_of_model(config, family)
            with suppress(FileNotFoundError):  # the decoder need not be on this machine
                check_decoder(config, family)
        except ValueError as error:  # name the model, not the temporary directory
            raise ValueError(str(error).replace(scratch, config.model.path)) from None
        yield (
            family,
            (f"published architecture {known[0]}" if known else "its own configuration files"),
        )


def _plan(
    config: RunConfig, family: Family, source: str, given: Assumptions, nodes: Sequence[Node] | None
) -> Plan:
    device, accelerator = device_of(config, given)
    backend, why = backend_of(config, accelerator)
    dtype = DTYPES[config.regenerate.precision]
    counts = counts_of(config, family, backend)
    if is_local(config.model) and family.published:
        source += f", equal to those of {family.published}"
    wire = WireBytes(counts.broadcast, counts.changing) if config.plan.explore else NOTHING_SENT
    if device is not None:
        device = with_format(device, accelerator, backend, given.quantized_peak_tflops)
    stages, evaluation = stages_of(config, counts)
    used_nodes, placed, problem = _placement(config, given, accelerator, nodes)
    return Plan(
        config=config,
        source=source,
        backend=backend.name,
        why=why,
        quantized_weights=counts.quantized,
        all_weights=counts.weights,
        trained=counts.trained,
        memory=actor_memory(config, counts, family, backend.name, dtype),
        broadcast=wire.total,
        changing=wire.changing,
        store=object_store_bytes(config, family, wire, dtype),
        stages=stages,
        evaluation=evaluation,
        device=device,
        nodes=used_nodes,
        placed=placed,
        problem=problem,
    )


# ---- placement


def _placement(
    config: RunConfig, given: Assumptions, accelerator: str | None, nodes: Sequence[Node] | None
) -> tuple[Sequence[Node], Mapping[str, str], str | None]:
    """Return (nodes, node id by actor, problem); problem is None if all actors have a place.

    Without ``nodes`` it tries increasing numbers of assumed ones, up to ``MOST_NODES``, and returns
    the problem of the first attempt if none suffices.
    """
    needs = needs_of(config)
    if nodes is not None:
        try:
            return nodes, place(needs, nodes), None
        except NoRoom as error:
            return nodes, {}, str(error)
    labels = {"ray.io/accelerator-type": accelerator} if accelerator else {}
    problem = ""
    fewest = max(
        1,
        math.ceil(sum(need.gpus for need in needs) / given.node_gpus),
        math.ceil(sum(need.cpus for need in needs) / given.node_cpus),
    )
    for count in range(fewest, max(fewest, MOST_NODES) + 1):
        assumed = [
            Node(f"node {i + 1}", given.node_cpus, given.node_gpus if accelerator else 0, labels)
            for i in range(count)
        ]
        try:
            return assumed, place(needs, assumed), None
        except NoRoom as error:
            problem = problem or str(error)
    return [], {}, problem
