"""The encoder service: prompts to conditioning, once per iteration. The only actor that holds text
encoders.
"""

from __future__ import annotations

import time
from typing import Any

from actors.runtime import begin, identity
from policy.families import family_for
from policy.types import DTYPES


class EncoderActor:
    """Holds the family's text encoders."""

    def __init__(self, config: dict[str, Any]):
        run, _, device = begin(config, "encoder")
        self._text = family_for(run.model).load_text(device, DTYPES[run.regenerate.precision])

    def ready(self) -> dict[str, Any]:
        """Who this is; answers once the model is loaded."""
        return identity()

    def encode(self, groups: list[list[str]]) -> tuple[Any, ...]:
        """Seconds taken, then one Conditioning (rows = prompts, on CPU) per group of prompts; call
        with as many returns.
        """
        start = time.perf_counter()
        encoded = [self._text.encode(prompts).to(device="cpu") for prompts in groups]
        return (time.perf_counter() - start, *encoded)
