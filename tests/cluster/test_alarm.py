"""One timer for all that wait for an actor: each is woken in time, and nobody is forgotten."""

import asyncio

from cluster.runtime import clock
from cluster.runtime.alarm import Alarm


def virtually(coroutine):
    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(coroutine)


def test_each_is_woken_when_it_is_due():
    """In any order: an earlier moment is not missed, nor a later one after it."""

    async def run():
        alarm, woken = Alarm(), {}

        async def wait(due):
            never = asyncio.get_running_loop().create_future()
            await alarm.wait(due, never)
            woken[due] = clock.now()

        waiting = [asyncio.create_task(wait(due)) for due in (5.0, 2.0, 9.0, 2.0)]
        await asyncio.gather(*waiting)
        return woken

    assert virtually(run()) == {2.0: 2.0, 5.0: 5.0, 9.0: 9.0}


def test_an_answer_or_a_word_wakes_at_once_and_leaves_nothing():
    async def run():
        alarm, loop = Alarm(), asyncio.get_running_loop()
        ended = []

        async def wait(answer):
            await alarm.wait(100.0, answer)
            ended.append(clock.now())

        answers = [loop.create_future() for _ in range(3)]
        waiting = [asyncio.create_task(wait(answer)) for answer in answers]
        loop.call_later(1.0, answers[1].set_result, None)
        loop.call_later(2.0, alarm.wake)
        await asyncio.gather(*waiting)
        assert ended == [1.0, 2.0, 2.0] and not alarm._due
        # cancelled ones leave nothing behind either, and the answer is not cancelled with them
        late = loop.create_future()
        waits = asyncio.create_task(alarm.wait(100.0, late))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        return late.cancelled(), alarm._due

    assert virtually(run()) == (False, {})


def test_a_thousand_waits_set_one_timer(monkeypatch):
    async def run():
        loop, alarm, timers = asyncio.get_running_loop(), Alarm(), []
        real = loop.call_at

        def call_at(when, *rest, **named):
            timers.append(when)
            return real(when, *rest, **named)

        monkeypatch.setattr(loop, "call_at", call_at)
        for number in range(1000):
            answer = loop.create_future()
            loop.call_soon(answer.set_result, number)
            await alarm.wait(100.0 + number, answer)
        return timers

    assert virtually(run()) == [100.0]
