"""An update with non-finite numbers changes nothing, names the place, and saves its data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

from learner.nonfinite import NonFiniteTraining, first_nonfinite, first_nonfinite_module
from policy.lora import adapter_state
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state


def assert_all_or_nothing(trainer, failure_dir, groups, message: str) -> NonFiniteTraining:
    """Check that the update raises an error, changes nothing, and saves the data of the
    iteration.
    """
    before = training_state(trainer)
    with pytest.raises(NonFiniteTraining, match=message) as caught:
        trainer.update(5, groups)
    assert identical(before, training_state(trainer)) and trainer.done == 0
    assert "\n" not in str(caught.value)
    with safe_open(failure_dir / "iteration_000005.safetensors", "pt") as saved:
        assert saved.metadata()["iteration"] == "5" and saved.metadata()["seed"] == "11"
        for group in groups:
            key = f"prompt_{group.prompt_index:04d}"
            np.testing.assert_array_equal(
                saved.get_tensor(f"{key}/latents").numpy(), group.samples["latents"]
            )
            assert saved.get_tensor(f"{key}/rewards").tolist() == group.rewards.tolist()
            assert torch.equal(
                saved.get_tensor(f"{key}/cond/prompt_embeds"), group.cond.tensors["prompt_embeds"]
            )
        assert identical(
            adapter_state(trainer.transformer, "old"),
            {
                k.removeprefix("adapter/old/"): saved.get_tensor(k)
                for k in list(saved.keys())
                if k.startswith("adapter/old/")
            },
        )
    return caught.value


def test_non_finite_loss_names_the_module(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir, tmp_path)
    dict(trainer.transformer.named_modules())["transformer_blocks.1.ff.net.2"].weight.data[0, 0] = (
        float("nan")
    )
    error = assert_all_or_nothing(
        trainer,
        tmp_path,
        tiny_groups(),
        "iteration 5: the loss is nan.*'current' policy.*its data are in",
    )
    assert error.module == "transformer_blocks.1.ff.net.2"


def test_non_finite_old_policy_is_distinguished_from_the_current_one(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir, tmp_path)
    layer = dict(trainer.transformer.named_modules())["transformer_blocks.0.attn.to_q"]
    layer.lora_B["old"].weight.data[0, 0] = float("inf")
    error = assert_all_or_nothing(trainer, tmp_path, tiny_groups(), "'old' policy")
    assert error.module == "transformer_blocks.0.attn.to_q.lora_B.old"


def test_non_finite_latents_name_the_prompt(tiny_sd3_dir, tmp_path):
    groups = tiny_groups()
    groups[1].samples["latents"][0, 0, 0, 0] = np.nan
    assert_all_or_nothing(
        tiny_trainer(tiny_sd3_dir, tmp_path), tmp_path, groups, "latents of prompt 1 are not finite"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradient_names_its_module(tiny_sd3_dir, tmp_path, value):
    trainer = tiny_trainer(tiny_sd3_dir, tmp_path)
    name = "transformer_blocks.1.attn.to_k.lora_A.weight"
    trainer.updater.trained.parameters[name].register_hook(lambda grad: grad * value)
    assert (
        assert_all_or_nothing(trainer, tmp_path, tiny_groups(), "a gradient is not finite").module
        == name
    )


def test_overflowing_step_is_undone(tiny_sd3_dir, tmp_path):
    """The test simulates a learning rate that is much too large. torch itself refuses a step size
    beyond float32.
    """
    trainer = tiny_trainer(tiny_sd3_dir, tmp_path)
    name = "transformer_blocks.0.attn.to_v.lora_B.weight"
    step = trainer.updater.trained.optimizer.step

    def overflow():
        step()
        trainer.updater.trained.parameters[name].data[0, 0] = float("inf")

    trainer.updater.trained.optimizer.step = overflow
    error = assert_all_or_nothing(
        trainer, tmp_path, tiny_groups(), "a weight after the step is not finite"
    )
    assert error.module == name


def test_failure_in_the_second_step_undoes_the_first(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(
        tiny_sd3_dir, tmp_path, optimizer={"lr": 1e-2, "steps_per_iteration": 2, "batch_size": 100}
    )
    calls = []

    def spoil(grad):
        calls.append(1)
        return grad * float("nan") if len(calls) > 1 else grad

    trainer.updater.trained.parameters[
        "transformer_blocks.0.attn.to_k.lora_A.weight"
    ].register_hook(spoil)
    assert_all_or_nothing(trainer, tmp_path, tiny_groups(), "gradient")
    assert len(calls) == 2


def test_failure_to_save_the_data_does_not_hide_the_error(tiny_sd3_dir, tmp_path):
    (tmp_path / "file").write_text("")
    groups = tiny_groups()
    groups[0].samples["latents"][:] = np.inf
    with pytest.raises(
        NonFiniteTraining, match="latents of prompt 0.*could not be saved to .*file"
    ):
        tiny_trainer(tiny_sd3_dir, tmp_path / "file").update(1, groups)
    with pytest.raises(NonFiniteTraining, match="no failure directory was given"):
        tiny_trainer(tiny_sd3_dir).update(1, groups)


def test_first_nonfinite_module_follows_the_order_of_execution():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert first_nonfinite_module(model, lambda: model(x)) is None
    model[2].bias.data[0] = float("inf")
    assert first_nonfinite_module(model, lambda: model(x)) == "2"
    model[0].bias.data[1] = float("nan")
    assert first_nonfinite_module(model, lambda: model(x)) == "0"
    assert not any(module._forward_hooks for module in model)


def test_first_nonfinite_names_the_first_non_finite_tensor():
    good = {"a": torch.zeros(2), "b": torch.tensor([1.0])}
    assert first_nonfinite(good) is None
    assert first_nonfinite({**good, "c": torch.tensor([np.inf])}) == "c"
