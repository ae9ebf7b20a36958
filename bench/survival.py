"""Measure how much of a small weight update survives quantization, per packing choice.

``python -m bench.survival`` prints a table. Every layer that LoRA trains and explorers quantize is
packed before and after an update, and the change of the decoded weights is compared with the true
change. Updates are random, of rank ``lora.rank`` and a given share of the weight's norm, or those
of a run: its whole training, and the step between its two newest checkpoints if it has two.
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
from configs.resume import config_for_measurement
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
    """Weights [N, K] per layer: of the base model, before the update, and after it."""

    name: str
    base: Sequence[Tensor]
    before: Sequence[Tensor]
    after: Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """Result of one packing choice on one update, over all weights of the model."""

    format: str
    search: bool
    frozen: bool
    update: str
    size: float  # norm of the update over that of the weights
    cosine: float  # between the change of the packed weights and the true change
    changed: float  # share of stored codes that differ
    growth: float  # norm of the packed weights' change over that of the true one
    error: float  # relative error of the packed weights before the update


def weights_of(trainer: Trainer, backend: Backend, adapter: str | None = None) -> list[Tensor]:
    """Return the weights [N, K] of the adapted modules that ``backend`` quantizes.

    ``adapter`` is merged into them; None gives the base weights.
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
    """Return a random low-rank update with norm ``size`` times that of each weight."""
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
    """Yield the updates of the sampling policy by the whole training and by the last checkpoint.

    The latter is the change between the two newest checkpoints, if there are two. Raises
    ConfigError if the run has no checkpoint.
    """
    base, adapter = weights_of(trainer, backend), trainer.objective.sampling_adapter
    newest: list[list[Tensor]] = []
    paths = sorted(path for path in rundir.checkpoints.glob("step_*") if path.is_dir())[-2:]
    for path in paths:
        trainer.load(path)
        newest.append(weights_of(trainer, backend, adapter))
    if not newest:
        raise ConfigError(f"{rundir.path}: no checkpoint yet")
    yield Update(f"{paths[-1].name}, from the base", base, base, newest[-1])
    if len(newest) > 1:
        yield Update(f"{paths[0].name} to {paths[-1].name}", base, newest[0], newest[-1])


def survival(update: Update, backend: Backend, search: bool, frozen: bool) -> Row:
    """Return the result of one packing choice on one update."""
    dot = measured = expected = error = square = 0.0
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
        measured += float(change.square().sum())
        expected += float(truth.square().sum())
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
        size=(expected / square) ** 0.5,
        cosine=dot / max((measured * expected) ** 0.5, 1e-30),
        changed=changed / total,
        growth=(measured / max(expected, 1e-30)) ** 0.5,
        error=(error / square) ** 0.5,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table."""
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
    """Print the table; return 0, or 2 for an invalid configuration or checkpoint."""
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
        help="norms of random updates, relative to the norm of the weights",
    )
    parser.add_argument(
        "--run", metavar="DIR", help="use the updates and the configuration of this run instead"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args(arguments)
    try:
        rundir = RunDirectory(Path(options.run).absolute()) if options.run else None
        config = (
            config_for_measurement(rundir.configuration(), options.overrides)
            if rundir
            else load(options.preset, options.overrides)
        )
        rows = measure(config, rundir, options.sizes)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return 0


def measure(config: RunConfig, rundir: RunDirectory | None, sizes: Sequence[float]) -> list[Row]:
    """Return all rows: NVFP4 with and without scale search, NVFP4 in 16x16 tiles, and FP8.

    Each is measured with the weight's own amax and with a frozen one.
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
        updates = (
            run_updates(trainer, rundir, backend)
            if rundir
            else (random_update(weights, config.lora.rank, s, config.seed) for s in sizes)
        )
        rows += [
            survival(update, backend, search, frozen)
            for update in updates
            for search in searches
            for frozen in (False, True)
        ]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
