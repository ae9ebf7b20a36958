"""Installation of the simulated GPU in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.simulated_gpu.tensor import GPUTensor, factory

SOURCE = Path(__file__).with_name("device.cpp")
NAMES = {9: "NVIDIA H200", 10: "NVIDIA B200"}
FACTORIES = (
    *("empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "eye"),
    "randperm",
)
MEMORY = 80 << 30
registered: list[torch.library.Library] = []
"""Keeps the registered operators alive."""


class Queue:
    """A stream or an event: what is queued is done at once, and nobody waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> Queue:
        """Return the event itself."""
        return self

    def wait_stream(self, _: Queue) -> None:
        """Return at once."""

    record_event, wait_event = record, wait_stream


def missing() -> str | None:
    """Return why the GPU cannot be simulated here, or None if it can."""
    if torch.cuda.is_available():
        return "there is a real GPU"
    return None if shutil.which("g++") else "the simulated GPU needs g++"


def build(directory: Path) -> Path:
    """Compile ``device.cpp`` below ``directory``, in two seconds, and return the library."""
    library, home = directory / "device.so", Path(torch.__file__).parent
    places = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, *places], check=True)
    return library


def install(library: Path, capability: tuple[int, int] = (9, 0)) -> None:
    """Let torch have one GPU, for the rest of this process."""
    hooks: Any = ctypes.CDLL(str(library))
    hooks.install_hooks()
    _replace_queries(capability)
    _replace_nccl()
    _register_operators()
    # a parameter that moves to the GPU becomes another class, which `.data = ...` cannot do
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Tensor.data = property(_data, _set_data)  # pyright: ignore


@dataclass(frozen=True)
class Properties:
    """Properties of the GPU; each one that Ray grants, on each node, has another UUID."""

    name: str
    major: int
    minor: int
    total_memory: int = MEMORY

    @property
    def uuid(self) -> str:
        # read at each call: the process is installed before Ray grants it a GPU
        names = ("RAY_NODE_ID", "CUDA_VISIBLE_DEVICES")
        return "-".join(["simulated", *(os.environ.get(name, "") for name in names)])


def _replace_queries(capability: tuple[int, int]) -> None:
    """Let torch.cuda say that there is a GPU of this compute capability."""
    name = NAMES[capability[0]]
    properties = Properties(name, *capability)
    page_locking = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_capability": capability, "get_device_name": name,
        "get_device_properties": properties, "mem_get_info": (MEMORY, MEMORY),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0,
        "is_current_stream_capturing": False, "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "set_per_process_memory_fraction": None,
        "_lazy_init": None, "cudart": page_locking,
        "current_stream": Queue(), "stream": nullcontext(),
    }  # fmt: skip
    for query, answer in answers.items():
        setattr(torch.cuda, query, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = Queue  # pyright: ignore


def _replace_nccl() -> None:
    """Let gloo, on the CPU values, do what NCCL does for processes on GPUs."""
    init = dist.init_process_group

    def init_gloo(backend: str, **options: Any) -> None:
        init("gloo" if backend == "nccl" else backend, **options)

    dist.init_process_group = init_gloo


def _register_operators() -> None:
    """Register what makes tensors on a GPU; operators on them are those of ``GPUTensor``."""
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        library.impl(name, factory(getattr(torch, name.partition(".")[0])), "CUDA")
    library.impl("empty.memory_format", factory(torch.empty), "CUDA")
    # torch.tensor(..., device="cuda") writes where operators of subclasses are not used
    library.impl("copy_", _copy, "CUDA")
    registered.append(library)


def _copy(target: GPUTensor, source: Tensor, non_blocking: bool = False) -> GPUTensor:
    target.host.copy_(source.host if isinstance(source, GPUTensor) else source)
    return target


def _data(tensor: Tensor) -> Tensor:
    return torch._C.TensorBase.data.__get__(tensor)  # pyright: ignore


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, GPUTensor) and not isinstance(value, GPUTensor):
        torch._C.TensorBase.data.__set__(tensor, value)  # pyright: ignore
        return
    new = value.detach()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)
