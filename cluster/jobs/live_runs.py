"""`sol-rl status` and `sol-rl scale`: find the runs of a cluster, read their state, scale them."""

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
"""How long `scale` waits for new actors to have loaded their models."""
ANSWER_S = 30.0
"""How long the board may take to answer."""
LISTENER_S = 10.0
"""How long a cluster's head may take to accept a connection, and to answer on it."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every process asks a head first; the request has no fields."""


def address_of(given: str | None) -> str:
    """The given address, or RAY_ADDRESS, or the cluster last started on this machine."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A Ray connection: the existing one, or one to ``address``.

    Raises ConfigError where nothing answers.
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
        if wants_token(error):
            raise ConfigError(f"--address {address}: {TOKEN_WANTED}") from None
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({first_line(error)});"
            " give host:port of its head"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def wants_token(error: BaseException | None) -> bool:
    """Whether Ray could not join a cluster because it lacks the token. Where the cluster refused,
    only the text of the error's cause says so.
    """
    from ray.exceptions import AuthenticationError

    while error is not None and not (
        isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error)
    ):
        error = error.__cause__
    return error is not None


def require_listener(address: str, given_as: str = "--address") -> None:
    """Raises ConfigError when ``address``, host:port, accepts no connection, does not speak gRPC's
    protocol, HTTP/2, or refuses this process's token.

    Ray itself tries for many minutes before it gives up, and where the token is wrong for twenty
    seconds, with a warning for each. Other addresses, such as ``auto``, are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    if not port.isdecimal():  # Ray would ask there for ever
        raise ConfigError(f"{given_as} {address}: {port!r} is no port; give host:port of its head")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LISTENER_S) as to:
            if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_http2(to):
                raise ConfigError(
                    f"{given_as} {address}: what listens there is no head of a Ray cluster; give"
                    " host:port of one (6379 unless it was started otherwise), or its dashboard's"
                    " URL, http://HOST:8265"
                )
        if not address.startswith("ray://") and _refuses_token(address):
            raise ConfigError(f"{given_as} {address}: {TOKEN_WANTED}")
    # UnicodeError: what cannot be the name of a host
    except (OSError, OverflowError, RuntimeError, UnicodeError) as error:
        raise ConfigError(
            f"{given_as} {address}: no Ray cluster answers there ({error}); give host:port of"
            " its head"
        ) from None


def _refuses_token(address: str) -> bool:
    """Whether a head refuses what it is asked with this process's token, or it has none and should.

    Raises OSError or RuntimeError where Ray is to use TLS and its files are not there.
    """
    import grpc

    # private: Ray has no public way to ask a cluster just once
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
    """Whether the other side answers as HTTP/2 servers begin (RFC 9113, 3.4): with its settings."""
    to.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    head = b""
    while len(head) < 9 and (more := to.recv(9 - len(head))):
        head += more
    return head[3:] == b"\4\0\0\0\0\0"  # after its length: settings, no flags, stream 0


def states(name: str | None) -> dict[str, RunState]:
    """The states of this cluster's runs by key, of those called ``name`` if given.

    Raises ConfigError when there is none, RunFailed when the cluster does not answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError

    try:
        board = ray.get_actor(NAME, namespace=NAMESPACE)
        found = cast(dict[str, RunState], ray.get(board.runs.remote(), timeout=ANSWER_S))
    except (ValueError, RayActorError):
        found = {}
    except GetTimeoutError:
        raise RunFailed(
            f"the cluster did not answer within {ANSWER_S:g} s: is its head alive?"
        ) from None
    except RayError as error:
        raise RunFailed(f"the cluster does not answer ({first_line(error)})") from None
    chosen = {key: state for key, state in found.items() if name in (None, state["run"])}
    if not chosen:
        there = ", ".join(sorted(state["run"] for state in found.values()))
        raise ConfigError(
            f"no run {name!r} on this cluster; there are: {there}"
            if there
            else "no run on this cluster"
        )
    return chosen


def scale(name: str | None, sizes: Sizes, timeout_s: float = SCALE_S) -> str:
    """Ask a run for other pool sizes and wait until it has them; returns the run's answer.

    Raises:
        ConfigError: there is no such run, or several, or the run refuses, with its reasons.
        RunFailed: the run ended, or did not do it within ``timeout_s``.
    """
    import ray
    from ray.exceptions import RayError

    found = states(name)
    if len(found) > 1:
        there = ", ".join(sorted(state["run"] for state in found.values()))
        raise ConfigError(f"--run: which one? there are: {there}")
    (key,) = found
    try:
        board = ray.get_actor(NAME, namespace=NAMESPACE)
        number = ray.get(board.request.remote(key, sizes), timeout=ANSWER_S)
    except (RayError, ValueError) as error:  # it was there a moment ago
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
            done, words = outcome
            if not done:
                raise ConfigError(words.splitlines())
            return words
        if not alive:
            raise RunFailed(
                f"the run ended, or its board was lost, before it had {sizes}: see `sol-rl status`"
            )
        time.sleep(0.3)
    raise RunFailed(f"not done within {timeout_s:g} s; the run keeps trying: see `sol-rl status`")
