"""Actor processes as forks of one process that has imported torch, diffusers and Ray already.

Nearly all of the start of an actor is imports: 8 CPU seconds and 370 MB each with a model, a second
and 50 MB without. On one machine without GPUs they are paid once: the driver starts a *template*,
which imports and waits, and Ray starts an actor's process by asking the template to fork. The fork
is then the process that Ray started, with the environment, files and priority that Ray gave it.

Ray reads its variables when it is imported, and they tell an actor whose it is. So for each Ray the
template forks a template of its own, which imports Ray with the variables of the first actor that
is asked for, and forks all whose variables are the same.

A command, whose process has one Ray in its life, is itself what the template is forked from, once
it has imported torch: both share those pages, and the template serves that Ray in its own process.

Not on GPUs, as CUDA does not survive a fork, and not on a cluster, where nodes have their own
Python. What Ray starts instead of Python is ``cluster/runtime/launcher.py``.
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
from typing import TYPE_CHECKING, Any

from cluster.runtime import launcher

if TYPE_CHECKING:
    from typing import IO

    from configs.schema import RunConfig
    from configs.section import Tree

MODELS = "encoder", "rollout", "learner"
"""Services whose actors import torch and diffusers; for the others no template is started."""
SPIN = "10000"
"""Rounds that a waiting thread spins before it sleeps, for GNU's OpenMP."""
RAY, RAYLET = "RAY_", "RAY_RAYLET_PID"
"""What Ray's variables begin with, and the one that names the process whose end is the end of its
actors.
"""


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


def threads(config: RunConfig) -> dict[str, str]:
    """What OpenMP's variables are while a template loads it; an actor sets its own threads."""
    return {"OMP_NUM_THREADS": "1", **waiting(config)}


def start(config: RunConfig, fork: bool = False) -> None:
    """Have one template in this process, if actors of ``config`` can be its forks.

    ``fork``: make it a fork of this process, for the first Ray that asks. Nothing else may run in
    this process yet, no thread and no Ray, and memory is what forks shall have
    (``cluster.runtime.anew``).
    """
    some = any(not config.services.of(kind).gpus for kind in MODELS)
    if sys.platform == "linux" and some and not _running:
        _running.append(Template(config, fork))


def runtime_env(config: RunConfig, kind: str) -> Tree:
    """What Ray is asked for where an actor of this kind shall be forked; empty where it is not."""
    return forked() if not config.services.of(kind).gpus else {}


def forked() -> Tree:
    """What Ray is asked for where an actor shall be forked, if there is a template."""
    if not _running:
        return {}
    program = [sys.executable, "-IS", os.path.abspath(launcher.__file__)]
    return {"py_executable": shlex.join(program), "env_vars": {launcher.SOCKET: _running[0].path}}


class Template:
    """The process, from here to the end of the driver, however that comes."""

    def __init__(self, config: RunConfig, fork: bool = False):
        """Start it; it listens at once, and answers when it has imported what the actors need."""
        import tempfile

        self.path = os.path.join(tempfile.mkdtemp(prefix="sol-rl-template-"), "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            make = self._fork if fork else self._start
            self.pid, self.alive = make(config, listener)

    def _start(self, config: RunConfig, listener: socket.socket) -> tuple[int, IO[bytes]]:
        """(its process, what is closed when this one ends) of a Python process of its own."""
        import subprocess

        from cluster.runtime import allocator

        code = f"from {__name__} import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno()), config.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # what fails here fails in each actor, which says it
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the driver
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **threads(config),  # read when libraries are loaded
                **allocator.variables(),  # a fork keeps the library, whatever Ray gives it
            },
        )
        assert process.stdin is not None
        self._process = process  # or Python would warn that nobody waits for it
        return process.pid, process.stdin

    def _fork(self, config: RunConfig, listener: socket.socket) -> tuple[int, IO[bytes]]:
        """The same of a fork of this process, which does not come back from here."""
        sys.stdout.flush()  # or both would write what waits there
        reader, writer = os.pipe()
        _unchanging()
        if pid := os.fork():
            os.close(reader)
            return pid, os.fdopen(writer, "wb")
        os.close(writer)
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream, file in enumerate((reader, nowhere, nowhere)):
            os.dup2(file, stream)
        serve(listener, config, many=False)
        raise SystemExit  # an actor's process ends as others of Python do


_running: list[Template] = []


# ---- the template's side


def main() -> None:
    """A template for every Ray that asks: the descriptor it listens at, then the configuration."""
    from configs.load import parse

    serve(socket.socket(fileno=int(sys.argv[1])), parse(json.loads(sys.argv[2])), many=True)


def serve(listener: socket.socket, config: RunConfig, many: bool) -> None:
    """Import, then serve every Ray that asks by a template of its own (``many``), or the first one
    from this process, until standard input ends.
    """
    import shutil
    import signal

    folder = os.path.dirname(listener.getsockname())
    import_for(config)
    _unchanging()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    paths: dict[str, str] = {}
    while _waits(listener):
        request, files, connection = _accept(listener)
        _close(files)
        its = _of_ray(request)
        if not many:
            connection.sendall(listener.getsockname().encode())
            connection.close()
            if not _serve_one(listener, its):
                return
            break
        path = paths.setdefault(json.dumps(its, sort_keys=True), f"{folder}/{len(paths)}")
        if not os.path.exists(path):
            own = socket.socket(socket.AF_UNIX)
            own.bind(path)
            own.listen(64)
            if not os.fork():
                listener.close()
                connection.close()
                _serve_one(own, its)
                return
            own.close()
        connection.sendall(path.encode())
        connection.close()
    shutil.rmtree(folder)


def _serve_one(listener: socket.socket, its: dict[str, str]) -> bool:
    """Import Ray with its variables, then fork for every request, while that Ray is there.

    True when it has ended; False in a fork that has been an actor.
    """
    import signal

    for name in [name for name in os.environ if name.startswith(RAY)]:
        del os.environ[name]
    os.environ.update(its)
    import pydantic.v1  # noqa: F401 (every process of Ray does when it starts, 1 MB)
    import ray  # noqa: F401

    _unchanging()
    ends = [os.pidfd_open(int(its[RAYLET]))] if RAYLET in its else []
    while _waits(listener, *ends):
        request, files, connection = _accept(listener)
        pid = os.fork() if _of_ray(request) == its else None
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            connection.close()
            _become(request, files)
            return False
        _close(files)
        connection.sendall(str(pid or "").encode())
        connection.close()
    return True


def _of_ray(request: dict[str, Any]) -> dict[str, str]:
    return {n: value for n, value in request["environment"].items() if n.startswith(RAY)}


def _unchanging() -> None:
    """What is there now stays: the collector would write to every page, and unshare it."""
    import gc

    gc.collect()
    gc.freeze()


def _waits(listener: socket.socket, *more: int) -> bool:
    """Wait for a request; False once the driver has ended, or a process of these descriptors."""
    ends = [0, *more]
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
        launcher.OOM_SCORE.write_text(request["oom_score"])
    sys.argv[:] = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _accept(listener: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket]:
    """(a request, its standard streams, where the answer goes)."""
    connection, _ = listener.accept()
    head, files, _, _ = socket.recv_fds(connection, launcher.LENGTH, 3)
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return json.loads(body), files, connection


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
