"""A machine with another number of cores, for tests."""

import pytest


def set_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process have ``count`` cores and no limits of a container."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(count)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: count)
    monkeypatch.setattr("planning.machine._groups", lambda controller, process: iter(()))
