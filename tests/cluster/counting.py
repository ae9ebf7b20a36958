"""An actor that imports next to nothing, so that its processes start at once."""

import os
import time

from actors.messages import ActorInfo
from actors.runtime import identity


class Counter:
    """An actor that writes down every task it computes."""

    def __init__(self, path: str, broken: bool):
        if broken:
            raise ValueError("no such weights")
        self.path = path

    def ready(self) -> ActorInfo:
        return identity()

    def work(self, unit: int) -> tuple[int, int]:
        time.sleep(0.02)
        with open(self.path, "a") as file:
            file.write(f"{unit}\n")
        return unit, os.getpid()
