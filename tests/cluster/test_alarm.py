"""One timer for all waits for an actor: each is checked in time, and none is forgotten."""

import asyncio
import math

from cluster.runtime import clock
from cluster.runtime.alarm import Alarm


class Waits:
    """A wait that returns, check after check, when the next one is due."""

    def __init__(self, *later: float):
        self.later, self.looks = [*later], []

    def look(self, due: float) -> float:
        self.looks.append((due, clock.now()))
        return self.later.pop(0) if self.later else math.inf


def in_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(coroutine)


def test_each_wait_is_checked_when_it_is_due():
    """In any order: neither an earlier time nor a later one after it is missed."""

    async def run():
        alarm, waiting = Alarm(), [Waits(), Waits(7.0, 8.0), Waits(), Waits()]
        for one, due in zip(waiting, (5.0, 2.0, 9.0, 2.0), strict=True):
            alarm.watch(one, due)
        await asyncio.sleep(20.0)
        return [one.looks for one in waiting]

    assert in_virtual_time(run()) == [
        [(5.0, 5.0)],
        [(2.0, 2.0), (7.0, 7.0), (8.0, 8.0)],
        [(9.0, 9.0)],
        [(2.0, 2.0)],
    ]


def test_a_wake_up_checks_all_waits_except_forgotten_ones():
    async def run():
        alarm, loop = Alarm(), asyncio.get_running_loop()
        stays, goes = Waits(50.0), Waits()
        alarm.watch(stays, 100.0)
        alarm.watch(goes, 1.0)
        alarm.forget(goes)
        loop.call_later(2.0, alarm.wake)
        await asyncio.sleep(60.0)
        return stays.looks, goes.looks

    assert in_virtual_time(run()) == ([(100.0, 2.0), (50.0, 50.0)], [])


def test_a_thousand_waits_set_one_timer(monkeypatch):
    async def run():
        loop, alarm, timers = asyncio.get_running_loop(), Alarm(), []
        real = loop.call_at

        def call_at(when, *rest, **named):
            timers.append(when)
            return real(when, *rest, **named)

        monkeypatch.setattr(loop, "call_at", call_at)
        for number in range(1000):
            one = Waits()
            alarm.watch(one, 100.0 + number)
            alarm.forget(one)
        return timers

    assert in_virtual_time(run()) == [100.0]
