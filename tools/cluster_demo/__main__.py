"""Command line of ``make cluster-demo``: the sequence of the demonstration."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tools.cluster_demo
from analysis.report.data import read_run
from analysis.report.events import running_times, timeline_of
from records.rundir import RunDirectory
from tools.cluster_demo.simulated import ROOT, Demo, DemoError
from tools.cluster_demo.timeline import lines_of

LEFT_OUT = ("time", "event", "pid", "host", "why", "backend")
"""Fields of an event that are not shown."""


def disturbed(demo: Demo) -> RunDirectory:
    """Submit a run, scale it 1 -> 3 -> 2, remove a node and wait until the run has finished."""
    run, job = demo.submit("disturbed", 1)
    quarter = max(1, demo.iterations // 4)

    def after(iterations: int) -> Callable[[], bool]:
        """Return a function that returns True once ``iterations`` iterations are complete."""
        return lambda: sum(row["kind"] == "iteration" for row in run.metrics()) >= iterations

    demo.wait(job, after(quarter), "it was scaled")
    demo.sol_rl("scale", "--rollout", "3", "--address", demo.address)
    demo.sol_rl("status", "--address", demo.address)
    demo.wait(job, after(2 * quarter), "it was scaled again")
    demo.sol_rl("scale", "--rollout", "2", "--address", demo.address)
    demo.wait(job, after(2 * quarter + 1), "its node was removed")
    demo.remove_node_of(run)
    demo.finish(job)
    return run


def differences(one: RunDirectory, other: RunDirectory, iterations: int) -> list[str]:
    """Return the names of the files that differ between two runs.

    Compares the selected seeds and the weights of the last checkpoint. Raises Failed if neither run
    has that checkpoint.
    """
    differing = (
        []
        if one.selections_file.read_bytes() == other.selections_file.read_bytes()
        else ["selections.jsonl"]
    )
    step = f"step_{iterations:06d}"
    files = {
        path.name for run in (one, other) for path in (run.checkpoints / step).glob("*.safetensors")
    }
    if not files:
        raise DemoError(f"neither run has a checkpoint {step}")
    for name in sorted(files):
        pair = [run.checkpoints / step / name for run in (one, other)]
        if not all(path.exists() for path in pair) or pair[0].read_bytes() != pair[1].read_bytes():
            differing.append(f"{step}/{name}")
    return differing


def show(run: RunDirectory, iterations: int, say: Callable[[str], None]) -> None:
    """Print the timeline, the events, and the SHA-256 of the last checkpoint's files."""
    data = read_run(run.path)
    times = running_times(data.events)
    say("")
    for line in lines_of(timeline_of(data, times)):
        say(line)
    say("")
    for event, when in zip(data.events, times, strict=True):
        if event["event"] not in ("actor_started", "version_published", "checkpoint_saved"):
            fields = [f"{key} {str(event[key])[:40]}" for key in event if key not in LEFT_OUT]
            say(f"{when:8.1f} s  {event['event']}  {'  '.join(fields)}")
    for path in sorted((run.checkpoints / f"step_{iterations:06d}").glob("*.safetensors")):
        say(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(run.path)}")


def main() -> int:
    """Run the demonstration; return 0 if both runs are identical, 1 if not, 3 if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.cluster_demo",
        description=tools.cluster_demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--iterations", type=int, default=24, help=("iterations of each run (default: 24)")
    )
    text = "directory of the two runs (default: runs/cluster-demo-TIME)"
    parser.add_argument("--out", type=Path, help=text)
    options = parser.parse_args()
    if options.iterations < 8:
        parser.error("--iterations: at least 8, because shorter runs end before they are disturbed")
    out = (
        options.out or ROOT / "runs" / f"cluster-demo-{time.strftime('%Y%m%d-%H%M%S')}"
    ).absolute()
    demo = Demo(out, options.iterations)
    try:
        run = disturbed(demo)
        demo.nodes.append(demo.add_node())
        undisturbed, job = demo.submit("undisturbed", 2)
        demo.finish(job)
        show(run, options.iterations, demo.say)
        differing = differences(run, undisturbed, options.iterations)
    except DemoError as failure:
        print(f"cluster-demo: {failure}", file=sys.stderr)
        return 3
    finally:
        demo.close()
    demo.say("")
    if differing:
        demo.say(f"DIFFERENT from the undisturbed run: {', '.join(differing)}")
        return 1
    demo.say(
        f"selections and all weights of {options.iterations} iterations are, byte by byte, those of"
        " the undisturbed run"
    )
    demo.say(f"report with the timeline as a chart: {run.path / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
