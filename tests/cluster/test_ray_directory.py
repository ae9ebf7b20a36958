"""The directory of Ray's sockets and logs: one that is too long is not used, and starts wait for
room on a full disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray._private.utils import validate_socket_filepath
from ray.exceptions import ActorDiedError

from actors.messages import ActorInfo
from cluster.driver import connect, train
from cluster.driver.connect import join_or_start_ray
from cluster.runtime import local_ray, ray_directory, socket_paths, starting
from cluster.runtime.member import NodeLost
from configs.load import ConfigError, load
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.runs import main_here, tiny_config, write_toml


def disk(free_bytes: int, files: int = 100, free_files: int = 100) -> SimpleNamespace:
    """Return what ``os.statvfs`` returns for a disk."""
    return SimpleNamespace(
        f_bavail=free_bytes // 512, f_frsize=512, f_files=files, f_favail=free_files
    )


# ---- too long


@pytest.mark.parametrize(
    ("length", "own", "expected"),
    [(39, None, None), (40, None, "/tmp/ray"), (40, "/tmp/short", None)],
)
def test_a_temporary_directory_that_is_too_long_is_not_used(
    length, own, expected, monkeypatch, caplog
):
    """A job's directory may be. Ray itself prefers that of RAY_TMPDIR."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.init", lambda **options: given.append(options))
    monkeypatch.setenv("TMPDIR", "/" + (length - 1) * "x")
    if own is None:
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
    else:
        monkeypatch.setenv("RAY_TMPDIR", own)
    local_ray.start_ray(3)
    assert given[0].get("_temp_dir") == expected
    warned = "has 40 bytes, and Ray's sockets need a directory of at most 39: Ray's files are in"
    assert [warned in each.message for each in caplog.records] == ([True] if expected else [])


def test_the_longest_directory_has_room_for_the_sockets_of_ray(ray_here):
    """A socket's path names the session, and that the process id of the driver: at most 2^22."""
    node = ray._private.worker.global_worker.node
    session = Path(node.raylet_socket_name).parts[-3]
    below = Path("/ray", session.rpartition("_")[0] + "_4194304", "sockets", "plasma_store")
    longest = "/" + (ray_directory.LONGEST_DIRECTORY - 1) * "x"
    validate_socket_filepath(f"{longest}{below}")
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath(f"{longest}x{below}")


@pytest.mark.parametrize("extra", [0, 1])
def test_a_socket_has_the_longest_path_that_the_kernel_accepts(tmp_path, monkeypatch, extra):
    below = len("/sol-rl/socket")
    directory = tmp_path / ("x" * (socket_paths.LONGEST - below - len(str(tmp_path)) - 1 + extra))
    path = directory / "sol-rl" / "socket"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    chosen = socket_paths.short_directory(below)
    assert chosen == (socket_paths.FALLBACK if extra else str(directory))
    with socket.socket(socket.AF_UNIX) as listener:
        if extra:
            with pytest.raises(OSError, match="too long"):
                listener.bind(str(path))
        else:
            listener.bind(str(path))


def test_an_environment_in_which_ray_cannot_start_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect.template, "start", Mock(side_effect=AssertionError))
    monkeypatch.setenv("RAY_TMPDIR", "/" + 39 * "x")
    with pytest.raises(ConfigError, match="RAY_TMPDIR = '/x+': has 40 bytes, .* of at most 39"):
        join_or_start_ray(load("quickstart"))
    monkeypatch.setenv("RAY_TMPDIR", "/here")
    monkeypatch.setattr(os, "statvfs", lambda path: disk(0))
    with pytest.raises(ConfigError, match="the disk of /here is full.*: make room, or set RAY_TM"):
        join_or_start_ray(load("quickstart"))


# ---- full


@pytest.mark.parametrize(
    ("found", "is_full"),
    [
        (disk(2**20), False),
        (disk(2**20 - 512), True),
        (disk(2**30, free_files=0), True),
        (disk(2**30, files=0, free_files=0), False),  # a file system without such a limit
    ],
)
def test_a_disk_without_room_for_bytes_or_files_is_full(found, is_full, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert bool(ray_directory.full("/here")) == is_full


@pytest.mark.parametrize(
    ("free", "blocks", "expected"),
    [(10, 100, None), (9, 100, "/here is 91% full"), (0, 100, "/here is 100% full"), (0, 0, None)],
)
def test_a_crowded_disk_is_named_before_it_is_full(free, blocks, expected, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=blocks))
    assert ray_directory.nearly_full("/here") == expected


def test_a_missing_directory_is_not_full(tmp_path):
    assert ray_directory.full(str(tmp_path / "missing")) is None


def test_the_directory_of_this_ray_is_looked_at(ray_here, monkeypatch):
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    monkeypatch.setattr(os, "statvfs", lambda path: disk(0))
    found = ray_directory.full_here()
    assert found and found.startswith(f"the disk of {session.parent} is full")


class Dying:
    """A transport: before they are ready, the first ``times`` actors end with ``error``."""

    def __init__(self, times: int, error: Exception | None = None):
        self.left, self.names, self.error = times, list[str](), error or ActorDiedError()

    def spawn(self, name: str) -> str:
        self.names.append(name)
        return name

    def send(self, handle: str, call: Any) -> Sequence[Any]:
        return [handle]

    def answer(self, reference: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.left:
            self.left -= 1
            future.set_exception(self.error)
        else:
            future.set_result(ActorInfo(1, "here", "n"))
        return future

    def kill(self, handle: str) -> None: ...

    def ended(self, handle: str) -> bool:
        return False

    def start(self, deadline_s: float, events: list[dict[str, Any]]) -> Any:
        """Start an actor with this deadline; record the events."""

        async def start() -> Any:
            never = asyncio.get_running_loop().create_future()
            return await starting.start_actor(
                self,
                self.spawn,
                "a",
                "service actor 0",
                deadline_s,
                lambda name, **fields: events.append({"event": name, **fields}),
                lambda: never,
            )

        return asyncio.run(start())


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Let time pass only in ``asyncio.sleep``; the item is the time in seconds."""
    now = [50.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(starting.asyncio, "sleep", sleep)
    monkeypatch.setattr(starting.clock, "now", lambda: now[0])
    return now


def test_starts_wait_for_room_on_a_full_disk(clock, monkeypatch):
    """More of them fail than without a known cause. Each has a name of its own."""
    monkeypatch.setattr(starting, "full_here", lambda: "no room in /here")
    events, nodes = list[dict[str, Any]](), Dying(times=7)
    handle, info = nodes.start(600.0, events)
    assert info.host == "here" and handle == "a-7" and len(set(nodes.names)) == 8
    assert clock == [50.0 + 1 + 2 + 4 + 8 + 16 + 16 + 16]
    assert events == [{"event": "actor_waits", "why": "no room in /here"}]


def test_a_disk_that_stays_full_ends_the_wait_at_the_deadline_with_the_reason(clock, monkeypatch):
    monkeypatch.setattr(starting, "full_here", lambda: "no room in /here")
    message = "service actor 0 could not be started for 20 s: no room in /here"
    with pytest.raises(RunFailed, match=message):
        Dying(times=100).start(20.0, [])
    assert clock == [50.0 + 1 + 2 + 4 + 8 + 16]


class RaisedInConstructor(ActorDiedError):
    actor_init_failed = True


@pytest.mark.parametrize(
    ("full", "error", "starts"),
    [
        (None, ActorDiedError(), starting.LOST_STARTS),
        ("no room in /here", NodeLost("silent"), starting.LOST_STARTS),
        ("no room in /here", RaisedInConstructor(), 1),
    ],
)
def test_other_causes_are_not_waited_for(clock, monkeypatch, full, error, starts):
    monkeypatch.setattr(starting, "full_here", lambda: full)
    nodes = Dying(100, error)
    with pytest.raises(RunFailed, match="service actor 0 did not start: "):
        nodes.start(600.0, [])
    assert len(nodes.names) == starts


# ---- in a run


def test_a_run_records_where_rays_files_are_and_ends_with_its_ray(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    ends_with = list[str]()

    @contextlib.contextmanager
    def watching(advice: str, record: object) -> Iterator[None]:
        ends_with.append(advice)
        yield

    monkeypatch.setattr(train, "ends_with_ray", watching)
    monkeypatch.setattr(ray_directory, "replaced", lambda: "too long")
    config = tiny_config(tiny_sd3_dir, tmp_path, "elsewhere", iterations=1)
    assert main_here("train", write_toml(config, tmp_path)) == 0
    recorded = RunDirectory.of(config).events()
    found = [row["why"] for row in recorded if row["event"] == "ray_directory_replaced"]
    assert found == ["too long"] and ends_with == ["continue with --resume"]
