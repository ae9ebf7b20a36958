"""Small real runs of the ring for tests: a random SD3, a JPEG reward, three updates in seconds."""

import asyncio
import json
from pathlib import Path
from typing import Any

from cli.main import main
from cluster.driver.session import Session
from configs.load import parse
from configs.prompts import read_prompts
from configs.schema import RunConfig
from records.images import png_bytes
from records.rundir import RunDirectory
from tests.cluster.hosts import hosted
from tests.tiny_families import source_for

EDITS = ("a red circle", "a blue cross", "a red circle", "two squares")


def tiny_config(model: Path, root: Path, name: str, **changes: Any) -> RunConfig:
    """Return three iterations of 2 prompts, 4-in-8, on the tiny model.

    ``changes``: dotted keys, with double underscores in place of the dots.
    """
    prompts = root / "prompts.txt"
    prompts.write_text("red circle\nblue square\ntwo cross\nred square above blue circle\n")
    tree: dict[str, Any] = {
        "name": name,
        "run_root": str(root / "runs"),
        "seed": 7,
        "iterations": 3,
        "model": {"path": str(model), "height": 16, "width": 16, "max_sequence_length": 8},
        "prompts": {
            "train": str(prompts),
            "test": str(prompts),
            "per_iteration": 2,
            "allow_overlap": True,
        },
        "explore": {"pool_size": 8, "steps": 2, "chunk_size": 2, "backend": "emulated_nvfp4"},
        "selection": {"keep": 4},
        "regenerate": {"steps": 3, "precision": "fp32"},
        "evaluate": {
            "every": 0,
            "steps": 2,
            "solver": "euler",
            "prompts": 4,
            "noises": 2,
            "batch_size": 4,
            # otherwise the part of an iteration that is done before its turn would change from run
            # to run, and with it the moments at which faults are injected
            "explore_meanwhile": False,
        },
        "rewards": {"scorers": [{"name": "jpeg_compressibility"}]},
        "objective": {"times_per_sample": 2},
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"lr": 0.05, "batch_size": 8},
        "old_policy": {"schedule": "constant", "value": 0.3},
        "logging": {"grid_prompts": 2, "report_every_s": 0},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return parse(tree)


def write_edits(root: Path, height: int, width: int) -> Path:
    """Write four prompts that edit images of their own, and return their file."""
    folder, lines = root / "sources", list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(EDITS):
        words = text if text not in EDITS[:number] else "the same about another image"
        (folder / f"{number}.png").write_bytes(png_bytes(source_for(words, height, width)))
        lines.append(json.dumps({"prompt": text, "image": f"sources/{number}.png"}) + "\n")
    file = root / "edits.jsonl"
    file.write_text("".join(lines))
    return file


def write_toml(config: RunConfig, root: Path) -> Path:
    """Write a configuration as a TOML file."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return (
                "{"
                + ", ".join(f"{key} = {value(v)}" for key, v in item.items() if v is not None)
                + "}"
            )
        if isinstance(item, list):
            return "[" + ", ".join(value(v) for v in item) + "]"
        return json.dumps(item)

    tree = config.model_dump(mode="json")
    path = root / f"{config.name}.toml"
    path.write_text(
        "".join(f"{key} = {value(item)}\n" for key, item in tree.items() if item is not None)
    )
    return path


def run_here(config: RunConfig, resume: bool = False, progress: Any = None) -> RunDirectory:
    """Run a session on the running Ray, in processes that stay for the next run
    (``tests.cluster.hosts``).
    """
    rundir = RunDirectory.of(config)
    if not resume:
        rundir.create(config)
    prompts = read_prompts(config.prompts.train)
    with hosted():
        session = Session(config, rundir, prompts, prompts[: config.evaluate.prompts], progress)
        if progress is not None:
            progress.session = session
        asyncio.run(session.run(resume))
    undeclared = [row["metric"] for row in rundir.events() if row["event"] == "metric_undeclared"]
    assert undeclared == [], "records.metrics.METRICS lacks these"
    return rundir


def main_here(*arguments: Any) -> int:
    """Return the exit code of a command, run in this process on the running Ray."""
    with hosted():
        return main([str(argument) for argument in arguments])


def adapters(rundir: RunDirectory, step: int) -> dict[str, bytes]:
    """Return the bytes of every safetensors file of a checkpoint."""
    return {
        path.name: path.read_bytes()
        for path in sorted((rundir.checkpoints / f"step_{step:06d}").glob("*.safetensors"))
    }


def selections(rundir: RunDirectory) -> list[Any]:
    """Return the selections, iteration by iteration."""
    return [json.loads(line) for line in rundir.selections_file.read_text().splitlines()]
