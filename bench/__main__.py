"""Command line ``python -m bench [NAME...]``: run the named benchmarks, or all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from bench import COUNTS, NAMES, benchmark
from bench.timing import Options, Ratio, machine
from cli.common import add_overrides
from configs.backends import BACKENDS
from configs.load import ConfigError, load
from configs.schema import RunConfig
from policy.families.architectures import published_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 0, or 2 for an invalid command line or configuration.

    A missed goal is printed and is not an error. The arguments after a name of ``COUNTS`` are
    passed to that benchmark.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and argv[0] in COUNTS:
        return import_module(f"bench.{argv[0]}").main(argv[1:])
    options = _parser().parse_args(argv)
    try:
        config = load(options.preset, options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from analysis.measuring import hide_loading_bars

    hide_loading_bars()
    bench_options = _bench_options(options, config)
    facts = {
        **machine(),
        "preset": options.preset,
        "overrides": options.overrides,
        "repeats": options.repeats,
    }
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    results: dict[str, list[Ratio]] = {}
    for name in options.names or NAMES:
        try:
            results[name] = benchmark(name)(bench_options)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        for ratio in results[name]:
            print(f"{name:9}{ratio.line()}", flush=True)
    if options.json:
        rows = {name: [asdict(ratio) for ratio in ratios] for name, ratios in results.items()}
        Path(options.json).write_text(
            json.dumps({"machine": facts, "ratios": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def _bench_options(options: argparse.Namespace, config: RunConfig) -> Options:
    return Options(
        config,
        options.repeats,
        options.pack_bytes,
        tuple(options.broadcasts),
        batch=options.batch or config.explore.chunk_size,
        architectures=tuple(options.architectures),
        backends=tuple(options.backends),
        pixels=options.pixels,
        small=options.small,
        compile=options.compile,
        keep=options.keep,
    )


def broadcast(text: str) -> tuple[int, tuple[int, ...]]:
    """Parse ``1e9:1,2,4`` to (bytes, numbers of explorers); raise ArgumentTypeError if invalid."""
    size, _, counts = text.partition(":")
    try:
        parsed = int(float(size)), tuple(int(count) for count in counts.split(","))
    except ValueError:
        parsed = 0, ()
    if parsed[0] < 1 or not parsed[1] or min(parsed[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not BYTES:EXPLORERS, such as 1e9:1,2,4")
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Ratios taken in one run, and where they were taken."
    )
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*NAMES, []],
        metavar="NAME",
        help=f"any of {', '.join(NAMES)} (default: all); or one of {', '.join(COUNTS)}",
    )
    parser.add_argument("--preset", default="quickstart", help="a preset name or a TOML file")
    add_overrides(parser)
    parser.add_argument("--repeats", type=int, default=5, help="paired repeats after one warm-up")
    parser.add_argument(
        "--broadcasts",
        type=broadcast,
        nargs="+",
        default=list(Options.broadcasts),
        metavar="BYTES:N,N",
        help="publish: bytes of packed weights and numbers of rollout actors, such as 1e9:1,2,4",
    )
    parser.add_argument("--pack-bytes", type=int, default=2**26, help="pack: bytes of FP32 weights")
    parser.add_argument(
        "--batch", type=int, help="step, explorer: batch size (default: the chunk size of a run)"
    )
    _add_explorers(parser)
    parser.add_argument(
        "--keep",
        metavar="DIR",
        help=("plan: file for the measured layouts, from which a later call continues"),
    )
    parser.add_argument("--json", metavar="FILE", help="also write the ratios to this file")
    return parser


def _add_explorers(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark ``explorer``."""
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=published_names(),
        default=list(Options.architectures),
        metavar="NAME",
        help=f"explorer: any of {', '.join(published_names())}",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=list(BACKENDS),
        default=[],
        metavar="NAME",
        help="explorer: backends (default: all)",
    )
    parser.add_argument(
        "--pixels", type=int, help="explorer: image side in pixels (default: as published)"
    )
    parser.add_argument(
        "--small",
        action=argparse.BooleanOptionalAction,
        help="explorer: narrow blocks (default without a GPU)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="explorer: also measure compiled models"
    )


if __name__ == "__main__":
    raise SystemExit(main())
