"""Format the state of a run for a terminal, at once: neither Ray nor torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.jobs.board import RunState, ServiceState
from records.formatting import duration
from records.tables import aligned


def status_lines(state: RunState) -> list[str]:
    """Return the lines that describe the state of a run."""
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
        lines.append(f"  returned to a checkpoint {state['restored']} times")
    return [*lines, *_actors(state["services"])]


def _rate(row: Mapping[str, float], key: str, pattern: str) -> str:
    return pattern.format(row[key]) if key in row else ""


def _actors(services: Sequence[ServiceState]) -> list[str]:
    heads = ["actor", "state", "version", "tasks", "busy", "restarts", "host", "pid", "node"]
    body = [
        [
            *(str(actor[key]) for key in ("actor", "state")),
            "-" if actor["version"] is None else str(actor["version"]),
        ]
        + [str(actor["tasks"]), f"{100 * actor['busy']:.0f}%", str(actor["restarts"])]
        + [str(actor[key] or "-") for key in ("host", "pid", "node")]
        for service in services
        for actor in service["actors"]
    ]
    table = [f"  {line}" for line in aligned([heads, *body])]
    extra = [
        f"  {service['kind']}: {service['waiting']} tasks wait, {service['reissued']} retries,"
        f" {service['starting']} actors start"
        for service in services
        if service["waiting"] or service["reissued"] or service["starting"]
    ]
    return table + extra
