"""What the driver does for a call does not grow with the actors that there are: counted, not timed.
Nothing starts a process here.
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


class Functions:
    """Functions that are called within the last ``counting``, Python's own among them."""

    def __init__(self) -> None:
        self.called = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.called = 0
        sys.setprofile(self._saw)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _saw(self, frame: FrameType, event: str, what: object) -> None:
        # timers are kept in order with log n comparisons, and are virtual time's
        if event in ("call", "c_call") and frame.f_code.co_name != "__lt__":
            self.called += 1


def functions_and_calls(size: int) -> tuple[int, float]:
    """Of an iteration with a GPU, an actor of each kind and a prompt, ``size`` times."""
    tree = config().model_dump(mode="json")
    tree["prompts"]["per_iteration"] = size
    for kind, named in (("rollout", "actors"), ("reward", "actors"), ("learner", "replicas")):
        tree["services"][kind][named] = size
    each = {"learner": 1, "rollout": 1, "reward": 1}
    found = Functions()
    hardware = Hardware({"one": DURATIONS}, [GpuAssignment("one", size, each)])
    # the second iteration: in the first some is done for the first time
    simulated = simulate(parse(tree), hardware, 2, found.counting)
    assert simulated.calls > 10 * size
    return found.called, simulated.calls


def test_a_call_costs_as_much_among_more_actors():
    """What each further call costs, from 16 to 32 of everything, and from 64 to 128: were all
    actors looked at for each, it would cost 144 functions more.
    """
    slopes = []
    for size in (16, 64):
        (few, fewer), (many, more) = functions_and_calls(size), functions_and_calls(2 * size)
        slopes.append((many - few) / (more - fewer))
    assert slopes[1] < 1.05 * slopes[0], slopes
