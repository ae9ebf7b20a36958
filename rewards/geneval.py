"""GenEval scorer (arXiv 2310.11513): how far an image shows the objects that its prompt names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError

from records.errors import first_line
from rewards.base import (
    BuiltIn,
    Metadata,
    ScorerSetupError,
    Settings,
    require_images,
    require_share,
)
from rewards.checkpoints import DAMAGED, local, pretrained
from rewards.geneval_rules import COLORS, Detection, Objects, assess, parse_requirements
from rewards.openclip import ClipScore
from rewards.paired import PairedScorer

if TYPE_CHECKING:
    from transformers import Mask2FormerForUniversalSegmentation

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
WEIGHTS = ("model.safetensors",)
ALIASES = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
"""COCO's names and GenEval's names for the same classes."""
MAX_OBJECTS = 16
"""Most objects of one class that are kept: those with the highest scores."""
GREY = 0x99
"""Gray level that hides the surroundings of an object whose color is classified."""
TEMPLATES = (
    "a photo of a {c} {name}",
    "a photo of a {c}-colored {name}",
    "a photo of a {c} object",
)


CHECKPOINT_ADVICE = (
    "give a directory with config.json, preprocessor_config.json and model.safetensors, or a hub id"
)
UNUSABLE = (*DAMAGED, StrictDataclassError)
"""Exceptions that transformers raises for files that describe no valid model."""


class GenEvalScorer(BuiltIn):
    """Share of its prompt's GenEval metadata that an image fulfils, in [0, 1]; 1 if correct.

    Objects are detected by transformers' Mask2Former, which has the benchmark's architecture, but
    weights of its authors' own training rather than the benchmark's. Colors are classified by CLIP
    ViT-L/14, as in the benchmark. ``strict`` returns GenEval's own verdict, 0 or 1, instead of the
    share; ``parts["correct"]`` always holds the verdict. ``threshold`` is the least score of an
    object, ``counting_threshold`` the same for prompts with the tag "counting".
    """

    paths = {"detector": WEIGHTS, "clip": ClipScore.paths["checkpoint"]}

    def __init__(
        self,
        detector: str = DETECTOR,
        clip: str = ClipScore.published,
        strict: bool = False,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        batch_size: int = 16,
        dtype: str = "fp32",
        device: str | None = None,
    ) -> None:
        self.strict, self.threshold = strict, threshold
        self.counting_threshold, self.batch_size = counting_threshold, batch_size
        self.colors = ClipScore(clip, batch_size=batch_size, dtype=dtype, device=device)
        self.device = self.colors.device
        self.detector, self.processor = _load(detector)
        self.detector.to(self.device).eval()  # pyright: ignore[reportArgumentType]
        labels: dict[Any, str] = dict(self.detector.config.id2label or {})
        self.names = [ALIASES.get(labels[i], labels[i]) for i in range(len(labels))]
        self.parts: dict[str, np.ndarray] = {}
        self._texts: dict[str, torch.Tensor] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if a threshold is not in [0, 1] or a common setting is invalid."""
        PairedScorer.check(settings)
        for name in ("threshold", "counting_threshold"):
            require_share(name, settings[name])

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Return the bytes of both models; None if the detector's files are not on this machine."""
        from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

        try:
            path = local(str(settings.get("detector", DETECTOR)), WEIGHTS)
        except ScorerSetupError:
            path = None
        clip = {"checkpoint": settings.get("clip", ClipScore.published)}
        colors = ClipScore.model_bytes({**clip, "dtype": settings.get("dtype", "fp32")})
        if path is None or colors is None:
            return None
        model_class: Any = Mask2FormerForUniversalSegmentation
        try:
            with torch.device("meta"):
                model: torch.nn.Module = model_class(Mask2FormerConfig.from_pretrained(path.parent))
        except UNUSABLE as error:
            raise ScorerSetupError(
                f"{path.parent}: its config.json does not describe a Mask2Former model"
                f" ({first_line(error)[:200]}): {CHECKPOINT_ADVICE}"
            ) from None
        return colors + sum(parameter.numel() * 4 for parameter in model.parameters())

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B]. Raises ValueError if a prompt lacks metadata."""
        require_images(images, prompts, metadata)
        rows = zip(prompts, metadata, strict=True)
        entries = [parse_requirements(prompt, row, self.names) for prompt, row in rows]
        least = [
            self.counting_threshold if row.get("tag") == "counting" else self.threshold
            for row in metadata
        ]
        detected = [
            objects
            for first in range(0, len(images), self.batch_size)
            for objects in self.detect(images[first : first + self.batch_size], least[first:])
        ]
        outcomes = [
            assess(entry, objects, partial(self.color_names, image))
            for image, entry, objects in zip(images, entries, detected, strict=True)
        ]
        self.parts = {"correct": np.array([outcome.correct for outcome in outcomes], np.float32)}
        shares = np.array([outcome.share for outcome in outcomes], np.float32)
        return self.parts["correct"] if self.strict else shares

    # ---- objects

    @torch.inference_mode()
    def detect(self, images: np.ndarray, least: Sequence[float]) -> list[Objects]:
        """Return the objects in each image of uint8 [B, 3, H, W] that score above ``least``[i].

        An object is a pair of a query and a class. Its score is the probability of the class times
        the mean of the query's mask probabilities over the mask, where they exceed one half.
        """
        inputs = self.processor(
            list(images), return_tensors="pt", input_data_format="channels_first"
        )
        outputs = self.detector(inputs["pixel_values"].to(self.device))
        used = inputs["pixel_mask"].bool()
        return [
            self._objects(
                outputs.class_queries_logits[i],
                _upsampled(outputs.masks_queries_logits[i], used[i], images.shape[2:]),
                least[i],
            )
            for i in range(len(images))
        ]

    def _objects(self, logits: torch.Tensor, masks: torch.Tensor, least: float) -> Objects:
        """Return objects by class, given class logits [Q, C + 1] and mask logits [Q, H, W]."""
        probabilities = logits.softmax(-1)[:, :-1]
        best, places = probabilities.flatten().topk(len(probabilities))
        queries, classes = places // probabilities.shape[1], places % probabilities.shape[1]
        inside = masks > 0
        sizes = inside.flatten(1).sum(1)
        means = (masks.sigmoid() * inside).flatten(1).sum(1) / (sizes + 1e-6)
        scores = best * means[queries]
        objects: dict[str, list[Detection]] = {}
        for index in scores.argsort(descending=True).tolist():
            group = objects.setdefault(self.names[int(classes[index])], [])
            query, score = int(queries[index]), float(scores[index])
            if score > least and sizes[query] and len(group) < MAX_OBJECTS:
                group.append(_found(inside[query].cpu().numpy(), score))
        return {name: group for name, group in objects.items() if group}

    # ---- colors

    @torch.inference_mode()
    def color_names(self, image: np.ndarray, name: str, group: Sequence[Detection]) -> list[str]:
        """Classify the color of each object in an image uint8 [3, H, W] by CLIP, masked."""
        crops = [self.colors.pixels(_alone(image, detection)[None]) for detection in group]
        pixels = torch.cat(crops).to(self.device, self.colors.dtype)
        features = torch.nn.functional.normalize(
            self.colors.model.encode_image(pixels).float(), dim=-1
        )
        return [COLORS[int(color)] for color in (features @ self._classifier(name).T).argmax(1)]

    def _classifier(self, name: str) -> torch.Tensor:
        """Return text features float32 [colors, D], each the normalized mean over TEMPLATES."""
        if name not in self._texts:
            texts = [form.format(c=color, name=name) for color in COLORS for form in TEMPLATES]
            tokens = self.colors.tokenise(texts).to(self.device)
            features = torch.nn.functional.normalize(
                self.colors.model.encode_text(tokens).float(), dim=-1
            )
            mean = features.unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1)
            self._texts[name] = torch.nn.functional.normalize(mean, dim=-1)
        return self._texts[name]


def _load(source: str) -> tuple[Mask2FormerForUniversalSegmentation, Any]:
    """Load the detector and its image processor. Raises ScorerSetupError."""
    from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

    path = local(source, WEIGHTS)
    place: str | Path = source if path is None else path.parent
    try:
        model = pretrained(Mask2FormerForUniversalSegmentation, place, dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(place)
        grey = np.full((3, 64, 64), GREY, np.uint8)
        processor([grey], return_tensors="pt", input_data_format="channels_first")
    except UNUSABLE as error:
        raise ScorerSetupError(
            f"detector = {source!r}: not a Mask2Former model of transformers"
            f" ({first_line(error)[:200]}): {CHECKPOINT_ADVICE}"
        ) from None
    return model, processor


def _upsampled(masks: torch.Tensor, used: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Upsample mask logits [Q, h, w] to an image's own size, without the padding of its inputs.

    ``used``, bool [H', W'], is True for the input pixels that show the image.
    """
    whole = torch.nn.functional.interpolate(masks[None], used.shape, mode="bilinear")
    height, width = int(used.any(1).sum()), int(used.any(0).sum())
    shown = whole[..., :height, :width]
    return torch.nn.functional.interpolate(shown, tuple(size), mode="bilinear")[0]


def _found(mask: np.ndarray, score: float) -> Detection:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, right, top, bottom = columns[0], columns[-1] + 1, rows[0], rows[-1] + 1
    return Detection((float(left), float(top), float(right), float(bottom)), score, mask)


def _alone(image: np.ndarray, found: Detection) -> np.ndarray:
    """Crop an object's box as uint8 [3, h, w], with gray outside its mask."""
    left, top, right, bottom = (round(edge) for edge in found.box)
    shown = image if found.mask is None else np.where(found.mask, image, np.uint8(GREY))
    return np.ascontiguousarray(shown[:, top:bottom, left:right])
