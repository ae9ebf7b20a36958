"""Generation of the shipped prompt files.

They are JSON lines with ``prompt`` and the scene's metadata, in an order fixed by a hash.
"""

from __future__ import annotations

import json
from pathlib import Path

from shapes.grammar import Scene, hash_order, scenes_of

FOLDER = Path(__file__).parent / "prompts"
# Rows of each kind. The hard kinds only: one object is easy for the model before any RL.
ROWS = {
    "train": {"two": 110, "relation": 220, "count": 30},
    "tune": {"two": 20, "relation": 40, "count": 6},
    "test": {"two": 60, "relation": 88, "count": 12},
}


def rows(split: str) -> list[Scene]:
    """Return the scenes of one prompt file.

    Kinds are evenly mixed, so that the first N rows are a representative sample.
    """
    placed: list[tuple[float, str, Scene]] = []
    for kind, count in ROWS[split].items():
        chosen = sorted(scenes_of(split, kind), key=lambda scene: hash_order(scene.caption))[:count]
        placed += [((index + 0.5) / len(chosen), kind, scene) for index, scene in enumerate(chosen)]
    return [scene for _, _, scene in sorted(placed, key=lambda item: item[:2])]


def text(split: str) -> str:
    """Return the content of the file."""
    return "".join(
        json.dumps({"prompt": scene.caption, **scene.metadata()}) + "\n" for scene in rows(split)
    )


def write() -> None:
    """Write all prompt files to ``shapes/prompts``."""
    FOLDER.mkdir(exist_ok=True)
    for split in ROWS:
        (FOLDER / f"{split}.jsonl").write_text(text(split))
