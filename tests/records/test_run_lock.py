"""One driver per run directory: a second one is refused in one line that names the first.

A process that has ended holds no lock. Whole drivers are tested in ``test_fault_matrix``.
"""

import errno
import fcntl
import os
import re
import socket
import subprocess
from subprocess import PIPE

import pytest

from configs.load import ConfigError
from records import lock as lock_module
from records import storage
from records.lock import exclusive_lock, is_locked, wait_for_other_host
from records.rundir import ANOTHER_RUN, RunDirectory
from tests.cluster.runs import main_here, tiny_config, write_toml


def test_a_second_driver_is_told_the_first(tmp_path):
    file = tmp_path / "lock"
    file.write_text(
        "process 1 on a machine with a very long name that is not there any more since the year"
        " one\n"
    )
    with exclusive_lock(file, "a run", ANOTHER_RUN) as lock:
        assert lock.unsupported_reason is None
        with pytest.raises(ConfigError) as refused, exclusive_lock(file, "a run", ANOTHER_RUN):
            pass
        assert file.read_text().count("\n") == 1
    (line,) = refused.value.lines
    who = (
        rf"process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d"
        r" \d\d:\d\d:\d\d UTC: "
    )
    assert re.search(
        rf"^{re.escape(str(tmp_path))}: a run is active here: {who}.*--resume", line
    ), line
    with exclusive_lock(file, "a run", ANOTHER_RUN) as lock:
        assert lock.unsupported_reason is None


@storage.retried
def write_across_an_outage(left: list[int]) -> None:
    if left:
        raise OSError(left.pop(), "Transport endpoint is not connected", "metrics.jsonl")


def test_other_machines_see_the_holder_at_once(tmp_path, monkeypatch):
    # an NFS client sends what was written to an open file when it is flushed
    flushed: list[str] = []

    def flush(file: int) -> None:
        flushed.append(os.pread(file, 300, 0).decode())

    monkeypatch.setattr(os, "fsync", flush)
    with exclusive_lock(tmp_path / "lock", "a run", ""):
        (text,) = flushed
    assert text.startswith(f"process {os.getpid()} on {socket.gethostname()} since ")


def test_a_lock_that_its_server_has_dropped_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    with exclusive_lock(tmp_path / "lock", "a run", ANOTHER_RUN) as lock:
        fcntl.flock(lock.file, fcntl.LOCK_UN)
        assert not is_locked(tmp_path / "lock")
        write_across_an_outage([errno.ENOTCONN])
        assert is_locked(tmp_path / "lock")
        # also if it has not been dropped
        write_across_an_outage([errno.ENOTCONN])
        assert is_locked(tmp_path / "lock")
    write_across_an_outage([errno.ENOTCONN])
    assert not is_locked(tmp_path / "lock")


def test_a_lock_of_a_mount_that_was_replaced_is_taken_on_the_new_one(tmp_path, monkeypatch):
    """The old mount's descriptors fail for ever: another file has the name, as on the new mount."""
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    file, told = tmp_path / "lock", []
    with exclusive_lock(file, "a run", ANOTHER_RUN, told.append) as lock:
        gone, flock = os.fstat(lock.file), fcntl.flock

        def fails_on_the_old_mount(descriptor: int, operation: int) -> None:
            if os.path.samestat(os.fstat(descriptor), gone):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", fails_on_the_old_mount)
        file.rename(tmp_path / "old mount")
        file.touch()
        write_across_an_outage([errno.ESHUTDOWN])
        assert is_locked(file) and not os.get_inheritable(lock.file)
    assert not is_locked(file) and told == []


def test_a_driver_whose_lock_another_one_has_taken_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    with exclusive_lock(tmp_path / "lock", "a run", ANOTHER_RUN) as lock:
        fcntl.flock(lock.file, fcntl.LOCK_UN)
        other = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        os.truncate(other, os.write(other, b"process 7 on elsewhere\n"))
        monkeypatch.setattr(lock_module, "_open", lambda _: pytest.fail("opened again"))
        with pytest.raises(
            ConfigError,
            match=rf"^{re.escape(str(tmp_path))}: its storage was away for \d+(\.\d)? s"
            r" \(metrics.jsonl: Transport endpoint is not connected\), and process 7 on elsewhere"
            " has locked it since$",
        ):
            write_across_an_outage([errno.ENOTCONN])
        os.close(other)


def test_a_file_system_that_cannot_lock_any_more_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    rundir = RunDirectory(tmp_path)
    with rundir.locked():
        monkeypatch.setattr(fcntl, "flock", no_locks)
        write_across_an_outage([errno.ENOTCONN])
    (event,) = rundir.events()
    assert event["event"] == "run_not_locked"
    assert event["why"] == "No locks available: do not start a second driver in this directory"


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Return a descriptor that has locked ``tmp_path / "lock"``."""
    monkeypatch.setattr(lock_module, "POLL_S", 0.0)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_the_lock_of_a_lost_machine_is_waited_for(tmp_path, other):
    os.write(other, b"process 7 on elsewhere since 2026-11-27 10:00:00 UTC\n")
    told: list[str] = []

    def release(line: str) -> None:
        told.append(line)
        fcntl.flock(other, fcntl.LOCK_UN)

    wait_for_other_host(tmp_path / "lock", release)
    assert not is_locked(tmp_path / "lock")
    assert told == [
        f"{tmp_path}: locked by process 7 on elsewhere since 2026-11-27 10:00:00 UTC: waiting for"
        " up to 300 s, as storage keeps the lock of a lost machine for a while"
    ]


def test_a_machine_that_lives_is_waited_for_with_a_limit(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock_module, "HOLD_S", 0.05)
    os.write(other, b"process 7 on elsewhere since 2026-11-27 10:00:00 UTC\n")
    told: list[str] = []
    wait_for_other_host(tmp_path / "lock", told.append)
    assert len(told) == 1 and is_locked(tmp_path / "lock")


@pytest.mark.parametrize("here", [True, False])
def test_a_process_of_this_machine_is_not_waited_for(tmp_path, other, here):
    holder = f"process 7 on {socket.gethostname()} since 2026-11-27 10:00:00 UTC\n" if here else ""
    os.write(other, holder.encode())
    told: list[str] = []
    wait_for_other_host(tmp_path / "lock", told.append)
    wait_for_other_host(tmp_path / "nothing", told.append)
    assert told == []


def test_child_processes_do_not_hold_the_lock(tmp_path):
    with exclusive_lock(tmp_path / "lock", "a run", ANOTHER_RUN):
        left = subprocess.Popen(
            ["/bin/sh", "-c", "echo there; exec sleep 60"], stdout=PIPE, close_fds=False
        )
        assert left.stdout is not None and left.stdout.readline() == b"there\n"
    try:
        with exclusive_lock(tmp_path / "lock", "a run", ANOTHER_RUN) as lock:
            assert lock.unsupported_reason is None and left.poll() is None
    finally:
        left.kill()
        left.communicate()


def test_an_unwritable_run_root_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="run_root: .*cannot be written .Not a directory"),
        RunDirectory(tmp_path / "file" / "x").locked(),
    ):
        pass


def test_a_file_system_without_locks_does_not_stop_a_run(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    config = tiny_config(tiny_sd3_dir, tmp_path, "unlocked", iterations=1)
    assert main_here("train", write_toml(config, tmp_path)) == 0
    (event,) = [
        event for event in RunDirectory.of(config).events() if event["event"] == "run_not_locked"
    ]
    assert event["why"] == "No locks available: do not start a second driver in this directory"
