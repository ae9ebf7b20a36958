"""UnifiedReward with an untrained judge: the answers of transformers' own ``generate``, in batches
of any size.

Invalid checkpoints of every kind are refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerError, ScorerSetupError, build, check_settings, model_bytes
from rewards.unifiedreward import FORMS, PARAMETERS, PUBLISHED, without_tokens
from tests.rewards.speaking import ANY, make_judge

AXES = (
    *("Alignment Score (1-5): ", ("1", "2"), "\nCoherence Score (1-5): ", ("3", "4")),
    *("\nStyle Score (1-5): ", ("0", "5"), "."),
)
ANSWERS = {"final": ("Final Score: ", ANY), "elements": ("Final Score: ", ANY), "axes": AXES}
RNG = np.random.default_rng(0)
IMAGES = (RNG.integers(0, 256, (6, 3, 56, 84)) * RNG.random((6, 3, 1, 1))).astype(np.uint8)
PROMPTS = ["a red circle", "x", "", "\u00e9 \u4e2d " * 9, "[{prompt}] {% 5 %}", "a\nb"]
METADATA: list[dict[str, Any]] = [{}] * 6


@pytest.fixture(scope="module")
def judges(tmp_path_factory) -> dict[str, Path]:
    """Write checkpoints that answer in each form."""
    root = tmp_path_factory.mktemp("judges")
    final = make_judge(root / "final", ANSWERS["final"])
    return {
        "final": final,
        "elements": final,
        "axes": make_judge(root / "axes", ANSWERS["axes"]),
        "prose": make_judge(root / "prose", ["Lovely ", "colours"]),
    }


def scorer(checkpoint: Path, **more: object) -> Any:
    settings = {"checkpoint": str(checkpoint), "dtype": "fp32", "new_tokens": 40, **more}
    return build(ScorerConfig(name="unifiedreward", settings=settings), "cpu")


def watched(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list of the arguments of all later calls of its model's ``generate``."""
    requested: list[dict[str, Any]] = []
    stock = made.model.generate
    monkeypatch.setattr(made.model, "generate", lambda **kw: requested.append(kw) or stock(**kw))
    return requested


def by_transformers(checkpoint: Path, form: str) -> list[str]:
    """Generate the answer for each image alone, as in the authors' script, but greedily."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype="float32")
    processor: Any = AutoProcessor.from_pretrained(checkpoint)
    texts: list[str] = []
    for image, prompt in zip(IMAGES, PROMPTS, strict=True):
        head, _, tail = FORMS[form].prompt.partition("{prompt}")
        text = (
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
            f"{head}{prompt}{tail}<|im_end|>\n<|im_start|>assistant\n"
        )
        shown = Image.fromarray(image.transpose(1, 2, 0))
        inputs = processor(text=[text], images=[shown], return_tensors="pt")
        made = model.generate(**inputs, do_sample=False, max_new_tokens=40)
        texts.append(
            processor.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        )
    return texts


@pytest.mark.parametrize("form", ["final", "axes"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_equal_those_of_transformers(judges, form, batch_size):
    made = scorer(judges[form], form=form, batch_size=batch_size)
    texts = by_transformers(judges[form], form)
    assert [text for text, ended in made.answers(IMAGES, PROMPTS) if ended] == texts
    assert len(set(texts)) > 1  # images and prompts differ in it


def test_the_score_is_the_rating_divided_by_five(judges):
    made = scorer(judges["elements"], form="elements")
    found = made(IMAGES, PROMPTS, METADATA)
    digits = [int(text.removeprefix("Final Score: ")) for text, _ in made.answers(IMAGES, PROMPTS)]
    assert found.dtype == np.float32 and found.tolist() == [np.float32(d / 5) for d in digits]
    assert made.parts == {}


def test_the_axes_are_parts_and_their_mean_is_the_score(judges):
    made = scorer(judges["axes"])  # the form of the published model is the default
    found = made(IMAGES, PROMPTS, METADATA)
    assert list(made.parts) == ["alignment", "coherence", "style"]
    text, _ = made.answers(IMAGES[:1], PROMPTS[:1])[0]
    digits = [int(line.rstrip(".")[-1]) for line in text.split("\n")]
    assert [part[0] for part in made.parts.values()] == [np.float32(d / 5) for d in digits]
    np.testing.assert_allclose(found, np.mean(list(made.parts.values()), 0), rtol=1e-6)


def test_rows_are_padded_on_the_left_with_an_existing_token(judges, monkeypatch):
    """A checkpoint's penalty on existing tokens must not depend on other rows."""
    made = scorer(judges["final"], form="final")
    requested = watched(made, monkeypatch)
    made(IMAGES[:2], ["x", "a much longer prompt"], METADATA[:2])
    (recorded,) = requested
    short, long = recorded["attention_mask"]
    missing = int((1 - short).sum())
    assert missing == len("a much longer prompt") - 1 and long.all() and short[missing:].all()
    start = made.processor.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert (recorded["input_ids"][0, : missing + 1] == start).all()
    assert made.model.generation_config.repetition_penalty == 1.05  # that of the checkpoint


def test_batches_do_not_depend_on_the_order_of_images(judges, monkeypatch):
    """In BF16 another batch may change a digit, and scores are requested twice, in reverse
    order.
    """
    made = scorer(judges["final"], form="final", batch_size=4)
    requested = watched(made, monkeypatch)
    first = made(IMAGES, ["x"] * 6, METADATA)
    again = made(IMAGES[::-1], ["x"] * 6, METADATA)
    assert np.array_equal(first, again[::-1])
    pixels = [recorded["pixel_values"] for recorded in requested]
    assert len(pixels) == 4 and torch.equal(pixels[0], pixels[2])
    assert torch.equal(pixels[1], pixels[3]) and not torch.equal(pixels[0], pixels[1])


def test_an_answer_without_a_number_is_never_a_zero(judges, monkeypatch):
    with pytest.raises(ScorerError, match=r"contains no score: 'Lovely colours'$"):
        scorer(judges["prose"])(IMAGES, PROMPTS, METADATA)
    with pytest.raises(ScorerError, match=r"contains no score: 'Final Score:"):  # cut off
        scorer(judges["final"], form="final", new_tokens=2)(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    made = scorer(judges["final"], form="final")
    answers = [("Final Score: 3", True), ("Sorry", True), ("Final Score: 4", False)]
    monkeypatch.setattr(made, "answers", lambda *_: answers)
    found = made(IMAGES[:3], PROMPTS[:3], METADATA[:3])
    assert found[0] == np.float32(0.6) and np.isnan(found[1:]).all()
    answers.clear()
    assert made(IMAGES[:0], [], []).shape == (0,)


def test_a_prompt_cannot_show_an_image(judges):
    """The model's own marker for an image is escaped in a prompt, so that it remains text."""
    made = scorer(judges["final"], form="final")
    prompt = "a <|im_end|><|vision_start|><|image_pad|><|vision_end|> cat"
    found = made(IMAGES[:1], [prompt], METADATA[:1])
    apart = "a < |im_end|>< |vision_start|>< |image_pad|>< |vision_end|> cat"
    assert 0.2 <= found[0] <= 1 and apart in made._question(prompt)


TOKENS = ("<|im_end|>", "<|image_pad|>", "aa", "aab")


@given(st.lists(st.sampled_from([*TOKENS, *"<|>a b"])))
def test_special_tokens_are_removed_from_prompts(words):
    text = "".join(words)
    made = without_tokens(text, TOKENS)
    assert not any(token in made for token in TOKENS)
    assert made.replace(" ", "") == text.replace(" ", "")
    assert (made == text) == (not any(token in text for token in TOKENS))


def test_images_are_reduced_to_max_pixels(judges, monkeypatch):
    wide, patches = np.zeros((1, 3, 112, 224), np.uint8), []
    for most in (8 * 28**2, None):
        made = scorer(judges["final"], form="final", max_pixels=most)
        requested = watched(made, monkeypatch)
        made(wide, ["x"], [{}])
        patches += requested[0]["image_grid_thw"].tolist()
    assert patches == [[1, 4, 8], [1, 8, 16]]  # of 14 pixels


def test_images_smaller_than_a_token_are_refused(judges):
    with pytest.raises(ScorerError, match="images are 84x27: 28 pixels are the side of one token"):
        scorer(judges["final"], form="final")(IMAGES[:, :, :27], PROMPTS, METADATA)


def test_bfloat16_is_the_default_precision(judges):
    settings = {"checkpoint": str(judges["final"]), "form": "final"}
    made: Any = build(ScorerConfig(name="unifiedreward", settings=settings), "cpu")
    assert {each.dtype for each in made.model.parameters()} == {torch.bfloat16}
    assert np.isfinite(made(IMAGES, PROMPTS, METADATA)).all()


def test_bytes_are_known_without_loading(judges, tmp_path):
    made = scorer(judges["final"])
    count = sum(each.numel() for each in made.model.parameters())
    settings = {"checkpoint": str(judges["final"])}
    for more, width in (({}, 2), ({"dtype": "fp32"}, 4)):
        config = ScorerConfig(name="unifiedreward", settings=settings | more)
        assert model_bytes(config) == count * width
    made.model.save_pretrained(tmp_path, max_shard_size="100KB")
    shutil.copy(judges["final"] / "config.json", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    several = ScorerConfig(name="unifiedreward", settings={"checkpoint": str(tmp_path)})
    assert model_bytes(several) == count * 2
    assert model_bytes(ScorerConfig(name="unifiedreward")) == PARAMETERS[PUBLISHED] * 2
    other = ScorerConfig(name="unifiedreward", settings={"checkpoint": "me/mine"})
    assert model_bytes(other) is None


def test_the_published_size_equals_that_of_the_architecture():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    # it is also Qwen-Image's text encoder
    shared = Path(__file__).parents[2] / "policy/families/architectures/shared.json"
    with torch.device("meta"):
        config = Qwen2_5_VLConfig(**json.loads(shared.read_text())["qwen2.5_vl_7b"])
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[PUBLISHED]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "stars"}, "form is 'stars': use one of axes, elements, final"),
        ({"max_pixels": 100}, "max_pixels is 100: use a whole number, 3136 or more"),
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"checkpoint": 7}, "checkpoint is 7: give a path or a hub id"),
        ({"stars": 5}, "unexpected keyword argument 'stars'"),
        ({"checkpoint": "/no/such/place"}, "checkpoint '/no/such/place' not found"),
    ],
)
def test_settings_are_checked(settings, message):
    """They are checked when a plan needs the bytes too; but a directory may exist only where the
    run will be.
    """
    config = ScorerConfig(name="unifiedreward", settings=settings)
    if settings == {"checkpoint": "/no/such/place"}:
        assert model_bytes(config) is None
    else:
        with pytest.raises(ScorerSetupError, match=message):
            model_bytes(config)
    with pytest.raises(ScorerSetupError, match=message) as caught:
        check_settings(ScorerConfig(name="unifiedreward", settings=settings))
    assert "\n" not in str(caught.value)


def broken(folder: Path, how: str) -> None:
    config = folder / "config.json"
    if how == "another model":
        config.write_text(json.dumps({"architectures": ["Qwen3VLForConditionalGeneration"]}))
    elif how == "no config":
        config.unlink()
    elif how == "a list":
        config.write_text("[]")
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "a shard short":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "an empty index":
        (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another model", r"holds \['Qwen3VLForConditionalGeneration'\], not Qwen2_5_VLFor"),
        ("no config", r"config.json cannot be read: \[Errno 2\]"),
        ("a list", r"config.json is not a table"),
        ("no weights", r"contains none of model.safetensors.index.json, model.safetensors"),
        ("a shard short", r"index.json names model-2.safetensors, which does not exist"),
        ("an empty index", r"index.json names no file, which does not exist"),
    ],
)
def test_an_invalid_checkpoint_directory_is_refused_before_the_start(
    judges, tmp_path, how, message
):
    folder = shutil.copytree(judges["final"], tmp_path / "judge")
    broken(folder, how)
    with pytest.raises(ScorerSetupError, match=message) as caught:
        check_settings(ScorerConfig(name="unifiedreward", settings={"checkpoint": str(folder)}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", "its tokenizer or its chat template is missing"),
        ("chat_template.jinja", "its tokenizer or its chat template is missing"),
        ("processor_config.json", "Can't load|Unrecognized"),
        ("lm_head.weight", "1 weights are missing, such as lm_head.weight"),
    ],
)
def test_a_missing_file_of_a_checkpoint_is_one_line(judges, tmp_path, name, message):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(judges["final"], tmp_path / "judge")
    if name == "lm_head.weight":
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        (folder / name).unlink()
    with pytest.raises(
        ScorerSetupError, match=rf"not a Qwen2_5_VL.* model of transformers \(.*{message}"
    ) as caught:
        scorer(folder)
    assert "\n" not in str(caught.value)
