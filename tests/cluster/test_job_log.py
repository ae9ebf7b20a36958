"""Following a job over connections that break: to its end, with no line shown twice."""

from types import SimpleNamespace

import pytest

from cluster.jobs import job_log
from cluster.jobs.job_log import OUT_OF_SIGHT, follow, follow_command_output

URL = "http://head:8265"
TEXT = "one\ntwo\nthree\n"


class Client:
    """A fake client.

    ``streams``: what each reading of the log returns before it ends, or the error that it raises;
    ``states``: the answers to requests of the job's state.
    """

    def __init__(self, streams, states, code=None, logs: str | Exception = TEXT):
        self.streams, self.states, self.code, self.logs = list(streams), list(states), code, logs

    def get_address(self):
        return URL

    async def tail_job_logs(self, job):
        for part in self.streams.pop(0) if self.streams else ():
            if isinstance(part, Exception):
                raise part
            yield part

    def get_job_info(self, job):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return SimpleNamespace(status=state, driver_exit_code=self.code)

    def get_job_logs(self, job):
        if isinstance(self.logs, Exception):
            raise self.logs
        return self.logs


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(job_log, "PAUSE_S", 0.0)


def followed(client):
    shown, lines = [], []
    return follow(client, "job-1", shown.append, lines.append), "".join(shown), lines


LOST = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")


@pytest.mark.parametrize(
    "broken", [LOST, ConnectionResetError("reset"), OSError("gone"), ValueError("not JSON"), None]
)
def test_an_interrupted_log_continues_where_it_stopped(broken):
    first = ["one\n", "tw", *([broken] if broken else [])]
    code, shown, lines = followed(
        Client([first, ["one\ntwo\n", "three\n"]], ["RUNNING", "SUCCEEDED"])
    )
    assert (code, shown, len(lines)) == (0, TEXT, 1)
    assert lines[0].startswith(f"{URL}: the log was interrupted (") and lines[0].endswith(
        "reconnecting"
    )


def test_failed_connections_and_missing_answers_are_retried():
    import aiohttp

    down = [aiohttp.ClientError("no route")]
    client = Client(
        [["one\n", LOST], down, down, ["one\ntwo\nthree\n"]],
        [OSError("refused"), OSError("refused"), "RUNNING", "SUCCEEDED"],
    )
    code, shown, lines = followed(client)
    assert (code, shown, len(lines)) == (0, TEXT, 1)  # one line per interruption


def test_the_end_of_the_log_is_fetched_after_a_broken_stream():
    assert followed(Client([["one\n", LOST]], ["SUCCEEDED"])) == (0, TEXT, [])
    assert followed(Client([["one\n", LOST]], ["SUCCEEDED"], logs=RuntimeError("404"))) == (
        0,
        "one\n",
        [],
    )


def test_a_hanging_stream_does_not_hide_the_end_of_the_job(monkeypatch):
    import asyncio

    class Hanging(Client):
        async def tail_job_logs(self, job):
            yield "one\n"
            await asyncio.sleep(60)

    monkeypatch.setattr(job_log, "SILENCE_S", 0.05)
    assert followed(Hanging([], ["RUNNING", "SUCCEEDED"])) == (0, TEXT, [])


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("STOPPED", None, 130),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 1, 3),
        ("FAILED", None, 3),
    ],
)
def test_the_exit_code_is_that_of_the_run(state, code, expected):
    assert followed(Client([[TEXT]], [state], code)) == (expected, TEXT, [])


def test_an_unreachable_dashboard_is_not_a_failed_run(monkeypatch):
    monkeypatch.setattr(job_log, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(job_log, "PAUSE_S", 0.02)
    code, shown, lines = followed(Client([["one\n", LOST]], [OSError("refused\nat length")]))
    assert code == OUT_OF_SIGHT == 4 and shown == "one\n" and len(lines) == 2
    assert f"the job may still be running: ray job logs --address {URL} --follow job-1" in lines[1]
    assert "\n" not in lines[1]


def test_a_closed_output_pipe_is_not_a_broken_connection():
    def gone(text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        follow(Client([[TEXT]], ["RUNNING"]), "job-1", gone, print)


BEFORE = "2026-11-22 INFO job_manager.py:581 -- Runtime env is setting up.\nRunning entrypoint for"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([BEFORE, " job raysubmit_1: python -m cl", "uster\n{\n", "}\n"], "{\n}\n"),
        ([BEFORE + " job raysubmit_1: python\n"], ""),
        (
            ["2026-11-22 ERROR: the runtime env failed\n"],
            "2026-11-22 ERROR: the runtime env failed\n",
        ),
    ],
)
def test_command_output_excludes_the_lines_of_ray(parts, expected):
    shown = []
    assert (
        follow_command_output(Client([parts], ["SUCCEEDED"]), "job-1", shown.append, shown.append)
        == 0
    )
    assert "".join(shown) == expected
