"""The process of a command, started anew so that a template of actors can be its fork.

A template has to be a process whose memory jemalloc hands out and whose OpenMP has one thread, and
both are settled when a process starts. So the command starts itself anew with these variables, in
the same process, imports torch and forks the template. Both share what importing torch wrote, and
it is done once.
"""

from __future__ import annotations

import json
import os
import sys

from cluster.runtime import allocator, template
from configs.schema import RunConfig

BEFORE = "SOL_RL_ENVIRONMENT_BEFORE"
"""What variables were before the process was started anew, as JSON; null where they were not."""


def begin() -> None:
    """Start the process of this command anew; returns in what was started, with the same number,
    and where there will be no template.
    """
    if sys.platform != "linux" or os.environ.get("RAY_ADDRESS") or BEFORE in os.environ:
        return
    more = {"OMP_NUM_THREADS": "1", **allocator.variables()}
    before = {name: os.environ.get(name) for name in more}
    sys.stdout.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **more, BEFORE: json.dumps(before)})


def fork_template(config: RunConfig) -> None:
    """Import torch and fork the template, where ``begin`` has started this process; then the
    environment is what it was, for whatever this process starts.
    """
    if BEFORE not in os.environ:
        return
    before: dict[str, str | None] = json.loads(os.environ.pop(BEFORE))
    more = template.threads(config)
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
