"""Which passes must not use cuDNN's attention: passes with gradients, including their backward
passes, and passes whose densities are used for training. The tests read torch's own switch, which
also exists on a CPU.
"""

from collections.abc import Iterator

import pytest
import torch

import learner.generator
import learner.update
from learner.trainer import Trainer
from policy.attention import without_cudnn_attention
from tests.learner.tiny import tiny_groups, tiny_trainer

CUDA = torch.device("cuda")


def allowed() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(autouse=True)
def gpu_behavior(monkeypatch) -> Iterator[None]:
    before = allowed()
    torch.backends.cuda.enable_cudnn_sdp(True)
    for module in (learner.update, learner.generator):
        monkeypatch.setattr(
            module, "without_cudnn_attention", lambda device: without_cudnn_attention(CUDA)
        )
    yield
    assert allowed()
    torch.backends.cuda.enable_cudnn_sdp(before)


def recorded_passes(trainer: Trainer) -> list[tuple[str, bool]]:
    """Record the direction and whether cuDNN was allowed, for every pass of the second block."""
    passes: list[tuple[str, bool]] = []
    block = next(m for n, m in trainer.transformer.named_modules() if n.endswith("blocks.1"))
    block.register_forward_hook(lambda *_: passes.append(("forward", allowed())))
    block.register_full_backward_hook(lambda *_: passes.append(("backward", allowed())))
    return passes


def test_context_disables_cudnn_only_inside_and_only_on_cuda():
    with without_cudnn_attention(torch.device("cpu")):
        assert allowed()
    with pytest.raises(KeyError), without_cudnn_attention(CUDA):
        assert not allowed()
        raise KeyError
    assert allowed()


@pytest.mark.parametrize("recomputed", [False, True])
def test_update_never_uses_cudnn_attention(tiny_sd3_dir, recomputed):
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"gradient_checkpointing": recomputed})
    passes = recorded_passes(trainer)
    trainer.update(0, tiny_groups(1))
    assert {direction for direction, _ in passes} == {"forward", "backward"}
    assert not any(allowed for _, allowed in passes)


@pytest.mark.parametrize(("objective", "expected"), [("diffusion_nft", True), ("flow_grpo", False)])
def test_regeneration_allows_cudnn_attention_unless_it_records_paths(
    tiny_sd3_dir, objective, expected
):
    trainer = tiny_trainer(tiny_sd3_dir, objective={"name": objective})
    passes = recorded_passes(trainer)
    trainer.generator.generate(tiny_groups(1)[0].cond, [1, 2])
    assert passes and {allowed for _, allowed in passes} == {expected}
