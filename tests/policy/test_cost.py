"""Predicted speeds: by hand on a step that is easy to add up, and for the published models."""

import pytest
import torch

from bench.architectures import case_of
from policy.families.architectures import build
from policy.precision import cost
from policy.precision.accelerators import ACCELERATORS, accelerator_of
from policy.precision.backends import BACKENDS
from policy.precision.cost import FUSED, ISSUE, Step
from policy.precision.counting import step_of

STEPS = {
    "flux.1-dev": Step(595.077e12, 475.917e12, 266, 45.185e9, 3792, 1622.37e9),
    "sana-1.6b": Step(23.733e12, 23.160e12, 140, 2.860e9, 1106, 76.94e9),
    "sd3.5-large": Step(248.969e12, 190.841e12, 301, 22.883e9, 3216, 515.44e9),
    "sd3.5-medium": Step(89.997e12, 56.078e12, 215, 10.427e9, 2378, 262.88e9),
}
"""As ``step_of`` counts them: 8 images of 1024 x 1024, all text tokens in use."""


def test_seconds_by_hand():
    """1e15 operations, 0.8e15 of them quantised, and 4e12 bytes, on an H200."""
    step, device = Step(1e15, 0.8e15, 100, 1e10, 1000, 4e12), ACCELERATORS["H200"]
    memory = 4.8e12 * 0.8
    full = 1e15 / (0.9895e15 * 0.7) + 4e12 / memory
    assert cost.seconds(step, device, "bf16", None) == pytest.approx(full)
    quick = 0.2e15 / (0.9895e15 * 0.7) + 0.8e15 / (1.979e15 * 0.6) + (4e12 + 3e10) / memory
    assert cost.seconds(step, device, "fp8", FUSED["fp8"]) == pytest.approx(quick)
    assert cost.speed(step, device, "fp8", True) == pytest.approx(full / quick)
    assert cost.seconds(step, device, "nvfp4", FUSED["nvfp4"]) is None
    assert cost.speed(step, device, "bf16", True) == 1.0


def test_a_process_that_cannot_keep_up_decides():
    step = Step(1e9, 0.9e9, 100, 1e6, 1000, 1e6)
    assert cost.seconds(step, ACCELERATORS["B200"], "bf16", None) == 1000 * ISSUE
    found = cost.seconds(step, ACCELERATORS["B200"], "nvfp4", FUSED["nvfp4"])
    assert found == pytest.approx(1200 * ISSUE)


def test_the_devices_that_cuda_names():
    for name, key in (
        ("NVIDIA H200", "H200"), ("NVIDIA GB200", "GB200"), ("NVIDIA B200", "B200"),
        ("NVIDIA GB300", "GB300"), ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ):  # fmt: skip
        assert accelerator_of(name) is ACCELERATORS[key], name
    assert accelerator_of("NVIDIA A100") is None
    assert cost.slower(STEPS["sana-1.6b"], "NVIDIA A100", "fp8") is None


def test_the_table_of_docs_performance():
    """Golden: what the documentation prints."""
    rows = cost.table(STEPS, ("H200", "B200"))
    assert rows == [
        ["GPU", "model", "fp8 eager", "fp8 by kernels", "nvfp4 eager", "nvfp4 by kernels"],
        ["H200", "flux.1-dev", "0.93", "1.24", "", ""],
        ["H200", "sana-1.6b", "0.84", "1.27", "", ""],
        ["H200", "sd3.5-large", "0.86", "1.24", "", ""],
        ["H200", "sd3.5-medium", "0.78", "1.15", "", ""],
        ["B200", "flux.1-dev", "0.85", "1.20", "0.38", "1.38"],
        ["B200", "sana-1.6b", "0.76", "1.21", "0.29", "1.42"],
        ["B200", "sd3.5-large", "0.78", "1.20", "0.31", "1.39"],
        ["B200", "sd3.5-medium", "0.72", "1.11", "0.28", "1.21"],
    ]


def test_packed_by_kernels_every_format_gains_on_every_model_and_eagerly_none_does():
    for device in ACCELERATORS.values():
        for step in STEPS.values():
            for form in FUSED:
                fast, slow = (cost.speed(step, device, form, fused) for fused in (True, False))
                assert fast is None or slow is None or slow < 1.0 < fast


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_steps_are_what_is_counted(name):
    with case_of(name, 1024, False) as case:
        transformer = build(case.part, "meta", torch.bfloat16)
        found = step_of(case.family, transformer, BACKENDS["torch_nvfp4"], 8)
    for field, wanted in vars(STEPS[name]).items():
        assert getattr(found, field) == pytest.approx(wanted, rel=1e-3), field


def test_a_small_model_by_hand():
    """SD3's blocks in small: the joint input of to_q, to_k and to_v counts once."""
    with case_of("sd3.5-large", 256, True) as case:
        transformer = build(case.part, "meta", torch.bfloat16)
        one, two = (step_of(case.family, transformer, BACKENDS["fp8"], batch) for batch in (1, 2))
    assert two.flops == 2 * one.flops and two.elements == 2 * one.elements
    assert two.inputs == one.inputs and two.bytes > 1.9 * one.bytes
    tokens, text, width = (256 // 16) ** 2, case.family.conditioning_shapes["prompt_embeds"][0], 256
    # per block: q, k, v of image and text, their outputs, and two layers of 4 * width; the last
    # block's text has neither output nor feed-forward
    image, words = tokens * width * (1 + 1 + 1 + 4), text * width * (1 + 1 + 1 + 4)
    assert one.elements == 2 * image + words + text * width
    assert one.inputs == 2 * 4 + 4 + 1
