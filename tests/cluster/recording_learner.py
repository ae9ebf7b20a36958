"""A stand-in for the learner that records its calls.

It imports only what forks of the template have imported.
"""

import os
import time
from typing import Any

from actors.messages import ActorInfo, Rendezvous
from actors.runtime import identity
from learner.replicas import GroupBroken

HERE = Rendezvous("127.0.0.1", 4711, 120.0)


class RecordingLearner:
    """Stand-in for the learner actor."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def ready(self) -> ActorInfo:
        return identity()

    def rendezvous(self, timeout_s: float) -> Rendezvous:
        return Rendezvous("127.0.0.1", 4711, timeout_s)

    def join(self, rank: int, size: int, at: Rendezvous) -> None:
        self.place = rank, size, at

    def generate(self, n: int) -> int:
        time.sleep(0.2)
        return os.getpid()

    def load(self, path: str) -> Any:
        self.recorded.append(path)
        if path == "broken":
            if self.place[0] == 1:
                os._exit(1)
            raise GroupBroken("replica 0 of 2 lost the others while waiting")
        if path == "hang":
            time.sleep(600)
        if path == "bad":
            raise ArithmeticError(f"on {self.place[0]}")
        return self.place, self.recorded

    def save(self, path: str) -> Any:
        return self.place, self.recorded
