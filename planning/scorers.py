"""Bytes of the reward models, from their architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from configs.rewards import Scorer


def scorer_bytes(scorer: Scorer) -> int | None:
    """Bytes of a built-in scorer's model; 0 for one without, None where it cannot be known without
    loading it.
    """
    from rewards.paired import DTYPES as WIDTHS

    given = scorer.settings.get("architecture")
    width = WIDTHS.get(str(scorer.settings.get("dtype", "fp32")), torch.float32).itemsize
    with torch.device("meta"):
        match scorer.name:
            case "clipscore" | "hpsv2":
                model = _open_clip(scorer, given)
                if model is None:
                    return None
            case "pickscore":
                from transformers import CLIPConfig, CLIPModel

                from rewards.pickscore import ARCHITECTURE

                model = CLIPModel(CLIPConfig(**(given or ARCHITECTURE)))
            case "imagereward":
                from rewards.imagereward import Judge

                model = Judge((given or {}).get("vision", {}), (given or {}).get("text", {}))
            case "shapes" | "http" | "jpeg_compressibility" | "jpeg_incompressibility":
                return 0
            case _:
                return None
    return sum(parameter.numel() for parameter in model.parameters()) * width


def _open_clip(scorer: Scorer, given: Any) -> torch.nn.Module | None:
    """The two towers; a description beside a local checkpoint counts, as it does for the scorer
    itself.

    None where a checkpoint of the shipped tree has not been built.
    """
    import open_clip

    from rewards.checkpoints import ROOT
    from rewards.openclip import CONFIG, ClipScore, HPSv2

    checkpoint = Path(str(scorer.settings.get("checkpoint", "")))
    folders = [
        folder
        for path in (checkpoint, ROOT / checkpoint)
        for folder in (path, path.parent)
        if (folder / CONFIG).is_file()
    ]
    beside = json.loads((folders[0] / CONFIG).read_text())["model_cfg"] if folders else None
    if not given and not beside and str(checkpoint).startswith("shapes/"):
        return None
    wanted = given or beside or {"clipscore": ClipScore, "hpsv2": HPSv2}[scorer.name].default
    found = open_clip.get_model_config(wanted) if isinstance(wanted, str) else wanted
    return open_clip.CLIP(
        **{key: value for key, value in (found or {}).items() if key != "custom_text"}
    )
