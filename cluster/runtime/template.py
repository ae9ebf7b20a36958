"""Actor processes as forks of one process that has imported torch, diffusers and Ray already.

Nearly all of the start of an actor is imports: 8 CPU seconds and 370 MB each with a model, a second
and 50 MB without. On one machine without GPUs they are paid once: the driver starts a *template*,
which imports and waits, and Ray starts an actor's process by asking the template to fork. The fork
is then the process that Ray started, with the environment, files and priority that Ray gave it.

Ray reads its variables when it is imported, and they tell an actor whose it is. So for each Ray the
template forks a template of its own, which imports Ray with the variables of the first actor that
is asked for, and forks all whose variables are the same.

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

MODELS = "encoder", "rollout", "learner"
"""Services whose actors import torch and diffusers; for the others no template is started."""
SOCKET = "SOL_RL_TEMPLATE"
"""Environment variable that tells the launcher where the template listens."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
SPIN = "10000"
"""Rounds that a waiting thread spins before it sleeps, for GNU's OpenMP."""
RAY, RAYLET = "RAY_", "RAY_RAYLET_PID"
"""What Ray's variables begin with, and the one that names the process whose end is the end of its
actors.
"""
LENGTH = 4  # bytes in front of a request


# ---- the driver's side


def waiting(config: RunConfig) -> dict[str, str]:
    """Variables that say how OpenMP's threads wait in the processes of a run.

    They would spin for milliseconds, on the cores of actors that work, and sleep instead. Where the
    learner has several threads while nobody explores they spin for some microseconds, which is
    quicker than waking up between the small products of a small model.
    """
    found = {"OMP_WAIT_POLICY": "PASSIVE"}
    if config.plan.explore is None or not config.explore_ahead:
        found["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN)
    return found


def start(config: RunConfig) -> None:
    """Have one template in this process, if actors of ``config`` can be its forks."""
    some = any(not config.services.of(kind).gpus for kind in MODELS)
    if sys.platform == "linux" and some and not _running:
        _running.append(Template(config))


def runtime_env(config: RunConfig, kind: str) -> Tree:
    """What Ray is asked for where an actor of this kind shall be forked; empty where it is not."""
    return forked() if not config.services.of(kind).gpus else {}


def forked() -> Tree:
    """What Ray is asked for where an actor shall be forked, if there is a template."""
    if not _running:
        return {}
    launcher = [sys.executable, "-IS", os.path.abspath(__file__)]
    return {"py_executable": shlex.join(launcher), "env_vars": {SOCKET: _running[0].path}}


class Template:
    """The process, from here to the end of the driver, however that comes."""

    def __init__(self, config: RunConfig):
        """Start it; it listens at once, and answers when it has imported what the actors need."""
        import subprocess
        import tempfile

        from cluster.runtime import allocator

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
                    **allocator.variables(),  # a fork keeps the library, whatever Ray gives it
                },
            )


_running: list[Template] = []


# ---- the template's side


def serve() -> None:
    """Import, then give every Ray that asks a template of its own, until standard input ends."""
    import shutil
    import signal

    from configs.load import parse

    listener = socket.socket(fileno=int(sys.argv[1]))
    folder = os.path.dirname(listener.getsockname())
    import_for(parse(json.loads(sys.argv[2])))
    _unchanging()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    paths: dict[str, str] = {}
    while _waits(listener):
        connection, _ = listener.accept()
        with connection:
            request, files = _receive(connection)
            ours = {n: value for n, value in request["environment"].items() if n.startswith(RAY)}
            path = paths.setdefault(json.dumps(ours, sort_keys=True), f"{folder}/{len(paths)}")
            if not os.path.exists(path):
                own = socket.socket(socket.AF_UNIX)
                own.bind(path)
                own.listen(64)
                if not os.fork():
                    listener.close()
                    connection.close()
                    for file in files:
                        os.close(file)
                    return _serve_one(own, ours)
                own.close()
            connection.sendall(path.encode())
        for file in files:
            os.close(file)
    shutil.rmtree(folder)


def _serve_one(listener: socket.socket, environment: dict[str, str]) -> None:
    """Import Ray with these variables, then fork for every request, while that Ray is there."""
    import signal

    for name in [name for name in os.environ if name.startswith(RAY)]:
        del os.environ[name]
    os.environ.update(environment)
    import ray  # noqa: F401

    _unchanging()
    ends = [os.pidfd_open(int(environment[RAYLET]))] if RAYLET in environment else []
    while _waits(listener, *ends):
        connection, _ = listener.accept()
        with connection:
            request, files = _receive(connection)
            pid = os.fork()
            if pid:
                connection.sendall(str(pid).encode())
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _become(request, files)
        for file in files:
            os.close(file)


def _unchanging() -> None:
    """What is there now stays: the collector would write to every page, and unshare it."""
    import gc

    gc.collect()
    gc.freeze()


def _waits(listener: socket.socket, *more: int) -> bool:
    """Wait for a request; False once the driver has ended, or a process of these descriptors."""
    ends = [sys.stdin, *more]
    ready, _, _ = select.select([listener, *ends], [], [])
    return not any(end in ready for end in ends)


def import_for(config: RunConfig) -> None:
    """What encoder, rollout actor and learner import to build their models; build none."""
    # without GPUs nothing uses Triton, but torch imports it to see whether it is there: 70 MB
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    import learner.trainer  # noqa: F401
    import policy.explorer  # noqa: F401
    from policy.families import family_for

    family_for(config.model).import_parts()
    del sys.modules["triton"]


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
    try:
        path = _asked(os.environ[SOCKET], request)
        if path and _asked(path, request):
            return
        why = "it ended"
    except OSError as error:
        why = str(error)
    print(f"no fork from {os.environ[SOCKET]}: {why}; importing anew", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _asked(path: str, request: dict[str, Any]) -> str:
    """The answer to ``request``, sent with the standard streams; nothing where who listens ends.
    Raises OSError where nobody does.
    """
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(body).to_bytes(LENGTH, "big")], [0, 1, 2])
        connection.sendall(body)
        return connection.recv(4096).decode()


if __name__ == "__main__":
    _launch()
