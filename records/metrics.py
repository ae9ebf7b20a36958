"""Table of every metric of a run, with its names in metrics.jsonl and in Prometheus.

Prometheus names are those of metrics.jsonl with underscores and the prefix ``sol_rl_``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

PREFIX = "sol_rl_"
SERVICES = ("rollout", "reward", "selector", "encoder", "learner")
DOCUMENT = """# Metrics

A row of `metrics.jsonl` per iteration and per evaluation. `gauge`: the newest value; `total`: a
running total; `increment`: what one iteration added; `text`: not a number. Names in angle brackets
stand for a scorer's label and for a part of its score. Made by
`python -m records.metrics > docs/metrics.md`.

{table}
Only Prometheus has these gauges, with the run's name as the label `run`:

| Prometheus | meaning |
| --- | --- |
{gauges}"""
PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True)
class Metric:
    """Meaning of a metric, and how it is exported to Prometheus.

    ``gauge``: the newest value. ``total``: a counter whose rows hold the running total.
    ``increment``: a counter whose rows hold what one iteration added. ``text``: not a number.
    """

    help: str
    kind: Literal["gauge", "total", "increment", "text"] = "gauge"
    exported: str = ""  # Prometheus name without prefix, if it is not derived from the name


METRICS: dict[str, Metric] = {
    "kind": Metric("kind of row: iteration or evaluation", "text"),
    "iteration": Metric("last finished iteration, counted from 0"),
    "seconds": Metric("seconds of training so far, including earlier parts of a resumed run"),
    "policy_version": Metric("version of the policy that regenerated"),
    "explore/version": Metric("version of the policy that explored"),
    "explore/backend": Metric("precision that explored", "text"),
    "staleness": Metric(
        "number of updates by which the exploring policy was behind, at most explore_ahead"
    ),
    "weights": Metric("which weights were evaluated", "text"),
    "samples_seen": Metric("samples trained on", "total"),
    "reward/train_mean": Metric("mean reward of the samples trained on"),
    "reward/train_std": Metric("standard deviation of the rewards of the samples trained on"),
    "reward/eval_mean": Metric("mean reward of the held-out prompts"),
    "reward/eval/<scorer>": Metric("mean raw score of the held-out prompts"),
    "reward/eval/<scorer>/<part>": Metric("mean of a part of the score, held-out prompts"),
    "reward/<scorer>": Metric(
        "mean raw score of all images of an iteration, explored and regenerated",
        exported="reward_score",
    ),
    "reward/<scorer>/<part>": Metric("mean of a part of the score, all images of an iteration"),
    "eval/stderr": Metric("standard error of reward/eval_mean, clustered by prompt"),
    "eval/gain": Metric(
        "held-out reward minus that before training, same prompts and initial noise"
    ),
    "eval/gain_stderr": Metric("standard error of eval/gain, clustered by prompt"),
    "explore/reward_mean": Metric("mean proxy reward of all explored seeds"),
    "explore/reward_best": Metric("mean proxy reward of the best half of the selection"),
    "explore/reward_worst": Metric("mean proxy reward of the worst half of the selection"),
    "explore/contrast": Metric("explore/reward_best minus explore/reward_worst"),
    "explore/saturated": Metric(
        "share of the activations, per layer and step, that exceeded the amax of the previous pass,"
        ' by which they were packed (explore.activation_amax = "previous_pass")'
    ),
    "audit/kendall_tau": Metric(
        "rank agreement of proxy and full rewards, selected seeds (extremes)"
    ),
    "audit/spearman_rho": Metric(
        "rank correlation of proxy and full rewards, selected seeds (extremes)"
    ),
    "audit/sign_agreement": Metric(
        "share of selected seeds on the same side of their group's mean under both rewards"
    ),
    "audit/random_kendall_tau": Metric(
        "Kendall tau of proxy and full rewards, random seeds (unbiased)"
    ),
    "audit/random_spearman_rho": Metric(
        "Spearman rho of proxy and full rewards, random seeds (unbiased)"
    ),
    "audit/random_sign_agreement": Metric(
        "sign agreement of proxy and full rewards, random seeds (unbiased)"
    ),
    "audit/identity_error": Metric(
        "largest relative difference between what a rollout actor and the learner computed from"
        " the same packed weights; 0: the same bits"
    ),
    "audit/scorer_error": Metric(
        "largest difference between a scorer's two answers for the same images, in standard"
        " deviations"
    ),
    "audit/below": Metric(
        "number of consecutive iterations with rank agreement below its threshold"
    ),
    "weights/delta_cosine": Metric(
        "cosine between the changes of the weights and of the quantized weights in this update"
    ),
    "weights/codes_changed": Metric("share of quantized codes that the last update changed"),
    "weights/version": Metric("policy version that was published last"),
    "weights/bytes": Metric("bytes of the packed weights that were published", "increment"),
    "memory/moved_s": Metric(
        "seconds of the iteration during which weights moved between GPUs and host memory, if"
        " they leave between turns"
    ),
    "memory/moved_bytes": Metric(
        "bytes that moved between GPUs and host memory, over all actors", "increment"
    ),
    "loss/policy": Metric("the objective's policy loss"),
    "loss/kl": Metric("distance from the reference policy, unweighted"),
    "loss/ratio": Metric(
        "mean ratio of the probabilities of a sample under the trained and the sampling policy"
    ),
    "loss/clip_share": Metric("share of the ratios of loss/ratio that were clipped"),
    "loss/log_prob_drift": Metric(
        "mean difference between the recomputed and the stored log-probability of a path"
    ),
    "loss/ema": Metric("distance from AWM's own average of the policy, unweighted"),
    "grad_norm": Metric("norm of the gradient before clipping, mean over the iteration's steps"),
    "optimizer/learning_rate": Metric("learning rate of the update"),
    "optimizer/points": Metric(
        "points of the loss in the update; a point is a sample at one time t"
    ),
    "old_policy/decay": Metric("decay of the old policy in the update"),
    "zero_std_ratio": Metric(
        "share of prompts whose rewards are all equal, so that they have no signal"
    ),
    "rewards/failed": Metric("samples dropped because a scorer failed", "increment"),
    "rewards/stood_in": Metric(
        "samples for which the group's mean replaced the score of a failed optional scorer",
        "increment",
    ),
    "rewards/images_per_s/<scorer>": Metric("images per second of one actor, while it scores"),
    "eval/unscored/<scorer>": Metric("held-out images for which the scorer failed"),
    **{
        f"busy/{kind}": Metric(
            f"share of the iteration during which the mean {kind} actor had a task"
        )
        for kind in SERVICES
    },
    **{
        f"queue/{kind}": Metric(
            f"maximum number of tasks waiting for {kind} actors in the iteration"
        )
        for kind in SERVICES
    },
    "busy/scorers.<scorer>": Metric("busy/reward of a scorer with its own actors"),
    "queue/scorers.<scorer>": Metric("queue/reward of a scorer with its own actors"),
    "rollout/actors": Metric("rollout actors in service"),
    "rollout/reissued": Metric("retries of tasks", "total"),
    "actors/lost": Metric("actors of any service that died, or hung and were killed", "total"),
    "rollout/images_per_s": Metric("explored images per second, over all rollout actors"),
    "time/explore_s": Metric(
        "seconds until all prompts were explored, scored and selected, without those of"
        " time/explore_ahead_s"
    ),
    "time/explore_ahead_s": Metric(
        "seconds for which the iteration was explored ahead, during the previous iteration or an"
        " evaluation"
    ),
    "time/regenerate_s": Metric(
        "seconds from the last selection until all seeds were regenerated and scored"
    ),
    "time/update_s": Metric("seconds of the weight update"),
    "time/allreduce_s": Metric(
        "seconds of the update during which the learner's replicas summed gradients"
    ),
    "time/replica_wait_s": Metric(
        "seconds of the update during which the first replica waited for the slowest"
    ),
    "time/publish_s": Metric(
        "seconds from the update until every rollout actor had loaded the new policy, or could"
        " load it with explore_ahead"
    ),
    "time/iteration_s": Metric("seconds of a whole iteration"),
}
"""Every name in metrics.jsonl; ``<scorer>`` and ``<part>`` are placeholders for labels."""


RUN_GAUGES = {
    "iterations_left": "iterations that the run had not finished when it recorded its newest row",
    "newest_row_timestamp_seconds": "Unix time of the run's newest row, or of the start before it",
}
"""Gauges that are in no row; with them alerts find runs that ended early or stand still."""


def known_name(name: str) -> tuple[str, str | None]:
    """Return the key of ``METRICS`` for a name of a row, and the scorer that labels it, or None.

    ``reward/eval/clip`` gives (``reward/eval/<scorer>``, ``clip``). The scorer becomes a label in
    Prometheus. An undeclared name is returned unchanged.
    """
    if name in METRICS:
        return name, None
    for key, pattern in _patterns():
        if match := pattern.fullmatch(name):
            return key, match[1] if key.endswith("/<scorer>") else None
    return name, None


def declared(name: str) -> bool:
    """Return True if ``METRICS`` describes a name of a row."""
    return known_name(name)[0] in METRICS


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return keys with placeholders and their patterns, the most specific first.

    ``reward/eval/<scorer>`` has to be tried before ``reward/<scorer>/<part>``.
    """
    keys = sorted(
        (key for key in METRICS if PLACEHOLDER.search(key)),
        key=lambda key: -len(PLACEHOLDER.sub("", key)),
    )
    return [
        (key, re.compile("([^/]+)".join(map(re.escape, PLACEHOLDER.split(key))))) for key in keys
    ]


def exported_name(key: str) -> str:
    """Return the Prometheus name of a key, without the ``_total`` that the library appends."""
    if key in METRICS and METRICS[key].exported:
        return PREFIX + METRICS[key].exported
    return PREFIX + re.sub(r"\W+", "_", key.removesuffix("/<scorer>"))


def document() -> str:
    """Return docs/metrics.md."""
    gauges = "".join(f"| `{PREFIX}{name}` | {text} |\n" for name, text in RUN_GAUGES.items())
    return DOCUMENT.format(table=table(), gauges=gauges)


def table() -> str:
    """Return all metrics of rows as a table in Markdown."""
    rows = [
        (
            f"`{key}`",
            metric.kind,
            f"`{exported_name(key)}{'' if metric.kind == 'gauge' else '_total'}`"
            if metric.kind != "text"
            else "",
            metric.help.replace("|", "\\|"),
        )
        for key, metric in METRICS.items()
    ]
    heads = ("metrics.jsonl", "kind", "Prometheus", "meaning")
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(document(), end="")
