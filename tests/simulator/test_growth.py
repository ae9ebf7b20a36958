"""The work of the driver for a call must not grow with the number of actors. The tests count
function calls and measure no time. They start no processes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from configs.load import parse
from planning.layouts.gpus import GpuAssignment
from simulator.run import simulate
from simulator.services import Hardware
from tests.simulator.test_simulator import DURATIONS, config


class FunctionCounter:
    """Counts the functions that are called within the last ``counting``, including those of Python
    itself.
    """

    def __init__(self) -> None:
        self.called = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.called = 0
        sys.setprofile(self._count_call)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count_call(self, frame: FrameType, event: str, argument: object) -> None:
        # comparisons of timers do not count: virtual time sorts its timers with log n comparisons
        if event in ("call", "c_call") and frame.f_code.co_name != "__lt__":
            self.called += 1


def functions_and_calls(size: int) -> tuple[int, float]:
    """Return the number of functions and of calls in an iteration that has ``size`` GPUs, actors of
    each kind and prompts.
    """
    tree = config().model_dump(mode="json")
    tree["prompts"]["per_iteration"] = size
    for kind, named in (("rollout", "actors"), ("reward", "actors"), ("learner", "replicas")):
        tree["services"][kind][named] = size
    actors_per_gpu = {"learner": 1, "rollout": 1, "reward": 1}
    counter = FunctionCounter()
    hardware = Hardware({"one": DURATIONS}, [GpuAssignment("one", size, actors_per_gpu)])
    # the second iteration is counted, because the first one also does initial work
    simulated = simulate(parse(tree), hardware, 2, counter.counting)
    assert simulated.calls > 10 * size
    return counter.called, simulated.calls


def test_cost_of_a_call_does_not_grow_with_the_number_of_actors():
    """The test compares the cost of each additional call between sizes 16 and 32 and between 64 and
    128. If the driver visited all actors for each call, a call would need 144 functions more.
    """
    slopes = []
    for size in (16, 64):
        (few, fewer), (many, more) = functions_and_calls(size), functions_and_calls(2 * size)
        slopes.append((many - few) / (more - fewer))
    assert slopes[1] < 1.05 * slopes[0], slopes
