"""Command ``sol-rl plan``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from cli.common import DONE, USER_ERROR, add_config, open_run, require_positive, say
from configs.load import ConfigError, load
from configs.schema import RunConfig

if TYPE_CHECKING:
    from planning.assumptions import Assumptions
    from planning.placement import Node
    from planning.plan import Plan
    from records.rundir import RunDirectory
    from simulator.run import Simulated
    from simulator.speedups import Faster
HELP = (
    "dry run: placement, memory, bytes per broadcast, operations and simulated seconds; loads no"
    " weights"
)
ASSUMED = (
    ("gpus", int, None, "N", "number of GPUs (default: layout.gpus, or those of one node)"),
    (
        "peak_tflops",
        float,
        None,
        "T",
        "assumed dense BF16 peak of a GPU (default: that of the accelerator)",
    ),
    ("quantized_peak_tflops", float, None, "T", "assumed peak in quantized layers"),
    (
        "bandwidth",
        float,
        None,
        "TB/S",
        "assumed memory bandwidth of a GPU (default: that of the accelerator)",
    ),
    (
        "utilisation",
        float,
        None,
        "U",
        "assumed fraction of the peaks that is reached (default: as measured on an H200; on CPUs"
        " 0.4)",
    ),
    (
        "gpu_memory_gb",
        float,
        None,
        "GB",
        ("assumed memory of a GPU (default: that of the accelerator)"),
    ),
    ("node_gpus", int, 8, "N", "GPUs per assumed node"),
    ("node_cpus", int, 96, "N", "CPUs per assumed node"),
)
"""Fields of ``planning.assumptions.Assumptions``: name, type, default, unit, help."""
FASTER = (
    "",
    "faster      by prediction, with these settings, each on top of those before; docs/gpu.md says"
    " what a GPU has confirmed",
)


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub)
    sub.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="head of a cluster on whose nodes to place actors (default: assumed nodes)",
    )
    sub.add_argument(
        "--accelerator",
        metavar="NAME",
        help="assumed kind of GPU, such as B200 (default: services.rollout.accelerator)",
    )
    sub.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help=(
            "run directory whose measured durations of calls are used; sizes and layout may differ"
        ),
    )
    sub.add_argument(
        "--out", metavar="FILE.html", help="file for the timeline of a simulated iteration"
    )
    sub.add_argument(
        "--faster",
        action="store_true",
        help="also try settings that may shorten an iteration; takes up to minutes",
    )
    sub.add_argument("--json", action="store_true", help="print the prediction as one JSON object")
    for name, kind, default, unit, text in ASSUMED:
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, metavar=unit, help=text
        )


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    names = [name for name, *_ in ASSUMED]
    require_positive(options, *names)
    config = load(options.config, options.overrides)
    from planning.assumptions import Assumptions
    from planning.plan import make_plan
    from planning.steps import step_lines

    nodes = None
    if options.address:
        from cluster.jobs.live_runs import connected
        from cluster.runtime.nodes import free_nodes

        with connected(options.address):
            nodes = free_nodes()
    numbers = {name: getattr(options, name) for name in names}
    assumed = Assumptions(accelerator=options.accelerator, **numbers)
    if options.from_run is not None:
        if options.faster:
            raise ConfigError("--faster: a run did not measure other settings: leave out --from")
        return _from_run(options, config, assumed, nodes)
    from planning.layouts.choose import DoesNotFit
    from planning.savings import savings_lines
    from simulator.speedups import speedups

    try:
        plan = make_plan(config, assumed, nodes)
    except DoesNotFit as error:
        # printed one by one: each line recounts the model, half a minute for a large one
        for line in chain(error.lines, savings_lines(config, assumed, nodes)):
            say(line)
        return USER_ERROR
    if options.faster:
        return _print_faster(options, plan, speedups(config, plan, assumed, nodes))
    pointer = ["", "faster      --faster tries settings that may shorten an iteration"]
    return _print(options, plan, [*step_lines(plan.config), *(pointer if plan.outlook else [])])


def _print_faster(options: argparse.Namespace, plan: Plan, tried: Iterable[Faster]) -> int:
    from planning.steps import step_lines

    if options.json:
        return _print(options, plan, fields={"faster": [each.as_json for each in tried]})
    _print(options, plan, [*step_lines(plan.config), *FASTER])
    for each in tried:  # printed one by one: each takes up to a minute
        print(each.line, flush=True)
    return DONE


def _from_run(
    options: argparse.Namespace,
    config: RunConfig,
    assumed: Assumptions,
    nodes: Sequence[Node] | None,
) -> int:
    """Print the plan with the durations of calls that were measured in a run."""
    from simulator.measured import on_gpus

    rundir, recorded = open_run(options.from_run)
    if not on_gpus(recorded):
        return _from_cores(options, config, rundir, recorded, assumed, nodes)
    from simulator.measured_gpus import plan_from

    plan, model = plan_from(config, rundir, assumed, nodes)
    return _print(options, plan, [model.line(rundir.path.name)], {"measured_s": model.seconds})


def _from_cores(
    options: argparse.Namespace,
    config: RunConfig,
    rundir: RunDirectory,
    recorded: RunConfig,
    assumed: Assumptions,
    nodes: Sequence[Node] | None,
) -> int:
    from planning.layouts.threads import keep_threads
    from planning.plan import make_plan
    from planning.report import lines_of
    from simulator.measured import measured, measured_json, measured_lines, require_same

    config = keep_threads(config, recorded)
    require_same(config, recorded)
    model = measured(rundir)
    prediction = model.predict(config)
    if options.out:
        draw(options.out, config.name, prediction)
    if options.json:
        print(json.dumps(measured_json(config, prediction, model), indent=2))
    else:
        lines = lines_of(make_plan(config, assumed, nodes))
        print("\n".join([*lines, *measured_lines(config, prediction, model, rundir.path.name)]))
    return DONE


def _print(
    options: argparse.Namespace,
    made: Plan,
    lines: Sequence[str] = (),
    fields: Mapping[str, object] | None = None,
) -> int:
    """Simulate and print a plan.

    ``lines`` are printed after it as text; ``fields`` are further fields of the JSON object.
    """
    from planning.report import json_of, lines_of
    from simulator.outlook import simulated

    plan, iteration = simulated(made)
    if options.out:
        draw(options.out, plan.config.name, iteration)
    if options.json:
        print(json.dumps(json_of(plan) | dict(fields or {}), indent=2))
    else:
        print("\n".join([*lines_of(plan), *lines]))
    return DONE


def draw(out: str, name: str, iteration: Simulated | None) -> None:
    """Write the timeline to ``out``. Raises ConfigError if there is none, or writing fails."""
    from analysis.report.timeline import write_page

    if iteration is None:
        raise ConfigError(
            f"--out {out}: the configuration requests no GPU, so there is no iteration to draw"
        )
    try:
        write_page(Path(out), name, iteration.spans, iteration.spans_end)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--out {out}: cannot be written ({why}): give another file") from None
