"""Equal blocks that are run once count as much as blocks that are all run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.training import Lora
from policy import meta, pass_cost
from policy.counted_once import CountedOnce
from policy.families import Family, family_for
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan
from policy.sharding import blocks_of
from policy.tally import Tally
from tests.tiny_families import NAMES, tiny_model


@pytest.fixture
def family(name: str, directory: Path) -> Family:
    return family_for(tiny_model(name, directory))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_costs_what_it_costs_with_all_blocks_run(family, monkeypatch):
    """Its peak, its layers' calls and all sums, with and without adapters."""
    transformer = meta.meta_denoiser(family, torch.bfloat16)
    groups = pass_cost.groups_of(quantize_plan(transformer, family, (), BACKENDS["fp8"]))

    def costs() -> list[pass_cost.PassCost]:
        return [
            pass_cost.denoiser_cost(family, transformer, batch, torch.bfloat16, groups)
            for batch in (3, 3, 5)
        ]

    first, *once = costs()
    meta.adapt(transformer, family, Lora(rank=4))
    adapted = costs()[1:]
    assert all("forward" not in vars(block) for block in blocks_of(transformer))
    monkeypatch.setattr("policy.pass_cost.equal_blocks_once", lambda *_: nullcontext())
    assert costs()[1:] == adapted
    plain = meta.meta_denoiser(family, torch.bfloat16)
    every = [
        pass_cost.denoiser_cost(family, plain, batch, torch.bfloat16, groups) for batch in (3, 3, 5)
    ]
    assert every[0].flops == first.flops and every[1:] == once


def counted(of: str, tally: Tally, known: dict[Any, Any], ran: list[str]) -> CountedOnce:
    def split(x: torch.Tensor, scale: float, mask: torch.Tensor | None = None) -> Any:
        ran.append(of)
        y = (x * scale).to(torch.bfloat16)
        return {"parts": (y[:1], y[1:]), "same": x, "mask": mask, "rest": x[1:], "word": "a"}

    return CountedOnce(split, tally, known, of)


def test_results_keep_views_inputs_and_values():
    """A result may be views of one new storage, an input, a view of one, or no tensor."""
    known: dict[Any, Any] = {}
    ran: list[str] = []
    x, other = (torch.empty(3, 4, device="meta") for _ in range(2))
    with Tally() as tally:
        first = counted("a", tally, known, ran)(x, 2.0, mask=None)
        live, bytes_ = tally.live, tally.bytes
        second = counted("a", tally, known, ran)(other, 2.0, mask=None)
        assert tally.bytes == 2 * bytes_
        # inputs have size 0; the new storage in BF16 has both views
        assert live == 24 and tally.live == 2 * 24
    assert ran == ["a"] and second["same"] is not x and second["word"] == "a"
    for name, given in (("same", other), ("rest", other)):
        assert second[name].untyped_storage()._cdata == given.untyped_storage()._cdata
    one, rest = second["parts"]
    assert one.untyped_storage()._cdata == rest.untyped_storage()._cdata
    assert [part.dtype for part in second["parts"]] == [torch.bfloat16] * 2
    for ours, theirs in zip(second["parts"], first["parts"], strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset()


def test_other_inputs_and_other_functions_are_run():
    known: dict[Any, Any] = {}
    ran: list[str] = []
    x = torch.empty(3, 4, device="meta")
    calls: list[tuple[str, torch.Tensor, float]] = [
        ("a", x, 2.0),
        ("a", x, 3.0),
        ("a", x.to(torch.bfloat16), 2.0),
        ("a", torch.empty(4, 3, device="meta").t(), 2.0),
        ("b", x, 2.0),
    ]
    with Tally() as tally:
        for _ in range(2):
            for of, given, scale in calls:
                counted(of, tally, known, ran)(given, scale)
    assert ran == ["a"] * 4 + ["b"]


def test_blocks_with_other_quantized_layers_are_run():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        model, x = Model(), torch.empty(2, 4)
    ran: list[nn.Module] = []
    for linear in (block[0] for block in model.blocks):  # type: ignore[index]
        linear.register_forward_pre_hook(lambda module, _: ran.append(module))
    names = ["blocks.0.0", "blocks.1.0", "blocks.3.0"]
    tally = Tally()
    with (
        torch.no_grad(),
        pass_cost.calls_of(model, names, tally) as calls,
        pass_cost.equal_blocks_once(model, names, calls, tally),
    ):
        model(x)
    assert [call.name for call in calls] == names and {call.flops for call in calls} == {64}
    assert ran == [model.blocks[0][0], model.blocks[2][0]]  # type: ignore[index]
    assert tally.flops == 4 * 64
