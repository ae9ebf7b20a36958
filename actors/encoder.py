"""The encoder service: encodes prompts, and images to edit, as conditioning.

It is the only service with text encoders.
"""

from __future__ import annotations

import time

from actors.messages import ActorInfo, Images
from actors.runtime import identity, load_config, on_device, setup_torch
from configs.section import Tree
from policy.families import family_for
from policy.types import DTYPES, Conditioning


@on_device("encoder", "model.max_sequence_length")
class EncoderActor:
    """Actor with the family's text encoders, and with its autoencoder if it edits images."""

    def __init__(self, tree: Tree):
        run = load_config(tree)
        dtype = DTYPES[run.regenerate.precision]
        negative = run.guidance.negative_prompt if run.guidance.stages else None
        self._device = setup_torch(run, "encoder")
        self._text = family_for(run.model).load_text(self._device, dtype, negative)

    def ready(self) -> ActorInfo:
        """Describe the actor; its model is loaded by then."""
        return identity(self._device)

    def encode(
        self, groups: list[list[str]], images: list[list[Images]] | None = None
    ) -> tuple[float, *tuple[Conditioning, ...]]:
        """Encode groups of prompts; return the seconds, then a Conditioning per group on the CPU.

        A Conditioning has a row per prompt. ``images`` has the image that each prompt edits, uint8
        [3, H, W].
        """
        start = time.perf_counter()
        encoded = [
            self._text.encode(prompts, images[row] if images else None).to(device="cpu")
            for row, prompts in enumerate(groups)
        ]
        return (time.perf_counter() - start, *encoded)
