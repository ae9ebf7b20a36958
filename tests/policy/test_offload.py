"""Offloaded weights come back unchanged: the same objects, shapes, strides and bits."""

import pytest
import torch
from torch import nn

from policy.offload import ALIGNED, VECTOR, Offload, frozen_tensors

CPU = torch.device("cpu")


class Model(nn.Module):
    """A model with several dtypes, a tied weight, a channels-last layout, and a scale that is NaN
    with a payload.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.tied = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last)
        self.register_buffer("codes", torch.arange(7, dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor(0x7FC01234).to(torch.int32).view(torch.float32))
        self.register_buffer("nothing", torch.zeros(0, 3))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (bits(each), each.dtype, tuple(each.shape), each.stride())
        for name, each in model.state_dict().items()
    }


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor.numel()]


def test_tensors_move_and_return_bit_for_bit():
    model = Model().requires_grad_(False)
    before, tensors = state(model), list(frozen_tensors(model))
    offload = Offload(frozen_tensors(model), CPU)
    host_addresses = addresses(tensors)
    assert offload.away and state(model) == before
    for _ in range(2):
        assert offload.to_device() == offload.nbytes == sum(t.nbytes for t in tensors)
        device_addresses = addresses(tensors)
        assert (
            not set(device_addresses) & set(host_addresses)
            and not offload.away
            and state(model) == before
        )
        assert offload.to_device() == 0
        assert offload.to_host() == offload.nbytes and offload.to_host() == 0
        # host memory is allocated only once
        assert addresses(tensors) == host_addresses and state(model) == before
    assert model.tied.weight is model.first.weight
    assert all(old is new for old, new in zip(tensors, frozen_tensors(model), strict=True))
    assert all(address % ALIGNED == host_addresses[0] % ALIGNED for address in host_addresses)


def test_changes_on_the_device_are_kept():
    model = Model().requires_grad_(False)
    offload = Offload(frozen_tensors(model), CPU)
    offload.to_device()
    model.get_buffer("codes").add_(1)
    offload.to_host()
    offload.to_device()
    assert model.get_buffer("codes").tolist() == list(range(1, 8))


def test_adapters_are_not_offloaded():
    model = nn.Module()
    model.block = nn.Module()
    model.block.base_layer = nn.Linear(2, 2)
    model.block.lora_A = nn.ModuleDict({"ema": nn.Linear(2, 1, bias=False)})
    moving = list(frozen_tensors(model))
    base: nn.Linear = model.block.base_layer
    assert [id(each) for each in moving] == [id(base.weight), id(base.bias)]


def test_tensor_whose_elements_share_memory_is_refused():
    model = nn.Module()
    model.register_buffer("one", torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"\(3,\) and strides \(0,\) cannot move to host memory"):
        Offload(frozen_tensors(model), CPU)


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@ON_A_GPU
def test_offloading_frees_all_gpu_memory():
    device, model = torch.device("cuda"), nn.Linear(4096, 4096).requires_grad_(False)
    before, x = state(model), torch.ones(1, 4096)
    # the workspace of the library remains allocated
    x.to(device) @ torch.ones(4096, 1, device=device)
    empty = torch.cuda.memory_allocated()
    offload = Offload(frozen_tensors(model), device)
    for _ in range(2):
        assert torch.cuda.memory_allocated() == empty
        assert offload.to_device() == model.weight.nbytes + model.bias.nbytes
        assert model.weight.is_cuda and torch.cuda.memory_allocated() > empty
        assert bool(torch.isfinite(model(x.to(device))).all())
        offload.to_host()
        assert state(model) == before


@pytest.mark.gpu
@ON_A_GPU
def test_compiled_model_uses_the_returned_weights_on_a_gpu():
    device, model = torch.device("cuda"), nn.Linear(64, 64).requires_grad_(False)
    offload, x = Offload(frozen_tensors(model), device), torch.ones(2, 64, device=device)
    compiled = torch.compile(model, dynamic=False)
    result = []
    for _ in range(3):
        offload.to_device()
        blocker = torch.empty(1 << 20, device=device)  # so that addresses change
        result.append(compiled(x).cpu())
        offload.to_host()
        del blocker
    assert all(torch.equal(each, result[0]) for each in result)


@pytest.mark.parametrize("offset", [0, 8, 24, 36])
def test_alignment_on_a_cpu_is_kept_because_products_of_one_row_round_by_it(offset):
    """In a safetensors file weights start at any multiple of 8 bytes. On an AMD EPYC, MKL's product
    of one row differed in the last bit after a move to memory that was aligned to 64 bytes.
    """
    arena = torch.zeros(256 * 32 * 4 + offset + 64, dtype=torch.uint8)
    start = offset - arena.data_ptr() % VECTOR + VECTOR
    model = nn.Linear(256, 32, bias=False)
    values = model.weight.detach().clone()
    weight = arena[start : start + values.nbytes].view(torch.float32).view(32, 256)
    model.weight = nn.Parameter(weight.copy_(values), requires_grad=False)
    row = torch.linspace(-1, 1, 256)[None]
    before = model(row)
    offload = Offload(frozen_tensors(model), CPU)
    for move in (offload.to_device, offload.to_host, offload.to_device):
        move()
        assert model.weight.data_ptr() % VECTOR == offset
        assert torch.equal(model.weight, values) and torch.equal(model(row), before)
