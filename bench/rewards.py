"""Benchmark of scorers: seconds per image relative to a matrix product, parameters and memory.

Learned scorers use their published architectures with random weights, which take the same time;
``--small`` is for testing the benchmark itself. One model is in memory at a time. The reported
growth of the process, from before the scorer is created to the peak while it scores, includes the
libraries that it imports.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.timing import Options, Ratio, interleave
from configs.rewards import Scorer as ScorerConfig
from configs.section import Tree
from rewards import ScorerSetupError, build
from rewards.imagereward import WORDS

YARDSTICK = 1024  # rows of the square FP32 product
PROMPT = "a red circle left of a blue square"
LEARNED = ("clipscore", "pickscore", "hpsv2", "imagereward")
NAMES = ("jpeg_incompressibility", "shapes", "ocr", *LEARNED)
TINY_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
TINY_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TINY_VISION = {**TINY_TOWER, "image_size": 32, "patch_size": 16}
SMALL: Tree = {
    "clipscore": TINY_CLIP,
    "hpsv2": TINY_CLIP,
    "pickscore": {"projection_dim": 16, "text_config": TINY_TOWER, "vision_config": TINY_VISION},
    "imagereward": {"vision": TINY_VISION, "text": TINY_TOWER},
}


def measure(options: Options) -> list[Ratio]:
    """Return a ratio per scorer that can run here: seconds per image over those of the product.

    The note has parameters and memory.
    """
    rng = np.random.default_rng(0)
    side = 32 if options.small else 512
    images = rng.integers(
        0,
        256,
        (options.batch if options.small else min(options.batch, 4), 3, side, side),
        dtype=np.uint8,
    )
    matrix = torch.ones(YARDSTICK, YARDSTICK)
    ratios = []
    with random_weights() as folder:
        for name in NAMES:
            _release_memory()
            before = _memory("VmRSS")
            scorer = _scorer(name, bool(options.small), folder)
            if scorer is None:
                continue
            rows = [{"text": "open"}] * len(images)
            cases: dict[str, Callable[[], object]] = {
                name: lambda scorer=scorer, rows=rows: scorer(images, [PROMPT] * len(images), rows),
                "product": lambda: matrix @ matrix,
            }
            _reset_peak()
            times = interleave(cases, options.repeats)
            peak = _memory("VmHWM")
            per_image = {
                name: [seconds / len(images) for seconds in times[name]],
                "product": times["product"],
            }
            ratios.append(Ratio.of(per_image, name, "product", note=_size(scorer, before, peak)))
            del scorer, cases
    return ratios


def _scorer(name: str, small: bool, folder: Path) -> Any:
    """Create a scorer; return None for ``ocr`` if its package is not installed."""
    settings: Tree = {}
    if name in LEARNED:
        settings = {"checkpoint": str(folder / "none")} | (
            {"architecture": SMALL[name]} if small else {}
        )
    if name == "imagereward":
        settings["vocabulary"] = str(folder / "vocab.txt")
    try:
        return build(ScorerConfig(name=name, settings=settings))
    except ScorerSetupError:
        if name == "ocr":
            return None
        raise


@contextmanager
def random_weights() -> Iterator[Path]:
    """Let learned scorers keep their random initial weights within the context.

    Yields a folder with a vocabulary and an empty checkpoint.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "vocab.txt").write_text(some_vocabulary())
        (folder / "none").touch()
        for module in ("rewards.openclip", "rewards.pickscore", "rewards.imagereward"):
            stack.enter_context(mock.patch(f"{module}.read_state", lambda path: {}))
            stack.enter_context(mock.patch(f"{module}.load_weights", lambda make, *_: make()))
        stack.enter_context(mock.patch("rewards.imagereward.renamed", lambda state, path: state))
        yield folder


def some_vocabulary() -> str:
    """Return a vocab.txt of BERT's size with its special tokens at their indices.

    The other words are word0, word1, ...
    """
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return "\n".join(words + [f"word{i}" for i in range(WORDS - len(words))])


def _size(scorer: Any, before: int | None, peak: int | None) -> str:
    model = getattr(scorer, "model", None)
    values = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    count = sum(value.numel() for value in values)
    size = sum(value.nbytes for value in values)
    note = (
        f"{count / 1e6:.1f} M parameters, {size / 1e9:.2f} GB" if values else "no weights of ours"
    )
    return (
        note
        if before is None or peak is None
        else f"{note}, process + {max(0, peak - before) / 1e9:.2f} GB at its peak"
    )


def _release_memory() -> None:
    """Return the memory of earlier scorers to the system; glibc does so only on request."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _reset_peak() -> None:
    """Reset the peak memory of the process if the system supports it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _memory(which: str) -> int | None:
    """Return the current (VmRSS) or peak (VmHWM) resident bytes of this process.

    Returns None if the system does not report them.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:")), None
    )
