"""What is run: a pipeline directory with random weights, and the configuration of one iteration."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from configs.load import parse
from configs.schema import RunConfig
from configs.section import Tree
from policy.families.architectures import build, published
from tools.rehearsal.text import write_text_encoders


def config_of(name: str, model: Path, root: Path, pixels: int) -> RunConfig:
    """One prompt, 2 of 4 seeds, a step each; nothing that a small machine must wait for."""
    prompts, others = root / "prompts.txt", root / "held_out.txt"
    prompts.write_text("a red circle\n")
    others.write_text("a blue square\n")
    one = {"actors": 1, "threads": 2, "deadline_s": 3600}
    tree: Tree = {
        "name": f"rehearsal-{name}",
        "run_root": str(root / "runs"),
        "iterations": 1,
        "model": {
            "family": published(name)["family"],
            "path": str(model),
            "height": pixels,
            "width": pixels,
            "max_sequence_length": 32,
        },
        "prompts": {"train": str(prompts), "test": str(others), "per_iteration": 1},
        "explore": {
            **{"pool_size": 4, "steps": 1, "chunk_size": 2, "backend": "emulated_nvfp4"},
            "scale_search": False,
        },
        "selection": {"keep": 2},
        "regenerate": {"steps": 1, "precision": "bf16", "batch_size": 2},
        "evaluate": {"every": 0, "steps": 1, "solver": "euler", "prompts": 1, "noises": 1},
        "rewards": {"scorers": [{"name": "jpeg_compressibility"}]},
        "objective": {"times_per_sample": 1},
        "optimizer": {"batch_size": 1, "gradient_checkpointing": True},
        "services": {
            "rollout": one,
            "learner": {**one, "deadline_s": 6 * 3600},
            "encoder": one,
            "start_deadline_s": 1800,
        },
    }
    return parse(tree)


def write_pipeline(name: str, directory: Path) -> Path:
    """A pipeline directory with random weights."""
    import torch

    model = published(name)
    index: Tree = {"_class_name": model["pipeline"]}
    torch.manual_seed(0)
    for part, dtype in (("transformer", torch.bfloat16), ("vae", torch.float32)):
        module: Any = build(model["parts"][part], "cpu", dtype)
        module.save_pretrained(directory / part)
        index[part] = model["parts"][part]["class"].split(".")
        del module
        gc.collect()
    scheduler = model["parts"]["scheduler"]
    index["scheduler"] = scheduler["class"].split(".")
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler["config"]))
    index |= write_text_encoders(model["family"], directory)
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory
