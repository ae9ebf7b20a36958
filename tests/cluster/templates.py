"""Templates of actor processes (``cluster.runtime.template``), one per namespace: ``python -m
tests.cluster.templates CONFIG NAMESPACE=FOLDER ...``.

All are forks of one that has imported. Each listens at FOLDER/template, where FOLDER stands in for
/tmp/ray. They end with standard input.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from cluster.runtime import template
from configs.load import parse
from tests.cluster.machine import own_mounts
from tests.cluster.wire import enter

SOCKET = "template"


def serve(namespace: str, folder: str, config: str) -> None:
    """Serve as the template of a namespace."""
    enter(namespace)
    own_mounts({folder: "/tmp/ray"})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{SOCKET}")
        listener.listen(64)
        sys.argv[1:] = [str(listener.detach()), config]
    template.main()


def main(config: str, *places: str) -> None:
    template.import_for(parse(json.loads(config)))
    children: list[int] = []
    for namespace, folder in (place.split("=") for place in places):
        Path(folder).mkdir(parents=True, exist_ok=True)
        if pid := os.fork():
            children.append(pid)
            continue
        try:
            serve(namespace, folder, config)
        finally:
            os._exit(0)  # its forks return here too, after they were workers
    print(*children, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
