"""NVFP4 activations packed by the amax of the previous pass: values, growth, and independence."""

import numpy as np
import pytest
import torch

from policy.precision import nvfp4
from policy.precision.emulated import EmulatedNVFP4Linear, Workspace
from policy.precision.history import AmaxHistory, PassCounter
from tests.policy.test_explorer_options import explorer_of

CPU = torch.device("cpu")


def activations(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) * scale


def known(amax: float) -> AmaxHistory:
    history = AmaxHistory(CPU)
    history.known = True
    history.previous[7] = torch.tensor(amax).view(torch.int32)
    return history


@pytest.mark.parametrize(
    ("previous", "expected"),
    [
        (0.0, 4096.0),
        (1.0, 8.0),
        (1.1, 16.0),
        (3e38, 2.0**127),
        (1e-45, 2.0**-146),
        (float("inf"), float("nan")),
        (float("nan"), float("nan")),
    ],
)
def test_the_expected_amax_has_a_headroom_of_eight(previous, expected):
    found = nvfp4.expected_amax(torch.tensor(previous)).item()
    assert found == expected or np.isnan(found) and np.isnan(expected)


@pytest.mark.parametrize("previous", [0.25, 1.0, 30.0, 1000.0])
def test_represented_values_are_those_of_the_own_amax(previous):
    """The largest input is 3.2; with the headroom, 0.25 becomes 2, which some inputs exceed."""
    x = activations()
    own, amax = nvfp4.quantize_activation(x)
    found, expected = nvfp4.quantize_activation(x, amax=nvfp4.expected_amax(torch.tensor(previous)))
    covered = x.abs() <= expected
    blocks = covered.unflatten(-1, (-1, 16)).all(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    assert torch.equal((found * expected)[blocks], (own * amax)[blocks])
    assert blocks.all() == (previous > 0.25)


def test_growth_beyond_the_headroom_saturates():
    """The largest value is 6 times the largest scale, 448: the amax itself."""
    found, amax = nvfp4.quantize_activation(activations(1e4), amax=torch.tensor(8.0))
    assert (found.abs().max() * amax / nvfp4.SPAN).item() == 8.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_not_hidden(value):
    x = activations()
    x[2, 20] = value
    linear = torch.nn.Linear(64, 16)
    layer = EmulatedNVFP4Linear(linear, Workspace(), known(4.0))
    for part, tensor in nvfp4_buffers(linear.weight).items():
        layer.wire_targets()[part].copy_(tensor)
    y = layer(x)
    assert y[2].isnan().all() and y[[0, 1, 3, 4, 5]].isfinite().all()


def nvfp4_buffers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    packed = nvfp4.quantize(weight)
    return {"codes": packed.codes, "scales": packed.scales, "amax": packed.amax}


@pytest.mark.parametrize("previous", [None, 0.0, 0.1, 2.0, 1e-35])
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-36])
def test_the_quick_path_on_a_cpu_equals_the_general_one(previous, scale):
    histories = [AmaxHistory(CPU) if previous is None else known(previous) for _ in range(2)]
    x = activations(scale)
    quick, amax = Workspace()._quantize(x, histories[0])
    general, other = nvfp4.quantize_activation(x, amax=histories[1].amax(x.abs()))
    assert torch.equal(quick, general) and amax == other
    assert torch.equal(histories[0].current, histories[1].current)


def test_the_amax_of_a_pass_is_used_in_the_next_one():
    layer = EmulatedNVFP4Linear(torch.nn.Linear(64, 16), Workspace(), AmaxHistory(CPU))
    counter = PassCounter(model := torch.nn.Sequential(layer))
    recorded = []
    for scale in (1.0, 2.0, 4.0):
        x = activations(scale)
        model(x)
        used = float(layer.workspace.quantized(x, layer.history)[1])
        recorded.append((used, float(x.abs().max())))
    power = [2.0 ** np.ceil(np.log2(amax)) for _, amax in recorded]
    assert [used for used, _ in recorded] == [power[0], 8 * power[0], 8 * power[1]]
    counter.reset()
    model(activations(0.125))
    assert layer.history is not None and not layer.history.known


def test_inputs_that_outgrow_the_headroom_are_counted():
    """The input of the first layer grows, that of the second is clamped to at most 1.

    The largest value, 3.93, is rounded up to 4; with the headroom of 8 it may be 32 a pass later.
    """
    linear = torch.nn.Linear(64, 64, bias=False)
    layers = [EmulatedNVFP4Linear(linear, Workspace(), AmaxHistory(CPU)) for _ in range(2)]
    model = torch.nn.ModuleList(layers)
    model.forward = lambda x: (layers[0](x), layers[1](x.clamp(-1, 1)))
    counter = PassCounter(model)
    for scales, saturated in [
        ((1.0,), (0, 0)),  # packed by its own amax
        ((1.0, 8.0), (0, 2)),
        ((1.0, 9.0), (1, 2)),
        ((1.0, 9.0, 9.0, 300.0), (2, 6)),
    ]:
        counter.reset()
        for scale in scales:
            model(activations(scale))
        assert counter.end() == saturated


def test_an_explorer_knows_the_share_of_saturated_activations(
    family, adapted, cond, randomise, monkeypatch
):
    randomise(adapted, "current", 2)
    own, previous = (
        explorer_of(family, adapted, "emulated_nvfp4", activation_amax=kind)
        for kind in ("power_of_two", "previous_pass")
    )
    for explorer in (own, previous):
        explorer.explore(cond.rows(0), (5, 6), 3, "euler")
    assert (own.saturated, previous.saturated) == (None, 0.0)
    monkeypatch.setattr(nvfp4, "HEADROOM", 2.0**-10)  # less than inputs vary between two steps
    previous.explore(cond.rows(0), (5, 6), 3, "euler")
    assert previous.saturated == 1.0
    previous.explore(cond.rows(0), (5, 6), 1, "euler")
    assert previous.saturated is None  # the only pass of a sampling measures its own


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_images_are_those_of_the_own_amax(family, adapted, cond, randomise, solver):
    """Bit for bit, in repeated samplings and after those of another prompt too."""
    randomise(adapted, "current", 2)
    own, previous = (
        explorer_of(family, adapted, "emulated_nvfp4", activation_amax=kind)
        for kind in ("power_of_two", "previous_pass")
    )
    expected = own.explore(cond.rows(0), (5, 6), 4, solver)[1]
    for row in (0, 1, 0):
        found = previous.explore(cond.rows(row), (5, 6), 4, solver)[1]
        assert np.array_equal(found, expected) == (row == 0)


def test_a_sampling_does_not_depend_on_the_one_before(family, adapted, cond, randomise):
    """The one before ends with an infinite input; the next one must not pack anything by it."""
    randomise(adapted, "current", 2)
    explorer = explorer_of(family, adapted, "emulated_nvfp4", activation_amax="previous_pass")
    expected = explorer.explore(cond.rows(0), (5, 6), 3, "euler")[1]
    for history in explorer.transformer.modules():
        if isinstance(history, AmaxHistory):
            history.current.fill_(torch.tensor(float("inf")).view(torch.int32))
    assert np.array_equal(explorer.explore(cond.rows(0), (5, 6), 3, "euler")[1], expected)


def test_a_compiled_layer_records_the_same_amax(graphs):
    linear = torch.nn.Linear(64, 16)
    histories = [AmaxHistory(CPU), AmaxHistory(CPU)]
    eager, layer = (EmulatedNVFP4Linear(linear, Workspace(), history) for history in histories)
    for filled in (eager, layer):
        for part, tensor in nvfp4_buffers(linear.weight).items():
            filled.wire_targets()[part].copy_(tensor)
    models = [torch.nn.Sequential(eager), torch.nn.Sequential(torch.compile(layer))]
    for model in models:
        PassCounter(model)
    with torch.no_grad():
        for scale in (1.0, 2.0, 8.0, 64.0):
            assert torch.equal(*(model(activations(scale)) for model in models))
            assert torch.equal(histories[0].current, histories[1].current)
    assert len(graphs) == 2  # one for passes that measure, one for all others


@pytest.mark.slow
def test_a_compiled_denoiser_records_the_same_amax(family, adapted, cond, randomise, graphs):
    randomise(adapted, "current", 2)
    eager, compiled = (
        explorer_of(
            family, adapted, "emulated_nvfp4", activation_amax="previous_pass", compile=compile
        )
        for compile in (False, True)
    )
    expected = eager.explore(cond.rows(0), (5, 6), 3, "euler")[1]
    assert np.array_equal(compiled.explore(cond.rows(0), (5, 6), 3, "euler")[1], expected)
    histories = [
        [part.current for part in explorer.transformer.modules() if isinstance(part, AmaxHistory)]
        for explorer in (eager, compiled)
    ]
    assert graphs and len(histories[0]) == len(histories[1]) > 0
    # eager layers with one input record it once, compiled ones each
    assert all(int(a.max()) in (0, int(b.max())) for a, b in zip(*histories, strict=True))
