"""Which passes do without cuDNN's attention: those with a gradient, backward too, and those whose
density is trained. The switch is torch's own, which a CPU has too.
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
def as_on_a_gpu(monkeypatch) -> Iterator[None]:
    before = allowed()
    torch.backends.cuda.enable_cudnn_sdp(True)
    for module in (learner.update, learner.generator):
        monkeypatch.setattr(
            module, "without_cudnn_attention", lambda device: without_cudnn_attention(CUDA)
        )
    yield
    assert allowed()
    torch.backends.cuda.enable_cudnn_sdp(before)


def watched(trainer: Trainer) -> list[tuple[str, bool]]:
    """(direction, whether cuDNN was allowed) of every pass of the second block."""
    seen: list[tuple[str, bool]] = []
    block = next(m for n, m in trainer.transformer.named_modules() if n.endswith("blocks.1"))
    block.register_forward_hook(lambda *_: seen.append(("forward", allowed())))
    block.register_full_backward_hook(lambda *_: seen.append(("backward", allowed())))
    return seen


def test_cudnn_attention_is_disabled_only_within_the_context_on_cuda():
    with without_cudnn_attention(torch.device("cpu")):
        assert allowed()
    with pytest.raises(KeyError), without_cudnn_attention(CUDA):
        assert not allowed()
        raise KeyError
    assert allowed()


@pytest.mark.parametrize("recomputed", [False, True])
def test_cudnn_attention_is_disabled_in_all_passes_of_an_update(tiny_sd3_dir, recomputed):
    trainer = tiny_trainer(tiny_sd3_dir, optimizer={"gradient_checkpointing": recomputed})
    seen = watched(trainer)
    trainer.update(0, tiny_groups(1))
    assert {direction for direction, _ in seen} == {"forward", "backward"}
    assert not any(allowed for _, allowed in seen)


@pytest.mark.parametrize(("objective", "expected"), [("diffusion_nft", True), ("flow_grpo", False)])
def test_merged_weights_use_any_attention_and_paths_that_of_training(
    tiny_sd3_dir, objective, expected
):
    trainer = tiny_trainer(tiny_sd3_dir, objective={"name": objective})
    seen = watched(trainer)
    trainer.generator.generate(tiny_groups(1)[0].cond, [1, 2])
    assert seen and {allowed for _, allowed in seen} == {expected}
