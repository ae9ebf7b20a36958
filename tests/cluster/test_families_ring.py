"""The ring on tiny pipelines of the other families: loop and actors are the same, only [model]
differs.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cluster.driver.offline import export_run
from configs.prompts import read_prompts
from policy.families import family_for
from policy.sampling.noise import noise_for, stream_seed
from records.images import find_images, load_step
from tests.cluster.runs import run_here, tiny_config, write_edits
from tests.tiny_families import (
    EDITING,
    SETTINGS,
    SOLVER,
    VIDEO,
    as_array,
    stock_call,
    stock_pipeline,
)


def run_of(name: str, directory: Any, root: Any, iterations: int = 1, **more: Any) -> Any:
    """Run the ring with one prompt, 4-in-8, two stages, and the NVFP4 emulation that `auto`
    chooses.

    There is one rollout actor, and evaluations before and after.
    """
    changes: dict[str, Any] = {
        f"model__{key}": value for key, value in {"family": name, **SETTINGS[name]}.items()
    }
    changes |= {
        "iterations": iterations,
        "prompts__per_iteration": 1,
        "explore__chunk_size": 4,
        "services__rollout__actors": 1,
    }
    changes |= {"explore__backend": "auto"}
    changes |= {
        "evaluate__solver": SOLVER[name],
        "evaluate__prompts": 2,
        "evaluate__steps": 3,
        "evaluate__noises": 2,
    }
    if name in EDITING:
        height, width = SETTINGS[name]["height"], SETTINGS[name]["width"]
        file = str(write_edits(root, height, width))
        changes |= {"prompts__train": file, "prompts__test": file}
        changes["rewards__scorers"] = [{"name": "tests.cluster.scorers:Closeness"}]
    return run_here(tiny_config(directory, root, name, ema__decay=0.0, **changes, **more))


@pytest.mark.parametrize(
    "name", [pytest.param("flux", marks=pytest.mark.slow), "flux_kontext", "sana"]
)
def test_the_ring_trains_a_lora_that_the_stock_pipeline_loads(ray_here, request, tmp_path, name):
    directory = request.getfixturevalue(f"tiny_{name}_dir")
    run = run_of(name, directory, tmp_path)
    rows = run.metrics()
    assert [(row["kind"], row["iteration"]) for row in rows] == [
        ("evaluation", 0),
        ("iteration", 0),
        ("evaluation", 1),
    ]
    assert rows[1]["samples_seen"] == 4
    assert rows[1]["policy_version"] == 0
    assert rows[1]["weights/version"] == 1
    assert rows[1]["rewards/failed"] == 0 and 0 < rows[1]["weights/codes_changed"] < 1
    names = [event["event"] for event in run.events()]
    assert names[0] == "run_started"
    assert names[-1] == "run_finished"
    assert names.count("actor_started") == 5
    (chosen,) = [event for event in run.events() if event["event"] == "backend_chosen"]
    assert chosen["backend"] == "emulated_nvfp4"
    assert chosen["why"].startswith("auto: there is no NVFP4 kernel for cpu")
    (selection,) = [json.loads(line) for line in run.selections_file.read_text().splitlines()]
    assert selection
    state = load_file(run.checkpoints / "step_000001" / "ema.safetensors")
    # B starts at zero
    assert all(bool(tensor.abs().max() > 0.01) for key, tensor in state.items() if "lora_B" in key)

    same_as_stock(name, directory, run, tmp_path / "lora", 1)
    shown = find_images(run.images).sources
    assert sorted(shown) == ([0, 1] if name in EDITING else [])


GUIDED = {
    "flux_kontext": {},
    "qwen_image": {"true_cfg_scale": 3.0, "negative_prompt": "a blue cross"},
    "qwen_image_edit": {"true_cfg_scale": 3.0, "negative_prompt": "a blue cross"},
    "z_image": {},
    "flux2": {},
    "flux2_klein": {"guidance_scale": 3.0},
    "wan": {"guidance_scale": 3.0, "negative_prompt": "a blue cross"},
    "sana_video": {},
}
CLIPS = {"explore__frames": 1, "rewards__frames": 2, "model__fps": 4}
"""Families that generate clips explore one frame, and score two of five."""


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDED)
def test_newer_families_train_two_iterations(ray_here, request, tmp_path, name):
    """Guidance is on in every stage, if the pipeline supports it."""
    directory, requested = request.getfixturevalue(f"tiny_{name}_dir"), GUIDED[name]
    stages = ("explore", "regenerate", "train", "evaluate") if requested else ()
    guidance = {f"guidance__{stage}": 3.0 for stage in stages}
    guidance["guidance__negative_prompt"] = requested.get("negative_prompt", "")
    run = run_of(name, directory, tmp_path, 2, **guidance, **(CLIPS if name in VIDEO else {}))
    rows = [row for row in run.metrics() if row["kind"] == "iteration"]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row["rewards/failed"] == 0 for row in rows)
    assert rows[1]["weights/version"] == 2 and 0 < rows[1]["weights/codes_changed"] < 1
    same_as_stock(name, directory, run, tmp_path / "lora", 2, **requested)


def same_as_stock(
    name: str, directory: Any, run: Any, out: Any, updates: int, **requested: Any
) -> None:
    """Check that evaluations equal images of the stock pipeline, before training and with the
    exported LoRA.
    """
    config = run.configuration()
    files = export_run(run, config, out, "ema", None)
    pipe, family = stock_pipeline(name, directory), family_for(config.model)

    def stock() -> np.ndarray:
        images = []
        for p, prompt in enumerate(read_prompts(config.prompts.test)[:2]):
            noise = noise_for(
                [stream_seed(config.seed, "evaluate", p, n) for n in range(2)], family.latent_shape
            )
            drawn = stock_call(pipe, config.model, prompt.text, noise, 3, "pil", **requested)
            images.append(as_array(drawn))
        # of clips, as in the stored images, the middle frame
        images = [one[:, one.shape[1] // 2] if one.ndim == 5 else one for one in images]
        return np.stack(images).astype(int)

    base = stock()
    # other batches, and for SANA another rounding of the solver's coefficients: pixels differ by
    # one grey level where .5 is rounded
    assert np.abs(load_step(run.images, 0).astype(int) - base).max() <= 1
    for file, more in zip(files, ({}, {"load_into_transformer_2": True}), strict=False):
        pipe.load_lora_weights(str(out), weight_name=file, **more)
    with torch.no_grad():
        trained = stock()
    assert np.abs(load_step(run.images, updates).astype(int) - trained).max() <= 1
    assert np.abs(trained - base).mean() > 1  # the LoRA has an effect
