"""Format the state of a run for a terminal, at once: neither Ray nor torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from cluster.jobs.board import ActorState, RunState, ServiceState
from records.formatting import duration
from records.tables import aligned

MOST_ROWS = 16
"""A service with more actors has a row per state and version instead of one per actor."""


def status_lines(state: RunState, every_actor: bool = False) -> list[str]:
    """Return the lines that describe the state of a run.

    ``every_actor``: a row for each actor of large services too.
    """
    row = state["row"]
    left = f", about {duration(state['left_s'])} left" if state["left_s"] is not None else ""
    version = "none" if state["version"] is None else state["version"]
    head = (
        f"{state['run']}  arm {state['arm']}, iteration {state['iteration']} of"
        f" {state['iterations']} done, policy version {version}"
    )
    lines = [head + left, f"  {state['directory']}"]
    rates = [
        _rate(row, "time/iteration_s", "{:.1f} s per iteration"),
        _rate(row, "rollout/images_per_s", "{:.1f} images/s explored"),
        _rate(row, "weights/bytes", "{:,.0f} bytes per broadcast"),
    ]
    quality = [
        _rate(row, "reward/train_mean", "reward {:.4f}"),
        (
            "held out " + " -> ".join(f"{value:.4f}" for value in state["held_out"])
            if state["held_out"]
            else ""
        ),
        _rate(row, "audit/kendall_tau", "tau {:.2f}"),
        _rate(row, "rewards/failed", "{:.0f} images without a score"),
    ]
    stages = [
        f"{stage} {done}{f'/{total}' if total else ''}"
        for stage, (done, total) in state["stages"].items()
        if done or total
    ]
    lines += [
        "  " + ", ".join(filter(None, part)) for part in (rates, quality, stages) if any(part)
    ]
    if state["restored"]:
        lines.append(f"  returns to a checkpoint: {state['restored']}")
    return [*lines, *_actors(state["services"], every_actor)]


def _rate(row: Mapping[str, float], key: str, pattern: str) -> str:
    return pattern.format(row[key]) if key in row else ""


def _actors(services: Sequence[ServiceState], every_actor: bool) -> list[str]:
    heads = ["actor", "state", "version", "tasks", "busy", "restarts", "host", "pid", "node"]
    body = [
        row
        for service in services
        for row in (
            [_row(actor) for actor in service["actors"]]
            if every_actor or len(service["actors"]) <= MOST_ROWS
            else _rows_by_state(service)
        )
    ]
    table = [f"  {line}" for line in aligned([heads, *body])]
    extra = [
        f"  {service['kind']}: waiting tasks {service['waiting']}, retries {service['reissued']},"
        f" starting actors {service['starting']}"
        for service in services
        if service["waiting"] or service["reissued"] or service["starting"]
    ]
    return table + extra


def _row(actor: ActorState) -> list[str]:
    return [
        *(actor["actor"], actor["state"], _version(actor)),
        *(str(actor["tasks"]), f"{100 * actor['busy']:.0f}%", str(actor["restarts"])),
        *(str(actor[key] or "-") for key in ("host", "pid", "node")),
    ]


def _rows_by_state(service: ServiceState) -> list[list[str]]:
    """Return a row for the actors of each state and version: sums, and how busy they are."""
    alike: dict[tuple[str, str], list[ActorState]] = {}
    for actor in service["actors"]:
        alike.setdefault((actor["state"], _version(actor)), []).append(actor)
    return [
        [
            *(f"{len(actors):,} x {service['kind']}", state, version),
            str(sum(actor["tasks"] for actor in actors)),
            f"{100 * sum(actor['busy'] for actor in actors) / len(actors):.0f}%",
            str(sum(actor["restarts"] for actor in actors)),
            *(_one_or_count(actors, "host"), "-", _one_or_count(actors, "node")),
        ]
        for (state, version), actors in alike.items()
    ]


def _version(actor: ActorState) -> str:
    return "-" if actor["version"] is None else str(actor["version"])


def _one_or_count(actors: Sequence[ActorState], key: Literal["host", "node"]) -> str:
    values = {str(actor[key] or "-") for actor in actors}
    return values.pop() if len(values) == 1 else f"{len(values):,} {key}s"
