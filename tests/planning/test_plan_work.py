"""`sol-rl plan`: operations and seconds, compared with real transformers and closed forms."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from configs.load import load
from configs.training import Lora
from planning import passes
from planning.assumptions import Device
from planning.counting import counts_of
from planning.layouts.resolve import tasks_of
from planning.plan import make_plan, open_architecture
from planning.report import lines_of
from planning.scoring import scored
from planning.stages import Part, Stage, training_points
from policy import meta, pass_cost
from policy.families import family_for
from policy.precision.backends import BACKENDS
from policy.precision.cost import Step
from policy.precision.swap import quantize_plan
from policy.sampling.noise import noise_for
from policy.tally import Tally, fused_attention
from tests.cluster.runs import tiny_config
from tests.planning.plans import Directories, of_work, run_of
from tests.tiny_families import EDITING, NAMES, SETTINGS, tiny_model


@pytest.fixture
def directories(request) -> Directories:
    return Directories(request)


def test_a_tally_of_a_known_model():
    """x [4, 8] W1 [8, 16] W2 [16, 8]: two operations per multiplication.

    Both results are alive at the end; weights never count.
    """
    x, first, second = (torch.empty(shape, device="meta") for shape in ((4, 8), (8, 16), (16, 8)))
    with Tally() as tally:
        hidden = x @ first
        out = hidden.mm(second.t().t())
        alive = tally.live
        del hidden
    assert tally.flops == 2 * 4 * 8 * 16 + 2 * 4 * 16 * 8
    assert alive == tally.peak == 4 * (4 * 16 + 4 * 8) and tally.live == 4 * out.numel()


@pytest.mark.parametrize("name", NAMES)
def test_counted_operations_of_a_step_equal_those_of_the_real_transformer(directories, name):
    """Real weights are counted by torch's own counter, with attention written as products."""
    family = family_for(tiny_model(name, directories[name]))
    blank = meta.meta_denoiser(family, torch.float32)
    rows = quantize_plan(blank, family, (), BACKENDS["emulated_nvfp4"])
    work = pass_cost.denoiser_cost(family, blank, 3, torch.float32, pass_cost.groups_of(rows))
    real = family.load_transformer("cpu", torch.float32)
    x, cond = of_work(family, 3)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        family.velocity(real, x, torch.tensor(0.5), cond)
    assert work.flops == counter.get_total_flops()
    assert 0.3 < work.quantized / work.flops < 1
    assert 0 < work.attention < work.heads and work.attention <= work.flops - work.quantized


@pytest.mark.parametrize("name", EDITING)
def test_a_source_image_is_encoded(directories, name):
    """The real autoencoder is counted by torch, with attention written as products.

    Qwen's language model reads the image's tokens beside those of the prompt, and its vision tower
    four patches per token.
    """
    family = family_for(tiny_model(name, directories[name]))
    vae = family.load_vae("cpu", torch.float32)
    image = torch.rand(1, *family.source_shape)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        vae.encode(image)
    work = passes.source_work(family, torch.float32)
    assert work.flops == counter.get_total_flops() > 0 and work.peak > 4 * image.numel()
    seen = family.source_patches
    assert (seen > 0) == (name == "qwen_image_edit")
    beside = seen // 4 + 8 if seen else 0
    assert family.text_tokens == family.model.max_sequence_length + beside


def test_source_images_are_encoded_with_the_negative_prompt_as_well(
    tiny_qwen_image_edit_dir, tmp_path
):
    """With guidance there are two rows per prompt; computed by hand from the counts."""
    seconds, device = {}, Device("made up", 1.0, 1.0, 80.0, 1.0)
    for scale in (1.0, 2.0):
        config = run_of(
            "qwen_image_edit", tiny_qwen_image_edit_dir, tmp_path, guidance__train=scale
        )
        with open_architecture(config) as (family, _):
            counts = counts_of(config, family, BACKENDS["fp8"])
        seconds[scale] = tasks_of(config, counts, device, {}).encode
    rows = config.prompts.per_iteration
    assert counts.source_flops > 0 and counts.source_peak > 0
    assert seconds[1.0] == pytest.approx(rows * (counts.text_flops + counts.source_flops) / 1e12)
    assert seconds[2.0] == pytest.approx(2 * seconds[1.0])


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_counted_operations_of_training_equal_those_of_the_real_transformer(directories, name):
    """As above, forward and backward. A fused backward computes the scores again: half of the
    attention's forward more.

    Checkpointing costs at most one more forward pass.
    """
    from policy.lora import add_adapters, use_adapter

    family = family_for(tiny_model(name, directories[name]))
    real = family.load_transformer("cpu", torch.float32)
    add_adapters(real, Lora(rank=4), family, names=("current",))
    x, cond = of_work(family, 2)
    with sdpa_kernel(SDPBackend.MATH), use_adapter(real, "current"):
        with torch.no_grad(), FlopCounterMode(display=False) as forward:
            family.velocity(real, x, torch.full((2,), 0.5), cond)
        with FlopCounterMode(display=False) as both:
            family.velocity(real, x, torch.full((2,), 0.5), cond).square().mean().backward()
    blocks = {"sd3": 2, "flux": 3}[name]
    tokens = 16 + family.conditioning_shapes["prompt_embeds"][0]
    attention = blocks * 2 * (2 * 2 * tokens**2 * 32)  # scores and values: batch 2, width 32
    blank = meta.meta_denoiser(family, torch.float32)
    assert meta.adapt(blank, family, Lora(rank=4)) == sum(
        p.numel() for p in real.parameters() if p.requires_grad
    )
    kept, again = (
        passes.training_work(family, blank, 2, torch.float32, recomputed)
        for recomputed in (0.0, 1.0)
    )
    assert kept.flops == both.get_total_flops() + attention // 2
    assert kept.flops < again.flops <= kept.flops + forward.get_total_flops()
    assert again.peak < kept.peak


def test_guidance_takes_two_velocities(tiny_sd3_dir, tmp_path):
    """Only where guidance is on; one pass of twice the batch needs twice the memory."""
    changes = {"guidance__explore": 2.0, "guidance__train": 3.0}
    plain, guided, apart = (
        make_plan(run_of("sd3", tiny_sd3_dir, tmp_path, **more))
        for more in ({}, changes, {**changes, "guidance__one_pass": False})
    )
    for plan in (guided, apart):
        for name, times in (("explore", 2), ("regenerate", 1), ("update", 2)):
            stage, once = plan.stages[name], plain.stages[name]
            assert stage.flops - stage.decoding == times * (once.flops - once.decoding)
            assert stage.decoding == once.decoding
        assert plan.evaluation.flops == plain.evaluation.flops

    def passes(plan: Any) -> int:
        return next(v for k, v in plan.memory["learner"].items() if "passes" in k)

    assert passes(plain) == passes(apart) < passes(guided) <= 2 * passes(plain)
    assert guided.memory["learner"]["conditioning"] == 2 * plain.memory["learner"]["conditioning"]


def test_smaller_proxy_images_are_counted_at_their_size(tiny_sd3_dir, tmp_path):
    """32x32 explored at 16x16: the explorer's work is that of a model of 16x16."""
    settings = SETTINGS["sd3"] | {"height": 32, "width": 32}
    model = {f"model__{key}": value for key, value in settings.items()}
    sizes = {"explore__height": 16, "explore__width": 16}
    config = tiny_config(tiny_sd3_dir, tmp_path, "sd3", model__family="sd3", **model, **sizes)
    small, own = make_plan(config), make_plan(run_of("sd3", tiny_sd3_dir, tmp_path))
    explored, alone = small.stages["explore"], own.stages["explore"]
    assert explored.flops - explored.decoding == alone.flops - alone.decoding
    assert small.stages["update"].flops > 2 * own.stages["update"].flops


def test_clips_are_counted_by_their_frames(tiny_wan_dir, tmp_path):
    """Of 9 frames, 5 are explored and two of them scored: the explorer's work is that of clips of
    5.

    Images in the store and for scorers are counted by frames.
    """
    nine = {"model__frames": 9, "explore__frames": 5, "rewards__frames": 2}
    config = tiny_config(
        tiny_wan_dir, tmp_path, "wan", model__family="wan", model__max_sequence_length=12, **nine
    )
    plan, own = make_plan(config), make_plan(run_of("wan", tiny_wan_dir, tmp_path))
    explored, alone = plan.stages["explore"], own.stages["explore"]
    assert explored.flops - explored.decoding == alone.flops - alone.decoding
    assert plan.stages["update"].flops > 1.4 * own.stages["update"].flops
    # 2 prompts, 8 proxy clips of 5 frames and 4 of 9, of 16 x 16 pixels in 3 colors
    images = next(size for what, size in plan.store.items() if what.startswith("images"))
    assert images == 2 * (8 * 5 + 4 * 9) * 3 * 16 * 16
    assert (scored(config, config.model), scored(config, config.explored_model)) == (2, 2)
    one = config.model.model_copy(update={"frames": 1})
    assert scored(config, one) == 1
    assert "16x16, 9 frames" in "\n".join(lines_of(plan))


def test_clips_are_decoded_one_at_a_time(tiny_wan_dir):
    """Operations equal those of a real decoding, and memory is that of one clip for any number of
    clips.
    """
    family = family_for(tiny_model("wan", tiny_wan_dir))
    vae, latents = family.load_vae("cpu", torch.float32), noise_for([1, 2], family.latent_shape)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        family.decode(vae, latents)
    one, two = (passes.decoding_work(family, count)[1] for count in (1, 2))
    assert two.flops == counter.get_total_flops() == 2 * one.flops and two.peak == one.peak


def test_stages_are_counts_of_steps(tiny_sd3_dir, tmp_path):
    """2 prompts: 8 seeds x 2 steps explored, 4 x 3 regenerated; NFT: 4 samples x 2 points, trained
    once and evaluated twice.
    """
    plan = make_plan(run_of("sd3", tiny_sd3_dir, tmp_path))
    family = family_for(
        tiny_model("sd3", tiny_sd3_dir, max_sequence_length=SETTINGS["sd3"]["max_sequence_length"])
    )
    blank = meta.meta_denoiser(family, torch.float32)
    step = pass_cost.denoiser_cost(family, blank, 1, torch.float32).flops
    decode = passes.decoding_work(family, 1)[1].flops
    meta.adapt(blank, family, Lora(rank=4))
    adapted = pass_cost.denoiser_cost(family, blank, 1, torch.float32).flops
    trained = passes.training_work(family, blank, 1, torch.float32, 0.0).flops
    explore = plan.stages["explore"]
    regenerate = plan.stages["regenerate"]
    update = plan.stages["update"]
    assert explore.denoising == 2 * 8 * 2 * step
    assert explore.decoding == 2 * 8 * decode
    assert (regenerate.denoising, regenerate.decoding) == (2 * 4 * 3 * step, 2 * 4 * decode)
    assert update.flops == 2 * 4 * 2 * (trained + 2 * adapted)


@pytest.mark.parametrize(
    ("objective", "points", "others"),
    [("diffusion_nft", 6, 2.0), ("awm", 6, 2.0), ("flow_grpo", 9, 1.0), ("dance_grpo", 5, 0.0)],
)
def test_points_and_passes_of_objectives(objective, points, others):
    """Passes beside the trained one: old and reference; AWM saves old, but not its anchor.

    On paths there are 9 of 10 steps, or 0.6 of 9.
    """
    config = load("flux1-diffusionnft-hpsv2", [f"objective.name={objective}"])
    assert training_points(config) == (points, others)


def test_seconds_of_known_operations():
    """Two calls of 1e15 operations and 2e12 bytes each, then decoding, on two GPUs at half of every
    peak.

    In one of the calls 4e14 operations are quantized.
    """
    step = Step(1e15, 0.4e15, 10, 1e11, 100, 2e12)
    device = Device("x", 1000, 4000, 1, utilisation=0.5, bandwidth=10, form="fp8")
    stage = Stage([Part(2, step, quantized=True), Part(2, step)], decoding=0.5e15, gpus=2)
    packed, moved = 3e11 / 6.5e12, 2e12 / 4e12
    seconds = 2 * (1.2 + 0.2 + packed + moved) + 2 * (2 + moved) + 2
    assert stage.seconds(device) == pytest.approx(seconds / 2)
    assert (stage.denoising, stage.quantized, stage.flops) == (4e15, 0.8e15, 4.5e15)
    narrow = replace(stage, narrow=True)
    assert narrow.seconds(device) == pytest.approx((seconds - 1) / 2)


def test_bytes_that_a_gpu_would_move():
    """bfloat16 [4, 8] and [8, 16]: a small product is limited by memory.

    A view is free; adding a number reads and writes; torch's norm is one kernel that reads its
    input and writes as much.
    """
    x, w = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((4, 8), (8, 16)))
    with fused_attention(), Tally() as tally:
        y = x @ w
        torch.add(y.view(16, 4), 1.0)
        torch.nn.functional.rms_norm(input=x, normalized_shape=(8,))
    product, sum_ = 2 * (4 * 8 + 8 * 16 + 4 * 16), 2 * 2 * 4 * 16
    assert (tally.kernels, tally.small) == (3, product)
    assert tally.bytes == product + sum_ + 2 * 2 * 4 * 8


def test_small_heads_take_longer():
    """Heads of 64 take the square root of two times as long as heads of 128."""
    found = {}
    for head in (64, 128):
        query = torch.empty(1, 2, 16, head, device="meta", dtype=torch.bfloat16)
        with fused_attention(), Tally() as tally:
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
        found[head] = tally.heads / tally.attention
    assert found[128] == 1 and found[64] == pytest.approx(2**0.5, rel=1e-3)
