"""The run's metrics for Prometheus: what each one means, and a small exporter that serves the
newest values.

The exporter has a registry of its own, so that it lives beside Ray's metrics. Names are those of
metrics.jsonl with underscores and the prefix ``sol_rl_``; counters end in ``_total``; the scorer is
a label.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

log = logging.getLogger(__name__)
Events = Callable[..., None]
PREFIX = "sol_rl_"
SERVICES = ("rollout", "reward", "selector", "encoder", "learner")
EVAL_SCORER = "reward/eval/<scorer>"
SCORER = "reward/<scorer>"
SCORER_SPEED = "rewards/images_per_s/<scorer>"
UNSCORED = "eval/unscored/<scorer>"


@dataclass(frozen=True)
class Metric:
    """What a name means. ``gauge``: the newest value. ``total``: a counter whose rows hold the
    running total. ``increment``: a counter whose rows hold what one iteration added.
    """

    help: str
    kind: Literal["gauge", "total", "increment"] = "gauge"


METRICS: dict[str, Metric] = {
    "iteration": Metric("the newest finished iteration, from 0"),
    "seconds": Metric("seconds of training so far, over all resumes"),
    "policy_version": Metric("version of the policy that regenerated"),
    "explore/version": Metric("version of the policy that explored"),
    "explore/backend": Metric("precision that explored; text, so in metrics.jsonl only"),
    "staleness": Metric("updates by which the exploring policy was behind, at most explore_ahead"),
    "samples_seen": Metric("samples trained on", "total"),
    "reward/train_mean": Metric("mean reward of the samples trained on"),
    "reward/train_std": Metric("standard deviation of those rewards"),
    "reward/eval_mean": Metric("mean reward of the held-out prompts"),
    EVAL_SCORER: Metric("mean raw score of the held-out prompts"),
    SCORER: Metric("mean raw score of all pictures of an iteration, explored and regenerated"),
    "eval/stderr": Metric("standard error of reward/eval_mean, clustered by prompt"),
    "eval/gain": Metric("held-out reward minus that before training, same prompts and noises"),
    "eval/gain_stderr": Metric("standard error of eval/gain, clustered by prompt"),
    "explore/reward_mean": Metric("mean proxy reward of all explored noises"),
    "explore/reward_best": Metric("mean proxy reward of the best half of the selection"),
    "explore/reward_worst": Metric("mean proxy reward of the worst half of the selection"),
    "explore/contrast": Metric("best minus worst"),
    "audit/kendall_tau": Metric(
        "rank agreement of proxy and full rewards, selected noises (extremes)"
    ),
    "audit/spearman_rho": Metric(
        "rank correlation of proxy and full rewards, selected noises (extremes)"
    ),
    "audit/sign_agreement": Metric(
        "share of selected noises on the same side of their group's mean under both rewards"
    ),
    "audit/random_kendall_tau": Metric(
        "Kendall tau of proxy and full rewards, random noises (unbiased)"
    ),
    "audit/random_spearman_rho": Metric(
        "Spearman rho of proxy and full rewards, random noises (unbiased)"
    ),
    "audit/random_sign_agreement": Metric(
        "sign agreement of proxy and full rewards, random noises (unbiased)"
    ),
    "audit/below": Metric("iterations in a row in which rank agreement was below its threshold"),
    "weights/delta_cosine": Metric(
        "cosine of this update's weight change and the quantised weights' change"
    ),
    "weights/codes_changed": Metric("share of quantised codes that the last update changed"),
    "weights/version": Metric("version of the policy that was published last"),
    "weights/bytes": Metric("bytes of packed weights broadcast, per explorer", "increment"),
    "loss/policy": Metric("the objective's policy loss"),
    "loss/kl": Metric("distance from the reference policy, unweighted"),
    "loss/ratio": Metric(
        "mean ratio of the probabilities of a sample under the trained and the sampling policy"
    ),
    "loss/clip_share": Metric("share of those ratios that were clipped"),
    "loss/log_prob_drift": Metric(
        "mean difference of a path's log-probability computed again and as it was stored"
    ),
    "loss/ema": Metric("distance from AWM's own average of the policy, unweighted"),
    "grad_norm": Metric("norm of the gradient before clipping, mean over the iteration's steps"),
    "zero_std_ratio": Metric(
        "share of prompts whose rewards are all equal, so that they teach nothing"
    ),
    "rewards/failed": Metric("samples dropped because a scorer failed on them", "increment"),
    "rewards/stood_in": Metric(
        "samples in which the group's mean stood in for an optional scorer that failed", "increment"
    ),
    SCORER_SPEED: Metric("pictures per second of one actor, while the scorer works"),
    UNSCORED: Metric("held-out pictures that the scorer failed on"),
    **{
        f"busy/{kind}": Metric(
            f"share of the iteration in which the mean {kind} actor had work in hand"
        )
        for kind in SERVICES
    },
    **{
        f"queue/{kind}": Metric(f"most units that waited for a {kind} actor in the iteration")
        for kind in SERVICES
    },
    "rollout/actors": Metric("rollout actors in service"),
    "rollout/reissued": Metric("units of work given out again", "total"),
    "actors/lost": Metric("actors of any service that died, or hung and were killed", "total"),
    "rollout/images_per_s": Metric("explored pictures per second, over all rollout actors"),
    "time/explore_s": Metric(
        "seconds until all prompts were explored, scored and selected; those before its turn"
        " left out"
    ),
    "time/explore_ahead_s": Metric("seconds for which the iteration was explored before its turn"),
    "time/regenerate_s": Metric(
        "seconds from there until all selected noises were regenerated and scored"
    ),
    "time/update_s": Metric("seconds of the weight update"),
    "time/allreduce_s": Metric(
        "seconds of it in which the learner's replicas added up their gradients"
    ),
    "time/replica_wait_s": Metric(
        "seconds of it in which the learner's first replica waited for the slowest"
    ),
    "time/publish_s": Metric(
        "seconds from the update until every explorer held the new policy, or with explore_ahead"
        " could"
    ),
    "time/iteration_s": Metric("seconds of a whole iteration"),
}
"""Every name of metrics.jsonl. ``<scorer>`` stands for a scorer's label."""


class PrometheusExporter:
    """A sink of rows (``records.sinks``): serves what it was given last. Port 0: off. A run is
    never stopped because watching it failed.
    """

    name = "prometheus"

    def __init__(self, port: int, host: str = "127.0.0.1", events: Events | None = None):
        """Start serving on ``host:port``; where that is impossible, warn in one line, call
        ``events("metrics_unavailable", address=..., why=...)`` if given, and carry on without.
        """
        self.registry = CollectorRegistry()
        self.problem: str | None = None
        self._instruments: dict[str, Gauge | Counter] = {}
        self._totals: dict[str, float] = {}
        self._server: Any = None
        if port == 0:
            return
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            self.problem = (
                f"metrics are not served: {host}:{port}: {error.strerror or error}; training goes"
                " on (choose another with --set logging.prometheus_port=PORT, 0 for none)"
            )
            log.warning(self.problem)
            if events is not None:
                events(
                    "metrics_unavailable",
                    address=f"{host}:{port}",
                    why=error.strerror or str(error),
                )

    @property
    def serving(self) -> bool:
        """Whether somebody can look."""
        return self._server is not None

    def row(self, row: Mapping[str, Any]) -> None:
        """Take the numbers of one row of metrics.jsonl; text, null and booleans are passed over. An
        evaluation's iteration is not the run's: it is left out.
        """
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name == "iteration" and row.get("kind") == "evaluation":
                continue
            self._observe(name, float(value))

    def close(self) -> None:
        """Stop serving; the port is free on return."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None

    def _observe(self, name: str, value: float) -> None:
        key, scorer = known_name(name)
        metric = METRICS.get(key, Metric(f"{name} of metrics.jsonl"))
        instrument = self._instrument(key, metric)
        if isinstance(instrument, Counter):
            if math.isfinite(value) and value >= 0:
                instrument.inc(self._added(key, value) if metric.kind == "total" else value)
        else:
            (instrument.labels(scorer=scorer) if scorer else instrument).set(value)

    def _added(self, name: str, total: float) -> float:
        """By how much a running total exceeds all before it: one that fell is a run that went back
        to a checkpoint.
        """
        highest = self._totals.get(name, 0.0)
        self._totals[name] = max(highest, total)
        return self._totals[name] - highest

    def _instrument(self, key: str, metric: Metric) -> Gauge | Counter:
        name = exported_name(key)
        if name not in self._instruments:
            labels = ("scorer",) if "<scorer>" in key else ()
            make = Gauge if metric.kind == "gauge" else Counter
            self._instruments[name] = make(name, metric.help, labels, registry=self.registry)
        return self._instruments[name]


def known_name(name: str) -> tuple[str, str | None]:
    """A row's name as ``METRICS`` has it, and the scorer in it: ``reward/eval/clip`` is
    (``reward/eval/<scorer>``, ``clip``).
    """
    if name in METRICS:
        return name, None
    for pattern in (EVAL_SCORER, SCORER_SPEED, UNSCORED, SCORER):
        prefix = pattern.removesuffix("<scorer>")
        rest = name.removeprefix(prefix)
        if rest != name and rest and "/" not in rest:
            return pattern, rest
    return name, None


def exported_name(key: str) -> str:
    """The Prometheus name of a key of ``METRICS``, counters without their ``_total``, which the
    client library adds.
    """
    if key == SCORER:
        return PREFIX + "reward_score"
    return PREFIX + re.sub(r"\W+", "_", key.removesuffix("/<scorer>"))
