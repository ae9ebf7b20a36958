"""Can the text that a prompt asks for be read in the picture? RapidOCR reads, edit distance judges;
the weights are in its wheel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rewards.base import ScorerSetupError, require_pictures

QUOTES = (
    r'"([^"]+)"',
    "\u201c([^\u201d]+)\u201d",
    "\u00ab([^\u00bb]+)\u00bb",
    "\u300c([^\u300d]+)\u300d",
)
SINGLE = (
    r"(?<!\w)'([^']+)'(?!\w)",
    r"(?<!\w)\u2018([^\u2019]+)\u2019(?!\w)",
)  # an apostrophe inside a word is no quote
QUOTED = re.compile("|".join((*QUOTES, *SINGLE)))


class OcrScorer:
    """Share of the wanted text that is read, in [0, 1]: 1 - edits / length, over all quoted pieces
    of the prompt.

    Letter case and white space do not count. A piece is looked for anywhere in what is read, so
    that more text around it does not matter. A row of metadata with the key "text" says what is
    wanted in place of the prompt's quotes.
    """

    def __init__(self, threads: int = 1) -> None:
        try:
            from rapidocr_onnxruntime import RapidOCR  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ScorerSetupError(f"{error}: pip install 'sol-rl[ocr]'") from None
        self._engine = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B]. Raises ValueError for a prompt that asks for no text."""
        require_pictures(images, prompts, metadata)
        wanted = [wanted_text(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        return np.array(
            [
                share_read(text, self.read(image))
                for text, image in zip(wanted, images, strict=True)
            ],
            np.float32,
        )

    def read(self, picture: np.ndarray) -> str:
        """All text in uint8 [3, H, W], lines in reading order, with spaces between."""
        lines, _ = self._engine(
            np.ascontiguousarray(picture[::-1].transpose(1, 2, 0))
        )  # it takes BGR
        return " ".join(str(line[1]) for line in lines or ())


def wanted_text(prompt: str, metadata: dict[str, Any]) -> list[str]:
    """The pieces of text that a picture must show. Raises ValueError when there are none."""
    told = metadata.get("text")
    pieces = [told] if isinstance(told, str) else list(told or [])
    pieces = pieces or ["".join(groups) for groups in QUOTED.findall(prompt)]
    pieces = [piece for piece in pieces if plain(piece)]
    if not pieces:
        raise ValueError(
            f"prompt {prompt!r} quotes no text to be read: put it in quotes, or in metadata as"
            " 'text'"
        )
    return pieces


def plain(text: str) -> str:
    """Letters as they are compared: one case, no white space."""
    return "".join(text.casefold().split())


def share_read(wanted: Sequence[str], read: str) -> float:
    """1 - edits / length over all pieces; the edits of a piece are those to the nearest stretch of
    ``read``, so at most its length.
    """
    lengths = [len(plain(piece)) for piece in wanted]
    edits = [nearest(plain(piece), plain(read)) for piece in wanted]
    return 1.0 - sum(edits) / sum(lengths)


def nearest(piece: str, text: str) -> int:
    """Least number of insertions, deletions and replacements from ``piece`` to any stretch of
    ``text``, the empty one included.

    Sellers' algorithm: a row per letter of the piece; the first row is zero, since a stretch may
    begin anywhere.
    """
    row = [0] * (len(text) + 1)
    for i, letter in enumerate(piece, 1):
        above, row = row, [i] + [0] * len(text)
        for j, other in enumerate(text, 1):
            row[j] = min(above[j - 1] + (letter != other), above[j] + 1, row[j - 1] + 1)
    return min(row)
