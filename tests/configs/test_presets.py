"""The composed presets of the full-size models: complete, loadable, with the paper's settings and
with prompts.
"""

import itertools
from typing import get_args

import pytest

from cli.main import main
from configs.load import EDITORS, ConfigError, load, preset_names
from configs.prompts import read_prompts
from configs.sections import Stage
from rewards.vlm import VlmScorer
from tools.scene_prompts import PLACES, SUBJECTS, scenes

MODELS = {
    "sd35_medium": ("sd3", "stabilityai/stable-diffusion-3.5-medium", 512, None),
    "sd35_large": ("sd3", "stabilityai/stable-diffusion-3.5-large", 1024, None),
    "flux1": ("flux", "black-forest-labs/FLUX.1-dev", 512, 1.0),
    "sana": ("sana", "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", 1024, None),
    "qwen_image": ("qwen_image", "Qwen/Qwen-Image", 1024, None),
    "z_image": ("z_image", "Tongyi-MAI/Z-Image-Turbo", 1024, None),
    "flux2": ("flux2", "black-forest-labs/FLUX.2-dev", 1024, 4.0),
    "flux2_klein": ("flux2_klein", "black-forest-labs/FLUX.2-klein-4B", 1024, None),
    "wan_1_3b": ("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 240, None),
    "wan_14b": ("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", 240, None),
    "wan22_5b": ("wan", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", 352, None),
    "wan22_a14b": ("wan", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 240, None),
    "sana_video": ("sana_video", "Efficient-Large-Model/SANA-Video_2B_480p_diffusers", 480, None),
    "flux1_kontext": ("flux_kontext", "black-forest-labs/FLUX.1-Kontext-dev", 1024, 2.5),
    "qwen_image_edit": ("qwen_image_edit", "Qwen/Qwen-Image-Edit-2509", 1024, None),
}
CLIPS = {"wan_1_3b": 416, "wan_14b": 416, "wan22_5b": 640, "wan22_a14b": 416, "sana_video": 832}
"""Widths of clips."""
GUIDED = {
    "qwen_image": 4.0,
    "qwen_image_edit": 4.0,
    "wan_1_3b": 4.5,
    "wan_14b": 5.0,
    "wan22_5b": 5.0,
    "wan22_a14b": 4.0,
    "sana_video": 6.0,
}
ARMS = {  # exploration (pool, steps, backend), and what is trained on
    "diffusionnft": (None, True),
    "naive_scaling": ((96, 10, "bf16"), False),
    "naive_quant": ((96, 10, "auto"), False),
    "sol_rl": ((96, 6, "auto"), True),
}
REWARDS = ("imagereward", "clipscore", "pickscore", "hpsv2")
OBJECTIVES = ("flow_grpo", "dance_grpo", "awm")
NAMES = [
    f"{model}-{arm}-{reward}"
    for model in MODELS
    for arm in ARMS
    for reward in (("vlm_edit",) if model in EDITORS else REWARDS)
]
ROWS = ["-".join(parts) for parts in itertools.product(("flux1",), OBJECTIVES, REWARDS)]


def test_all_presets_are_listed_and_printed(capsys):
    assert len(NAMES) == 13 * 4 * 4 + 2 * 4 and set(NAMES + ROWS) <= set(preset_names())
    assert main(["config", "--list"]) == 0
    assert capsys.readouterr().out.split() == preset_names()
    assert len(set(preset_names())) == len(preset_names())


@pytest.mark.parametrize("name", NAMES)
def test_a_composed_preset_equals_the_papers_setting(name):
    config = load(name)
    model, arm, reward = name.split("-")
    explored = config.plan.explore and (
        config.plan.explore.pool_size,
        config.plan.explore.steps,
        config.plan.explore.backend,
    )
    assert (config.name, config.arm, (explored, config.plan.regenerate)) == (name, arm, ARMS[arm])
    assert (config.prompts.per_iteration, config.selection.keep, config.selection.rule) == (
        48,
        24,
        "best_worst",
    )
    assert (config.regenerate.steps, config.evaluate.steps, config.regenerate.precision) == (
        10,
        40,
        "bf16",
    )
    # the targets of the family
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 64, ())
    family, path, pixels, guidance = MODELS[model]
    assert (config.model.family, config.model.path, config.model.guidance) == (
        family,
        path,
        guidance,
    )
    clip = model in CLIPS
    assert (config.model.height, config.model.width) == (pixels, CLIPS.get(model, pixels))
    assert (config.model.frames, config.rewards.frames) == ((33, 4) if clip else (None, None))
    assert config.objective.name == "diffusion_nft" and config.objective.times_per_sample == 6
    (scorer,) = config.rewards.scorers
    assert (scorer.name, scorer.weight) == (reward.removesuffix("_edit"), 1.0)
    assert config.layout is not None and config.layout.mode == "auto"
    scale = GUIDED.get(model, 1.0)
    assert all(config.guidance.scale(stage) == scale for stage in get_args(Stage))
    assert config.guidance.low_noise == (3.0 if model == "wan22_a14b" else None)
    given = {"actors", "replicas", "gpus", "accelerator"}  # chosen with the layout
    assert not given & config.services.rollout.model_fields_set
    assert not given & config.services.learner.model_fields_set


def test_arms_and_rewards_differ_in_nothing_else():
    base = load("sana-sol_rl-hpsv2").model_dump()
    other = load("sana-naive_quant-hpsv2").model_dump()
    assert {key for key in base if base[key] != other[key]} == {"name", "arm"}
    other = load("sana-sol_rl-clipscore").model_dump()
    assert {key for key in base if base[key] != other[key]} == {"name", "rewards"}


@pytest.mark.parametrize("name", ROWS)
def test_presets_of_the_papers_other_objectives(name):
    """Rows beside DiffusionNFT and Sol-RL: 24-in-24 with their own samplers.

    With preference scores they have FlowGRPO's small KL weight.
    """
    config, objective = load(name), name.split("-")[1]
    assert (config.arm, config.plan.explore, config.objective.name) == (
        "diffusionnft",
        None,
        objective,
    )
    assert (
        config.plan.solver
        == {"flow_grpo": "flow_sde", "dance_grpo": "dance_sde", "awm": "dpmpp_2m"}[objective]
    )
    assert config.model.shift == (3.0 if objective == "dance_grpo" else None)
    assert (
        getattr(config.objective, "kl", None)
        == {"flow_grpo": 0.01, "dance_grpo": None, "awm": 1e-4}[objective]
    )
    assert getattr(config.objective, "first_step", objective == "awm") == (objective == "awm")
    assert config.objective.one_noise_per_group == config.advantages.unbiased
    assert config.advantages.unbiased == (objective == "dance_grpo")
    assert config.optimizer.steps_per_iteration == (1 if objective == "awm" else 2)
    assert config.model.path == "black-forest-labs/FLUX.1-dev" and config.model.guidance == 1.0


REFERENCE = {  # pixels, tokens, schedule, solver, times, evaluation steps, gradient norm
    "flux1": (512, 128, "own", "dpmpp_2m", 4, 28, 1.0),
    "sd35_large": (768, 128, "scheduler", "dpmpp_2m", 6, 40, 0.002),
    "sana": (1024, 300, "uniform", "euler", 6, 40, 1.0),
}
COMPILED = {  # exploring, regenerating
    "diffusionnft": (True, False),
    "naive_scaling": (True, False),
    "naive_quant": (True, False),
    "sol_rl": (True, True),
}


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("model", REFERENCE)
def test_a_reference_preset_equals_the_public_codes_setting(model, arm, reward):
    """Values are those of NVlabs/Sana on 2026-11-21; docs/reproducing.md has the whole table."""
    config = load(name := f"reference-{model}-{arm}-{reward}")
    plain = load(f"{model}-{arm}-{reward}")
    found = config.model
    solvers = {config.explore.solver, config.plan.solver, config.evaluate.solver}
    assert (config.name, config.arm, len(solvers)) == (name, arm, 1)
    assert (
        *(found.height, found.max_sequence_length, found.schedule, solvers.pop()),
        *(config.objective.model_dump()["times_per_sample"], config.evaluate.steps),
        config.optimizer.max_grad_norm,
    ) == REFERENCE[model]
    assert (config.ema.warmup, config.ema.decay, config.optimizer.averages) == (True, 0.9, "step")
    assert (config.evaluate.every, config.checkpoint.every) == (20, 5)
    eager = (False, False) if (model, arm) == ("flux1", "naive_scaling") else COMPILED[arm]
    assert (config.explore.compile, config.regenerate.compile) == eager
    assert config.prompts.train == "pickscore/train.txt"
    for same in ("selection", "rewards", "objective.beta", "lora.rank", "optimizer.lr"):
        section, _, key = same.partition(".")
        ours, theirs = getattr(config, section), getattr(plain, section)
        assert (getattr(ours, key), key) == (getattr(theirs, key), key) if key else ours == theirs


def test_one_field_frees_or_moves_the_explorers():
    assert (
        load(
            "flux1-sol_rl-hpsv2", ["services.rollout.accelerator=H200"]
        ).services.rollout.accelerator
        == "H200"
    )
    from planning.placement import need_of

    anywhere = load("flux1-sol_rl-hpsv2", ["services.rollout.accelerator="]).services.rollout
    assert need_of("rollout", 0, anywhere).labels == {}


@pytest.mark.parametrize("model", EDITORS)
def test_presets_of_editing_models_need_images_and_a_judge(model):
    """Neither ships: one line names the missing file, and the judge is shown the instruction."""
    config = load(f"{model}-sol_rl-vlm_edit")
    with pytest.raises(ConfigError, match=r"prompts: edits/train\.jsonl: cannot be read \(No such"):
        read_prompts(config.prompts.train)
    (scorer,) = config.rewards.scorers
    VlmScorer(**scorer.settings)
    assert scorer.settings["rubric"].endswith("\nInstruction: {prompt}")
    with pytest.raises(ConfigError, match=f"{model}-sol_rl-hpsv2: no preset of that name"):
        load(f"{model}-sol_rl-hpsv2")


def test_a_misspelt_preset_names_the_nearest():
    with pytest.raises(
        ConfigError,
        match="flux1-solrl-hpsv2: no preset of that name .did you mean 'flux1-sol_rl-hpsv2'",
    ):
        load("flux1-solrl-hpsv2")


def test_shipped_prompts_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("flux1-sol_rl-hpsv2").prompts
    train, test = (
        [prompt.text for prompt in read_prompts(name)] for name in (config.train, config.test)
    )
    assert (train, test) == scenes()  # the generator still writes these files
    # ten iterations, one evaluation
    assert (len(set(train)), len(set(test))) == (480, 128) == (len(train), len(test))


def test_held_out_scenes_are_not_trained_on():
    """No pair of subject and place is in both files; training has all subjects and places."""
    pairs = [
        {
            next((s, p) for s in SUBJECTS for p in PLACES if f"{s} {p}" in prompt)
            for prompt in prompts
        }
        for prompts in scenes()
    ]
    assert not pairs[0] & pairs[1]
    assert {subject for subject, _ in pairs[0]} == set(SUBJECTS)
    assert {place for _, place in pairs[0]} == set(PLACES)
