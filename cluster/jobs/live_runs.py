"""Find the runs of a cluster, read their state and scale them (`sol-rl status`, `sol-rl scale`)."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import cast

from cluster.jobs.board import NAME, NAMESPACE, Outcome, RunState, Sizes
from cluster.jobs.dashboard import TOKEN_WANTED
from configs.load import ConfigError
from records.errors import RunFailed, first_line

SCALE_S = 900.0
"""How long `scale` waits until new actors have loaded their models."""
ANSWER_S = 30.0
"""Timeout of a call to the board."""
LISTENER_S = 10.0
"""Timeout for a cluster's head to accept a connection, and again to answer on it."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The gRPC method that every process calls first on a head; its request has no fields."""


def address_of(given: str | None) -> str:
    """Return ``given``, else RAY_ADDRESS, else "auto": the cluster last started on this machine."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Use the existing Ray connection within the block, or a temporary one to ``address``.

    Raises ConfigError if nothing answers.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    require_listener(address)
    try:
        ray.init(
            address=address, logging_level=logging.ERROR, log_to_driver=False, namespace=NAMESPACE
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        if is_token_error(error):
            raise ConfigError(f"--address {address}: {TOKEN_WANTED}") from None
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({first_line(error)});"
            " give host:port of its head"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def is_token_error(error: BaseException | None) -> bool:
    """Return True if Ray could not join a cluster because the token is missing or wrong.

    If the cluster refused the token, only the text of the error's cause says so.
    """
    from ray.exceptions import AuthenticationError

    while error is not None and not (
        isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error)
    ):
        error = error.__cause__
    return error is not None


def require_listener(address: str, given_as: str = "--address") -> None:
    """Raise ConfigError unless a Ray head answers at ``address``, host:port, and takes the token.

    Refused are addresses that accept no connection, do not speak HTTP/2 (the protocol under gRPC)
    or reject this process's token. This check fails fast: Ray itself retries for many minutes, and
    for twenty seconds if the token is wrong, with a warning for each attempt. Other addresses, such
    as ``auto``, are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    if not port.isdecimal():  # Ray would retry there forever
        raise ConfigError(
            f"{given_as} {address}: {port!r} is not a port; give host:port of its head"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LISTENER_S) as to:
            if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_http2(to):
                raise ConfigError(
                    f"{given_as} {address}: the process that listens there is not the head of a"
                    " Ray cluster; give host:port of one (port 6379 by default), or its"
                    " dashboard's URL, http://HOST:8265"
                )
        if not address.startswith("ray://") and _refuses_token(address):
            raise ConfigError(f"{given_as} {address}: {TOKEN_WANTED}")
    # UnicodeError: the text cannot be a host name
    except (OSError, OverflowError, RuntimeError, UnicodeError) as error:
        raise ConfigError(
            f"{given_as} {address}: no Ray cluster answers there ({error}); give host:port of"
            " its head"
        ) from None


def _refuses_token(address: str) -> bool:
    """Return True if the head rejects this process's token, or requires one and there is none.

    Raises OSError or RuntimeError if Ray is set to use TLS and its files are missing.
    """
    import grpc

    # a private module: Ray has no public way to send a single request to a cluster
    from ray._private.grpc_utils import init_grpc_channel
    from ray.exceptions import AuthenticationError

    with closing(cast(grpc.Channel, init_grpc_channel(address))) as channel:
        try:
            channel.unary_unary(CLUSTER_ID)(b"", timeout=LISTENER_S)
        except AuthenticationError:
            return True
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED
    return False


def _speaks_http2(to: socket.socket) -> bool:
    """Return True if the peer answers with a SETTINGS frame, as HTTP/2 requires (RFC 9113, 3.4)."""
    to.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    head = b""
    while len(head) < 9 and (part := to.recv(9 - len(head))):
        head += part
    return head[3:] == b"\4\0\0\0\0\0"  # after the length: type SETTINGS, no flags, stream 0


def run_states(name: str | None) -> dict[str, RunState]:
    """Return the states of this cluster's runs by key, only of runs called ``name`` if given.

    Raises ConfigError if there are none, RunFailed if the cluster does not answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError

    try:
        board = ray.get_actor(NAME, namespace=NAMESPACE)
        running = cast(dict[str, RunState], ray.get(board.runs.remote(), timeout=ANSWER_S))
    except (ValueError, RayActorError):
        running = {}
    except GetTimeoutError:
        raise RunFailed(
            f"the cluster did not answer within {ANSWER_S:g} s: is its head alive?"
        ) from None
    except RayError as error:
        raise RunFailed(f"the cluster does not answer ({first_line(error)})") from None
    chosen = {key: state for key, state in running.items() if name in (None, state["run"])}
    if not chosen:
        names = ", ".join(sorted(state["run"] for state in running.values()))
        raise ConfigError(
            f"no run {name!r} on this cluster; active runs: {names}"
            if names
            else "no run on this cluster"
        )
    return chosen


def scale(name: str | None, sizes: Sizes, timeout_s: float = SCALE_S) -> str:
    """Request other pool sizes from a run, wait until it has them and return the run's message.

    Raises:
        ConfigError: there is no such run, or there are several, or the run refuses (with reasons).
        RunFailed: the run ended, or did not reach the sizes within ``timeout_s``.
    """
    import ray
    from ray.exceptions import RayError

    matching = run_states(name)
    if len(matching) > 1:
        names = ", ".join(sorted(state["run"] for state in matching.values()))
        raise ConfigError(f"--run is required, because several runs are active: {names}")
    (key,) = matching
    try:
        board = ray.get_actor(NAME, namespace=NAMESPACE)
        number = ray.get(board.request.remote(key, sizes), timeout=ANSWER_S)
    except (RayError, ValueError) as error:  # ``run_states`` reached the board a moment ago
        why = first_line(error)
        raise RunFailed(f"the run's board was lost ({why}): see `sol-rl status`") from None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            outcome = cast(Outcome | None, ray.get(board.outcome.remote(number), timeout=ANSWER_S))
            alive = outcome is not None or key in ray.get(board.runs.remote(), timeout=ANSWER_S)
        except RayError:
            outcome, alive = None, False
        if outcome is not None:
            done, message = outcome
            if not done:
                raise ConfigError(message.splitlines())
            return message
        if not alive:
            missing = ", ".join(f"{service}={size}" for service, size in sizes.items())
            raise RunFailed(
                f"the run ended, or its board was lost, before it had {missing}: see"
                " `sol-rl status`"
            )
        time.sleep(0.3)
    raise RunFailed(
        f"not done within {timeout_s:g} s; the run continues to try: see `sol-rl status`"
    )
