"""What decodes proxy images: the model's own autoencoder, or a tiny one of the same latents.

Proxy images only have to be ranked, so they may be decoded more cheaply than images that are
trained on or shown, which the model's own autoencoder always decodes in FP32.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

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
    """The precision that proxy images are decoded in. Explored images that are trained on
    themselves are no proxies: FP32.
    """
    if not config.plan.regenerate:
        return torch.float32
    wanted = config.explore.decoder_precision
    return DTYPES[("bf16" if on_gpu else "fp32") if wanted == "auto" else wanted]


def load_decoder(
    config: RunConfig, family: Family, device: torch.device, on_host: bool = False
) -> nn.Module:
    """The decoder of proxy images, in eval mode, without gradients, in the precision for
    ``device``; ``on_host``: it lies in host memory at first. Raises FileNotFoundError.
    """
    dtype = proxy_dtype(config, device.type == "cuda")
    if on_host:
        device = torch.device("cpu")
    if config.explore.decoder == "full":
        return family.load_vae(device, dtype)
    from diffusers import AutoencoderTiny

    folder = _files(config, family).parent
    read: Any = AutoencoderTiny.from_pretrained
    vae, found = read(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    if absent := sorted(found["missing_keys"]):
        raise FileNotFoundError(
            f"explore.decoder: {str(folder)!r} lacks {len(absent)} weights, the first:"
            f" {absent[0]}: download it again"
        )
    return _of_latents(vae, family).to(device).eval().requires_grad_(False)


def blank_decoder(config: RunConfig, family: Family, dtype: torch.dtype) -> nn.Module:
    """The same on the meta device; of a published tiny decoder that is not here, diffusers' own
    defaults, which are those of the published ones.
    """
    if config.explore.decoder == "full":
        return meta.blank(family, "vae", dtype)
    try:
        described = json.loads((_files(config, family).parent / CONFIG).read_text())
    except FileNotFoundError:
        described = {"latent_channels": family.part_config("vae")["latent_channels"]}
    described = {
        key: value
        for key, value in described.items()
        if not key.startswith("_") and key != "block_out_channels"  # written, but never read
    }
    vae = build({"class": f"diffusers.{CLASS}", "config": described}, meta.META, dtype)
    return _of_latents(vae, family)


def keeps_frames(vae: nn.Module) -> bool:
    """Whether it keeps frames from call to call, also of an image: its decoder stays eager."""
    return hasattr(vae, "clear_cache")


def compiled_decoder(vae: nn.Module) -> nn.Module:
    """``vae`` with a compiled decoder; itself where it keeps frames from call to call.

    Only the autoencoder itself is a copy, without weights. The decoder is one graph: what it does
    between its blocks, at the size of the image, is as much as what they do. Nothing is compiled
    before the first call, which belongs in ``compile_failures``.
    """
    if keeps_frames(vae):
        return vae
    twin = copy.copy(vae)
    twin._modules = dict(vae._modules)
    decoder: nn.Module = vae.get_submodule("decoder")
    twin._modules["decoder"] = cast("nn.Module", torch.compile(decoder, dynamic=False))
    return twin


def decoder_on(device: torch.device, vae: nn.Module, compile: bool) -> nn.Module:
    """What decodes on ``device``: with ``compile`` a compiled one on GPUs. On a CPU the denoiser
    takes nearly all of the time, and compiling a decoder a minute.
    """
    return compiled_decoder(vae) if compile and device.type == "cuda" else vae


def check_decoder(config: RunConfig, family: Family) -> None:
    """Raises FileNotFoundError or ValueError, one line, for a tiny decoder that is missing or made
    for other latents. Reads no weights.
    """
    if config.plan.explore is None or config.explore.decoder == "full":
        return
    if family.video:
        raise ValueError("explore.decoder: 'tiny' decodes images, not clips: use 'full'")
    directory = _files(config, family).parent
    try:
        blank = blank_decoder(config, family, torch.float32)
        latents = torch.empty(1, *family.latent_shape, device=meta.META)
        vae: Diffusers = blank
        made = vae.decode(family.unscale(vae, latents), return_dict=False)[0].shape
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} does not take this model's latents:"
            f" {first_line(error)}"
        ) from None
    wanted = (1, 3, family.model.height, family.model.width)
    if tuple(made) != wanted:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} makes images of {made[-1]}x{made[-2]} pixels"
            f" of this model's latents, not {wanted[-1]}x{wanted[-2]}: it is another model's"
        )


def _of_latents(vae: Diffusers, family: Family) -> nn.Module:
    """Tiny decoders take latents as the denoiser makes them, whatever their configuration says."""
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    if family.model.vae_slicing:
        vae.enable_slicing()
    return vae


def _files(config: RunConfig, family: Family) -> Path:
    """The weights of the tiny decoder on this machine: a directory's, or a hub id's in the cache.

    Raises FileNotFoundError where they are not, ValueError for another kind of model.
    """
    name = config.explore.decoder_path or family.tiny_decoder
    if name is None:
        raise ValueError(
            f"explore.decoder: no tiny decoder of family {family.name!r} is known: give"
            " explore.decoder_path, or use 'full'"
        )
    directory = Path(name).expanduser()
    if not directory.is_dir() and HUB_ID.fullmatch(name):
        directory = _cached(name)
    for file in (CONFIG, WEIGHTS):
        if not (directory / file).is_file():
            raise FileNotFoundError(
                f"explore.decoder_path: there is no {file} in {str(directory)!r}: give the"
                f" directory of an {CLASS} with its weights as safetensors"
            )
    try:
        found = json.loads((directory / CONFIG).read_text())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"explore.decoder_path: {CONFIG} of {str(directory)!r} cannot be read"
            f" ({type(error).__name__})"
        ) from None
    if found != CLASS:
        raise ValueError(
            f"explore.decoder_path: {str(directory)!r} holds a {found}, a tiny decoder is an"
            f" {CLASS}"
        )
    return directory / WEIGHTS


def _cached(repository: str) -> Path:
    """Where the hub's cache keeps both files of ``repository``. Raises FileNotFoundError."""
    from huggingface_hub import try_to_load_from_cache

    config, weights = (try_to_load_from_cache(repository, file) for file in (CONFIG, WEIGHTS))
    if not isinstance(config, str) or not isinstance(weights, str):
        raise FileNotFoundError(
            f"explore.decoder: {repository!r} is not in this machine's cache: run `hf download"
            f" {repository}` on every machine that explores, or give explore.decoder_path"
        )
    return Path(weights).parent
