"""Command line of ``make soak``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tools.soak
from cli.common import add_overrides
from records.errors import Stopped
from tools.soak.lines import identical, line_of, summary

if TYPE_CHECKING:
    from tests.cluster.nodes import Machines
    from tools.soak.runs import Soak

STOPPED = 130
NODES, NODE_CPUS = 4, 3
"""Enough for a run and the processes kept for the next one, even without one of the nodes."""


@contextmanager
def ray_of(soak: Soak) -> Iterator[Machines | None]:
    """Use the existing Ray instance, or start one for the duration of the block.

    Yields the simulated nodes if the soak may remove one, else None. Raises SystemExit if Ray is
    already running and the requested faults need an instance of their own.
    """
    import ray

    from tests.cluster.nodes import Machines

    soak.make_model()
    if ray.is_initialized():
        if set(soak.ways) - {"kill", "stop", "scale"}:
            raise SystemExit(f"--ways {' '.join(soak.ways)}: needs a Ray of its own")
        yield None
        return
    from cluster.runtime import template
    from cluster.runtime.local_ray import start_ray
    from tools.soak.runs import tiny

    soak.machine.prepare()
    template.start(tiny(soak.model, soak.out, "template"))
    if "node" in soak.ways:
        with Machines({"num_cpus": 0}, *[{"num_cpus": NODE_CPUS}] * NODES) as machines:
            yield machines
    else:
        start_ray(num_cpus=16)
        yield None
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 if every run ended identical, 1 if not, 130 if it was stopped."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tests.cluster.machine import Machine
    from tools.soak.runs import Soak

    ways = list(options.ways)
    for way, reason in Machine.missing().items():
        if way in ways:
            print(f"not tried: {way}: {reason}")
            ways.remove(way)
    out = Path(options.out or f"runs/soak-{options.seed}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    soak = Soak(out, options.seed, options.kinds, ways, options.variants, options.overrides)
    chosen = range(options.first, options.runs)
    rows = {index: row for index, row in soak.load_rows().items() if index in chosen}
    for index in sorted(rows):
        print(line_of(rows[index]), flush=True)
    if missing := [index for index in chosen if index not in rows]:
        try:
            with ray_of(soak) as soak.machines:
                soak.prepare()
                for index in missing:
                    rows[index] = soak.run_trial(index)
                    print(line_of(rows[index]), flush=True)
        except (Stopped, KeyboardInterrupt):
            print(
                f"stopped after {len(rows)} of {len(chosen)} runs; run the same command again to"
                " continue"
            )
    print("\n".join(summary([rows[index] for index in sorted(rows)])))
    if len(rows) < len(chosen):
        return STOPPED
    return 0 if all(identical(row) for row in rows.values()) else 1


def _parser() -> argparse.ArgumentParser:
    from tests.cluster.faults import SERVICES
    from tools.soak.draw import VARIANTS, WAYS

    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=(tools.soak.__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=20,
        help="runs 0 to RUNS - 1; runs of an earlier soak in OUT are not repeated",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        metavar="I",
        help="runs I to RUNS - 1, so that several soaks share a seed",
    )
    parser.add_argument("--seed", type=int, default=0, help="of settings and faults")
    for name, known in (("kinds", SERVICES), ("ways", WAYS), ("variants", tuple(VARIANTS))):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=known,
            default=list(known),
            metavar=name.rstrip("s").upper(),
            help=f"of {', '.join(known)}",
        )
    add_overrides(parser, "change the configuration of the runs, such as explore_ahead=1")
    parser.add_argument("--out", metavar="DIR", help="directory (default: runs/soak-SEED)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
