"""LoRA adapters (arXiv 2106.09685) of one transformer: W + (alpha / rank) B A.

"current" is trained, "old" is the sampling policy, "ema" is evaluated; the reference is the
transformer with adapters off. Adapter weights are float32 whatever the base weights are. The layers
are peft's; who is active is switched here, because peft's own switches also rewrite
``requires_grad``, which must stay with "current".
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.section import Tree
from configs.sections import Lora
from policy.families.base import Family
from records import atomic

if TYPE_CHECKING:  # peft takes seconds to import, and the driver only wants the names below
    from peft.tuners.lora import LoraLayer

ADAPTERS = ("current", "old", "ema")
ENDING = ".safetensors"
FILE = f"pytorch_lora_weights{ENDING}"
METADATA = "lora_adapter_metadata"
PREFIX = "transformer."


def adapter_file(name: str) -> str:
    """What a checkpoint calls the file of an adapter, without ``ENDING``."""
    return "adapter" if name == "current" else name


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
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for module, layer in adapted_modules(transformer):
        for part in (layer.lora_A, layer.lora_B):
            for adapter in part.values():
                adapter.to(torch.float32)
        down, up = _matrices(layer, names[0])
        state[f"{module}.lora_A.weight"] = torch.randn(down.shape, generator=generator) / lora.rank
        state[f"{module}.lora_B.weight"] = torch.zeros(up.shape)
    if lora.init_from is not None:
        _start_from(state, lora)
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
    """Wrap these modules with one of peft's adapters per name."""
    from peft import LoraConfig, inject_adapter_in_model

    settings: Tree = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(modules)}
    with warnings.catch_warnings():
        # several adapters are the point
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        for name in names:
            inject_adapter_in_model(LoraConfig(**settings), transformer, adapter_name=name)


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
    layers = [layer for _, layer in adapted_modules(transformer)]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    if name is not None:
        _check_name(layers, name)
    for layer in layers:
        layer._disable_adapters = name is None
        if name is not None:
            layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def _check_name(layers: Sequence[LoraLayer], name: str) -> None:
    if not layers:
        raise KeyError(
            f"adapter {name!r}: the transformer has no adapters; call add_adapters first"
        )
    if name not in layers[0].lora_A:
        raise KeyError(f"adapter {name!r} does not exist; there are {', '.join(layers[0].lora_A)}")


def _matrices(layer: LoraLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A [r, in] and B [out, r]."""
    down, up = (part[name].get_parameter("weight") for part in (layer.lora_A, layer.lora_B))
    return down, up


def _parameters(transformer: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Parameters by key: `<module path>.lora_A.weight` [r, in], `.lora_B.weight` [out, r]."""
    modules = adapted_modules(transformer)
    _check_name([layer for _, layer in modules], name)
    found = {}
    for module, layer in modules:
        found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"] = _matrices(layer, name)
    return found


def adapter_state(transformer: nn.Module, name: str) -> dict[str, Tensor]:
    """A copy of one adapter on the CPU, float32, by the keys of ``_parameters``."""
    parameters = _parameters(transformer, name).items()
    return {
        key: parameter.detach().to("cpu", torch.float32, copy=True) for key, parameter in parameters
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
        (
            parameter.copy_(sources[key])
            if decay == 0
            else parameter.mul_(decay).add_(sources[key], alpha=1 - decay)
        )


def trainable(transformer: nn.Module, name: str = "current") -> list[tuple[str, nn.Parameter]]:
    """(stable key, parameter) of the trained adapter, in the transformer's order."""
    return list(_parameters(transformer, name).items())


@torch.no_grad()
def delta_weight(layer: LoraLayer, name: str) -> Tensor:
    """(alpha / rank) B A of one adapted module: float32 [out, in], for a 1x1 convolution too."""
    down, up = _matrices(layer, name)
    return (up.flatten(1) @ down.flatten(1)) * layer.scaling[name]


@torch.no_grad()
def merged_weights(transformer: nn.Module, name: str | None) -> Iterator[tuple[str, Tensor]]:
    """(module path, merged weight float32 [out, in]) of each adapted module; None gives W."""
    modules = adapted_modules(transformer)
    if name is not None:
        _check_name([layer for _, layer in modules], name)
    for module, layer in modules:
        weight = layer.get_base_layer().get_parameter("weight").float()
        yield (
            module,
            (
                weight.clone()
                if name is None
                else weight + delta_weight(layer, name).view_as(weight)
            ),
        )


def save_diffusers_lora(path: str | Path, state: dict[str, Tensor], lora: Lora) -> Path:
    """Write the directory that stock ``pipe.load_lora_weights(path)`` loads, with rank and alpha.

    The file is written under another name and renamed, so that it is whole or absent. Returns its
    path.
    """
    from safetensors.torch import save_file

    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    if not modules:
        raise ValueError("an adapter without weights cannot be saved")
    config = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    metadata = {
        "format": "pt",
        METADATA: json.dumps(
            {PREFIX + key: value for key, value in config.items()}, sort_keys=True
        ),
    }
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + key: value.float().contiguous() for key, value in state.items()}
    with atomic.replacing(directory / FILE) as beside:
        save_file(tensors, beside, metadata=metadata)
    return directory / FILE


def load_diffusers_lora(path: str | Path) -> tuple[dict[str, Tensor], float | None]:
    """(the transformer's LoRA tensors, alpha or None) of a diffusers LoRA directory."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    file = file if file.is_file() else file / FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.init_from: there is no {FILE} in {str(path)!r}: give the directory of a"
            " diffusers LoRA"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            ours = [key for key in list(opened.keys()) if key.startswith(PREFIX)]
            state = {key.removeprefix(PREFIX): opened.get_tensor(key) for key in ours}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(
            f"lora.init_from: {str(file)!r} is not a readable safetensors file: {error}"
        ) from error
    if not state:
        raise ValueError(f"lora.init_from: {str(file)!r} has no weights that start with {PREFIX!r}")
    return state, metadata.get(PREFIX + "lora_alpha")


def _start_from(state: dict[str, Tensor], lora: Lora) -> None:
    """Overwrite the initial ``state`` so that every product B A is that of ``lora.init_from``.

    A smaller rank fills the first rows of A and columns of B; a different alpha / rank is folded
    into B.
    """
    given, alpha = load_diffusers_lora(str(lora.init_from))
    unknown = sorted(given.keys() - state.keys())
    if unknown:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has {unknown[0]!r}, which is in no module of"
            " lora.targets: add it there"
        )
    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    there = {key.rsplit(".lora_", 1)[0] for key in given}
    if missing := [module for module in modules if module not in there]:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has nothing for {len(missing)} of"
            f" {len(modules)} adapted modules, such as {missing[0]!r}: name in lora.targets those"
            " that it has"
        )
    for key, value in given.items():
        module, part = key.rsplit(".lora_", 1)
        if {f"{module}.lora_A.weight", f"{module}.lora_B.weight"} - given.keys():
            raise ValueError(
                f"lora.init_from: {lora.init_from!r} has only {key!r} of its pair of matrices"
            )
        if part != "A.weight":
            continue
        down, up = value.float(), given[f"{module}.lora_B.weight"].float()
        rank, a, b = len(down), state[key], state[f"{module}.lora_B.weight"]
        if (
            rank > lora.rank
            or down.shape[1:] != a.shape[1:]
            or up.shape != (b.shape[0], rank, *b.shape[2:])
        ):
            found, wanted = (
                f"{up.shape[0]}x{down.shape[1]} of rank {rank}",
                f"{b.shape[0]}x{a.shape[1]} of rank {lora.rank}",
            )
            raise ValueError(
                f"lora.init_from: {module} is {found}, here it is {wanted}: raise lora.rank or use"
                " another LoRA"
            )
        a[:rank] = down
        b[:, :rank] = up * (((alpha or rank) / rank) / (lora.alpha / lora.rank))
