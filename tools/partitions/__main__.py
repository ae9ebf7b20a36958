"""Command line of ``make partitions``: run the scenarios and print a table of results."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from records.rundir import RunDirectory
from tests.cluster.network import missing
from tools.partitions.lab import Lab
from tools.partitions.scenarios import SCENARIOS, SHARED, Scenario


def _injector(lab: Lab, scenario: Scenario | None) -> Any:
    """Return an injector that injects no fault but runs the network actions of ``scenario``."""
    # not at the top: its imports read environment variables that the lab sets first
    from tests.cluster.faults import FaultInjector

    class Cutter(FaultInjector):
        """Start the scenario's actions at its moment, each after its delay, off the event loop."""

        done_at: float | None = None

        def _happened(self, moment: str) -> None:
            super()._happened(moment)
            if scenario and self.done_at is None and scenario.at == (self.now, moment):
                self.done_at = time.time()
                loop = asyncio.get_running_loop()
                for delay, act in scenario.acts:
                    loop.call_later(delay, lambda act=act: loop.run_in_executor(None, act, lab))

    return Cutter()


def measure(lab: Lab, key: str, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Run a scenario and return a row with its result.

    ``same`` is True if the run ended like the undisturbed one; ``noticed`` and ``replaced`` are
    seconds from the network fault to the first such event of the affected service.
    """
    scenario = SCENARIOS[key]
    if scenario.at is None:
        for _, act in scenario.acts:
            act(lab)
    began, injector = time.monotonic(), _injector(lab, scenario)
    row: dict[str, Any] = {"key": key, "scenario": scenario.name, "noticed": None, "replaced": None}
    try:
        result = lab.run(key, injector, **scenario.changes)
    except Exception as error:
        row |= {"same": False, "why": f"{type(error).__name__}: {error}"}
        return row | {"seconds": round(time.monotonic() - began, 1)}
    row |= {"same": result == undisturbed, "seconds": round(time.monotonic() - began, 1)}
    if injector.done_at is not None:
        events = RunDirectory(lab.folder / "runs" / key).events()
        for name, event in (("noticed", "actor_died"), ("replaced", "actor_replaced")):
            times = [
                record["time"] - injector.done_at
                for record in events
                if record["event"] == event and record["kind"] == scenario.hit
            ]
            row[name] = round(min(times), 1) if times else None
    elif scenario.at is not None:
        row |= {"same": False, "why": "the moment was not reached"}
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the rows as a Markdown table."""
    lines = [
        "| network | noticed | replaced | whole run | same bits |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = [row["noticed"], row["replaced"]]
        cells = " | ".join("" if seconds is None else f"{seconds:.1f} s" for seconds in times)
        same = "yes" if row["same"] else f"NO {row.get('why', '')}"
        lines.append(f"| {row['scenario']} | {cells} | {row['seconds']:.0f} s | {same} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios; return 0 if every run ended like the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tools.partitions")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--out", metavar="FILE", help="a row of JSON per scenario")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(f"not tried: {reason}")
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sol-rl-partitions-"))
        lab = stack.enter_context(Lab(Path(folder)))
        undisturbed: dict[str, Any] = {}
        for key in options.only:
            changes = SCENARIOS[key].changes
            suffix = next((name for name, changed in SHARED.items() if changed is changes), "")
            settings = SHARED.get(suffix, {})
            baseline = f"undisturbed{suffix}"
            if baseline not in undisturbed:
                began = time.monotonic()
                undisturbed[baseline] = lab.run(baseline, _injector(lab, None), **settings)
                print(f"{baseline}: {time.monotonic() - began:.0f} s", flush=True)
                lab.restore()
            rows.append(measure(lab, key, undisturbed[baseline]))
            print("\n".join(table(rows[-1:])[2:]), flush=True)
            lab.restore()
    print("\n".join(table(rows)))
    if options.out:
        Path(options.out).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
