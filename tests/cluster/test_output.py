"""What a run prints: into an output that is no longer read, and while its actors wait."""

import os
from io import StringIO
from typing import IO

from rich.console import Console

from cluster.driver.session import Session
from configs.load import load
from configs.prompts import read_prompts
from records.progress import Progress
from records.rundir import RunDirectory


def session_of(tmp_path, file: IO[str]) -> Session:
    config = load("quickstart", [f"run_root={str(tmp_path)!r}"])
    rundir = RunDirectory.of(config)
    rundir.create(config)
    prompts = read_prompts(config.prompts.train)
    console = Console(file=file)
    return Session(config, rundir, prompts, prompts[:2], Progress(console=console))


def test_a_closed_output_is_recorded_as_an_event(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        session = session_of(tmp_path, file)
        session.progress.note("one")
        session.progress.note("two")
    recorded = [row for row in session.rundir.events() if row["event"] == "output_closed"]
    assert [row["why"] for row in recorded] == ["Broken pipe"]


def test_a_run_says_once_per_service_that_actors_wait(tmp_path):
    """Also when they wait again, after they were replaced."""
    output = StringIO()
    session = session_of(tmp_path, output)
    for name, kind, actor in (
        ("actor_waits", "learner", 4),
        ("actor_waits", "learner", 5),
        ("actor_waits", "rollout", 1),
        ("actor_replaced", "learner", 4),
        ("actor_waits", "learner", 6),
        ("actor_died", "rollout", 2),
    ):
        session._event(name, kind=kind, actor=actor, why="no room")
    assert output.getvalue().splitlines() == [
        "learner-4 waits: no room",
        "rollout-1 waits: no room",
        "learner-6 waits: no room",
    ]
    assert sum(row["event"] == "actor_waits" for row in session.rundir.events()) == 4
