"""``sol-rl tune``: contrast and cost by hand, and the whole command on the tiny model."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from analysis.tune.measure import Measurements
from analysis.tune.rows import TuneOptions, choose, make_rows
from analysis.tune.settings import Setting, contrasts, grid, pruned_contrasts, strength
from cli.main import main
from configs.load import load
from policy.sampling.sample import sample
from records.errors import RunFailed
from tests.cluster.runs import tiny_config, write_toml

TRUTH = np.array([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])


def test_contrast_of_known_rewards():
    """Two of eight by the true rewards: 7 - 0. By a proxy that swaps ends with the middle: 4 - 3.
    In pools of four: 3 - 0 and 7 - 4.
    """
    assert contrasts(TRUTH, TRUTH, 8, 2) == pytest.approx([7.0])
    assert contrasts(TRUTH, TRUTH, 8, 4) == pytest.approx([6.0])
    assert contrasts(TRUTH, TRUTH, 4, 2) == pytest.approx([3.0])
    wrong = np.array([[2.0, 1.0, 3.0, 0.0, 7.0, 5.0, 6.0, 4.0]])
    assert contrasts(wrong, TRUTH, 8, 2) == pytest.approx([4.0 - 3.0])
    assert contrasts(-TRUTH, TRUTH, 8, 2) == pytest.approx([-7.0])
    with pytest.raises(ValueError, match="no pool of 9 among 8"):
        contrasts(TRUTH, TRUTH, 9, 2)


def test_only_seeds_that_survive_a_preview_are_selected():
    """The preview drops 3 and 4, which a wrong final proxy would have selected, and, wrongly, 0 and
    7.
    """
    last = np.array([[1.0, 2.0, 3.0, -9.0, 9.0, 4.0, 5.0, 6.0]])
    assert contrasts(last, TRUTH, 8, 2) == pytest.approx([4.0 - 3.0])
    assert pruned_contrasts(TRUTH, last, TRUTH, 8, 2) == pytest.approx([7.0 - 0.0])
    preview = np.array([[3.5, 0.0, 1.0, 3.6, 3.7, 6.0, 7.0, 3.8]])
    assert pruned_contrasts(preview, TRUTH, TRUTH, 8, 2) == pytest.approx([6.0 - 1.0])


def test_signal_grows_with_the_square_root_of_samples():
    assert strength(np.array([2.0, 3.0]), 16).tolist() == [8.0, 12.0]


def test_a_grid_excludes_settings_without_selection():
    found = grid(["a"], [4, 6], [24, 96], [12, 24], [None])
    assert [(each.steps, each.pool, each.keep) for each in found] == [
        (steps, pool, keep) for steps in (4, 6) for pool, keep in ((24, 12), (96, 12), (96, 24))
    ]


def test_costs_and_signals_of_known_measurements():
    """Two prompts; 96 seeds at 10 ms, 24 at 30 + 20 ms: 0.96 + 1.2 s. With 48: 0.48 + 1.2 s.

    Half dropped after 4 of 6 steps of 1 ms, decoding 4 ms: 96 (8 + (2 + 4) / 2) ms instead of 96 x
    10.
    """
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((2, 96)).astype(np.float32)
    own, less = Setting("fp32", 6, 96, 24), Setting("fp32", 6, 48, 24)
    kind, early = ("fp32", 6, None, None), ("fp32", 6, None, 4)
    found = Measurements(
        truth, {kind: truth, early: truth}, {kind: 0.010, early: 0.008}, 0.030, 0.020
    )
    config = load("quickstart")
    expected = TuneOptions(prune=(4,))
    first, second, pruned = make_rows(found, {own: config, less: config}, own, expected, 0)
    whole = 96 * 0.010 + 24 * 0.050
    assert first.cost == 1 and second.cost == pytest.approx((48 * 0.010 + 1.2) / whole)
    assert pruned.cost == pytest.approx((96 * (0.008 + 0.003) + 1.2) / whole)
    assert pruned.pruned is not None and pruned.pruned.exploring == pytest.approx(1.1)
    assert (first.more.mean, first.more.low) == (0, 0)
    ordered = np.sort(truth, axis=1)
    contrast = (ordered[:, -12:].mean(1) - ordered[:, :12].mean(1)).mean()
    assert first.contrast.mean == pytest.approx(contrast, rel=1e-6)
    assert first.strength.mean == pytest.approx(contrast * 24**0.5, rel=1e-6)
    assert second.more.mean == pytest.approx(second.contrast.mean / contrast - 1, rel=1e-6)
    assert second.more.mean < 0
    assert pruned.more.mean == 0  # the preview equals the true rewards, so nothing is lost
    assert choose([first, second, pruned], 1.0) is first
    assert choose([first, second, pruned], 0.9) is second and choose([first], 0.5) is None


@pytest.mark.parametrize(("sign", "contrast"), [(0.0, "0.0000"), (-1.0, "-7.0000")])
def test_settings_are_not_compared_with_one_that_finds_nothing(sign, contrast):
    """The same reward for every preview, or the reverse of the true ranking."""
    truth = np.arange(8, dtype=np.float32)[None].repeat(2, 0)
    own = Setting("fp32", 6, 8, 2)
    kind = ("fp32", 6, None, None)
    previews = sign * truth if sign else np.zeros_like(truth)
    if not sign:
        truth = np.ones_like(truth)
    found = Measurements(truth, {kind: previews}, {kind: 0.010}, 0.030, 0.020)
    with pytest.raises(RunFailed, match=f"own setting has a contrast of {contrast}: its previews"):
        make_rows(found, {own: load("quickstart")}, own, TuneOptions(), 0)


def test_operations_are_those_of_an_iteration():
    truth = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    own, less = Setting("emulated_nvfp4", 6, 96, 24), Setting("emulated_nvfp4", 3, 96, 24)
    kinds = [("emulated_nvfp4", steps, None, None) for steps in (6, 3)]
    found = Measurements(truth, dict.fromkeys(kinds, truth), dict.fromkeys(kinds, 1.0))
    configs = {each: load("quickstart", each.changes()) for each in (own, less)}
    two = {
        ratio: make_rows(found, configs, own, TuneOptions(by="operations", ratio=ratio), 0)[1].cost
        for ratio in (1.0, 4.0)
    }
    assert two[1.0] < two[4.0] < 1  # half of the steps save more where steps are expensive


def test_a_preview_is_the_clean_prediction_after_a_step(tiny_sd3_dir, tmp_path):
    """It is x - sigma v at the second time of a schedule of three, after one step."""
    import torch

    from policy.families import family_for
    from policy.sampling.noise import noise_for

    config = tiny_config(tiny_sd3_dir, tmp_path, "early")
    family = family_for(config.model)
    transformer = family.load_transformer("cpu", torch.float32)
    cond = family.load_text("cpu", torch.float32, None).encode(["a red circle"])
    found = sample(family, transformer, cond, [5], 3, "euler", stop_after=2)
    sigmas = family.sigmas(3)
    x = noise_for([5], family.latent_shape)
    with torch.no_grad():
        x = x + (sigmas[1] - sigmas[0]) * family.velocity(transformer, x, sigmas[0], cond)
        clean = x - sigmas[1] * family.velocity(transformer, x, sigmas[1], cond)
    assert torch.allclose(
        found, clean, atol=1e-6
    )  # float32, with another rounding in one subtraction
    whole = sample(family, transformer, cond, [5], 3, "euler")
    assert torch.equal(sample(family, transformer, cond, [5], 3, "euler", stop_after=3), whole)


def test_the_command_writes_a_configuration_that_loads(tiny_sd3_dir, tmp_path, capsys):
    config = tiny_config(tiny_sd3_dir, tmp_path, "tuned", explore__steps=3)
    file, out = write_toml(config, tmp_path), tmp_path / "out"
    pool, keep = config.explore.pool_size, config.selection.keep
    command = [
        *("tune", str(file), "--prompts", "2", "--seeds", str(2 * pool), "--steps", "2"),
        *("--pools", str(pool), str(2 * pool), "--prune", "2", "--out", str(out)),
    ]
    assert main([*command, "--budget", "100"]) == 0
    found = json.loads((out / "tune.json").read_text())
    assert found["own"] == {
        "backend": config.explore.backend,
        "steps": 3,
        "pool": pool,
        "keep": keep,
        "size": None,
    }
    assert [row["pruned"] and row["pruned"]["after"] for row in found["rows"]] == [None] * 3 + [2]
    assert found["rows"][0]["cost"] == 1 and found["rows"][0]["more"]["mean"] == 0
    best = max(found["rows"][:3], key=lambda row: row["strength"]["mean"])
    assert found["chosen"] == best["label"]
    tuned = load(str(out / "tuned.toml"))
    assert (tuned.explore.steps, tuned.explore.pool_size) == (
        best["setting"]["steps"],
        best["setting"]["pool"],
    )
    assert tuned.model == config.model and tuned.selection.keep == keep
    ET.fromstring((out / "tune.svg").read_text())
    assert "half of the pool dropped after step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget 0: must be above 0"),
        (["--ratio", "0.5"], "--ratio 0.5: expected at least 1"),
        (["--sizes", "256"], "--sizes 256: expected HEIGHTxWIDTH"),
        (["--sizes", "17x16"], "explore.height"),
        (["--steps", "0"], "--steps 0: must be above 0"),
        (["--seeds", "48"], "--seeds 48: a pool of 96 needs that many"),
        (["--keep", "5"], "--keep 5: equal numbers of best and worst"),
        (["--prune", "6"], "--prune 6: expected a step before the last of 6"),
        (["--prune", "4", "--by", "operations"], "--prune reports seconds"),
        (["--prune", "4", "--set", "explore.pool_size=32"], "explore at least 48"),
        (["--backends", "nvfp3"], "'nvfp3' is unknown"),
        (["--set", "arm=diffusionnft"], "arm 'diffusionnft' does not explore and regenerate"),
        (
            [
                "--set=objective.name=flow_grpo",
                "--set=explore.paths=true",
                "--set=explore.steps=10",
            ],
            "previews of paths are not measured",
        ),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message, capsys, tmp_path):
    assert main(["tune", "quickstart", *arguments, "--out", str(tmp_path / "o")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line and not (tmp_path / "o").exists()
