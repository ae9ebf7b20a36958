"""Which precision is the next finer one, and which precisions a device can run."""

import pytest
import torch

from policy.precision.backends import BACKENDS, available_backends, finer_backend, precision_levels

ALL_BACKENDS = tuple(BACKENDS)


@pytest.mark.parametrize(
    ("current", "available", "finest", "finer"),
    [
        ("te_nvfp4", ALL_BACKENDS, "bf16", "fp8"),
        ("torch_nvfp4", ALL_BACKENDS, "bf16", "fp8"),
        ("emulated_nvfp4", ALL_BACKENDS, "fp32", "fp8"),
        ("fp8", ALL_BACKENDS, "bf16", "bf16"),
        ("bf16", ALL_BACKENDS, "bf16", None),  # already the finest allowed precision
        ("bf16", ALL_BACKENDS, "fp32", "fp32"),
        ("fp32", ALL_BACKENDS, "fp32", None),
        ("te_nvfp4", ("te_nvfp4", "bf16", "fp32"), "bf16", "bf16"),  # a GPU without FP8
        # a device with neither FP8 nor BF16
        ("emulated_nvfp4", ("emulated_nvfp4", "fp32"), "fp32", "fp32"),
        ("emulated_nvfp4", ("emulated_nvfp4", "fp32"), "bf16", None),
        ("emulated_nvfp4", (), "fp32", None),
    ],
)
def test_next_finer_precision_is_selected(current, available, finest, finer):
    assert finer_backend(current, available, finest) == finer


def test_every_backend_has_one_precision_level():
    assert sorted(name for names in precision_levels() for name in names) == sorted(BACKENDS)
    with pytest.raises(ValueError, match="'auto' has no precision level"):
        finer_backend("auto", ALL_BACKENDS, "bf16")


def test_cpu_supports_all_backends_except_gpu_kernels():
    assert set(available_backends("cpu")) == {"emulated_nvfp4", "fp8", "bf16", "fp32"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_supports_at_least_bf16():
    assert {"bf16", "fp32"} <= set(available_backends("cuda"))
