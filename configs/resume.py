"""Which fields may differ between a run and its ``--resume``, or a measurement of its policy."""

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
)
DEVICES = (
    "services.learner.gpus",
    "services.encoder.gpus",
    "services.reward.gpus",
    "services.scorers.*.gpus",
)
"""Shares of GPUs that say, by being zero or not, which device computes; the device of rollout
actors is kept by checkpoints.
"""
MEASURED = ("seed", "prompts", "explore", "regenerate", "rewards")
"""What a measurement of a trained policy may vary: how its images are made and scored, not what
was trained.
"""


def measured(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A run's configuration with ``--set`` overrides, for measuring its policy.

    Raises ConfigError for what training depends on.
    """
    tree = config.model_dump(mode="json")
    apply(tree, *overrides)
    found = parse(tree)
    changed = differences(config, found, MEASURED)
    if changed:
        raise ConfigError(
            f"--set {'; '.join(changed)}: the policy was trained with that; what can be set is"
            f" in {', '.join(MEASURED)}"
        )
    return found


def differences(before: RunConfig, now: RunConfig, also_free: Sequence[str] = ()) -> list[str]:
    """Lines ``key: before -> now`` for every field that changes results and is not the same.

    ``iterations`` may grow when the learning-rate schedule does not depend on it. ``also_free`` are
    further keys that may differ.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    free: set[str] = {*OPERATIONAL, *also_free}
    if now.optimizer.schedule == "constant":
        free.add("iterations")
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and (
            _other_device(key, old.get(key), new.get(key))
            or not any(covers(pattern, key) for pattern in free)
        )
    ]


def _other_device(key: str, before: object, now: object) -> bool:
    """Whether a share of GPUs becomes none, or none a share: another device has other last bits."""
    return any(covers(pattern, key) for pattern in DEVICES) and bool(before) != bool(now)


def covers(pattern: str, key: str) -> bool:
    """Whether a dotted key is ``pattern`` or below it; ``*`` is any one part."""
    wanted, parts = pattern.split("."), key.split(".")
    return len(parts) >= len(wanted) and all(
        w in ("*", p) for w, p in zip(wanted, parts, strict=False)
    )


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
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
