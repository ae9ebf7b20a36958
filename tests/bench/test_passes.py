"""Cost of the learner's passes relative to the bare model: closed forms, and the goals at a
published size.
"""

import json
from pathlib import Path

import pytest
import torch

from bench.passes import passes_of, plus, share
from configs.load import load
from configs.training import Lora
from planning.plan import open_architecture
from policy.families import family_for
from policy.lora import adapted_modules, inject
from policy.pass_cost import count_cost
from policy.precision.accelerators import ACCELERATORS
from policy.precision.cost import Step

META = torch.device("meta")


def test_passes_of_a_learner_add_up():
    """Bytes only, and 25 microseconds for a kernel where nothing else takes time."""
    gpu, moved = ACCELERATORS["H200"], Step(bytes=10**12)
    assert plus(moved, Step(flops=4, kernels=3), 2) == Step(flops=8, kernels=6, bytes=10**12)
    assert share(plus(moved, moved, 2), moved, gpu) == pytest.approx(2)
    assert share(Step(kernels=1500), Step(kernels=1000), gpu) == pytest.approx(0.5)


def test_kernels_and_bytes_of_an_adapted_linear():
    """R rows of I inputs and O outputs, rank r, two bytes each.

    Beside the product itself, A and B are rounded (6 bytes per number), x is read again, and y is
    read and written again. All of these products are small.
    """
    rows, into, out, rank = 64, 32, 48, 4
    host = torch.nn.ModuleDict({"only": torch.nn.Linear(into, out, device=META)})
    host.to(torch.bfloat16).requires_grad_(False)
    x = torch.empty(rows, into, device=META, dtype=torch.bfloat16)
    bare = count_cost(lambda: host["only"](x))
    with META:
        inject(host, Lora(rank=rank), ["only"], ["current"])
    layer = adapted_modules(host)[0][1]
    for part in (layer.lora_A, layer.lora_B):
        part["current"].float()
    found = count_cost(lambda: host["only"](x))
    assert (bare.kernels, found.kernels) == (1, 5)
    numbers = rank * (into + out)
    more = 6 * numbers + 2 * numbers + 2 * rows * into + 2 * 2 * rows * rank + 2 * 2 * rows * out
    assert found.bytes - bare.bytes == more
    assert found.flops - bare.flops == 2 * rows * numbers


@pytest.mark.parametrize("blocks", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_goals_hold_at_a_published_size(blocks):
    """SANA has the narrowest layers relative to their adapters: at most 10 % to regenerate and 25 %
    to train.

    On both GPUs. Its 20 blocks are alike and do nearly all of its work.
    """
    config = load("sana-sol_rl-hpsv2")
    with open_architecture(config) as (family, _):
        file = Path(family.directory) / "transformer" / "config.json"
        described_there = json.loads(file.read_text())
        assert described_there["num_layers"] == 20
        file.write_text(json.dumps(described_there | {"num_layers": blocks}))
        passes = passes_of(config, family_for(family.model))
    for gpu in ("H200", "B200"):

        def more(name: str, form: str, gpu: str = gpu) -> float:
            return share(passes[name][form], passes[name]["bare"], ACCELERATORS[gpu])

        assert 0 < more("regenerating", "merged") < 0.10
        assert 0 < more("training", "own") < 0.25
        assert 0 < more("forward", "own") < 0.25
