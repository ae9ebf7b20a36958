"""All targets: each hands one made-up input to the code that reads it, and says what must hold.

Inputs come from hypothesis, which also makes a failing one small.
"""

from __future__ import annotations

from tools.fuzz import answers, commands, configurations, files, runs, scorers, servers
from tools.fuzz.target import Target

KINDS = (configurations, commands, servers, files, runs, answers, scorers)


def targets() -> dict[str, Target]:
    """All targets by name."""
    return {name: target for kind in KINDS for name, target in kind.targets().items()}
