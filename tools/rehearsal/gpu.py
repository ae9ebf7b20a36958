"""Run arms of the real SANA 1.6B with random weights through all services on this machine's GPUs.

    python -m tools.rehearsal.gpu --dir DIR          # one GPU of 80 GB, about five minutes per arm

Uses the preset's sizes, steps and layout with few prompts, and HPSv2 of its published size, also
with random weights. Reported seconds are those of the last iteration, because earlier ones include
compilation.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from analysis.compare.table import lines
from analysis.report.parts import Table
from configs.section import Tree
from records.rundir import RunDirectory, read_jsonl
from tools.rehearsal.pipeline import write_pipeline

ARMS = ("sol_rl", "naive_scaling")
SCORER = "open_clip_model.safetensors"
WORKS = ("explore", "regenerate", "score", "update", "export", "load")


def write_scorer(directory: Path) -> None:
    """Write a checkpoint of HPSv2's architecture (ViT-H-14) with random weights."""
    import open_clip
    from safetensors.torch import save_file

    architecture: Tree = dict(open_clip.get_model_config("ViT-H-14") or {})
    model = open_clip.CLIP(**architecture)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / SCORER)


def settings(root: Path, arm: str, prompts: int, iterations: int) -> str:
    """Return the preset as TOML, with the paths of the files written here."""
    return f"""
layers = ["models/sana", "recipes/full_size"]
name = "rehearsal-{arm}"
run_root = "{root / "runs"}"
arm = "{arm}"
iterations = {iterations}
model.path = "{root / "sana"}"
prompts.per_iteration = {prompts}
evaluate = {{ every = 0, steps = 4, prompts = 2, noises = 1 }}

[[rewards.scorers]]
name = "hpsv2"

[rewards.scorers.settings]
checkpoint = "{root / "hpsv2"}"
architecture = "ViT-H-14"
batch_size = 16
dtype = "fp32"
"""


def rehearse(root: Path, arm: str, prompts: int, iterations: int) -> int:
    """Train one arm in a subprocess and return its exit code."""
    shutil.rmtree(root / "runs" / f"rehearsal-{arm}", ignore_errors=True)
    config = root / f"{arm}.toml"
    config.write_text(settings(root, arm, prompts, iterations))
    start = "import sys; from cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", start, "train", str(config)]).returncode


def seconds_of(run: Path) -> dict[str, float]:
    """Return the median seconds of the last iteration's calls per kind of work.

    The key "iteration" is the duration of the whole iteration.
    """
    iterations = [row for row in RunDirectory(run).metrics() if row["kind"] == "iteration"]
    update_ends = [
        row["ended"] for row in read_jsonl(run / "timeline.jsonl") if row["work"] == "update"
    ]
    since = update_ends[-2] if len(update_ends) > 1 else 0.0
    calls: dict[str, list[float]] = {}
    for row in read_jsonl(run / "timeline.jsonl"):
        if row["started"] >= since and row["outcome"] == "done":
            calls.setdefault(row["work"], []).append(row["ended"] - row["started"])
    medians = {work: statistics.median(calls[work]) for work in WORKS if work in calls}
    return {**medians, "iteration": float(iterations[-1]["time/iteration_s"])}


def table(found: dict[str, dict[str, float]]) -> Table:
    """Return a table of seconds, with one row per kind of call and one column per arm."""
    rows = [
        (work, *(f"{seconds[work]:.2f}" if work in seconds else "" for seconds in found.values()))
        for work in (*WORKS, "iteration")
    ]
    return Table(("seconds, median", *found), rows, words=(0,), title="The last iteration")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms and print the table; return the exit code of the first run that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.rehearsal.gpu", description=__doc__)
    parser.add_argument("arms", nargs="*", default=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--dir", default="runs/rehearsal", help=("directory for models and runs, which are kept")
    )
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=2)
    options = parser.parse_args(arguments)
    root = Path(options.dir).absolute()
    writing = {"sana": partial(write_pipeline, "sana-1.6b"), "hpsv2": write_scorer}
    for name, write in writing.items():
        if not (root / name).exists():
            (root / name).mkdir(parents=True)
            write(root / name)
    seconds: dict[str, dict[str, float]] = {}
    for arm in options.arms:
        if code := rehearse(root, arm, options.prompts, options.iterations):
            return code
        seconds[arm] = seconds_of(root / "runs" / f"rehearsal-{arm}")
    print("\n".join(lines([table(seconds)], [])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
