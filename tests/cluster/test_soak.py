"""The soak: what it draws, what it writes down, what it says; and one tiny run."""

import json
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from records.errors import Stopped
from tests.cluster.faults import SERVICES, lasting
from tools.soak import LONGEST_DELAY_S, WAYS, Soak, draw, identical, line_of, main, summary

MOMENTS = {(0, "begin"): 1, (0, "explored"): 8, (1, "update"): 1}


def test_a_fault_depends_on_its_seed_and_number_only():
    first = [draw(3, i, MOMENTS, SERVICES, WAYS) for i in range(5)]
    turned = dict(reversed(MOMENTS.items()))
    assert first == [draw(3, i, turned, SERVICES, WAYS) for i in range(9)][:5]
    assert len({str(fault) for fault in first}) == 5 and first != [
        draw(4, i, MOMENTS, SERVICES, WAYS) for i in range(5)
    ]


def test_everything_that_can_be_hit_is():
    faults = [draw(0, i, MOMENTS, SERVICES, WAYS) for i in range(600)]
    pairs = Counter((fault.kind, fault.way) for fault in faults)
    assert (
        len(pairs) == 15 and min(pairs.values()) > 600 / 15 / 2.5
    )  # 40 expected, +-6: four deviations
    assert {(fault.iteration, fault.moment, fault.count) for fault in faults} == {
        (iteration, moment, n)
        for (iteration, moment), count in MOMENTS.items()
        for n in range(1, count + 1)
    }
    assert {fault.actor for fault in faults if fault.kind == "rollout"} == {0, 1}
    assert {fault.actor for fault in faults if fault.kind != "rollout"} == {0}
    assert all(0 <= fault.delay_s <= LONGEST_DELAY_S for fault in faults)
    assert {
        (f.kind, f.way) for f in (draw(0, i, MOMENTS, ["reward"], ["stop"]) for i in range(9))
    } == {("reward", "stop")}


def row(index: int = 0, **changes) -> dict:
    fault = {
        "fault": "SIGKILL to reward 0, 0.10 s after begin 1 of iteration 0",
        "kind": "reward",
        "way": "kill",
    }
    recovery = {
        "kind": "reward",
        "way": "kill",
        "noticed_s": 0.25,
        "replaced_s": 4.0,
        "answered_s": 5.5,
    }
    whole = {
        "index": index,
        **fault,
        "differs": [],
        "injected": True,
        "left_over": 0,
        "seconds": 12.3,
        "recovery": recovery,
    }
    return whole | changes


def test_lines_and_the_summary():
    assert (
        line_of(row(3))
        == "   3  identical  SIGKILL to reward 0, 0.10 s after begin 1 of iteration 0; "
        "noticed 0.2 s, replaced 4.0 s, recovered 5.5 s; run 12 s"
    )
    bad = row(4, differs=["lora"], recovery=None)
    assert (
        "DIFFERS: lora" in line_of(bad)
        and "not needed again" in line_of(bad)
        and not identical(bad)
    )
    assert not identical(row(left_over=1)) and "no fault" in line_of(row(injected=False))
    assert (
        summary([row(), bad])[-1]
        == "1 of 2 runs ended identical to the undisturbed one; 2 had a fault"
    )
    assert "| reward | kill | 1 | 0.2 s | 4.0 s | 5.5 s |" in summary([row(), bad])


def test_what_is_compared_leaves_out_who_and_when():
    rows = [
        {
            "kind": "iteration",
            "iteration": 1,
            "reward/train_mean": 0.1 + 0.2,
            "time/update_s": 3.0,
            "rollout/reissued": 4,
            "busy/learner": 0.3,
            "rewards/images_per_s/jpeg": 7.0,
            "samples_seen": 8,
        }
    ]
    assert lasting(rows) == [
        {"iteration": 1, "kind": "iteration", "reward/train_mean": 0.3, "samples_seen": 8}
    ]


def test_one_that_is_stopped_says_so_and_keeps_nothing_of_the_run_in_hand(
    tmp_path, capsys, monkeypatch
):
    """A signal ends the run under way in an orderly fashion; that is no difference of the run's."""

    def train(soak: Soak, name: str, injector: Any) -> dict[str, str]:
        if name == "run-0001":
            raise Stopped("stopped by SIGINT before iteration 1; continue with --resume")
        return {"lora": "the same"}

    monkeypatch.setattr("tools.soak.ray_of", lambda ways: nullcontext())
    monkeypatch.setattr(
        Soak,
        "prepare",
        lambda soak: vars(soak).update(undisturbed={"lora": "the same"}, moments=MOMENTS),
    )
    monkeypatch.setattr(Soak, "_train", train)
    monkeypatch.setattr(Soak, "_events", lambda soak, name: [])
    (tmp_path / "runs" / "run-0000").mkdir(parents=True)
    assert main(["--runs", "3", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().out.splitlines()
    assert "stopped after 1 of 3 runs" in said[1] and said[-1].startswith(
        "1 of 1 runs ended identical"
    )
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == 1


def own_lines(printed: str) -> list[str]:
    """What the soak printed; Ray tells of dead workers in between, whenever it likes."""
    return [line for line in printed.splitlines() if "(raylet)" not in line]


@pytest.mark.timeout(900)  # two runs, and an actor that is started again
def test_a_soak_of_one_run_and_its_continuation(ray_here, tmp_path, capsys):
    out = tmp_path / "soak"
    # a seed whose fault falls into the first iteration: one at the end may find the run over
    command = ["--seed", "21", "--ways", "kill", "--kinds", "rollout", "--out", str(out)]
    assert main([*command, "--runs", "1"]) == 0
    said = own_lines(capsys.readouterr().out)
    assert "   0  identical  SIGKILL to rollout" in said[0] and said[-1].startswith(
        "1 of 1 runs ended identical"
    )
    assert not (out / "runs" / "run-0000").exists()
    before = (out / "faults.jsonl").read_text()
    (out / "faults.jsonl").write_text(
        before + '{"index": 1, "drawn'
    )  # a kill in the middle of a line
    assert main([*command, "--runs", "1"]) == 0  # nothing is run again
    assert own_lines(capsys.readouterr().out) == said
    with pytest.raises(SystemExit, match="give another --out"):
        main(["--seed", "6", "--out", str(out)])
    assert json.loads(before)["injected"]
