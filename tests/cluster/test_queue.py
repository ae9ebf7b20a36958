"""The queue of a pool: order, one slot per task, and no task lost with a slot that closes."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from actors.calls import Call, Task
from cluster.runtime.queue import PendingTask, TaskQueue


def pending(*priority):
    return PendingTask(Task(priority, priority), Call("nothing", (), {}))


def anything(task):
    return True


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


def test_tasks_put_in_one_loop_turn_are_assigned_by_priority():
    async def run():
        queue = TaskQueue()
        first, second = (asyncio.create_task(queue.take(anything)) for _ in range(2))
        await settle()
        for priority in (3, 1, 2):
            queue.put(pending(priority))
        await settle()
        assert (await first).task.key == (1,) and (await second).task.key == (2,)
        assert len(queue) == 1 and queue.max_length == 3
        assert (await queue.take(anything)).task.key == (3,)

    asyncio.run(run())


def test_a_task_wakes_one_slot_of_a_thousand():
    async def run():
        queue, requested = TaskQueue(), []

        def fits(task):
            requested.append(task)
            return True

        slots = [asyncio.create_task(queue.take(fits)) for _ in range(1000)]
        await settle()
        for number in range(500):
            queue.put(pending(number))
            await settle()
        assert len(requested) == 500
        assert [slot.done() for slot in slots] == [True] * 500 + [False] * 500
        for slot in slots[500:]:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)

    asyncio.run(run())


class Worker:
    """Slots that keep their tasks until their event is set."""

    def __init__(self):
        self.in_hand = []

    @property
    def busy(self):
        return bool(self.in_hand)

    async def serve(self, queue):
        while True:
            await queue.take(anything, self)
            done = asyncio.Event()
            self.in_hand.append(done)
            await done.wait()
            self.in_hand.remove(done)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 6)), st.tuples(st.just("end"), st.integers(0, 9))
    ),
    max_size=12,
)


@given(STEPS, st.integers(1, 5), st.integers(1, 3))
def test_idle_actors_get_tasks_before_busy_ones(steps, count, slots):
    async def run():
        queue, workers = TaskQueue(), [Worker() for _ in range(count)]
        serving = [asyncio.create_task(w.serve(queue)) for w in workers for _ in range(slots)]
        await settle()
        for step, number in steps:
            before = [len(worker.in_hand) for worker in workers]
            if step == "put":
                for _ in range(number):
                    queue.put(pending(0))
            elif held := workers[number % count].in_hand:
                held[0].set()
            await settle()
            after = [len(worker.in_hand) for worker in workers]
            if any(1 < b > a for a, b in zip(before, after, strict=True)):
                assert min(after) > 0
            # and no task waits while a slot is free
            assert not len(queue) or sum(after) == count * slots
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(run())


def test_a_task_waits_for_a_slot_that_may_take_it():
    async def run():
        queue, able = TaskQueue(), False
        slot = asyncio.create_task(queue.take(lambda task: able))
        await settle()
        queue.put(pending(1))
        await settle()
        assert not slot.done() and len(queue) == 1
        able = True
        queue.schedule_assignment()
        assert (await slot).task.key == (1,) and not len(queue)

    asyncio.run(run())


def test_a_closed_slot_returns_its_assigned_task():
    async def run():
        queue = TaskQueue()
        closed = asyncio.create_task(queue.take(anything))
        await settle()
        other = asyncio.create_task(queue.take(anything))
        await settle()
        queue.put(pending(1))
        await asyncio.sleep(0)  # handed out, and not yet taken up
        closed.cancel()
        assert (await other).task.key == (1,)
        await asyncio.gather(closed, return_exceptions=True)
        assert closed.cancelled()

    asyncio.run(run())


def test_remaining_tasks_keep_their_order():
    async def run():
        queue = TaskQueue()
        slot = asyncio.create_task(queue.take(lambda task: task.task.key == (3,)))
        await settle()
        for number in (5, 3, 1, 4):
            queue.put(pending(number))
        await settle()
        assert (await slot).task.key == (3,)
        return [(await queue.take(anything)).task.key for _ in range(3)]

    assert asyncio.run(run()) == [(1,), (4,), (5,)]
