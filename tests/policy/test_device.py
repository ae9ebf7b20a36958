"""The device of a process. CUDA functions are replaced by fakes, so that the tests run on a CPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from policy import device


@pytest.fixture
def cuda(monkeypatch) -> list[float]:
    """Simulate a GPU for torch and return the list of memory fractions that were set."""
    memory_fractions: list[float] = []
    for name, value in {
        "is_available": lambda: True,
        "set_per_process_memory_fraction": memory_fractions.append,
        "get_device_name": lambda which: "NVIDIA H200",
        "get_device_capability": lambda which: (9, 0),
        "get_device_properties": lambda which: SimpleNamespace(uuid="GPU-1f2e"),
        "mem_get_info": lambda: (4 * 10**9, 141 * 10**9),
        "memory_allocated": lambda: 60 * 10**9,
        "memory_reserved": lambda: 65 * 10**9,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return memory_fractions


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Files of a CUDA driver and a toolkit, without the environment variable CUDA_VERSION."""
    monkeypatch.delenv("CUDA_VERSION", raising=False)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    (tmp_path / "driver").write_text(text)
    (tmp_path / "toolkit").write_text(json.dumps({"cuda": {"version": "13.0.1"}}))
    monkeypatch.setattr(device, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(device, "TOOLKIT", tmp_path / "toolkit")


def test_gpu_share_without_cuda_is_refused_in_one_line_with_all_versions(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(RuntimeError) as error:
        device.device_for("rollout", 0.5)
    message = str(error.value)
    assert message.startswith("services.rollout.gpus = 0.5, but torch sees no CUDA device: driver")
    assert "driver 580.65.06, CUDA toolkit 13.0.1, torch" in message and "for CUDA 12.8" in message
    assert message.endswith("or set services.rollout.gpus = 0") and "\n" not in message


def test_missing_driver_and_toolkit_are_reported(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VERSION", raising=False)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(device, "TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (device.driver(), device.toolkit()) == ("none found", "none found")
    assert device.torch_cuda() == "none (CPU build)"
    monkeypatch.setenv("CUDA_VERSION", "13.0.0")  # as set in a container image
    assert device.toolkit() == "13.0.0"


@pytest.mark.parametrize(
    ("gpus", "limited", "shares"),
    [(0.25, True, [0.25]), (0.25, False, []), (1, True, []), (2, True, [])],
)
def test_gpu_memory_is_limited_to_the_share(cuda, gpus, limited, shares):
    assert device.device_for("learner", gpus, limited) == torch.device("cuda")
    assert cuda == shares


def test_cuda_is_not_queried_without_a_gpu_share(monkeypatch):
    def fail() -> bool:
        raise AssertionError("is_available")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert device.device_for("encoder", 0) == torch.device("cpu")


def test_device_description_has_everything_that_results_depend_on(cuda, machine):
    assert device.describe(torch.device("cpu")) == {"device": "cpu", "torch": torch.__version__}
    assert device.describe(torch.device("cuda")) == {
        "device": "NVIDIA H200",
        "capability": "9.0",
        "torch": torch.__version__,
        "cuda": "13.0",
        "driver": "580.65.06",
        "gpu": "GPU-1f2e",
    }


def test_out_of_memory_message_has_requested_and_used_memory(cuda):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    assert device.out_of_memory(error) == (
        "2.50 GiB more were requested; this process holds 60.0 GB and 5.0 GB in allocator gaps,"
        " 4.0 of the GPU's 141.0 GB are free"
    )
    assert device.out_of_memory(RuntimeError("CUDA out of memory")) is None


def test_tf32_is_allowed_only_on_gpus(monkeypatch):
    """On a CPU the same switch would change the rounding of results."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert not device.tf32_allowed()
    try:
        device.allow_tf32(torch.device("cpu"), True)
        assert not device.tf32_allowed()
        device.allow_tf32(torch.device("cuda"), True)
        assert device.tf32_allowed()
        device.allow_tf32(torch.device("cuda"), False)
        assert not device.tf32_allowed() and not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_processes_on_one_gpu_report_the_same_name():
    """``sol-rl plan --from`` assigns actors that report the same GPU name to one GPU."""
    names = [device.describe(torch.device("cuda"))["gpu"] for _ in range(2)]
    assert names[0] == names[1] and len(names[0]) >= 32 and "object at" not in names[0]
