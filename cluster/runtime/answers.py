"""Waiting for one actor's answer: what comes, or in which of three ways it does not. Nobody is
waited for without end.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from cluster.runtime.starting import cause
from cluster.runtime.worker import ActorLost, Worker
from configs.services import Service
from records.errors import InputsLost


async def answer_of(worker: Worker, ref: Any, service: Service) -> Any:
    """The value behind ``ref``, a call that ``worker`` was sent.

    It may take ``service.deadline_s`` seconds since the actor's last answer. An actor that says it
    starts ``cold`` has ``warm_up_s`` more until it has answered its first unit.

    Raises:
        ActorLost: the actor died, or was silent for longer than that.
        InputsLost: an object that it was sent no longer exists.
        RayError: what the method raised.
    """
    future = asyncio.wrap_future(ref.future())
    asked = time.monotonic()
    future.add_done_callback(_seen)
    while True:
        limit = service.deadline_s + (service.warm_up_s if worker.facts.get("cold") else 0.0)
        left = max(asked, worker.last_answer) + limit - time.monotonic()
        done, _ = await asyncio.wait({future}, timeout=max(left, 0.0))
        if done:
            break
        if time.monotonic() - max(asked, worker.last_answer) >= limit:
            raise ActorLost(f"no answer for {limit:g} s")
    worker.last_answer = time.monotonic()
    try:
        return future.result()
    except RayActorError as error:
        raise ActorLost(cause(error)) from None
    except ObjectLostError as error:
        raise InputsLost(str(error).splitlines()[0]) from None
    except RayTaskError as error:
        if isinstance(error.cause, ObjectLostError):
            raise InputsLost(str(error.cause).splitlines()[0]) from None
        raise


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at how a call ended even when nobody waits for it any more, so that asyncio does not
    complain about it.
    """
    if not future.cancelled():
        future.exception()
