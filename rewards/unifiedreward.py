"""UnifiedReward (arXiv 2503.05236): a Qwen2.5-VL that writes a rating of an image.

It is prompted with the text that it was trained with and decoded greedily; the score is the number
that it writes. The number has decimals, because the ratings it was trained on are means over
people; the probabilities of a single digit would carry less information.
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

from configs.paths import is_file
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
MAX_RATING = 5.0
SIDE = 28
"""Pixels per side of a vision token: a smaller image would be enlarged to one token."""
QUESTION_TOKENS = 230
"""Tokens of the question, in addition to those of the image."""


class UnifiedReward(BuiltIn):
    """Mean of the ratings that a ``form`` asks for, divided by 5 as in flow_grpo.

    ``form``: ``axes``, of UnifiedReward 2.0 (alignment, coherence, style; each is also a part),
    ``elements``, of the first version, or ``final``, of flow_grpo. An image keeps its size, or is
    reduced to ``max_pixels``. ``new_tokens`` is the most tokens of an answer.
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
            image_processor = self.processor.image_processor
            image_processor.size = {**dict(image_processor.size), "longest_edge": max_pixels}
        generation = self.model.generation_config
        generation.do_sample, generation.temperature, generation.top_p, generation.top_k = (
            False,
            None,
            None,
            None,
        )
        if generation.eos_token_id is None:
            generation.eos_token_id = self.processor.tokenizer.eos_token_id
        ends = generation.eos_token_id
        self._ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=self.device)
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError for an invalid value, or another or incomplete checkpoint."""
        _check_values(settings)
        _files(settings["checkpoint"])

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Count by the shapes in local files, or by the name of a published model; else None.

        Raises ScorerSetupError if ``check`` refuses the values.
        """
        from safetensors import safe_open

        options = cls.with_defaults(settings)
        checkpoint, width = options["checkpoint"], DTYPES[options["dtype"]].itemsize
        try:
            files = _files(checkpoint)
        except ScorerSetupError:  # it may exist on the nodes of the run
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
        """Return two operations per parameter and input token, and the bytes of decoding.

        Each token that a batch generates reads all weights once. Zero if the size is unknown.
        """
        weight_bytes, options = cls.model_bytes(settings) or 0, cls.with_defaults(settings)
        pixels = min(height * width, options["max_pixels"] or math.inf)
        flops = (
            2
            * weight_bytes
            / DTYPES[options["dtype"]].itemsize
            * (QUESTION_TOKENS + pixels / SIDE**2)
        )
        passes = FORMS[options["form"]].tokens / options["batch_size"]
        return Effort(flops, options["dtype"], passes * weight_bytes)

    @classmethod
    def with_defaults(cls, settings: Settings) -> Settings:
        """Complete settings with their defaults. Raises ScorerSetupError if a value is invalid."""
        try:
            bound = inspect.signature(cls).bind(**settings)
        except TypeError as error:
            raise ScorerSetupError(f"settings = {dict(settings)}: {error}") from None
        bound.apply_defaults()
        _check_values(bound.arguments)
        return bound.arguments

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B], NaN if the model wrote no number.

        Raises ScorerError if it wrote none for any image, or the images are too small.
        """
        require_images(images, prompts, metadata)
        if min(images.shape[2:]) < SIDE:
            raise ScorerError(
                f"images are {images.shape[3]}x{images.shape[2]}: {SIDE} pixels are the side of"
                " one token, so generate larger images"
            )
        answers = self.answers(images, prompts)
        marks, low = list(self.form.marks.values()), self.form.low
        ratings = [numbers_after(text, marks, low, MAX_RATING, ended) for text, ended in answers]
        if answers and not any(ratings):
            raise ScorerError(
                f"the model's answer contains no score: {' '.join(answers[0][0].split())[:80]!r}"
            )
        scores = np.array([row or [np.nan] * len(marks) for row in ratings], np.float32)
        scores = scores.reshape(-1, len(marks)) / np.float32(MAX_RATING)
        if len(marks) > 1:
            self.parts = dict(zip(self.form.marks, scores.T.copy(), strict=True))
        return scores.mean(1)

    def answers(self, images: np.ndarray, prompts: Sequence[str]) -> list[tuple[str, bool]]:
        """Return the text that the model writes about each image, and False if it was cut off."""
        questions = [self._question(prompt) for prompt in prompts]
        # sorted by length, for less padding, and then by content, so that the batches, and with
        # them the results, do not depend on the order in which the images come
        order = sorted(
            range(len(questions)),
            key=lambda row: (len(questions[row]), content_key(images[row], questions[row], {})),
        )
        answers: dict[int, tuple[str, bool]] = {}
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            texts = self._generate([images[row] for row in rows], [questions[row] for row in rows])
            answers |= dict(zip(rows, texts, strict=True))
        return [answers[row] for row in range(len(questions))]

    def _question(self, prompt: str) -> str:
        """Return the prompt for one image in the model's chat template."""
        added = self.processor.tokenizer.added_tokens_decoder.values()
        plain = without_tokens(prompt, [str(token) for token in added if token.special])
        text = self.form.prompt.replace("{prompt}", plain)
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def _generate(self, images: list[np.ndarray], questions: list[str]) -> list[tuple[str, bool]]:
        inputs = self.processor(
            text=questions,
            images=[to_pil(image) for image in images],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        ids, attended = inputs["input_ids"], inputs["attention_mask"].bool()
        # the checkpoint may set a repetition penalty, which counts padding too: pad with the token
        # that all rows begin with, so that a row's answer does not depend on the others
        inputs["input_ids"] = ids.masked_fill(~attended, int(ids[attended][0]))
        generated = self.model.generate(**inputs, max_new_tokens=self.new_tokens)[:, ids.shape[1] :]
        ended = torch.isin(generated, self._ends).any(1).tolist()
        texts = self.processor.batch_decode(generated, skip_special_tokens=True)
        return list(zip(texts, ended, strict=True))


def without_tokens(text: str, tokens: Sequence[str]) -> str:
    """Return ``text`` with special tokens, such as an image's, broken by a space.

    The space follows the first character. Tokens have at least two characters and no space.
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
    """Return the files with weights; None for a hub id.

    Raises ScorerSetupError if a file is missing or the directory holds another model.
    """
    found = local(checkpoint, WEIGHTS)
    if found is None:
        return None
    folder = found.parent
    if found.suffix not in (".safetensors", ".json"):
        raise ScorerSetupError(f"checkpoint is {checkpoint!r}: only safetensors files are read")
    classes = _json(folder / "config.json").get("architectures")
    if classes != [CLASS]:
        raise ScorerSetupError(
            f"checkpoint {str(folder)!r} holds {classes}, not {CLASS}: serve other models with a"
            " server and use the scorer vlm (docs/rewards.md)"
        )
    if found.suffix == ".safetensors":
        return [found]
    names = sorted(set(_json(found).get("weight_map", {}).values()))
    missing = [name for name in names if not is_file(folder / name)]
    if missing or not names:
        raise ScorerSetupError(f"{found} names {(missing or ['no file'])[0]}, which does not exist")
    return [folder / name for name in names]


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScorerSetupError(f"{file} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ScorerSetupError(f"{file} is not a table")
    return content


def _load(checkpoint: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the model and its processor. Raises ScorerSetupError."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    found = local(checkpoint, WEIGHTS)
    place: str | Path = checkpoint if found is None else found.parent
    try:
        model = pretrained(Qwen2_5_VLForConditionalGeneration, place, dtype=dtype)
        processor: Any = AutoProcessor.from_pretrained(place)
        # without its file, transformers silently creates an empty tokenizer
        known = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if known != model.config.image_token_id or not processor.chat_template:
            raise ValueError("its tokenizer or its chat template is missing")
        return model, processor
    except DAMAGED as error:
        raise ScorerSetupError(
            f"checkpoint = {checkpoint!r}: not a {CLASS} model of transformers"
            f" ({first_line(error)[:200]}): give a directory with its safetensors, config.json,"
            " preprocessor_config.json, tokenizer and chat template, or a hub id"
        ) from None
