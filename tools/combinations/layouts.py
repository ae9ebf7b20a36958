"""Random layouts of a run on simulated GPUs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.section import Tree
from planning.assumptions import ACCELERATORS
from planning.layouts.gpus import Gpus
from planning.layouts.recomputation import with_recomputation
from planning.layouts.resolve import keep_layout, resolve_layout
from planning.plan import open_architecture
from tools.combinations.draw import configured

MODES = ("auto", "shared", "split")
CPUS, GPUS = 32, 8
"""Numbers of CPUs and GPUs of all nodes."""
KINDS = {"9.0": "H200", "10.0": "B200"}
"""Kind of the GPUs, by their compute capability."""


def simulated(kinds: Sequence[str]) -> list[Gpus]:
    """Return as many GPUs of each of these kinds."""
    count = GPUS // max(1, len(kinds))
    return [Gpus(kind, count, ACCELERATORS[kind].memory_gb, CPUS / GPUS) for kind in kinds]


def draw_layout(
    rng: random.Random,
    base: Tree,
    settings: Sequence[str],
    gpus: Sequence[Gpus],
    recorded: RunConfig | None = None,
) -> tuple[list[str], RunConfig]:
    """Return (overrides that ask for a random layout, the configuration with its numbers).

    ``recorded``: the run whose results must be repeated on other GPUs, as ``--resume`` would. A
    layout that does not fit is drawn again.
    """
    requests = [(mode, count) for mode in MODES for count in range(1, GPUS + 1)]
    why: ConfigError | None = None
    for mode, count in rng.sample(requests, len(requests)):
        overrides = [f"layout.mode={json.dumps(mode)}", f"layout.gpus={count}"]
        config = configured(base, [*settings, *overrides])
        if recorded is not None:
            config = keep_layout(config, recorded)
        try:
            return overrides, resolved(config, gpus)
        except ConfigError as error:
            why = error
    assert why is not None
    raise why


def resolved(config: RunConfig, gpus: Sequence[Gpus]) -> RunConfig:
    """Return a configuration with the numbers of its layout. Raises ConfigError if none fits."""
    with open_architecture(config) as (family, _):
        return resolve_layout(with_recomputation(config, family, gpus), family, gpus).config
