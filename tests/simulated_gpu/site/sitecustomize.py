"""Gives torch a simulated GPU when it is imported, in every Python that has this on its path.

``SIMULATED_GPU`` is the capability, such as 10.0, a colon, and the path of the library.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Torch(importlib.abc.MetaPathFinder):
    """Finds torch as it is, and installs the GPU after it has been imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return torch's specification with another last step, and None for other modules."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            from tests.simulated_gpu.install import install

            capability, _, library = os.environ["SIMULATED_GPU"].partition(":")
            major, minor = map(int, capability.split("."))
            install(Path(library), (major, minor))

        spec.loader.exec_module = execute_and_install
        return spec


if os.environ.get("SIMULATED_GPU"):
    sys.meta_path.insert(0, Torch())
