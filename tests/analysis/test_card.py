"""The model card of an export, and its upload to a fake hub."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.card import Export, card, hub_id, licence_of, write_card
from analysis.hub import check_hub, push
from analysis.report.data import read_run
from cli.main import main
from configs.load import ConfigError, load
from configs.schema import RunConfig
from configs.sections import Model
from configs.training import Lora
from policy.families import family_for
from policy.families.files import SHAPES_DIRECTORY
from policy.lora import adapted_modules, adapter_state, add_adapters
from policy.lora_files import save_diffusers_lora
from records.errors import RunFailed
from tests.analysis.synthetic import PROMPTS, write_run
from tests.tiny_families import EDITING, NAMES, PIPELINES, SETTINGS, VIDEO
from tests.tiny_wan import make_tiny_wan

EXPORT = Export("ema", 20, "somebody/something")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def text_of(run: Path, config: RunConfig, **licence: str) -> str:
    return card(read_run(run), config, EXPORT, licence, True)


def front(text: str) -> dict[str, Any]:
    """Return the front matter; its values are JSON, which is valid YAML."""
    found = re.match(r"---\n(.*?)\n---\n\n", text, re.DOTALL)
    assert found is not None
    pairs = (line.partition(": ") for line in found[1].splitlines())
    return {key: json.loads(value) for key, _, value in pairs}


def test_the_card_of_a_run(run, tmp_path):
    config = load("quickstart", ["iterations=20"])
    file = write_card(tmp_path, run, config, EXPORT)
    text = file.read_text()
    assert (tmp_path / "before_after.png").read_bytes()[:4] == b"\x89PNG"
    assert "](before_after.png)" in text
    assert "| reward | 0.667 ± 0.0203 | 0.785 ± 0.0182 | 0.118 ± 0.0211 |" in text
    assert "20 updates" in text and "weights here are others" not in text
    assert r"two \<b\>purple\</b\> & orange circles" in text and PROMPTS[0] in text
    found = front(text)
    assert found["license"] == "apache-2.0" and "base_model" not in found
    assert found["library_name"] == "diffusers" and "lora" in found["tags"]


def test_the_card_names_weights_other_than_the_evaluated_ones(run):
    config = load("quickstart")
    text = card(read_run(run), config, Export("current", 10, "."), {}, False)
    assert "not declared here" in text and front(text)["license"] == "unknown"
    assert "The weights in this directory are different: `current` after 10 updates." in text
    assert "before_after.png" not in text


def test_a_run_without_two_evaluations(tmp_path):
    run = write_run(tmp_path / "run", ending=None)
    (tmp_path / "before_after.png").write_bytes(b"of another run")
    text = write_card(tmp_path, run, load("quickstart"), EXPORT, "apache-2.0").read_text()
    assert "has not been evaluated before and after" in text
    assert not (tmp_path / "before_after.png").exists()
    assert front(text)["license"] == "apache-2.0" and "as declared: apache-2.0." in text


def test_the_license_is_that_of_the_base_models_card(run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: 'their-own'\nlicense_link: LICENSE.md\n"
        "tags:\n- x\n---\n"
        "# Model\nlicense: none of this\n"
    )
    model = Model(path=str(tmp_path))
    found = licence_of(model)
    assert found == {"license": "other", "license_name": "their-own", "license_link": "LICENSE.md"}
    text = text_of(run, load("quickstart"), **found)
    assert "as declared: [their-own](LICENSE.md)." in text
    assert front(text)["license_name"] == "their-own"
    assert licence_of(Model(path="nobody/nothing")) == {} and hub_id(model) is None
    config = load("flux1-sol_rl-hpsv2")
    assert front(text_of(run, config))["base_model"] == "black-forest-labs/FLUX.1-dev"


@pytest.mark.parametrize("name", ["shapes", *(name for name in NAMES if name not in EDITING)])
def test_the_snippet_generates_with_the_export(run, name, request, tmp_path, monkeypatch):
    """The snippet runs unchanged. Pipelines that edit would enlarge the source to a million pixels,
    which takes hours here.
    """
    path = "shapes" if name == "shapes" else str(request.getfixturevalue(f"tiny_{name}_dir"))
    config = load("quickstart").model_dump()
    if name != "shapes":
        config["model"] = {"family": name, "path": path, **SETTINGS[name]}
    _, frames = drawn_by_the_snippet(run, RunConfig.model_validate(config), tmp_path, monkeypatch)
    assert len(frames) == (SETTINGS.get(name, {}).get("frames") or 1)


def drawn_by_the_snippet(
    run: Any, config: RunConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[Any]]:
    """Run the snippet with an export of a new LoRA; return its pipeline and its frames."""
    family, lora = family_for(config.model), Lora(rank=2, alpha=4)
    transformer = family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, lora, family, names=("ema",))
    state = adapter_state(transformer, "ema")
    files = save_diffusers_lora(root / "lora", state, lora, family.rename_lora)
    export = Export("ema", 20, str(root / "lora"), files)
    text = card(read_run(run), config, export, {}, False)
    assert all(file in text for file in files)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(root)
    monkeypatch.setattr("diffusers.utils.export_to_video", lambda *_, **__: None)
    made: dict[str, Any] = {}
    exec(code.replace("'shapes/model'", repr(str(SHAPES_DIRECTORY))), made)
    frames = made["clip"] if family.video else [made["image"]]
    assert np.asarray(frames[0]).shape == (config.model.height, config.model.width, 3)
    return made["pipe"], frames


def test_the_snippet_loads_a_file_for_each_of_two_transformers(run, tmp_path, monkeypatch):
    path = str(make_tiny_wan(tmp_path / "model", experts=True))
    config = load("quickstart").model_dump()
    config["model"] = {"family": "wan", "path": path, **SETTINGS["wan"]}
    config = RunConfig.model_validate(config)
    pipe, frames = drawn_by_the_snippet(run, config, tmp_path, monkeypatch)
    assert len(frames) == 5
    files = [f"pytorch_lora_weights{number}.safetensors" for number in ("", "_2")]
    text = card(read_run(run), config, Export("ema", 20, ".", files), {}, False)
    assert (
        "load `pytorch_lora_weights.safetensors` into the high-noise model and"
        " `pytorch_lora_weights_2.safetensors` into the low-noise model with"
    ) in text
    wrapped = [len(adapted_modules(part)) for part in (pipe.transformer, pipe.transformer_2)]
    assert wrapped == [2 * 8, 2 * 8]


COMFYUI = ["sd3", "flux", "flux_kontext", "flux2", "flux2_klein", "z_image", "qwen_image"]


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_whether_comfyui_can_load_the_file(run, name):
    config = load("quickstart").model_dump()
    assert "Not for ComfyUI" in text_of(run, RunConfig.model_validate(config))
    config["model"] = {"family": name, "path": "owner/model", **SETTINGS[name]}
    text = text_of(run, RunConfig.model_validate(config))
    assert ("at strength 1." in text) == (name in (*COMFYUI, "qwen_image_edit", "wan"))
    assert ("Not for ComfyUI" in text) == (name in ("sana", "sana_video"))


@pytest.mark.parametrize("name", NAMES)
def test_the_snippet_calls_the_pipeline_of_the_family(run, name):
    """It parses, and calls the pipeline as the parity tests call the stock pipeline."""
    config = load("quickstart").model_dump()
    config["model"] = {"family": name, "path": "owner/model", **SETTINGS[name]}
    config["guidance"] = {"evaluate": 3.0, "negative_prompt": "blurred"}
    text = text_of(run, RunConfig.model_validate(config))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (drawn,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "pipe"]
    edits = name in EDITING
    assert ('image=load_image("source.png"),  # of' in code) == edits
    given = {k.arg: ast.literal_eval(k.value) for k in drawn.keywords if k.arg != "image"}
    assert f"{PIPELINES[name]}.from_pretrained('owner/model'" in code
    assert (given["height"], given["width"]) == (SETTINGS[name]["height"], SETTINGS[name]["width"])
    strength, negative = {
        "flux": (3.5, None),
        "flux_kontext": (2.5, None),
        "flux2": (4.0, None),
        "flux2_klein": (3.0, None),
        "z_image": (2.0, "blurred"),
    }.get(name, (3.0, "blurred"))
    key = "true_cfg_scale" if name.startswith("qwen_image") else "guidance_scale"
    assert given[key] == strength and given.get("negative_prompt") == negative
    clip = name in VIDEO
    assert ('export_to_video(clip, "clip.mp4", fps=16)' in code) == clip
    assert [value for what, value in given.items() if "frames" in what] == [5] * clip
    assert front(text)["pipeline_tag"] == (
        "image-to-image" if edits else "text-to-video" if clip else "text-to-image"
    )


class FakeHub:
    """Fake of the hub's client that records its calls; ``fails`` names the call that raises."""

    calls: list[tuple[str, dict[str, Any]]] = []
    fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> dict[str, str]:
            if name == self.fails:
                raise RuntimeError("401 Unauthorized\nsecond line")
            self.calls.append((name, {**dict(enumerate(given)), **named}))
            return {"name": "somebody"}

        return call


@pytest.fixture
def fake(monkeypatch) -> type[FakeHub]:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(FakeHub, "fails", "")
    return FakeHub


def test_the_hub_receives_the_files(fake, tmp_path):
    check_hub("somebody/something")
    assert push(tmp_path, "somebody/something", True) == (
        "https://huggingface.co/somebody/something"
    )
    (who, _), (create, made), (upload, files) = fake.calls
    assert (who, create, upload) == ("whoami", "create_repo", "upload_folder")
    assert made[0] == files["repo_id"] == "somebody/something"
    assert made["private"] is True and made["exist_ok"] is True
    assert files["folder_path"] == tmp_path


def test_a_refused_upload_is_one_line(fake, tmp_path):
    with pytest.raises(ConfigError, match="--push nobody: expected OWNER/NAME"):
        check_hub("nobody")
    fake.fails = "whoami"
    with pytest.raises(ConfigError, match=r"\(401 Unauthorized\): run `hf auth login`") as caught:
        check_hub("a/b")
    assert "\n" not in str(caught.value)
    fake.fails = "upload_folder"
    with pytest.raises(RunFailed, match=r"the upload to the hub failed \(401 Unauthorized\)"):
        push(tmp_path, "a/b", False)


def test_a_missing_hub_login_is_reported_before_writing(fake, run, tmp_path, capsys):
    fake.fails = "whoami"
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--push", "a/b"]) == 2
    assert not out.exists() and "hf auth login" in capsys.readouterr().err
    assert main(["export", str(run), str(out), "--private"]) == 2
    assert "--private needs --push" in capsys.readouterr().err
