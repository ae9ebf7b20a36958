"""What would make a run fit on GPUs that are too small for it: settings that save memory, tried one
after the other, the cheapest in time first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig
from configs.section import Tree
from planning.assumptions import Assumptions
from planning.layouts.choose import DoesNotFit
from planning.make import layout_of
from planning.placement import Node


@dataclass(frozen=True)
class Saving:
    """Settings, and what they cost."""

    settings: tuple[str, ...]
    costs: str
    needs: tuple[str, ...] = ()  # what has to be set with it
    instead_of: str | None = None  # an earlier setting that it does not go with


FEW = 8  # images or points in a pass
EAGER = ("regenerate.compile=false", "optimizer.compile=false")
SAVINGS = (
    Saving(("prompts.encode_once=true",), "prompts are encoded at the start, and held on the host"),
    Saving(("model.vae_slicing=true",), "one image is decoded at a time"),
    Saving(("optimizer.gradient_checkpointing=true",), "blocks are computed twice in training"),
    Saving(
        (
            f"explore.chunk_size={FEW}",
            f"regenerate.batch_size={FEW}",
            f"optimizer.batch_size={FEW}",
        ),
        "smaller passes, less busy GPUs; other last bits",
    ),
    Saving(
        ("optimizer.batch_size=1", "regenerate.batch_size=2", "explore.chunk_size=4"), "more so"
    ),
    Saving(
        ('lora.base="int8"',),
        "frozen weights in 8 bits; adapters beside them, not merged",
        needs=EAGER,
    ),
    Saving(('lora.base="nf4"',), "frozen weights in 4 bits"),
    Saving(("audit.identity_every=0",), "rollout actors are not compared with the learner"),
    Saving(("services.reward.gpus=0",), "images are scored on CPUs"),
    Saving(("services.encoder.gpus=0",), "prompts are encoded on CPUs"),
    Saving(
        ('services.learner.shard="base"',),
        "learner replicas have a part of the frozen weights each, and gather blocks in every pass",
        needs=EAGER,
        instead_of="lora.base",
    ),
)


def savings_lines(
    config: RunConfig, given: Assumptions, nodes: Sequence[Node] | None = None
) -> Iterator[str]:
    """A line per saving, on top of those before it, up to the first with which the run fits.

    ``config`` does not fit. Counts each, which may take a minute for a large model.
    """
    settings: dict[str, str] = {}
    for saving in SAVINGS:
        new = [one for one in saving.settings if lowers(config, one)]
        if not new:
            continue
        needs = [one for one in saving.needs if lowers(config, one)]
        new = [*(one for one in needs if one.partition("=")[0] not in settings), *new]
        tried = {key: value for key, value in settings.items() if key != saving.instead_of}
        tried |= dict(one.split("=") for one in new)
        try:
            smaller = changed(config, tried)
        except ConfigError:  # it does not go with what the configuration says
            continue
        settings = tried
        told = " ".join(f"--set {one}" for one in new)
        try:
            choice = layout_of(smaller, given, nodes)
        except DoesNotFit as short:
            if not short.gb:  # it is not possible on these GPUs
                continue
            yield f"  {short.gb:6.1f} GB, {short.short:.1f} short, with {told}: {saving.costs}"
            continue
        except ValueError:  # nor with the model
            continue
        gb = choice.best.gb if choice else 0.0
        yield f"  {gb:6.1f} GB, fits, with {told}: {saving.costs}"
        return
    yield "  nothing else is known that saves memory: fewer pixels, or a larger GPU"


def changed(config: RunConfig, settings: dict[str, str]) -> RunConfig:
    """``config`` with settings by their keys; what it leaves to a layout stays open."""
    tree: Tree = config.model_dump(mode="json", exclude_unset=True)
    apply(tree, *(f"{key}={value}" for key, value in settings.items()))
    return parse(tree)


def lowers(config: RunConfig, setting: str) -> bool:
    """Whether ``key=value`` changes anything: a number that is lower already does not."""
    key, _, text = setting.partition("=")
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
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
