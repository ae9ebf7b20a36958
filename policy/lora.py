"""LoRA adapters (arXiv 2106.09685) of one transformer: W + (alpha / rank) B A.

"current" is trained, "old" is the sampling policy, "ema" is evaluated; the reference is the
transformer with adapters off. Adapter weights are float32 whatever the base weights are. The layers
are peft's (``policy.adapters``); who is active is switched here, because peft's own switches also
rewrite ``requires_grad``, which must stay with "current".
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
from policy.lora_files import start_from

if TYPE_CHECKING:  # peft takes seconds to import, and the driver only wants the names below
    from peft.tuners.lora import LoraLayer

ADAPTERS = ("current", "old", "ema")


def add_adapters(
    transformer: nn.Module,
    lora: Lora,
    family: Family,
    names: Sequence[str] = ADAPTERS,
    seed: int = 0,
) -> None:
    """Wrap the target linears with one adapter per name: A ~ N(0, 1 / rank^2), B = 0, all equal.

    With ``lora.init_from`` all start as that diffusers LoRA instead. The first name is active and
    trainable afterwards. Raises ValueError for a target that matches nothing, FileNotFoundError or
    ValueError for an unusable ``init_from``.
    """
    modules = target_modules(transformer, lora.targets or family.lora_targets)
    inject(transformer, lora, modules, names)
    # on the CPU: the same adapters whatever the transformer is on
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for module, layer in adapted_modules(transformer):
        for part in (layer.lora_A, layer.lora_B):
            for adapter in part.values():
                # peft made them in the type of the base weight
                adapter.to(torch.float32)
        down, up = matrices(layer, names[0])
        # peft's own "gaussian" start; with B = 0 the policy begins as the base model
        state[f"{module}.lora_A.weight"] = torch.randn(down.shape, generator=generator) / lora.rank
        state[f"{module}.lora_B.weight"] = torch.zeros(up.shape)
    if lora.init_from is not None:
        start_from(state, lora)
    for name in names:
        load_adapter_state(transformer, name, state)
    for _, layer in adapted_modules(transformer):
        for name in names:
            layer.lora_A[name].requires_grad_(name == names[0])
            layer.lora_B[name].requires_grad_(name == names[0])
        layer._active_adapter = [names[0]]


def inject(
    transformer: nn.Module, lora: Lora, modules: Sequence[str], names: Sequence[str]
) -> None:
    """Wrap these modules with one adapter per name."""
    from peft import LoraConfig, inject_adapter_in_model

    from policy.adapters import LAYERS

    settings: Tree = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(modules)}
    with warnings.catch_warnings():
        # several adapters are the point
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        for name in names:
            config = LoraConfig(**settings)
            config._register_custom_module(LAYERS)
            inject_adapter_in_model(config, transformer, adapter_name=name)


def target_modules(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Paths of the linears and 1x1 convolutions that end in one of ``targets``, in order.

    A target is the last names of a path, `*` standing for anything. Raises ValueError for one that
    matches nothing, be it the user's or the family's: that layer would not be trained.
    """
    names = [name for name, module in transformer.named_modules() if _is_linear(module)]
    found = {
        target: [n for n in names if fnmatchcase(n, target) or fnmatchcase(n, f"*.{target}")]
        for target in targets
    }
    idle = [target for target, modules in found.items() if not modules]
    if idle:
        known = f"; there are such as {names[len(names) // 2]!r}" if names else ""
        raise ValueError(
            "lora.targets: no linear of the transformer ends in"
            f" {' or '.join(map(repr, idle))}{known}"
        )
    wanted = {name for modules in found.values() for name in modules}
    return [name for name in names if name in wanted]


def _is_linear(module: nn.Module) -> bool:
    pointwise = (
        isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    )
    return isinstance(module, nn.Linear) or pointwise


def adapted_modules(transformer: nn.Module) -> list[tuple[str, LoraLayer]]:
    """(module path, LoRA layer) in the transformer's order."""
    from peft.tuners.lora import LoraLayer

    return [
        (name, module)
        for name, module in transformer.named_modules()
        if isinstance(module, LoraLayer)
    ]


@contextlib.contextmanager
def use(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Within the context the adapter ``name`` is active; None: no adapter, exactly the base model.

    Nests; gradients and ``requires_grad`` are untouched. Raises KeyError for an adapter that does
    not exist.
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
    """Raises KeyError where the ``adapted_modules`` have no adapter of this name."""
    if not modules:
        raise KeyError(
            f"adapter {name!r}: the transformer has no adapters; call add_adapters first"
        )
    there = modules[0][1].lora_A
    if name not in there:
        raise KeyError(f"adapter {name!r} does not exist; there are {', '.join(there)}")


def matrices(layer: LoraLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A [r, in] and B [out, r]."""
    down, up = (part[name].get_parameter("weight") for part in (layer.lora_A, layer.lora_B))
    return down, up


def _parameters(transformer: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Parameters by key: `<module path>.lora_A.weight` [r, in], `.lora_B.weight` [out, r]."""
    modules = adapted_modules(transformer)
    require_adapter(modules, name)
    found = {}
    for module, layer in modules:
        found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"] = matrices(layer, name)
    return found


def adapter_state(transformer: nn.Module, name: str) -> dict[str, Tensor]:
    """A copy of one adapter on the CPU, float32, by the keys of ``_parameters``."""
    parameters = _parameters(transformer, name).items()
    return {
        # a copy also where nothing is converted: training goes on while the caller keeps it
        key: parameter.detach().to("cpu", torch.float32, copy=True)
        for key, parameter in parameters
    }


@torch.no_grad()
def load_adapter_state(transformer: nn.Module, name: str, state: dict[str, Tensor]) -> None:
    """Copy ``state`` into an adapter, in place. Raises ValueError where keys or shapes differ."""
    parameters = _parameters(transformer, name)
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())
        raise ValueError(
            f"adapter {name!r}: {len(odd)} keys are not the model's, such as {odd[0]!r}: other"
            " targets or model"
        )
    for key, parameter in parameters.items():
        if parameter.shape != state[key].shape:
            raise ValueError(
                f"adapter {name!r}: {key} is {tuple(state[key].shape)}, the model's is"
                f" {tuple(parameter.shape)}"
            )
        parameter.copy_(state[key])


@torch.no_grad()
def blend(transformer: nn.Module, dst: str, src: str, decay: float) -> None:
    """theta_dst <- decay theta_dst + (1 - decay) theta_src; exact for decay 0 and 1."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay {decay} is outside [0, 1]")
    sources = _parameters(transformer, src)
    for key, parameter in _parameters(transformer, dst).items():
        if decay == 0:
            # not 0 times what was there, in which NaN would stay
            parameter.copy_(sources[key])
        else:
            parameter.mul_(decay).add_(sources[key], alpha=1 - decay)


def trainable(transformer: nn.Module, name: str = "current") -> list[tuple[str, nn.Parameter]]:
    """(stable key, parameter) of the trained adapter, in the transformer's order."""
    return list(_parameters(transformer, name).items())
