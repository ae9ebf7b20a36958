"""Names of weight dtypes, and reading of third-party weight files without running their code."""

from __future__ import annotations

from pathlib import Path

import torch

from records.errors import error_summary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in the configuration."""
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")
"""Entries of OpenAI's CLIP state dict that are numbers rather than weights."""


class UnreadableWeights(ValueError):
    """A file holds no readable weights; the message, one line, says what to give instead."""


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in ``path``: safetensors, or a torch file read with ``weights_only``.

    A nested ``state_dict`` is unwrapped, and the prefix ``module.`` removed if every name has it.
    Raises UnreadableWeights if the file cannot be read or holds no dictionary of tensors.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise errors of their own
        raise UnreadableWeights(
            f"{path}: not readable as weights ({error_summary(error, 160)}): give a safetensors"
            " file, or a torch file that contains only tensors (not a TorchScript archive)"
        ) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not any(
        isinstance(value, torch.Tensor) for value in loaded.values()
    ):
        raise UnreadableWeights(
            f"{path}: contains {type(loaded).__name__}, not a dictionary of tensors: give a state"
            " dict"
        )
    state = {
        name: value
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and name not in NOT_WEIGHTS
    }
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state
