"""The text side of a pipeline: its encoders and tokenizers, driven one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from policy.types import Conditioning


class PromptEncoder:
    """All text encoders of one pipeline, which holds neither transformer nor autoencoder.

    With ``offload`` they stay in host memory and are on ``device`` only while prompts are encoded.
    With ``negative`` each row also has that prompt's conditioning, for guidance.
    """

    def __init__(
        self,
        pipe: Any,
        encode_prompt: Callable[[Any, str], Conditioning],
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
    def encode(self, prompts: list[str]) -> Conditioning:
        """One row per prompt, on the CPU.

        Prompts are encoded one by one: floating-point sums depend on the shape of a batch, and a
        row should be a function of its own prompt, whichever prompts it travels with. Raises
        ValueError for no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode")
        if self.offload:
            self.pipe.to(self.device)
        try:
            unique = {
                prompt: self._encode_prompt(self.pipe, prompt).to(device="cpu")
                for prompt in dict.fromkeys(self._asked(prompts))
            }
        finally:
            if self.offload:
                self.pipe.to("cpu")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        rows = Conditioning.cat([unique[prompt] for prompt in prompts])
        if self.negative is None:
            return rows
        return rows.with_negative(unique[self.negative])

    def _asked(self, prompts: list[str]) -> list[str]:
        return prompts if self.negative is None else [*prompts, self.negative]
