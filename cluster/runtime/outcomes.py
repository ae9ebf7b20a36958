"""Outcomes of a pool's tasks: answers, retries and failures."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError

from actors.calls import Answer
from cluster.runtime.member import ActorLost, Member
from cluster.runtime.queue import PendingTask, TaskQueue
from cluster.runtime.starting import cause, frames_of
from configs.services import Service
from records.errors import RunFailed, StateLost
from records.rundir import Event

RECORDED = 16
"""Number of different errors of one pool whose tracebacks are recorded."""


class Outcomes:
    """Sets results of tasks, counts failures and retries, and closes the pool after a failure."""

    def __init__(self, kind: str, service: Service, event: Event, stateful: bool):
        self._kind, self._event = kind, event
        # a retry on a stateful actor would start from the state that the first attempt left
        self._max_attempts = 1 if stateful else service.max_attempts
        self.queue = TaskQueue()
        self.reissued = 0
        self._recorded: set[str] = set()
        self.failure: RunFailed | StateLost | None = None
        # for callers that wait for a loss without having a task in the pool (``LearnerGroup``)
        self.failed = asyncio.Event()

    def check(self) -> None:
        """Raise the failure of the pool, if any: a task queued after it would wait for ever."""
        if self.failure:
            raise self.failure

    def put(self, pending: PendingTask) -> None:
        """Queue a task, new or to be retried; after a failure of the pool, fail it at once."""
        # a task that returns after the pool failed must not wait for a renewal, because its caller
        # has given up
        if self.failure:
            pending.fail(self.failure)
        else:
            self.queue.put(pending)

    def answered(self, pending: PendingTask, member: Member, value: Answer) -> None:
        """Set ``value`` as the task's result, or retry the task if ``Task.accept`` rejects it."""
        member.answered += 1
        member.answer(pending)
        # whatever the actor compiles is compiled by now
        member.cold = False
        pending.answers += 1
        task = pending.task
        fault = task.accept(value) if task.accept else None
        # the last answer is used in any case: the caller counts what it lacks
        if fault and pending.answers < task.tries:
            pending.avoid = member.index
            self.retry(pending, member, fault)
        elif not pending.future.done():
            pending.future.set_result(value)
            if pending.retries:
                fields = {"actor": member.index, "retries": pending.retries}
                self._event("chunk_recovered", kind=self._kind, unit=str(task.key), **fields)

    def raised(self, pending: PendingTask, member: Member, error: RayError) -> None:
        """Count what a task's method raised as a failure of the task."""
        self.count_failure(pending, member, self.explain(member, pending.task.key, error))

    def explain(self, member: Member, work: object, error: ActorLost | RayError) -> str:
        """Return why a call failed, and record the traceback of what its method raised.

        Each message is recorded once, and ``RECORDED`` at most: a scorer may fail for every image.
        """
        if isinstance(error, ActorLost):
            return str(error)
        why, frames = cause(error), frames_of(error)
        if frames and why not in self._recorded and len(self._recorded) < RECORDED:
            self._recorded.add(why)
            where = {"kind": self._kind, "actor": member.index, "unit": str(work)}
            self._event("actor_raised", **where, why=why, traceback=frames)
        return why

    def count_failure(self, pending: PendingTask, member: Member, why: str) -> None:
        """Retry the task, or fail it with RunFailed if it has used its attempts."""
        pending.attempts += 1
        # another member shows whether the task or the machine is at fault
        pending.avoid = member.index
        if pending.attempts < self._max_attempts:
            self.retry(pending, member, why)
            return
        times = f" {pending.attempts} times, last" if pending.attempts > 1 else ""
        pending.fail(RunFailed(f"{self._kind}: {pending.task.key} failed{times}: {why}"))

    def retry(self, pending: PendingTask, member: Member, why: str) -> None:
        """Put the task back into the queue."""
        self.reissued += 1
        pending.retries += 1
        key = str(pending.task.key)
        self._event("chunk_reissued", kind=self._kind, unit=key, actor=member.index, why=why)
        self.put(pending)

    def end(self, failure: RunFailed | StateLost) -> None:
        """Fail all waiting tasks, and all later ones until ``reopen``."""
        self.failure = failure
        self.failed.set()
        # after ``failure`` is set, so that tasks put from now on fail at once
        self.queue.fail_all(failure)

    def reopen(self) -> None:
        """Accept tasks again."""
        self.failure = None
        self.failed.clear()
