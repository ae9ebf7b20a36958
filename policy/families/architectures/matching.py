"""Find the published model whose architecture a pipeline's configuration files describe."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from configs.section import Tree
from policy.families.architectures import CONFIGS, every_published

WITHOUT_EFFECT = re.compile(
    r"_.*|architectures|attn_implementation|cache_implementation|.*dropout|.*dtype|initializer_.*"
    r"|model_type|output_.*|.*token_ids?|tie_word_embeddings|transformers_version|use_cache"
)
"""Settings of text encoders that change neither the size nor the operations of a pass."""
LIGHT = re.compile(r"scheduler|tokenizer.*|.*processor|feature_extractor")
"""Parts of a pipeline without weights."""


def find_by_configs(index: Tree, config_of: Callable[[str], Tree]) -> str | None:
    """Return the hub id of the published model with the same architecture, or None.

    ``index`` is the content of model_index.json; ``config_of`` returns the configuration of a part.
    A setting that this module does not know counts as a difference.
    """
    classes = _classes(index)
    for _, model in every_published():
        parts = {name: part for name, part in model["parts"].items() if not LIGHT.fullmatch(name)}
        if (
            index.get("_class_name") == model["pipeline"]
            and all(index.get(key) == value for key, value in model.get("index", {}).items())
            and classes == {name: part["class"] for name, part in parts.items()}
            and all(_equal(part, config_of(name)) for name, part in parts.items())
        ):
            hub_id: str = model["hub_id"]
            return hub_id
    return None


def _classes(index: Tree) -> dict[str, str]:
    """Return the class of each part that has weights, as "library.Class"."""
    return {
        name: ".".join(map(str, entry))
        for name, entry in index.items()
        if isinstance(entry, list) and None not in entry and not LIGHT.fullmatch(name)
    }


def _equal(part: Tree, config: Tree) -> bool:
    library, name = part["class"].split(".")
    settings = _of_diffusers if library == "diffusers" else _of_transformers
    published = settings(name, part["config"])
    try:
        return bool(settings(name, config) == published)
    except Exception:  # the class refuses a setting; building the model will say why
        return False


def _of_diffusers(name: str, config: Tree) -> Any:
    """Return all settings of a class; those not in ``config`` have their defaults."""
    cls = getattr(import_module("diffusers"), name)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    return json.loads(json.dumps(defaults | given))  # tuples become lists


def _of_transformers(name: str, config: Tree) -> Any:
    cls = getattr(import_module("transformers"), CONFIGS[name])
    return _with_effect(cls.from_dict(dict(config)).to_dict())


def _with_effect(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {
        key: _with_effect(value)
        for key, value in settings.items()
        if not WITHOUT_EFFECT.fullmatch(str(key))
    }
