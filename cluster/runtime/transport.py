"""Transport of calls to actors and of their answers: Ray, or a simulation in its place."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import ray
from ray import ObjectRef
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]

from actors.calls import Answer, Call

Value = TypeVar("Value")
Handle: TypeAlias = Any  # of an actor, whose methods exist at run time only


class Transport(Protocol):
    """Interface between pools and actors."""

    def send(self, handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
        """Send ``call`` to the actor, which runs calls in order; return a reference per value."""
        ...

    def answer(self, reference: ObjectRef[Answer]) -> asyncio.Future[Answer]:
        """Return a future of the value of ``reference``, or of what the call raised.

        The future belongs to the caller, who may set another result.
        """
        ...

    def put(self, value: Value) -> ObjectRef[Value]:
        """Store ``value`` and return a reference that calls accept as an argument."""
        ...

    def kill(self, handle: Handle) -> None:
        """Kill the actor."""
        ...

    def ended(self, handle: Handle) -> bool:
        """Return True if the actor, which has answered before, is known to have ended."""
        ...


class RayTransport:
    """Ray's remote calls."""

    def send(self, handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
        """See ``Transport``."""
        method = getattr(handle, call.method)
        if call.returns == 1:
            return [method.remote(*call.args, **call.named)]
        # ``options`` creates a class for every call, a tenth of the call's time
        return method.options(num_returns=call.returns).remote(*call.args, **call.named)

    def answer(self, reference: ObjectRef[Answer]) -> asyncio.Future[Answer]:
        """See ``Transport``."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[Answer] = loop.create_future()

        def came(theirs: concurrent.futures.Future[Answer]) -> None:  # on a thread of Ray's
            # an answer may arrive after the run, and a closed loop accepts no callbacks
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, mine, theirs)

        # ``asyncio.wrap_future`` would need three callbacks for every answer
        reference.future().add_done_callback(came)
        return mine

    def put(self, value: Value) -> ObjectRef[Value]:
        """See ``Transport``."""
        return ray.put(value)

    def kill(self, handle: Handle) -> None:
        """See ``Transport``."""
        ray.kill(handle, no_restart=True)

    def ended(self, handle: Handle) -> bool:
        """See ``Transport``. Asks nobody: Ray notifies each process that has a handle."""
        return handle._get_local_state() == ActorTableData.DEAD


def _settle(mine: asyncio.Future[Answer], theirs: concurrent.futures.Future[Answer]) -> None:
    if mine.done():  # the caller was cancelled or has set another result
        return
    if error := theirs.exception():
        mine.set_exception(error)
    else:
        mine.set_result(theirs.result())


RAY = RayTransport()
