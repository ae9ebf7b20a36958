"""What becomes of a pool's tasks: they wait, are answered, are tried again, or fail."""

from __future__ import annotations

import asyncio

from actors.calls import Answer
from cluster.runtime.member import Member
from cluster.runtime.queue import PendingTask, TaskQueue
from configs.services import Service
from records.errors import RunFailed, StateLost
from records.rundir import Event


class Outcomes:
    """Settles tasks, counts their failures, and knows whether the pool still takes any."""

    def __init__(self, kind: str, service: Service, event: Event, stateful: bool):
        self._kind, self._event = kind, event
        # with a state a second try would begin from what the first one left behind
        self._max_attempts = 1 if stateful else service.max_attempts
        self.queue = TaskQueue()
        self.reissued = 0
        self.failure: RunFailed | StateLost | None = None
        # for who asks whether an actor was lost without having a task of its own (``LearnerGroup``)
        self.failed = asyncio.Event()

    def check(self) -> None:
        """Raises what the pool ended with: a task that was queued then would wait for ever."""
        if self.failure:
            raise self.failure

    def put(self, pending: PendingTask) -> None:
        """A task waits for an actor, new or tried before."""
        # the queue was emptied when the pool failed: what comes back after that must not wait
        # for a renewal, with a caller who has given up
        if self.failure:
            pending.fail(self.failure)
        else:
            self.queue.put(pending)

    def answered(self, pending: PendingTask, member: Member, value: Answer) -> None:
        """An actor gave ``value``, which ends the task unless it is refused."""
        member.answered += 1
        member.answer(pending)
        # whatever had to be compiled is compiled now
        member.cold = False
        pending.answers += 1
        task = pending.task
        fault = task.accept(value) if task.accept else None
        # the last answer stands whatever it is: the caller counts what is missing in it
        if fault and pending.answers < task.tries:
            pending.avoid = member.index
            self.retry(pending, member, fault)
        elif not pending.future.done():
            pending.future.set_result(value)
            if pending.retries:
                told = {"actor": member.index, "retries": pending.retries}
                self._event("chunk_recovered", kind=self._kind, unit=str(task.key), **told)

    def count_failure(self, pending: PendingTask, member: Member, why: str) -> None:
        """Back to the queue, or the end of the run when the task has used its attempts."""
        pending.attempts += 1
        # another member shows whether the fault is the task's or the machine's
        pending.avoid = member.index
        if pending.attempts < self._max_attempts:
            self.retry(pending, member, why)
            return
        what = f"{self._kind}: {pending.task.key} failed {pending.attempts} times"
        pending.fail(RunFailed(f"{what}, last: {why}"))

    def retry(self, pending: PendingTask, member: Member, why: str) -> None:
        """Back to the queue."""
        self.reissued += 1
        pending.retries += 1
        key = str(pending.task.key)
        self._event("chunk_reissued", kind=self._kind, unit=key, actor=member.index, why=why)
        self.put(pending)

    def end(self, failure: RunFailed | StateLost) -> None:
        """All that waits, and all that comes until ``reopen``, fails."""
        self.failure = failure
        self.failed.set()
        # after ``failure`` is set: what is put from now on fails by itself
        self.queue.fail_all(failure)

    def reopen(self) -> None:
        """Tasks are taken again."""
        self.failure = None
        self.failed.clear()
