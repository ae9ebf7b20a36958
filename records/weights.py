"""Types of weights by name, and weights from a file that others made; reading it runs none of its
code.
"""

from __future__ import annotations

from pathlib import Path

import torch

from records.errors import described

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What settings call a type."""
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")
"""Numbers that OpenAI's CLIP keeps beside its weights."""


class UnreadableWeights(ValueError):
    """The message is one line that names the file and what to give in its place."""


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """The weights in ``path``: safetensors, or a torch file read with ``weights_only``.

    A ``state_dict`` inside is taken out, and a leading ``module.`` of every name dropped. Raises
    UnreadableWeights.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own
        raise UnreadableWeights(
            f"{path}: not readable as weights ({described(error, 160)}): give a"
            " safetensors file, or a torch file that holds nothing but tensors (no TorchScript"
            " archive)"
        ) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not any(
        isinstance(value, torch.Tensor) for value in loaded.values()
    ):
        raise UnreadableWeights(
            f"{path}: holds {type(loaded).__name__}, not a dictionary of tensors: give a state dict"
        )
    state = {
        name: value
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and name not in NOT_WEIGHTS
    }
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state
