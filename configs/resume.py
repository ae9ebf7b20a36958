"""Which fields may differ between a run and its ``--resume``: those that cannot change results."""

from __future__ import annotations

from typing import Any

from configs.schema import RunConfig

PER_SERVICE = (
    "actors",
    "cpus",
    "gpus",
    "in_flight",
    "deadline_s",
    "warm_up_s",
    "max_attempts",
    "max_restarts",
    "accelerator",
    "labels",
    "strategy",
    "min_actors",
    "max_actors",
)
OPERATIONAL = (
    "run_root",
    *(f"services.*.{name}" for name in PER_SERVICE),
    *(f"services.scorers.*.{name}" for name in PER_SERVICE),
    "services.autoscale",
    "services.start_deadline_s",
    "services.wait_for_nodes_s",
    "checkpoint",
    "stop",
    "logging",
    "publish",
)


def differences(before: RunConfig, now: RunConfig) -> list[str]:
    """Lines ``key: before -> now`` for every field that changes results and is not the same.

    ``iterations`` may grow when the learning-rate schedule does not depend on it.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    free: set[str] = set(OPERATIONAL)
    if now.optimizer.schedule == "constant":
        free.add("iterations")
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(_covers(pattern, key) for pattern in free)
    ]


def _covers(pattern: str, key: str) -> bool:
    wanted, parts = pattern.split("."), key.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}
    if isinstance(tree, list) and tree:
        return {k: v for i, value in enumerate(tree) for k, v in _flat(value, f"{prefix}.{i}").items()}
    return {prefix: tree}
