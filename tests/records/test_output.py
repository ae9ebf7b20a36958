"""An output that nobody reads ends no run, and does not change the exit code of a command."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from cluster.driver.train import _tell
from records.output import redirect_broken_streams, replace_unencodable
from records.progress import Progress, status_spinner

ROOT = Path(__file__).parents[2]


def closed_terminal() -> int:
    """Return a descriptor of a terminal that is closed: writing to it fails."""
    ours, its = pty.openpty()
    os.close(ours)
    return its


def command(*given: str, **streams: int) -> int:
    """Return the exit code of ``sol-rl``."""
    return subprocess.run([sys.executable, "-m", "cluster", *given], cwd=ROOT, **streams).returncode


def test_a_closed_terminal_does_not_end_the_display():
    """Its thread writes too, four times a second; both continue."""
    recorded: list[str] = []
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as file:
        progress = Progress(console=Console(file=file, force_terminal=True, width=80))
        progress.on_closed = recorded.append
        assert progress.live
        with progress:
            progress.start(3)
            progress.note("somebody reads this")
            os.close(ours)
            deadline = time.monotonic() + 60
            while not recorded:  # by the thread or by a note
                assert time.monotonic() < deadline
                progress.note("nobody reads this")
            progress.note("nor this")
    assert recorded == ["Input/output error"]


def test_output_errors_before_a_run_has_events_are_ignored(monkeypatch):
    for make in (closed_terminal, lambda: _pipe()):
        with os.fdopen(make(), "w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            _tell("waiting for nodes")
            with status_spinner("starting Ray", Console(file=file, force_terminal=True)):
                pass
            redirect_broken_streams()
        monkeypatch.undo()


@pytest.mark.parametrize("make", [closed_terminal, lambda: _pipe()])
def test_a_closed_pipe_does_not_change_the_exit_code(make):
    stream = make()
    try:
        assert command("config", "no_such_preset", stderr=stream) == 2
        assert command("config", "--list", stdout=stream) == 0
        assert command("config", "--list", stdout=stream, stderr=stream) == 0
    finally:
        os.close(stream)


def test_a_closed_pipe_is_not_reported():
    """``| head`` is such a pipe."""
    stream = _pipe()
    made = subprocess.run(
        [sys.executable, "-m", "cluster", "config", "--list"],
        cwd=ROOT,
        stdout=stream,
        stderr=subprocess.PIPE,
    )
    os.close(stream)
    assert (made.returncode, made.stderr) == (0, b"")


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_streams_that_were_closed_at_the_start_get_no_other_files(tmp_path):
    """A file that is opened first would take the descriptor of standard output."""
    code = (
        "import sys, records.output; records.output.open_closed_streams();"
        f" file = open({str(tmp_path / 'file')!r}, 'w'); print('for nobody', flush=True);"
        " print('nor this', file=sys.stderr, flush=True); file.write(f'{sys.stdin.read()}mine')"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, cwd=ROOT).returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_a_character_that_the_terminal_lacks_is_replaced(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    replace_unencodable()
    print("0.5 \u00b1 0.1", flush=True)
    assert written.getvalue() == b"0.5 ? 0.1\n"
