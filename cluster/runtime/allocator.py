"""Host memory by jemalloc, which Ray's wheel brings, in processes that compute on CPUs.

All requests of torch are aligned, and before version 2.38 glibc cannot give such a request the
block of the same size that was just freed: half of what a learner holds are holes between blocks.
It also gives pages back that the next pass needs again. jemalloc does neither, as it is set here.
Which library hands out memory changes no bit of a result.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

LIBRARY = "core/libjemalloc.so"
"""In Ray's package."""
SETTINGS = "narenas:1,dirty_decay_ms:-1,tcache:false"
"""One arena, as one thread allocates nearly all; freed pages are kept for the next pass. No caches
of freed blocks by thread, as Ray starts some thirty threads in a process.
"""


def variables() -> dict[str, str]:
    """What a process is started with to have jemalloc. Nothing where ``LD_PRELOAD`` is set, whose
    owner has chosen, and where Ray's build for this machine brings no jemalloc.
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
