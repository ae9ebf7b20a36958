"""How calls reach actors and answers come back: through Ray, unless a simulation stands in."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import ray
from ray import ObjectRef

from actors.calls import Answer, Call

Value = TypeVar("Value")
Handle: TypeAlias = Any  # of an actor, whose methods exist at run time only


class Transport(Protocol):
    """All that pools ask of what lies between them and actors."""

    def send(self, handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
        """Have the actor carry out ``call``, after those it was sent before; a reference per
        return value.
        """
        ...

    def answer(self, reference: ObjectRef[Answer]) -> asyncio.Future[Answer]:
        """The value behind ``reference``, once it is there; raises what the call raised. A future
        of the caller's own, which it may settle otherwise.
        """
        ...

    def put(self, value: Value) -> ObjectRef[Value]:
        """A reference to ``value``, which calls that have it as an argument resolve."""
        ...

    def kill(self, handle: Handle) -> None:
        """End the actor."""
        ...


class RayTransport:
    """Ray's remote calls."""

    def send(self, handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
        """See ``Transport``."""
        method = getattr(handle, call.method)
        if call.returns == 1:
            return [method.remote(*call.args, **call.named)]
        # it makes a class for every call: a tenth of its time
        return method.options(num_returns=call.returns).remote(*call.args, **call.named)

    def answer(self, reference: ObjectRef[Answer]) -> asyncio.Future[Answer]:
        """See ``Transport``."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[Answer] = loop.create_future()

        def came(theirs: concurrent.futures.Future[Answer]) -> None:  # on a thread of Ray's
            # an answer may come after the run, and a closed loop takes no callbacks
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, mine, theirs)

        # not asyncio.wrap_future, which takes three callbacks for every answer
        reference.future().add_done_callback(came)
        return mine

    def put(self, value: Value) -> ObjectRef[Value]:
        """See ``Transport``."""
        return ray.put(value)

    def kill(self, handle: Handle) -> None:
        """See ``Transport``."""
        ray.kill(handle, no_restart=True)


def _settle(mine: asyncio.Future[Answer], theirs: concurrent.futures.Future[Answer]) -> None:
    if mine.done():  # nobody waits any more
        return
    if error := theirs.exception():
        mine.set_exception(error)
    else:
        mine.set_result(theirs.result())


RAY = RayTransport()
