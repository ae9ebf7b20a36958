"""Use of jemalloc, which is part of Ray's wheel, in processes that compute on CPUs.

All allocations of torch are aligned, and before version 2.38 glibc cannot reuse a freed block of
the same size for an aligned allocation: half of a learner's memory would be gaps between blocks.
It also returns pages to the system that the next pass needs again. jemalloc does neither with the
settings below. The allocator does not change results.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

LIBRARY = "core/libjemalloc.so"
"""Path of the library in Ray's package."""
SETTINGS = "narenas:1,dirty_decay_ms:-1,tcache:false"
"""Settings of jemalloc.

There is one arena, because one thread makes nearly all allocations, and freed pages are kept for
the next pass. There are no caches per thread, because Ray starts about thirty threads per process.
"""


def variables() -> dict[str, str]:
    """Return the environment variables with which a process starts to use jemalloc.

    Empty if the user has set ``LD_PRELOAD``, or if Ray's build for this machine has no jemalloc.
    """
    library = _library()
    if os.environ.get("LD_PRELOAD") or library is None:
        return {}
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": os.environ.get("MALLOC_CONF", SETTINGS)}


def _library() -> Path | None:
    found = importlib.util.find_spec("ray")
    # builds for other machines fail where pages are larger than on the machine that built them
    if found is None or found.origin is None or platform.machine() != "x86_64":
        return None
    library = Path(found.origin).parent / LIBRARY
    return library if library.exists() else None
