"""What each scorer costs: seconds per image beside a matrix product of this machine, parameters
and memory.

Learned scorers have their published architectures and random weights, which take the same time;
``--small`` is for a test of the benchmark itself. One model is in memory at a time; what the
process grows by, from before the scorer is made to its peak while it scores, has the libraries that
it imports in it.
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

YARDSTICK = 1024  # rows of a square FP32 product
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
    """A ratio per scorer that can run here: seconds per image over the yardstick's; memory in the
    note.
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
            _give_back()
            before = _memory("VmRSS")
            scorer = _made(name, bool(options.small), folder)
            if scorer is None:
                continue
            rows = [{"text": "open"}] * len(images)
            cases: dict[str, Callable[[], object]] = {
                name: lambda scorer=scorer, rows=rows: scorer(images, [PROMPT] * len(images), rows),
                "product": lambda: matrix @ matrix,
            }
            _forget_peak()
            times = interleave(cases, options.repeats)
            peak = _memory("VmHWM")
            each = {
                name: [seconds / len(images) for seconds in times[name]],
                "product": times["product"],
            }
            ratios.append(Ratio.of(each, name, "product", note=_size(scorer, before, peak)))
            del scorer, cases
    return ratios


def _made(name: str, small: bool, folder: Path) -> Any:
    """The scorer, or None for one whose package is not installed."""
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
    """Learned scorers keep the weights they are made with, whatever their checkpoint says; a folder
    with some vocabulary.
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
    """A vocab.txt of BERT's size with its special words in their places; the others are word0,
    word1, ...
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


def _give_back() -> None:
    """What earlier scorers used goes back to the system, which glibc's allocator does when it is
    told to.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    """The peak is from now on, where the system lets us say so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory(which: str) -> int | None:
    """Bytes of this process in memory now (VmRSS) or at the peak (VmHWM); None where the system
    does not tell.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:")), None
    )
