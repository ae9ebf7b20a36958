"""Whether Triton can be used is found out before a format that needs it is chosen."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from policy.precision import kernels
from policy.precision.compiling import compiled, compiler_missing

pytest.importorskip("triton", reason="the packing kernels need triton")


def test_kernels_require_cuda_and_triton(monkeypatch):
    assert (
        kernels.missing(torch.device("cpu")) == "the packing kernels run on CUDA only, not on cpu"
    )
    assert kernels.missing(torch.device("cuda")) is None
    monkeypatch.setattr(kernels, "_triton_unusable", lambda: "it is gone")
    assert kernels.missing(torch.device("cuda")) == "the packing kernels need Triton: it is gone"
    assert compiler_missing(torch.device("cuda")) == (
        "torch.compile needs Triton on a GPU: it is gone"
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="packing kernels run on CUDA, not on cpu"):
        kernels.fp8_pack(torch.ones(1, 16))


class Driver:
    """Triton's choice of a driver, which fails as it does without a compiler."""

    @property
    def active(self) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nor otherwise")


def test_triton_that_cannot_compile_is_named(monkeypatch):
    """Such as in containers without a compiler, where each launch would fail."""
    find = kernels._triton_unusable.__wrapped__
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("triton.runtime.driver", Driver())
    assert find() is None  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find() == (
        "RuntimeError: Failed to find C compiler. Please specify via CC: it needs a C compiler,"
        " Python's headers, and HOME or TRITON_CACHE_DIR that can be written"
    )
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=object()))
    assert find() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find() == "the package triton is not installed"


@pytest.mark.parametrize(("why", "expected"), [(None, 1.0), ("it is gone", -1.0)])
def test_compiled_passes_ask_for_the_kernels(monkeypatch, why, expected):
    """The answer is a constant of the graph, and how it was found is not traced."""

    def untraceable() -> str | None:
        torch._dynamo.graph_break()
        return why

    def chosen(x: Tensor) -> Tensor:
        return x + 1 if kernels.missing(torch.device("cuda")) is None else x - 1

    monkeypatch.setattr(kernels, "_triton_unusable", untraceable)
    monkeypatch.setenv("CXX", sys.executable)
    compiled(nn.Linear(1, 1), torch.device("cpu"))  # as before each compiled pass
    torch._dynamo.reset()
    traced = torch.compile(chosen, backend="eager", fullgraph=True)
    assert traced(torch.zeros(1)).item() == expected
