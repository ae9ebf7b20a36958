"""Model card of an exported LoRA: rewards, images, prompts, loading code and training settings."""

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
from configs.paths import is_file
from configs.schema import RunConfig
from configs.sections import Model
from policy.experts import EXPERTS
from policy.families import FAMILIES
from policy.families.files import HUB_ID, is_local
from policy.lora_files import FILE, FILES
from records import atomic
from records.images import before_after

CARD, IMAGE = "README.md", "before_after.png"
SECOND = FILES[EXPERTS[1]]
DECLARED = ("license", "license_name", "license_link")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass(frozen=True)
class Export:
    """Exported weights and the place from which users will load them."""

    weights: str
    updates: int
    where: str  # a hub id, or "." for the directory itself
    files: Sequence[str] = (FILE,)


def write_card(
    out: Path, directory: Path, config: RunConfig, export: Export, licence: str | None = None
) -> Path:
    """Write the card ``README.md`` to ``out`` and return its path.

    Also write ``before_after.png`` if two evaluations saved images. ``directory`` is that of the
    run. ``licence`` is the license that the user declares; None uses that of the base model's card.
    Raises OSError if a file cannot be written.
    """
    try:
        sheet = before_after(directory / "images")
    except FileNotFoundError:
        (out / IMAGE).unlink(missing_ok=True)
        drawn = False
    else:
        with atomic.replace_file(out / IMAGE) as beside:
            sheet.save(beside, "PNG", optimize=True)
        drawn = True
    declared = {"license": licence} if licence else licence_of(config.model)
    text = card(read_run(directory), config, export, declared, drawn)
    atomic.write_text(out / CARD, text)
    return out / CARD


def card(
    run: RunData, config: RunConfig, export: Export, licence: Mapping[str, str], drawn: bool
) -> str:
    """Return the text of the card, with the front matter that the hub reads."""
    base = hub_id(config.model)
    family = FAMILIES[config.model.family]
    task = "image-to-image" if family.edits else "text-to-image"
    task = "text-to-video" if family.video else task
    front: Row = {
        **({"base_model": base, "base_model_relation": "adapter"} if base else {}),
        **(licence or {"license": "unknown"}),
        "library_name": "diffusers",
        "pipeline_tag": task,
        "tags": ["lora", "diffusers", task, "reinforcement-learning", "sol-rl"],
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
    """Return the hub id of the base model, or None if it is a directory."""
    return None if is_local(model) or not HUB_ID.fullmatch(model.path) else model.path


def licence_of(model: Model) -> dict[str, str]:
    """Return the license fields of the base model's card.

    The card is read from the model's directory or from the local cache of the hub. The result
    is empty if there is no card or it declares no license.
    """
    from huggingface_hub import try_to_load_from_cache

    if model.path == "shapes":
        return {"license": "apache-2.0"}  # part of this program, under the same license
    base = hub_id(model)
    file = try_to_load_from_cache(base, CARD) if base else Path(model.path).expanduser() / CARD
    if not isinstance(file, str | Path) or not is_file(Path(file)):
        return {}
    front = FRONT.match(Path(file).read_text(encoding="utf-8", errors="replace"))
    lines = (front[1] if front else "").splitlines()
    pairs = [line.partition(":") for line in lines if not line.startswith((" ", "-", "#"))]
    fields = {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}
    return {key: fields[key] for key in DECLARED if fields.get(key)}


def _sentence(config: RunConfig, export: Export, base: str | None) -> str:
    name = f"[{base}](https://huggingface.co/{base})" if base else f"`{config.model.path}`"
    return (
        f"A LoRA of rank {config.lora.rank} for {name}, to be used at strength 1, trained with"
        f" reinforcement learning by Sol-RL: arm `{config.arm}`, objective"
        f" `{config.objective.name}`, {export.updates} updates; `{export.weights}` weights."
    )


def _licence(licence: Mapping[str, str]) -> str:
    if not licence:
        return "The license of the base model is not declared here: check its page before use."
    name = licence.get("license_name", licence["license"])
    link = licence.get("license_link")
    return f"License, as declared: {f'[{name}]({link})' if link else name}."


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
    note = (
        f"On {run.setting('evaluate.prompts')} prompts that were not trained on, "
        f"{run.setting('evaluate.noises')} fixed initial noises each, with the"
        f" `{after.get('weights')}` weights after {step_of(after)} updates; ± is one standard"
        " error of the mean, clustered by prompt, of a change that of the paired difference."
    )
    if (after.get("weights"), step_of(after)) != (export.weights, export.updates):
        note += (
            f" The weights in this directory are different: `{export.weights}` after"
            f" {export.updates} updates."
        )
    return "\n".join([*rows, "", note])


def _pm(value: Mean) -> str:
    """Format a mean, with its error if both are known."""
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
        lines.append(f"From the held-out prompts, `{config.prompts.test}`:\n\n{examples}")
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    """Return a prompt on one line, with the special characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _loading(config: RunConfig, export: Export, base: str | None) -> str:
    family, settings = FAMILIES[config.model.family], config.evaluate
    arguments = family.call_arguments(config.model, config.guidance)
    # path relative to the source tree of this program
    place = "shapes/model" if config.model.path == "shapes" else base or config.model.path
    call_arguments = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    weights = "\n".join(
        f"pipe.load_lora_weights({export.where!r}, weight_name={file!r}"
        + (", load_into_transformer_2=True)" if file == SECOND else ")")
        for file in export.files
    )
    extra_imports, result_name, result = "", "image", "images[0]"
    if family.video:
        fps = config.model.frames_per_second
        result_name, result = "clip", f'frames[0]\nexport_to_video(clip, "clip.mp4", fps={fps})'
        extra_imports = "\nfrom diffusers.utils import export_to_video"
    if family.edits:
        size = f"{config.model.width} x {config.model.height} pixels"
        extra_imports = "\nfrom diffusers.utils import load_image"
        call_arguments = (
            f'    image=load_image("source.png"),  # of {size}, as in training\n{call_arguments}'
        )
    return f"""With diffusers:

```python
import torch
from diffusers import {family.pipeline_class}{extra_imports}

pipe = {family.pipeline_class}.from_pretrained({place!r}, dtype=torch.bfloat16)
{weights}
{result_name} = pipe(
    prompt="...",
    num_inference_steps={settings.steps},
{call_arguments}).{result}
```

Evaluations used the solver `{settings.solver}`, the pipeline uses that of its scheduler.

{_in_comfyui(config.model, export)}"""


def _in_comfyui(model: Model, export: Export) -> str:
    if model.path == "shapes" or not FAMILIES[model.family].comfyui:
        return "Not for ComfyUI, which lacks this model."
    files = " and ".join(f"`{file}`" for file in export.files)
    experts = {
        FILE: f"`{FILE}` into the high-noise model",
        SECOND: f"`{SECOND}` into the low-noise model",
    }
    loaded = (
        " and ".join(experts[file] for file in export.files) if SECOND in export.files else "it"
    )
    return f"""In ComfyUI: put {files} into `models/loras`, and load {loaded} with the node
`LoraLoaderModelOnly` at strength 1."""


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
    settings = f"learning rate {config.optimizer.lr:g}; alpha {config.lora.alpha:g}"
    return f"{size}; {stages}; {settings}; seed {config.seed}." + (
        f"\n\nVersions: {versions}." if versions else ""
    )
