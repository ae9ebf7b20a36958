"""A synthetic run directory, with the files of a two-stage run of the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import load
from records.images import save_images

PROMPTS = [
    "a red circle",
    "a blue square left of a green cross",
    "three yellow triangles",
    "two <b>purple</b> & orange circles",
    "a green triangle above a red square",
    "a cyan cross",
    "two blue squares",
    "a yellow circle below a purple cross",
]
HELD_OUT = 128
START = 1_763_700_000.0


def config() -> dict[str, Any]:
    return load("quickstart", ["iterations=20"]).model_dump(mode="json")


def write_run(
    path: Path, iterations: int = 20, ending: str | None = "run_finished", seed: int = 3
) -> Path:
    """Write a run directory: rewards rise, two actors die, and evaluations are at both ends."""
    path.mkdir(parents=True, exist_ok=True)
    versions = {"sol-rl": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0", "diffusers": "0.42.1"}
    (path / "config.json").write_text(json.dumps({"config": config(), "versions": versions}))
    rng = np.random.default_rng(seed)
    rows = [evaluation(0, 0.6667, 0.0203)]
    rows += [iteration(i, iterations, rng) for i in range(iterations)]
    if ending and iterations:
        rows.append(
            evaluation(iterations, 0.7849, 0.0182)
            | {"eval/gain": 0.1182, "eval/gain_stderr": 0.0211}
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "events.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in events(iterations, ending))
    )
    base = 0.65 + 0.15 * rng.standard_normal((HELD_OUT, 1))
    for step, noise in [(0, 90), (iterations, 25)][: 2 if ending and iterations else 1]:
        save_images(path / "images", step, PROMPTS, random_images(noise))
        folder = path / "evaluations"
        folder.mkdir(exist_ok=True)
        gain = 0.12 + 0.1 * rng.standard_normal((HELD_OUT, 1)) if step else 0.0
        rewards = np.clip(base + gain + 0.03 * rng.standard_normal((HELD_OUT, 4)), 0, 1)
        (folder / f"step_{step:06d}.json").write_text(
            json.dumps({"weights": "ema", "rewards": rewards.tolist()})
        )
    table = [
        {
            "name": f"blocks.{i}.attn.to_q",
            "shape": [192, 192],
            "quantized": True,
            "why": "linear layer of a block",
        }
        for i in range(16)
    ]
    table += [{"name": "proj_out", "shape": [192, 16], "quantized": False, "why": "last layer"}]
    (path / "quantization.json").write_text(json.dumps(table))
    return path


def evaluation(index: int, mean: float, error: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "iteration": index,
        "seconds": 4.0 + 10.8 * index,
        "weights": "ema",
        "reward/eval_mean": mean,
        "reward/eval/shapes": mean,
        "eval/stderr": error,
    }


def iteration(i: int, total: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return one row of metrics, with the names of the contract."""
    level = 0.6 + 0.16 * (1 - math.exp(-3 * i / max(1, total))) + 0.012 * rng.standard_normal()
    best, worst = min(0.98, level + 0.23), level - 0.27 + 0.01 * rng.standard_normal()
    explore = 4.4 + 0.3 * rng.standard_normal()
    regenerate = 1.7
    update = 4.2 + 0.2 * rng.standard_normal()
    reissued = 0 if i < 6 else 1 if i < 13 else 2
    return {
        "kind": "iteration",
        "iteration": i,
        "seconds": 14.0 + 10.8 * i,
        "samples_seen": 96 * (i + 1),
        "policy_version": i,
        "staleness": 0,
        "rewards/failed": 1 if i == 4 else 0,
        "reward/shapes": level,
        "explore/reward_mean": level - 0.02,
        "explore/reward_best": best,
        "explore/reward_worst": worst,
        "explore/contrast": best - worst,
        "rollout/images_per_s": 87.0,
        "rollout/actors": 2,
        "rollout/reissued": reissued,
        "audit/kendall_tau": 0.66 + 0.03 * rng.standard_normal(),
        "audit/spearman_rho": 0.83 + 0.02 * rng.standard_normal(),
        "audit/sign_agreement": 0.91 + 0.02 * rng.standard_normal(),
        "loss/policy": 0.9 - 0.01 * i + 0.02 * rng.standard_normal(),
        "loss/kl": 0.002 * i,
        "grad_norm": 0.4 + 0.05 * rng.standard_normal(),
        "zero_std_ratio": 0.0,
        "time/update_s": update,
        "reward/train_mean": level,
        "reward/train_std": 0.21,
        "time/publish_s": 0.12,
        "weights/version": i + 1,
        "weights/bytes": 2_884_000,
        "weights/delta_cosine": 0.62 + 0.02 * rng.standard_normal(),
        "weights/codes_changed": 0.012 - 0.0003 * i,
        "time/explore_s": explore,
        "time/regenerate_s": regenerate,
        "time/iteration_s": explore + regenerate + update + 0.3,
    }


def events(iterations: int, ending: str | None) -> list[dict[str, Any]]:
    """Return events: actors start, a rollout actor and the encoder are killed, tasks are retried,
    and every iteration publishes.
    """
    groups = {"rollout": 2, "reward": 1, "selector": 1, "encoder": 1, "learner": 1}
    rows: list[dict[str, Any]] = [
        {"time": START, "event": "run_started", "arm": "sol_rl", "iterations": iterations}
    ]
    for kind, count in groups.items():
        for actor in range(count):
            rows.append(
                {
                    "time": START + 2 + 0.2 * actor,
                    "event": "actor_started",
                    "kind": kind,
                    "actor": actor,
                    "incarnation": 0,
                    "pid": 4000 + actor,
                }
            )
    for i in range(iterations):
        moment = START + 14 + 10.8 * i
        rows.append(
            {
                "time": moment,
                "event": "version_published",
                "version": i + 1,
                "bytes": 2_884_000,
                "seconds": 0.12,
                "explorers": 2,
            }
        )
        rows.append(
            {
                "time": moment + 0.2,
                "event": "checkpoint_saved",
                "iteration": i + 1,
                "path": f"step_{i + 1:06d}",
            }
        )
        if i == 6:
            rows += _death(
                moment + 2,
                "rollout",
                1,
                "ActorDiedError: the actor died unexpectedly before finishing this task",
            )
        if i == 13:
            rows += _death(moment + 5, "encoder", 0, "no answer for 900 s: counts as hung")
    if ending:
        extra = (
            {"why": "prompt 'a red <circle>' is left with 3 scored images of 96"}
            if ending == "run_failed"
            else {}
        )
        rows.append(
            {
                "time": START + 20 + 10.8 * iterations,
                "event": ending,
                "iterations": iterations,
                **extra,
            }
        )
    return rows


def _death(moment: float, kind: str, actor: int, why: str) -> list[dict[str, Any]]:
    about = {"kind": kind, "actor": actor}
    return [
        {"time": moment, "event": "actor_died", **about, "incarnation": 0, "why": why, "pid": 4001},
        {
            "time": moment + 0.1,
            "event": "chunk_reissued",
            **about,
            "unit": "ChunkKey(7, 2, 1, 7)",
            "why": why,
        },
        {"time": moment + 3.4, "event": "actor_replaced", **about, "incarnation": 1, "pid": 4711},
    ]


def random_images(noise: int, size: int = 32) -> np.ndarray:
    """Return uint8 [P, 4, 3, size, size]: a disc or a square per prompt on grey, with ``noise``
    grey levels of noise.
    """
    rng = np.random.default_rng(noise)
    y, x = np.mgrid[:size, :size]
    images = np.full((len(PROMPTS), 4, 3, size, size), 128.0)
    for p, n in np.ndindex(len(PROMPTS), 4):
        cx, cy = 10 + 3 * n, 12 + p
        inside = (
            (x - cx) ** 2 + (y - cy) ** 2 < 49 if p % 2 else (abs(x - cx) < 7) & (abs(y - cy) < 7)
        )
        images[p, n][:, inside] = np.array(
            [(230, 60, 50), (50, 90, 230), (60, 190, 80), (240, 200, 40)][p % 4]
        )[:, None]
    return np.clip(images + noise * (rng.random(images.shape) - 0.5), 0, 255).astype(np.uint8)
