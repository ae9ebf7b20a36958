"""``python -m cluster`` is ``sol-rl``: what a job runs on the head node."""

import sys

try:
    from cli.main import main

    code = main()
except ModuleNotFoundError as missing:
    print(
        f"{sys.executable} has no {missing.name!r}: start Ray on every node from the environment"
        " with this project's dependencies, or from its image",
        file=sys.stderr,
    )
    code = 2
raise SystemExit(code)
