"""Which backend is selected for a device, and which reason is reported."""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from actors import rollout
from actors.messages import ActorInfo
from configs.backends import BackendName
from configs.sections import Guidance
from configs.services import Services
from configs.training import Lora
from learner.export import PolicyExporter
from policy.precision import backends, kernels, te_nvfp4
from policy.precision.backends import BACKENDS, eager_note, packing_backend, resolve_backend
from policy.precision.cost import Step


@dataclass
class Recipe:
    """A NVFP4BlockScaling recipe that has all the required options."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False


@dataclass
class OldRecipe:
    """A recipe of an old version: 2D scaling cannot be turned off."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False


class Engine:
    """A fake TransformerEngine that only answers questions about availability."""

    DType = NVFP4Quantizer = NVFP4Tensor = autocast = object

    def __init__(self, available: bool, recipe: object = Recipe) -> None:
        self.available = available
        self.recipes = SimpleNamespace(NVFP4BlockScaling=recipe)

    def is_nvfp4_available(self, return_reason: bool = False):
        return (self.available, "" if self.available else "cuBLAS is too old")


def without(name: str, recipe: object = Recipe) -> object:
    """Return a fake engine that lacks one required part."""
    parts = {part: object for part in te_nvfp4.PARTS if part != name}
    return SimpleNamespace(**parts, recipes=SimpleNamespace(NVFP4BlockScaling=recipe))


@pytest.fixture
def gpu(monkeypatch):
    """A function that simulates a GPU of a given compute capability, with or without
    TransformerEngine.
    """

    def pretend(capability: tuple[int, int], engine: Any) -> None:
        def import_or_fail():
            if engine is None:
                raise ImportError("No module named 'transformer_engine'")
            return engine, engine.recipes

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(te_nvfp4, "import_engine", import_or_fail)

    return pretend


@pytest.mark.parametrize(
    ("capability", "engine", "expected", "why"),
    [
        (
            (10, 0),
            Engine(True),
            "torch_nvfp4",
            "torch_nvfp4 is the fastest backend that this GPU supports",
        ),
        ((12, 0), None, "torch_nvfp4", "torch_nvfp4 is the fastest"),
        (
            (9, 0),
            Engine(True),
            "fp8",
            (
                "not torch_nvfp4: NVFP4 kernels need a Blackwell GPU of compute capability 10.0,"
                " but this one has 9.0"
            ),
        ),
        ((8, 9), None, "fp8", "fp8 is the fastest"),
        ((8, 0), None, "bf16", "not fp8: FP8 needs compute capability 8.9, but this GPU has 8.0"),
    ],
)
def test_auto_selects_the_fastest_backend_and_reports_the_reasons(
    gpu, capability, engine, expected, why
):
    gpu(capability, engine)
    backend, reason = resolve_backend("auto", "cuda")
    assert backend is BACKENDS[expected]
    assert reason.startswith(f"auto: {expected} is the fastest")
    assert why in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("engine", "missing"),
    [
        (without("DType"), "DType"),
        (without("NVFP4Tensor"), "NVFP4Tensor"),
        (without("is_nvfp4_available"), "is_nvfp4_available"),
        (Engine(True, OldRecipe), "NVFP4BlockScaling.disable_2d_quantization"),
        (without("DType", OldRecipe), "DType, NVFP4BlockScaling.disable_2d_quantization"),
        (SimpleNamespace(recipes=None), f"{', '.join(te_nvfp4.PARTS)}, NVFP4BlockScaling"),
    ],
)
def test_too_old_transformer_engine_is_refused(gpu, engine, missing):
    gpu((10, 0), engine)
    with pytest.raises(ValueError) as caught:
        resolve_backend("te_nvfp4", "cuda")
    assert (
        f"TransformerEngine 2.17 or later is needed: this version has no {missing}; use auto"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "why"),
    [(None, "does not import (No module named"), (Engine(False), "says: cuBLAS is too old")],
)
def test_unusable_transformer_engine_is_refused(gpu, engine, why):
    gpu((10, 3), engine)
    with pytest.raises(ValueError, match=re.escape(why)):
        resolve_backend("te_nvfp4", "cuda")


def test_auto_skips_backends_that_pack_eagerly(gpu, monkeypatch):
    """The exception is a compiled explorer, because the compiler fuses the packing."""
    gpu((9, 0), None)
    monkeypatch.setattr(kernels, "missing", lambda device: "triton is away")
    backend, why = resolve_backend("auto", "cuda")
    assert backend.name == "bf16"
    assert why.endswith(
        "not fp8: eager packing costs more than the format saves, and triton is away"
    )
    assert resolve_backend("auto", "cuda", compile=True)[0].name == "fp8"


def test_auto_skips_backends_that_are_predicted_to_be_slower(gpu, monkeypatch):
    """In the slow step, hardly any operations are in quantized layers, so packing the inputs costs
    more time than quantization saves.
    """
    gpu((9, 0), None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    fast_step = Step(1e14, 0.9e14, 100, 1e9, 1000, 1e10)
    slow_step = Step(1e14, 0.01e14, 100, 1e10, 1000, 1e10)
    counted = []
    step = lambda backend: counted.append(backend.name) or fast_step  # noqa: E731
    assert resolve_backend("auto", "cuda", step=step)[0].name == "fp8"
    assert counted == ["fp8"]  # the device has no NVFP4, so nothing was counted for it
    backend, why = resolve_backend("auto", "cuda", step=lambda backend: slow_step)
    assert backend.name == "bf16"
    assert why.endswith(
        "not fp8: a step is predicted to run at 0.94 times the speed of BF16 on NVIDIA H200"
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Nova")
    assert resolve_backend("auto", "cuda", step=lambda backend: slow_step)[0].name == "fp8"


def test_auto_quantizes_if_the_base_is_packed(gpu, monkeypatch):
    """Exploring in BF16 would use another base than the one that is trained."""
    slow = Step(1e14, 0.01e14, 100, 1e10, 1000, 1e10)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    gpu((9, 0), None)
    backend, why = resolve_backend("auto", "cuda", step=lambda backend: slow, quantized=True)
    assert backend.name == "fp8" and why.startswith("auto: fp8 quantizes, as the packed base")
    assert packing_backend("auto", "cuda", quantized=True).name == "fp8"
    gpu((8, 0), None)
    with pytest.raises(ValueError, match="no backend that quantizes runs on cuda.*not fp8: FP8"):
        resolve_backend("auto", "cuda", quantized=True)


def test_auto_selects_emulation_on_a_cpu():
    backend, why = resolve_backend("auto", "cpu")
    assert backend.name == "emulated_nvfp4"
    assert why.startswith("auto: there is no NVFP4 kernel for cpu")


def test_unsupported_backend_is_refused_in_one_line_with_alternatives(gpu):
    with pytest.raises(ValueError) as caught:
        resolve_backend("te_nvfp4", "cpu")
    assert str(caught.value) == (
        "explore.backend: 'te_nvfp4' does not run on cpu here: NVFP4 kernels need a Blackwell"
        " GPU, but torch sees no CUDA device; use auto, or fp8, emulated_nvfp4, bf16, fp32"
    )
    gpu((9, 0), None)
    with pytest.raises(
        ValueError,
        match=(
            r"'torch_nvfp4' does not run on cuda here: .*this one has 9.0; use auto, or fp8,"
            r" emulated"
        ),
    ):
        resolve_backend("torch_nvfp4", "cuda")
    gpu((8, 6), None)
    with pytest.raises(
        ValueError,
        match=r"'fp8' does not run on cuda here: .*8.6; use auto, or emulated_nvfp4, bf16, fp32",
    ):
        resolve_backend("fp8", "cuda")
    with pytest.raises(
        ValueError,
        match="explore.backend: 'fp5' is unknown: use auto, te_nvfp4, torch_nvfp4, fp8, emulated",
    ):
        resolve_backend("fp5", "cpu")


def test_named_backend_is_used_as_configured():
    for name in ("fp8", "emulated_nvfp4", "bf16", "fp32"):
        assert resolve_backend(name, "cpu") == (BACKENDS[name], f"{name}: as configured")


def test_slow_eager_packing_is_reported(gpu, monkeypatch):
    """A note is given only where torch operations pack the activations on a GPU without
    compiling.
    """
    gpu((10, 0), Engine(True))
    assert not any(eager_note(backend, "cuda", False) for backend in BACKENDS.values())
    monkeypatch.setattr(
        kernels, "missing", lambda device: None if device.type == "cpu" else "triton is away"
    )
    noted = {name for name, backend in BACKENDS.items() if eager_note(backend, "cuda", False)}
    assert noted == {"torch_nvfp4", "fp8", "te_nvfp4"}
    assert not any(
        eager_note(backend, "cuda", True) or eager_note(backend, "cpu", False)
        for backend in BACKENDS.values()
    )


@pytest.mark.parametrize(
    ("compile", "ends"),
    [(False, "`python -m bench explorer --compile`"), (True, "fp8: as configured")],
)
def test_explorer_reports_slow_eager_packing(gpu, monkeypatch, compile, ends):
    gpu((9, 0), None)
    monkeypatch.setattr(kernels, "missing", lambda device: "triton is away")
    explore = SimpleNamespace(backend="fp8", compile=compile, guidance=1.0)
    run = SimpleNamespace(
        plan=SimpleNamespace(explore=explore),
        explore=explore,
        arm="sol_rl",
        guidance=Guidance(),
        lora=Lora(),
        services=Services(),
    )
    monkeypatch.setattr(rollout, "load_config", lambda tree: run)
    monkeypatch.setattr(rollout, "setup_torch", lambda run, kind: torch.device("cuda"))
    monkeypatch.setattr(rollout, "identity", lambda device: ActorInfo(1, "here"))
    monkeypatch.setattr(rollout.RolloutActor, "_build", lambda self, backend: None)
    why = rollout.RolloutActor({}).ready().why
    assert why.startswith("fp8: as configured") and why.endswith(ends)


@pytest.mark.parametrize(("base", "quantized"), [("full", False), ("nf4", True)])
def test_a_packed_base_is_explored_in_a_format_that_quantizes(monkeypatch, base, quantized):
    asked: list[bool] = []

    def resolve(name, device, key="", compile=False, step=None, quantized=False):
        asked.append(quantized)
        return BACKENDS["fp8"], "fp8: as found"

    explore = SimpleNamespace(backend="auto", compile=False, guidance=1.0)
    run = SimpleNamespace(
        plan=SimpleNamespace(explore=explore),
        explore=explore,
        guidance=Guidance(),
        lora=Lora(base=base),
        services=Services(),
    )
    monkeypatch.setattr(rollout, "load_config", lambda tree: run)
    monkeypatch.setattr(rollout, "setup_torch", lambda run, kind: torch.device("cpu"))
    monkeypatch.setattr(rollout, "resolve_backend", resolve)
    monkeypatch.setattr(rollout.RolloutActor, "_build", lambda self, backend: None)
    rollout.RolloutActor({})
    monkeypatch.setattr(backends, "resolve_backend", resolve)
    monkeypatch.setattr(
        PolicyExporter, "_use", lambda self, backend: vars(self).update(_backend=backend)
    )
    PolicyExporter(run, None, None, torch.device("cpu"))._chosen(None)
    assert asked == [quantized, quantized]


def test_learner_packs_weights_for_gpus_that_it_does_not_have():
    for name in ("te_nvfp4", "torch_nvfp4"):
        packed = packing_backend(name, "cpu").pack(torch.randn(16, 32), True)
        expected = BACKENDS["emulated_nvfp4"].pack(torch.zeros(16, 32), True)
        assert {key: (t.dtype, t.shape) for key, t in packed.items()} == {
            key: (t.dtype, t.shape) for key, t in expected.items()
        }
        assert packing_backend(name, "cpu").wire_format == "nvfp4"
    assert packing_backend("auto", "cpu").name == "emulated_nvfp4"
    with pytest.raises(ValueError, match="'fp5' is unknown"):
        packing_backend("fp5", "cpu")


def test_failing_import_of_transformer_engine_is_reported_as_import_error(monkeypatch):
    def broken(name: str):
        raise RuntimeError("CUDA driver not found\nmore")

    monkeypatch.setattr(te_nvfp4.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="^CUDA driver not found$"):
        te_nvfp4.import_engine()


def test_backend_names_match_the_configuration():
    assert get_args(BackendName) == ("auto", *BACKENDS)
    assert all(backend.name == name for name, backend in BACKENDS.items())
