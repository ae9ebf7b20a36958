"""The explorer's arithmetic bound, and the small forms of published architectures."""

import json

import pytest
import torch

from bench.__main__ import main as bench_main
from bench.architectures import case_of
from bench.explorer import bound, explorer_transformer, quantizable_share
from bench.survival import main as survival_main
from bench.survival import random_update, survival
from learner.trainer import Trainer
from policy.families.architectures import published_names
from policy.lora import adapter_state, load_adapter_state
from policy.merging import merged_weights
from policy.pass_cost import held_bytes
from policy.precision.backends import BACKENDS
from records.rundir import RunDirectory
from tests.cluster.runs import tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("share", "fp4", "fp8"), [(0.80, 2.5, 1.667), (0.0, 1.0, 1.0), (1.0, 4.0, 2.0)]
)
def test_the_bound_is_amdahls_law(share, fp4, fp8):
    assert bound(share, "nvfp4") == pytest.approx(fp4, abs=1e-3)
    assert bound(share, "fp8") == pytest.approx(fp8, abs=1e-3)
    assert bound(share, "bf16") == 1.0


def test_the_quantizable_share_of_a_published_architecture():
    """SD3.5 Large at 1024 x 1024, 4096 image and 333 text tokens, computed by hand.

    Per block and token: 12 d^2 multiply-adds in the linears of either stream (8 for text in the
    last block, which lacks feed-forward and output) and 2 n d in attention. adaLN and the ends are
    less than a thousandth.
    """
    d, image, text, blocks = 2432, 4096, 333, 38
    linears = blocks * 12 * d * d * (image + text) - 9 * d * d * text
    attention = blocks * 2 * (image + text) ** 2 * d
    with case_of("sd3.5-large", 1024, False) as case:
        share = quantizable_share(case, BACKENDS["te_nvfp4"])
    assert share == pytest.approx(linears / (linears + attention), abs=2e-3)
    assert share == pytest.approx(0.77, abs=5e-3)


# its kind is there already
@pytest.mark.parametrize("name", [name for name in published_names() if name != "sd3.5-large"])
@torch.no_grad()
def test_a_small_model_runs_in_every_precision_of_a_cpu(name):
    """The result is close to that of FP32 with the same weights, so the layers were filled."""
    with case_of(name, 64, True) as case:
        x, sigma, cond = case.inputs(2, CPU)
        found, size = {}, {}
        for backend in ("fp32", "fp8", "emulated_nvfp4"):
            transformer = explorer_transformer(case, BACKENDS[backend], CPU)
            found[backend] = case.family.velocity(transformer, x, sigma, cond)
            size[backend] = held_bytes(transformer)
            assert found[backend].shape == x.shape
    for backend, most in (("fp8", 0.1), ("emulated_nvfp4", 0.3)):
        assert 1e-5 < (found[backend] - found["fp32"]).norm() / found["fp32"].norm() < most
    assert size["emulated_nvfp4"] < size["fp8"] < size["fp32"]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU runs other backends, and compiles with Triton"
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "te_nvfp4"], "--backends: 'te_nvfp4' does not run on cpu here"),
        (
            ["--compile"],
            (
                "--compile: torch.compile needs a C++ compiler on a CPU, but there is no"
                " 'no-such-compiler'"
            ),
        ),
    ],
)
def test_unsupported_measurements_are_one_line(arguments, message, capsys, monkeypatch):
    """Nothing else is measured instead."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert bench_main(["explorer", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(message)


def test_survival_of_known_updates():
    """An update of one coordinate that is far larger than any rounding survives; a far smaller one
    is lost.
    """
    weight = torch.zeros(1, 16)
    weight[0, 0] = 6.0
    backend = BACKENDS["emulated_nvfp4"]
    none = survival(random_update([weight], 1, 1e-6, seed=0), backend, False, True)
    assert (none.cosine, none.growth) == (0.0, 0.0) and none.error == pytest.approx(0.0, abs=1e-6)
    # values rounded to zero keep their sign, which has a code of its own
    assert 0 < none.changed < 1
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator) for _ in range(2)]
    small, large = (
        survival(random_update(weights, 4, size, seed=0), backend, True, False)
        for size in (0.01, 1.0)
    )
    assert small.cosine < 0.5 < 0.98 < large.cosine and small.growth > 2 > 1.1 > large.growth > 0.9
    assert 0 < small.changed < large.changed < 1
    fp8 = survival(random_update(weights, 4, 0.01, seed=0), BACKENDS["fp8"], False, False)
    assert fp8.cosine > small.cosine and fp8.error < small.error


def test_the_table_has_a_row_per_update(capsys, tiny_sd3_dir, tmp_path):
    settings = [f"model.path={tiny_sd3_dir}", "model.height=16", "model.width=16", "lora.rank=4"]
    out = tmp_path / "survival.json"
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    assert survival_main([*arguments, "--sizes", "0.01", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 + 2 + 2
    assert [cell.strip() for cell in lines[2].split("|")[1:6]] == [
        "nvfp4",
        "none",
        "own",
        "random, 1.00%",
        "1.00%",
    ]
    assert out.exists()
    assert survival_main(["--preset", "quickstrat"]) == 2


def test_updates_are_read_from_a_run(capsys, tiny_sd3_dir, tmp_path):
    """For two checkpoints with known sampling policies, the printed sizes are those of the
    policies.
    """
    config = tiny_config(tiny_sd3_dir, tmp_path, "grown")
    rundir = RunDirectory.of(config)
    rundir.create(config)
    assert survival_main(["--run", str(rundir.path)]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err
    trainer = Trainer(config)
    start, generator = adapter_state(trainer.transformer, "old"), torch.Generator().manual_seed(0)
    noise = {
        key: torch.randn(value.shape, generator=generator)
        for key, value in start.items()
        if "lora_B" in key
    }
    # twice the B: the update from the base model is twice that of the last step
    for step, size in ((3, 0.1), (4, 0.2)):
        load_adapter_state(
            trainer.transformer, "old", start | {key: size * value for key, value in noise.items()}
        )
        trainer.save(rundir.checkpoints / f"step_{step:06d}", {})
    out = tmp_path / "rows.json"
    assert survival_main(["--run", str(rundir.path), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    both = ("step_000004, from the base", "step_000003 to step_000004")
    assert [row["update"] for row in rows] == [
        update for choices in (4, 2, 2) for update in both for _ in range(choices)
    ]
    whole, last = rows[0], rows[4]
    deltas = dict(merged_weights(trainer.transformer, "old"))
    bases = dict(merged_weights(trainer.transformer, None))
    moved = sum(float((deltas[name] - bases[name]).square().sum()) for name in bases)
    assert whole["size"] == pytest.approx(
        (moved / sum(float(w.square().sum()) for w in bases.values())) ** 0.5, rel=1e-4
    )
    assert 0 < last["size"] < whole["size"] and last["cosine"] < whole["cosine"] < 1
