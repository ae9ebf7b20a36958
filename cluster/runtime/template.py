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

import atexit
import json
import os
import select
import shlex
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING

from cluster.runtime import launcher
from cluster.runtime.asked import Asked, accept

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
    quicker than waking up between the small products of a small model; but not where replicas have
    more threads than there are cores, which they would take from each other.
    """
    found = {"OMP_WAIT_POLICY": "PASSIVE"}
    learner = config.services.learner
    crowded = learner.replicas * learner.threads > (os.cpu_count() or 1)
    if not crowded and (config.plan.explore is None or not config.explore_ahead):
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
        # it removes its folder itself, unless it was killed
        atexit.register(shutil.rmtree, os.path.dirname(self.path), ignore_errors=True)

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
    from this process, until standard input ends. Leaves no folder behind.
    """
    folder, own = os.path.dirname(listener.getsockname()), os.getpid()
    try:
        import_for(config)
        _unchanging()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
        (_serve_many if many else _serve_first)(listener, folder)
    finally:
        if os.getpid() == own:  # and not in a fork, whatever that has become
            shutil.rmtree(folder, ignore_errors=True)


def _serve_first(listener: socket.socket, folder: str) -> None:
    """The first Ray that asks, from this process."""
    while _waits(listener):
        if asked := accept(listener):
            asked.close_files()
            asked.answer(listener.getsockname())
            return _serve_one(listener, _of_ray(asked))


def _serve_many(listener: socket.socket, folder: str) -> None:
    """Each Ray by a template of its own, a fork that listens in the folder."""
    paths: dict[str, str] = {}
    while _waits(listener):
        if (asked := accept(listener)) is None:
            continue
        asked.close_files()
        its = _of_ray(asked)
        path = paths.setdefault(json.dumps(its, sort_keys=True), f"{folder}/{len(paths)}")
        if not os.path.exists(path):
            own = socket.socket(socket.AF_UNIX)
            own.bind(path)
            own.listen(64)
            if _fork() == 0:
                listener.close()
                asked.connection.close()
                return _serve_one(own, its)
            own.close()
        asked.answer(path)


def _serve_one(listener: socket.socket, its: dict[str, str]) -> None:
    """Import Ray with its variables, then fork for every request, while that Ray is there. Returns
    when it has ended, and in a fork that has been an actor.
    """
    for name in [name for name in os.environ if name.startswith(RAY)]:
        del os.environ[name]
    os.environ.update(its)
    import pydantic.v1  # noqa: F401 (every process of Ray does when it starts, 1 MB)
    import ray  # noqa: F401

    _unchanging()
    try:
        ends = [os.pidfd_open(int(its[RAYLET]))] if RAYLET in its else []
    except ProcessLookupError:  # it ended while this imported
        return
    while _waits(listener, *ends):
        if (asked := accept(listener)) is None:
            continue
        pid = _fork() if _of_ray(asked) == its else None
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            asked.connection.close()
            return asked.become()
        asked.close_files()
        asked.answer(str(pid or ""))


def _fork() -> int | None:
    """As ``os.fork``; None where the machine has no process or no memory left. Who asked then
    starts an ordinary one, or fails by itself.
    """
    try:
        return os.fork()
    except OSError:
        return None


def _of_ray(asked: Asked) -> dict[str, str]:
    environment = asked.request["environment"]
    return {name: value for name, value in environment.items() if name.startswith(RAY)}


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
