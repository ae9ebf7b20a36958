"""``sol-rl`` on nodes whose GPUs are names of a resource: ``python -m tests.cluster.named_gpus``.

Rollout actors with a share of one compute on the CPU, which the product never does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from actors.rollout import RolloutActor
from cli.main import main
from cluster.driver.services import ActorServices

spawner = ActorServices._spawner


class OnCpu(RolloutActor):
    """A rollout actor that uses the CPU as its GPU."""

    def __init__(self, *arguments: Any):
        with mock.patch("policy.device.device_for", lambda *_, **__: torch.device("cpu")):
            super().__init__(*arguments)


def on_cpu(self: ActorServices, kind: str, actor: type, *args: object) -> Callable[[str], Any]:
    return spawner(self, kind, OnCpu if actor is RolloutActor else actor, *args)


if __name__ == "__main__":
    # Ray's workers import the class from here; in this process the module is __main__
    from tests.cluster import named_gpus

    with mock.patch.object(ActorServices, "_spawner", named_gpus.on_cpu):
        raise SystemExit(main())
