"""`sol-rl plan`: its counts without weights equal those of loaded models."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.main import main
from configs.load import ConfigError, load
from configs.rewards import Scorer
from configs.schema import RunConfig
from configs.sections import Model
from learner.trainer import Trainer
from planning import passes, sizes
from planning.assumptions import ACCELERATORS, Assumptions, Device
from planning.counting import counts_of
from planning.placement import Need, Node, place
from planning.plan import make_plan
from planning.report import iteration_seconds, lines_of
from planning.resident_memory import actor_memory
from planning.steps import step_lines
from policy import meta, pass_cost
from policy.explorer import Explorer
from policy.families import family_for
from policy.families.architectures import published, write_configs
from policy.precision import cost
from policy.precision.backends import BACKENDS
from policy.precision.counting import configured_step
from rewards import model_bytes
from tests.cluster.runs import write_toml
from tests.planning.plans import Directories, run_of
from tests.tiny_families import NAMES, one_of_twins, tiny_model


@pytest.fixture
def directories(request) -> Directories:
    return Directories(request)


# ---- bytes, compared with loaded models


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [
        *((name, "emulated_nvfp4", "bf16") for name in NAMES),
        *one_of_twins(False, "fp8", "fp32"),
        *one_of_twins(True, "bf16", "bf16"),
    ],
)
def test_the_plan_equals_the_memory_of_an_explorer(directories, name, backend, dtype):
    family = family_for(tiny_model(name, directories[name]))
    width = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    real = Explorer(family, BACKENDS[backend], (), "cpu", width)
    blank, rows, layers = meta.meta_explorer(family, BACKENDS[backend], (), width)
    assert rows == real.plan
    assert all(tensor.is_meta for tensor in (*blank.parameters(), *blank.buffers()))
    assert pass_cost.held_bytes(blank) == pass_cost.held_bytes(real.transformer)
    assert passes.decoding_work(family, 1)[0] == pass_cost.held_bytes(real.vae)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_equals_the_memory_of_text_encoders(directories, name):
    family = family_for(tiny_model(name, directories[name]))
    pipe: Any = family.load_text("cpu", torch.bfloat16).pipe  # type: ignore[attr-defined]
    blank = meta.text_encoders(family, torch.bfloat16)
    assert {part: pass_cost.held_bytes(module) for part, module in blank.items()} == {
        part: pass_cost.held_bytes(getattr(pipe, part))
        for part in family.components
        if part.startswith("text_encoder")
    }


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *one_of_twins(True, "emulated_nvfp4"),
        # other formats pack the same modules: for most families one is enough
        *(
            pytest.param(name, "fp8", marks=() if name in ("sd3", "sana") else pytest.mark.slow)
            for name in NAMES
        ),
    ],
)
def test_the_plan_equals_memory_and_broadcast_of_a_learner(directories, tmp_path, name, backend):
    """Compared are weights and adapters of a real trainer, and the bytes of its export.

    One adapted module stays unquantized.
    """
    wide = {
        "sd3": "transformer_blocks.0.attn.to_q",
        "flux": "transformer_blocks.0.attn.to_q",
        "flux_kontext": "transformer_blocks.0.attn.to_q",
        "sana": "transformer_blocks.1.attn1.to_v",
        "qwen_image": "transformer_blocks.0.attn.to_q",
        "qwen_image_edit": "transformer_blocks.0.attn.to_q",
        "z_image": "layers.0.attention.to_q",
        "flux2": "transformer_blocks.0.attn.to_q",
        "flux2_klein": "transformer_blocks.0.attn.to_q",
        "wan": "blocks.0.attn1.to_q",
        "sana_video": "transformer_blocks.1.attn1.to_v",
    }
    config = run_of(
        name,
        directories[name],
        tmp_path,
        explore__backend=backend,
        explore__modules_to_not_convert=[wide[name]],
    )
    plan, trainer = make_plan(config), Trainer(config)
    held = plan.memory["learner"]
    assert plan.trained == trainer.trainable_parameters
    adapters = sum(size for what, size in held.items() if "adapters" in what and size)
    base = sum(size for what, size in held.items() if "denoiser" in what and size)
    assert base + adapters == pass_cost.held_bytes(trainer.transformer)
    assert held["autoencoder, fp32"] == pass_cost.held_bytes(trainer.vae)
    manifest, _, _ = trainer.export(0)
    assert plan.broadcast == manifest.nbytes
    with torch.no_grad():
        for parameter in trainer.updater.trained.parameters.values():
            parameter.add_(torch.randn_like(parameter))
    again, _, _ = trainer.export(1, weights="current")
    sent = sum(again.shard_sizes[index] for index in again.changed_since(manifest))
    assert plan.changing == sent < plan.broadcast
    assert plan.quantized_weights == sum(
        torch.Size(row["shape"]).numel() for row in trainer.exporter.table if row["quantized"]
    )


def test_the_optimizer_holds_two_numbers_per_weight(tiny_sd3_dir, tmp_path):
    """AdamW's state after a step, without its counters."""
    plan = make_plan(config := run_of("sd3", tiny_sd3_dir, tmp_path))
    updater = Trainer(config).updater
    for parameter in updater.trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    updater.trained.optimizer.step()
    moments = sum(
        t.numel() * t.element_size()
        for state in updater.trained.optimizer.state.values()
        for t in state.values()
        if t.ndim
    )
    assert plan.memory["learner"]["optimizer, fp32"] == moments > 0


def test_formats_without_kernels_are_counted_from_their_buffers(tiny_sd3_dir):
    """NVFP4 on a GPU: codes of K/2, scales in whole tiles of 128 x 4, an amax and its factor.

    What is sent is the compact form.
    """
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    blank, rows, layers = meta.meta_explorer(family, BACKENDS["te_nvfp4"], (), torch.bfloat16)
    emulated = meta.meta_explorer(family, BACKENDS["emulated_nvfp4"], (), torch.bfloat16)
    assert sizes.wire_bytes(rows, layers, (), BACKENDS["te_nvfp4"]) == sizes.wire_bytes(
        *emulated[1:], (), BACKENDS["emulated_nvfp4"]
    )
    # to_q, to_k, to_v [32, 32] run as one [96, 32]: 96 * 16 codes, 128 * 4 scales, amax and factor
    fused = blank.get_submodule("transformer_blocks.0.attn.to_q")
    assert (
        sum(buffer.numel() * buffer.element_size() for buffer in fused.buffers())
        == 96 * 16 + 128 * 4 + 4 + 4
    )


def test_a_broadcast_of_sana_is_nine_bits_in_two_weights(tmp_path):
    """The published architecture: (8 * 20 + 7.5 * 20) d^2 weights in 20 * (8 + 2) layers, 4.5 bits
    each and 4 bytes per layer.
    """
    path = str(write_configs(published("sana-1.6b"), tmp_path))
    family = family_for(Model(family="sana", path=path, height=1024, width=1024))
    blank, rows, layers = meta.meta_explorer(family, BACKENDS["te_nvfp4"], (), torch.bfloat16)
    expected = (8 * 20 + 7.5 * 20) * 2240**2 * 9 / 16 + 4 * 200
    assert sizes.wire_bytes(rows, layers, (), BACKENDS["te_nvfp4"]) == (expected, 0)
    assert published("sana-1.6b")["hub_id"] == load("sana-sol_rl-hpsv2").model.path


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (
            Scorer(name="clipscore", settings={"checkpoint": "x/y"}),
            427_616_513 * 4,
        ),  # the published ViT-L/14
        (
            Scorer(name="hpsv2", settings={"checkpoint": "x/y", "dtype": "bf16"}),
            986_109_441 * 2,
        ),  # and ViT-H/14
        (Scorer(name="pickscore"), 986_109_441 * 4),  # the same with transformers' names
        (Scorer(name="clipscore", settings={"checkpoint": "shapes/not_built"}), None),
        (Scorer(name="shapes"), 0),
        (Scorer(name="mine:Scorer"), None),
    ],
)
def test_the_plan_counts_scorers(scorer, expected):
    assert model_bytes(scorer) == expected


# ---- the whole plan


def on_gpus(directory: Path, root: Path, **changes: Any) -> RunConfig:
    shares = {
        "services__rollout__gpus": 1,
        "services__learner__gpus": 1,
        "services__rollout__accelerator": "in(B200,GB200,B300,GB300)",
    }
    return run_of("sd3", directory, root, **{"explore__backend": "auto", **shares, **changes})


def test_a_plan_on_assumed_gpus(tiny_sd3_dir, tmp_path):
    plan = make_plan(on_gpus(tiny_sd3_dir, tmp_path), Assumptions(utilisation=0.25, node_gpus=2))
    # 2 explorers, a learner
    assert (plan.backend, [node.id for node in plan.nodes]) == ("torch_nvfp4", ["node 1", "node 2"])
    assert plan.device == Device("B200", 2250, 9000, 180, 0.25, 8, "nvfp4")
    assert set(plan.placed.values()) == {"node 1", "node 2"}
    seconds = {name: stage.seconds(plan.device) for name, stage in plan.stages.items()}
    # the second of two prompts is regenerated after exploring has ended
    rollouts = max(seconds["explore"] + seconds["regenerate"] / 2, seconds["regenerate"])
    expected = rollouts + seconds["update"]
    assert iteration_seconds(plan, plan.device) == pytest.approx(expected)
    assert plan.outlook is not None and [each.count for each in plan.outlook.gpus] == [3]
    text = "\n".join(lines_of(plan))
    assert (
        "assumed     B200: 562.5 of 2250 TFLOP/s; 2250 of 9000 in quantized layers; 562 decoding in"
        " BF16, 281 in FP32; 3.2 of 8 TB/s; 180 GB\n" in text
    )
    hopper = make_plan(on_gpus(tiny_sd3_dir, tmp_path, services__rollout__accelerator="H200"))
    assert hopper.backend == "fp8"
    assert hopper.device == Device("H200", 989.5, 1979, 141, None, 4.8, "fp8")
    assert "4.8 TB/s; 141 GB; fractions of the peaks as measured on one H200\n" in "\n".join(
        lines_of(hopper)
    )


def test_assumed_nodes_are_as_few_as_possible(tiny_sd3_dir, tmp_path, monkeypatch):
    """Twelve whole GPUs need two nodes of eight. Nothing is placed on one node first."""
    tried: list[int] = []

    def counted(needs: Sequence[Need], nodes: Sequence[Node]) -> dict[str, str]:
        tried.append(len(nodes))
        return place(needs, nodes)

    monkeypatch.setattr("planning.plan.place", counted)
    plan = make_plan(on_gpus(tiny_sd3_dir, tmp_path, services__rollout__actors=11))
    assert tried == [len(plan.nodes)] == [2]


def test_the_plan_reports_what_does_not_fit(tiny_sd3_dir, tmp_path):
    """Memory beyond the share, an update beyond its deadline, nodes of another kind."""
    config = on_gpus(tiny_sd3_dir, tmp_path, services__learner__deadline_s=1e-6)
    plan = make_plan(
        config,
        Assumptions(gpu_memory_gb=1e-4, utilisation=1e-4),
        [Node("a", 8, 8, {"ray.io/accelerator-type": "H100"})],
    )
    text = "\n".join(lines_of(plan))
    assert "placement   none" in text
    assert "services.rollout: 2 of 2 actors cannot be placed" in text
    assert "no node has these labels" in text
    assert "too large   learner needs" in text and "too long    the update is one task" in text


def test_an_accelerator_that_is_not_known_needs_its_numbers(tiny_sd3_dir, tmp_path):
    assert "T4" not in ACCELERATORS
    with pytest.raises(ConfigError, match="--accelerator T4: known are B200"):
        make_plan(on_gpus(tiny_sd3_dir, tmp_path, services__rollout__accelerator="T4"))
    numbers = Assumptions(peak_tflops=65, gpu_memory_gb=16)
    with pytest.raises(ConfigError, match="'auto' on T4 is unknown"):
        make_plan(on_gpus(tiny_sd3_dir, tmp_path, services__rollout__accelerator="T4"), numbers)


def test_the_plan_command_on_cpus(tiny_sana_dir, tmp_path, capsys):
    file = write_toml(run_of("sana", tiny_sana_dir, tmp_path), tmp_path)
    assert main(["plan", str(file)]) == 0
    text = capsys.readouterr().out
    assert "emulated_nvfp4 (as configured)" in text
    assert "no GPU is requested, so no time is predicted" in text
    assert "(host)" in text and "broadcast   0.000 GB" in text
    assert main(["plan", str(file), "--peak-tflops", "0.1"]) == 0
    text = capsys.readouterr().out
    assert (
        "assumed     CPUs: 0.04 of 0.1 TFLOP/s; 0.04 of 0.1 in quantized layers; 0.04 decoding in"
        " BF16, 0.02 in FP32; memory traffic takes no time\n" in text
    )


def test_the_plan_uses_the_nodes_of_a_cluster(tiny_sd3_dir, tmp_path, capsys, monkeypatch):
    """With an address the plan uses the nodes of that cluster; here a stand-in answers for it."""
    requested: list[str] = []
    monkeypatch.setattr(
        "cluster.jobs.live_runs.connected",
        lambda address: requested.append(address) or nullcontext(),
    )
    monkeypatch.setattr(
        "cluster.runtime.nodes.free_nodes",
        lambda: [Node("a1", 4), Node("b2", 2, labels={"rack": "7"})],
    )
    file = write_toml(run_of("sd3", tiny_sd3_dir, tmp_path), tmp_path)
    assert main(["plan", str(file), "--address", "head:6379"]) == 0
    text = capsys.readouterr().out
    assert requested == ["head:6379"]
    assert "node 1 (4 CPU, 0 GPU): " in text
    assert "node 2 (2 CPU, 0 GPU, rack=7): " in text


def test_placement_names_actors_in_ranges_and_counts_them_on_equal_nodes():
    plan = make_plan(load("quickstart"))
    nodes = [Node(name, 96, 8) for name in "abcd"] + [Node("e", 4)]

    def placement(on: dict[str, str]) -> list[str]:
        lines = lines_of(replace(plan, nodes=nodes, placed=on))
        start = lines.index("placement") + 1
        return lines[start : lines.index("", start)]

    learners = {f"learner-{n}": "abcd"[n // 8] for n in range(32)}
    others = {f"rollout-{n}": "c" for n in (0, 1, 2, 7, 9, 10)} | {"rollout-3": "d"}
    assert placement({**learners, **others, "scorers.hps-0": "a"}) == [
        "  node 1 (96 CPU, 8 GPU): learner-0 to 7, scorers.hps-0",
        "  node 2 (96 CPU, 8 GPU): learner-8 to 15",
        "  node 3 (96 CPU, 8 GPU): learner-16 to 23, rollout-0 to 2, rollout-7, rollout-9 to 10",
        "  node 4 (96 CPU, 8 GPU): learner-24 to 31, rollout-3",
        "  node 5 (4 CPU, 0 GPU): nothing",
    ]
    assert placement(learners) == [
        "  nodes 1 to 4 (96 CPU, 8 GPU): each 8 learner",
        "  node 5 (4 CPU, 0 GPU): nothing",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--utilisation", "0"), "--utilisation 0: must be above 0"),
        (("--set", "model.path=/no/such/model"), "no directory '/no/such/model'"),
        (
            ("--set", "model.width=40"),
            "model.width: 40 pixels; this model needs multiples of 4 up to 32",
        ),
        (
            ("--set", "lora.targets=['nothing']"),
            ("no linear layer of the transformer has a name that ends in 'nothing'"),
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tiny_sd3_dir, tmp_path, capsys, arguments, message):
    file = write_toml(run_of("sd3", tiny_sd3_dir, tmp_path), tmp_path)
    assert main(["plan", str(file), *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1, errors


def test_the_plan_prints_the_steps_that_auto_uses(tiny_sd3_dir, tmp_path):
    """They are for the run's own chunk size; without a GPU there are none."""
    config = on_gpus(tiny_sd3_dir, tmp_path)
    step = configured_step(config, BACKENDS["torch_nvfp4"])
    lines = step_lines(config)
    assert f"a step of {config.explore.chunk_size} images" in lines[1]
    for name in ("B200", "H200"):
        (line,) = [each for each in lines if each.split()[:1] == [name]]
        forms = [(False, False), (True, False), (True, True)]
        formats = [(wire, *form) for wire in ("fp8", "nvfp4") for form in forms]
        speeds = [cost.speed(step, ACCELERATORS[name], *each) for each in formats]
        assert line.split()[1:] == [f"{speed:.2f}" for speed in speeds if speed is not None]
    assert step_lines(run_of("sd3", tiny_sd3_dir, tmp_path)) == []


def test_a_packed_input_is_in_the_peak_of_an_actor_on_a_gpu(tiny_sd3_dir, tmp_path):
    """It is the widest input of a quantized layer: a byte per element in FP8, a bit more than half
    in NVFP4.

    A CPU packs nothing.
    """
    found = {}
    for backend in ("fp8", "torch_nvfp4", "bf16"):
        config = on_gpus(tiny_sd3_dir, tmp_path, explore__backend=backend)
        family = family_for(config.model)
        counts = counts_of(config, family, BACKENDS[backend])
        bare = replace(counts, step=replace(counts.step, widest=0), proxy_peak=0)
        sizes = []
        for each in (replace(counts, proxy_peak=0), bare):
            held = actor_memory(config, each, family, backend, torch.bfloat16)["rollout"]
            sizes.append(sum(size or 0 for size in held.values()))
        found[backend] = sizes[0] - sizes[1], counts.step.widest
    part = family_for(config.model).part_config("transformer")
    width = part["num_attention_heads"] * part["attention_head_dim"]
    # the inner width of the feed-forward, over all tokens
    assert found["fp8"][1] % (4 * width) == 0
    assert found["fp8"][0] == found["fp8"][1] > 0
    assert found["torch_nvfp4"][0] == pytest.approx(0.5625 * found["torch_nvfp4"][1], abs=1)
    assert found["bf16"] == (0, 0)
