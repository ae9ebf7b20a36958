"""From outside a run: find it on its cluster, read its state, ask it for other sizes. `sol-rl
status` and `sol-rl scale`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.jobs.control import NAME, NAMESPACE
from cluster.jobs.submit import TOKEN_WANTED
from configs.load import ConfigError
from records.errors import RunFailed

PATIENCE_S = 900.0
"""How long `scale` waits for new actors to have loaded their models."""
LISTENER_S = 10.0
"""How long a cluster's head may take to accept a connection."""


def address_of(given: str | None) -> str:
    """Where to look: what is given, RAY_ADDRESS, or the cluster that was last started on this
    machine.
    """
    return given or os.environ.get("RAY_ADDRESS") or "auto"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A Ray connection: the one that is there, or one to ``address``. Raises ConfigError where
    nothing answers.
    """
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():
        yield
        return
    require_listener(address)
    try:
        ray.init(
            address=address, logging_level=logging.ERROR, log_to_driver=False, namespace=NAMESPACE
        )
    except AuthenticationError:
        raise ConfigError([f"--address {address}: {TOKEN_WANTED}"]) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            [
                f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]});"
                " give host:port of its head"
            ]
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def require_listener(address: str, given_as: str = "--address") -> None:
    """Ray itself tries an address for minutes before it gives up. Raises ConfigError when
    ``address``, host:port, takes no connection; other addresses, such as ``auto``, are Ray's to
    judge.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTENER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            [
                f"{given_as} {address}: no Ray cluster answers there ({error}); give host:port of"
                " its head"
            ]
        ) from None


def states(name: str | None) -> dict[str, dict[str, Any]]:
    """State by key of the runs on this cluster, of those called ``name`` if given. Raises
    ConfigError when there is none.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        found: Any = ray.get(ray.get_actor(NAME, namespace=NAMESPACE).runs.remote(), timeout=30)
    except (ValueError, RayActorError):
        found = {}
    except GetTimeoutError:
        raise RunFailed("the cluster did not answer within 30 s: is its head alive?") from None
    chosen = {key: state for key, state in found.items() if name in (None, state["run"])}
    if not chosen:
        there = ", ".join(sorted(state["run"] for state in found.values()))
        raise ConfigError(
            [
                (
                    f"no run {name!r} on this cluster; there are: {there}"
                    if there
                    else "no run on this cluster"
                )
            ]
        )
    return chosen


def scale(name: str | None, sizes: dict[str, int], patience_s: float = PATIENCE_S) -> str:
    """Ask the run for other pool sizes and wait until it has them; returns its words.

    Raises:
        ConfigError: no such run, several, or it refuses, with its reasons.
        RunFailed: it ended, or did not do it within ``patience_s``.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    found = states(name)
    if len(found) > 1:
        raise ConfigError(
            [
                "--run: which one? there are:"
                f" {', '.join(sorted(state['run'] for state in found.values()))}"
            ]
        )
    (key,) = found
    board = ray.get_actor(NAME, namespace=NAMESPACE)
    number = ray.get(board.request.remote(key, sizes))
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            outcome = ray.get(board.outcome.remote(number), timeout=30)
            alive = outcome is not None or key in ray.get(board.runs.remote(), timeout=30)
        except (RayActorError, GetTimeoutError):
            outcome, alive = None, False
        if outcome is not None:
            done, words = outcome
            if not done:
                raise ConfigError(words.splitlines())
            return words
        if not alive:
            raise RunFailed(
                f"the run ended, or its board was lost, before it had {sizes}: see `sol-rl status`"
            )
        time.sleep(0.3)
    raise RunFailed(f"not done within {patience_s:g} s; the run keeps trying: see `sol-rl status`")
