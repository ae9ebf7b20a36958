"""Decoders of proxy images: the model's own autoencoder, or a tiny one for the same latents.

Proxy images only have to be ranked, so they may be decoded more cheaply than images that are
trained on or shown. The latter are always decoded by the model's own autoencoder in FP32.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from configs.paths import is_dir, is_file
from configs.schema import RunConfig
from policy import meta
from policy.families.architectures import build
from policy.families.base import Diffusers, Family
from policy.families.files import HUB_ID
from policy.types import DTYPES
from records.errors import first_line

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
CLASS = "AutoencoderTiny"


def proxy_dtype(config: RunConfig, on_gpu: bool) -> torch.dtype:
    """Return the dtype in which explored images are decoded.

    It is FP32 if the arm trains on the explored images themselves: these are not proxies.
    """
    if not config.plan.regenerate:
        return torch.float32
    precision = config.explore.decoder_precision
    return DTYPES[("bf16" if on_gpu else "fp32") if precision == "auto" else precision]


def load_decoder(
    config: RunConfig, family: Family, device: torch.device, on_host: bool = False
) -> nn.Module:
    """Load the decoder of proxy images in eval mode, without gradients.

    Its precision is that for ``device``. With ``on_host`` it is loaded into host memory first.
    Raises FileNotFoundError if the decoder, or one of its weights, is not on this machine.
    """
    dtype = proxy_dtype(config, device.type == "cuda")
    if on_host:
        device = torch.device("cpu")
    if config.explore.decoder == "full":
        return family.load_vae(device, dtype)
    file = _weights_file(config, family)
    # not ``from_pretrained``, which warns of a setting that diffusers itself writes
    vae = _built(_settings_in(file.parent), dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    if missing := sorted(vae.load_state_dict(weights, strict=False, assign=True).missing_keys):
        raise FileNotFoundError(
            f"explore.decoder: {str(file.parent)!r} lacks {len(missing)} weights, such as"
            f" {missing[0]}: download it again"
        )
    return _configured_for_latents(vae, family).to(device).eval().requires_grad_(False)


def meta_decoder(config: RunConfig, family: Family, dtype: torch.dtype) -> nn.Module:
    """Return the decoder of proxy images on the meta device.

    If a published tiny decoder is not on this machine, use diffusers' defaults, which are the
    configuration of the published ones.
    """
    if config.explore.decoder == "full":
        return meta.meta_component(family, "vae", dtype)
    try:
        settings = _settings_in(_weights_file(config, family).parent)
    except FileNotFoundError:
        settings = {"latent_channels": family.part_config("vae")["latent_channels"]}
    return _configured_for_latents(_built(settings, dtype), family)


def keeps_frames(vae: nn.Module) -> bool:
    """Return True if the autoencoder caches frames between calls.

    Such an autoencoder caches them for single images too. Its decoder is not compiled.
    """
    return hasattr(vae, "clear_cache")


def compiled_decoder(vae: nn.Module) -> nn.Module:
    """Return ``vae`` with a compiled decoder, or ``vae`` itself if it caches frames between calls.

    The result is a shallow copy that shares the weights. The decoder is compiled as one graph,
    because its operations between blocks, at the size of the image, cost as much as the blocks.
    Compilation happens in the first call, which belongs in ``compile_failures``.
    """
    if keeps_frames(vae):
        return vae
    twin = copy.copy(vae)
    twin._modules = dict(vae._modules)
    decoder: nn.Module = vae.get_submodule("decoder")
    twin._modules["decoder"] = cast("nn.Module", torch.compile(decoder, dynamic=False))
    return twin


def decoder_on(device: torch.device, vae: nn.Module, compile: bool) -> nn.Module:
    """Return the decoder to use on ``device``, compiled if ``compile`` is set and it is a GPU.

    On a CPU the denoiser takes nearly all of the time, and compiling a decoder takes a minute.
    """
    return compiled_decoder(vae) if compile and device.type == "cuda" else vae


def check_decoder(config: RunConfig, family: Family) -> None:
    """Raise an error if the configured tiny decoder cannot decode this model's latents.

    Reads no weights. Raises FileNotFoundError if the decoder is missing, and ValueError if it was
    made for other latents, or if the model generates video or latents that no tiny decoder decodes.
    The message is one line.
    """
    if config.plan.explore is None or config.explore.decoder == "full":
        return
    directory = _weights_file(config, family).parent
    try:
        blank = meta_decoder(config, family, torch.float32)
        latents = torch.empty(1, *family.latent_shape, device=meta.META)
        vae: Diffusers = blank
        size = vae.decode(family.unscale(vae, latents), return_dict=False)[0].shape
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} does not accept this model's latents:"
            f" {first_line(error)}"
        ) from None
    expected = (1, 3, family.model.height, family.model.width)
    if tuple(size) != expected:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} makes images of {size[-1]}x{size[-2]}"
            f" pixels from this model's latents, not {expected[-1]}x{expected[-2]}: it belongs to"
            " another model"
        )


def _settings_in(directory: Path) -> dict[str, Any]:
    """Return the settings of the tiny decoder in ``directory``."""
    settings = json.loads((directory / CONFIG).read_text())
    return {
        key: value
        for key, value in settings.items()
        if not key.startswith("_") and key != "block_out_channels"  # written, but never read
    }


def _built(settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return a tiny decoder on the meta device."""
    return build({"class": f"diffusers.{CLASS}", "config": settings}, meta.META, dtype)


def _configured_for_latents(vae: Diffusers, family: Family) -> nn.Module:
    """Make a tiny decoder take the denoiser's latents unscaled, whatever its configuration says."""
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    if family.model.vae_slicing:
        vae.enable_slicing()
    return vae


def _weights_file(config: RunConfig, family: Family) -> Path:
    """Return the weights file of the tiny decoder: in its directory, or in the hub's cache.

    Raises FileNotFoundError if a file is missing on this machine, and ValueError if no tiny decoder
    decodes latents of this family, none is known, or the directory contains another class of model.
    """
    if family.video:
        raise ValueError("explore.decoder: 'tiny' does not decode clips: use 'full'")
    if family.own_statistics:
        raise ValueError(
            f"explore.decoder: no {CLASS} decodes latents of family {family.name!r}, which are"
            " normalized by statistics of its own autoencoder: use 'full'"
        )
    name = config.explore.decoder_path or family.tiny_decoder
    if name is None:
        raise ValueError(
            f"explore.decoder: no default tiny decoder of family {family.name!r} is known: give"
            " explore.decoder_path, or use 'full'"
        )
    directory = Path(name).expanduser()
    if not is_dir(directory) and HUB_ID.fullmatch(name):
        directory = _cached(name)
    for file in (CONFIG, WEIGHTS):
        if not is_file(directory / file):
            raise FileNotFoundError(
                f"explore.decoder_path: {file} not found in {str(directory)!r}: give the directory"
                f" of an {CLASS} with its weights as safetensors"
            )
    try:
        class_name = json.loads((directory / CONFIG).read_text())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"explore.decoder_path: {CONFIG} of {str(directory)!r} cannot be read"
            f" ({type(error).__name__})"
        ) from None
    if class_name != CLASS:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} contains a {class_name}, but a tiny decoder"
            f" must be an {CLASS}"
        )
    return directory / WEIGHTS


def _cached(repository: str) -> Path:
    """Return the directory in the hub's cache with both files of ``repository``.

    Raises FileNotFoundError if one of them is not cached.
    """
    from huggingface_hub import try_to_load_from_cache

    config, weights = (try_to_load_from_cache(repository, file) for file in (CONFIG, WEIGHTS))
    if not isinstance(config, str) or not isinstance(weights, str):
        raise FileNotFoundError(
            f"explore.decoder: {repository!r} is not in this machine's cache: run `hf download"
            f" {repository}` on every machine that explores, or give explore.decoder_path"
        )
    return Path(weights).parent
