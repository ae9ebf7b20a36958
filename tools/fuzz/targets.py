"""A *target* hands one made-up input to the code that reads it, and says what must hold.

Inputs come from hypothesis, which also makes a failing one small.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from configs.load import ConfigError, load, parse
from configs.prompts import read_prompts
from records.rundir import RunDirectory
from rewards import check_settings
from rewards.base import ScorerError, ScorerSetupError, check
from rewards.server import decode
from tools.fuzz.inputs import TOML, json_values, keys, of_files, safetensors, spoiled, words
from tools.fuzz.promises import Wrong, command, finite, in_time, refused

RUNS = Path(__file__).parent.parent.parent / "tests" / "data" / "runs"


@dataclass(frozen=True)
class Target:
    """Inputs of one kind, and what must hold for each, in a folder of its own."""

    inputs: st.SearchStrategy[Any]
    holds: Callable[[Path, Any], None]
    cost: int = 1  # how many times slower than the quickest: so many fewer inputs


# ---- configurations


def one_override(folder: Path, given: tuple[str, str]) -> None:
    """`config quickstart --set KEY=VALUE`; what is accepted reads back as the same."""
    shown = command("config", "quickstart", "--set", f"{given[0]}={given[1]}")
    if shown:
        finite(json.loads(shown))
        config = load("quickstart", [f"{given[0]}={given[1]}"])
        if parse(config.model_dump(mode="json")) != config:
            raise Wrong(f"{given} does not read back as it was written")


def toml_file(folder: Path, data: bytes) -> None:
    """`config FILE.toml`."""
    (folder / "x.toml").write_bytes(data)
    shown = command("config", str(folder / "x.toml"))
    if shown:
        finite(json.loads(shown))


def command_line(folder: Path, given: list[str]) -> None:
    """Words after commands that start nothing; paths in them lead into an empty folder."""
    command(*(word.replace("/", "_") if word[:1] == "/" else word for word in given))


# ---- files


def prompt_file(folder: Path, given: tuple[str, bytes]) -> None:
    """A prompt file of either kind."""
    path = folder / f"prompts{given[0]}"
    path.write_bytes(given[1])
    with refused(ConfigError):
        for prompt in read_prompts(str(path)):
            if not prompt.text.strip():
                raise Wrong("an empty prompt was accepted")


def lora_file(folder: Path, data: bytes) -> None:
    """A LoRA to start from."""
    from policy.lora_files import FILE, load_diffusers_lora

    (folder / FILE).write_bytes(data)
    with refused(ValueError, FileNotFoundError):
        load_diffusers_lora(str(folder))


def checkpoint_file(folder: Path, given: tuple[str, bytes]) -> None:
    """A checkpoint of which one file is another."""
    from learner.checkpoint import CheckpointError, read

    (source,) = example_run().glob("checkpoints/step_*")
    there = copied(source, folder / "step_000002")
    (there / given[0]).write_bytes(given[1])
    with refused(CheckpointError):
        read(there)


def pipeline_file(folder: Path, given: tuple[str, bytes]) -> None:
    """A pipeline directory in which one JSON file is another."""
    from planning.preflight import check_model
    from policy.families.pipeline import SHAPES_DIRECTORY as MODEL

    there = folder / "model"
    if not there.exists():
        there.mkdir()
        for path in MODEL.rglob("*"):
            if path.is_dir():
                (there / path.relative_to(MODEL)).mkdir(exist_ok=True)
            else:
                (there / path.relative_to(MODEL)).symlink_to(path)
    target = there / given[0]
    kept = target.resolve()
    target.unlink()
    target.write_bytes(given[1])
    try:
        with refused(ConfigError):
            check_model(load("quickstart", [f"model.path={there}"]))
    finally:
        target.unlink()
        target.symlink_to(kept)


def run_directory(folder: Path, given: tuple[str, bytes]) -> None:
    """`report RUN` of a run directory in which one file is another."""
    there = copied(example_run(), folder / "run")
    (there / given[0]).write_bytes(given[1])
    command("report", str(there), codes=(0, 2, 3))
    with refused(ConfigError):
        RunDirectory(there).configuration()


# ---- scorers


def scorer_settings(folder: Path, given: tuple[str, dict[str, object]]) -> None:
    """A scorer's name and settings, as they are checked before a start."""
    from configs.rewards import Scorer

    with refused(ScorerSetupError):
        check_settings(Scorer(name=given[0], settings=given[1]))


def server_answer(folder: Path, body: bytes) -> None:
    """What a reward server answers with status 200."""
    with refused(ScorerError):
        scores = decode(body, 3)
        if scores.shape != (3,) or scores.dtype != np.float32:
            raise Wrong(f"{scores.dtype} {scores.shape}")


def scorer_answer(folder: Path, answer: object) -> None:
    """What a scorer in Python returns: scores that are finite or missing, with a word for those."""
    with in_time():
        scores, problem = check(answer, 3)
    if scores.shape != (3,) or np.isinf(scores).any():
        raise Wrong(f"{answer!r} became {scores}")
    if np.isnan(scores).any() and not problem:
        raise Wrong(f"{answer!r} lacks a score, and nobody says so")


def copied(source: Path, target: Path) -> Path:
    """A fresh copy, in place of the one of the input before."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def example_run() -> Path:
    """The newest run directory kept for tests."""
    return sorted(RUNS.glob("*/*"))[-1]


def targets() -> dict[str, Target]:
    """All targets by name."""
    from policy.families.pipeline import SHAPES_DIRECTORY as MODEL
    from rewards import SCORERS

    run = example_run()
    (step,) = run.glob("checkpoints/step_*")
    lines = sorted(run.rglob("*.json*"))
    pipeline = sorted(p for p in MODEL.rglob("*.json") if "tokenizer" not in str(p))
    some = st.sampled_from(
        ["quickstart", "--set", "--json", "--resume", "seed=1", "x", "--help", ""]
    )
    starts_nothing = st.sampled_from(["config", "report", "export", "evaluate", "fidelity", "nope"])
    return {
        "set": Target(st.tuples(st.sampled_from(keys()), words), one_override),
        "toml": Target(spoiled(TOML) | st.binary(max_size=40), toml_file),
        "command line": Target(
            st.builds(
                lambda first, rest: [first, *rest],
                starts_nothing,
                st.lists(
                    some.filter(lambda w: w != "quickstart") | st.text(max_size=5), max_size=4
                ),
            ),
            command_line,
            cost=2,
        ),
        "prompts": Target(
            st.tuples(
                st.sampled_from([".txt", ".jsonl", ".json", ""]),
                st.one_of(
                    st.binary(max_size=40),
                    st.lists(json_values, max_size=3).map(
                        lambda rows: "\n".join(map(json.dumps, rows)).encode()
                    ),
                    spoiled(b'{"prompt": "a cat", "tag": "x"}\n{"prompt": "a dog"}\n'),
                ),
            ),
            prompt_file,
        ),
        "lora": Target(safetensors, lora_file),
        "checkpoint": Target(of_files(sorted(step.iterdir()), step), checkpoint_file, cost=2),
        "pipeline": Target(of_files(pipeline, MODEL), pipeline_file, cost=20),
        "run directory": Target(of_files(lines, run), run_directory, cost=40),
        "scorer settings": Target(
            st.tuples(
                st.sampled_from([*SCORERS, "a:b", ":", "x.y:z"]) | st.text(max_size=8),
                st.dictionaries(
                    st.sampled_from(
                        ["url", "timeout_s", "retries", "checkpoint", "device", "model"]
                    )
                    | st.text(max_size=5),
                    json_values | words,
                    max_size=3,
                ),
            ),
            scorer_settings,
        ),
        "server answer": Target(
            st.one_of(
                st.binary(max_size=60),
                json_values.map(lambda v: json.dumps(v).encode()),
                json_values.map(lambda v: json.dumps({"scores": v}).encode()),
                st.lists(json_values, min_size=3, max_size=3).map(
                    lambda v: json.dumps({"scores": v}).encode()
                ),
            ),
            server_answer,
        ),
        "scorer answer": Target(
            json_values | st.lists(st.floats() | st.integers(), min_size=3, max_size=3),
            scorer_answer,
        ),
    }
