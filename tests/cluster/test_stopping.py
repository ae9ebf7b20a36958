"""A signal ends a run: after a checkpoint if there is something to save, otherwise at once.

A second signal ends it at once in any case.
"""

import asyncio
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray

from cluster.driver import stop_signals
from cluster.driver.learner_group import LearnerGroup
from cluster.driver.stop_signals import Stopping, unless_stopped
from configs.schema import RunConfig
from learner.checkpoint import latest_checkpoint
from records import claim, storage
from records.claim import Claim
from records.errors import StateLost, Stopped
from records.progress import Progress
from records.rundir import RunDirectory
from records.sinks import Sinks
from tests.cluster import hosts
from tests.cluster.faults import Fault, FaultInjector
from tests.cluster.outcomes import outcome
from tests.cluster.processes import finish, kill_tree, meanwhile, start, wait_until
from tests.cluster.runs import adapters, main_here, run_here, tiny_config, write_toml


def signalled(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


def stopped(
    work: Coroutine[Any, Any, None], stop: Stopping, save: Any, limit_s: float = 20.0
) -> str | None:
    """Return the result of ``save`` after ``work``, which is to be cancelled."""

    async def run() -> str | None:
        stop.listen()
        try:
            await work
        except asyncio.CancelledError:
            return await stop.save(save(), limit_s)
        raise AssertionError("the work was not cancelled")

    return asyncio.run(run())


class Saving:
    """A checkpoint that takes ``seconds``, reports its start, and counts starts and ends."""

    def __init__(
        self, seconds: float, error: Exception | None = None, recorded: Any = lambda: None
    ):
        self.seconds, self.error, self.recorded = seconds, error, recorded
        self.begun = self.done = 0

    async def __call__(self) -> None:
        self.begun += 1
        self.recorded()
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        self.done += 1


async def signals_then_sleep(*names: str) -> None:
    signalled(*names)
    await asyncio.sleep(30)


@pytest.mark.parametrize("names", [["SIGTERM"], ["SIGTERM", "SIGTERM"], ["SIGINT", "SIGTERM"]])
def test_simultaneous_signals_count_as_one(names):
    stop, save = Stopping(asyncio.Lock()), Saving(0.2)
    assert stopped(signals_then_sleep(*names), stop, save) is None
    assert (save.begun, save.done, stop.signal) == (1, 1, names[0])


def test_a_second_signal_stops_waiting_for_the_checkpoint(monkeypatch):
    monkeypatch.setattr(stop_signals, "ECHO_S", 0.1)

    def later() -> None:
        asyncio.get_running_loop().call_later(0.3, signalled, "SIGINT")

    stop, save, began = Stopping(asyncio.Lock()), Saving(30, recorded=later), time.monotonic()
    assert stopped(signals_then_sleep("SIGTERM"), stop, save) == "a second signal arrived"
    assert time.monotonic() - began < 10
    assert (save.begun, save.done, stop.signal) == (1, 0, "SIGINT")


@pytest.mark.parametrize(
    ("seconds", "error", "why"),
    [
        (30, None, "the learner did not write it within 0.2 s"),
        (0, StateLost("the learner was lost: it died"), "the learner was lost"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_not_waited_for(seconds, error, why):
    began = time.monotonic()
    assert (
        stopped(
            signals_then_sleep("SIGTERM"), Stopping(asyncio.Lock()), Saving(seconds, error), 0.2
        )
        or ""
    ).startswith(why)
    assert time.monotonic() - began < 10


def test_an_error_while_saving_is_not_hidden():
    with pytest.raises(OSError, match="No space"):
        stopped(
            signals_then_sleep("SIGTERM"),
            Stopping(asyncio.Lock()),
            Saving(0, OSError(28, "No space left on device")),
        )


@pytest.mark.parametrize("again", [False, True])
def test_an_update_is_finished_first_unless_a_second_signal_comes(monkeypatch, again):
    monkeypatch.setattr(stop_signals, "ECHO_S", 0.1)
    lock, save, finished = asyncio.Lock(), Saving(0), []

    async def updating() -> None:
        async with lock:
            signalled("SIGTERM")
            if again:
                asyncio.get_running_loop().call_later(0.3, signalled, "SIGTERM")
            await asyncio.sleep(0.8)
            finished.append(True)
        await asyncio.sleep(30)

    why = stopped(updating(), Stopping(lock), save)
    # in the middle of an update there is nothing to save
    assert (why, finished, save.begun) == (
        ("a second signal arrived", [], 0) if again else (None, [True], 1)
    )


def test_a_signal_after_the_end_of_a_run_is_ignored():
    async def run() -> str:
        stop = Stopping(asyncio.Lock())
        stop.listen()
        stop.over()
        signalled("SIGTERM", "SIGINT")
        await asyncio.sleep(0.2)
        return "finished"

    assert asyncio.run(run()) == "finished"


@pytest.mark.parametrize(
    ("seconds", "signal_name"), [([0.0], None), ([0.0, 0.05], None), ([0.0, 0.4], "SIGTERM")]
)
def test_a_second_signal_ends_the_wait_for_storage(monkeypatch, seconds, signal_name):
    """A first one does not, nor its echo: storage may be back soon."""
    monkeypatch.setattr(stop_signals, "ECHO_S", 0.2)
    monkeypatch.setattr(storage, "RETRY_S", 2.0)
    monkeypatch.setattr(storage, "PAUSE_S", 20.0 if signal_name else 1.0)
    error = OSError(errno.EIO, "Input/output error")

    @storage.retried
    def away() -> None:
        raise error

    async def run() -> None:
        stop_signals.install_stop_signals(asyncio.get_running_loop(), lambda _: None)
        for each in seconds:
            threading.Timer(0.1 + each, signalled, ["SIGTERM"]).start()
        away()

    for _ in range(2):  # a second run in this process waits again
        began = time.monotonic()
        with pytest.raises(OSError) as raised:
            asyncio.run(run())
        assert raised.value is error and storage.given_up() == signal_name
        assert (time.monotonic() - began < 2.0) == (signal_name is not None)


def test_a_command_without_actors_stops_at_once():
    with pytest.raises(Stopped, match="stopped by SIGTERM before any actor started"):
        asyncio.run(unless_stopped(signals_then_sleep("SIGTERM")))

    async def seven() -> int:
        return 7

    assert asyncio.run(unless_stopped(seven())) == 7


def test_a_run_stops_during_the_replacement_of_its_learner(undisturbed, tiny_sd3_dir, tmp_path):
    """The learner's state since its checkpoint is lost, so there is nothing to save or to wait
    for.
    """

    async def renew(self: LearnerGroup, why: str) -> None:
        await signals_then_sleep("SIGTERM")

    config = tiny_config(tiny_sd3_dir, tmp_path, "replaced")
    with mock.patch.object(LearnerGroup, "renew", renew), pytest.raises(Stopped) as end:
        run_here(config, progress=FaultInjector(Fault("learner", "kill", 1, "update")))
    assert str(end.value) == "stopped by SIGTERM before iteration 1; continue with --resume"
    run = run_here(config, resume=True)
    assert outcome(run, 3) == outcome(undisturbed, 3)


# ---- whole commands


class NeverLoaded:
    """A scorer whose weights never finish loading."""

    def __init__(self) -> None:
        time.sleep(600)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        raise AssertionError("never loaded")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def never_loaded(model: Path, root: Path) -> RunConfig:
    scorers = [{"name": f"{__name__}:NeverLoaded"}]
    return tiny_config(model, root, "starting", rewards__scorers=scorers)


def assert_stopped_at_once(run: RunDirectory, seconds: float) -> None:
    assert seconds < 60  # a scorer loads for 600 s
    assert run.events()[-1]["event"] == "run_stopped" and list(run.checkpoints.iterdir()) == []


def test_a_run_whose_actors_still_start_stops_at_once(ray_here, tiny_sd3_dir, tmp_path, capsys):
    config, signals = never_loaded(tiny_sd3_dir, tmp_path), list[float]()
    run = RunDirectory.of(config)

    def signal_once() -> None:
        signalled("SIGTERM")
        signals.append(time.monotonic())

    with meanwhile((lambda: '"run_started"' in text_of(run.events_file), signal_once)):
        code = main_here("train", write_toml(config, tmp_path))
    message = "stopped by SIGTERM before iteration 0; continue with --resume\n"
    assert (code, capsys.readouterr().err) == (130, message)
    assert_stopped_at_once(run, time.monotonic() - signals[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_command_whose_actors_still_start_stops_at_once(tiny_sd3_dir, tmp_path, name):
    """The same in a process of its own, with its own Ray."""
    config = never_loaded(tiny_sd3_dir, tmp_path)
    run = RunDirectory.of(config)
    process = start("train", str(write_toml(config, tmp_path)), stdout=DEVNULL, stderr=PIPE)
    try:
        wait_until(lambda: '"run_started"' in text_of(run.events_file), process)
        began = time.monotonic()
        process.send_signal(getattr(signal, name))
        code, _, errors = finish(process, 90)
    finally:
        kill_tree(process)
    message = f"stopped by {name} before iteration 0; continue with --resume\n"
    assert (code, errors) == (130, message)
    assert_stopped_at_once(run, time.monotonic() - began)


def test_a_run_that_waits_for_nodes_stops_at_once(ray_here, tiny_sd3_dir, tmp_path, capsys):
    changes = {"services__wait_for_nodes_s": 600, "services__rollout__labels": {"pool": "nowhere"}}
    config = tiny_config(tiny_sd3_dir, tmp_path, "waiting", **changes)

    def waits() -> bool:
        groups = ray.util.placement_group_table().values()
        return any(group["state"] == "PENDING" for group in groups)

    with meanwhile((waits, lambda: signalled("SIGTERM"))):
        code = main_here("train", write_toml(config, tmp_path))
    message = capsys.readouterr()
    assert (code, message.err) == (130, "stopped by SIGTERM before any actor started\n")
    assert "waiting up to 600 s" in message.out
    assert not RunDirectory.of(config).path.exists()


def test_a_second_signal_does_not_wait_for_a_learner_that_hangs(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stop_signals, "ECHO_S", 0.5)
    monkeypatch.setattr(hosts, "LEAVE_S", 1.0)  # of the hanging learner
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "hanging",
        iterations=500,
        checkpoint__every=400,
        services__rollout__actors=1,
    )
    run, signals = RunDirectory.of(config), list[float]()

    def hang_and_signal() -> None:
        (learner,) = [
            each
            for each in run.events()
            if each["event"] == "actor_started" and each["kind"] == "learner"
        ]
        os.kill(learner["pid"], signal.SIGSTOP)  # services.learner.deadline_s is 900
        signal_again()

    def signal_again() -> None:
        signalled("SIGTERM")
        signals.append(time.monotonic())

    with meanwhile(
        (lambda: '"kind": "iteration"' in text_of(run.metrics_file), hang_and_signal),
        (lambda: time.monotonic() > signals[0] + stop_signals.ECHO_S + 1, signal_again),
    ):
        code = main_here("train", write_toml(config, tmp_path))
    assert len(signals) == 2, "the first signal was enough"
    errors = capsys.readouterr().err
    assert (
        code == 130
        and errors.startswith("stopped by SIGTERM before iteration")
        and errors.count("\n") == 1
    ), errors
    assert "without its checkpoint (a second signal arrived); continue with --resume" in errors
    assert [event["event"] for event in run.events()][-2:] == ["checkpoint_missed", "run_stopped"]
    assert not list(run.checkpoints.glob("step_*"))


def test_a_second_signal_does_not_wait_for_storage(
    undisturbed, tiny_sd3_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stop_signals, "ECHO_S", 0.2)
    config = tiny_config(tiny_sd3_dir, tmp_path, "away", checkpoint__every=1)
    recorded = Sinks.row
    run, elsewhere = RunDirectory.of(config), tmp_path / "elsewhere"

    def row(self: Sinks, values: Any) -> None:
        recorded(self, values)
        if values["kind"] == "iteration" and values["iteration"] == 1:
            run.path.rename(elsewhere)
            for seconds in (0.1, 0.6):
                threading.Timer(seconds, signalled, ["SIGINT"]).start()

    began = time.monotonic()
    with mock.patch.object(Sinks, "row", row):
        assert main_here("train", write_toml(config, tmp_path)) == 130
    assert time.monotonic() - began < 60  # storage is waited for ten minutes
    errors = capsys.readouterr().err
    why = rf"stopped by SIGINT \({run.path}\S*: No such file or directory\)"
    assert re.search(rf"^{why}; continue with --resume$", errors, re.MULTILINE), errors
    assert not run.path.exists()
    elsewhere.rename(run.path)
    progress = Progress(title="resumed")
    assert outcome(run_here(config, resume=True, progress=progress), 3) == outcome(undisturbed, 3)
    first = next(row for row in run.metrics() if row["kind"] == "iteration")
    assert progress.reward_start == first["reward/train_mean"]


@pytest.mark.parametrize(
    ("iterations", "every"),
    [(6, 100), (2, 1)],
    ids=["before an iteration", "before the last checkpoint"],
)
def test_a_run_ends_without_a_trace_once_another_driver_has_its_directory(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch, capsys, iterations, every
):
    """As on storage whose locks do not reach the other driver's machine."""
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "claimed", iterations=iterations, checkpoint={"every": every}
    )
    run, recorded, done = RunDirectory.of(config), Sinks.row, list[int]()
    monkeypatch.setattr(claim, "LOOK_S", -1.0)

    def row(self: Sinks, values: Any) -> None:
        recorded(self, values)
        if values["kind"] == "iteration":
            done.append(values["iteration"])
            if done[-1] == 1:
                Claim(run.path)

    monkeypatch.setattr(Sinks, "row", row)
    assert main_here("train", write_toml(config, tmp_path)) == 2
    assert "has started a run here while this one was active" in capsys.readouterr().err
    assert [row["iteration"] for row in run.metrics() if row["kind"] == "iteration"] == [0, 1]
    assert done == [0, 1]
    events = [event["event"] for event in run.events()]
    assert not {"run_failed", "run_stopped", "run_finished", "end_failed"} & {*events}
    assert not (run.path / "report.html").exists()


def test_a_run_returns_to_the_last_checkpoint_that_has_all_its_files(
    ray_here, tiny_sd3_dir, tmp_path
):
    """Object stores rename file by file: after the loss of a machine files may be missing."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "renamed", iterations=3, checkpoint={"every": 1})
    run = run_here(config)
    whole = adapters(run, 3)
    newest = latest_checkpoint(run.checkpoints)
    assert newest is not None
    (newest / "optimizer.safetensors").unlink()
    assert main_here("train", write_toml(config, tmp_path), "--resume") == 0
    lacking = [row["path"] for row in run.events() if row["event"] == "checkpoint_incomplete"]
    assert lacking == [newest.name] == ["step_000003"]
    assert [row["iteration"] for row in run.metrics() if row["kind"] == "iteration"] == [0, 1, 2]
    assert adapters(run, 3) == whole
