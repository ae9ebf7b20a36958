"""Re-execution of a command with the environment that its fork, the template of actors, needs.

A template needs jemalloc as its allocator and a single OpenMP thread, and both are determined when
a process starts. Therefore the command replaces itself by the same program with these variables
(``execve``), imports torch and forks the template. Torch is imported once, and both processes share
the pages.
"""

from __future__ import annotations

import json
import os
import sys

from cluster.runtime import allocator, template
from configs.schema import RunConfig

BEFORE = "SOL_RL_ENVIRONMENT_BEFORE"
"""Variable with the former values of the changed variables, as JSON; null for those unset."""


def reexec() -> None:
    """Execute this command again in the same process, with the environment of a template.

    Returns in the process that was re-executed, and at once if there will be no template: on other
    systems than Linux, or when a Ray cluster is to be joined.
    """
    if sys.platform != "linux" or os.environ.get("RAY_ADDRESS") or BEFORE in os.environ:
        return
    more = {"OMP_NUM_THREADS": "1", **allocator.variables()}
    before = {name: os.environ.get(name) for name in more}
    sys.stdout.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **more, BEFORE: json.dumps(before)})


def fork_template(config: RunConfig) -> None:
    """Import torch and fork the template, if ``reexec`` has re-executed this process.

    Afterwards the environment is restored, for other processes that this one starts.
    """
    if BEFORE not in os.environ:
        return
    before: dict[str, str | None] = json.loads(os.environ.pop(BEFORE))
    more = template.openmp_variables(config)
    before = {name: os.environ.get(name) for name in more} | before
    os.environ.update(more)
    import learner.trainer  # noqa: F401
    import policy.explorer  # noqa: F401

    template.start(config, fork=True)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
