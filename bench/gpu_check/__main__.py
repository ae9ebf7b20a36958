"""Run the check on one GPU, write ``gpu.json`` and ``gpu.html``, and print the tables."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_check.findings import Results
    from configs.section import Tree

NEEDED = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "pydantic",
    "safetensors",
    "xxhash",
    "jinja2",
)
OLDEST_TORCH = (2, 11)
MINUTES, CPU_MINUTES = 10.0, 6.0
RESERVE_S = 15.0
"""Seconds of the total time that are reserved for starting and for writing results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 for any results, with or without a GPU, or 2 if it cannot run."""
    missing = what_is_missing()
    if missing is not None:
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 2
    from bench.gpu_check.findings import Results
    from bench.gpu_check.running import run
    from bench.gpu_check.sections import SECTIONS

    options = _parser(list(SECTIONS)).parse_args(arguments)
    facts = machine()
    gpu = "capability" in facts
    if not gpu:  # read when triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    names = [name for name in SECTIONS if name in options.sections]
    minutes = options.minutes or (MINUTES if gpu else CPU_MINUTES)
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    outcomes = []
    for outcome in run(names, gpu, minutes * 60 - RESERVE_S):
        outcomes.append(outcome)
        ending = f": {outcome.why}" if outcome.why else ""
        print(f"{outcome.section:<10}{outcome.state}, {outcome.seconds:.0f} s{ending}", flush=True)
        for item in outcome.left_out:
            print(f"{'':<10}left out: {item.what}: {item.why}", flush=True)
    write(Results(facts, gpu, outcomes), Path(options.out))
    return 0


def write(results: Results, directory: Path) -> None:
    """Write ``gpu.json`` and ``gpu.html``, and print the tables to standard output."""
    from analysis.compare.table import lines
    from bench.gpu_check.claims import CLAIMS, verdict
    from bench.gpu_check.page import render
    from bench.gpu_check.tables import tables
    from records.atomic import write_json, write_text

    directory.mkdir(parents=True, exist_ok=True)
    section_tables = tables(results)
    verdicts = {text: asdict(verdict(results, check)) for text, check in CLAIMS.items()}
    sections = [asdict(outcome) for outcome in results.outcomes]
    write_json(
        directory / "gpu.json",
        {"machine": results.machine, "gpu": results.gpu, "claims": verdicts, "sections": sections},
    )
    write_text(directory / "gpu.html", render(results, section_tables))
    print("\n".join(lines([table for table in section_tables.values() if table.rows], [])))
    print(f"\nwritten: {directory / 'gpu.json'}, gpu.html")


def what_is_missing() -> str | None:
    """Return why the check cannot run on this machine, in one line, or None."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
    import torch

    from policy.device import torch_release

    if torch_release() < OLDEST_TORCH:
        return f"needs torch 2.11 or later, this is {torch.__version__}"
    return None


def machine() -> Tree:
    """Describe this machine; the key ``capability`` exists only if there is a GPU."""
    import torch

    from bench.timing import machine as common
    from policy.device import describe

    facts: Tree = {**common()}
    for name in ("triton", "diffusers", "transformer_engine"):
        if importlib.util.find_spec(name) is not None:
            facts[name] = version_of(name)
    if torch.cuda.is_available():
        facts |= describe(torch.device("cuda"))
    return facts


def version_of(name: str) -> str:
    """Return a package's version without importing the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "installed"


def _parser(sections: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument(
        "--out", default="gpu-check", metavar="DIR", help=("directory for the results")
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"time limit (default: {MINUTES:g}, without a GPU {CPU_MINUTES:g})",
    )
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=sections,
        default=sections,
        metavar="NAME",
        help=f"run only these of {', '.join(sections)}",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
