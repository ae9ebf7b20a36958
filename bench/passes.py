"""What the learner's passes cost beside the bare model: ``python -m bench passes``.

Counts of the published architectures as the presets run them, on tensors without data, so they hold
on any machine: multiplications, kernels, and the bytes that kernels read and write. Seconds are of
a roofline: each kernel takes what its multiplications or its bytes take, whichever is more, at the
shares of the vendor's peaks that ``policy.precision.cost`` assumes. No GPU has confirmed them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.packing import Counting
from configs.load import MODELS, load
from configs.schema import RunConfig
from configs.section import Tree
from planning.make import described
from policy.checkpointing import checkpoint_blocks
from policy.families import Family
from policy.lora import adapted_modules, use
from policy.memory import conditioning_like
from policy.merging import merged
from policy.meta import META, adapt, blank
from policy.precision.accelerators import ACCELERATORS, Accelerator
from policy.precision.cost import ISSUE, SUSTAINED
from policy.tally import flop_counts, fused_attention
from policy.types import DTYPES

GPUS = ("H200", "B200")
HOW_TO_READ = (
    "beside the bare model: its own forward pass, or forward and backward pass to its inputs, with"
    " no adapter; 'products': beside its products and attention alone; regenerating merges once for"
    " all steps of a call"
)


@dataclass(frozen=True)
class Kernel:
    """One operation: multiplications and additions, the dtype that they are in, bytes moved."""

    flops: int
    dtype: torch.dtype
    bytes: int


class Kernels(Counting):
    """Every operation that runs inside, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note it."""
        operations, moved = self.operations, self.read + self.written
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.operations > operations:
            count = flop_counts().get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            dtype = given[0].dtype if given else torch.float32
            self.found.append(Kernel(flops, dtype, self.read + self.written - moved))
        return result


def seconds(kernels: Sequence[Kernel], accelerator: Accelerator, tf32: bool = True) -> float:
    """What they take one after the other, or are issued in if that is more; float32 products in
    TF32 at half of BF16's rate.
    """
    narrow = accelerator.bf16 * 1e12 * SUSTAINED["bf16"]
    whole = narrow / 2 if tf32 else accelerator.fp32 * 1e12 * SUSTAINED["bf16"]
    memory = accelerator.bandwidth * 1e12 * SUSTAINED["memory"]
    rates = {torch.bfloat16: narrow, torch.float16: narrow}
    busy = sum(
        max(kernel.flops / rates.get(kernel.dtype, whole), kernel.bytes / memory)
        for kernel in kernels
    )
    return max(busy, len(kernels) * ISSUE)


@dataclass(frozen=True)
class Pass:
    """One pass in one form; ``tf32``: whether float32 products may use it."""

    kernels: Sequence[Kernel]
    tf32: bool = True

    @property
    def totals(self) -> tuple[int, int, int]:
        """(multiplications and additions, kernels, bytes)."""
        moved = sum(kernel.bytes for kernel in self.kernels)
        return sum(kernel.flops for kernel in self.kernels), len(self.kernels), moved


def counted(do: Callable[[], object]) -> list[Kernel]:
    """The kernels of what ``do`` runs on the meta device."""
    with fused_attention(), Kernels() as kernels:
        do()
    return kernels.found


@contextmanager
def in_float32(transformer: nn.Module) -> Iterator[None]:
    """Within the context adapters compute in float32, as peft's own layers do."""
    from peft.tuners.lora import Conv2d, Linear

    layers = [layer for _, layer in adapted_modules(transformer)]
    for layer in layers:
        own = Conv2d if isinstance(layer, Conv2d) else Linear
        setattr(layer, "forward", MethodType(own.forward, layer))  # noqa: B010
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, "forward")


# ---- the passes of a run's learner


def passes_of(config: RunConfig, family: Family) -> dict[str, dict[str, Pass]]:
    """By pass, then by form, of one call at the run's sizes: "bare", and with one adapter in
    "float32" without TF32, in the base model's dtype ("own"), or "merged".
    """
    dtype = DTYPES[config.regenerate.precision]
    transformer = blank(family, "transformer", dtype)
    checkpoint_blocks(transformer, config.optimizer.recomputed)
    inputs = {
        rows: (
            torch.empty(rows, *family.latent_shape, device=META),
            conditioning_like(family, rows, dtype),
        )
        for rows in (config.regenerate.batch_size, config.optimizer.batch_size)
    }

    def forward() -> None:
        x, cond = inputs[config.regenerate.batch_size]
        with torch.no_grad():
            family.velocity(transformer, x, torch.tensor(0.5), cond)

    def both() -> None:
        x, cond = inputs[config.optimizer.batch_size]
        x = x.clone().requires_grad_()  # so that the bare model has a backward pass
        times = torch.full((len(x),), 0.5, device=META)
        family.velocity(transformer, x, times, cond).square().mean().backward()

    found = {"forward": {"bare": Pass(counted(forward))}, "training": {"bare": Pass(counted(both))}}
    adapt(transformer, family, config.lora)
    for form, context in (("float32", in_float32), ("own", nullcontext)):
        with context(transformer), use(transformer, "current"):
            for name, run in (("forward", forward), ("training", both)):
                transformer.zero_grad(set_to_none=True)
                found[name][form] = Pass(counted(run), tf32=form != "float32")

    def first() -> None:
        with merged(transformer, "current"):
            forward()

    calls = counted(first)
    with merged(transformer, "current"):
        step = counted(forward)
    calls += step * (config.regenerate.steps - 1)
    found["regenerating"] = {
        "bare": Pass([*found["forward"]["bare"].kernels] * config.regenerate.steps),
        "merged": Pass(calls),
    }
    return found


def share(form: Pass, bare: Pass, accelerator: Accelerator, products: bool = False) -> float:
    """How much more than the bare pass it takes: 0.1 is ten per cent. ``products``: beside the bare
    pass's products and attention alone, as if everything else cost nothing.
    """
    whole = seconds(bare.kernels, accelerator)
    more = seconds(form.kernels, accelerator, form.tf32) - whole
    if products:
        whole = seconds([kernel for kernel in bare.kernels if kernel.flops], accelerator)
    return more / whole


def as_rows(passes: dict[str, dict[str, Pass]]) -> list[Tree]:
    """A row per pass and form beside the bare one."""
    rows = []
    for name, forms in passes.items():
        bare = forms["bare"]
        for form, counts in forms.items():
            if form == "bare":
                continue
            more = [a / b - 1 for a, b in zip(counts.totals, bare.totals, strict=True)]
            row: Tree = {"pass": name, "form": form}
            row |= dict(zip(("multiplications", "kernels", "bytes"), more, strict=True))
            for gpu in GPUS:
                row[gpu] = share(counts, bare, ACCELERATORS[gpu])
                row[f"{gpu}, products"] = share(counts, bare, ACCELERATORS[gpu], products=True)
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench passes", description=HOW_TO_READ)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="of the presets, or configurations"
    )
    given = parser.parse_args(arguments)
    found: dict[str, list[Tree]] = {}
    for model in given.models:
        config = load(f"{model}-sol_rl-hpsv2" if model in MODELS else model)
        with described(config) as (family, _):
            found[model] = as_rows(passes_of(config, family))
        if given.json:
            continue
        for row in found[model]:
            numbers = "  ".join(
                f"{name} {value:+.1%}" for name, value in row.items() if isinstance(value, float)
            )
            print(f"{model:12} {row['pass']:13} {row['form']:8} {numbers}", flush=True)
    print(json.dumps(found, indent=1) if given.json else HOW_TO_READ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
