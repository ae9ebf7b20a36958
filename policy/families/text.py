"""The text side of a pipeline: its encoders and tokenizers, driven one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from configs.sources import Pixels
from policy.types import Conditioning


class PromptEncoder:
    """All text encoders of one pipeline, which holds no transformer.

    With ``offload`` they stay in host memory and are on ``device`` only while prompts are encoded.
    With ``negative`` each row also has that prompt's conditioning, for guidance.
    ``encode_prompt`` takes the pipeline, a prompt and, where there are any, its source image.
    """

    def __init__(
        self,
        pipe: Any,
        encode_prompt: Callable[..., Conditioning],
        device: torch.device | str,
        offload: bool = False,
        negative: str | None = None,
    ) -> None:
        self.negative = negative
        self.device, self.offload = torch.device(device), offload
        self.pipe = pipe if offload else pipe.to(self.device)
        self._encode_prompt = encode_prompt
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)

    @torch.no_grad()
    def encode(
        self, prompts: list[str], images: Sequence[Pixels | None] | None = None
    ) -> Conditioning:
        """One row per prompt, on the CPU; of one that edits with its source image, uint8 [3, H, W].

        Prompts are encoded one by one: floating-point sums depend on the shape of a batch, and a
        row should be a function of its own prompt, whichever prompts it travels with. Raises
        ValueError for no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode")
        sources = [None] * len(prompts) if images is None else list(images)
        along = [(prompt, id(source)) for prompt, source in zip(prompts, sources, strict=True)]
        # an editing pipeline shows its encoder the image beside the negative prompt too
        against = [] if self.negative is None else [(self.negative, key) for _, key in along]
        shown = {id(source): source for source in sources}
        if self.offload:
            self.pipe.to(self.device)
        try:
            unique = {
                key: self._row(key[0], shown[key[1]]) for key in dict.fromkeys(along + against)
            }
        finally:
            if self.offload:
                self.pipe.to("cpu")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        rows = Conditioning.cat([unique[key] for key in along])
        if not against:
            return rows
        return rows.with_negative(Conditioning.cat([unique[key] for key in against]))

    def _row(self, prompt: str, source: Pixels | None) -> Conditioning:
        given = () if source is None else (source,)
        return self._encode_prompt(self.pipe, prompt, *given).to(device="cpu")
