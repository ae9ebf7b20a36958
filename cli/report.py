"""``sol-rl report``."""

from __future__ import annotations

import argparse

from cli.common import DONE, run_at
from configs.load import ConfigError

HELP = "write report.html of a run"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add its options."""
    sub.add_argument("run", help="a run directory")


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    rundir, _ = run_at(options.run)
    from analysis.report.page import build_report

    try:
        file = build_report(rundir.path)
    except OSError as error:
        page = rundir.path / "report.html"
        raise ConfigError(f"{page}: cannot be written ({error.strerror or error})") from None
    print(f"report: {file}")
    return DONE
