"""Command ``sol-rl train``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence

from cli.common import AUTO_RESUME, DONE, RESUME, add_config, add_resume, say
from configs.load import load
from records.lock import wait_for_other_host
from records.rundir import RunDirectory

HELP = "train, on this machine or on the cluster of RAY_ADDRESS"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub)
    add_resume(sub)


def run(options: argparse.Namespace) -> int:
    """Train, and print how the held-out reward changed."""
    from cluster.runtime import reexec

    if options.own_process:
        reexec.reexec()
    config = load(options.config, options.overrides)
    reexec.fork_template(config)
    from cluster.driver.train import train

    resume = options.resume == RESUME
    if options.resume == AUTO_RESUME:
        rundir = RunDirectory.of(config)
        wait_for_other_host(rundir.lock_file, say)
        resume = rundir.is_started()
        found = "continuing" if resume else "no run yet: starting a new one"
        with contextlib.suppress(OSError):  # a closed output does not end a run
            print(f"{rundir.path}: {found}", flush=True)
    rundir = train(config, resume)
    for line in summary(rundir.metrics()):
        print(line)
    print(f"report: {rundir.path / 'report.html'}")
    return DONE


def summary(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return lines on the held-out reward before and after, from the rows of metrics.jsonl."""
    evaluations = [row for row in rows if row.get("kind") == "evaluation"]
    if not evaluations:
        return []
    before, after = evaluations[0], evaluations[-1]
    lines = [f"held-out reward before: {_number(before, 'reward/eval_mean', 'eval/stderr')}"]
    if after is not before:
        lines.append(f"held-out reward after:  {_number(after, 'reward/eval_mean', 'eval/stderr')}")
        if after.get("eval/gain") is not None:
            gain = _number(after, "eval/gain", "eval/gain_stderr", "+")
            lines.append(f"paired gain:            {gain} (standard error, clustered by prompt)")
    return lines


def _number(row: Mapping[str, object], name: str, error: str, sign: str = "-") -> str:
    value, spread = row.get(name), row.get(error)
    shown = [
        f"{each:{sign}.4f}" if isinstance(each, int | float) else "n/a" for each in (value, spread)
    ]
    return f"{shown[0]} +- {shown[1].removeprefix('+')}"
