"""Registry of fuzz targets.

Each target passes one generated input to the code that reads it, and checks the result. Inputs come
from hypothesis, which also shrinks a failing input.
"""

from __future__ import annotations

from tools.fuzz import answers, commands, configurations, files, runs, scorers, servers
from tools.fuzz.target import Target

KINDS = (configurations, commands, servers, files, runs, answers, scorers)


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    return {name: target for kind in KINDS for name, target in kind.targets().items()}
