"""LoRA adapters (arXiv 2106.09685) of one transformer: W + (alpha / rank) B A.

"current" is trained, "old" is the sampling policy and "ema" is evaluated; the reference policy is
the transformer with adapters disabled. Adapter weights are float32, whatever the dtype of the base
weights. The layers are peft's (``policy.adapters``), but this module selects the active adapter:
peft's own functions would also set ``requires_grad``, which must stay with "current".
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.section import Tree
from configs.training import Lora
from policy.families.base import Family
from policy.initial_lora import start_from

if TYPE_CHECKING:  # peft takes seconds to import, and the driver does not need it
    from peft.tuners.lora import LoraLayer

ADAPTERS = ("current", "old", "ema")


def add_adapters(
    transformer: nn.Module,
    lora: Lora,
    family: Family,
    names: Sequence[str] = ADAPTERS,
    seed: int = 0,
) -> int:
    """Wrap the target linears with one adapter per name, all with equal weights.

    A is drawn from N(0, 1 / rank^2) and B is 0; with ``lora.init_from`` the adapters start as that
    LoRA instead. Afterwards the first name is active and trainable. Returns the number of text
    encoders' layers in ``init_from``, which are left out. Raises ValueError for a target that
    matches nothing, and FileNotFoundError or ValueError for an unusable ``init_from``.
    """
    modules = target_modules(transformer, lora.targets or family.lora_targets)
    inject(transformer, lora, modules, names)
    # on the CPU, so that the adapters do not depend on the device of the transformer
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for module, layer in adapted_modules(transformer):
        for part in (layer.lora_A, layer.lora_B):
            for adapter in part.values():
                # peft creates them in the dtype of the base weight
                adapter.to(torch.float32)
        down, up = matrices(layer, names[0])
        # as peft's "gaussian" initialization; with B = 0 the policy starts as the base model
        state[f"{module}.lora_A.weight"] = torch.randn(down.shape, generator=generator) / lora.rank
        state[f"{module}.lora_B.weight"] = torch.zeros(up.shape)
    left_out = 0 if lora.init_from is None else start_from(state, lora, family)
    for name in names:
        load_adapter_state(transformer, name, state)
    for _, layer in adapted_modules(transformer):
        for name in names:
            layer.lora_A[name].requires_grad_(name == names[0])
            layer.lora_B[name].requires_grad_(name == names[0])
        layer._active_adapter = [names[0]]
    return left_out


def inject(
    transformer: nn.Module, lora: Lora, modules: Sequence[str], names: Sequence[str]
) -> None:
    """Wrap the modules at these paths with one adapter per name."""
    from peft import LoraConfig, inject_adapter_in_model

    from policy.adapters import LAYERS

    settings: Tree = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(modules)}
    with warnings.catch_warnings():
        # peft warns about a second adapter, which is intended here
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        for name in names:
            config = LoraConfig(**settings)
            config._register_custom_module(LAYERS)
            inject_adapter_in_model(config, transformer, adapter_name=name)


def target_modules(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of linears and 1x1 convolutions that match ``targets``, in module order.

    A target matches the last names of a path; `*` matches anything. Raises ValueError for a target
    that matches nothing, whether the user's or the family's, because it would silently not be
    trained.
    """
    names = [name for name, module in transformer.named_modules() if _is_linear(module)]
    matches = {
        target: [n for n in names if fnmatchcase(n, target) or fnmatchcase(n, f"*.{target}")]
        for target in targets
    }
    unmatched = [target for target, modules in matches.items() if not modules]
    if unmatched:
        known = f"; existing names are such as {names[len(names) // 2]!r}" if names else ""
        raise ValueError(
            "lora.targets: no linear layer of the transformer has a name that ends in"
            f" {' or '.join(map(repr, unmatched))}{known}"
        )
    selected = {name for modules in matches.values() for name in modules}
    return [name for name in names if name in selected]


def _is_linear(module: nn.Module) -> bool:
    pointwise = (
        isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    )
    return isinstance(module, nn.Linear) or pointwise


def adapted_modules(transformer: nn.Module) -> list[tuple[str, LoraLayer]]:
    """Return (module path, LoRA layer) pairs in module order."""
    from peft.tuners.lora import LoraLayer

    return [
        (name, module)
        for name, module in transformer.named_modules()
        if isinstance(module, LoraLayer)
    ]


@contextlib.contextmanager
def use_adapter(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Activate the adapter ``name`` within the context; None disables adapters (the base model).

    Can be nested. Gradients and ``requires_grad`` are untouched. Raises KeyError if the adapter
    does not exist.
    """
    modules = adapted_modules(transformer)
    if name is not None:
        require_adapter(modules, name)
    layers = [layer for _, layer in modules]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._disable_adapters = name is None
        if name is not None:
            layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def require_adapter(modules: Sequence[tuple[str, LoraLayer]], name: str) -> None:
    """Raise KeyError if ``modules`` (of ``adapted_modules``) have no adapter of this name."""
    if not modules:
        raise KeyError(
            f"adapter {name!r}: the transformer has no adapters; call add_adapters first"
        )
    existing = modules[0][1].lora_A
    if name not in existing:
        raise KeyError(f"adapter {name!r} does not exist; available: {', '.join(existing)}")


def matrices(layer: LoraLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the matrices A [r, in] and B [out, r] of one adapter."""
    down, up = (part[name].get_parameter("weight") for part in (layer.lora_A, layer.lora_B))
    return down, up


def adapter_parameters(transformer: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter by key.

    The keys are `<module path>.lora_A.weight` [r, in] and `<module path>.lora_B.weight` [out, r].
    """
    modules = adapted_modules(transformer)
    require_adapter(modules, name)
    named = {}
    for module, layer in modules:
        named[f"{module}.lora_A.weight"], named[f"{module}.lora_B.weight"] = matrices(layer, name)
    return named


def adapter_state(transformer: nn.Module, name: str) -> dict[str, Tensor]:
    """Return a float32 copy of one adapter on the CPU, by the keys of ``adapter_parameters``."""
    parameters = adapter_parameters(transformer, name).items()
    return {
        # always a copy, also if nothing is converted: training changes the parameters later
        key: parameter.detach().to("cpu", torch.float32, copy=True)
        for key, parameter in parameters
    }


@torch.no_grad()
def load_adapter_state(transformer: nn.Module, name: str, state: dict[str, Tensor]) -> None:
    """Copy ``state`` into an adapter in place; raise ValueError if keys or shapes differ."""
    parameters = adapter_parameters(transformer, name)
    if parameters.keys() != state.keys():
        wrong = sorted(parameters.keys() ^ state.keys())
        raise ValueError(
            f"adapter {name!r}: {len(wrong)} keys do not belong to the model, such as"
            f" {wrong[0]!r}: it has other targets or another model"
        )
    for key, parameter in parameters.items():
        if parameter.shape != state[key].shape:
            raise ValueError(
                f"adapter {name!r}: {key} is {tuple(state[key].shape)}, in the model it is"
                f" {tuple(parameter.shape)}"
            )
        parameter.copy_(state[key])


@torch.no_grad()
def blend(transformer: nn.Module, dst: str, src: str, decay: float) -> None:
    """Set theta_dst to decay theta_dst + (1 - decay) theta_src in place.

    The result is exact for decay 0 and 1. Raises ValueError if decay is outside [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay {decay} is outside [0, 1]")
    sources = adapter_parameters(transformer, src)
    for key, parameter in adapter_parameters(transformer, dst).items():
        if decay == 0:
            # a product with 0 would keep NaN in the destination
            parameter.copy_(sources[key])
        else:
            parameter.mul_(decay).add_(sources[key], alpha=1 - decay)


def trainable(transformer: nn.Module, name: str = "current") -> list[tuple[str, nn.Parameter]]:
    """Return (stable key, parameter) pairs of the trained adapter, in module order."""
    return list(adapter_parameters(transformer, name).items())
