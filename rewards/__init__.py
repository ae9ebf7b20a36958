"""Rewards: (images, prompts, metadata) -> scores. Importing this brings no torch.

A built-in scorer is a file here, with a class that extends ``BuiltIn``, and a row of ``SCORERS``.
A configuration may name a scorer of its own as "module:attribute".
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from configs.named import nearest
from configs.rewards import Scorer as ScorerConfig
from records.errors import described
from rewards.base import BuiltIn, Effort, Scorer, ScorerSetupError, Settings
from rewards.base import ScorerError as ScorerError  # for those who import it from here

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
"""Imported when asked for, so that a run pays only for the libraries of what it uses."""


def resolve(name: str) -> str:
    """The "module:attribute" of a scorer's name, not imported. Raises ScorerSetupError."""
    if name in SCORERS:
        return SCORERS[name]
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return name
    raise ScorerSetupError(
        f"rewards.scorers.name: there is no built-in scorer {name!r}{nearest(name, SCORERS)}: use"
        f" one of {', '.join(sorted(SCORERS))}, or module:attribute of your own"
    )


def built_in(name: str) -> type[BuiltIn] | None:
    """The class of a built-in scorer; None for a scorer of the user's own."""
    if name not in SCORERS:
        return None
    module, _, attribute = SCORERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def may_use_gpu(name: str) -> bool:
    """Whether a scorer computes on the device that it is given, and not by rules, on a server or on
    CPUs alone; one that is not built in may.
    """
    made = built_in(name)
    return made is None or _takes_device(made)


def model_bytes(scorer: ScorerConfig) -> int | None:
    """Bytes of a scorer's model, without loading it; None where they cannot be known so.

    Raises ScorerSetupError for settings that are none.
    """
    made = built_in(scorer.name)
    with _named(scorer):
        return made.model_bytes(scorer.settings) if made is not None else None


def effort(scorer: ScorerConfig, height: int, width: int) -> Effort:
    """What an image of this size takes; nothing, where the scorer is not built in.

    Raises ScorerSetupError for settings that are none.
    """
    made = built_in(scorer.name)
    with _named(scorer):
        return made.effort(scorer.settings, height, width) if made is not None else Effort()


@contextmanager
def _named(scorer: ScorerConfig) -> Iterator[None]:
    """Whatever is wrong with a scorer's setup is said with its name."""
    try:
        yield
    except ScorerSetupError as error:
        raise ScorerSetupError(f"scorer {scorer.name!r}: {error}") from error.__cause__


def check_settings(scorer: ScorerConfig) -> None:
    """Raises ScorerSetupError for what can be found wrong with a scorer without loading it.

    That is an unknown name, and of a built-in scorer settings that it does not take, values that
    its class refuses, and weights that are not at the path given.
    """
    resolve(scorer.name)
    made = built_in(scorer.name)
    if made is None:
        return
    with _named(scorer):
        try:
            settings = inspect.signature(made).bind(**scorer.settings)
            settings.apply_defaults()
            if made.compares not in (None, scorer.per == "prompt"):
                does, use = (
                    ("compares", "prompt") if made.compares else ("does not compare", "image")
                )
                raise ScorerSetupError(f"it {does} images of a prompt: set per = {use!r}")
            made.check(settings.arguments)
        except (TypeError, AttributeError) as error:
            raise ScorerSetupError(f"settings = {scorer.settings}: {error}") from None
        for setting, names in made.paths.items():
            if isinstance(given := scorer.settings.get(setting), str):
                from rewards.checkpoints import local  # brings torch, which most do without

                try:
                    local(given, names)
                except ScorerSetupError as error:
                    raise ScorerSetupError(f"{setting}: {error}") from None


def build(scorer: ScorerConfig, device: str | None = None) -> Scorer:
    """Import the scorer of a configuration and call it with its settings.

    The attribute is a class or a function that returns a scorer. ``device`` reaches it where it
    takes an argument of that name and the settings do not say another. Raises ScorerSetupError, one
    line that says what to fix.
    """
    with _named(scorer):
        target = resolve(scorer.name)
        make = _imported(target)
        settings = dict(scorer.settings)
        if device is not None and "device" not in settings and _takes_device(make):
            settings["device"] = device
        return _made(make, target.partition(":")[2], settings)


def _imported(target: str) -> Callable[..., object]:
    """The class or function "module:attribute". Raises ScorerSetupError."""
    module_name, _, path = target.partition(":")
    try:
        made: object = importlib.import_module(module_name)
    except ImportError as error:
        own = error.name and (module_name == error.name or module_name.startswith(f"{error.name}."))
        advice = (
            "put its directory on PYTHONPATH, or in the working directory of the job"
            if own
            else f"install what {module_name!r} imports"
        )
        raise ScorerSetupError(f"cannot import {module_name!r} ({error}): {advice}") from error
    for part in path.split("."):
        try:
            made = getattr(made, part)
        except AttributeError as error:
            names = [name for name in dir(made) if not name.startswith("_")]
            raise ScorerSetupError(
                f"{module_name!r} has no attribute {path!r}{nearest(part, names)}: check the name"
                " behind the colon"
            ) from error
    if not callable(made):
        raise ScorerSetupError(
            f"{path!r} is {type(made).__name__}, not a class or function that makes a scorer"
        )
    return made


def _made(make: Callable[..., object], name: str, settings: Settings) -> Scorer:
    try:
        instance = make(**settings)
    except ScorerSetupError:  # says what to fix already
        raise
    except Exception as error:  # a constructor may raise anything: say whose it was
        raise ScorerSetupError(
            f"{name}(**settings) raised {described(error)}: "
            f"fix rewards.scorers.settings, now {dict(settings)}"
        ) from error
    if not callable(instance):
        raise ScorerSetupError(
            f"{name}(**settings) returned {type(instance).__name__}, which cannot be called: return"
            " an object that takes (images, prompts, metadata)"
        )
    return cast(Scorer, instance)


def _takes_device(made: Callable[..., object]) -> bool:
    """Whether a class or function can be called with an argument ``device``."""
    try:
        return "device" in inspect.signature(made).parameters
    except (TypeError, ValueError):
        return False
