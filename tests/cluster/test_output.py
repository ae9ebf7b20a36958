"""What a run prints: into an output that is no longer read, and while its actors wait."""

import os
from io import StringIO
from typing import IO

from rich.console import Console

from cluster.driver import actor_events
from cluster.driver.actor_events import ActorEvents
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
    events = ActorEvents(session.rundir.event, session.progress)
    for name, kind, actor in (
        ("actor_waits", "learner", 4),
        ("actor_waits", "learner", 5),
        ("actor_waits", "rollout", 1),
        ("actor_replaced", "learner", 4),
        ("actor_waits", "learner", 6),
        ("actor_died", "rollout", 2),
    ):
        events.event(name, kind=kind, actor=actor, why="no room")
    assert output.getvalue().splitlines() == [
        "learner-4 waits: no room",
        "rollout-1 waits: no room",
        "learner-6 waits: no room",
    ]
    assert sum(row["event"] == "actor_waits" for row in session.rundir.events()) == 4


def test_a_run_says_once_per_node_that_its_object_store_is_on_a_disk(tmp_path):
    output = StringIO()
    session = session_of(tmp_path, output)
    events = ActorEvents(session.rundir.event, session.progress)
    for node, directory in (("a", "/tmp/ray"), ("b", None), ("a", "/tmp/ray"), ("c", "/disk")):
        where = {"store_on_disk": directory} if directory else {}
        events.event("actor_started", kind="rollout", actor=0, node=node, host=f"h{node}", **where)
    text = " ".join(output.getvalue().split())
    assert text.count("/dev/shm is too small") == 2
    assert "ha: Ray's object store is in /tmp/ray:" in text and "hc: Ray's object" in text
    recorded = [row for row in session.rundir.events() if row["event"] == "object_store_on_disk"]
    assert [(row["node"], row["directory"]) for row in recorded] == [
        ("a", "/tmp/ray"),
        ("c", "/disk"),
    ]


def test_a_run_says_which_scorer_it_waits_for(tmp_path):
    output = StringIO()
    session = session_of(tmp_path, output)
    events = ActorEvents(session.rundir.event, session.progress)
    events.event("scorer_unreachable", scorer="vlm", why="no answer", limit_s=600.0)
    events.event("scorer_reached", scorer="vlm", seconds=59.7)
    assert output.getvalue().splitlines() == [
        "no answer: waiting up to 600 s for it",
        "scorer 'vlm' answers again after 59.7 s",
    ]


def test_a_run_says_once_that_layers_of_text_encoders_are_left_out(tmp_path):
    output = StringIO()
    session = session_of(tmp_path, output)
    events = ActorEvents(session.rundir.event, session.progress)
    for actor, left in enumerate(({}, {"left_out": 72}, {"left_out": 72})):
        events.event("actor_started", kind="learner", actor=actor, **left)
    assert " ".join(output.getvalue().split()) == (
        "lora.init_from also changes 72 layers of text encoders, which are not used: images start"
        " out different from those of the whole LoRA"
    )
    assert [row.get("left_out") for row in session.rundir.events()] == [None, 72, 72]


def test_a_run_says_once_that_its_container_has_reached_its_memory_limit(tmp_path, monkeypatch):
    killed = iter([3, 3, 4, 6])  # when the run starts, and at each death
    monkeypatch.setattr(actor_events, "killed_for_memory", lambda: next(killed))
    monkeypatch.setattr(actor_events, "usable_memory", lambda: 1_200_000_000)
    output = StringIO()
    session = session_of(tmp_path, output)
    for actor in range(3):
        session.services._event("actor_died", kind="rollout", actor=actor, why="it ended")
    assert " ".join(output.getvalue().split()) == (
        "the kernel kills processes for lack of memory: this container, or machine, has 1.20 GB:"
        " give it more"
    )
    recorded = [row for row in session.rundir.events() if row["event"] == "memory_limit_reached"]
    assert [(row["killed"], row["limit"]) for row in recorded] == [(1, "1.20 GB"), (2, "1.20 GB")]
