"""``python -m analysis.report RUN SECONDS``: write a report once; 0 SECONDS if the run has ended.

It runs as a separate process with the lowest priority: a thread of the driver would compete with
the driver's event loop for the interpreter lock.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from analysis.report.page import build_report
from records.errors import error_summary

LOWEST = 19


def main(run: str, every_s: str) -> int:
    """Write the report and return the exit code; on failure, print one line to stderr."""
    os.nice(LOWEST)
    # the driver may end this process: exit through SystemExit, which removes the unfinished file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    driver = os.getppid()
    try:
        build_report(Path(run), live_s=float(every_s))
        if os.getppid() != driver:  # it ended meanwhile: nobody writes the page again
            build_report(Path(run))
    except Exception as error:  # the driver reports any error as the reason
        print(error_summary(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
