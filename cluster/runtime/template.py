"""A template process that has imported torch, diffusers and Ray, and forks actor processes.

Most of the start of an actor is imports: 8 CPU seconds and 370 MB for an actor with a model, 1 s
and 50 MB for others. On one machine without GPUs this is paid once: the driver starts a *template*
process, which imports and waits, and Ray starts an actor's process by asking the template to fork.
The fork takes the environment, files and priority that Ray gave to the process that it started.

Ray reads its environment variables when it is imported, and they identify the Ray cluster of an
actor. Therefore the template forks one more template for each Ray, which imports Ray with the
variables of the first request and then forks every actor that has the same variables.

A command of ``sol-rl`` uses one Ray only. There the template is a fork of the command's process,
made after that has imported torch: both share these pages, and the template itself serves the Ray.

Templates are not used on GPUs, because CUDA does not survive a fork, nor on clusters, whose nodes
have their own Python. Ray starts ``cluster/runtime/launcher.py`` instead of Python.
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

from cluster.runtime import launcher, socket_paths
from cluster.runtime.fork_request import ForkRequest, accept
from planning.machine import usable_cores

if TYPE_CHECKING:
    from typing import IO

    from configs.schema import RunConfig
    from configs.section import Tree

MODELS = "encoder", "rollout", "learner"
"""Services whose actors import torch and diffusers; a template is started only for these."""
SPIN = "10000"
"""Number of spins before a waiting thread of GNU OpenMP sleeps (``GOMP_SPINCOUNT``)."""
RAY, RAYLET = "RAY_", "RAY_RAYLET_PID"
"""Prefix of Ray's environment variables, and the one with the process id of the raylet; actors end
when their raylet ends.
"""


# ---- the driver's side


def openmp_wait_variables(config: RunConfig) -> dict[str, str]:
    """Return the variables that set how OpenMP threads wait in the processes of a run.

    By default they would spin for milliseconds on cores that other actors need, so they sleep at
    once. If no actor explores while the learner trains, they spin for some microseconds, which is
    faster than waking up between the small matrix products of a small model. This is not done if
    all replicas together have more threads than there are cores, as they would slow each other.
    """
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    learner = config.services.learner
    crowded = learner.replicas * learner.threads > usable_cores()
    if not crowded and (config.plan.explore is None or not config.explore_ahead):
        variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN)
    return variables


def openmp_variables(config: RunConfig) -> dict[str, str]:
    """Return OpenMP's variables for a template; an actor sets its own number of threads later."""
    return {"OMP_NUM_THREADS": "1", **openmp_wait_variables(config)}


def start(config: RunConfig, fork: bool = False) -> None:
    """Start the template, unless it is running or actors of ``config`` cannot be forked.

    With ``fork`` the template is a fork of this process and serves the first Ray that makes a
    request. This process must not have threads or a Ray yet, and must have the memory allocator
    that the forks are to use (``cluster.runtime.reexec``).
    """
    some = any(not config.services.of(kind).gpus for kind in MODELS)
    if sys.platform == "linux" and some and not _running:
        _running.append(Template(config, fork))


def runtime_env(config: RunConfig, kind: str) -> Tree:
    """Return the ``runtime_env`` for an actor of this service; empty if it is not forked."""
    return fork_runtime_env() if not config.services.of(kind).gpus else {}


def fork_runtime_env() -> Tree:
    """Return the ``runtime_env`` with which Ray forks an actor; empty without a template."""
    if not _running:
        return {}
    program = [sys.executable, "-IS", os.path.abspath(launcher.__file__)]
    return {"py_executable": shlex.join(program), "env_vars": {launcher.SOCKET: _running[0].path}}


class Template:
    """A template process, which ends when the driver ends, also if the driver is killed."""

    def __init__(self, config: RunConfig, fork: bool = False):
        """Start the process.

        Its socket accepts requests at once; they are answered when the modules that actors need are
        imported.
        """
        import tempfile

        directory = socket_paths.short_directory(len("/sol-rl-template-12345678/socket"))
        folder = tempfile.mkdtemp(prefix="sol-rl-template-", dir=directory)
        self.path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            make = self._fork if fork else self._start
            self.pid, self.alive = make(config, listener)
        # in case it was killed: otherwise it removes its folder itself
        atexit.register(shutil.rmtree, os.path.dirname(self.path), ignore_errors=True)

    def _start(self, config: RunConfig, listener: socket.socket) -> tuple[int, IO[bytes]]:
        """Start a new Python process; return its pid and the pipe whose end it waits for."""
        import subprocess

        from cluster.runtime import allocator

        code = f"from {__name__} import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno()), config.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # an import that fails here fails in each actor, which logs
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the driver
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **openmp_variables(config),  # read when libraries are loaded
                **allocator.variables(),  # forks keep the library, whatever environment Ray sets
            },
        )
        assert process.stdin is not None
        self._process = process  # keep a reference, or Python warns that nobody waited for it
        return process.pid, process.stdin

    def _fork(self, config: RunConfig, listener: socket.socket) -> tuple[int, IO[bytes]]:
        """Fork this process; returns as ``_start`` in the parent and never in the fork."""
        sys.stdout.flush()  # otherwise both processes would write the buffered output
        reader, writer = os.pipe()
        _unchanging()
        if pid := os.fork():
            os.close(reader)
            return pid, os.fdopen(writer, "wb")
        os.close(writer)
        os.setsid()
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream, file in enumerate((reader, devnull, devnull)):
            os.dup2(file, stream)
        serve(listener, config, many=False)
        raise SystemExit  # with exit handlers, as in any other Python process


_running: list[Template] = []


# ---- the template's side


def main() -> None:
    """Entry point of a template process; arguments: its listening descriptor, the configuration."""
    from configs.load import parse

    serve(socket.socket(fileno=int(sys.argv[1])), parse(json.loads(sys.argv[2])), many=True)


def serve(listener: socket.socket, config: RunConfig, many: bool) -> None:
    """Import what actors need, then serve requests until standard input is closed.

    With ``many`` each Ray is served by a template of its own, otherwise only the first one, by this
    process. Removes the folder of the socket at the end.
    """
    folder, own = os.path.dirname(listener.getsockname()), os.getpid()
    try:
        import_for(config)
        _unchanging()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks: no zombies
        (_serve_many if many else _serve_first)(listener, folder)
    finally:
        if os.getpid() == own:  # not in a fork
            shutil.rmtree(folder, ignore_errors=True)


def _serve_first(listener: socket.socket, folder: str) -> None:
    """Serve the first Ray that makes a request, in this process."""
    while _waits(listener):
        if request := accept(listener):
            request.close_files()
            request.answer(listener.getsockname())
            return _serve_one(listener, _ray_variables(request))


def _serve_many(listener: socket.socket, folder: str) -> None:
    """Serve each Ray by a template of its own: a fork with another socket in the folder."""
    paths: dict[str, str] = {}
    while _waits(listener):
        if (request := accept(listener)) is None:
            continue
        request.close_files()
        variables = _ray_variables(request)
        path = paths.setdefault(json.dumps(variables, sort_keys=True), f"{folder}/{len(paths)}")
        if not os.path.exists(path):
            own = socket.socket(socket.AF_UNIX)
            own.bind(path)
            own.listen(64)
            if _fork() == 0:
                listener.close()
                request.connection.close()
                return _serve_one(own, variables)
            own.close()
        request.answer(path)


def _serve_one(listener: socket.socket, variables: dict[str, str]) -> None:
    """Import Ray with these variables, then fork for every request of that Ray.

    Returns when that Ray has ended, and in a fork when its actor has ended.
    """
    for name in [name for name in os.environ if name.startswith(RAY)]:
        del os.environ[name]
    os.environ.update(variables)
    import pydantic.v1  # noqa: F401 (every process of Ray imports it at its start: share the 1 MB)
    import ray  # noqa: F401

    _unchanging()
    try:
        ends = [os.pidfd_open(int(variables[RAYLET]))] if RAYLET in variables else []
    except ProcessLookupError:  # the raylet ended during the import
        return
    while _waits(listener, *ends):
        if (request := accept(listener)) is None:
            continue
        pid = _fork() if _ray_variables(request) == variables else None
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            request.connection.close()
            return request.become()
        request.close_files()
        request.answer(str(pid or ""))


def _fork() -> int | None:
    """Fork as ``os.fork``; return None if the machine has no process or memory left.

    The launcher then becomes an ordinary Python process, or fails by itself.
    """
    try:
        return os.fork()
    except OSError:
        return None


def _ray_variables(request: ForkRequest) -> dict[str, str]:
    environment = request.request["environment"]
    return {name: value for name, value in environment.items() if name.startswith(RAY)}


def _unchanging() -> None:
    """Exclude all present objects from garbage collection.

    The collector writes to every object that it visits, so that a fork would copy the page.
    """
    import gc

    gc.collect()
    gc.freeze()


def _waits(listener: socket.socket, *more: int) -> bool:
    """Wait for a request; return False once the driver or a process of ``more`` has ended."""
    ends = [0, *more]
    ready, _, _ = select.select([listener, *ends], [], [])
    return not any(end in ready for end in ends)


def import_for(config: RunConfig) -> None:
    """Import what encoder, rollout actors and learner need for their models; load no model."""
    # nothing uses Triton without GPUs, but torch would import it to see if it is there: 70 MB
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    import learner.trainer  # noqa: F401
    import policy.explorer  # noqa: F401
    from policy.families import family_for

    family_for(config.model).import_parts()
    del sys.modules["triton"]
