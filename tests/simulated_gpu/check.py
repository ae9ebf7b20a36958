"""Sections of ``make gpu-check`` on the simulated GPU, with small models and without compiling.

Run as ``python -m tests.simulated_gpu.check LIBRARY``; prints a JSON object per section: how many
findings it has, and what it left out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import architectures
from bench.gpu_check import setting
from bench.gpu_check.findings import Finding
from bench.gpu_check.sections import SECTIONS
from tests.simulated_gpu.install import install

LEFT_OUT = ("kernels", "shapes", "tests")
"""Sections of the kernels themselves, and one that needs no GPU."""
LIMIT_S = 600.0


def small_case(self: Any, name: str, pixels: int | None = None) -> Any:
    """Return a small form of a published architecture, in the place of ``Setting.case``."""
    return architectures.case_of(name, setting.SMALL_PIXELS, True)


def on_host(build: Any) -> Any:
    """Return a function that builds a model on the CPU and moves it, as its seeds are the CPU's."""

    def moved(what: Any, device: Any, dtype: Any, *small: bool) -> Any:
        # whether an autoencoder is to be small; here it always is
        return build(what, torch.device("cpu"), dtype, *(True for _ in small)).to(device)

    return moved


def main(library: str) -> None:
    """Run the sections as where there is a GPU."""
    torch.set_num_threads(1)
    install(Path(library), capability=(10, 0))
    fork = torch.random.fork_rng
    replaced = {"autoencoder": on_host(setting.autoencoder), "build": on_host(setting.build)}
    modules = [m for name, m in sys.modules.items() if name.startswith("bench.gpu_check.")]
    for module in modules:
        for name, other in replaced.items():
            if hasattr(module, name):
                setattr(module, name, other)
    with (
        mock.patch.object(setting.Setting, "case", small_case),
        mock.patch.object(torch.random, "fork_rng", lambda devices=None, **more: fork([], **more)),
        mock.patch.object(torch, "compile", lambda module, **_: module),
    ):
        for name, section in SECTIONS.items():
            if name not in LEFT_OUT:
                items = section.measure(
                    setting.Setting(True, time.monotonic() + LIMIT_S, once=True)
                )
                found = list(items)
                left = [str(each) for each in found if not isinstance(each, Finding)]
                print(json.dumps({"section": name, "items": len(found), "left": left}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
