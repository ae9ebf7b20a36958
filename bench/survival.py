"""How much of a small update survives quantization? ``python -m bench.survival`` prints a table of
packing choices.

Over every layer that LoRA trains and explorers quantize, packed before and after an update;
compared are the change of what the packed weights stand for and the true one. Updates are random,
of rank ``lora.rank`` and a given share of the weight's norm, or those of a run: its whole training,
and its last iteration as far as it keeps two checkpoints.
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

from bench.blocks import Tiles
from cli.common import add_overrides
from configs.load import ConfigError, load
from configs.resume import measured
from configs.schema import RunConfig
from learner.checkpoint import CheckpointError
from learner.trainer import Trainer
from policy.merging import merged_weights
from policy.precision.backends import BACKENDS, Backend
from policy.precision.nvfp4 import frozen_amax
from policy.precision.swap import quantize_plan
from records.rundir import RunDirectory
from records.tables import markdown

SEARCHED = {False: "none", True: "12 candidates"}


@dataclass(frozen=True)
class Update:
    """Weights [N, K] of the base model, and before and after a change, layer by layer."""

    name: str
    base: Sequence[Tensor]
    before: Sequence[Tensor]
    after: Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """One packing choice on one update, over all weights of the model at once."""

    format: str
    search: bool
    frozen: bool
    update: str
    size: float  # of the update, as a share of the weights' norm
    cosine: float  # of the packed weights' change and the true one
    changed: float  # share of stored codes that differ
    growth: float  # norm of the packed weights' change over that of the true one
    error: float  # relative error of the packed weights before the update


def weights_of(trainer: Trainer, backend: Backend, adapter: str | None = None) -> list[Tensor]:
    """Weights [N, K] of the adapted modules that ``backend`` quantizes, with ``adapter`` merged;
    None: of the base model.
    """
    plan = quantize_plan(
        trainer.transformer, trainer.family, trainer.config.explore.modules_to_not_convert, backend
    )
    quantized = {row.name for row in plan if row.quantized}
    return [
        weight.flatten(1)
        for name, weight in merged_weights(trainer.transformer, adapter)
        if name in quantized
    ]


def random_update(weights: Sequence[Tensor], rank: int, size: float, seed: int) -> Update:
    """A random update of low rank per weight, its norm that share of the weight's."""
    generator = torch.Generator().manual_seed(seed)
    after = []
    for weight in weights:
        rows, columns = weight.shape
        product = torch.randn(rows, rank, generator=generator) @ torch.randn(
            rank, columns, generator=generator
        )
        after.append(weight + product * (size * weight.norm() / product.norm()))
    return Update(f"random, {size:.2%}", weights, weights, after)


def run_updates(trainer: Trainer, rundir: RunDirectory, backend: Backend) -> Iterator[Update]:
    """What training did to the sampling policy: all of it, and between the two newest checkpoints.
    Raises ConfigError.
    """
    base, adapter = weights_of(trainer, backend), trainer.objective.sampling_adapter
    newest: list[list[Tensor]] = []
    paths = sorted(path for path in rundir.checkpoints.glob("step_*") if path.is_dir())[-2:]
    for path in paths:
        trainer.load(path)
        newest.append(weights_of(trainer, backend, adapter))
    if not newest:
        raise ConfigError(f"{rundir.path}: there is no checkpoint yet")
    yield Update(f"{paths[-1].name}, from the base", base, base, newest[-1])
    if len(newest) > 1:
        yield Update(f"{paths[0].name} to {paths[-1].name}", base, newest[0], newest[-1])


def survival(update: Update, backend: Backend, search: bool, frozen: bool) -> Row:
    """The row of one choice."""
    dot = found = true = error = square = 0.0
    changed = total = 0
    for base, before, after in zip(update.base, update.before, update.after, strict=True):
        amax = [
            frozen_amax(backend.amax(base), backend.amax(w)) if frozen else None
            for w in (before, after)
        ]
        packed = [backend.pack(w, search, a) for w, a in zip((before, after), amax, strict=True)]
        decoded = [backend.decode(p) for p in packed]
        change, truth = decoded[1] - decoded[0], after - before
        dot += float((change * truth).sum())
        found += float(change.square().sum())
        true += float(truth.square().sum())
        error += float((decoded[0] - before).square().sum())
        square += float(before.square().sum())
        changed += int(backend.changed(packed[1], packed[0]))
        total += before.numel()
    return Row(
        format=(
            f"{backend.wire_format}, 16x16" if isinstance(backend, Tiles) else backend.wire_format
        ),
        search=search,
        frozen=frozen,
        update=update.name,
        size=(true / square) ** 0.5,
        cosine=dot / max((found * true) ** 0.5, 1e-30),
        changed=changed / total,
        growth=(found / max(true, 1e-30)) ** 0.5,
        error=(error / square) ** 0.5,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """The rows for people, as Markdown."""
    shown = [
        {
            "format": row.format,
            "scale search": SEARCHED[row.search] if row.format == "nvfp4" else "",
            "amax": "frozen" if row.frozen else "own",
            "update": row.update,
            "its size": f"{row.size:.2%}",
            "cosine": f"{row.cosine:.3f}",
            "codes changed": f"{row.changed:.2%}",
            "norm of the change": f"{row.growth:.2f}x",
            "error": f"{row.error:.4f}",
        }
        for row in rows
    ]
    return markdown(list(shown[0]), [list(cells.values()) for cells in shown])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0, or 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.survival", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--preset", default="quickstart", help="a preset name or a TOML file")
    add_overrides(parser)
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="+",
        default=[0.01, 0.001],
        help="updates, as shares of the weights' norm",
    )
    parser.add_argument(
        "--run", metavar="DIR", help="the updates of this run instead, with its own configuration"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    options = parser.parse_args(arguments)
    try:
        rundir = RunDirectory(Path(options.run).absolute()) if options.run else None
        config = (
            measured(rundir.configuration(), options.overrides)
            if rundir
            else load(options.preset, options.overrides)
        )
        rows = measure(config, rundir, options.sizes)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def measure(config: RunConfig, rundir: RunDirectory | None, sizes: Sequence[float]) -> list[Row]:
    """All rows: NVFP4 with and without the search, in tiles of 16x16, FP8; each with its own amax
    and a frozen one.
    """
    rows = []
    choices: tuple[tuple[Backend, tuple[bool, ...]], ...] = (
        (BACKENDS["emulated_nvfp4"], (False, True)),
        (Tiles(), (False,)),
        (BACKENDS["fp8"], (False,)),
    )
    for backend, searches in choices:
        trainer = Trainer(config)
        weights = weights_of(trainer, backend)
        made = (
            run_updates(trainer, rundir, backend)
            if rundir
            else (random_update(weights, config.lora.rank, s, config.seed) for s in sizes)
        )
        rows += [
            survival(update, backend, search, frozen)
            for update in made
            for search in searches
            for frozen in (False, True)
        ]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
