"""OCR scorer: how much of the requested text RapidOCR reads in an image, by edit distance."""

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
# an apostrophe inside a word is not a quotation mark
SINGLE = (r"(?<!\w)'([^']+)'(?!\w)", r"(?<!\w)\u2018([^\u2019]+)\u2019(?!\w)")
QUOTED = re.compile("|".join((*QUOTES, *SINGLE)))


class OcrScorer(BuiltIn):
    """Share of the requested text that is read in an image, in [0, 1]: 1 - edits / length.

    Edits and lengths are summed over all quoted pieces of the prompt, or over the metadata's
    "text", a string or a list, if there is one. Letter case and white space are ignored. A piece is
    matched anywhere in the recognized text, so that text around it does not matter.
    """

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Return None: the weights are part of RapidOCR's wheel."""
        return None

    def __init__(self, threads: int = 1) -> None:
        try:
            from rapidocr_onnxruntime import RapidOCR  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ScorerSetupError(f"{error}: pip install 'sol-rl[ocr]'") from None
        except ImportError as error:  # of a package that is there, but lacks a library
            raise ScorerSetupError(f"{error} (OpenCV needs libgl1 and libglib2.0-0)") from None
        self._engine = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B]. Raises ValueError if a prompt has no text."""
        require_images(images, prompts, metadata)
        requested = [
            wanted_text(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)
        ]
        return np.array(
            [
                fraction_read(text, self.read(image))
                for text, image in zip(requested, images, strict=True)
            ],
            np.float32,
        )

    def read(self, image: np.ndarray) -> str:
        """Recognize all text in uint8 [3, H, W]; lines in reading order are joined by spaces."""
        bgr = np.ascontiguousarray(image[::-1].transpose(1, 2, 0))
        lines, _ = self._engine(bgr)
        return " ".join(str(line[1]) for line in lines or ())


def wanted_text(prompt: str, metadata: Metadata) -> list[str]:
    """Return the pieces of text that an image must show. Raises ValueError if there are none."""
    text = metadata.get("text")
    pieces = [text] if isinstance(text, str) else list(text or [])
    pieces = pieces or ["".join(groups) for groups in QUOTED.findall(prompt)]
    pieces = [piece for piece in pieces if normalize_text(piece)]
    if not pieces:
        raise ValueError(
            f"prompt {prompt!r} contains no quoted text: quote the text, or give it in the"
            " metadata as 'text'"
        )
    return pieces


def normalize_text(text: str) -> str:
    """Normalize text for comparison: one case, no white space."""
    return "".join(text.casefold().split())


def fraction_read(requested: Sequence[str], read: str) -> float:
    """Return 1 - edits / length over all pieces, each compared with its nearest substring."""
    lengths = [len(normalize_text(piece)) for piece in requested]
    edits = [
        substring_edit_distance(normalize_text(piece), normalize_text(read)) for piece in requested
    ]
    return 1.0 - sum(edits) / sum(lengths)


def substring_edit_distance(piece: str, text: str) -> int:
    """Return the least edit distance from ``piece`` to a substring of ``text``, possibly empty.

    An edit is an insertion, deletion or replacement of a letter. Sellers' algorithm: a row per
    letter of the piece; the first row is zero, since a substring may begin anywhere.
    """
    row = [0] * (len(text) + 1)
    for i, letter in enumerate(piece, 1):
        above, row = row, [i] + [0] * len(text)
        for j, other in enumerate(text, 1):
            row[j] = min(above[j - 1] + (letter != other), above[j] + 1, row[j - 1] + 1)
    return min(row)
