"""What every learned scorer does, on tiny random models: pairing, batches, checkpoints, precision,
and what is said when it cannot run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.rewards import some_vocabulary
from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerSetupError, build
from rewards.checkpoints import locate, read_state
from rewards.imagereward import MEAN, STD, BlipReward
from rewards.images import CLIP_MEAN
from rewards.openclip import ClipScore, HPSv2
from tests.rewards import parity, peers

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 3, 40, 56), dtype=np.uint8)
NAMES = ("clipscore", "hpsv2", "pickscore", "imagereward")
BLIP = parity.blip_architecture(parity.TINY_BLIP)
PROMPTS = ["word40 word7", "word1", "word40 word7", "", "word9 " * 60, "word2 word3", "word1"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of every scorer, each with a random checkpoint."""
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("checkpoints")
    tables = peers.transformers_config(parity.TINY)
    clip, pick, reward = (
        open_clip.CLIP(**parity.TINY),
        CLIPModel(CLIPConfig(**tables)),
        BlipReward(BLIP["vision"], BLIP["text"]),
    )
    for seed, model in enumerate((clip, pick, reward)):
        peers.randomise(model, seed)
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    save_file(pick.state_dict(), folder / "model.safetensors")
    torch.save(released_names(reward.state_dict()), folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text(some_vocabulary())
    return {
        "clipscore": {
            "checkpoint": str(folder / "open_clip_model.safetensors"),
            "architecture": parity.TINY,
        },
        "hpsv2": {
            "checkpoint": str(folder / "open_clip_model.safetensors"),
            "architecture": parity.TINY,
        },
        "pickscore": {"checkpoint": str(folder / "model.safetensors"), "architecture": tables},
        "imagereward": {"checkpoint": str(folder), "vocabulary": str(folder), "architecture": BLIP},
    }


def released_names(state):
    """Our names as the released checkpoint has them: written out here, not derived from the
    scorer's own rules.
    """
    rules = (
        ("visual_encoder.embeddings.patch_embedding", "blip.visual_encoder.patch_embed.proj"),
        ("visual_encoder.embeddings.class_embedding", "blip.visual_encoder.cls_token"),
        ("visual_encoder.embeddings.position_embedding", "blip.visual_encoder.pos_embed"),
        ("visual_encoder.encoder.layers.", "blip.visual_encoder.blocks."),
        ("visual_encoder.post_layernorm", "blip.visual_encoder.norm"),
        ("text_encoder.", "blip.text_encoder."),
        ("mlp.", "mlp.layers."),
    )
    made = {
        "blip.vision_proj.weight": torch.zeros(2, 2),
        "blip.text_encoder.embeddings.position_ids": torch.arange(4)[None],
    }
    for name, value in state.items():
        ours, theirs = next((a, b) for a, b in rules if name.startswith(a))
        name = theirs + name.removeprefix(ours)
        for a, b in (
            (".layer_norm", ".norm"),
            ("self_attn.projection", "attn.proj"),
            ("self_attn.qkv", "attn.qkv"),
        ):
            name = name.replace(a, b) if "visual" in name else name
        made[name] = value
    return made


def made(settings, name, **more):
    return build(ScorerConfig(name=name, settings=settings[name] | more), device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_image_is_scored_with_its_own_prompt_whatever_the_batch(settings, name):
    """Batches of 3 and 7 and single images sum in another order: FP32 rounding, of scores of
    order one and PickScore's 100 / 26.
    """
    together = made(settings, name)(IMAGES, PROMPTS, [{}] * 7)
    assert together.dtype == np.float32 and together.shape == (7,) and together.std() > 0.01
    for size in (1, 3):
        assert np.allclose(
            made(settings, name, batch_size=size)(IMAGES, PROMPTS, [{}] * 7),
            together,
            atol=1e-5,
            rtol=0,
        )
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    turned = made(settings, name)(IMAGES[order], [PROMPTS[i] for i in order], [{}] * 7)
    assert np.allclose(turned, together[order], atol=1e-5, rtol=0)
    shifted = made(settings, name)(IMAGES, PROMPTS[1:] + PROMPTS[:1], [{}] * 7)
    assert np.abs(shifted - together).max() > 0.01  # the words matter
    assert made(settings, name)(IMAGES[:0], [], []).shape == (0,)


@pytest.mark.parametrize(
    ("name", "image", "text", "rows"),
    [
        ("clipscore", "encode_image", "encode_text", ([4, 3], [3, 3])),
        ("hpsv2", "encode_image", "encode_text", ([4, 3], [3, 3])),
        ("pickscore", "get_image_features", "get_text_features", ([4, 3], [3, 3])),
        (
            "imagereward",
            "visual_encoder",
            "text_encoder",
            ([4, 3], [4, 3]),
        ),  # its words look at the image: one row per pair
    ],
)
def test_only_pairs_are_computed(settings, name, image, text, rows, monkeypatch):
    """Rows that go through each tower: the images, and each batch's distinct prompts; never every
    image with every prompt.
    """
    scorer = made(settings, name, batch_size=4)
    seen: dict[str, list[int]] = {image: [], text: []}
    for tower in (image, text):
        module, forward = getattr(scorer.model, tower), None
        owner = module if isinstance(module, torch.nn.Module) else scorer.model
        attribute = "forward" if owner is module else tower
        forward = getattr(owner, attribute)

        def counted(*args, forward=forward, tower=tower, **kwargs):
            first = next(
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            )
            seen[tower].append(len(first))
            return forward(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)
    scorer(IMAGES, PROMPTS, [{}] * 7)
    assert (seen[image], seen[text]) == rows


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_is_near_and_not_the_same(settings, name):
    """BF16 keeps 8 bits and FP16 11: relative 4e-3 and 5e-4 per operation; a few per cent and
    permille of the scores' range after two layers.
    """
    wide, bf16, fp16 = (
        made(settings, name, dtype=dtype)(IMAGES, PROMPTS, [{}] * 7)
        for dtype in ("fp32", "bf16", "fp16")
    )
    scale = np.abs(wide).max()
    assert (
        0 < np.abs(wide - bf16).max() < 0.2 * scale and 0 < np.abs(wide - fp16).max() < 0.02 * scale
    )


def test_imagereward_is_normalised_by_the_authors_mean_and_deviation(settings):
    scorer = made(settings, "imagereward")
    with torch.inference_mode():
        words = scorer.tokenise(
            PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
        )
        raw = scorer.model(scorer.pixels(IMAGES), words.input_ids, words.attention_mask)
    assert words.input_ids[0, 0] == 101 and words.input_ids.shape == (7, 35)
    assert np.allclose(scorer(IMAGES, PROMPTS, [{}] * 7), (raw.numpy() - MEAN) / STD, atol=1e-6)


def test_words_beyond_the_context_are_cut(settings):
    for name, limit in (("clipscore", 75), ("pickscore", 75), ("imagereward", 33)):
        scorer = made(settings, name)
        word = "word9" if name == "imagereward" else "house"  # one token each
        texts = [" ".join([word] * count) for count in (limit - 1, limit, limit + 40)]
        short, full, over = scorer(np.repeat(IMAGES[:1], 3, 0), texts, [{}] * 3)
        assert full == pytest.approx(over, abs=1e-6) and abs(short - full) > 1e-4, name


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
    told = made(settings, "clipscore")
    assert (
        scorer.mean == mean
        and np.abs(scorer(IMAGES, PROMPTS, [{}] * 7) - told(IMAGES, PROMPTS, [{}] * 7)).max() > 1e-3
    )


@pytest.fixture
def hub(settings, tmp_path, monkeypatch):
    """A hub whose repositories all have the tiny CLIP's weights, and the files that a test puts
    into the directory.
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


def test_a_hub_id_is_what_its_own_description_says(hub, settings):
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
    told = clip(
        architecture=parity.TINY
    )  # an architecture that is given wins; mean and deviation stay the repository's
    assert told.mean == half and np.array_equal(
        told(IMAGES, PROMPTS, [{}] * 7), plain(IMAGES, PROMPTS, [{}] * 7)
    )


@pytest.mark.parametrize("name", ["clipscore", "hpsv2"])
def test_a_hub_id_that_does_not_say_what_it_is_is_refused(hub, name):
    with pytest.raises(
        ScorerSetupError,
        match="'laion/plain' has no open_clip_config.json .*: set architecture, or use ",
    ) as caught:
        clip(name)
    assert "\n" not in str(caught.value)
    assert clip(name, architecture=parity.TINY).mean == CLIP_MEAN
    for more in (
        {},
        {"architecture": parity.TINY},
    ):  # whether mean and deviation are CLIP's must not depend on the network
        with pytest.raises(
            ScorerSetupError,
            match=r"'someone/offline' .* does not say whether .* \(OSError: no network\): fetch it",
        ):
            clip(name, "someone/offline", **more)


def test_the_published_repositories_need_no_description(hub, monkeypatch):
    """They are what the scorers are made for: one on the hub is not asked for, so that it makes no
    difference whether it can be.
    """
    hub.write_text("not to be read")
    for name, kind in (("clipscore", ClipScore), ("hpsv2", HPSv2)):
        monkeypatch.setattr(kind, "default", parity.TINY)
        assert clip(name, kind.published).mean == CLIP_MEAN
        (setting,) = load_layer(name)
        assert setting.partition(":")[0] == kind.published


def load_layer(name):
    """The checkpoint that the layer ``rewards/<name>`` names."""
    tree = tomllib.loads(
        (Path(__file__).parents[2] / f"configs/layers/rewards/{name}.toml").read_text()
    )
    return [scorer["settings"]["checkpoint"] for scorer in tree["rewards"]["scorers"]]


def test_images_that_a_description_wants_otherwise_are_refused(hub):
    hub.write_text(
        json.dumps({"model_cfg": parity.TINY, "preprocess_cfg": {"resize_mode": "squash"}})
    )
    with pytest.raises(
        ScorerSetupError,
        match="resize_mode = 'squash'; this scorer makes images with 'shortest' only",
    ):
        clip()


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint was run')",))


def test_nothing_in_a_checkpoint_is_run(settings, tmp_path):
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "note": Planted()}, tmp_path / "bad.pt")
    with pytest.raises(
        ScorerSetupError, match=r"bad.pt: not readable as weights .* nothing but tensors"
    ):
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


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "clipscore",
            {"checkpoint": "no/such/file.pt"},
            "there is no checkpoint 'no/such/file.pt'.*docs/rewards.md",
        ),
        ("clipscore", {"architecture": "ViT-Q-99"}, "open_clip has no such model"),
        (
            "clipscore",
            {"architecture": {"embed_dim": 3}},
            "architecture lacks vision_cfg, text_cfg",
        ),
        (
            "hpsv2",
            {"architecture": {**parity.TINY, "embed_dim": 25}},
            r"is \[\d+, 24\], not \[\d+, 25\]; set architecture",
        ),
        ("hpsv2", {"dtype": "int4"}, "dtype is 'int4': use one of fp32, bf16, fp16"),
        ("pickscore", {"batch_size": 0}, "batch_size is 0: use a whole number, 1 or more"),
        (
            "imagereward",
            {"architecture": {"audio": {}}},
            "architecture has audio: it takes the tables vision and text",
        ),
    ],
)
def test_what_is_wrong_with_settings_is_one_line(settings, name, change, said):
    with pytest.raises(ScorerSetupError, match=said) as caught:
        made(settings, name, **change)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"scorer {name!r}: ")


def test_weights_of_another_model_are_refused(settings):
    other = settings["pickscore"]["checkpoint"]
    with pytest.raises(
        ScorerSetupError, match=r"no weights of .*names missing, .* unknown, the first: missing"
    ):
        made(settings, "clipscore", checkpoint=other)
    with pytest.raises(ScorerSetupError, match="no name in it starts with 'blip.visual_encoder.'"):
        made(settings, "imagereward", checkpoint=other)


def test_the_vocabulary_is_berts_or_none(settings, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(ScorerSetupError, match="5 words: bert-base-uncased has 30522"):
        made(settings, "imagereward", vocabulary=str(tmp_path))


def test_hub_ids_name_a_file_of_a_repository(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo, name):
        asked.append((repo, name))
        if name != "b.pt":
            raise OSError("offline\nand more")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert locate("someone/model", ("a.pt", "b.pt")) == tmp_path / "b.pt"
    assert locate("someone/model:b.pt", ("a.pt",)) == tmp_path / "b.pt"
    assert asked == [
        ("someone/model", "a.pt"),
        ("someone/model", "b.pt"),
        ("someone/model", "b.pt"),
    ]
    with pytest.raises(
        ScorerSetupError, match=r"'someone/model' is no file .* \(OSError: offline\): fetch it"
    ) as caught:
        locate("someone/model", ("c.pt",))
    assert "\n" not in str(caught.value)
    with pytest.raises(ScorerSetupError, match="holds none of a.pt"):
        locate(str(tmp_path), ("a.pt",))
