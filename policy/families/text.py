"""Prompt encoding with a pipeline's text encoders and tokenizers, one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from configs.sources import Pixels
from policy.types import Conditioning


class PromptEncoder:
    """Encoder of prompts with a pipeline that has no transformer.

    If ``offload`` is set, the text encoders are in host memory except while prompts are encoded. If
    there is a ``negative`` prompt, each row also has its conditioning, for guidance.
    ``encode_prompt`` is called with the pipeline, a prompt and, if there is one, its source image.
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
        """Return one row of conditioning per prompt, on the CPU.

        ``images`` are the prompts' source images, uint8 [3, H, W], for a family that edits. Prompts
        are encoded one by one: floating-point sums depend on the shape of a batch, and a row must
        depend on its own prompt only. Raises ValueError if there are no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode")
        sources = [None] * len(prompts) if images is None else list(images)
        along = [(prompt, id(source)) for prompt, source in zip(prompts, sources, strict=True)]
        # an editing pipeline encodes the image together with the negative prompt too
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
        """Encode one prompt with its source image, if any."""
        images = () if source is None else (source,)
        return self._encode_prompt(self.pipe, prompt, *images).to(device="cpu")
