"""A run whose standard output is no longer read."""

import os

from rich.console import Console

from cluster.driver.session import Session
from configs.load import load
from configs.prompts import read_prompts
from records.progress import Progress
from records.rundir import RunDirectory


def test_a_closed_output_is_recorded_as_an_event(tmp_path):
    config = load("quickstart", [f"run_root={str(tmp_path)!r}"])
    rundir = RunDirectory.of(config)
    rundir.create(config)
    prompts = read_prompts(config.prompts.train)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        session = Session(
            config, rundir, prompts, prompts[:2], Progress(console=Console(file=file))
        )
        session.progress.note("one")
        session.progress.note("two")
    recorded = [row for row in rundir.events() if row["event"] == "output_closed"]
    assert [row["why"] for row in recorded] == ["Broken pipe"]
