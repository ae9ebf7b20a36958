"""Predicted seconds of compiled passes and decoders on GPUs, from the stored counts."""

from dataclasses import replace

import pytest

from configs.load import load
from planning.assumptions import Assumptions, Device
from planning.plan import make_plan
from planning.stages import Stage
from policy.precision.cost import COMPILED, FUSED, PREVIOUS_PASS

EAGER = ("explore.compile=false", "regenerate.compile=false")


def stages_of(
    model: str, *overrides: str, accelerator: str = "H200"
) -> tuple[dict[str, Stage], Device]:
    where = Assumptions(accelerator=accelerator, gpus=8)
    plan = make_plan(load(f"{model}-sol_rl-hpsv2", overrides), where)
    assert plan.device is not None
    return {**plan.stages, "evaluate": plan.evaluation}, plan.device


def decoding(stage: Stage, device: Device) -> float:
    return stage.seconds(device) - replace(stage, decoding=0.0).seconds(device)


@pytest.mark.parametrize(
    ("model", "overrides", "compiled"),
    [
        ("sana", (), {"explore", "regenerate", "evaluate"}),
        ("sana", EAGER[:1], {"regenerate", "evaluate"}),
        ("sana", EAGER[1:], {"explore"}),
        ("qwen_image", (), set()),  # its decoder caches frames between calls
        ("wan_1_3b", (), set()),
    ],
)
def test_compiled_decoders_take_the_measured_share_of_an_eager_ones_seconds(
    model, overrides, compiled
):
    eager, device = stages_of(model, *EAGER)
    found, _ = stages_of(model, *overrides)
    for name in ("explore", "regenerate", "evaluate"):
        share = COMPILED["decoder"] if name in compiled else 1.0
        assert decoding(found[name], device) == pytest.approx(share * decoding(eager[name], device))


def test_on_a_cpu_decoders_are_not_compiled():
    compiles = ["explore.compile=true", "regenerate.compile=true"]
    plan = make_plan(load("quickstart", compiles), Assumptions())
    for stage in (*plan.stages.values(), plan.evaluation):
        assert not stage.compiled
    assert plan.stages["regenerate"].parts[0].compiled


@pytest.mark.parametrize("key", ["explore", "regenerate", "optimizer"])
def test_a_compiled_stage_is_faster_with_the_same_operations(key):
    """Other stages do not change."""
    off, device = stages_of("sana", *EAGER)
    on, _ = stages_of("sana", *(each for each in EAGER if key not in each), f"{key}.compile=true")
    mine = {"explore": {"explore"}, "optimizer": {"update"}}.get(key, {"regenerate", "evaluate"})
    for name, stage in on.items():
        assert stage.flops == off[name].flops
        ratio = stage.seconds(device) / off[name].seconds(device)
        assert 0.4 < ratio < 0.8 if name in mine else ratio == 1.0


def test_packing_by_the_previous_pass_saves_its_bytes_in_all_steps_but_the_first():
    """Of the 6 steps of SANA, which are bound by memory and arithmetic, and not by launches."""
    own, device = stages_of("sana", accelerator="B200")
    found, _ = stages_of("sana", "explore.activation_amax=previous_pass", accelerator="B200")
    (part,) = own["explore"].parts
    saved = 5 / 6 * (FUSED["nvfp4"].bytes - PREVIOUS_PASS.bytes) * part.step.elements
    expected = part.calls * saved / device.rates(True).packing / own["explore"].gpus
    actual = own["explore"].seconds(device) - found["explore"].seconds(device)
    assert actual == pytest.approx(expected) and actual > 0
    assert found["update"].seconds(device) == own["update"].seconds(device)
