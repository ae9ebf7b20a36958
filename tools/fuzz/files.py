"""Targets for the input files of a run: prompts, a LoRA, a checkpoint, a pipeline."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from configs.load import ConfigError, load
from configs.prompts import read_prompts
from records.rundir import RunDirectory
from tools.fuzz.damage import Change, changes
from tools.fuzz.inputs import json_values, lora_tensors, of_files, safetensors, spoiled
from tools.fuzz.invariants import InvariantViolation, allowed_errors
from tools.fuzz.target import Target, copied, example_run

if TYPE_CHECKING:
    from learner.trainer import Trainer


def prompt_file(folder: Path, example: tuple[str, bytes]) -> None:
    """Read a prompt file, either text or JSON lines."""
    path = folder / f"prompts{example[0]}"
    path.write_bytes(example[1])
    with allowed_errors(ConfigError):
        for prompt in read_prompts(str(path)):
            if not prompt.text.strip():
                raise InvariantViolation("an empty prompt was accepted")


def lora_file(folder: Path, data: bytes) -> None:
    """Load a LoRA to start training from."""
    from policy.families import family_for
    from policy.initial_lora import read_lora
    from policy.lora_files import FILE

    (folder / FILE).write_bytes(data)
    with allowed_errors(ValueError, FileNotFoundError):
        read_lora(str(folder), family_for(load("quickstart").model))


def lora_names(folder: Path, example: tuple[str, dict[str, list[int]]]) -> None:
    """Load a LoRA of another program for one of the families."""
    import torch
    from safetensors.torch import save_file

    from policy.families import FAMILIES
    from policy.initial_lora import read_lora

    family, shapes = example
    save_file({key: torch.ones(shape) for key, shape in shapes.items()}, folder / "lora")
    with allowed_errors(ValueError):
        # without a model: the reader needs only the class of the pipeline
        read_lora(folder / "lora", object.__new__(FAMILIES[family]))


def checkpoint_file(folder: Path, change: Change) -> None:
    """Load a checkpoint with one damaged file; the learner accepts it or raises CheckpointError."""
    from learner.checkpoint import CheckpointError

    (source,) = example_run().glob("checkpoints/step_*")
    copy = copied(source, folder / "step_000002")
    change.make(copy)
    with allowed_errors(CheckpointError):
        learner().load(copy)


@functools.cache
def learner() -> Trainer:
    """Return a learner for the configuration of the run that the checkpoint comes from."""
    from learner.trainer import Trainer

    return Trainer(RunDirectory(example_run()).configuration())


def pipeline_file(folder: Path, example: tuple[str, bytes]) -> None:
    """Check a pipeline directory in which one JSON file is replaced."""
    from planning.preflight import check_model
    from policy.families.files import SHAPES_DIRECTORY as MODEL

    copy = folder / "model"
    if not copy.exists():
        copy.mkdir()
        for path in MODEL.rglob("*"):
            if path.is_dir():
                (copy / path.relative_to(MODEL)).mkdir(exist_ok=True)
            else:
                (copy / path.relative_to(MODEL)).symlink_to(path)
    target = copy / example[0]
    original = target.resolve()
    target.unlink()
    target.write_bytes(example[1])
    try:
        with allowed_errors(ConfigError):
            check_model(load("quickstart", [f"model.path={copy}"]))
    finally:
        target.unlink()
        target.symlink_to(original)


def targets() -> dict[str, Target]:
    """Return the targets for the input files of a run."""
    from policy.families import FAMILIES
    from policy.families.files import SHAPES_DIRECTORY as MODEL

    (step,) = example_run().glob("checkpoints/step_*")
    pipeline = sorted(p for p in MODEL.rglob("*.json") if "tokenizer" not in str(p))
    rows = st.lists(json_values, max_size=3)
    return {
        "prompts": Target(
            st.tuples(
                st.sampled_from([".txt", ".jsonl", ".json", ""]),
                st.one_of(
                    st.binary(max_size=40),
                    rows.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
                    spoiled(b'{"prompt": "a cat", "tag": "x"}\n{"prompt": "a dog"}\n'),
                ),
            ),
            prompt_file,
        ),
        "lora": Target(safetensors, lora_file),
        "lora-names": Target(
            st.tuples(st.sampled_from(sorted(FAMILIES)), lora_tensors), lora_names
        ),
        "checkpoint": Target(changes(step), checkpoint_file, cost=2),
        "pipeline": Target(of_files(pipeline, MODEL), pipeline_file, cost=20),
    }
