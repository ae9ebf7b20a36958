"""Naming, building and checking scorers."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from configs.load import load
from configs.rewards import Scorer as ScorerConfig
from rewards import SCORERS, ScorerSetupError, build, check_settings, may_use_gpu, resolve
from rewards.base import check, require_images


@pytest.fixture
def own_module(monkeypatch):
    """Add a user's module with scorers."""
    module = types.ModuleType("my_scorers")

    class Constant:
        def __init__(self, value: float = 1.0) -> None:
            if value < 0:
                raise ValueError("value must not be negative\nsecond line")
            self.value = value

        def __call__(self, images, prompts, metadata):
            return np.full(len(images), self.value, np.float32)

    module.Constant = Constant
    module.nested = types.SimpleNamespace(Constant=Constant)
    module.number = 3
    module.returns_none = lambda: None
    monkeypatch.setitem(sys.modules, "my_scorers", module)


def test_every_listed_scorer_names_a_module_and_an_attribute():
    for name, target in SCORERS.items():
        assert target.count(":") == 1 and target.startswith("rewards."), name


def test_unknown_names_get_the_nearest_spelling():
    with pytest.raises(ScorerSetupError, match="did you mean 'jpeg_compressibility'"):
        resolve("jpeg_compresibility")
    with pytest.raises(ScorerSetupError, match="did you mean 'shapes'"):
        resolve("shape")
    with pytest.raises(
        ScorerSetupError, match="use one of .*jpeg_incompressibility.* or module:attribute"
    ) as caught:
        resolve("zzz")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ScorerSetupError):
        resolve("module:")


def test_settings_reach_the_constructor(own_module):
    for name in ("my_scorers:Constant", "my_scorers:nested.Constant"):
        scorer = build(ScorerConfig(name=name, settings={"value": 2.5}))
        assert scorer(np.zeros((3, 3, 8, 8), np.uint8), [""] * 3, [{}] * 3).tolist() == [2.5] * 3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("no_such_module:X", {}, "cannot import 'no_such_module'.*add its directory to PYTHONPATH"),
        ("my_scorers:Constent", {}, "no attribute 'Constent' .did you mean 'Constant'"),
        ("my_scorers:number", {}, "int, not a class or function"),
        ("my_scorers:returns_none", {}, "returned NoneType, which cannot be called"),
        (
            "my_scorers:Constant",
            {"value": -1},
            "raised ValueError: value must not be negative: fix rewards.scorers.settings",
        ),
        ("my_scorers:Constant", {"valu": 1}, "raised TypeError.*'valu'"),
    ],
)
def test_a_scorer_that_cannot_be_built_is_explained(own_module, name, settings, message):
    with pytest.raises(ScorerSetupError, match=message) as caught:
        build(ScorerConfig(name=name, settings=settings))
    assert "\n" not in str(caught.value)


def test_a_module_with_missing_dependencies_is_explained(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ScorerSetupError,
        match="a_package_nobody_has.*: install the packages that 'needs_more' imports",
    ):
        build(ScorerConfig(name="needs_more:X"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "clipscore",
            {"checkpoint": "shapes/none"},
            "'clipscore': checkpoint: checkpoint 'shapes/none' not found.*make shapes-clip",
        ),
        (
            "hpsv2",
            {"checkpoint": "/no/HPS.pt"},
            "checkpoint '/no/HPS.pt' not found.*docs/rewards.md",
        ),
        (
            "pickscore",
            {"checkpoint": "checkpoints/pick.safetensors"},
            "checkpoint 'checkpoints/pick.safetensors' not found",
        ),
        (
            "pickscore",
            {"checkpoint": "{here}"},
            "contains none of model.safetensors, pytorch_model.bin",
        ),
        (
            "imagereward",
            {"checkpoint": "a/b", "vocabulary": "./vocab.txt"},
            "'imagereward': vocabulary: checkpoint .* not found",
        ),
        ("clipscore", {}, "missing a required argument: 'checkpoint'"),
        ("jpeg_compressibility", {"qality": 3}, "unexpected keyword argument 'qality'"),
        ("shpes", {}, "did you mean 'shapes'"),
        (
            "jpeg_incompressibility",
            {"quality": 96},
            "'jpeg_incompressibility': quality is 96: use 1 to 95",
        ),
        (
            "http",
            {"url": "http://localhost:80", "encoding": "xml"},
            "'http': encoding is 'xml': use one of npz, json",
        ),
        (
            "http",
            {"url": "http://localhost:80", "encoding": ["npz"]},
            r"encoding is \['npz'\]: use one of",
        ),
        ("http", {"url": "x:80"}, "url is 'x:80': give http://host:port"),
        ("http", {"url": "http://:80/score"}, "give http://host:port"),
        ("http", {"url": "http://x:http"}, "give http://host:port"),
        ("http", {"url": 80}, "url is 80: give http://host:port"),
        ("http", {"url": "https://x", "timeout_s": -1}, "timeout_s is -1: use a positive time"),
        ("http", {"url": "https://x", "timeout_s": "60"}, "timeout_s is '60': use a positive time"),
        (
            "http",
            {"url": "https://x", "batch_size": -1},
            "batch_size is -1: use a whole number, 0 or more",
        ),
        (
            "http",
            {"url": "https://x", "retries": 1.5},
            "retries is 1.5: use a whole number, 0 or more",
        ),
        (
            "clipscore",
            {"checkpoint": "a/b", "dtype": "int4"},
            "'clipscore': dtype is 'int4': use one of fp32, bf16, fp16",
        ),
        (
            "hpsv2",
            {"checkpoint": "a/b", "batch_size": 0},
            "'hpsv2': batch_size is 0: use a whole number, 1 or more",
        ),
        (
            "pickscore",
            {"checkpoint": "a/b", "batch_size": "16"},
            "batch_size is '16': use a whole number",
        ),
        (
            "pickscore",
            {"checkpoint": "a/b", "device": "gpu"},
            "device is 'gpu': use cpu, cuda or cuda:N",
        ),
        (
            "imagereward",
            {"checkpoint": "a/b", "architecture": {"audio": {}}},
            "architecture has audio: only the tables",
        ),
        ("imagereward", {"checkpoint": "a/b", "dtype": "half"}, "dtype is 'half'"),
    ],
)
def test_invalid_settings_are_found_without_loading(tmp_path, name, settings, message):
    given = {
        key: value.replace("{here}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    with pytest.raises(ScorerSetupError, match=message) as caught:
        check_settings(ScorerConfig(name=name, settings=given))
    assert "\n" not in str(caught.value)


def test_settings_that_cannot_be_checked_are_left_to_the_actors(tmp_path):
    """Hub ids are resolved where the scorer is built, and a user's scorer may exist only there."""
    (tmp_path / "model.safetensors").touch()
    check_settings(ScorerConfig(name="pickscore", settings={"checkpoint": str(tmp_path)}))
    check_settings(ScorerConfig(name="pickscore", settings={"checkpoint": "someone/model"}))
    check_settings(
        ScorerConfig(name="pickscore", settings={"checkpoint": "someone/model:weights.safetensors"})
    )
    check_settings(
        ScorerConfig(
            name="http",
            settings={"url": "https://[::1]:8443/score", "timeout_s": 5, "encoding": "json"},
        )
    )
    check_settings(
        ScorerConfig(
            name="imagereward", settings={"checkpoint": "a/b", "dtype": "bf16", "device": "cuda:1"}
        )
    )
    check_settings(ScorerConfig(name="nowhere:Scorer", settings={"checkpoint": "/no/such.pt"}))


@pytest.mark.parametrize("name", ["clipscore", "hpsv2", "pickscore", "imagereward"])
def test_layers_of_the_large_models_are_read(tmp_path, name):
    file = tmp_path / "run.toml"
    file.write_text(f'layers = ["models/shapes", "rewards/{name}"]\nname = "x"\n')
    (scorer,) = load(str(file)).rewards.scorers
    assert scorer.name == name and set(scorer.settings) >= {"checkpoint", "batch_size", "dtype"}


def test_check_keeps_good_scores_and_marks_bad_ones():
    values, problem = check([1, 2.5], 2)
    assert values.dtype == np.float32 and values.tolist() == [1.0, 2.5] and problem is None
    values, problem = check(np.array([1.0, np.nan, np.inf]), 3)
    assert values[0] == 1 and np.isnan(values[1:]).all()
    assert "image 1 of 3 (2 not finite)" in problem
    values, problem = check(np.array([1e300, 0.0]), 2)  # finite, but not in float32
    assert np.isnan(values[0]) and values[1] == 0 and "image 0" in problem


@pytest.mark.parametrize("answer", [[1.0], [[1.0, 2.0]], 3.0, None, "ab", [1.0, "x"], {"a": 1}])
def test_a_wrong_shape_spoils_the_whole_batch(answer):
    values, problem = check(answer, 2)
    assert values.shape == (2,) and np.isnan(values).all()
    assert "return float32 [2]" in problem or "finite" in problem


def test_check_does_not_write_into_the_scorers_array():
    answer = np.array([np.nan, 1.0], np.float32)
    values, _ = check(answer, 2)
    values[1] = 5
    assert answer[1] == 1


def test_images_are_checked_against_the_interface():
    good = np.zeros((2, 3, 8, 8), np.uint8)
    require_images(good, ["a", "b"], [{}, {}])
    for images in (good.astype(np.float32), good[0], good.transpose(0, 2, 3, 1)):
        with pytest.raises(ValueError, match="uint8 \\[B, 3, H, W\\]"):
            require_images(images, ["a", "b"], [{}, {}])
    with pytest.raises(ValueError, match="2 images, 1 prompts, 2 metadata"):
        require_images(good, ["a"], [{}, {}])


def test_scorers_by_rules_on_servers_and_on_cpus_use_no_gpu():
    """A layout gives them no share of one; a scorer that is not built in may use a GPU."""
    without = {"shapes", "jpeg_compressibility", "jpeg_incompressibility", "ocr"}
    without |= {"http", "vlm", "vlm_rank"}
    assert {name for name in SCORERS if not may_use_gpu(name)} == without
    assert may_use_gpu("mine:Scorer")
