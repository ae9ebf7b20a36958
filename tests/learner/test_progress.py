"""Training that does not fail but also learns nothing. The tests inject such faults. Each is
refused with one line, and weights stay unchanged.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.training import Lora
from learner.trained_adapter import NothingLearned
from learner.trainer import Trainer
from policy import lora, lora_files
from policy.families.sd3 import SD3
from tests.learner.tiny import tiny_groups, tiny_trainer


def state(trainer: Trainer) -> str:
    return trainer.checksum()


def make_gradients_zero(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, **more: float) -> None:
    """Multiply the objective's loss by zero. ``more``: further metrics under ``loss/``."""
    loss = trainer.objective.loss
    extra = {f"loss/{name}": torch.tensor(value) for name, value in more.items()}

    def zero_loss(*args):
        value, metrics = loss(*args)
        return value * 0, metrics | extra

    monkeypatch.setattr(trainer.objective, "loss", zero_loss)


def test_gradients_of_zero_are_refused(tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    before, groups = state(trainer), tiny_groups()
    make_gradients_zero(trainer, monkeypatch)
    with pytest.raises(NothingLearned, match="every gradient is zero although advantages are not"):
        trainer.update(0, groups)
    assert state(trainer) == before


def test_an_iteration_of_clipped_ratios_trains_on_by_its_moments(tiny_sd3_dir, monkeypatch):
    """Clipped ratios have no gradient. One such iteration must not end a run."""
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"lr": 1e-2, "weight_decay": 0.0})
    trainer.update(0, tiny_groups())
    before = state(trainer)
    make_gradients_zero(trainer, monkeypatch, clip_share=1.0)
    metrics = trainer.update(1, tiny_groups())
    assert metrics["grad_norm"] == 0.0 and metrics["loss/clip_share"] == 1.0
    assert state(trainer) != before


def test_clipped_ratios_that_leave_all_weights_unchanged_are_refused(tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"lr": 1e-2, "weight_decay": 0.0})
    before = state(trainer)
    make_gradients_zero(trainer, monkeypatch, clip_share=1.0)
    with pytest.raises(NothingLearned, match=r"outside of objective.ratio_clip; raise it"):
        trainer.update(0, tiny_groups())
    assert state(trainer) == before


def test_optimizer_that_changes_nothing_is_refused(tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    before, groups = state(trainer), tiny_groups()
    monkeypatch.setattr(trainer.updater.trained.optimizer, "step", lambda: None)
    with pytest.raises(NothingLearned, match="the optimizer changed no weight although"):
        trainer.update(0, groups)
    assert state(trainer) == before


def test_learning_rate_that_is_lost_in_rounding_is_refused(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"lr": 1e-30, "weight_decay": 0.0, "eps": 1e-3})
    with pytest.raises(NothingLearned, match=r"optimizer.lr = 1e-30 a step is lost to rounding"):
        trainer.update(0, tiny_groups())


@pytest.mark.parametrize("name", ["ema", "old"])
def test_average_that_does_not_change_is_refused(name, tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    original = lora.blend

    def blend_except_one(transformer, dst, src, decay):
        if dst != name:
            original(transformer, dst, src, decay)

    monkeypatch.setattr("learner.averages.blend", blend_except_one)
    with pytest.raises(NothingLearned, match=f"the average {name!r} did not move although"):
        trainer.update(0, tiny_groups())


def test_ema_decay_that_rounds_to_one_is_refused(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, ema={"decay": 1 - 2**-53}, optimizer={"lr": 1e-4})
    with pytest.raises(NothingLearned, match="a step is lost to rounding; lower ema.decay"):
        trainer.update(0, tiny_groups())


def test_equal_rewards_are_not_an_error(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir)
    groups = tiny_groups()
    for group in groups:
        group.rewards[:] = 0.5
    metrics = trainer.update(0, groups)
    assert metrics["zero_std_ratio"] == 1.0


def test_every_lora_target_must_match_a_layer(tiny_sd3_dir, monkeypatch):
    """A LoRA target of the family that matches no layer of this model is an error."""
    monkeypatch.setattr(SD3, "lora_targets", ("attn.to_q", "attn.to_out.zero"))
    with pytest.raises(ValueError, match=r"no linear .* ends in 'attn.to_out.zero'"):
        tiny_trainer(tiny_sd3_dir)


def test_layers_of_text_encoders_in_the_initial_lora_are_counted(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir)
    assert trainer.left_out == 0
    state = lora.adapter_state(trainer.transformer, "current")
    lora_files.save_diffusers_lora(tmp_path, state, Lora(rank=4, alpha=8))
    file = tmp_path / lora_files.FILE
    pair = {"A": torch.ones(4, 8), "B": torch.ones(8, 4)}
    encoder = {f"text_encoder.q_proj.lora_{part}.weight": value for part, value in pair.items()}
    save_file(load_file(file) | encoder, file)
    start = {"rank": 4, "alpha": 8, "init_from": str(tmp_path)}
    assert tiny_trainer(tiny_sd3_dir, perturb=False, lora=start).left_out == 1


def test_initial_lora_without_one_layer_is_refused(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir)
    lora_files.save_diffusers_lora(
        tmp_path, lora.adapter_state(trainer.transformer, "current"), Lora(rank=4, alpha=8)
    )
    file = tmp_path / lora_files.FILE
    remaining = {k: v for k, v in load_file(file).items() if "blocks.0.attn.to_out.0" not in k}
    save_file(remaining, file)
    start = {"rank": 4, "alpha": 8, "init_from": str(tmp_path)}
    with pytest.raises(
        ValueError,
        match=r"has nothing for 1 of \d+ adapted modules, such as '.*blocks.0.attn.to_out",
    ):
        tiny_trainer(tiny_sd3_dir, perturb=False, lora=start)
