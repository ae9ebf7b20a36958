"""Predicted speeds: compared with a manual calculation for a simple step, and with measurements of
the published models.
"""

import pytest
import torch

from bench.architectures import case_of
from policy.precision import cost
from policy.precision.accelerators import ACCELERATORS, accelerator_of
from policy.precision.backends import BACKENDS
from policy.precision.cost import FUSED, ISSUE, Step
from policy.precision.counting import step_of

STEPS = {
    "flux.1-dev": Step(
        595.077e12, 475.917e12, 266, 45.1852e9, 2728, 1162.18e9, 6.99241e9, 118.979e12, 118.979e12
    ),
    "sana-1.6b": Step(
        23.7333e12, 23.1596e12, 140, 2.86003e9, 986, 90.3002e9, 13.5494e9, 440.402e9, 470.809e9
    ),
    "sd3.5-large": Step(
        248.969e12, 190.841e12, 301, 22.8825e9, 3102, 495.26e9, 5.75629e9, 58.0108e12, 82.0396e12
    ),
    "sd3.5-medium": Step(
        89.9966e12, 56.0775e12, 215, 10.4272e9, 2306, 254.361e9, 1.77056e9, 33.8603e12, 47.8856e12
    ),
}
"""The counts that ``step_of`` gives for 8 images of 1024 x 1024 pixels and all text tokens in use.
"""
MEASURED = {
    "flux.1-dev": (1337.7, 1017.8, 1.0),
    "sana-1.6b": (240.8, 162.2, 3.0),
    "sd3.5-medium": (298.8, 193.0, 1.0),
    "sd3.5-large": (691.2, None, 1.0),
}
"""Milliseconds in BF16 on one H200, measured on 2026-11-23: eager, compiled, and the number of
images divided by 8.
"""


def achieved_rates(device, form):
    result = cost.rates_of(ACCELERATORS[device], form)
    assert result is not None
    return result


def test_predicted_seconds_match_a_manual_calculation():
    """The step has 1e15 operations. 0.8e15 of them are quantized. 0.1e15 are attention in heads
    that take twice as long. It moves 4e12 bytes, 1e12 of them for small products. The GPU is an
    H200.
    """
    step = Step(1e15, 0.8e15, 100, 1e10, 1000, 4e12, 1e12, 0.1e15, 0.2e15)
    memory, bf16 = 4.8e12 * 0.4, 0.9895e15 * 0.76
    attention = 0.2e15 / (0.9895e15 * 0.61)
    full = 0.9e15 / bf16 + attention + 4e12 / memory
    assert cost.seconds(step, achieved_rates("H200", "bf16")) == pytest.approx(full)
    products = 0.1e15 / bf16 + 0.8e15 / (1.979e15 * 0.74)
    quantized = products + attention + 4e12 / memory + 3e10 / (4.8e12 * 0.65)
    assert cost.seconds(step, achieved_rates("H200", "fp8")) == pytest.approx(quantized)
    moved = (1e12 + 0.25 * 3e12) / memory
    compiled = products + attention + moved + 3e10 / (4.8e12 * 0.65)
    assert cost.seconds(step, achieved_rates("H200", "fp8"), compiled=True) == pytest.approx(
        compiled
    )
    assert cost.speed(step, ACCELERATORS["H200"], "fp8", True) == pytest.approx(full / quantized)
    assert cost.rates_of(ACCELERATORS["H200"], "nvfp4") is None
    assert cost.speed(step, ACCELERATORS["H200"], "nvfp4", True) is None
    assert cost.speed(step, ACCELERATORS["H200"], "bf16", True) == 1.0


def test_kernel_launches_limit_a_tiny_step():
    step = Step(1e9, 0.9e9, 100, 1e6, 1000, 1e6)
    assert cost.seconds(step, achieved_rates("B200", "bf16")) == 1000 * ISSUE
    assert cost.seconds(step, achieved_rates("B200", "nvfp4")) == pytest.approx(1200 * ISSUE)
    result = cost.seconds(step, achieved_rates("B200", "nvfp4"), compiled=True)
    assert result == pytest.approx(750 * ISSUE)


def test_packing_by_the_previous_pass_counts_by_its_share():
    assert cost.packing_of("nvfp4", True, 1.0) == cost.PREVIOUS_PASS
    mean = cost.packing_of("nvfp4", True, 0.75)
    assert (mean.kernels, mean.bytes) == pytest.approx((1.25, 0.25 * 4.69 + 0.75 * 2.69))
    assert cost.packing_of("fp8", True, 0.75) == FUSED["fp8"]
    assert cost.packing_of("nvfp4", False, 0.75) == cost.EAGER["nvfp4"]


def test_configured_share_applies_to_every_product():
    """A configured share of the peak applies to every format. TF32 has half the BF16 peak. The
    memory rate keeps its measured share.
    """
    at = cost.rates(100.0, 200.0, 2.0, "fp8", 0.5)
    assert (at.bf16, at.quantized, at.attention) == (50e12, 100e12, 50e12)
    assert at.decoding == (50e12, 25e12) and at.memory == 0.8e12


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_seconds_are_near_the_measured_ones(name):
    """Predictions in BF16 are within 11 % of the measurements. SANA was measured with 24 images,
    three times 8.
    """
    eager, compiled, times = MEASURED[name]
    at = achieved_rates("H200", "bf16")
    assert 1e3 * times * cost.seconds(STEPS[name], at) == pytest.approx(eager, rel=0.08)
    if compiled is not None:
        result = 1e3 * times * cost.seconds(STEPS[name], at, compiled=True)
        assert result == pytest.approx(compiled, rel=0.11)


def test_cuda_device_names_select_accelerators():
    for name, key in (
        ("NVIDIA H200", "H200"), ("NVIDIA GB200", "GB200"), ("NVIDIA B200", "B200"),
        ("NVIDIA GB300", "GB300"), ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ):  # fmt: skip
        assert accelerator_of(name) is ACCELERATORS[key], name
    assert accelerator_of("NVIDIA A100") is None
    assert cost.no_speedup_reason(STEPS["sana-1.6b"], "NVIDIA A100", "fp8") is None


def test_table_matches_the_performance_documentation():
    """The expected values are those that the documentation prints."""
    rows = cost.table(STEPS, ("H200", "B200"))
    assert [row[:2] for row in rows[1:]] == [
        [gpu, name] for gpu in ("H200", "B200") for name in STEPS
    ]
    assert rows[0][2:5] == ["fp8 eager", "fp8 by kernels", "fp8 compiled"]
    assert [row[2:] for row in rows[1:]] == [
        ["0.89", "1.23", "1.37", "", "", ""],
        ["0.84", "1.18", "1.33", "", "", ""],
        ["0.85", "1.19", "1.29", "", "", ""],
        ["0.79", "1.10", "1.16", "", "", ""],
        ["0.83", "1.18", "1.31", "0.37", "1.28", "1.54"],
        ["0.71", "1.13", "1.26", "0.17", "1.21", "1.18"],
        ["0.78", "1.14", "1.24", "0.34", "1.23", "1.40"],
        ["0.75", "1.07", "1.13", "0.32", "1.11", "1.19"],
    ]


def test_every_format_is_faster_with_kernels_and_slower_with_eager_packing():
    for device in ACCELERATORS.values():
        for step in STEPS.values():
            for form in FUSED:
                fast, slow = (cost.speed(step, device, form, fused) for fused in (True, False))
                assert fast is None or slow is None or slow < 1.0 < fast


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_published_steps_match_the_counted_ones(name):
    with case_of(name, 1024, False) as case:
        transformer = case.build("meta", torch.bfloat16)
        actual = step_of(case.family, transformer, BACKENDS["torch_nvfp4"], 8)
    for field, expected in vars(STEPS[name]).items():  # test_memory checks peak and widest
        assert getattr(actual, field) == pytest.approx(expected, rel=1e-3), field


def test_counts_of_a_small_model_match_a_manual_count():
    """The counts for a small SD3 model match a manual count. The shared input of to_q, to_k and
    to_v counts once.
    """
    with case_of("sd3.5-large", 256, True) as case:
        transformer = case.build("meta", torch.bfloat16)
        one, two = (step_of(case.family, transformer, BACKENDS["fp8"], batch) for batch in (1, 2))
    assert two.flops == 2 * one.flops and two.elements == 2 * one.elements
    assert two.inputs == one.inputs
    assert two.bytes - two.small == pytest.approx(2 * (one.bytes - one.small), rel=0.02)
    # with two images, fewer products are too small to use the GPU fully
    assert two.small < one.small
    tokens, text, width = (256 // 16) ** 2, case.family.conditioning_shapes["prompt_embeds"][0], 256
    # per block: q, k and v of image and text, their outputs, and two layers of 4 * width; the text
    # of the last block has neither output projection nor feed-forward layers
    image_elements, text_elements = tokens * width * (1 + 1 + 1 + 4), text * width * (1 + 1 + 1 + 4)
    assert one.elements == 2 * image_elements + text_elements + text * width
    assert one.inputs == 2 * 4 + 4 + 1
