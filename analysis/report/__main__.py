"""``python -m analysis.report RUN SECONDS``: the report of a run that goes on, written once.

A process of its own with the lowest priority: the driver has one thread, which Python would share.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from analysis.report.page import build_report
from records.errors import described

LOWEST = 19


def main(run: str, every_s: str) -> int:
    """Write it; on failure one line."""
    os.nice(LOWEST)
    # ended by the driver it leaves no half of a file behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        build_report(Path(run), live_s=float(every_s))
    except Exception as error:  # whatever it is, the driver gives it as the reason
        print(described(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
