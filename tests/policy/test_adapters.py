"""Adapters on a bfloat16 base model. The tests derive a bound for the rounding error of bfloat16
products and check that the shipped model stays within it.
"""

from types import MethodType

import pytest
import torch
from peft.tuners.lora import Linear

from configs.sections import Model
from configs.training import Lora
from policy.adapters import AdaptedConv2d, AdaptedLinear
from policy.families import family_for
from policy.lora import adapted_modules, adapter_state, add_adapters, load_adapter_state, trainable
from policy.pass_cost import conditioning_like
from policy.sampling.noise import noise_for

U, V = 2.0**-8, 2.0**-24
"""Unit roundoffs of bfloat16 and float32."""
LORA = Lora(rank=8, alpha=20)  # the scaling is not a power of two
ROWS = 4


def build_model(dtype: torch.dtype):
    """Return the family and the shipped model with one adapter. Its B is as large as its A."""
    family = family_for(Model(path="shapes", height=32, width=32, max_sequence_length=1))
    transformer = family.load_transformer("cpu", dtype)
    add_adapters(transformer, LORA, family, names=("current",), seed=3)
    generator = torch.Generator().manual_seed(4)
    state = adapter_state(transformer, "current")
    for key, value in state.items():
        if "lora_B" in key:
            state[key] = torch.randn(value.shape, generator=generator) / 16
    load_adapter_state(transformer, "current", state)
    return family, transformer


def backward(family, transformer) -> None:
    """Backpropagate a squared error of four images, which sets the gradients of the adapter."""
    dtype = next(transformer.parameters()).dtype
    x = noise_for(range(ROWS), family.latent_shape)
    cond = conditioning_like(family, ROWS, dtype, "cpu")
    for number, name in enumerate(cond.tensors):
        shape = cond.tensors[name].shape
        cond.tensors[name].copy_(
            torch.randn(shape, generator=torch.Generator().manual_seed(5 + number))
        )
    velocity = family.velocity(transformer, x, torch.full((ROWS,), 0.5), cond)
    (velocity - noise_for(range(10, 10 + ROWS), family.latent_shape)).square().mean().backward()


def gradient(transformer) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for _, p in trainable(transformer)])


@pytest.fixture(scope="module")
def shipped():
    """The shipped model in bfloat16 after ``backward``, and the recorded tensors of every layer:
    the input x, the output y, and the gradient g of y.
    """
    family, transformer = build_model(torch.bfloat16)
    recorded: dict[str, dict[str, torch.Tensor]] = {}
    for name, layer in adapted_modules(transformer):
        tensors = recorded.setdefault(name, {})

        def record(module, inputs, output, tensors=tensors) -> None:
            tensors["x"], tensors["y"] = inputs[0].detach(), output.detach()
            output.register_hook(lambda grad: tensors.__setitem__("g", grad))

        layer.register_forward_hook(record)
    backward(family, transformer)
    return transformer, recorded


def test_every_layer_of_the_shipped_model_stays_within_its_error_bound(shipped):
    """Each gradient is computed by two products over K1 and K2 terms, which are summed in float32.
    Three values are rounded to bfloat16: one factor, the intermediate product, and the result.
    Relative to the same sums of absolute values, the error is therefore at most
    (1 + U)^3 (1 + (K1 + K2 + 3) V) - 1. The output has one more rounding: that of the sum with
    W x + b, which was itself rounded.
    """
    transformer, recorded = shipped
    for name, layer in adapted_modules(transformer):
        x, g, y = (recorded[name][part].flatten(0, -2).double() for part in ("x", "g", "y"))
        a, b = (part["current"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        s = layer.scaling["current"]
        expected = {
            "A": (s * (g @ b).t() @ x, s * (g.abs() @ b.abs()).t() @ x.abs(), len(b)),
            "B": (s * g.t() @ (x @ a.t()), s * g.abs().t() @ (x.abs() @ a.abs().t()), a.shape[1]),
        }
        for part, (exact, size, terms) in expected.items():
            actual = getattr(layer, f"lora_{part}")["current"].weight.grad
            assert actual.dtype == torch.float32
            bound = (1 + U) ** 3 * (1 + (terms + len(x) + 3) * V) - 1
            assert ((actual.double() - exact).abs() <= bound * size).all(), (name, part)
        base = layer.base_layer
        start = x @ base.weight.double().t() + base.bias.double()
        size = x.abs() @ base.weight.double().abs().t() + base.bias.double().abs()
        adapter_magnitude = s * (x.abs() @ a.abs().t()) @ b.abs().t()
        exact = start + s * (x @ a.t()) @ b.t()
        sums = (x.shape[1] + 2) * V * size
        bound = (
            U * start.abs()
            + ((1 + U) ** 3 - 1) * adapter_magnitude
            + 2 * x.shape[1] * V * adapter_magnitude
            + sums
        )
        assert ((y - exact).abs() <= bound * (1 + U) + U * exact.abs()).all(), name
    assert len(recorded) == 31


def test_input_gradient_includes_base_and_adapter_products():
    """The gradient of the input is (W + s B A)^T g. The adapter's part s (g B) A is rounded three
    times and the base model's part g W once. Their sum is rounded once more.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = torch.nn.Linear(48, 32).to(torch.bfloat16).requires_grad_(False)
    host = torch.nn.ModuleDict({"only": base})
    from policy.lora import inject

    inject(host, LORA, ["only"], ["current"])
    layer = host["only"]
    assert type(layer) is AdaptedLinear
    for part, shape in (("A", (8, 48)), ("B", (32, 8))):
        matrix = getattr(layer, f"lora_{part}")["current"].float()
        matrix.weight.data.copy_(normal(*shape) / 8)
    x = normal(5, 7, 48).to(torch.bfloat16).requires_grad_()
    g = normal(5, 7, 32).to(torch.bfloat16)
    layer(x).backward(g)
    a, b = (m["current"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
    s, w, g_double = layer.scaling["current"], base.weight.double(), g.double()
    exact = g_double @ w + s * (g_double @ b) @ a
    adapter_magnitude = s * (g_double.abs() @ b.abs()) @ a.abs()
    bound = U * (g_double @ w).abs() + ((1 + U) ** 3 - 1) * adapter_magnitude
    bound = (
        bound * (1 + U) + U * exact.abs() + 90 * V * (g_double.abs() @ w.abs() + adapter_magnitude)
    )
    assert ((x.grad.double() - exact).abs() <= bound).all()
    assert x.grad.shape == x.shape and x.grad.dtype == torch.bfloat16


def test_bfloat16_convolution_adapter_equals_linear_adapter(monkeypatch):
    """Both layers differ only in the order of sums, so on small integers, whose sums are exact, the
    results are equal bit for bit.
    """
    from policy.lora import inject

    host = torch.nn.ModuleDict({"c": torch.nn.Conv2d(4, 6, 1), "l": torch.nn.Linear(4, 6)})
    host.to(torch.bfloat16).requires_grad_(False)
    inject(host, Lora(rank=2, alpha=4), ["c", "l"], ["current"])
    assert type(host["c"]) is AdaptedConv2d
    generator = torch.Generator().manual_seed(1)

    def small_integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    for part in ("base_layer", "lora_A", "lora_B"):
        owners = [getattr(host[name], part) for name in "cl"]
        owners = owners if part == "base_layer" else [each["current"].float() for each in owners]
        weight = small_integers(*owners[1].weight.shape)
        for owner in owners:
            owner.weight.data.copy_(weight.view_as(owner.weight))
    host["c"].base_layer.bias.data.copy_(host["l"].base_layer.bias.data.zero_())
    x = small_integers(3, 4, 5, 5).to(torch.bfloat16)
    linear_output = host["l"](x.movedim(1, -1)).movedim(-1, 1)
    assert host["c"](x).dtype == torch.bfloat16 and torch.equal(host["c"](x), linear_output)


def test_full_gradient_is_as_accurate_as_with_float32_adapters(shipped):
    """The gradients with bfloat16 adapters and with PEFT's float32 adapters have similar errors.
    Both paths round every activation to bfloat16. After n successive roundings with independent
    signs, the relative error is near U sqrt(n). A block rounds about 20 times in each direction:
    n = 2 * 4 * 20 for forward and backward passes of four blocks, which gives 0.05. Adapters in
    bfloat16 add three roundings of the part that they contribute.
    """
    transformer, _ = shipped
    own_gradient = gradient(transformer)
    family, peft_model = build_model(torch.bfloat16)
    for _, layer in adapted_modules(peft_model):
        layer.forward = MethodType(Linear.forward, layer)
    backward(family, peft_model)
    family, exact = build_model(torch.float32)
    bfloat16_weights = dict(build_model(torch.bfloat16)[1].named_parameters())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(bfloat16_weights[name].float())
    backward(family, exact)
    exact_gradient, peft_gradient = gradient(exact), gradient(peft_model)

    def relative_distance(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).norm() / exact_gradient.norm())

    print(
        relative_distance(own_gradient, exact_gradient),
        relative_distance(peft_gradient, exact_gradient),
        relative_distance(own_gradient, peft_gradient),
    )
    expected = U * (2 * 4 * 20) ** 0.5
    assert relative_distance(own_gradient, peft_gradient) < expected
    assert relative_distance(own_gradient, exact_gradient) < 1.25 * relative_distance(
        peft_gradient, exact_gradient
    )


def test_adapter_weights_stay_float32_and_a_float32_base_matches_peft():
    family, transformer = build_model(torch.float32)
    backward(family, transformer)
    own_gradient = gradient(transformer)
    for _, layer in adapted_modules(transformer):
        layer.forward = MethodType(Linear.forward, layer)
    transformer.zero_grad()
    backward(family, transformer)
    assert torch.equal(own_gradient, gradient(transformer))
    assert {p.dtype for _, p in trainable(build_model(torch.bfloat16)[1])} == {torch.float32}
