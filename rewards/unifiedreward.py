"""UnifiedReward (arXiv 2503.05236): a Qwen2.5-VL that writes how good an image is.

It is asked in the words that it was trained with, and answers greedily; the score is the number
that it writes. That has decimals, as the ratings it learned from are means over people, so that the
probabilities of one digit would say less than the number does.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from records.errors import first_line
from records.images import to_pil
from records.weights import DTYPES
from rewards.answers import numbers_after
from rewards.base import (
    BuiltIn,
    Effort,
    Metadata,
    ScorerError,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
    require_one_of,
)
from rewards.cache import content_key
from rewards.checkpoints import DAMAGED, local, pretrained
from rewards.paired import PairedScorer
from rewards.unifiedreward_forms import FORMS

CLASS = "Qwen2_5_VLForConditionalGeneration"
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
PUBLISHED = "CodeGoat24/UnifiedReward-2.0-qwen-7b"
PARAMETERS = {PUBLISHED: 8_292_166_656, "CodeGoat24/UnifiedReward-qwen-7b": 8_292_166_656}
HIGHEST = 5.0
SIDE = 28
"""Pixels of a token's side: smaller images would be one token, enlarged."""
ASKED = 230
"""Tokens of the question, beside the image's."""


class UnifiedReward(BuiltIn):
    """The mean of the numbers that a ``form`` asks for, over 5, as flow_grpo has it.

    ``form``: ``axes``, of UnifiedReward 2.0 (alignment, coherence, style, each a part too),
    ``elements``, of the first version, or ``final``, flow_grpo's. An image is shown in its own
    size, or with ``max_pixels`` at most. ``new_tokens``: an answer is cut off there.
    """

    paths = {"checkpoint": WEIGHTS}

    def __init__(
        self,
        checkpoint: str = PUBLISHED,
        form: str = "axes",
        max_pixels: int | None = None,
        new_tokens: int = 512,
        batch_size: int = 8,
        dtype: str = "bf16",
        device: str | None = None,
    ) -> None:
        self.check(locals())
        self.form, self.new_tokens, self.batch_size = FORMS[form], new_tokens, batch_size
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, self.processor = _load(checkpoint, DTYPES[dtype])
        self.model = model.to(self.device).eval()
        if max_pixels is not None:
            shown = self.processor.image_processor
            shown.size = {**dict(shown.size), "longest_edge": max_pixels}
        told = self.model.generation_config
        told.do_sample, told.temperature, told.top_p, told.top_k = False, None, None, None
        if told.eos_token_id is None:
            told.eos_token_id = self.processor.tokenizer.eos_token_id
        ends = told.eos_token_id
        self._ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=self.device)
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for a value that is none, and for a directory of another model
        or without some of its files.
        """
        _check_values(settings)
        _files(settings["checkpoint"])

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """By the shapes in the files, if they are here; of a published model by its name.

        Raises ScorerSetupError for values that ``check`` refuses.
        """
        from safetensors import safe_open

        told = cls.told(settings)
        checkpoint, width = told["checkpoint"], DTYPES[told["dtype"]].itemsize
        try:
            files = _files(checkpoint)
        except ScorerSetupError:  # it may be where the run will be
            return None
        if files is None:
            count = PARAMETERS.get(checkpoint)
            return None if count is None else count * width
        count = 0
        for file in files:
            with safe_open(file, "pt") as tensors:
                names: list[str] = list(tensors.keys())
                shapes = (tensors.get_slice(name).get_shape() for name in names)
                count += sum(int(np.prod(shape)) for shape in shapes)
        return count * width

    @classmethod
    def effort(cls, settings: Settings, height: int, width: int) -> Effort:
        """Two operations per parameter and token that it reads; per token that a batch writes, its
        weights once through the memory. Nothing where its size is not known.
        """
        held, told = cls.model_bytes(settings) or 0, cls.told(settings)
        pixels = min(height * width, told["max_pixels"] or math.inf)
        flops = 2 * held / DTYPES[told["dtype"]].itemsize * (ASKED + pixels / SIDE**2)
        passes = FORMS[told["form"]].tokens / told["batch_size"]
        return Effort(flops, told["dtype"], passes * held)

    @classmethod
    def told(cls, settings: Settings) -> Settings:
        """All settings, those that are not given too. Raises ScorerSetupError."""
        try:
            whole = inspect.signature(cls).bind(**settings)
        except TypeError as error:
            raise ScorerSetupError(f"settings = {dict(settings)}: {error}") from None
        whole.apply_defaults()
        _check_values(whole.arguments)
        return whole.arguments

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B], NaN where the model wrote no number.

        Raises ScorerError where it wrote none at all, and for images that are too small.
        """
        require_images(images, prompts, metadata)
        if min(images.shape[2:]) < SIDE:
            raise ScorerError(
                f"images are {images.shape[3]}x{images.shape[2]}: {SIDE} pixels are one token's"
                " side, so draw them larger"
            )
        answers = self.answers(images, prompts)
        marks, low = list(self.form.marks.values()), self.form.low
        found = [numbers_after(text, marks, low, HIGHEST, ended) for text, ended in answers]
        if answers and not any(found):
            raise ScorerError(
                f"the model writes no score: {' '.join(answers[0][0].split())[:80]!r}"
            )
        each = np.array([row or [np.nan] * len(marks) for row in found], np.float32)
        each = each.reshape(-1, len(marks)) / np.float32(HIGHEST)
        if len(marks) > 1:
            self.parts = dict(zip(self.form.marks, each.T.copy(), strict=True))
        return each.mean(1)

    def answers(self, images: np.ndarray, prompts: Sequence[str]) -> list[tuple[str, bool]]:
        """What the model writes of each image, and whether it came to an end."""
        asked = [self._asked(prompt) for prompt in prompts]
        # of about the same length together, so that fewer places are filled up, and in an order of
        # the images alone: asked again in another order, it computes the same batches
        order = sorted(
            range(len(asked)),
            key=lambda row: (len(asked[row]), content_key(images[row], asked[row], {})),
        )
        found: dict[int, tuple[str, bool]] = {}
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            texts = self._written([images[row] for row in rows], [asked[row] for row in rows])
            found |= dict(zip(rows, texts, strict=True))
        return [found[row] for row in range(len(asked))]

    def _asked(self, prompt: str) -> str:
        """The prompt of one image in the model's own template."""
        added = self.processor.tokenizer.added_tokens_decoder.values()
        plain = without_tokens(prompt, [str(token) for token in added if token.special])
        text = self.form.prompt.replace("{prompt}", plain)
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def _written(self, images: list[np.ndarray], asked: list[str]) -> list[tuple[str, bool]]:
        inputs = self.processor(
            text=asked,
            images=[to_pil(image) for image in images],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        ids, shown = inputs["input_ids"], inputs["attention_mask"].bool()
        # the checkpoint may ask for a penalty on tokens that were there: what fills a row up is a
        # token that all rows begin with, so that a row's answer is that of the row alone
        inputs["input_ids"] = ids.masked_fill(~shown, int(ids[shown][0]))
        made = self.model.generate(**inputs, max_new_tokens=self.new_tokens)[:, ids.shape[1] :]
        ended = torch.isin(made, self._ends).any(1).tolist()
        texts = self.processor.batch_decode(made, skip_special_tokens=True)
        return list(zip(texts, ended, strict=True))


def without_tokens(text: str, tokens: Sequence[str]) -> str:
    """``text`` in which none of ``tokens`` is spelled, such as that of an image: a space stands
    behind its first character. Tokens have two characters or more, and no space.
    """
    for token in tokens:
        while token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _check_values(settings: Settings) -> None:
    PairedScorer.check(settings)
    require_one_of("form", settings["form"], FORMS)
    require_count("new_tokens", settings["new_tokens"], 1)
    if settings["max_pixels"] is not None:
        require_count("max_pixels", settings["max_pixels"], 4 * SIDE**2)
    if not isinstance(settings["checkpoint"], str):
        raise ScorerSetupError(f"checkpoint is {settings['checkpoint']!r}: give a path or a hub id")


def _files(checkpoint: str) -> list[Path] | None:
    """The files with weights; None for a hub id. Raises ScorerSetupError where one is missing, or
    the directory is another model's.
    """
    found = local(checkpoint, WEIGHTS)
    if found is None:
        return None
    folder = found.parent
    if found.suffix not in (".safetensors", ".json"):
        raise ScorerSetupError(f"checkpoint is {checkpoint!r}: only safetensors are read")
    classes = _json(folder / "config.json").get("architectures")
    if classes != [CLASS]:
        raise ScorerSetupError(
            f"checkpoint {str(folder)!r} holds {classes}, not {CLASS}: serve other models and ask"
            " them by the scorer vlm (docs/rewards.md)"
        )
    if found.suffix == ".safetensors":
        return [found]
    names = sorted(set(_json(found).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ScorerSetupError(f"{found} names {(missing or ['no file'])[0]}, which is not there")
    return [folder / name for name in names]


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScorerSetupError(f"{file} cannot be read: {first_line(error)}") from None
    if not isinstance(read, dict):
        raise ScorerSetupError(f"{file} is no table")
    return read


def _load(checkpoint: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model and what makes its inputs. Raises ScorerSetupError."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    found = local(checkpoint, WEIGHTS)
    place: str | Path = checkpoint if found is None else found.parent
    try:
        model = pretrained(Qwen2_5_VLForConditionalGeneration, place, dtype=dtype)
        processor: Any = AutoProcessor.from_pretrained(place)
        # without its file transformers makes an empty tokenizer, and goes on
        known = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if known != model.config.image_token_id or not processor.chat_template:
            raise ValueError("its tokenizer or its chat template is missing")
        return model, processor
    except DAMAGED as error:
        raise ScorerSetupError(
            f"checkpoint = {checkpoint!r}: no {CLASS} of transformers"
            f" ({first_line(error)[:200]}): give a directory with its safetensors, config.json,"
            " preprocessor_config.json, tokenizer and chat template, or a hub id"
        ) from None
