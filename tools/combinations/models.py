"""The tiny models of ``make combinations``, one or more per family."""

from __future__ import annotations

import importlib
from pathlib import Path

from configs.section import Tree

VARIANTS = {
    "flux_kontext": ("flux", {"kontext": True}),
    "qwen_image_edit": ("qwen_image", {"edit": True}),
    "flux2_klein": ("flux2", {"klein": True}),
    "wan22": ("wan", {"wan22": True}),
    "wan_experts": ("wan", {"experts": True}),
}
"""Models made by the function of another one, with an argument."""
MODELS = (
    *("sd3", "flux", "sana", "qwen_image", "z_image", "flux2", "wan", "sana_video"),
    *VARIANTS,
)


def make(name: str, out: Path) -> Path:
    """Return the pipeline directory of a model below ``out``, which is written if it is missing."""
    path = out / "models" / name
    if not (path / "model_index.json").exists():
        module, arguments = VARIANTS.get(name, (name, {}))
        maker = getattr(importlib.import_module(f"tests.tiny_{module}"), f"make_tiny_{module}")
        maker(path, **arguments)
    return path


def changes(name: str, path: Path, out: Path) -> Tree:
    """Return the tables of a configuration that depend on the model."""
    from tests.cluster.runs import write_edits
    from tests.tiny_families import EDITING, SETTINGS

    family = name if name in SETTINGS else "wan"
    settings = SETTINGS[family]
    tables: Tree = {"model": {"family": family, "path": str(path), **settings}}
    if name in EDITING:
        file = write_edits(out / "edits" / name, settings["height"], settings["width"])
        prompts = {"train": str(file), "test": str(file), "per_iteration": 2}
        tables["prompts"] = {**prompts, "allow_overlap": True}
        tables["rewards"] = {"scorers": [{"name": "tests.cluster.scorers:Closeness"}]}
    return tables
