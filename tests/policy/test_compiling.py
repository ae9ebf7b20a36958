"""Compiling block by block: how many graphs are made, which weights are shared, and which results a
captured CUDA graph may reuse.
"""

import sys

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from policy.precision.backends import BACKENDS
from policy.precision.compiling import compiled
from policy.precision.fused import fuse_linears
from policy.precision.layer import LastInput

CPU = torch.device("cpu")
FP8 = BACKENDS["fp8"]


class Block(nn.Module):
    """A block with three attention products that are fused into one, and one separate product."""

    def __init__(self, replacement) -> None:
        super().__init__()
        linears = [nn.Linear(32, 32) for _ in range(4)]
        self.to_q, self.to_k, self.to_v = fuse_linears(linears[:3], replacement)
        self.out = replacement(linears[3])
        for layer, linear in zip((self.to_q, self.to_k, self.to_v, self.out), linears, strict=True):
            for name, tensor in FP8.pack(linear.weight, False).items():
                layer.wire_targets()[name].copy_(tensor)

    def forward(self, x):
        return x + self.out(torch.tanh(self.to_q(x) * self.to_k(x) + self.to_v(x)))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.proj_in = nn.Linear(32, 32)
        replacement = FP8.replacements("power_of_two")
        self.blocks = nn.ModuleList(Block(replacement) for _ in range(blocks))

    def forward(self, x):
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_equal_blocks_share_one_graph(graphs):
    transformer = Transformer(6)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    result = compiled(transformer, CPU)
    assert torch.equal(result(x), transformer(x))
    assert len(graphs) == 1


@torch.no_grad()
def test_the_original_stays_eager_and_shares_its_weights(graphs):
    transformer = Transformer(2)
    names = [name for name, _ in transformer.named_modules()]
    result = compiled(transformer, CPU)
    assert [name for name, _ in transformer.named_modules()] == names
    x = torch.ones(1, 32)
    result(x)
    for block in transformer.blocks:
        block.out.wire_targets()["scales"].mul_(2)
    transformer.proj_in.weight.data = torch.randn(32, 32)
    assert torch.equal(result(x), transformer(x))
    assert len(graphs) == 1


def test_module_without_blocks_is_compiled_as_one_graph(graphs):
    linear = nn.Linear(4, 4)
    assert torch.equal(compiled(linear, CPU)(torch.ones(4)), linear(torch.ones(4)))
    assert len(graphs) == 1


def test_captured_cuda_graph_packs_its_own_input(monkeypatch):
    """A CUDA graph must not reuse an input that was packed in a warm-up on the same tensor. The
    eager calls after the capture must pack again too, because a tensor that was made in a capture
    has values only after the graph has run.
    """
    capturing, packed_in_capture = [False], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with FakeTensorMode():
        x, last = torch.empty(4, 32, device="cuda:0"), LastInput()

        def pack(x):
            packed_in_capture.append(capturing[0])
            return x + 1

        for now in (False, False, True, False, False):
            capturing[0] = now
            last.get_or_compute(x, pack)
    assert packed_in_capture == [False, True, False]


class Attention(nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("trains", [False, True])
def test_training_graphs_set_their_attention_kernels(trains, monkeypatch):
    """Torch's attention switches take effect while a graph is made, not while it runs. Training
    graphs set their own switches, which also allow the fastest attention kernel on this device.
    """
    graph_nodes = []

    def record(graph, inputs):
        graph_nodes.append(str([node.target for node in graph.graph.nodes]))
        return graph

    monkeypatch.setenv("CXX", sys.executable)
    real, backend = torch.compile, aot_autograd(fw_compiler=record)
    monkeypatch.setattr(torch, "compile", lambda block, **_: real(block, backend=backend))
    torch._dynamo.reset()
    denoiser, x = compiled(Attention(), CPU, trains=trains), torch.ones(1, 2, 8, 16)
    with torch.no_grad():
        with sdpa_kernel(SDPBackend.MATH):
            denoiser(x)
        denoiser(x)
    assert ["flash_attention" in graph for graph in graph_nodes] == [trains]


@pytest.mark.parametrize("trains", [False, True])
def test_training_graphs_never_allow_cudnn_attention(trains, graphs):
    """The backward pass of cuDNN's attention is not reliable. The switch is read while the graph is
    made, because torch chooses the kernel then.
    """
    cudnn_enabled = []

    class ReadsSwitch(nn.Module):
        def forward(self, x):
            cudnn_enabled.append(torch._C._get_cudnn_sdp_enabled())
            return x + 1

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        compiled(ReadsSwitch(), CPU, trains=trains)(torch.ones(2))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert set(cudnn_enabled) == {not trains}
