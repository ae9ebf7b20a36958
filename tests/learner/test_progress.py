"""Learning in which nothing fails and nothing is learned: injected, and refused with a line, with
weights as they were.
"""

import pytest
from safetensors.torch import load_file, save_file

from configs.training import Lora
from learner.trained_adapter import NothingLearned
from learner.trainer import Trainer
from policy import lora, lora_files
from policy.families.sd3 import SD3
from tests.learner.tiny import tiny_groups, tiny_trainer


def state(trainer: Trainer) -> str:
    return trainer.checksum()


def test_gradients_of_zero_are_refused(tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    before, groups = state(trainer), tiny_groups()
    loss = trainer.objective.loss

    def blind(*args):
        value, metrics = loss(*args)
        return value * 0, metrics

    monkeypatch.setattr(trainer.objective, "loss", blind)
    with pytest.raises(NothingLearned, match="every gradient is zero although advantages are not"):
        trainer.update(0, groups)
    assert state(trainer) == before


def test_an_optimizer_that_skips_is_refused(tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    before, groups = state(trainer), tiny_groups()
    monkeypatch.setattr(trainer.updater.trained.optimizer, "step", lambda: None)
    with pytest.raises(NothingLearned, match="the optimizer changed no weight although"):
        trainer.update(0, groups)
    assert state(trainer) == before


def test_a_learning_rate_lost_to_rounding_is_refused(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"lr": 1e-30, "weight_decay": 0.0, "eps": 1e-3})
    with pytest.raises(NothingLearned, match=r"optimizer.lr = 1e-30 a step is lost to rounding"):
        trainer.update(0, tiny_groups())


@pytest.mark.parametrize("name", ["ema", "old"])
def test_an_average_that_does_not_move_is_refused(name, tiny_sd3_dir, monkeypatch):
    trainer = tiny_trainer(tiny_sd3_dir)
    honest = lora.blend

    def stuck(transformer, dst, src, decay):
        if dst != name:
            honest(transformer, dst, src, decay)

    monkeypatch.setattr("learner.averages.blend", stuck)
    with pytest.raises(NothingLearned, match=f"the average {name!r} did not move although"):
        trainer.update(0, tiny_groups())


def test_an_ema_whose_decay_rounds_to_one_is_refused(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, ema={"decay": 1 - 2**-53}, optimizer={"lr": 1e-4})
    with pytest.raises(NothingLearned, match="a step is lost to rounding; lower ema.decay"):
        trainer.update(0, tiny_groups())


def test_equal_rewards_are_not_a_failure(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir)
    groups = tiny_groups()
    for group in groups:
        group.rewards[:] = 0.5
    metrics = trainer.update(0, groups)
    assert metrics["zero_std_ratio"] == 1.0


def test_every_layer_of_the_family_must_exist(tiny_sd3_dir, monkeypatch):
    """A list of the family's that misses ``to_out.0`` in this model is no list for this model."""
    monkeypatch.setattr(SD3, "lora_targets", ("attn.to_q", "attn.to_out.zero"))
    with pytest.raises(ValueError, match=r"no linear .* ends in 'attn.to_out.zero'"):
        tiny_trainer(tiny_sd3_dir)


def test_a_lora_that_misses_a_layer_is_refused(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir)
    lora_files.save_diffusers_lora(
        tmp_path, lora.adapter_state(trainer.transformer, "current"), Lora(rank=4, alpha=8)
    )
    file = tmp_path / lora_files.FILE
    kept = {k: v for k, v in load_file(file).items() if "blocks.0.attn.to_out.0" not in k}
    save_file(kept, file)
    start = {"rank": 4, "alpha": 8, "init_from": str(tmp_path)}
    with pytest.raises(
        ValueError,
        match=r"has nothing for 1 of \d+ adapted modules, such as '.*blocks.0.attn.to_out",
    ):
        tiny_trainer(tiny_sd3_dir, perturb=False, lora=start)
