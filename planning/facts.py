"""Facts that ``sol-rl doctor`` collects about a machine, local or a node; independent of Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from configs.paths import exists
from configs.schema import RunConfig
from planning.machine import usable_cores, usable_memory
from planning.preflight import check_model, check_scorers, problems_of
from records.lock import is_locked
from records.rundir import versions
from rewards.server import why_unreachable

GB = 1e9
SMALL_SHM = (
    "/dev/shm is too small for it, and perhaps for NCCL: give the container more (`docker run"
    " --shm-size=16g`; on Kubernetes an emptyDir with `medium: Memory`), then start Ray again"
)
"""What to do where Ray's object store is on a disk."""
SMALL_RAY_DISK = (
    "remove old sessions: at 95 % Ray moves no objects there from a full store, and without room no"
    " actor starts"
)
"""What to do where the disk of Ray's directory is nearly full."""
ANSWER_S = 10.0
"""Seconds in which the server of a scorer must answer."""


@dataclass(frozen=True)
class Facts:
    """What a process can observe of the machine it runs on."""

    host: str
    node: str = ""  # Ray's node id; empty without a cluster
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    cores: int = 0
    free_gb: float = 0.0
    gpus: Mapping[str, int] = field(default_factory=dict[str, int])  # by name
    driver: str = ""
    backends: tuple[str, ...] = ()
    kernels: str = ""  # why packing kernels are missing, if there are GPUs
    servers: Mapping[str, str] = field(default_factory=dict[str, str])  # URL: why it is not reached
    problems: tuple[str, ...] = ()  # with the model and scorers, as a run would report them
    shared: bool | None = None  # True if the driver's file under the run root is visible here
    writable: str = ""  # why the run root cannot be written; empty if it can
    locked: bool = True  # False if the driver's lock under the run root is not seen here
    store_on_disk: str = ""  # directory of Ray's object store; empty if it is in memory
    ray_disk: str = ""  # directory of Ray's logs and its use, if there is little room
    clock: float = 0.0  # seconds it differs from the driver's clock by at least, if known
    bandwidth_mb_s: float | None = None  # when receiving one version of the weights


def examine(config: RunConfig | None = None, mark: str | None = None) -> Facts:
    """Return the facts about the machine of this process.

    ``mark`` is a file that the driver wrote and locked under the run root, to check that it is
    shared.
    """
    import torch

    from policy.precision import kernels
    from policy.precision.backends import available_backends

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    place = "cuda" if names else "cpu"
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    shared, writable = (None, "") if mark is None else _sees(Path(mark))
    return Facts(
        host=socket.gethostname(),
        python=sys.version.split()[0],
        packages=versions(),
        cores=usable_cores(),
        free_gb=min(free, usable_memory()) / GB,
        gpus={name: names.count(name) for name in names},
        driver=_driver(),
        backends=available_backends(place),
        kernels=(kernels.missing(torch.device("cuda")) or "") if names else "",
        servers=silent_servers(config) if config else {},
        problems=tuple(problems_of(config, check_model, check_scorers)) if config else (),
        shared=shared,
        writable=writable,
        locked=not shared or is_locked(Path(mark or "")),
    )


def silent_servers(config: RunConfig) -> dict[str, str]:
    """Return the URLs of scorers that this machine does not reach, with the reasons."""
    reasons = {url: why_unreachable(url, ANSWER_S) for url in server_urls(config)}
    return {url: why for url, why in reasons.items() if why}


def server_urls(config: RunConfig) -> list[str]:
    """Return the URLs to which built-in scorers send images."""
    built_in = [scorer for scorer in config.rewards.all_scorers if ":" not in scorer.name]
    urls = (scorer.settings.get("url") for scorer in built_in)
    return sorted({url for url in urls if isinstance(url, str) and url.startswith("http")})


def _sees(mark: Path) -> tuple[bool, str]:
    try:
        with tempfile.NamedTemporaryFile(dir=mark.parent, prefix=".doctor-"):
            pass
    except OSError as error:
        return exists(mark), error.strerror or str(error)
    return exists(mark), ""


def _driver() -> str:
    with contextlib.suppress(OSError):
        return (
            Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
        )
    return ""
