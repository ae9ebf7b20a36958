"""A pipeline's modules on the meta device, where tensors have shapes but no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from configs.section import Tree
from configs.training import Lora
from policy.families.architectures import build, default_dtype
from policy.families.base import Diffusers, Family
from policy.lora import inject, target_modules
from policy.precision.backends import Backend
from policy.precision.fused import FusedMember
from policy.precision.layer import QuantizedLinear
from policy.precision.swap import ModuleRow, quantize_plan, swap_linears
from records.errors import joined_lines

META = torch.device("meta")


def meta_component(family: Family, part: str, dtype: torch.dtype) -> nn.Module:
    """Return a pipeline component on the meta device, as if loaded in ``dtype``.

    Raises ValueError if its configuration file has settings that its class refuses.
    """
    config = {
        key: value for key, value in family.part_config(part).items() if not key.startswith("_")
    }
    try:
        return _component(family.index[part], config, dtype)
    except Exception as error:  # the libraries have no common class for invalid settings
        raise ValueError(
            f"model.path: the {part!r} of {family.directory!r} cannot be built from its"
            f" config.json ({joined_lines(error)}): download it again"
        ) from error


def _component(kind: Sequence[str], config: Tree, dtype: torch.dtype) -> nn.Module:
    library, name = kind
    if library == "diffusers":
        return as_loaded(
            build({"class": f"diffusers.{name}", "config": config}, META, dtype), dtype
        )
    import transformers

    cls: Any = getattr(transformers, name)
    settings = cls.config_class.from_dict(config)
    settings.dtype = dtype  # some models read it instead of torch's default dtype
    with default_dtype(dtype), META:
        return cls(settings).eval().requires_grad_(False)


def as_loaded(model: Diffusers, dtype: torch.dtype) -> Diffusers:
    """Give a model built from its configuration the dtypes of one loaded in ``dtype``.

    Persistent buffers, such as position tables, are cast like weights, and the weights that the
    model keeps in FP32 stay in FP32. Changes the model in place and returns it.
    """
    for path in model.state_dict().keys() - dict(model.named_parameters()).keys():
        owner, _, leaf = path.rpartition(".")
        buffer = model.get_buffer(path)
        if buffer.is_floating_point():
            model.get_submodule(owner).register_buffer(leaf, buffer.to(dtype))
    for path, parameter in model.named_parameters():
        if not set(path.split(".")).isdisjoint(model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.float()
    return model


def meta_denoiser(family: Family, dtype: torch.dtype) -> nn.Module:
    """Return the denoiser on the meta device, as if loaded in ``dtype``."""
    return family.denoiser(lambda part: meta_component(family, part, dtype))


def text_encoders(family: Family, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return the text encoders of the pipeline on the meta device, by component name."""
    return {
        part: meta_component(family, part, dtype)
        for part in family.components
        if part.startswith("text_encoder")
    }


def meta_explorer(
    family: Family, backend: Backend, modules_to_not_convert: Sequence[str], dtype: torch.dtype
) -> tuple[nn.Module, list[ModuleRow], dict[str, QuantizedLinear | FusedMember]]:
    """Return (transformer, plan, layers) of ``Explorer`` on the meta device, without kernels."""
    transformer = meta_denoiser(family, backend.dtype or dtype)
    plan = quantize_plan(transformer, family, modules_to_not_convert, backend)
    with META:
        layers = swap_linears(transformer, plan, backend, blank=True)
    return transformer, plan, layers


def adapt(transformer: nn.Module, family: Family, lora: Lora) -> int:
    """Add the FP32 adapter "current" to a meta transformer; return its number of parameters."""
    modules = target_modules(transformer, lora.targets or family.lora_targets)
    with META:
        inject(transformer, lora, modules, ("current",))
    count = 0
    for path, module in transformer.named_modules():
        if path.endswith(("lora_A.current", "lora_B.current")):
            module.to(torch.float32)
            for parameter in module.parameters():
                parameter.requires_grad_()
                count += parameter.numel()
    return count
