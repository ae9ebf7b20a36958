"""Fields that may differ when a run is resumed (``--resume``) or its policy is measured."""

from __future__ import annotations

from collections.abc import Sequence

from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig

PER_SERVICE = (
    "actors", "cpus", "gpus", "in_flight", "deadline_s", "warm_up_s", "max_attempts",
    "max_restarts", "accelerator", "labels", "strategy", "min_actors", "max_actors",
)  # fmt: skip
OPERATIONAL = (
    "run_root",
    "layout",
    *(f"services.*.{name}" for name in PER_SERVICE),
    "services.learner.silence_s",
    "services.learner.elastic",
    "services.learner.shard",
    "services.rollout.between_turns",
    "services.learner.between_turns",
    *(f"services.scorers.*.{name}" for name in PER_SERVICE),
    "services.autoscale",
    "services.start_deadline_s",
    "services.wait_for_nodes_s",
    "services.node_silence_s",
    "optimizer.gradient_checkpointing",
    "checkpoint",
    "stop",
    "logging",
    "publish",
    "evaluate.explore_meanwhile",
    "audit.identity_action",
    "audit.identity_every",
    "prompts.allow_overlap",
    "prompts.encode_once",
    "rewards.deterministic",
    "rewards.outage_s",
)
ELASTIC = ("services.learner.replicas", "services.learner.share")
"""Fields that may differ as well if ``services.learner.elastic`` is set."""
DEVICES = (
    "services.learner.gpus",
    "services.encoder.gpus",
    "services.reward.gpus",
    "services.scorers.*.gpus",
)
"""GPU shares that decide by being zero or not which device computes.

The device of rollout actors is recorded in checkpoints.
"""
MEASURED = ("seed", "prompts", "explore", "regenerate", "rewards")
"""Fields that a measurement of a trained policy may change: how images are sampled and scored."""


def config_for_measurement(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration with ``--set`` overrides, for measuring its policy.

    Raises ConfigError if an override changes a field that the training depended on.
    """
    tree = config.model_dump(mode="json")
    apply(tree, *overrides)
    changed_config = parse(tree)
    changed = differences(config, changed_config, MEASURED)
    if changed:
        raise ConfigError(
            f"--set {'; '.join(changed)}: the policy was trained with that; what can be set is"
            f" in {', '.join(MEASURED)}"
        )
    return changed_config


def differences(before: RunConfig, now: RunConfig, also_free: Sequence[str] = ()) -> list[str]:
    """Return a line ``key: before -> now`` for every field that affects results and differs.

    ``iterations`` may differ if the learning-rate schedule does not depend on it. ``also_free`` are
    further keys that may differ.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    free: set[str] = {*OPERATIONAL, *also_free}
    if now.optimizer.schedule == "constant":
        free.add("iterations")
    if now.services.learner.elastic:
        free.update(ELASTIC)
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and (
            _other_device(key, old.get(key), new.get(key))
            or not any(matches_key(pattern, key) for pattern in free)
        )
    ]


def _other_device(key: str, before: object, now: object) -> bool:
    """Return True if a GPU share becomes zero or nonzero, as devices differ in the last bits."""
    return any(matches_key(pattern, key) for pattern in DEVICES) and bool(before) != bool(now)


def matches_key(pattern: str, key: str) -> bool:
    """Return True if a dotted key equals ``pattern`` or is below it; ``*`` matches any one part."""
    requested, parts = pattern.split("."), key.split(".")
    return len(parts) >= len(requested) and all(
        w in ("*", p) for w, p in zip(requested, parts, strict=False)
    )


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of a tree by dotted key; empty tables and lists are leaves."""
    if isinstance(tree, dict) and tree:
        return {
            k: v
            for key, value in tree.items()
            for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()
        }
    if isinstance(tree, list) and tree:
        return {
            k: v for i, value in enumerate(tree) for k, v in _flat(value, f"{prefix}.{i}").items()
        }
    return {prefix: tree}
