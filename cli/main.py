"""The command line. The configuration is read before torch and ray are imported: help and typos
answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import parser_of
from configs.load import ConfigError, load, preset_names
from configs.resume import measured
from configs.schema import RunConfig
from records.errors import RunFailed, Stopped

if TYPE_CHECKING:
    from records.rundir import RunDirectory

DONE, USER_ERROR, RUN_FAILED, STOPPED = 0, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 2 configuration or command, 3 the run failed,
    4 a job that is followed is out of sight, 130 stopped.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except ConfigError as error:
        for line in error.lines:
            print(line, file=sys.stderr)
        return USER_ERROR
    except RunFailed as error:
        print(f"run failed: {error}", file=sys.stderr)
        return RUN_FAILED
    except (Stopped, KeyboardInterrupt) as error:
        print(str(error) or "stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        return DONE


def _parser() -> argparse.ArgumentParser:
    functions = (
        _train,
        _submit,
        _status,
        _scale,
        _config,
        _plan,
        _evaluate,
        _export,
        _fidelity,
        _compare,
        _report,
    )
    return parser_of({function.__name__.removeprefix("_"): function for function in functions})


def _train(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides)
    from cluster.driver.session import train

    rundir = train(config, options.resume)
    for line in summary(rundir.metrics()):
        print(line)
    print(f"report: {rundir.path / 'report.html'}")
    return DONE


def _submit(options: argparse.Namespace) -> int:
    from cluster.jobs.following import follow
    from cluster.jobs.submit import submit

    client, job = submit(options.config, options.overrides, options.address, options.resume)
    at = f" --address {options.address}" if options.address else ""
    print(f"submitted: {job}", flush=True)
    if not options.follow:
        print(
            f"follow: ray job logs{at} --follow {job}\nstop, after a checkpoint: ray job stop{at}"
            f" {job}"
        )
        return DONE
    try:
        return follow(client, job, _show, _say)
    except KeyboardInterrupt:
        print(
            f"the job goes on; stop it, after a checkpoint: ray job stop{at} {job}", file=sys.stderr
        )
        return STOPPED


def _status(options: argparse.Namespace) -> int:
    given = ["--run", options.run] if options.run else []
    if (code := _on_the_cluster(options.address, ["status", *given])) is not None:
        return code
    from cluster.jobs.remote import address_of, connected, states
    from cluster.jobs.status_lines import lines_of

    with connected(address_of(options.address)):
        for state in states(options.run).values():
            print("\n".join(lines_of(state)))
    return DONE


def _scale(options: argparse.Namespace) -> int:
    sizes = {
        kind: size for kind in ("rollout", "reward") if (size := getattr(options, kind)) is not None
    }
    if not sizes or min(sizes.values()) < 1:
        raise ConfigError(["scale: give --rollout N or --reward N, at least 1"])
    given = [part for kind, size in sizes.items() for part in (f"--{kind}", str(size))] + (
        ["--run", options.run] if options.run else []
    )
    if (code := _on_the_cluster(options.address, ["scale", *given])) is not None:
        return code
    from cluster.jobs.remote import address_of, connected, scale

    with connected(address_of(options.address)):
        print(scale(options.run, sizes))
    return DONE


def _on_the_cluster(given: str | None, arguments: Sequence[str]) -> int | None:
    """Exit code of the command run as a job, where --address or RAY_ADDRESS is a dashboard's URL;
    None: connect directly.
    """
    address = given or os.environ.get("RAY_ADDRESS", "")
    if not address.startswith(("http://", "https://")):
        return None
    from cluster.jobs.submit import ask_through_job

    return ask_through_job(address, arguments, _show, _say)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run_at(path: str) -> tuple[RunDirectory, RunConfig]:
    """A run directory and the configuration in it. Raises ConfigError when there is none."""
    from records.rundir import RunDirectory

    rundir = RunDirectory(Path(path).absolute())
    try:
        return rundir, rundir.configuration()
    except (TypeError, ValueError) as error:  # JSON of another shape, or no text
        raise ConfigError(
            [
                f"{rundir.config_file}: no run's configuration ({type(error).__name__}); give a"
                " directory that `sol-rl train` wrote"
            ]
        ) from None


def summary(rows: Sequence[dict[str, object]]) -> list[str]:
    """Held-out reward before and after, from the rows of metrics.jsonl."""
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    if not evaluations:
        return []
    before, after = evaluations[0], evaluations[-1]
    lines = [
        f"held-out reward before: {before['reward/eval_mean']:.4f} +-"
        f" {_number(before, 'eval/stderr')}"
    ]
    if after is not before:
        lines.append(
            f"held-out reward after:  {after['reward/eval_mean']:.4f} +-"
            f" {_number(after, 'eval/stderr')}"
        )
        if after.get("eval/gain") is not None:
            lines.append(
                f"paired gain:            {after['eval/gain']:+.4f} +-"
                f" {_number(after, 'eval/gain_stderr')} (standard error, clustered by prompt)"
            )
    return lines


def _number(row: dict[str, object], key: str) -> str:
    value = row.get(key)
    return "n/a" if value is None else f"{value:.4f}"


def _config(options: argparse.Namespace) -> int:
    if options.list:
        print("\n".join(preset_names()))
        return DONE
    if options.config is None:
        raise ConfigError(["config: give a preset name or a TOML file, or --list"])
    config: RunConfig = load(options.config, options.overrides)
    print(
        json.dumps(
            {**config.model_dump(mode="json"), "plan": config.plan.model_dump(mode="json")},
            indent=2,
        )
    )
    return DONE


def _plan(options: argparse.Namespace) -> int:
    for name in (
        "peak_tflops",
        "quantised_peak_tflops",
        "utilisation",
        "gpu_memory_gb",
        "gpus",
        "node_gpus",
        "node_cpus",
    ):
        if (value := getattr(options, name)) is not None and not 0 < value < float("inf"):
            raise ConfigError([f"--{name.replace('_', '-')} {value:g}: must be above 0"])
    config = load(options.config, options.overrides)
    from planning.assumptions import Assumptions
    from planning.lines import json_of, lines_of
    from planning.make import make_plan

    nodes = None
    if options.address:
        from cluster.jobs.remote import connected
        from cluster.runtime.nodes import free_nodes

        with connected(options.address):
            nodes = free_nodes()
    given = Assumptions(
        accelerator=options.accelerator,
        peak_tflops=options.peak_tflops,
        quantised_peak_tflops=options.quantised_peak_tflops,
        utilisation=options.utilisation,
        gpu_memory_gb=options.gpu_memory_gb,
        gpus=options.gpus,
        node_gpus=options.node_gpus,
        node_cpus=options.node_cpus,
    )
    plan = make_plan(config, given, nodes)
    print(json.dumps(json_of(plan), indent=2) if options.json else "\n".join(lines_of(plan)))
    return DONE


def _evaluate(options: argparse.Namespace) -> int:
    rundir, config = _run_at(options.run)
    from cluster.driver.offline import evaluate_run

    for line in evaluate_run(rundir, config, options.checkpoint, options.prompts):
        print(line)
    return DONE


def _export(options: argparse.Namespace) -> int:
    rundir, config = _run_at(options.run)
    from cluster.driver.offline import export_run

    print(
        "wrote"
        f" {export_run(rundir, config, Path(options.out), options.weights, options.checkpoint)}"
    )
    return DONE


def _fidelity(options: argparse.Namespace) -> int:
    if (options.config is None) == (options.run is None):
        raise ConfigError(
            [
                "fidelity: give a preset name or a TOML file, or --run DIR, which brings its own"
                " configuration"
            ]
        )
    if options.checkpoint is not None and options.run is None:
        raise ConfigError(
            [
                f"fidelity: --checkpoint {options.checkpoint}: of which run? Give --run DIR in"
                " place of a configuration"
            ]
        )
    if min(options.prompts, *options.steps) < 1 or (
        options.threads is not None and options.threads < 1
    ):
        raise ConfigError(["fidelity: --prompts, --steps and --threads must be at least 1"])
    rundir, config = (
        _run_at(options.run) if options.run else (None, load(options.config, options.overrides))
    )
    config = measured(config, options.overrides) if rundir else config
    out = Path(
        options.out
        or f"{rundir.path if rundir else Path(config.run_root or 'runs') / config.name}-fidelity"
    )
    from analysis.fidelity.measure import Measurement, checkpoint_of, run

    wanted = Measurement(
        prompts=options.prompts,
        seeds=options.seeds,
        steps=tuple(options.steps),
        backends=tuple(options.backends),
        threads=options.threads,
        checkpoint=checkpoint_of(rundir, options.checkpoint) if rundir else None,
    )
    for line in run(config, wanted, out, lambda text: print(text, file=sys.stderr)):
        print(line)
    return DONE


def _compare(options: argparse.Namespace) -> int:
    asked = [
        options.config,
        options.arms,
        options.objectives,
        options.seeds,
        *options.overrides,
        *options.vary,
    ]
    if bool(options.runs) == (options.config is not None) or (
        options.runs and any(each is not None for each in asked)
    ):
        raise ConfigError(
            [
                "compare: give a preset, a TOML file or a comparison; or --runs DIR ... alone, with"
                " --baseline and --out"
            ]
        )
    from analysis.compare.cells import Request
    from analysis.compare.command import compare, compare_existing

    out = Path(options.out) if options.out else None
    if options.runs:
        text = compare_existing([Path(run) for run in options.runs], options.baseline, out)
    else:
        request = Request(
            source=options.config,
            arms=_words(options.arms),
            objectives=_words(options.objectives),
            seeds=options.seeds,
            overrides=tuple(options.overrides),
            vary=tuple(options.vary),
            baseline=options.baseline,
        )
        text = compare(request, out, lambda line: print(line, flush=True))
    print("\n".join(text))
    return DONE


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _report(options: argparse.Namespace) -> int:
    rundir, _ = _run_at(options.run)
    from analysis.report.page import build_report

    try:
        print(f"report: {build_report(rundir.path)}")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            [f"{rundir.path / 'report.html'}: cannot be written ({error.strerror or error})"]
        ) from None
    return DONE
