"""Prometheus metrics of metrics.jsonl: names, kinds, labels, and a port that is in use."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from records import prometheus
from records.metrics import METRICS, document, exported_name, known_name
from records.prometheus import PrometheusExporter

CONTRACT = [
    "iteration",
    "policy_version",
    "samples_seen",
    "reward/train_mean",
    "reward/train_std",
    "reward/eval_mean",
    "reward/eval/<scorer>",
    "explore/reward_mean",
    "explore/reward_best",
    "explore/reward_worst",
    "explore/contrast",
    "audit/kendall_tau",
    "audit/spearman_rho",
    "audit/sign_agreement",
    "audit/random_kendall_tau",
    "weights/delta_cosine",
    "weights/codes_changed",
    "loss/policy",
    "loss/kl",
    "grad_norm",
    "zero_std_ratio",
    "rewards/failed",
    "rollout/actors",
    "rollout/reissued",
    "actors/lost",
    "rollout/images_per_s",
    "weights/version",
    "weights/bytes",
    "time/explore_s",
    "time/regenerate_s",
    "time/update_s",
    "time/publish_s",
    "time/iteration_s",
    "staleness",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_run_emits_every_declared_metric(undisturbed):
    emitted = {known_name(name)[0] for row in undisturbed.metrics() for name in row}
    # this run audits no random seeds
    assert set(CONTRACT) - emitted == {"audit/random_kendall_tau"}


def value(exporter: PrometheusExporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(name, labels)


def test_every_declared_metric_is_described_and_exported_under_its_own_name():
    assert set(CONTRACT) <= set(METRICS), set(CONTRACT) - set(METRICS)
    assert all(metric.help for metric in METRICS.values())
    names = [exported_name(key) for key in METRICS]
    assert len(set(names)) == len(names)


def test_gauges_hold_the_newest_value_and_scorers_are_a_label():
    exporter = PrometheusExporter(0)
    exporter.row({"kind": "iteration", "iteration": 3, "reward/train_mean": 0.25, "loss/kl": None})
    exporter.row(
        {"kind": "iteration", "iteration": 4, "reward/train_mean": 0.5, "reward/shapes": 0.4}
    )
    exporter.row(
        {
            "kind": "evaluation",
            "iteration": 99,
            "weights": "ema",
            "reward/eval_mean": 0.6,
            "reward/eval/shapes": 0.61,
            "reward/eval/jpeg": -3.5,
        }
    )
    assert value(exporter, "sol_rl_reward_train_mean") == 0.5
    assert value(exporter, "sol_rl_iteration") == 4
    assert value(exporter, "sol_rl_reward_eval_mean") == 0.6
    assert value(exporter, "sol_rl_reward_eval", scorer="shapes") == 0.61
    assert value(exporter, "sol_rl_reward_eval", scorer="jpeg") == -3.5
    assert value(exporter, "sol_rl_reward_score", scorer="shapes") == 0.4
    assert value(exporter, "sol_rl_loss_kl") is None


def test_iterations_left_and_the_time_of_the_newest_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    exporter = PrometheusExporter(0, run="r", iterations=3)

    def values() -> tuple[float | None, float | None]:
        return (
            value(exporter, "sol_rl_iterations_left", run="r"),
            value(exporter, "sol_rl_newest_row_timestamp_seconds", run="r"),
        )

    assert values() == (None, 1000.0)
    for moment, kind, iteration, left in (
        (1010.0, "evaluation", 0, 3),  # before training
        (1020.0, "iteration", 0, 2),
        (1030.0, "iteration", 1, 1),
        (1040.0, "evaluation", 2, 1),
        (1050.0, "iteration", 2, 0),
        (1060.0, "evaluation", 3, 0),
    ):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        exporter.row({"kind": kind, "iteration": iteration})
        assert values() == (left, moment)


def test_counters_add_increments():
    exporter = PrometheusExporter(0)
    for seen, failed, reissued in ((96, 1, 2), (192, 0, 2), (288, 4, 5)):
        exporter.row(
            {
                "samples_seen": seen,
                "rewards/failed": failed,
                "rollout/reissued": reissued,
                "weights/bytes": 1000,
            }
        )
    assert value(exporter, "sol_rl_samples_seen_total") == 288
    assert value(exporter, "sol_rl_rewards_failed_total") == 5
    assert value(exporter, "sol_rl_rollout_reissued_total") == 5
    assert value(exporter, "sol_rl_weights_bytes_total") == 3000
    exporter.row({"rewards/failed": math.nan, "weights/bytes": -1})
    assert value(exporter, "sol_rl_rewards_failed_total") == 5
    assert value(exporter, "sol_rl_weights_bytes_total") == 3000


def test_a_run_that_went_back_to_a_checkpoint_counts_nothing_twice():
    exporter = PrometheusExporter(0)
    exported = []
    for seen in (240, 480, 720, 960, 720, 960, 1200):
        exporter.row({"samples_seen": seen})
        exported.append(value(exporter, "sol_rl_samples_seen_total"))
    assert exported == [240, 480, 720, 960, 960, 960, 1200]


def test_nan_and_unknown_names_pass_through_as_gauges():
    exporter = PrometheusExporter(0)
    exporter.row(
        {"audit/kendall_tau": math.nan, "optimizer/learning_rate": 0.5, "my own/metric-1": 2}
    )
    assert math.isnan(value(exporter, "sol_rl_audit_kendall_tau"))
    assert value(exporter, "sol_rl_optimizer_learning_rate") == 0.5
    assert value(exporter, "sol_rl_my_own_metric_1") == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/train_mean", ("reward/train_mean", None)),
        ("reward/eval_mean", ("reward/eval_mean", None)),
        ("reward/eval/hps", ("reward/eval/<scorer>", "hps")),
        ("reward/hps", ("reward/<scorer>", "hps")),
        ("reward/eval/", ("reward/eval/", None)),
        ("reward/eval/hps/colour", ("reward/eval/<scorer>/<part>", None)),
        ("reward/hps/colour", ("reward/<scorer>/<part>", None)),
        ("busy/rollout", ("busy/rollout", None)),
        ("busy/scorers.hps", ("busy/scorers.<scorer>", None)),
        ("other/x", ("other/x", None)),
    ],
)
def test_known_name(name: str, expected: tuple[str, str | None]):
    assert known_name(name) == expected


def test_parts_of_scores_are_exported_by_their_own_names():
    exporter = PrometheusExporter(0)
    exporter.row({"reward/shapes/colour": 0.25, "reward/shapes/count": 0.5, "busy/scorers.a": 1.0})
    assert value(exporter, "sol_rl_reward_shapes_colour") == 0.25
    assert value(exporter, "sol_rl_reward_shapes_count") == 0.5
    assert value(exporter, "sol_rl_busy_scorers_a") == 1.0


def test_the_documented_table_equals_that_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert text == document()


def test_the_exporter_serves_metrics_and_frees_the_port():
    port = free_port()
    exporter = PrometheusExporter(port)
    try:
        exporter.row({"samples_seen": 12, "reward/eval/shapes": 0.5})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            families = {
                family.name: family
                for family in text_string_to_metric_families(answer.read().decode())
            }
    finally:
        exporter.close()
    assert families["sol_rl_samples_seen"].type == "counter"
    assert families["sol_rl_samples_seen"].documentation == METRICS["samples_seen"].help
    assert families["sol_rl_reward_eval"].samples[0].labels == {"scorer": "shapes"}
    # a registry of its own
    assert not any(name.startswith(("python_", "process_")) for name in families)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("finished", [True, False])
def test_a_finished_run_is_scraped_once_more(finished: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "LAST_SCRAPE_S", 60.0)
    port = free_port()

    def left() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        (sample,) = next(f for f in families if f.name == "sol_rl_iterations_left").samples
        return sample.value

    exporter = PrometheusExporter(port, run="r", iterations=2)
    exporter.row({"kind": "iteration", "iteration": 0})
    assert left() == 1
    exporter.row({"kind": "iteration", "iteration": int(finished)})
    closing = threading.Thread(target=exporter.close)
    closing.start()
    if finished:
        closing.join(0.5)
        assert closing.is_alive()
        assert left() == 0
    closing.join(30)
    assert not closing.is_alive()


def test_a_finished_run_that_nobody_scrapes_ends_at_once():
    exporter = PrometheusExporter(free_port(), run="r", iterations=1)
    exporter.row({"kind": "iteration", "iteration": 0})
    began = time.monotonic()
    exporter.close()
    assert time.monotonic() - began < prometheus.LAST_SCRAPE_S


def test_a_busy_port_is_one_line_and_training_continues(caplog: pytest.LogCaptureFixture):
    events: list[tuple[str, dict]] = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            exporter = PrometheusExporter(
                port, events=lambda name, **fields: events.append((name, fields))
            )
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"metrics are not served: 127.0.0.1:{port}: Address already in use;")
    assert "prometheus_port" in message and "\n" not in message
    assert events == [
        ("metrics_unavailable", {"address": f"127.0.0.1:{port}", "why": "Address already in use"})
    ]
    exporter.row({"reward/train_mean": 0.5})
    exporter.close()
    exporter.close()
