"""After training: export to stock diffusers; evaluation of base, current, old and EMA weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli.main import main
from cluster.driver.evaluation import Evaluation, clustered_error
from configs.prompts import read_prompts
from policy.families import family_for
from policy.families.sd3 import SD3
from policy.sampling.noise import noise_for, stream_seed
from records.images import load_step
from tests.cluster.runs import main_here


def stock_images(config, lora=None) -> np.ndarray:
    """Return images of the evaluation's prompts and noises by diffusers' own pipeline.

    The result is uint8 [P, S, 3, H, W]; only the noises are computed by the project.
    """
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(config.model.path, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    settings, shape, rows = config.evaluate, family_for(config.model).latent_shape, []
    for p, prompt in enumerate(read_prompts(config.prompts.test)[: config.logging.grid_prompts]):
        images = pipe(
            prompt.text,
            num_images_per_prompt=settings.noises,
            height=config.model.height,
            width=config.model.width,
            num_inference_steps=settings.steps,
            sigmas=np.linspace(1, 1 / settings.steps, settings.steps).tolist(),
            guidance_scale=1.0,
            max_sequence_length=config.model.max_sequence_length,
            latents=noise_for(
                [stream_seed(config.seed, "evaluate", p, n) for n in range(settings.noises)], shape
            ),
            output_type="np",
        ).images
        rows.append(np.round(images * 255).astype(np.uint8).transpose(0, 3, 1, 2))
    return np.stack(rows)


def test_an_exported_lora_generates_the_evaluated_images_in_stock_diffusers(
    undisturbed, tmp_path, capsys
):
    config = undisturbed.configuration()
    assert main(["export", str(undisturbed.path), str(tmp_path / "lora")]) == 0
    ours = load_step(undisturbed.images, 3).astype(int)
    theirs = stock_images(config, tmp_path / "lora").astype(int)
    # the same layers in other batches: latents agree to about 1e-5, so a pixel can differ only
    # where .5 is rounded
    assert np.abs(ours - theirs).max() <= 1
    base = stock_images(config).astype(int)
    assert np.abs(load_step(undisturbed.images, 0).astype(int) - base).max() <= 1
    assert np.abs(base - theirs).mean() > 1  # the LoRA has an effect


def test_an_export_has_the_names_of_the_family(undisturbed, tmp_path, monkeypatch):
    def rename(modules):
        return {module: f"theirs.{module}" for module in modules}

    monkeypatch.setattr(SD3, "rename_lora", staticmethod(rename))
    assert main(["export", str(undisturbed.path), str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.safetensors")
    assert {key.partition(".")[0] for key in load_file(file)} == {"theirs"}


def test_the_exported_adapters_of_a_run_differ(undisturbed, tmp_path):
    files = []
    for weights in ("ema", "current", "old"):
        assert (
            main(["export", str(undisturbed.path), str(tmp_path / weights), "--weights", weights])
            == 0
        )
        (file,) = (tmp_path / weights).glob("*.safetensors")
        files.append(file.read_bytes())
    assert len(set(files)) == 3


def test_a_missing_checkpoint_is_one_line(undisturbed, tmp_path, capsys):
    assert main(["export", str(undisturbed.path), str(tmp_path / "x"), "--checkpoint", "9"]) == 2
    assert "no checkpoint 9; available: 2, 3" in capsys.readouterr().err


def test_evaluate_compares_base_and_adapters(undisturbed, tmp_path, capsys):
    run = tmp_path / "copy"
    shutil.copytree(undisturbed.path, run)
    code, message = main_here("evaluate", run), capsys.readouterr()
    assert code == 0, message.err
    lines = message.out.splitlines()
    assert "step_000003, 4 prompts x 2 seeds" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["weights", "base", "current", "old", "ema"]
    saved = json.loads((run / "evaluations" / "compare_step_000003.json").read_text())["weights"]
    trained = [row for row in undisturbed.metrics() if row["kind"] == "evaluation"]
    assert saved["base"]["reward/eval_mean"] == pytest.approx(
        trained[0]["reward/eval_mean"], abs=1e-9
    )
    assert saved["ema"]["reward/eval_mean"] == pytest.approx(
        trained[1]["reward/eval_mean"], abs=1e-9
    )
    assert saved["ema"]["eval/gain"] == pytest.approx(trained[1]["eval/gain"], abs=1e-9)
    images = load_step(run / "evaluations" / "compare_step_000003" / "ema", 3)
    assert np.array_equal(images, load_step(run / "images", 3))


def test_standard_errors_are_clustered_by_prompt():
    # prompt means 2, 4, 6: variance 4, error sqrt(4/3)
    values = np.array([[1.0, 3.0], [4.0, 4.0], [np.nan, 6.0]])
    assert clustered_error(values) == pytest.approx((4 / 3) ** 0.5)
    assert np.isnan(clustered_error(values[:1]))
    row = Evaluation(values, {"a": values}, np.zeros((0, 2, 3, 1, 1), np.uint8)).row(values - 0.5)
    assert row["eval/gain"] == pytest.approx(0.5)
    assert row["eval/gain_stderr"] == 0
    assert row["reward/eval/a"] == pytest.approx(18 / 5)
