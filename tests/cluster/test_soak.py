"""The soak: random choices, results and messages; and one tiny run."""

import json
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from records.errors import RunFailed, Stopped
from tests.cluster.faults import RECOVERING, RUN, SERVICES, TO_ACTORS, Fault, FaultInjector
from tests.cluster.outcomes import lasting
from tools.soak.__main__ import main
from tools.soak.draw import LONGEST_DELAY_S, VARIANTS, WAYS, Trial, draw
from tools.soak.lines import identical, line_of, summary
from tools.soak.runs import Soak

ONE = {(0, "begin"): 1, (0, "explored"): 8, (1, "update"): 1}
MOMENTS = {"plain": ONE, "ahead": {(1, "export"): 2}}


def test_a_run_depends_on_its_seed_and_number_only():
    first = [draw(3, i, MOMENTS, SERVICES, WAYS) for i in range(5)]
    turned = {name: dict(reversed(moments.items())) for name, moments in MOMENTS.items()}
    again = [draw(3, i, dict(reversed(turned.items())), SERVICES, WAYS) for i in range(9)]
    assert first == again[:5]
    others = [draw(4, i, MOMENTS, SERVICES, WAYS) for i in range(5)]
    assert len({str(trial) for trial in first}) == 5 and first != others


def test_every_fault_target_is_drawn():
    trials = [draw(0, i, MOMENTS, SERVICES, WAYS) for i in range(1500)]
    firsts = [trial.faults[0] for trial in trials]
    ways = Counter(fault.way for fault in firsts)
    assert set(ways) == set(WAYS) and min(ways.values()) > 120  # 167 expected, +-12: four of them
    pairs = {(fault.kind, fault.way) for fault in firsts}
    to_actors = set(TO_ACTORS) & set(WAYS)  # no actor of these runs has a GPU
    run_wide = {(RUN, way) for way in WAYS if way not in TO_ACTORS}
    assert pairs == {(kind, way) for kind in SERVICES for way in to_actors} | run_wide
    plain = {(f.faults[0].iteration, f.faults[0].moment, f.faults[0].count)
             for f in trials if f.variant == "plain"}  # fmt: skip
    assert plain == {
        (iteration, moment, n)
        for (iteration, moment), count in ONE.items()
        for n in range(1, count + 1)
    }
    assert {fault.actor for fault in firsts if fault.kind == "rollout"} == {0, 1}
    assert {fault.actor for fault in firsts if fault.kind != "rollout"} == {0}
    assert all(0 <= fault.delay_s <= LONGEST_DELAY_S for fault in firsts)
    assert {trial.variant for trial in trials} == {"plain", "ahead"}
    only = [draw(0, i, MOMENTS, ["reward"], ["stop"]) for i in range(9)]
    assert {(f.kind, f.way) for trial in only for f in trial.faults} == {("reward", "stop")}


def test_half_of_the_runs_have_two_faults_often_during_a_recovery():
    trials = [draw(1, i, MOMENTS, SERVICES, ("kill", "node")) for i in range(1000)]
    two = [trial.faults for trial in trials if len(trial.faults) == 2]
    assert 436 < len(two) < 564  # 500 +- 16: four of them
    recovering = [pair for pair in two if pair[1].moment == RECOVERING]
    assert 0.4 < len(recovering) / len(two) < 0.6
    assert all(pair[0].moment != RECOVERING for pair in two)
    disks = [draw(1, i, MOMENTS, SERVICES, ("disk",)).faults for i in range(50)]
    assert {len(faults) for faults in disks} == {1}  # a full disk cannot be filled


def test_every_variant_is_a_valid_setting(tmp_path):
    from tools.soak.runs import tiny

    found = {name: tiny(tmp_path, tmp_path, "x", VARIANTS[name]) for name in VARIANTS}
    ahead = {name: run.explore_ahead for name, run in found.items()}
    replicas = {name: run.services.learner.replicas for name, run in found.items()}
    assert ahead == {"plain": 0, "ahead": 1, "replicas": 0, "ahead and replicas": 1}
    assert replicas == {"plain": 1, "ahead": 1, "replicas": 2, "ahead and replicas": 2}


def row(index: int = 0, **changes) -> dict:
    recovery = {
        "kind": "reward",
        "way": "kill",
        "noticed_s": 0.25,
        "replaced_s": 4.0,
        "answered_s": 5.5,
    }
    whole = {
        "index": index,
        "variant": "plain",
        "faults": ["SIGKILL to reward 0, 0.10 s after begin 1 of iteration 0"],
        "done": ["kill"],
        "differs": [],
        "left_over": 0,
        "seconds": 12.3,
        "ended_s": None,
        "recovery": [recovery],
    }
    return whole | changes


def test_lines_and_summary_of_a_soak():
    assert (
        line_of(row(3))
        == "   3  identical  plain: SIGKILL to reward 0, 0.10 s after begin 1 of iteration 0; "
        "noticed 0.2 s, replaced 4.0 s, recovered 5.5 s; run 12 s"
    )
    bad = row(4, differs=["lora"], recovery=[], done=["kill", "disk"], ended_s=3.25)
    assert "DIFFERS: lora" in line_of(bad) and not identical(bad)
    assert "ended after 3.2 s and was resumed" in line_of(bad)
    assert not identical(row(left_over=1)) and "0 of 1 faults" in line_of(row(done=[]))
    message = summary([row(), bad])
    assert message[-1].startswith(
        "1 of 2 runs ended identical to the undisturbed one; 2 had a fault,"
    )
    assert message[-1].endswith(" 1 of them two") and message[-2].startswith("0 of 0 lost nodes")
    assert "| reward | kill | 1 | 0.2 s | 4.0 s | 5.5 s |" in message
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in message]
    assert ["disk", "1", "0", "12 (12)"] in cells and ["kill", "2", "1", "12 (12)"] in cells
    late = {"kind": "reward", "way": "node", "noticed_s": 6.0}
    soon = late | {"noticed_s": 4.0}
    assert summary([row(recovery=[late, soon])])[-2] == "1 of 2 lost nodes were noticed within 5 s"


def test_a_run_ended_by_a_full_disk_is_resumed(tmp_path, monkeypatch):
    soak, calls = Soak(tmp_path, 0, SERVICES, WAYS, tuple(VARIANTS), ()), []
    trial = Trial("plain", (Fault(RUN, "disk", 0, "begin"),))
    injector = FaultInjector(*trial.faults)

    def train(name: str, variant: str, injector: Any, resume: bool = False) -> dict[str, str]:
        calls.append((resume, (soak.machine.disk / "ballast").exists()))
        if not resume:
            soak.machine.disk.mkdir()
            (soak.machine.disk / "ballast").touch()
            raise RunFailed("no space left on device")
        return {"lora": "x"}

    monkeypatch.setattr(soak, "_train", train)
    with pytest.raises(RunFailed):
        # the disk was not filled: the run failed for another reason
        soak._to_the_end("run", trial, injector, {})
    injector.done = list(trial.faults)
    calls.clear()
    (soak.machine.disk / "ballast").unlink()
    soak.machine.disk.rmdir()
    kept: dict[str, Any] = {}
    assert soak._to_the_end("run", trial, injector, kept) == {"lora": "x"}
    assert calls == [(False, False), (True, False)] and "no space" in kept["said"]


def test_the_comparison_ignores_actors_and_times():
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


def test_a_stopped_soak_discards_the_current_run(tmp_path, capsys, monkeypatch):
    """The signal ends the current run in an orderly way, which counts as no difference."""

    def train(soak: Soak, name: str, *_: Any, **__: Any) -> dict[str, str]:
        if name == "run-0001":
            raise Stopped("stopped by SIGINT before iteration 1; continue with --resume")
        return {"lora": "the same"}

    monkeypatch.setattr("tools.soak.__main__.ray_of", lambda soak: nullcontext())
    monkeypatch.setattr(
        Soak,
        "prepare",
        lambda soak: vars(soak).update(
            undisturbed=dict.fromkeys(MOMENTS, {"lora": "the same"}), moments=MOMENTS
        ),
    )
    monkeypatch.setattr(Soak, "_train", train)
    (tmp_path / "runs" / "run-0000").mkdir(parents=True)
    assert main(["--runs", "3", "--ways", "kill", "--out", str(tmp_path)]) == 130
    message = capsys.readouterr().out.splitlines()
    assert "stopped after 1 of 3 runs" in message[1]
    assert message[-1].startswith("1 of 1 runs ended identical")
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == 1
    part = ["--first", "1", "--runs", "2", "--ways", "kill", "--out", str(tmp_path)]
    assert main(part) == 130  # run 0 is known, and not among them
    assert "stopped after 0 of 1 runs" in capsys.readouterr().out


def own_lines(printed: str) -> list[str]:
    """Return the lines of the soak; Ray may report dead workers between them."""
    return [line for line in printed.splitlines() if "(raylet)" not in line]


@pytest.mark.timeout(900)  # two runs, and an actor that is restarted
def test_a_soak_of_one_run_and_its_continuation(ray_here, tmp_path, capsys):
    out = tmp_path / "soak"
    # a seed whose fault occurs in the first iteration: a later one may come after the end of the
    # run
    command = ["--seed", "21", "--ways", "kill", "--kinds", "rollout", "--out", str(out)]
    command += ["--variants", "plain"]
    assert main([*command, "--runs", "1"]) == 0
    message = own_lines(capsys.readouterr().out)
    assert "   0  identical  plain: SIGKILL to rollout" in message[0]
    assert message[-1].startswith("1 of 1 runs ended identical")
    assert not (out / "runs" / "run-0000").exists()
    before = (out / "faults.jsonl").read_text()
    # a kill in the middle of a line
    (out / "faults.jsonl").write_text(before + '{"index": 1, "drawn')
    assert main([*command, "--runs", "1"]) == 0  # nothing is run again
    assert own_lines(capsys.readouterr().out) == message
    with pytest.raises(SystemExit, match="give another --out"):
        main(["--seed", "6", "--out", str(out)])
    assert json.loads(before)["done"]
