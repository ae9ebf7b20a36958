"""Claims of drivers on a run directory: the newest one has it.

A lock that another machine does not see, as on most mounts of object stores, lets a second driver
start. Claims are files with names of their own, because storage may show an old content of a file
for minutes, but a new name in a listing soon.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path

from records.lock import this_process
from records.storage import retried

NAME = re.compile(r"claim-(\d{1,9})-[0-9a-f]{8}")
LOOK_S = 1.0
"""Seconds for which a look at the directory counts."""


class Claim:
    """A driver's claim on a run directory.

    Of two drivers that claim it at the same moment the one with the later name has it.
    """

    def __init__(self, directory: Path):
        self._directory, self._looked = directory, float("-inf")
        self._lost = False
        earlier = _claims(directory)
        number = max((each[0] for each in earlier), default=0) + 1
        self._key = (number, f"claim-{number:06d}-{secrets.token_hex(4)}")
        (directory / self._key[1]).write_text(this_process())
        for _, name in earlier:
            with contextlib.suppress(OSError):
                (directory / name).unlink()

    @property
    def lost(self) -> bool:
        """True if another driver has claimed the directory since: as of at most a second ago."""
        if not self._lost and time.monotonic() - self._looked > LOOK_S:
            self._lost = any(key > self._key for key in _claims(self._directory))
            self._looked = time.monotonic()
        return self._lost

    def holder(self) -> str:
        """Return who has claimed the directory last."""
        text = ""
        # ValueError: damaged text; IndexError: somebody has removed all claims
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, name = _claims(self._directory)[-1]
            text = (self._directory / name).read_text().strip()
        return text or "another driver"


@retried
def _claims(directory: Path) -> list[tuple[int, str]]:
    """Return (number, file name) of every claim."""
    found = (NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted((int(each[1]), each[0]) for each in found if each)
