"""``python -m tools.partitions``: see the package."""

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
    """Injects no fault of its own, but does what ``scenario`` does to the network at its moment."""
    # not above: what it imports reads an environment that the lab has yet to set
    from tests.cluster.faults import FaultInjector

    class Cutter(FaultInjector):
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
    """A row: what a scenario's run came to, and when."""
    scenario = SCENARIOS[key]
    if scenario.at is None:
        for _, act in scenario.acts:
            act(lab)
    began, injector = time.monotonic(), _injector(lab, scenario)
    row: dict[str, Any] = {"key": key, "scenario": scenario.name, "noticed": None, "replaced": None}
    try:
        found = lab.run(key, injector, **scenario.changes)
    except Exception as error:
        row |= {"same": False, "why": f"{type(error).__name__}: {error}"}
        return row | {"seconds": round(time.monotonic() - began, 1)}
    row |= {"same": found == undisturbed, "seconds": round(time.monotonic() - began, 1)}
    if injector.done_at is not None:
        events = RunDirectory(lab.folder / "runs" / key).events()
        for name, event in (("noticed", "actor_died"), ("replaced", "actor_replaced")):
            times = [
                each["time"] - injector.done_at
                for each in events
                if each["event"] == event and each["kind"] == scenario.hit
            ]
            row[name] = round(min(times), 1) if times else None
    elif scenario.at is not None:
        row |= {"same": False, "why": "the moment never came"}
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| network | noticed | replaced | whole run | same bits |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = [row["noticed"], row["replaced"]]
        said = " | ".join("" if seconds is None else f"{seconds:.1f} s" for seconds in times)
        same = "yes" if row["same"] else f"NO {row.get('why', '')}"
        lines.append(f"| {row['scenario']} | {said} | {row['seconds']:.0f} s | {same} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every run ended as the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tools.partitions")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--out", metavar="FILE", help="a row of JSON per scenario")
    options = parser.parse_args(arguments)
    if why := missing():
        print(f"not tried: {why}")
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sol-rl-partitions-"))
        lab = stack.enter_context(Lab(Path(folder)))
        undisturbed: dict[str, Any] = {}
        for key in options.only:
            changes = SCENARIOS[key].changes
            suffix = next((name for name, each in SHARED.items() if each is changes), "")
            settings = SHARED.get(suffix, {})
            quiet = f"undisturbed{suffix}"
            if quiet not in undisturbed:
                began = time.monotonic()
                undisturbed[quiet] = lab.run(quiet, _injector(lab, None), **settings)
                print(f"{quiet}: {time.monotonic() - began:.0f} s", flush=True)
                lab.whole()
            rows.append(measure(lab, key, undisturbed[quiet]))
            print("\n".join(table(rows[-1:])[2:]), flush=True)
            lab.whole()
    print("\n".join(table(rows)))
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
