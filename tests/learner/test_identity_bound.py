"""The bound of the policy identity check for latents that other kernels computed."""

import pytest
import torch

from configs.schema import RunConfig
from learner.identity import SAFETY
from learner.trainer import Trainer
from tests.learner.tiny import tiny_config
from tests.tiny_families import encode, tiny_model


def test_the_bound_allows_rounding_where_the_conditioning_hardly_matters(tiny_qwen_image_dir):
    """The quantized activations of this model do not change with the last bit of its conditioning,
    so that measuring by it alone allowed nothing. A compiled denoiser then ended the run.
    """
    tree = tiny_config(tiny_qwen_image_dir).model_dump(exclude_unset=True)
    tree["model"] = tiny_model("qwen_image", tiny_qwen_image_dir)
    tree["explore"] = {"pool_size": 8, "backend": "emulated_nvfp4"}
    trainer = Trainer(RunConfig.model_validate(tree))
    exporter = trainer.exporter
    exporter.export("current", 0)
    cond = encode(trainer.family, ["a red circle"])
    _, _, bound = exporter.probe(cond, 0, [1], 2, "euler")
    roundings = 2 * len(exporter.table)
    eps = torch.finfo(torch.float32).eps
    assert bound == pytest.approx(SAFETY * roundings**0.5 * eps, rel=1e-6)
