"""Can the requested text be read in the image? Edit distance to what RapidOCR reads there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rewards.base import BuiltIn, Metadata, ScorerSetupError, Settings, require_images

QUOTES = (
    r'"([^"]+)"',
    "\u201c([^\u201d]+)\u201d",
    "\u00ab([^\u00bb]+)\u00bb",
    "\u300c([^\u300d]+)\u300d",
)
# an apostrophe inside a word is no quote
SINGLE = (r"(?<!\w)'([^']+)'(?!\w)", r"(?<!\w)\u2018([^\u2019]+)\u2019(?!\w)")
QUOTED = re.compile("|".join((*QUOTES, *SINGLE)))


class OcrScorer(BuiltIn):
    """Share of the wanted text that is read, in [0, 1]: 1 - edits / length, over all quoted pieces
    of the prompt.

    Letter case and white space do not count. A piece is looked for anywhere in what is read, so
    that more text around it does not matter. A row of metadata with the key "text" says what is
    wanted in place of the prompt's quotes.
    """

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Not known: the weights are within RapidOCR's wheel."""
        return None

    def __init__(self, threads: int = 1) -> None:
        try:
            from rapidocr_onnxruntime import RapidOCR  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ScorerSetupError(f"{error}: pip install 'sol-rl[ocr]'") from None
        self._engine = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B]. Raises ValueError for a prompt without a text."""
        require_images(images, prompts, metadata)
        wanted = [wanted_text(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        return np.array(
            [
                share_read(text, self.read(image))
                for text, image in zip(wanted, images, strict=True)
            ],
            np.float32,
        )

    def read(self, image: np.ndarray) -> str:
        """All text in uint8 [3, H, W], lines in reading order, with spaces between."""
        blue_first = np.ascontiguousarray(image[::-1].transpose(1, 2, 0))
        lines, _ = self._engine(blue_first)
        return " ".join(str(line[1]) for line in lines or ())


def wanted_text(prompt: str, metadata: Metadata) -> list[str]:
    """The pieces of text that an image must show. Raises ValueError when there are none."""
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
    """1 - edits / length over all pieces; edits are those to the nearest stretch of ``read``."""
    lengths = [len(plain(piece)) for piece in wanted]
    edits = [nearest(plain(piece), plain(read)) for piece in wanted]
    return 1.0 - sum(edits) / sum(lengths)


def nearest(piece: str, text: str) -> int:
    """Least number of edits from ``piece`` to any stretch of ``text``, the empty one included.

    An edit is an insertion, deletion or replacement of a letter. Sellers' algorithm: a row per
    letter of the piece; the first row is zero, since a stretch may begin anywhere.
    """
    row = [0] * (len(text) + 1)
    for i, letter in enumerate(piece, 1):
        above, row = row, [i] + [0] * len(text)
        for j, other in enumerate(text, 1):
            row[j] = min(above[j - 1] + (letter != other), above[j] + 1, row[j - 1] + 1)
    return min(row)
