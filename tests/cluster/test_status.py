"""The display of a running job in a terminal, for a real run and for a synthetic state."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import ray
from ray.exceptions import RayActorError

from cli.main import main
from cluster.driver import connect
from cluster.driver.connect import join_or_start_ray
from cluster.driver.status import Reporter
from cluster.jobs.board import ActorState, Link, RunState, ServiceState, board
from cluster.jobs.dashboard import TOKEN_WANTED
from cluster.jobs.live_runs import CLUSTER_ID, require_listener, run_states, scale
from cluster.jobs.status_text import status_lines
from configs.load import ConfigError, load
from records.errors import RunFailed
from records.progress import Progress
from tests.cluster.runs import run_here, tiny_config

STATE: RunState = {
    "run": "mine", "arm": "sol_rl", "directory": "/data/runs/mine", "iteration": 7,
    "iterations": 18, "version": 7, "left_s": 180.0, "held_out": [0.7, 0.75], "restored": 1,
    "stages": {"explored": [192, 384], "scored": [190, 384], "selected": [0, 0]},
    "row": {"reward/train_mean": 0.7312, "time/iteration_s": 17.14, "rollout/images_per_s": 46.2,
            "audit/kendall_tau": 0.604},
    "services": [
        {"kind": "rollout", "waiting": 12, "reissued": 3, "starting": 1, "actors": [
            {"actor": "rollout-0.0", "state": "serving", "version": 7, "tasks": 40, "busy": 0.934,
             "restarts": 0, "host": "h", "pid": 9, "node": "c05fc5e8"},
            {"actor": "rollout-1.2", "state": "starting", "version": None, "tasks": 4, "busy": 0.0,
             "restarts": 2, "host": "h", "pid": None, "node": ""},
        ]},
        {"kind": "learner", "waiting": 0, "reissued": 0, "starting": 0, "actors": []},
    ],
}  # fmt: skip


def test_a_state_is_formatted_in_lines():
    assert status_lines(STATE) == [
        "mine  arm sol_rl, iteration 7 of 18 done, policy version 7, about 3 min 00 s left",
        "  /data/runs/mine",
        "  17.1 s per iteration, 46.2 images/s explored",
        "  reward 0.7312, held out 0.7000 -> 0.7500, tau 0.60",
        "  explored 192/384, scored 190/384",
        "  returns to a checkpoint: 1",
        "  actor        state     version  tasks  busy  restarts  host  pid  node",
        "  rollout-0.0  serving   7        40     93%   0         h     9    c05fc5e8",
        "  rollout-1.2  starting  -        4      0%    2         h     -    -",
        "  rollout: waiting tasks 12, retries 3, starting actors 1",
    ]


def test_many_actors_of_a_service_are_a_row_per_state_and_version():
    def actor(number: int, state: str, version: int | None) -> ActorState:
        return {"actor": f"rollout-{number}.0", "state": state, "version": version, "tasks": 2,
                "busy": number % 2, "restarts": int(number == 3), "host": f"h{number % 3}",
                "pid": 100 + number, "node": "c05fc5e8"}  # fmt: skip

    actors = [actor(n, "serving", 7) for n in range(1498)]
    actors += [actor(1498, "starting", None), actor(1499, "serving", 6)]
    service: ServiceState = {**STATE["services"][0], "actors": actors}
    many: RunState = {**STATE, "services": [service]}
    assert status_lines(many)[6:] == [
        "  actor            state     version  tasks  busy  restarts  host     pid  node",
        "  1,498 x rollout  serving   7        2996   50%   1         3 hosts  -    c05fc5e8",
        "  1 x rollout      starting  -        2      0%    0         h1       -    c05fc5e8",
        "  1 x rollout      serving   6        2      100%  0         h2       -    c05fc5e8",
        "  rollout: waiting tasks 12, retries 3, starting actors 1",
    ]
    assert len(status_lines(many, every_actor=True)) == 6 + 1 + 1500 + 1
    few: RunState = {**STATE, "services": [{**service, "actors": actors[:16]}]}
    assert status_lines(few) == status_lines(few, every_actor=True)


def test_a_state_of_another_version_is_one_line(monkeypatch, capsys):
    older = {key: value for key, value in STATE.items() if key != "restored"}
    monkeypatch.setattr("cluster.jobs.live_runs.run_states", lambda name: {"mine#1": older})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert main(["status", "--address", "127.0.0.1:6379"]) == 3
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "run 'mine'" in error and "KeyError: 'restored'" in error


@pytest.mark.parametrize(
    ("given", "passed"),
    [([], ["status"]), (["--run", "a", "--actors"], ["status", "--run", "a", "--actors"])],
)
def test_options_reach_the_job_that_asks_a_distant_cluster(given, passed, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr("cli.status.through_job", lambda *call: asked.append(call) or 0)
    assert main(["status", "--address", "http://head:8265", *given]) == 0
    assert asked == [("http://head:8265", passed)]


class Watcher(Progress):
    """Records the run's state in the middle of its second iteration."""

    session: Any = None
    state: RunState | None = None

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        if stage == "scored" and self.iteration == 1 and self.state is None:
            self.state = Reporter(self.session, "here").state()


def test_a_run_reports_its_state(ray_here, tiny_sd3_dir, tmp_path):
    watcher = Watcher()
    run_here(tiny_config(tiny_sd3_dir, tmp_path, "watched", iterations=2), progress=watcher)
    state = watcher.state
    assert state is not None
    assert (state["run"], state["iteration"], state["iterations"], state["version"]) == (
        "watched",
        1,
        2,
        1,
    )
    assert state["stages"]["explored"][1] == 2 * 8 and 0 < state["stages"]["scored"][0] <= 2 * 8
    assert state["row"]["time/iteration_s"] > 0 and len(state["held_out"]) == 1
    actors = {actor["actor"]: actor for service in state["services"] for actor in service["actors"]}
    assert set(actors) == {
        "rollout-0.0",
        "rollout-1.0",
        "reward-0.0",
        "encoder-0.0",
        "selector-0.0",
        "learner-0.0",
    }
    assert all(
        actor["state"] == "serving" and actor["pid"] and actor["node"] for actor in actors.values()
    )
    assert actors["rollout-0.0"]["version"] == 1
    assert sum(a["tasks"] for n, a in actors.items() if n.startswith("rollout")) > 8
    assert "rollout-0.0" in "\n".join(status_lines(state))


# ---- the board, with simulated runs


async def allow(sizes: dict[str, int]) -> tuple[bool, str]:
    return True, f"now {sizes['rollout']}"


async def refuse(sizes: dict[str, int]) -> tuple[bool, str]:
    return False, "rollout: too many"


async def never(sizes: dict[str, int]) -> tuple[bool, str]:
    await asyncio.sleep(600)
    return True, ""


async def board_with(keys: set[str]) -> Any:
    """Wait until the runs are on the board and return it: only its creator's handle keeps it alive.

    The board of an earlier test may still be ending.
    """
    there = None
    while True:
        try:
            there = there or await asyncio.to_thread(board)
            if keys <= set(await there.runs.remote()):
                return there
        except RayActorError:
            there = None
        await asyncio.sleep(0.05)


def with_runs(runs: dict[str, Any], work) -> Any:
    """Return the result of ``work()``, called in a thread beside runs on the board: (name, act) by
    key.
    """

    async def all_of_it() -> Any:
        links = [
            Link(key, lambda name=name: {**STATE, "run": name}, act)
            for key, (name, act) in runs.items()
        ]
        tasks = [asyncio.create_task(link.live()) for link in links]
        try:
            _kept = await board_with(set(runs))
            return await asyncio.to_thread(work)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(link.leave() for link in links))

    return asyncio.run(all_of_it())


def message(error: type[Exception], work) -> str:
    with pytest.raises(error) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize("command", [["status"], ["scale", "--rollout", "2"]])
def test_an_address_without_a_listener_is_refused_at_once(command, capsys, monkeypatch):
    """Ray alone would try for minutes. A port that was just released has no listener."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert main([*command, "--address", address]) == 2
    message = capsys.readouterr().err
    assert (
        f"--address {address}: no Ray cluster answers there" in message and message.count("\n") == 1
    )
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = {address}: no Ray cluster answers there"):
        join_or_start_ray(load("quickstart"))


def test_a_home_that_cannot_be_written_is_named(monkeypatch):
    """Ray writes a token there when it starts a cluster."""
    refused = PermissionError(13, "Permission denied", "/.ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect.template, "start", lambda config: None)
    monkeypatch.setattr(ray, "init", Mock(side_effect=refused))
    with pytest.raises(
        ConfigError, match=r"Ray cannot write /\.ray \(Permission denied\): set HOME"
    ):
        join_or_start_ray(load("quickstart"))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """A container may run as any number; Ray asks for the home when it starts a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr(connect.template, "start", lambda config: None)
    monkeypatch.setattr(ray, "init", lambda **options: Path.home())
    with pytest.raises(ConfigError, match="this user has no home directory.*: set HOME to"):
        join_or_start_ray(load("quickstart"))


class Refusing(grpc.GenericRpcHandler):
    """A head that answers every request with this code, and records the requests."""

    def __init__(self, code: grpc.StatusCode):
        self.code, self.requested = code, []

    def service(self, handler_call_details):
        self.requested.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(lambda _, to: to.abort(self.code, "no"))


@contextmanager
def refusing(code: grpc.StatusCode) -> Iterator[tuple[str, list[str]]]:
    handler, server = Refusing(code), grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler.requested
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("command", [["status"], ["scale", "--rollout", "2"]])
def test_a_refused_token_is_reported_after_one_request(command, capsys, monkeypatch):
    """Ray alone would send twenty requests, with a warning for each. It handles other refusals
    itself.
    """
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with refusing(grpc.StatusCode.UNAUTHENTICATED) as (address, requested):
        assert main([*command, "--address", address]) == 2
        assert capsys.readouterr().err == f"--address {address}: {TOKEN_WANTED}\n"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(
            ConfigError, match=f"RAY_ADDRESS = {address}: this cluster requires a to"
        ):
            join_or_start_ray(load("quickstart"))
        assert requested == [CLUSTER_ID] * 2
    with refusing(grpc.StatusCode.UNIMPLEMENTED) as (address, requested):
        require_listener(address)
        assert requested == [CLUSTER_ID]


def test_losing_the_board_during_a_request_is_one_line(ray_here, monkeypatch):
    def lost(name: str | None) -> Any:
        ray.kill(board(), no_restart=True)
        return {"a#1": STATE}

    monkeypatch.setattr("cluster.jobs.live_runs.run_states", lost)
    why = message(RunFailed, lambda: scale("a", {"rollout": 2}))
    assert why.startswith("the run's board was lost (") and why.endswith("see `sol-rl status`")


def test_a_run_is_found_by_name(ray_here, monkeypatch):
    monkeypatch.setattr("cluster.jobs.board.PERIOD_S", 0.2)

    def work() -> None:
        assert scale("a", {"rollout": 3}) == "now 3"
        assert message(ConfigError, lambda: scale("b", {"rollout": 9})) == "rollout: too many"
        assert message(ConfigError, lambda: scale(None, {"rollout": 9})) == (
            "--run is required, because several runs are active: a, b, c"
        )
        unknown = message(ConfigError, lambda: run_states("d"))
        assert "no run 'd' on this cluster; active runs: a, b, c" in unknown
        late = message(RunFailed, lambda: scale("c", {"rollout": 2}, timeout_s=0.5))
        assert late.startswith("not done")

    with_runs({"a#1": ("a", allow), "b#1": ("b", refuse), "c#1": ("c", never)}, work)
    assert "no run on this cluster" in message(ConfigError, lambda: run_states(None))  # they left


def test_a_dead_board_is_recreated(ray_here):
    def work() -> Any:
        ray.kill(board(), no_restart=True)
        for _ in range(300):
            try:
                return run_states("a")["a#1"]["run"]
            except ConfigError:
                time.sleep(0.1)
        return None

    assert with_runs({"a#1": ("a", allow)}, work) == "a"


NODES = """
import ray
from ray._private.state import actors
from cluster.jobs.board import board
from tests.cluster.nodes import Machines

with Machines({"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}):
    here = ray.get_runtime_context().get_node_id()
    for _ in range(4):
        made = board()
        ray.get(made.runs.remote())
        print(actors(made._actor_id.hex())["Address"]["NodeID"] == here)
        ray.kill(made)
"""


@pytest.mark.slow
def test_the_board_is_on_the_drivers_node():
    """On another one it could be lost before the run. In a process without another Ray."""
    made = subprocess.run(
        [sys.executable, "-c", NODES], capture_output=True, text=True, timeout=280
    )
    assert made.stdout.split() == ["True"] * 4, made.stderr
