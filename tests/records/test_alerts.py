"""The shipped alerting rules: their names exist, and each fires when it should and only then."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from records.metrics import METRICS, PREFIX, RUN_GAUGES, exported_name

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS, DOCS = DEPLOY / "alerts.yml", DEPLOY.parent / "docs"
RUN, RUN_NAMED = '{job="sol-rl",instance="a"}', '{job="sol-rl",instance="a",run="r"}'
NODE = '{ip="10.0.0.1",GpuIndex="0"}'
HOURS = "0+60x180"
"""The time itself, for three hours in steps of a minute."""


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def metric_names(prefix: str) -> set[str]:
    """Return the metrics of all rules whose names begin with ``prefix``."""
    text = " ".join(rule["expr"] for rule in rules().values())
    return set(re.findall(rf"\b{prefix}\w+", text))


@dataclass
class Case:
    """Series, and the minute at which ``alert`` does or does not fire."""

    alert: str
    minute: int
    fires: bool
    series: dict[str, str] = field(default_factory=dict[str, str])


def run(**series: str) -> dict[str, str]:
    """Name series of one run; values are in Prometheus' notation, one per minute."""
    return {
        f"{PREFIX}{name}{RUN_NAMED if name in RUN_GAUGES else RUN}": values
        for name, values in series.items()
    }


def node(**series: str) -> dict[str, str]:
    return {f"ray_node_{name}{NODE}": values for name, values in series.items()}


CASES = [
    # a run of ten iterations that is gone after five, after all, and one that is still there
    Case("SolRLRunEnded", 10, True, run(iterations_left="9-1x4 stale")),
    Case("SolRLRunEnded", 14, False, run(iterations_left="9-1x9 stale")),
    Case("SolRLRunEnded", 10, False, run(iterations_left="9-1x30")),
    # a minute is not enough, as the run may be back soon, on another head
    Case("SolRLRunEnded", 6, False, run(iterations_left="9-1x4 stale")),
    Case(
        "SolRLRunEnded",
        10,
        False,
        run(iterations_left="9-1x4 stale")
        | {f'{PREFIX}iterations_left{{job="sol-rl",instance="b",run="r"}}': "_x6 5-1x20"},
    ),
    # another run on the same head does not hide it
    Case(
        "SolRLRunEnded",
        10,
        True,
        run(iterations_left="9-1x4 stale")
        | {f'{PREFIX}iterations_left{{job="sol-rl",instance="a",run="s"}}': "_x5 5-1x20"},
    ),
    # iterations of 300 s: 25 minutes without a row are too long, and 24 are not
    Case(
        "SolRLStandsStill",
        36,
        True,
        run(newest_row_timestamp_seconds="0+60x10 600x60", time_iteration_s="300x70"),
    ),
    Case(
        "SolRLStandsStill",
        34,
        False,
        run(newest_row_timestamp_seconds="0+60x10 600x60", time_iteration_s="300x70"),
    ),
    # iterations of a second: ten minutes at least
    Case(
        "SolRLStandsStill",
        9,
        False,
        run(newest_row_timestamp_seconds="0x20", time_iteration_s="1x20"),
    ),
    # no iteration is over
    Case("SolRLStandsStill", 59, False, run(newest_row_timestamp_seconds="0x90")),
    Case("SolRLStandsStill", 61, True, run(newest_row_timestamp_seconds="0x90")),
    Case(
        "SolRLStandsStill",
        100,
        False,
        run(newest_row_timestamp_seconds=HOURS, time_iteration_s="10x180"),
    ),
    Case("SolRLActorsDie", 60, True, run(actors_lost_total="0x20 1+1x40")),
    Case("SolRLActorsDie", 60, False, run(actors_lost_total="3x20 5x40")),
    Case("SolRLFewerRolloutActors", 90, True, run(rollout_actors="8x60 5x60")),
    Case("SolRLFewerRolloutActors", 70, False, run(rollout_actors="8x60 5x60")),
    Case("SolRLFewerRolloutActors", 90, False, run(rollout_actors="8x60 6x60")),
    Case("SolRLScorerFails", 30, True, run(rewards_failed_total="0x10 2x60")),
    Case("SolRLScorerFails", 30, False, run(rewards_failed_total="2x60")),
    Case("SolRLRankingFails", 60, True, run(audit_sign_agreement="0.9x5 0.52x60")),
    Case("SolRLRankingFails", 60, False, run(audit_sign_agreement="0.9x50 0.52x10")),
    Case("SolRLRewardBelowStart", 5, True, run(eval_gain="-0.04x9", eval_gain_stderr="0.01x9")),
    Case("SolRLRewardBelowStart", 5, False, run(eval_gain="-0.02x9", eval_gain_stderr="0.01x9")),
    Case("SolRLRewardBelowStart", 5, False, run(eval_gain="0x9", eval_gain_stderr="0x9")),
    Case("SolRLNoSignal", 60, True, run(zero_std_ratio="0.6x90")),
    Case("SolRLNoSignal", 60, False, run(zero_std_ratio="0.1x90")),
    Case("SolRLRatiosClipped", 60, True, run(loss_clip_share="0.95x90")),
    Case("SolRLRatiosClipped", 60, False, run(loss_clip_share="0.2x90")),
    Case("SolRLRewardActorsLimit", 40, True, run(busy_reward="0.97x60", busy_rollout="0.3x60")),
    Case("SolRLRewardActorsLimit", 40, False, run(busy_reward="0.97x60", busy_rollout="0.8x60")),
    Case("RayGPUIdle", 70, True, node(gpus_utilization="90x5 0x90")),
    Case("RayGPUIdle", 70, False, node(gpus_utilization="0x20 90x90")),
    Case("RayNodeMemory", 10, True, node(mem_used="95x20", mem_total="100x20")),
    Case("RayNodeMemory", 4, False, node(mem_used="95x20", mem_total="100x20")),
    Case("RayNodeMemory", 10, False, node(mem_used="85x20", mem_total="100x20")),
    Case("RayNodeDisk", 10, True, node(disk_utilization_percentage="93x20")),
    Case("RayNodeDisk", 4, False, node(disk_utilization_percentage="93x20")),
    Case("RayNodeDisk", 10, False, node(disk_utilization_percentage="80x20")),
]


def test_every_metric_of_a_run_in_the_rules_exists():
    kinds = {"total": "_total", "increment": "_total"}
    exported = {exported_name(key) + kinds.get(m.kind, "") for key, m in METRICS.items()}
    assert metric_names(PREFIX) <= exported | {PREFIX + name for name in RUN_GAUGES}


def test_each_rule_has_a_severity_and_cases_in_which_it_fires_and_does_not():
    assert all(
        rule["labels"]["severity"] in ("critical", "warning", "info")
        and set(rule["annotations"]) == {"summary", "description"}
        for rule in rules().values()
    )
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == set(rules())


def test_the_documented_command_makes_a_prometheus_rule_of_the_file(tmp_path):
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "cluster.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "PrometheusRule" in block]
    command = block[block.index("(printf") : block.index("kubectl create configmap")]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\n[ "$*" = "apply -f -" ] && cat\n')
    kubectl.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=DEPLOY.parent,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    rule = yaml.safe_load(done.stdout)
    assert (rule["kind"], rule["apiVersion"]) == ("PrometheusRule", "monitoring.coreos.com/v1")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: apt-get install prometheus"
)
def test_rules_fire_when_they_should(tmp_path):
    tests = [
        {
            "name": f"{case.alert} at minute {case.minute}: {case.fires}",
            "interval": "1m",
            "input_series": [
                {"series": name, "values": values} for name, values in case.series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
                    " or vector(0)",
                    "eval_time": f"{case.minute}m",
                    "exp_samples": [{"labels": "{}", "value": int(case.fires)}],
                }
            ],
        }
        for case in CASES
    ]
    file = tmp_path / "tests.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
