"""The model card of an exported LoRA: what it is, what it was trained on, what it changed, how to
load it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.compare.statistics import Mean
from analysis.report.charts import number
from analysis.report.data import Row, RunData, held_out_reward, read_run, step_of
from analysis.report.rewards import scores_of
from configs.schema import RunConfig
from configs.sections import Model
from policy.experts import EXPERTS
from policy.families import FAMILIES
from policy.families.files import HUB_ID
from policy.lora_files import FILE, FILES
from records import atomic
from records.images import before_after

CARD, IMAGE = "README.md", "before_after.png"
SECOND = FILES[EXPERTS[1]]
DECLARED = ("license", "license_name", "license_link")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass(frozen=True)
class Export:
    """The exported weights, and where they will be found."""

    weights: str
    updates: int
    where: str  # a hub id, or "." for the directory itself
    files: Sequence[str] = (FILE,)


def write_card(
    out: Path, directory: Path, config: RunConfig, export: Export, licence: str | None = None
) -> Path:
    """Write ``README.md`` and, where two evaluations drew images, ``before_after.png`` to ``out``;
    returns the path of the card.

    ``directory`` is that of the run. ``licence``: as the user declares it; None: as the base
    model's own card does. Raises OSError where nothing can be written.
    """
    try:
        sheet = before_after(directory / "images")
    except FileNotFoundError:
        (out / IMAGE).unlink(missing_ok=True)
        drawn = False
    else:
        with atomic.replacing(out / IMAGE) as beside:
            sheet.save(beside, "PNG", optimize=True)
        drawn = True
    declared = {"license": licence} if licence else licence_of(config.model)
    text = card(read_run(directory), config, export, declared, drawn)
    atomic.write_text(out / CARD, text)
    return out / CARD


def card(
    run: RunData, config: RunConfig, export: Export, licence: Mapping[str, str], drawn: bool
) -> str:
    """The text, with the front matter that the hub reads."""
    base = hub_id(config.model)
    family = FAMILIES[config.model.family]
    made = "image-to-image" if family.edits else "text-to-image"
    made = "text-to-video" if family.video else made
    front: Row = {
        **({"base_model": base, "base_model_relation": "adapter"} if base else {}),
        **(licence or {"license": "unknown"}),
        "library_name": "diffusers",
        "pipeline_tag": made,
        "tags": ["lora", "diffusers", made, "reinforcement-learning", "sol-rl"],
    }
    parts = [
        f"# {run.name}",
        _sentence(config, export, base),
        _licence(licence),
        "## Rewards\n\n" + _rewards(run, export),
        f"## Images\n\n![Held-out prompts at the same initial noises, before and after]({IMAGE})"
        if drawn
        else "",
        "## Prompts\n\n" + _prompts(run, config),
        "## How to load it\n\n" + _loading(config, export, base),
        "## Training\n\n" + _training(run, config),
    ]
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return f"---\n{lines}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def hub_id(model: Model) -> str | None:
    """The base model's id on the hub; None for a directory."""
    here = model.path == "shapes" or Path(model.path).expanduser().exists()
    return None if here or not HUB_ID.fullmatch(model.path) else model.path


def licence_of(model: Model) -> dict[str, str]:
    """The licence that the base model's card declares, in its directory or in the hub's cache here.

    Empty where there is no card, or it declares nothing.
    """
    from huggingface_hub import try_to_load_from_cache

    if model.path == "shapes":
        return {"license": "apache-2.0"}  # it ships with the program, under its licence
    base = hub_id(model)
    file = try_to_load_from_cache(base, CARD) if base else Path(model.path).expanduser() / CARD
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    front = FRONT.match(Path(file).read_text(encoding="utf-8", errors="replace"))
    lines = (front[1] if front else "").splitlines()
    pairs = [line.partition(":") for line in lines if not line.startswith((" ", "-", "#"))]
    found = {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}
    return {key: found[key] for key in DECLARED if found.get(key)}


def _sentence(config: RunConfig, export: Export, base: str | None) -> str:
    name = f"[{base}](https://huggingface.co/{base})" if base else f"`{config.model.path}`"
    return (
        f"A LoRA of rank {config.lora.rank} (alpha {config.lora.alpha:g}) for {name}, trained with"
        f" reinforcement learning by Sol-RL: arm `{config.arm}`, objective"
        f" `{config.objective.name}`, {export.updates} updates; `{export.weights}` weights."
    )


def _licence(licence: Mapping[str, str]) -> str:
    if not licence:
        return "The base model's licence is not declared here: look at its own page before use."
    name = licence.get("license_name", licence["license"])
    link = licence.get("license_link")
    return f"Licence, as declared: {f'[{name}]({link})' if link else name}."


def _rewards(run: RunData, export: Export) -> str:
    before, after = run.before, run.after
    if before is None or after is None:
        return "This run has not been evaluated before and after training."
    rows = [
        "| | before | after | change |",
        "| --- | --- | --- | --- |",
        f"| reward | {_pm(held_out_reward(before))} | {_pm(held_out_reward(after))} |"
        f" {_pm(run.paired_gain)} |",
    ]
    for score in scores_of(run):
        cells = (number(score.before), number(score.after), _pm(score.change))
        rows.append(f"| {score.label} ({score.role}) | {' | '.join(cells)} |")
    said = (
        f"On {run.setting('evaluate.prompts')} prompts that were not trained on, "
        f"{run.setting('evaluate.noises')} fixed initial noises each, with the"
        f" `{after.get('weights')}` weights after {step_of(after)} updates; ± is one standard"
        " error of the mean, clustered by prompt, of a change that of the paired difference."
    )
    if (after.get("weights"), step_of(after)) != (export.weights, export.updates):
        said += f" The weights here are others: `{export.weights}` after {export.updates} updates."
    return "\n".join([*rows, "", said])


def _pm(value: Mean) -> str:
    """A mean, with its error where both are known."""
    known = math.isfinite(value.mean) and math.isfinite(value.error)
    return number(value.mean) + (f" ± {number(value.error)}" if known else "")


def _prompts(run: RunData, config: RunConfig) -> str:
    scorers = ", ".join(
        f"`{scorer.label}` x {scorer.weight:g}" for scorer in config.rewards.scorers
    )
    examples = "\n".join(f"* {_plain(text)}" for text in list(run.images.prompts.values())[:4])
    lines = [
        f"Trained on `{config.prompts.train}`, {config.prompts.per_iteration} prompts per"
        f" iteration, to raise {scorers}."
    ]
    if examples:
        lines.append(f"Of the held-out prompts, `{config.prompts.test}`:\n\n{examples}")
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    """A prompt on one line, without what Markdown or HTML would take for its own."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _loading(config: RunConfig, export: Export, base: str | None) -> str:
    family, settings = FAMILIES[config.model.family], config.evaluate
    arguments = family.call_arguments(config.model, config.guidance)
    # of the program's source tree
    place = "shapes/model" if config.model.path == "shapes" else base or config.model.path
    given = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    weights = "\n".join(
        f"pipe.load_lora_weights({export.where!r}, weight_name={file!r}"
        + (", load_into_transformer_2=True)" if file == SECOND else ")")
        for file in export.files
    )
    more, made, kept = "", "image", "images[0]"
    if family.video:
        fps = config.model.frames_per_second
        made, kept = "clip", f'frames[0]\nexport_to_video(clip, "clip.mp4", fps={fps})'
        more = "\nfrom diffusers.utils import export_to_video"
    if family.edits:
        size = f"{config.model.width} x {config.model.height} pixels"
        more = "\nfrom diffusers.utils import load_image"
        given = f'    image=load_image("source.png"),  # of {size}, as in training\n{given}'
    return f"""With diffusers:

```python
import torch
from diffusers import {family.pipeline_class}{more}

pipe = {family.pipeline_class}.from_pretrained({place!r}, dtype=torch.bfloat16)
{weights}
{made} = pipe(
    prompt="...",
    num_inference_steps={settings.steps},
{given}).{kept}
```

Evaluations used the solver `{settings.solver}`, the pipeline uses that of its scheduler.

{_in_comfyui(export, config.lora.alpha / config.lora.rank)}"""


def _in_comfyui(export: Export, strength: float) -> str:
    named = " and ".join(f"`{file}`" for file in export.files)
    each = (
        f" `{FILE}` is for the model of high noise levels, `{SECOND}` for that of low ones."
        if SECOND in export.files
        else ""
    )
    return f"""In ComfyUI: put {named} into `models/loras` and load it with the node
`LoraLoaderModelOnly` at strength {strength:g}, which is alpha / rank: the file has alpha in its
metadata, where ComfyUI does not look.{each} Where a model's attention is one fused layer in ComfyUI
(Z-Image), not all names may be known there: look into its log. This has not been tried by the
program that wrote this page."""


def _training(run: RunData, config: RunConfig) -> str:
    plan, model = config.plan, config.model
    size, what = f"{model.width} x {model.height} pixels", "images"
    if model.frames is not None:
        size, what = f"{size}, {model.frames} frames", "clips"
    stages = f"{config.selection.keep} {what} per prompt at {config.regenerate.steps} steps"
    if plan.explore is not None:
        stages = (
            f"{plan.explore.pool_size} {what} per prompt explored at {plan.explore.steps} steps,"
            f" {stages}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"{size}; {stages}; learning rate {config.optimizer.lr:g}; seed {config.seed}." + (
        f"\n\nVersions: {versions}." if versions else ""
    )
