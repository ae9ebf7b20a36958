"""Rewards: (images, prompts, metadata) -> scores. Importing this package does not import torch.

A built-in scorer is a module of this package with a class that extends ``BuiltIn``, and a row of
``SCORERS``. A configuration may also name a scorer outside of it as "module:attribute".
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from configs.lookup import suggestion
from configs.rewards import Scorer as ScorerConfig
from records.errors import error_summary
from rewards.base import BuiltIn, Effort, Scorer, ScorerSetupError, Settings
from rewards.base import ScorerError as ScorerError  # re-exported
from rewards.base import ScorerUnreachable as ScorerUnreachable

SCORERS: dict[str, str] = {
    "imagereward": "rewards.imagereward:ImageReward",
    "clipscore": "rewards.openclip:ClipScore",
    "pickscore": "rewards.pickscore:PickScore",
    "hpsv2": "rewards.openclip:HPSv2",
    "hpsv3": "rewards.hps_v3:HPSv3",
    "unifiedreward": "rewards.unifiedreward:UnifiedReward",
    "ocr": "rewards.ocr:OcrScorer",
    "geneval": "rewards.geneval:GenEvalScorer",
    "http": "rewards.server:HttpScorer",
    "vlm": "rewards.vlm:VlmScorer",
    "vlm_rank": "rewards.vlm_rank:VlmRankScorer",
    "shapes": "rewards.shapes:ShapesScorer",
    "jpeg_compressibility": "rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "rewards.jpeg:JpegIncompressibility",
}
"""Modules are imported on demand, so that a run loads only the libraries that it uses."""


def resolve(name: str) -> str:
    """Return "module:attribute" of a scorer's name, without importing. Raises ScorerSetupError."""
    if name in SCORERS:
        return SCORERS[name]
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return name
    raise ScorerSetupError(
        f"rewards.scorers.name: unknown built-in scorer {name!r}{suggestion(name, SCORERS)}: use"
        f" one of {', '.join(sorted(SCORERS))}, or module:attribute of a custom scorer"
    )


def built_in(name: str) -> type[BuiltIn] | None:
    """Return the class of a built-in scorer, or None for a custom scorer."""
    if name not in SCORERS:
        return None
    module, _, attribute = SCORERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def may_use_gpu(name: str) -> bool:
    """Return True if a scorer may compute on a GPU.

    False for built-in scorers that use rules, a server, or CPUs only.
    """
    scorer = built_in(name)
    return scorer is None or _takes_device(scorer)


def model_bytes(scorer: ScorerConfig) -> int | None:
    """Return the bytes of a scorer's model without loading it; None if they are unknown.

    Raises ScorerSetupError for invalid settings.
    """
    kind = built_in(scorer.name)
    with _named(scorer):
        return kind.model_bytes(scorer.settings) if kind is not None else None


def effort(scorer: ScorerConfig, height: int, width: int) -> Effort:
    """Return the cost of scoring an image of this size; zero for custom scorers.

    Raises ScorerSetupError for invalid settings.
    """
    kind = built_in(scorer.name)
    with _named(scorer):
        return kind.effort(scorer.settings, height, width) if kind is not None else Effort()


@contextmanager
def _named(scorer: ScorerConfig) -> Iterator[None]:
    """Prepend the scorer's name to errors of its setup."""
    try:
        yield
    except ScorerSetupError as error:
        raise ScorerSetupError(f"scorer {scorer.name!r}: {error}") from error.__cause__


def check_settings(scorer: ScorerConfig) -> None:
    """Raise ScorerSetupError for a scorer that is wrong, as far as known without loading it.

    Detects unknown names, and for built-in scorers unknown settings, values that the class rejects,
    and missing weights.
    """
    resolve(scorer.name)
    kind = built_in(scorer.name)
    if kind is None:
        return
    with _named(scorer):
        try:
            settings = inspect.signature(kind).bind(**scorer.settings)
            settings.apply_defaults()
            if kind.compares not in (None, scorer.per == "prompt"):
                does, use = (
                    ("compares", "prompt") if kind.compares else ("does not compare", "image")
                )
                raise ScorerSetupError(f"it {does} images of a prompt: set per = {use!r}")
            kind.check(settings.arguments)
        except (TypeError, AttributeError) as error:
            raise ScorerSetupError(f"settings = {scorer.settings}: {error}") from None
        for setting, names in kind.paths.items():
            if isinstance(path := scorer.settings.get(setting), str):
                from rewards.checkpoints import local  # imports torch, which few scorers need here

                try:
                    local(path, names)
                except ScorerSetupError as error:
                    raise ScorerSetupError(f"{setting}: {error}") from None


def build(scorer: ScorerConfig, device: str | None = None) -> Scorer:
    """Import the scorer of a configuration and create it with its settings.

    The attribute is a class, or a function that returns a scorer. ``device`` is passed if it has a
    parameter of that name that the settings do not set. Raises ScorerSetupError with one line that
    says what to fix.
    """
    with _named(scorer):
        target = resolve(scorer.name)
        make = _imported(target)
        settings = dict(scorer.settings)
        if device is not None and "device" not in settings and _takes_device(make):
            settings["device"] = device
        return _made(make, target.partition(":")[2], settings)


def _imported(target: str) -> Callable[..., object]:
    """Import the class or function "module:attribute". Raises ScorerSetupError."""
    module_name, _, path = target.partition(":")
    try:
        value: object = importlib.import_module(module_name)
    except ImportError as error:
        own = error.name and (module_name == error.name or module_name.startswith(f"{error.name}."))
        advice = (
            "add its directory to PYTHONPATH, or to the working directory of the job"
            if own
            else f"install the packages that {module_name!r} imports"
        )
        raise ScorerSetupError(f"cannot import {module_name!r} ({error}): {advice}") from error
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            names = [name for name in dir(value) if not name.startswith("_")]
            raise ScorerSetupError(
                f"{module_name!r} has no attribute {path!r}{suggestion(part, names)}: check the"
                " name after the colon"
            ) from error
    if not callable(value):
        raise ScorerSetupError(
            f"{path!r} is {type(value).__name__}, not a class or function that creates a scorer"
        )
    return value


def _made(make: Callable[..., object], name: str, settings: Settings) -> Scorer:
    try:
        instance = make(**settings)
    except ScorerSetupError:  # its message already says what to fix
        raise
    except Exception as error:  # a constructor may raise anything: name it
        raise ScorerSetupError(
            f"{name}(**settings) raised {error_summary(error)}: "
            f"fix rewards.scorers.settings, now {dict(settings)}"
        ) from error
    if not callable(instance):
        raise ScorerSetupError(
            f"{name}(**settings) returned {type(instance).__name__}, which cannot be called: return"
            " an object that takes (images, prompts, metadata)"
        )
    return cast(Scorer, instance)


def _takes_device(make: Callable[..., object]) -> bool:
    """Return True if a class or function has a parameter ``device``."""
    try:
        return "device" in inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False
