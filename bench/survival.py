"""How much of a small update survives quantisation? ``python -m bench.survival`` prints a table of packing choices.

Every layer that LoRA trains and explorers quantise gets a random update of rank ``lora.rank`` and of a given share of the weight's
norm. Before and after it the weight is packed; compared are the change of what the packed weights stand for and the true one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.load import ConfigError, load
from configs.schema import RunConfig
from learner.trainer import Trainer
from policy.lora import merged_weights
from policy.precision.backends import BACKENDS, Backend
from policy.precision.nvfp4 import frozen_amax
from policy.precision.swap import quantise_plan


@dataclass(frozen=True)
class Row:
    """One packing choice at one size of update, over all weights of the model at once."""

    format: str
    search: bool
    frozen: bool
    size: float  # of the update, as a share of the weights' norm
    cosine: float  # of the packed weights' change and the true one
    changed: float  # share of stored codes that differ
    growth: float  # norm of the packed weights' change over that of the true one
    error: float  # relative error of the packed weights before the update


def weights_of(config: RunConfig, backend: Backend) -> list[Tensor]:
    """Weights [N, K] of the base model's adapted modules that ``backend`` quantises."""
    trainer = Trainer(config)
    plan = quantise_plan(trainer.transformer, trainer.family, config.explore.keep_wide, backend)
    quantised = {row.name for row in plan if row.quantised}
    return [weight.flatten(1) for name, weight in merged_weights(trainer.transformer, None) if name in quantised]


def updates(weights: Sequence[Tensor], rank: int, size: float, seed: int) -> Iterator[Tensor]:
    """A random update of low rank per weight, its norm that share of the weight's."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        rows, columns = weight.shape
        product = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        yield product * (size * weight.norm() / product.norm())


def survival(weights: Sequence[Tensor], backend: Backend, search: bool, frozen: bool, size: float, rank: int, seed: int) -> Row:
    """The row of one choice."""
    dot = found = true = error = square = 0.0
    changed = total = 0
    for weight, update in zip(weights, updates(weights, rank, size, seed), strict=True):
        after = weight + update
        base = backend.amax(weight)
        amax = [frozen_amax(base, backend.amax(w)) if frozen else None for w in (weight, after)]
        packed = [backend.pack(w, search, a) for w, a in zip((weight, after), amax, strict=True)]
        decoded = [backend.decode(p) for p in packed]
        change = decoded[1] - decoded[0]
        dot += float((change * update).sum())
        found += float(change.square().sum())
        true += float(update.square().sum())
        error += float((decoded[0] - weight).square().sum())
        square += float(weight.square().sum())
        changed += int(backend.changed(packed[1], packed[0]))
        total += weight.numel()
    return Row(
        format=backend.wire_format,
        search=search,
        frozen=frozen,
        size=size,
        cosine=dot / max((found * true) ** 0.5, 1e-30),
        changed=changed / total,
        growth=(found / true) ** 0.5,
        error=(error / square) ** 0.5,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """The rows for people, as Markdown."""
    head = ["format", "scale search", "amax", "update", "cosine", "codes changed", "norm of the change", "error of the weights"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for row in rows:
        search = "12 candidates" if row.search else "none"
        cells = [row.format, search if row.format == "nvfp4" else "", "frozen" if row.frozen else "own", f"{row.size:.2%}"]
        cells += [f"{row.cosine:.3f}", f"{row.changed:.2%}", f"{row.growth:.2f}x", f"{row.error:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0, or 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(prog="python -m bench.survival", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="quickstart", help="a preset name or a TOML file")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c", help="override one value")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.01, 0.001], help="updates, as shares of the weights' norm")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    options = parser.parse_args(arguments)
    try:
        config = load(options.preset, options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    rows = []
    for name, searches in (("emulated_nvfp4", (False, True)), ("fp8", (False,))):
        weights = weights_of(config, BACKENDS[name])
        rows += [
            survival(weights, BACKENDS[name], search, frozen, size, config.lora.rank, config.seed)
            for size in options.sizes
            for search in searches
            for frozen in (False, True)
        ]
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
