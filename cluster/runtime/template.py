"""Actor processes as forks of one process that has imported torch and diffusers already.

Nearly all of the start of an actor with a model is imports: 8 CPU seconds and 370 MB each, six
times a run. On one machine without GPUs they are paid once: the driver starts a *template*, which
imports and waits, and Ray starts such an actor's process by asking the template to fork. The fork
is then the process that Ray started, with the environment, files and priority that Ray gave it.

Not on GPUs, as CUDA does not survive a fork, and not on a cluster, where nodes have their own
Python. This file is also the program that Ray starts instead of Python (``_launch``): it then has
the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    from configs.schema import RunConfig
    from configs.section import Tree

FORKED = "encoder", "rollout", "learner"
SOCKET = "SOL_RL_TEMPLATE"
"""Environment variable that tells the launcher where the template listens."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
SPIN = "10000"
"""Rounds that a waiting thread spins before it sleeps, for GNU's OpenMP."""
LENGTH = 4  # bytes in front of a request


# ---- the driver's side


def waiting(config: RunConfig) -> dict[str, str]:
    """Variables that say how OpenMP's threads wait in the processes of a run.

    They would spin for milliseconds, on the cores of actors that work, and sleep instead. Where the
    learner never computes beside rollout actors it spins for some microseconds, which is quicker
    than waking up between the small products of a small model.
    """
    found, plan = {"OMP_WAIT_POLICY": "PASSIVE"}, config.plan
    if plan.explore is None or not plan.regenerate:
        found["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN)
    return found


def start(config: RunConfig) -> None:
    """Have one template in this process, if actors of ``config`` can be its forks."""
    some = any(not config.services.of(kind).gpus for kind in FORKED)
    if sys.platform == "linux" and some and not _running:
        _running.append(Template(config))


def runtime_env(config: RunConfig, kind: str) -> Tree:
    """What Ray is asked for where an actor of this kind shall be forked; empty where it is not."""
    if not _running or kind not in FORKED or config.services.of(kind).gpus:
        return {}
    launcher = [sys.executable, "-IS", os.path.abspath(__file__)]
    return {"py_executable": shlex.join(launcher), "env_vars": {SOCKET: _running[0].path}}


class Template:
    """The process, from here to the end of the driver, however that comes."""

    def __init__(self, config: RunConfig):
        """Start it; it listens at once, and answers when it has imported what the actors need."""
        import subprocess
        import tempfile

        self.path = os.path.join(tempfile.mkdtemp(prefix="sol-rl-template-"), "socket")
        code = f"from {__name__} import serve; serve()"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-c", code, str(listener.fileno()), config.model_dump_json()],
                stdin=subprocess.PIPE,  # closed when the driver is gone
                stdout=subprocess.DEVNULL,  # what fails here fails in each actor, which says it
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the driver
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    # read when libraries are loaded; an actor sets its own number of threads
                    "OMP_NUM_THREADS": "1",
                    **waiting(config),
                },
            )


_running: list[Template] = []


# ---- the template's side


def serve() -> None:
    """Import, then fork for every request, until standard input ends."""
    import gc
    import signal

    from configs.load import parse

    listener = socket.socket(fileno=int(sys.argv[1]))
    path = listener.getsockname()
    import_for(parse(json.loads(sys.argv[2])))
    gc.collect()
    gc.freeze()  # the collector would write to every page, and unshare it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
            return
        connection, _ = listener.accept()
        with connection:
            request, files = _receive(connection)
            pid = os.fork()
            if pid:
                connection.sendall(str(pid).encode())
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            break
        for file in files:
            os.close(file)
    _become(request, files)


def import_for(config: RunConfig) -> None:
    """What encoder, rollout actor and learner import to build their models; build none.

    Not Ray: when it is loaded it reads the environment, which a fork has from Ray itself.
    """
    import learner.trainer  # noqa: F401
    import policy.explorer  # noqa: F401
    from policy.families import family_for

    family_for(config.model).import_parts()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """This process is from now on the one that Ray started: its environment, files and program."""
    os.setpgrp()  # Ray ends an actor with its whole process group
    for target, file in enumerate(files):
        # the standard streams of the process in whose place it is: Ray reads its log there
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with contextlib.suppress(OSError):  # no Linux, or no right to
        OOM_SCORE.write_text(request["oom_score"])
    sys.argv[:] = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, LENGTH, 3)
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return json.loads(body), files


# ---- the launcher's side


def _launch() -> None:
    """Have the template fork; without one be an ordinary Python process."""
    oom_score = OOM_SCORE.read_text() if OOM_SCORE.exists() else "0"
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": oom_score.strip(),
    }
    body = json.dumps(request).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[SOCKET])
            socket.send_fds(connection, [len(body).to_bytes(LENGTH, "big")], [0, 1, 2])
            connection.sendall(body)
            if connection.recv(32):
                return
            why = "it ended"
    except OSError as error:
        why = str(error)
    print(f"no fork from {os.environ[SOCKET]}: {why}; importing anew", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    _launch()
