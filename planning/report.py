"""Text and JSON output of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from configs.sections import Model
from planning.assumptions import Device
from planning.layouts.report import as_json, outlook_lines
from planning.layouts.spec import TAKE_TURNS, configured_layout
from planning.object_store import store_size
from planning.placement import Node, kinds_of, need_of
from planning.plan import GB, Plan
from planning.stages import training_points


def lines_of(plan: Plan) -> list[str]:
    """Return the lines that ``sol-rl plan`` prints.

    They give the configuration, placement, memory, bytes, operations and, if a peak is assumed,
    seconds.
    """
    return [
        *_summary(plan),
        *_services(plan),
        *_memory(plan),
        *_bytes(plan),
        *_operations(plan),
        *(outlook_lines(plan.config, plan.outlook) if plan.outlook else []),
        *_warnings(plan),
    ]


def json_of(plan: Plan) -> dict[str, object]:
    """Return what ``sol-rl plan --json`` prints; null for seconds that are not predicted."""
    if plan.outlook is not None:
        return as_json(plan.config, plan.outlook)
    seconds = iteration_seconds(plan, plan.device) if plan.device else None
    unknown = {"bound_s": None, "layout": None, "idle_share": {}, "arms": {}}
    return {
        "name": plan.config.name,
        "arm": plan.config.arm,
        "iteration_s": seconds,
        **unknown,
        "problem": plan.problem,
    }


def _summary(plan: Plan) -> list[str]:
    config, arm = plan.config, plan.config.plan
    recomputed = config.optimizer.recomputed
    recomputation = (
        f"; {recomputed:.0%} of the blocks recomputed in the backward pass" if recomputed else ""
    )
    points, others = training_points(config)
    keep, model = config.selection.keep, config.model
    explore = "explore     nothing"
    if arm.explore is not None:
        explore = (
            f"explore     {arm.explore.pool_size} seeds, {arm.explore.steps} steps"
            f" {arm.explore.solver}, {plan.backend} ({plan.why})"
        )
    explored_model, scales = config.explored_model, config.guidance
    if arm.explore is not None and explored_model != model:
        explore += f", {_size(explored_model)}"
    full = f"{config.regenerate.steps} steps {arm.solver}, {config.regenerate.precision}"
    regenerate = (
        f"{keep} seeds, {full}" if arm.regenerate else "nothing: explored images are trained on"
    )
    guidance = "" if model.guidance is None else f", embedded guidance {model.guidance:g}"
    if scales.stages:
        stages = ", ".join(f"{stage} {scales.scale(stage):g}" for stage in scales.stages)
        guidance += f", classifier-free guidance ({stages})"
    return [
        (
            f"{config.name}: arm {config.arm}, objective {config.objective.name},"
            f" {config.prompts.per_iteration} prompts per iteration"
        ),
        (
            f"  model       {model.family} {model.path}, {_size(model)}{guidance};"
            f" {plan.source}, no weights read"
        ),
        f"  {explore}",
        f"  regenerate  {regenerate}",
        (
            f"  update      {keep} samples x {points} points, {others:.3g} passes of policies"
            f" other than the trained one; LoRA rank {config.lora.rank} alpha"
            f" {config.lora.alpha:g}, {plan.trained / 1e6:.1f} million parameters{recomputation}"
        ),
        (
            f"  quantized   {plan.quantized_weights / 1e9:.4g} of {plan.all_weights / 1e9:.4g}"
            " billion weights of the denoiser"
            if arm.explore is not None
            else "  quantized   nothing: there are no rollout actors"
        ),
    ]


def _size(model: Model) -> str:
    frames = "" if model.frames is None else f", {model.frames} frames"
    return f"{model.width}x{model.height}{frames}"


def _services(plan: Plan) -> list[str]:
    config = plan.config
    lines = ["", "actors"]
    for kind in kinds_of(config):
        service = config.services.of(kind)
        lines.append(f"  {kind:<12}{service.count} x {need_of(kind, 0, service).describe()}")
    if plan.problem is not None:
        return [*lines, "placement   none", f"  {plan.problem}"]
    return [*lines, "placement", *_placement(plan)]


def _placement(plan: Plan) -> list[str]:
    """Return a line per node; nodes in a row that hold the same numbers of actors share one."""
    held: dict[str, dict[str, list[int]]] = {node.id: {} for node in plan.nodes}
    for actor, node in sorted(plan.placed.items()):
        kind, _, number = actor.rpartition("-")
        held[node].setdefault(kind, []).append(int(number))

    def alike(numbered: tuple[int, Node]) -> tuple[str, dict[str, int]]:
        node = numbered[1]
        return node.describe(), {kind: len(numbers) for kind, numbers in held[node.id].items()}

    lines = list[str]()
    for (what, counts), group in groupby(enumerate(plan.nodes, 1), alike):
        nodes = list(group)
        if len(nodes) == 1:
            names = [
                f"{kind}-{numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
                for kind, found in held[nodes[0][1].id].items()
                for numbers in _runs(found)
            ]
            lines.append(f"  node {nodes[0][0]} ({what}): {', '.join(names) or 'nothing'}")
        else:
            each = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
            lines.append(f"  nodes {nodes[0][0]} to {nodes[-1][0]} ({what}): each {each}")
    return lines


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return the runs of consecutive numbers."""
    placed = enumerate(sorted(numbers))
    return [[n for _, n in run] for _, run in groupby(placed, lambda pair: pair[1] - pair[0])]


def _memory(plan: Plan) -> list[str]:
    lines = [
        "",
        ("memory of each actor, GB of 1e9 bytes; without device libraries and allocator gaps"),
    ]
    leaves = configured_layout(plan.config).leaves
    for kind, parts in plan.memory.items():
        service = plan.config.services.of(kind)
        where = f"GPU, share {service.gpus:g}" if service.gpus else "host"
        if kind == "encoder" and plan.config.model.text_offload and service.gpus:
            where += ", only while encoding"
        if kind in leaves:
            where += ", denoiser and autoencoder in host memory between turns"
        if kind == "encoder" and plan.config.prompts.encode_once:
            where += ", only at the start, before the other actors"
        known = sum(size for size in parts.values() if size is not None)
        lines.append(f"  {kind:<12}{known / GB:9.3f}  ({where})")
        lines += [
            f"    {'not known' if size is None else f'{size / GB:9.3f}':>19}  {what}"
            for what, size in parts.items()
        ]
    return lines


def _bytes(plan: Plan) -> list[str]:
    lines = [
        "",
        (
            f"broadcast   {plan.broadcast / GB:.3f} GB to each rollout actor at the start,"
            f" {plan.changing / GB:.3f} GB after each iteration, in shards of"
            f" {plan.config.publish.shard_mb} MiB"
            if plan.broadcast
            else "broadcast   nothing: there are no rollout actors"
        ),
        f"object store, at most {sum(plan.store.values()) / GB:.3f} GB",
    ]
    lines += [f"  {size / GB:10.3f}  {what}" for what, size in plan.store.items()]
    advice = (
        "  start every node with at least"
        f" --object-store-memory={store_size(sum(plan.store.values()))}"
    )
    return [*lines, advice] if plan.broadcast else lines


def _operations(plan: Plan) -> list[str]:
    device, config = plan.device, plan.config
    lines = [
        "",
        "operations of an iteration, PFLOP"
        + ("" if device is None else "; seconds are predicted from the assumptions below"),
    ]
    for name, stage in plan.stages.items():
        parts = [f"denoiser {stage.denoising / 1e15:.3g}"]
        parts += (
            [f"of it quantized {stage.quantized / stage.denoising:.0%}"] if stage.quantized else []
        )
        how = " in BF16" * stage.narrow + ", compiled" * stage.compiled
        parts += [f"decoding {stage.decoding / 1e15:.3g}{how}"] if stage.decoding else []
        seconds = "" if device is None else f"{stage.seconds(device):9.1f} s on {stage.gpus:g} GPU"
        lines.append(f"  {name:<12}{stage.flops / 1e15:10.4g}{seconds}  ({', '.join(parts)})")
    if device is None:
        return [
            *lines,
            "  no GPU is requested, so no time is predicted; --peak-tflops sets a speed",
        ]
    evaluation = plan.evaluation
    if plan.outlook is None:
        lines.append(
            f"iteration   {iteration_seconds(plan, device):.1f} s: regeneration overlaps"
            " exploration, the update follows both; scoring, transfers and publishing are not"
            " counted"
        )
    lines += [
        (
            f"evaluation  {evaluation.seconds(device):.1f} s, {config.evaluate.prompts} prompts x"
            f" {config.evaluate.noises} seeds x {config.evaluate.steps} steps, every"
            f" {config.evaluate.every} iterations"
        ),
        _assumed(device),
    ]
    return lines


def _assumed(device: Device) -> str:
    at = device.rates(quantized=True)
    narrow, wide = at.decoding
    moved = f"{at.memory / 1e12:.3g} of {device.bandwidth:g} TB/s"
    parts = [
        f"{at.bf16 / 1e12:.4g} of {device.tflops:g} TFLOP/s",
        f"{at.quantized / 1e12:.4g} of {device.quantized_tflops:g} in quantized layers",
        f"{narrow / 1e12:.3g} decoding in BF16, {wide / 1e12:.3g} in FP32",
        moved if math.isfinite(device.bandwidth) else "memory traffic takes no time",
        *([f"{device.memory_gb:g} GB"] if device.memory_gb else []),
        *([] if device.utilisation else ["fractions of the peaks as measured on one H200"]),
    ]
    return f"assumed     {device.name}: {'; '.join(parts)}"


def iteration_seconds(plan: Plan, device: Device) -> float:
    """Return the predicted seconds of an iteration.

    Without a prediction for a layout on GPUs it is max(explore, regenerate) + update.
    """
    if plan.outlook is not None:
        return plan.outlook.prediction.iteration
    seconds = {name: stage.seconds(device) for name, stage in plan.stages.items()}
    return max(seconds.get("explore", 0.0), seconds.get("regenerate", 0.0)) + seconds["update"]


def _warnings(plan: Plan) -> list[str]:
    device, services = plan.device, plan.config.services
    lines = []
    chosen = plan.outlook is not None and plan.outlook.choice is not None
    for kind, parts in plan.memory.items() if not chosen else ():
        service = services.of(kind)
        room = service.gpus * device.memory_gb if device is not None else 0.0
        needed = sum(size or 0 for size in parts.values()) / GB
        if kind in TAKE_TURNS and services.takes_turns:  # their shares do not bound their memory
            continue
        if room and needed > room:
            lines.append(
                f"too large   {kind} needs {needed:.1f} GB, services.{kind}.gpus = {service.gpus:g}"
                f" is {room:.1f} GB"
            )
    outlook, room = plan.outlook, device.memory_gb if device is not None else 0.0
    if not chosen and services.takes_turns and outlook and outlook.fullest_gb > room > 0:
        lines.append(
            f"too large   in its largest turn a GPU needs {outlook.fullest_gb:.1f} GB, but has"
            f" {room:.1f} GB"
        )
    if (
        device is not None
        and (seconds := plan.stages["update"].seconds(device)) > services.learner.deadline_s
    ):
        lines.append(
            f"too long    the update is one task of {seconds:.0f} s, services.learner.deadline_s ="
            f" {services.learner.deadline_s:g}"
        )
    return lines
