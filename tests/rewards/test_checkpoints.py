"""Checkpoints of learned scorers from a directory or the hub, and their own descriptions.

Files that are no weights are refused, and no code in them is run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerSetupError, build
from rewards.checkpoints import locate, read_state
from rewards.images import CLIP_MEAN
from rewards.openclip import ClipScore, HPSv2
from tests.rewards import parity
from tests.rewards.learned import IMAGES, PROMPTS, made


def test_a_directory_with_open_clips_description_needs_no_architecture(settings, tmp_path):
    from shutil import copy

    copy(settings["clipscore"]["checkpoint"], tmp_path / "open_clip_model.safetensors")
    mean = [0.5, 0.5, 0.5]
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": parity.TINY, "preprocess_cfg": {"mean": mean}})
    )
    scorer = build(
        ScorerConfig(name="clipscore", settings={"checkpoint": str(tmp_path)}), device="cpu"
    )
    recorded = made(settings, "clipscore")
    assert scorer.mean == mean
    assert (
        np.abs(scorer(IMAGES, PROMPTS, [{}] * 7) - recorded(IMAGES, PROMPTS, [{}] * 7)).max() > 1e-3
    )


@pytest.fixture
def hub(settings, tmp_path, monkeypatch):
    """Fake a hub whose repositories have the tiny CLIP's weights, and the files of the test's
    directory.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    def download(repo, name):
        if repo == "someone/offline" and name.endswith(".json"):
            raise OSError("no network\nand more")
        if name == "open_clip_model.safetensors":
            return settings["clipscore"]["checkpoint"]
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError(f"404: {name}")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return tmp_path / "open_clip_config.json"


def clip(name="clipscore", checkpoint="laion/plain", **more):
    return build(ScorerConfig(name=name, settings={"checkpoint": checkpoint, **more}), device="cpu")


def test_a_hub_id_uses_its_own_description(hub, settings):
    """Activation, mean and deviation come from the repository, not from the scorer's default."""
    half = [0.5, 0.5, 0.5]
    hub.write_text(
        json.dumps(
            {
                "model_cfg": parity.TINY,
                "preprocess_cfg": {"mean": half, "std": half, "resize_mode": "shortest"},
            }
        )
    )
    plain = clip()
    assert (plain.mean, plain.std) == (half, half)
    hub.write_text(
        json.dumps(
            {
                "model_cfg": {**parity.TINY, "quick_gelu": True},
                "preprocess_cfg": {"mean": half, "std": half},
            }
        )
    )
    quick = clip(checkpoint="laion/plain:open_clip_model.safetensors")
    assert np.abs(plain(IMAGES, PROMPTS, [{}] * 7) - quick(IMAGES, PROMPTS, [{}] * 7)).max() > 1e-4
    # a given architecture takes precedence; mean and deviation stay those of the repository
    recorded = clip(architecture=parity.TINY)
    assert recorded.mean == half
    assert np.array_equal(recorded(IMAGES, PROMPTS, [{}] * 7), plain(IMAGES, PROMPTS, [{}] * 7))


@pytest.mark.parametrize("name", ["clipscore", "hpsv2"])
def test_a_hub_id_without_a_description_is_refused(hub, name):
    with pytest.raises(
        ScorerSetupError,
        match="'laion/plain' has no open_clip_config.json .*: set architecture, or use ",
    ) as caught:
        clip(name)
    assert "\n" not in str(caught.value)
    assert clip(name, architecture=parity.TINY).mean == CLIP_MEAN
    # whether mean and deviation are CLIP's must not depend on the network
    for more in ({}, {"architecture": parity.TINY}):
        with pytest.raises(
            ScorerSetupError,
            match=r"'someone/offline' .* could not be searched .* \(OSError: no network\): down",
        ):
            clip(name, "someone/offline", **more)


def test_the_published_repositories_need_no_description(hub, monkeypatch):
    """The scorers were written for them, so no description is requested from the hub.

    It makes no difference whether the hub can be reached.
    """
    hub.write_text("not to be read")
    for name, kind in (("clipscore", ClipScore), ("hpsv2", HPSv2)):
        monkeypatch.setattr(kind, "default", parity.TINY)
        assert clip(name, kind.published).mean == CLIP_MEAN
        (setting,) = load_layer(name)
        assert setting.partition(":")[0] == kind.published


def load_layer(name):
    """Return the checkpoint of the layer ``rewards/<name>``."""
    tree = tomllib.loads(
        (Path(__file__).parents[2] / f"configs/layers/rewards/{name}.toml").read_text()
    )
    return [scorer["settings"]["checkpoint"] for scorer in tree["rewards"]["scorers"]]


def test_unsupported_preprocessing_is_refused(hub):
    hub.write_text(
        json.dumps({"model_cfg": parity.TINY, "preprocess_cfg": {"resize_mode": "squash"}})
    )
    with pytest.raises(
        ScorerSetupError,
        match="resize_mode = 'squash'; this scorer makes images with 'shortest' only",
    ):
        clip()


class Planted:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint was run')",))


def test_code_in_a_checkpoint_is_never_executed(settings, tmp_path):
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "note": Planted()}, tmp_path / "bad.pt")
    with pytest.raises(ScorerSetupError, match=r"bad.pt: not readable as weights .* only tensors"):
        read_state(tmp_path / "bad.pt")


def test_state_dicts_are_unwrapped(tmp_path):
    torch.save(
        {"state_dict": {"module.a": torch.ones(2), "module.b": torch.zeros(1)}, "epoch": 3},
        tmp_path / "x.pt",
    )
    assert sorted(read_state(tmp_path / "x.pt")) == ["a", "b"]
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ScorerSetupError, match="give a state dict"):
        read_state(tmp_path / "empty.pt")


def test_weights_of_another_model_are_refused(settings):
    other = settings["pickscore"]["checkpoint"]
    with pytest.raises(
        ScorerSetupError,
        match=r"not the weights of .*names are missing, .* are unknown, such as missing",
    ):
        made(settings, "clipscore", checkpoint=other)
    with pytest.raises(ScorerSetupError, match="no name in it starts with 'blip.visual_encoder.'"):
        made(settings, "imagereward", checkpoint=other)


def test_only_the_vocabulary_of_bert_is_accepted(settings, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(ScorerSetupError, match="5 words, but bert-base-uncased has 30522"):
        made(settings, "imagereward", vocabulary=str(tmp_path))


def test_hub_ids_name_a_file_of_a_repository(monkeypatch, tmp_path):
    import huggingface_hub

    requested = []

    def download(repo, name):
        requested.append((repo, name))
        if name != "b.pt":
            raise OSError("offline\nand more")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert locate("someone/model", ("a.pt", "b.pt")) == tmp_path / "b.pt"
    assert locate("someone/model:b.pt", ("a.pt",)) == tmp_path / "b.pt"
    assert requested == [
        ("someone/model", "a.pt"),
        ("someone/model", "b.pt"),
        ("someone/model", "b.pt"),
    ]
    with pytest.raises(
        ScorerSetupError,
        match=r"'someone/model' is not a file .* \(OSError: offline\): download it",
    ) as caught:
        locate("someone/model", ("c.pt",))
    assert "\n" not in str(caught.value)
    with pytest.raises(ScorerSetupError, match="contains none of a.pt"):
        locate(str(tmp_path), ("a.pt",))
