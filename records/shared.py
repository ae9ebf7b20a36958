"""Files that another node wrote to shared storage, which may appear here with a delay or never."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from configs.load import ConfigError
from records.rundir import RunDirectory
from records.storage import exists, expect

TRIES, PAUSE_S = 75, 1.0
"""How often to look for another node's file. NFS keeps what it knows of a directory, also that a
name does not exist, for up to a minute by default (``acdirmax``).
"""


def appears(path: Path) -> bool:
    """Wait until ``path`` exists here; return False if it does not within ``TRIES`` pauses.

    Time in which storage does not answer is not counted.
    """
    for _ in range(TRIES):
        if exists(path):
            return True
        # an NFS client asks the server again about a directory that is opened
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        time.sleep(PAUSE_S)
    return exists(path)


def require_shared(run: Path) -> None:
    """Raise ConfigError unless this node sees the driver's run directory and can write to it.

    From now on the directory counts as away while it is missing.
    """
    rundir, here = RunDirectory(run), socket.gethostname()
    if not appears(rundir.config_file):
        raise ConfigError(
            f"{run} on {here} is not the driver's run directory (it has no"
            f" {rundir.config_file.name}): mount the same directory on all nodes and set run_root"
            " to it"
        )
    expect(rundir.config_file)
    with contextlib.suppress(OSError):  # stores of objects show empty directories to nobody else
        rundir.checkpoints.mkdir(exist_ok=True)
    if not os.access(rundir.checkpoints, os.W_OK | os.X_OK):
        raise ConfigError(f"{rundir.checkpoints} cannot be written on {here}: grant write access")
