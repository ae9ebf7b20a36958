"""Rewards: (pictures, prompts, metadata) -> scores.

``SCORERS`` names the built-in scorers as "module:attribute", imported when asked for, so that a run
pays only for what it uses. A configuration may name its own scorer in the same form.
"""

from __future__ import annotations

import importlib
import inspect
from difflib import get_close_matches
from typing import Any, cast

from configs.rewards import Scorer as ScorerConfig
from rewards.base import Scorer, ScorerError, ScorerSetupError

SCORERS: dict[str, str] = {
    "imagereward": "rewards.imagereward:ImageReward",
    "clipscore": "rewards.openclip:ClipScore",
    "pickscore": "rewards.pickscore:PickScore",
    "hpsv2": "rewards.openclip:HPSv2",
    "ocr": "rewards.ocr:OcrScorer",
    "http": "rewards.server:HttpScorer",
    "shapes": "rewards.shapes:ShapesScorer",
    "jpeg_compressibility": "rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "rewards.jpeg:JpegIncompressibility",
}


def resolve(name: str) -> str:
    """The "module:attribute" of a scorer's name, without importing it. Raises ScorerSetupError for
    an unknown built-in.
    """
    if name in SCORERS:
        return SCORERS[name]
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return name
    near = get_close_matches(name, SCORERS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ScorerSetupError(
        f"rewards.scorers.name: there is no built-in scorer {name!r}: {hint}Use one of"
        f" {', '.join(sorted(SCORERS))}, or module:attribute of your own"
    )


def check_settings(scorer: ScorerConfig) -> None:
    """What can be found wrong with a scorer without loading it: an unknown name, and of a built-in
    one settings that it does not take, values that its class refuses (``check``) and weights that
    are not at the path given (its class names those settings in ``paths``). Raises
    ScorerSetupError.
    """
    target = resolve(scorer.name)
    if scorer.name not in SCORERS:
        return
    module_name, _, attribute = target.partition(":")
    made: Any = getattr(importlib.import_module(module_name), attribute)
    try:
        settings = inspect.signature(made).bind(**scorer.settings)
        settings.apply_defaults()
        if check := getattr(made, "check", None):
            check(settings.arguments)
    except ScorerSetupError as error:
        raise ScorerSetupError(f"scorer {scorer.name!r}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ScorerSetupError(
            f"scorer {scorer.name!r}: settings = {scorer.settings}: {error}"
        ) from None
    for setting, names in getattr(made, "paths", {}).items():
        if isinstance(given := scorer.settings.get(setting), str):
            from rewards.checkpoints import local  # brings torch, which most scorers do without

            try:
                local(given, names)
            except ScorerSetupError as error:
                raise ScorerSetupError(f"scorer {scorer.name!r}: {setting}: {error}") from None


def build(scorer: ScorerConfig, device: str | None = None) -> Scorer:
    """Import the scorer of a configuration and call it with its settings.

    The attribute is a class or a function that returns a scorer. ``device`` reaches it where it
    takes an argument of that name and the settings do not say another. Raises ScorerSetupError, one
    line saying what to mend.
    """
    target = resolve(scorer.name)
    module_name, _, path = target.partition(":")
    try:
        made: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None)
        mend = (
            "put its directory on PYTHONPATH, or in the working directory of the job"
            if missing and (module_name == missing or module_name.startswith(f"{missing}."))
            else f"install what {module_name!r} imports"
        )
        raise ScorerSetupError(
            f"scorer {scorer.name!r}: cannot import {module_name!r} ({error}): {mend}"
        ) from error
    for part in path.split("."):
        try:
            made = getattr(made, part)
        except AttributeError as error:
            near = get_close_matches(
                part, [name for name in dir(made) if not name.startswith("_")], n=1
            )
            hint = f"did you mean {near[0]!r}?" if near else "check the name behind the colon"
            raise ScorerSetupError(
                f"scorer {scorer.name!r}: {module_name!r} has no attribute {path!r}: {hint}"
            ) from error
    if not callable(made):
        raise ScorerSetupError(
            f"scorer {scorer.name!r}: {path!r} is {type(made).__name__}, not a class or function"
            " that makes a scorer"
        )
    settings = dict(scorer.settings)
    if device is not None and "device" not in settings and _takes(made, "device"):
        settings["device"] = device
    try:
        instance = made(**settings)
    except ScorerSetupError as error:  # says what to mend already
        raise ScorerSetupError(f"scorer {scorer.name!r}: {error}") from None
    except (
        Exception
    ) as error:  # a constructor may raise anything; the reader needs to know whose it was
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ScorerSetupError(
            f"scorer {scorer.name!r}: {path}(**settings) raised {type(error).__name__}: {reason}: "
            f"mend rewards.scorers.settings, now {scorer.settings}"
        ) from error
    if not callable(instance):
        raise ScorerSetupError(
            f"scorer {scorer.name!r}: {path}(**settings) returned {type(instance).__name__}, which"
            " cannot be called: return an object that takes (images, prompts, metadata)"
        )
    return cast(Scorer, instance)


def _takes(made: Any, argument: str) -> bool:
    """Whether a class or function can be called with an argument of this name."""
    try:
        return argument in inspect.signature(made).parameters
    except (TypeError, ValueError):
        return False


__all__ = [
    "SCORERS",
    "Scorer",
    "ScorerError",
    "ScorerSetupError",
    "build",
    "check_settings",
    "resolve",
]
