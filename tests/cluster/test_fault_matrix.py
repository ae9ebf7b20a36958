"""Matrix of targets (services, driver, a chunk) and kinds of faults (killed, hung, node lost).

Invariants of every cell: the run ends as it should; every task counts once; selections, metrics and
LoRA equal those of the undisturbed run bit for bit; nothing that was hit lives on; and nothing
hangs. ``faults`` defines targets and moments.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any
from unittest import mock

import psutil
import pytest

from records.errors import RunFailed
from records.lock import exclusive_lock
from records.rundir import ANOTHER_RUN, RunDirectory
from records.sinks import Sinks
from tests.cluster import nodes
from tests.cluster.faults import SERVICES, Fault, FaultInjector, Way
from tests.cluster.outcomes import Recovery, outcome, recoveries, recovery_table
from tests.cluster.poisoned import PoisonedEncoder, PoisonedRollout
from tests.cluster.processes import kill_tree, start, wait_until
from tests.cluster.runs import main_here, run_here, tiny_config, write_toml

ROOT = Path(__file__).parent.parent.parent
STATELESS = ("rollout", "reward", "encoder", "selector")
DEADLINE_S = 15.0
"""Deadline of the services that hang here. A task of the tiny run takes a fraction of a second."""
SECONDS = {f"services__{kind}__deadline_s": DEADLINE_S for kind in STATELESS} | {
    "services__learner__deadline_s": 2 * DEADLINE_S
}
slow = pytest.mark.slow


def assert_as_if_nothing_had_been(run: RunDirectory, undisturbed: RunDirectory) -> None:
    rows = [(row["kind"], row["iteration"]) for row in run.metrics()]
    assert rows == [
        ("evaluation", 0),
        ("iteration", 0),
        ("iteration", 1),
        ("iteration", 2),
        ("evaluation", 3),
    ]
    assert outcome(run, 3) == outcome(undisturbed, 3)


def died(run: RunDirectory) -> list[str]:
    return [event["kind"] for event in run.events() if event["event"] == "actor_died"]


# ---- processes


def each_in_another_phase(way: Way) -> list[Fault]:
    moments = {
        "rollout": (0, "explored"),
        "encoder": (1, "begin"),
        "reward": (1, "explored"),
        "selector": (2, "scored"),
    }
    return [Fault(kind, way, *moments[kind]) for kind in STATELESS]


def units(run: RunDirectory, event: str) -> set[tuple[str, str]]:
    """Return the services and tasks of all ``event`` records."""
    return {(each["kind"], each["unit"]) for each in run.events() if each["event"] == event}


@pytest.mark.timeout(900)  # four processes are restarted, one after the other
@pytest.mark.parametrize("way", ["kill", pytest.param("stop", marks=slow)])
def test_faults_of_stateless_services_change_nothing(undisturbed, tiny_sd3_dir, tmp_path, way):
    """One run is hit four times: one loss must not make the next one worse."""
    injector = FaultInjector(*each_in_another_phase(way))
    changes = SECONDS if way == "stop" else {}
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, way, **changes), progress=injector)
    assert {fault.kind for fault in injector.done} == set(STATELESS) == set(died(run))
    assert_as_if_nothing_had_been(run, undisturbed)
    retries = [event["kind"] for event in run.events() if event["event"] == "chunk_reissued"]
    assert run.metrics()[3]["rollout/reissued"] == len(retries)
    # an actor that had answered all of its tasks just before the fault has nothing to retry, which
    # on a busy machine happens to each of them, but not to all four
    assert retries
    assert run.metrics()[3]["actors/lost"] == len(died(run))
    for recovery in recoveries(run.events()):
        assert recovery.noticed_s is not None
        assert recovery.noticed_s >= (DEADLINE_S - 1 if way == "stop" else 0)
    assert units(run, "chunk_recovered") == units(run, "chunk_reissued")
    assert injector.left_over == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("way", "every", "iteration", "moment", "back_to"),
    [
        ("kill", 1, 1, "update", 1),
        ("kill", 2, 1, "export", 0),
        pytest.param("kill", 1, 1, "regenerated", 1, marks=slow),
        pytest.param("kill", 2, 2, "generate", 2, marks=slow),
        pytest.param("stop", 1, 1, "update", 1, marks=slow),
    ],
)
def test_faults_of_the_learner_change_nothing(
    undisturbed, tiny_sd3_dir, tmp_path, way, every, iteration, moment, back_to
):
    """The newest checkpoint is restored automatically, the versions since then are published again,
    and the run continues.
    """
    injector = FaultInjector(Fault("learner", way, iteration, moment))
    changes = {"checkpoint__every": every, **(SECONDS if way == "stop" else {})}
    run = run_here(
        tiny_config(tiny_sd3_dir, tmp_path, f"{way}-{moment}", **changes), progress=injector
    )
    assert_as_if_nothing_had_been(run, undisturbed)
    assert died(run) == ["learner"]
    events = run.events()
    (restored,) = [event for event in events if event["event"] == "learner_restored"]
    assert (restored["iteration"], restored["during"]) == (back_to, iteration)
    versions = [event["version"] for event in events if event["event"] == "version_published"]
    # the same version again, and then the next one
    assert versions == [*range(iteration + 1), *range(back_to, 4)]
    assert injector.left_over == []


def test_a_run_directory_that_is_away_for_a_while_changes_nothing(
    undisturbed, tiny_sd3_dir, tmp_path, monkeypatch
):
    """As while the mount of its storage is replaced. Driver and learner write when it is back."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "away", checkpoint__every=1)
    run, recorded = RunDirectory.of(config), Sinks.row
    path, elsewhere = run.path, tmp_path / "elsewhere"
    written = list[bool]()

    def row(self: Sinks, values: Any) -> None:
        recorded(self, values)
        if values["kind"] == "iteration":
            path.rename(elsewhere)
            threading.Timer(1.5, back).start()

    def back() -> None:
        written.append(path.exists())
        elsewhere.rename(path)

    monkeypatch.setattr(Sinks, "row", row)
    assert main_here("train", write_toml(config, tmp_path)) == 0
    assert written == [False] * 3
    assert_as_if_nothing_had_been(run, undisturbed)
    assert [step.name for step in sorted(run.checkpoints.iterdir())][-1] == "step_000003"
    told = [event for event in run.events() if event["event"].startswith("storage")]
    assert told and {event["why"] for event in told} == {
        f"{path} is gone, or its storage is not mounted"
    }


def test_a_learner_that_dies_repeatedly_ends_the_run(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "hopeless", services__learner__max_restarts=1)
    with pytest.raises(
        RunFailed, match="the learner was lost.*max_restarts = 1 returns .* exhausted.*--resume"
    ):
        run_here(
            config, progress=FaultInjector(Fault("learner", "kill", 0, "regenerated", always=True))
        )


# ---- a task that kills every actor that takes it


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("actor", "named"),
    [
        (
            PoisonedRollout,
            "rollout: ChunkKey(iteration=0, prompt=1, chunk=2, version=0) failed 2 times",
        ),
        pytest.param(PoisonedEncoder, "encoder: ('encode', 0) failed 2 times", marks=slow),
    ],
)
def test_a_task_that_kills_every_actor_ends_the_run_with_its_name(
    ray_here, tiny_sd3_dir, tmp_path, capsys, actor, named
):
    kind = named.partition(":")[0]
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "poison", iterations=1, **{f"services__{kind}__max_attempts": 2}
    )
    with mock.patch(f"cluster.driver.services.{actor.__base__.__name__}", actor):
        assert main_here("train", write_toml(config, tmp_path)) == 3
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in last, last
    events = RunDirectory.of(config).events()
    assert events[-1]["event"] == "run_failed" and named in events[-1]["why"]
    # the first loss may be blamed on the task before it, whose answer was lost with the actor; from
    # then on the task runs alone
    assert set(died(RunDirectory.of(config))) == {kind} and len(died(RunDirectory.of(config))) <= 3
    unit = named.partition(": ")[2].partition(" failed")[0]
    assert sum(
        event["event"] == "chunk_reissued" and event["unit"] == unit for event in events
    ) in (1, 2)


# ---- the driver


def the_driver(process: subprocess.Popen[str]) -> None:
    """Kill the driver alone; its children must end by themselves.

    Ray's agents, which hold nothing, first look for their head for a minute.
    """
    children = [
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if not each.name().endswith("Agent")
    ]
    assert any(each.name().startswith("ray::Rollout") for each in children)
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, [child.name() for child in alive]


def assert_a_second_one_is_refused(
    run: RunDirectory, file: Path, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It changes nothing, but commands that only read are allowed."""
    files = [run.metrics_file, run.events_file]
    before = [(path.stat().st_ino, path.read_bytes()) for path in files]
    assert main_here("report", run.path) == 0
    capsys.readouterr()
    for more in ((), ("--resume",), ("--auto-resume",)):
        assert main_here("train", file, *more) == 2
        errors = capsys.readouterr().err
        assert f"{run.path}: a run is active here: process {first} on " in errors, errors
        assert errors.count("\n") == 1
    assert [(path.stat().st_ino, path.read_bytes()) for path in files] == before


def assert_no_signal_to_its_group_ends_ray(driver: int) -> None:
    """``timeout`` sends SIGTERM to the whole group, while the driver waits for its checkpoint."""
    children = psutil.Process(driver).children()
    mine = {each.name() for each in children if os.getpgid(each.pid) == os.getpgid(driver)}
    assert {"gcs_server", "raylet"} <= {each.name() for each in children}
    assert not {"gcs_server", "raylet"} & mine


def the_whole_tree(process: subprocess.Popen[str]) -> None:
    kill_tree(process)


def the_raylet(process: subprocess.Popen[str]) -> None:
    """The driver names what ended, and ends before Ray's library ends it."""
    (raylet,) = (each for each in psutil.Process(process.pid).children() if each.name() == "raylet")
    raylet.kill()
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 3


@pytest.mark.timeout(900)  # two runs with all that they start
@pytest.mark.parametrize(
    ("kill", "line"),
    [
        (the_driver, "checkpoint_saved"),
        pytest.param(the_whole_tree, '"version": 1', marks=slow),
        pytest.param(the_raylet, '"version": 1', marks=slow),
    ],
)
def test_a_killed_driver_is_resumed_with_the_same_results(
    undisturbed,
    tiny_sd3_dir,
    tmp_path,
    capsys,
    kill: Callable[[subprocess.Popen[str]], None],
    line: str,
):
    config = tiny_config(tiny_sd3_dir, tmp_path, "resumed", services__rollout__actors=1)
    file, run = write_toml(config, tmp_path), RunDirectory.of(config)
    process = start("train", str(file), "--auto-resume", stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_until(
            lambda: run.events_file.exists() and line in run.events_file.read_text(), process
        )
        process.send_signal(signal.SIGSTOP)  # it holds its run, and does not progress
        assert_a_second_one_is_refused(run, file, process.pid, capsys)
        assert_no_signal_to_its_group_ends_ray(process.pid)
        kill(process)
        with exclusive_lock(
            run.lock_file, "a run", ANOTHER_RUN
        ) as lock:  # its children may still be ending
            assert lock.unsupported_reason is None
    finally:
        kill_tree(process)
    assert not (run.checkpoints / "step_000003").exists()
    failed = [event["why"] for event in run.events() if event["event"] == "run_failed"]
    assert failed == (
        ["Ray's raylet on this machine ended (SIGKILL)"] if kill is the_raylet else []
    )
    began = time.time()
    code, message = main_here("train", file, "--auto-resume"), capsys.readouterr()
    assert code == 0, message.err
    assert "held-out reward after" in message.out
    assert_as_if_nothing_had_been(run, undisturbed)
    names = [event["event"] for event in run.events() if event["time"] >= began]
    assert names.count("run_resumed") == 1 and names[-1] == "run_finished"
    assert main_here("train", file, "--resume", "--set", "explore.steps=3") == 2
    errors = capsys.readouterr().err
    assert "explore.steps: 2 -> 3" in errors and errors.count("\n") == 1


# ---- nodes


class Nodes:
    """Three simulated nodes in a process of its own, with its own Ray."""

    def __init__(self, model: Path, root: Path):
        self.root, self.log = root, root / "nodes.log"
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        command = [sys.executable, "-m", "tests.cluster.nodes", str(model), str(root)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdin=PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def run(self, kind: str) -> RunDirectory:
        """Run a run named ``kind``, and remove the node of ``kind`` during it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind}\n")
        self.process.stdin.flush()
        try:
            wait_until(lambda: f"{nodes.DONE} {kind}" in self.log.read_text(), self.process, 1200)
        except AssertionError:
            raise AssertionError(self.log.read_text()[-3000:]) from None
        return RunDirectory(self.root / "runs" / kind)


@pytest.fixture(scope="module")
def simulated(tiny_sd3_dir, tmp_path_factory) -> Iterator[Nodes]:
    there = Nodes(tiny_sd3_dir, tmp_path_factory.mktemp("nodes"))
    try:
        yield there
    finally:
        kill_tree(there.process)


@slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", SERVICES)
def test_losing_a_node_changes_nothing(simulated, undisturbed, kind):
    """Its actors and objects are lost at once; another node with the same label has room."""
    run = simulated.run(kind)
    assert_as_if_nothing_had_been(run, undisturbed)
    assert kind in died(run)
    started = [
        event for event in run.events() if event["event"] in ("actor_started", "actor_replaced")
    ]
    homes = [event["node"] for event in started if (event["kind"], event["actor"]) == (kind, 0)]
    lost = [event for event in run.events() if event["event"] == "node_lost"]
    assert all(event["node"] == homes[0] and f"{kind}-0" in event["actors"] for event in lost)
    assert len(lost) <= 1
    if kind != "rollout":  # the other rollout actor may end the run before the new one has started
        assert len(homes) == 2 and len(lost) == 1
    assert homes[0] not in homes[1:]
    if kind == "learner":
        assert any(event["event"] == "learner_restored" for event in run.events())


# ---- the measurement itself


def test_recovery_times_are_read_from_events():
    def event(
        moment: float, name: str, kind: str = "rollout", actor: int = 1, **more: Any
    ) -> dict[str, Any]:
        return {"time": 100.0 + moment, "event": name, "kind": kind, "actor": actor, **more}

    events = [
        event(0, "version_published", version=0),
        event(1, "fault_injected", way="kill"),
        event(1.25, "actor_died", actor=0),  # another one
        event(1.5, "actor_died"),
        event(2.0, "chunk_recovered", actor=0),
        event(4.5, "actor_replaced"),
        event(10, "fault_injected", "learner", 0, way="stop"),
        event(40, "actor_died", "learner", 0),
        event(44, "actor_replaced", "learner", 0),
        event(44, "learner_restored"),
        event(45, "version_published", version=1),
        event(50, "fault_injected", "encoder", 0, way="kill"),
    ]
    found = recoveries(events)
    assert found == [
        Recovery("rollout", "kill", 0.5, 3.5, 1.0),
        Recovery("learner", "stop", 30, 34, 35),
        Recovery("encoder", "kill"),
    ]
    assert recovery_table([*found, Recovery("rollout", "kill", 1.5, 2.5, 4.0)])[2:] == [
        "| rollout | kill | 2 | 1.0 s (1.5 s) | 3.0 s (3.5 s) | 2.5 s (4.0 s) |",
        "| encoder | kill | 1 | not needed | not needed | not needed |",
        "| learner | stop | 1 | 30.0 s | 34.0 s | 35.0 s |",
    ]
