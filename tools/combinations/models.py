"""The tiny models of ``make combinations``, one or more per family."""

from __future__ import annotations

import importlib
import json
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

STAGES = ("encoder_block_out_channels", "block_out_channels", "dim_mult")
"""Settings of autoencoders that have an item per resolution."""


def make(name: str, out: Path) -> Path:
    """Return the pipeline directory of a model below ``out``, which is written if it is missing."""
    path = out / "models" / name
    if not (path / "model_index.json").exists():
        module, arguments = VARIANTS.get(name, (name, {}))
        maker = getattr(importlib.import_module(f"tests.tiny_{module}"), f"make_tiny_{module}")
        maker(path, **arguments)
    return path


def changes(name: str, path: Path, out: Path, scale: int) -> Tree:
    """Return the tables of a configuration that depend on the model.

    The sides of images are ``scale`` times those of the tests.
    """
    from tests.cluster.runs import write_edits
    from tests.tiny_families import EDITING, SETTINGS

    family = name if name in SETTINGS else "wan"
    settings = SETTINGS[family]
    sides = {side: scale * settings[side] for side in ("height", "width")}
    tables: Tree = {"model": {"family": family, "path": str(path), **settings, **sides}}
    tables["explore"] = {"decoder_path": _tiny_decoder(path)}
    if name in EDITING:
        file = write_edits(out / "edits" / f"{name}-{scale}", **sides)
        prompts = {"train": str(file), "test": str(file), "per_iteration": 2}
        tables["prompts"] = {**prompts, "allow_overlap": True}
        tables["rewards"] = {"scorers": [{"name": "tests.cluster.scorers:Closeness"}]}
    return tables


def _tiny_decoder(path: Path) -> str:
    """Return the directory of a random AutoencoderTiny for a model's latents."""
    from tests.tiny_decoder import write_tiny_decoder

    vae = json.loads((path / "vae/config.json").read_text())
    stages = next(len(vae[key]) for key in STAGES if key in vae)
    channels = vae.get("latent_channels") or vae["z_dim"]
    return write_tiny_decoder(path / "tiny_decoder", channels, stages)
