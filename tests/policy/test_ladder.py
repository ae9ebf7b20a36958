"""Which precision is the next finer one, and which a device can run."""

import pytest
import torch

from policy.precision.backends import BACKENDS, available_backends, finer_backend, precision_levels

EVERYTHING = tuple(BACKENDS)


@pytest.mark.parametrize(
    ("current", "available", "finest", "finer"),
    [
        ("te_nvfp4", EVERYTHING, "bf16", "fp8"),
        ("torch_nvfp4", EVERYTHING, "bf16", "fp8"),
        ("emulated_nvfp4", EVERYTHING, "fp32", "fp8"),
        ("fp8", EVERYTHING, "bf16", "bf16"),
        ("bf16", EVERYTHING, "bf16", None),  # as precise as what it stands for
        ("bf16", EVERYTHING, "fp32", "fp32"),
        ("fp32", EVERYTHING, "fp32", None),
        ("te_nvfp4", ("te_nvfp4", "bf16", "fp32"), "bf16", "bf16"),  # a GPU without FP8
        (
            "emulated_nvfp4",
            ("emulated_nvfp4", "fp32"),
            "fp32",
            "fp32",
        ),  # a device with neither FP8 nor BF16
        ("emulated_nvfp4", ("emulated_nvfp4", "fp32"), "bf16", None),
        ("emulated_nvfp4", (), "fp32", None),
    ],
)
def test_the_ladder_returns_the_next_finer_precision(current, available, finest, finer):
    assert finer_backend(current, available, finest) == finer


def test_every_backend_has_a_precision_level():
    assert sorted(name for names in precision_levels() for name in names) == sorted(BACKENDS)
    with pytest.raises(ValueError, match="'auto' has no precision level"):
        finer_backend("auto", EVERYTHING, "bf16")


def test_a_cpu_runs_all_but_the_kernels_of_gpus():
    assert set(available_backends("cpu")) == {"emulated_nvfp4", "fp8", "bf16", "fp32"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_runs_at_least_bf16():
    assert {"bf16", "fp32"} <= set(available_backends("cuda"))
