"""Wan 2.2 A14B: two transformers form one denoiser, and each handles a part of the noise levels."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from configs.load import ConfigError, load
from configs.sections import Guidance
from configs.training import Lora
from learner.trained_adapter import TrainedAdapter
from planning.plan import make_plan
from planning.preflight import check_model, layers_on_disk
from policy.experts import Experts, experts_of
from policy.families import family_for
from policy.initial_lora import read_lora
from policy.lora import adapted_modules, adapter_state, add_adapters, target_modules, use_adapter
from policy.lora_files import FILES, save_diffusers_lora
from policy.merging import merged_weights
from policy.meta import meta_denoiser
from policy.pass_cost import denoiser_cost, held_bytes
from policy.precision.backends import BACKENDS
from policy.precision.compiling import compiled
from policy.precision.swap import quantize_plan
from policy.sampling.guidance import Guided, velocity
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from policy.sharding import blocks_of
from tests.cluster import test_families_ring
from tests.cluster.runs import tiny_config
from tests.policy import test_families, test_families_training
from tests.policy.conftest import LORA
from tests.policy.test_explorer_options import explorer_of
from tests.tiny_families import PROMPTS, SEEDS, Tiny, encode, stock_call, tiny_model
from tests.tiny_wan import SCHEDULERS, make_tiny_wan

HIGH, LOW = FILES.values()


@pytest.fixture(scope="module")
def tiny_wan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan 2.2 A14B that replaces Wan 2.1 in the tests of every family."""
    return make_tiny_wan(tmp_path_factory.mktemp("tiny_experts"), experts=True)


@pytest.fixture(scope="module")
def tiny(tiny_wan_dir) -> Tiny:
    return Tiny("wan", tiny_wan_dir)


@pytest.fixture
def passes(tiny) -> Any:
    """The number of calls of each of our transformers, then of each transformer of the diffusers
    pipeline.
    """
    counts = [0, 0, 0, 0]
    theirs = [tiny.pipe.transformer, tiny.pipe.transformer_2]

    def counter(place: int) -> Any:
        def count(*_: Any) -> None:
            counts[place] += 1

        return count

    modules = [*experts_of(tiny.denoiser), *theirs]
    hooks = [module.register_forward_hook(counter(i)) for i, module in enumerate(modules)]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_latents_equal_those_of_the_diffusers_pipeline(tiny, passes, steps):
    """Latents are equal bit for bit, and each step uses the same transformer as the pipeline."""
    assert isinstance(tiny.denoiser, Experts)
    assert torch.equal(tiny.ours(steps, "euler"), tiny.stock(steps, "latent"))
    above = sum(float(timestep) >= 875 for timestep in tiny.pipe.scheduler.timesteps)
    assert passes == [above, steps - above] * 2 and 0 < above <= max(1, steps // 3)


@pytest.mark.parametrize("low", [None, 2.0])
@pytest.mark.parametrize("one_pass", [False, True])
def test_guided_latents_match_the_diffusers_pipeline(tiny, low, one_pass):
    rows = encode(tiny.family, PROMPTS[:1], "a blue cross").repeat(len(SEEDS))
    guided = Guided(3.0, one_pass, low)
    ours = sample(tiny.family, tiny.denoiser, rows, SEEDS, 4, "euler", guided=guided)
    noise = noise_for(SEEDS, tiny.family.latent_shape)
    settings = Guidance(evaluate=3.0, low_noise=low, negative_prompt="a blue cross")
    arguments = tiny.family.guidance_arguments(tiny.family.model, settings)
    assert ("guidance_scale_2" in arguments) == (low is not None)
    theirs = stock_call(tiny.pipe, tiny.family.model, PROMPTS[0], noise, 4, "latent", **arguments)
    if one_pass:  # sums may be grouped differently
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4 * float(ours.abs().max()))
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [2, 6])
def test_unipc_latents_match_the_diffusers_pipeline(tmp_path, steps):
    """The scheduler is the published one. The tolerance is that of the test for Wan 2.1."""
    tiny = Tiny("wan", make_tiny_wan(tmp_path, scheduler=SCHEDULERS[1], experts=True))
    ours, theirs = tiny.ours(steps, "unipc"), tiny.stock(steps, "latent")
    size = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * size)


def mixed_samples(tiny: Tiny) -> tuple[torch.Tensor, torch.Tensor]:
    """Return five noisy samples and their sigmas, from both parts of the noise levels and at the
    boundary. The first transformer handles the boundary.
    """
    x = noise_for([1, 2, 3, 4, 5], tiny.family.latent_shape)
    return x, torch.tensor([0.3, 0.95, 0.875, 0.8749, 0.0])


def test_rows_of_one_pass_use_their_own_transformers(tiny, passes):
    x, sigma = mixed_samples(tiny)
    cond = tiny.encoded.rows([0, 1, 0, 1, 0])
    guided = Guided(3.0, False, 2.0)
    rows = encode(tiny.family, PROMPTS[:1], "a blue cross").repeat(5)
    actual = velocity(tiny.family, tiny.denoiser, x, sigma, cond, None)
    assert passes[:2] == [1, 1]
    guided_velocity = velocity(tiny.family, tiny.denoiser, x, sigma, rows, guided)
    high, low = experts_of(tiny.denoiser)
    expert_of_row = [(low, 2), (high, 3), (high, 3), (low, 2), (low, 2)]
    for row, (expert, scale) in enumerate(expert_of_row):
        only = slice(row, row + 1)
        alone = tiny.family.velocity(expert, x[only], sigma[only], cond.rows(only))
        torch.testing.assert_close(actual[only], alone, rtol=0, atol=1e-5)
        positive, negative = (
            tiny.family.velocity(expert, x[only], sigma[only], part.rows(only))
            for part in rows.split_negative()
        )
        expected = negative + scale * (positive - negative)
        torch.testing.assert_close(guided_velocity[only], expected, rtol=0, atol=4e-5)


def test_only_the_used_transformer_gets_gradients(tiny):
    family = tiny.family
    denoiser = family.load_transformer("cpu", torch.float32)
    add_adapters(denoiser, LORA, family)
    trained = TrainedAdapter(denoiser, load("quickstart").optimizer)
    x, sigma = mixed_samples(tiny)
    cond = tiny.encoded.rows([0] * 5)
    above = sigma >= 0.875
    family.velocity(denoiser, x[above], sigma[above], cond.rows([0, 0])).sum().backward()
    trained.fill_missing_gradients(2)
    result = trained.gradients()
    with_gradient = {name.partition(".")[0] for name, gradient in result.items() if gradient.any()}
    assert result.keys() == trained.parameters.keys() and with_gradient == {"transformer"}
    # a missing gradient of an expert that was used, and an update in which no expert was used
    first = next(iter(trained.parameters))
    trained.parameters[first].grad = None
    with pytest.raises(RuntimeError, match=f"'{first}' got no gradient"):
        trained.forget_gradients()
        family.velocity(denoiser, x[above], sigma[above], cond.rows([0, 0])).sum().backward()
        trained.parameters[first].grad = None
        trained.fill_missing_gradients(2)
    trained.forget_gradients()
    with pytest.raises(RuntimeError, match="got no gradient"):
        trained.fill_missing_gradients(2)
    trained.fill_missing_gradients(0)
    assert not any(gradient.any() for gradient in trained.gradients().values())


def test_tables_of_the_family_match_the_model(tiny):
    test_families.test_products_of_the_blocks_are_quantized(tiny.family)
    test_families.test_skeleton_has_every_parameter_and_shape(tiny.family)
    names = target_modules(tiny.denoiser, tiny.family.lora_targets)
    assert len(names) == 2 * test_families.LORA_MODULES["wan"]
    plan = quantize_plan(tiny.denoiser, tiny.family, (), BACKENDS["torch_nvfp4"])
    fused = {row.fused for row in plan if row.fused}
    assert len(fused) == 2 * 2 * 2  # two groups in each of two blocks, in both transformers
    assert {row.name for row in plan if row.quantized} >= set(names)


def test_plan_counts_both_transformers_and_one_pass(tiny):
    """A plan counts the bytes of both transformers and the pass of one."""
    without_data = meta_denoiser(tiny.family, torch.float32)
    assert held_bytes(without_data) == held_bytes(tiny.denoiser)
    one = experts_of(without_data)[0]
    assert 2 * held_bytes(one) == held_bytes(without_data)
    both, alone = (
        denoiser_cost(tiny.family, each, 3, torch.float32) for each in (without_data, one)
    )
    assert (both.flops, both.peak) == (alone.flops, alone.peak) and both.flops > 0


def test_blocks_of_both_transformers_are_compiled_and_checkpointed(tiny):
    result = compiled(tiny.denoiser, torch.device("cpu"))
    assert isinstance(result, Experts)
    blocks, theirs = list(blocks_of(result)), list(blocks_of(tiny.denoiser))
    assert len(blocks) == 4 and [b._orig_mod for b in blocks] == theirs
    assert held_bytes(result) == held_bytes(tiny.denoiser)


@pytest.mark.parametrize(
    "family_test",
    [
        test_families_training.test_update_changes_only_lora_weights,
        test_families_training.test_gradient_checkpointing_gives_the_same_gradients,
    ],
)
def test_training_tests_of_every_family_pass(family_test, tiny_wan_dir):
    family_test("wan", tiny_wan_dir)


@pytest.mark.slow
def test_two_iterations_through_all_services(ray_here, request, tmp_path):
    test_families_ring.test_newer_families_train_two_iterations(ray_here, request, tmp_path, "wan")


# ---- files


@pytest.fixture
def exported(tiny, randomise, tmp_path) -> tuple[nn.Module, Path]:
    """A denoiser with an adapter, and the directory of its exported diffusers LoRA."""
    transformer = tiny.family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, LORA, tiny.family, seed=1)
    # safetensors may read a checkpoint in any order
    state = dict(reversed(randomise(transformer, "ema", 5).items()))
    assert next(iter(state)).startswith("transformer_2.")
    rename = tiny.family.rename_lora
    assert save_diffusers_lora(tmp_path / "lora", state, LORA, rename) == [HIGH, LOW]
    return transformer, tmp_path / "lora"


def test_exported_lora_loads_in_the_diffusers_pipeline(tiny, tiny_wan_dir, exported):
    """The export has one file for each transformer, with the names of that transformer."""
    transformer, directory = exported
    with use_adapter(transformer, "ema"):
        rows = tiny.encoded.rows(0).repeat(len(SEEDS))
        ours = sample(tiny.family, transformer, rows, SEEDS, 4, "euler")
    other = Tiny("wan", tiny_wan_dir)
    other.pipe.load_lora_weights(str(directory), weight_name=HIGH)
    other.pipe.load_lora_weights(str(directory), weight_name=LOW, load_into_transformer_2=True)
    theirs = other.stock(4, "latent")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert (theirs - tiny.stock(4, "latent")).abs().max() > 0.01
    stock = (other.pipe.transformer, other.pipe.transformer_2)
    wrapped = [[name for name, _ in adapted_modules(one)] for one in stock]
    ours = [[name for name, _ in adapted_modules(one)] for one in experts_of(transformer)]
    assert wrapped == ours and len(wrapped[1]) == test_families.LORA_MODULES["wan"]


def test_run_starts_from_its_own_export(tiny, exported):
    transformer, directory = exported
    fresh = tiny.family.load_transformer("cpu", torch.float32)
    add_adapters(fresh, Lora(rank=6, alpha=3, init_from=str(directory)), tiny.family, seed=9)
    expected = dict(merged_weights(transformer, "ema"))
    for module, weight in merged_weights(fresh, "current"):
        torch.testing.assert_close(weight, expected[module], rtol=1e-5, atol=1e-6)


def test_lora_of_one_transformer_is_saved_and_loaded(tiny, randomise, tmp_path):
    low = Lora(rank=2, alpha=2, targets=("transformer_2.*.attn1.to_q",))
    transformer = tiny.family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, low, tiny.family)
    assert save_diffusers_lora(tmp_path, randomise(transformer, "current", 3), low) == [LOW]
    products = read_lora(tmp_path, tiny.family, LOW).products
    assert set(products) == {f"blocks.{i}.attn1.to_q" for i in (0, 1)}
    fresh = tiny.family.load_transformer("cpu", torch.float32)
    add_adapters(fresh, low.model_copy(update={"init_from": str(tmp_path / LOW)}), tiny.family)
    assert adapter_state(fresh, "current").keys() == adapter_state(transformer, "current").keys()


def test_unusable_initial_lora_is_refused(tiny, exported):
    _, directory = exported
    fresh = tiny.family.load_transformer("cpu", torch.float32)
    with pytest.raises(
        ValueError, match=("is one file, but the model has two transformers: give a")
    ):
        add_adapters(fresh, Lora(rank=4, init_from=str(directory / HIGH)), tiny.family)
    (directory / LOW).unlink()
    fresh = tiny.family.load_transformer("cpu", torch.float32)
    with pytest.raises(FileNotFoundError, match=f"{LOW} not found in"):
        add_adapters(fresh, Lora(rank=4, init_from=str(directory)), tiny.family)


# ---- bad input


def test_layer_names_include_their_transformer(tiny):
    names = layers_on_disk(tiny.family)
    assert {name.partition(".")[0] for name in names} == {"transformer", "transformer_2"}
    assert all(isinstance(tiny.denoiser.get_submodule(name), nn.Module) for name in names)


@pytest.mark.parametrize("share", [None, 0, 1.5, "high", True])
def test_pipeline_without_a_valid_boundary_is_refused(tiny_wan_dir, tmp_path, share):
    copied = shutil.copytree(tiny_wan_dir, tmp_path / "model")
    index = copied / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "boundary_ratio": share}))
    with pytest.raises(ValueError, match="two transformers, and its boundary_ratio, .* is no") as e:
        family_for(tiny_model("wan", copied)).check()
    assert "\n" not in str(e.value)


def test_pipeline_without_its_second_transformer_is_refused(tiny_wan_dir, tmp_path):
    copied = shutil.copytree(tiny_wan_dir, tmp_path / "model")
    for file in (copied / "transformer_2").glob("*.safetensors"):
        state = load_file(file)
        save_file({key: state[key] for key in sorted(state)[1:]}, file)
    family = family_for(tiny_model("wan", copied))
    with pytest.raises(FileNotFoundError, match="the 'transformer_2' of .* lacks 1 of its"):
        family.load_transformer("cpu", torch.float32)
    shutil.rmtree(copied / "transformer_2")
    with pytest.raises(FileNotFoundError, match="lacks its 'transformer_2'"):
        family_for(tiny_model("wan", copied))


def test_sharded_base_is_refused_with_two_transformers(tiny_wan_dir, tmp_path):
    def config(**more: Any) -> Any:
        return tiny_config(
            tiny_wan_dir, tmp_path, "tiny", model__family="wan", model__frames=5, **more
        )

    check_model(config(guidance__evaluate=3.0, guidance__low_noise=2.0))
    shared = config(services__learner__replicas=2, services__learner__shard="base")
    with pytest.raises(ConfigError, match="'base' with .*, which has two transformers: use lora"):
        check_model(shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["guidance.low_noise=3"],
            "guidance.low_noise: 3 without guidance: no stage has a scale above 1",
        ),
        (["guidance.evaluate=4", "guidance.low_noise=0.5"], "guidance.low_noise"),
    ],
)
def test_invalid_low_noise_scales_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", changes)
    assert len(caught.value.lines) == 1 and message in caught.value.lines[0]


def test_low_noise_scale_is_refused_with_one_transformer():
    config = load("quickstart", ["guidance.evaluate=4", "guidance.low_noise=3"])
    with pytest.raises(ConfigError, match="has one transformer for all noise levels: leave it out"):
        check_model(config)


def test_plan_error_names_the_published_model():
    """The message names the published model and not the directory with its configuration files."""
    more = ["services.learner.shard=base", "regenerate.compile=false"]
    with pytest.raises(ConfigError) as caught:
        make_plan(load("wan22_a14b-sol_rl-hpsv2", more))
    (line,) = caught.value.lines
    assert "'base' with 'Wan-AI/Wan2.2-T2V-A14B-Diffusers', which has two transformers" in line


def test_each_transformer_measures_the_amax_of_its_own_first_pass(tiny, randomise):
    """The second transformer starts in the middle of a sampling, without a previous pass."""
    transformer = tiny.family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, LORA, tiny.family)
    randomise(transformer, "current", 4)
    own, previous = (
        explorer_of(tiny.family, transformer, "emulated_nvfp4", activation_amax=kind)
        for kind in ("power_of_two", "previous_pass")
    )
    images, latents = own.explore(tiny.encoded.rows(0), SEEDS, 6, "euler")
    found = previous.explore(tiny.encoded.rows(0), SEEDS, 6, "euler")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], latents)
    passes = [counter._passes for counter in previous._counters]
    assert sum(passes) == 6 and min(passes) >= 2
