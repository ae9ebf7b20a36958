"""Suggest settings that save memory, for a run that does not fit on its GPUs.

They are tried cumulatively, in the order of the time that they cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig
from configs.section import Tree
from planning.assumptions import Assumptions
from planning.layouts.choose import DoesNotFit
from planning.placement import Node
from planning.plan import layout_of


@dataclass(frozen=True)
class Saving:
    """Settings that save memory, and a description of what they cost."""

    settings: tuple[str, ...]
    costs: str
    needs: tuple[str, ...] = ()  # settings that it requires
    instead_of: str | None = None  # key of an earlier setting that it replaces


FEW = 8  # images or points in a pass
EAGER = ("regenerate.compile=false", "optimizer.compile=false")
SAVINGS = (
    Saving(
        ("prompts.encode_once=true",), ("prompts are encoded at the start and kept in host memory")
    ),
    Saving(("model.vae_slicing=true",), "one image is decoded at a time"),
    Saving(("optimizer.gradient_checkpointing=true",), "blocks are recomputed in training"),
    Saving(
        (
            f"explore.chunk_size={FEW}",
            f"regenerate.batch_size={FEW}",
            f"optimizer.batch_size={FEW}",
        ),
        "smaller passes use GPUs less well; results differ in the last bits",
    ),
    Saving(
        ("optimizer.batch_size=1", "regenerate.batch_size=2", "explore.chunk_size=4"),
        "even smaller passes",
    ),
    Saving(('lora.base="int8"',), "frozen weights in 8 bits; adapters are not merged", needs=EAGER),
    Saving(('lora.base="nf4"',), "frozen weights in 4 bits"),
    Saving(("audit.identity_every=0",), "rollout actors are not compared with the learner"),
    Saving(("services.reward.gpus=0",), "images are scored on CPUs"),
    Saving(("services.encoder.gpus=0",), "prompts are encoded on CPUs"),
    Saving(
        ('services.learner.shard="base"',),
        "each learner replica holds a part of the frozen weights and gathers blocks in every pass",
        needs=EAGER,
        instead_of="lora.base",
    ),
)


def savings_lines(
    config: RunConfig, given: Assumptions, nodes: Sequence[Node] | None = None
) -> Iterator[str]:
    """Yield a line per saving, each on top of those before, up to the first that makes it fit.

    ``config`` does not fit. A step that changes passes counts them, which may take seconds each.
    """
    settings: dict[str, str] = {}
    for saving in SAVINGS:
        added = [one for one in saving.settings if lowers(config, one)]
        if not added:
            continue
        needs = [one for one in saving.needs if lowers(config, one)]
        added = [*(one for one in needs if one.partition("=")[0] not in settings), *added]
        tried = {key: value for key, value in settings.items() if key != saving.instead_of}
        tried |= dict(one.split("=") for one in added)
        try:
            smaller = changed(config, tried)
        except ConfigError:  # incompatible with the rest of the configuration
            continue
        settings = tried
        options = " ".join(f"--set {one}" for one in added)
        try:
            choice = layout_of(smaller, given, nodes)
        except DoesNotFit as error:
            if not error.gb:  # not possible on these GPUs at all
                continue
            yield f"  {error.gb:6.1f} GB, {error.short:.1f} short, with {options}: {saving.costs}"
            continue
        except ValueError:  # not supported by the model
            continue
        gb = choice.best.gb if choice else 0.0
        yield f"  {gb:6.1f} GB, fits, with {options}: {saving.costs}"
        return
    yield "  no other option saves memory: use fewer pixels or a larger GPU"


def changed(config: RunConfig, settings: dict[str, str]) -> RunConfig:
    """Return ``config`` with other settings, by key; values left to a layout stay unset."""
    tree: Tree = config.model_dump(mode="json", exclude_unset=True)
    apply(tree, *(f"{key}={value}" for key, value in settings.items()))
    return parse(tree)


def value_of(config: RunConfig, key: str) -> object:
    """Return the value of ``key``, such as ``optimizer.lr``."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def lowers(config: RunConfig, setting: str) -> bool:
    """Return True if ``key=value`` saves memory: it has no effect if a number is already as low."""
    key, _, text = setting.partition("=")
    value = value_of(config, key)
    if text in ("true", "false"):
        return value is (text == "false")
    if key == "lora.base":
        finer = {"full": ("int8", "nf4"), "int8": ("nf4",), "nf4": ()}[config.lora.base]
        return text.strip('"') in finer and config.arm != "naive_scaling"
    if key == "services.learner.shard":
        learner = config.services.learner
        several = learner.replicas > 1 or "replicas" not in learner.model_fields_set
        return value == "none" and several and config.lora.base == "full"
    if key.endswith(".gpus"):
        section = getattr(config.services, key.split(".")[1])
        return "gpus" not in section.model_fields_set
    return isinstance(value, int) and value > int(text)
