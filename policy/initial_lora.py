"""A LoRA to start training from, ``lora.init_from``, in any format that diffusers can read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from configs.paths import is_file
from configs.section import Tree
from configs.training import Lora
from policy.lora_files import FILE, METADATA, PREFIX, by_file
from records.errors import first_line

if TYPE_CHECKING:
    from policy.families.base import Family

UP = re.compile(r"\.(lora_up|lora_B(\.\w+)?|up)\.weight$")
"""Names that trainers give the matrix B."""
TEXT_ENCODER = re.compile(r"(text_encoder|lora_te)")
"""Start of the names of text encoders' weights."""


class Product(NamedTuple):
    """LoRA of one module, ``strength`` B A: A [rank, in, ...] and B [out, rank, ...], float32."""

    down: Tensor
    up: Tensor
    strength: float


@dataclass(frozen=True)
class InitialLora:
    """LoRA of one transformer, by module path.

    ``text_encoders`` is the number of adapted layers of text encoders, which are not used.
    """

    products: dict[str, Product]
    text_encoders: int = 0


def read_lora(path: str | Path, family: Family, name: str = FILE) -> InitialLora:
    """Read one transformer's LoRA: ``path`` is a file, or a directory with a file ``name``.

    Its format is any that the family's pipeline reads, such as those of diffusers, kohya's scripts
    and ComfyUI. Raises FileNotFoundError if there is no such file, and ValueError if it cannot be
    read or changes the transformer by anything else than products B A.
    """
    file = Path(path)
    file = file if is_file(file) else file / name
    if not is_file(file):
        raise FileNotFoundError(
            f"lora.init_from: {name} not found in {str(path)!r}: give the directory of a diffusers"
            " LoRA, or a safetensors file"
        )
    try:
        tensors, settings = _read(file)
        state, alphas = _as_diffusers(_only_matrices(tensors), family)
        products = _products(state, alphas, settings)
    # RecursionError: too deeply nested lists in the metadata
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora.init_from: {str(file)!r} {first_line(error)}") from error
    encoders = sum(bool(TEXT_ENCODER.match(key) and UP.search(key)) for key in tensors)
    return InitialLora(products, encoders)


def _read(file: Path) -> tuple[dict[str, Tensor], Tree]:
    """Return (tensors, adapter settings of the transformer from the metadata)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = (opened.metadata() or {}).get(METADATA, "{}")
            tensors = {key: opened.get_tensor(key) for key in list(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"is not a readable safetensors file: {error}") from error
    try:
        settings: object = json.loads(metadata)
    except ValueError as error:
        raise ValueError(f"has {METADATA} that is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"has {METADATA} that is not a JSON object")
    own = {key: value for key, value in settings.items() if str(key).startswith(PREFIX)}
    return tensors, {key.removeprefix(PREFIX): value for key, value in own.items()}


def _only_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without zero changes of biases and norms.

    Raises ValueError for what diffusers would drop or what is not a product B A.
    """
    kept: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if value.is_floating_point() and not value.float().isfinite().all():
            raise ValueError(f"has values that are not finite, in {key!r}")
        for part, kind in (("dora_scale", "a DoRA"), (".lokr_", "a LoKr"), (".hada_", "a LoHa")):
            if part in key:
                raise ValueError(f"is {kind}, not a LoRA: merge it into the model's weights")
        if not key.endswith((".diff", ".diff_b", ".lora_B.bias")):
            kept[key] = value
        elif value.count_nonzero():
            raise ValueError(
                f"also changes a bias or a norm, {key!r}, which is not trained here: merge it into"
                " the model's weights"
            )
    return kept


def _as_diffusers(
    tensors: dict[str, Tensor], family: Family
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (transformer's tensors, alphas) with the names of diffusers, by the stock reader.

    Raises ValueError if the reader fails or reads only a part.
    """
    try:
        result: Any = family.stock.lora_state_dict(dict(tensors), return_alphas=True)
    # the readers index and split names without checks
    except Exception as error:
        raise ValueError(
            f"cannot be read as a LoRA for {family.pipeline_class}: {type(error).__name__}:"
            f" {first_line(error)[:200]}"
        ) from error
    state, alphas = result if isinstance(result, tuple) else (result, None)
    own = {
        key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)
    }
    if not any(UP.search(key) for key in own):
        raise ValueError(f"has no weights of a transformer for {family.pipeline_class}")
    given = _rows({key: value for key, value in tensors.items() if not TEXT_ENCODER.match(key)})
    if (read := _rows(own)) != given:
        raise ValueError(
            f"changes {given} outputs of layers, of which {family.pipeline_class} reads {read}: it"
            " was trained for another model or another program"
        )
    alphas = {key.removeprefix(PREFIX): value for key, value in (alphas or {}).items()}
    return own, alphas


def _rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of rows of all B: readers split matrices by rows, but keep each row."""
    return sum(len(value) for key, value in tensors.items() if UP.search(key) and value.ndim)


def _products(
    state: Mapping[str, Tensor], alphas: Mapping[str, Tensor], settings: Tree
) -> dict[str, Product]:
    """Return the LoRA by module. Raises ValueError for other tensors and incomplete pairs."""
    products: dict[str, Product] = {}
    for key in state:
        module, _, part = key.rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise ValueError(f"has {key!r}, which is not a matrix of a LoRA")
        names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        if set(names) - state.keys():
            raise ValueError(f"has only {key!r} of its pair of matrices")
        down, up = (state[name].float() for name in names)
        if min(down.ndim, up.ndim) < 2 or up.shape[1] != len(down):
            raise ValueError(f"has matrices of {module!r} that cannot be multiplied")
        alpha, rank = alphas.get(f"{module}.alpha"), len(down)
        strength = _strength(module, rank, settings) if alpha is None else float(alpha) / rank
        products[module] = Product(down, up, strength)
    return products


def _strength(module: str, rank: int, settings: Tree) -> float:
    """Return peft's alpha / rank, or alpha / sqrt(rank), from a file's metadata; 1 without one.

    Raises ValueError if alpha is not a number above 0.
    """
    from peft.utils.other import get_pattern_key

    alpha = settings.get("lora_alpha")
    if isinstance(patterns := settings.get("alpha_pattern"), dict):
        alpha = patterns.get(get_pattern_key(list(patterns), module), alpha)
    if alpha is None:
        return 1.0
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ValueError(f"has lora_alpha {str(alpha)[:80]!r}, not a number above 0")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def start_from(state: Mapping[str, Tensor], lora: Lora, family: Family) -> int:
    """Overwrite the initial ``state`` so that every product B A equals that of ``lora.init_from``.

    A LoRA of smaller rank fills the first rows of A and the first columns of B. A different
    alpha / rank is folded into B. ``state`` may be on the meta device, to check without weights.
    Returns the number of adapted layers of text encoders, which are left out. Raises
    FileNotFoundError or ValueError if it is missing or does not fit.
    """
    files = by_file(state)
    if len(files) > 1 and is_file(Path(str(lora.init_from))):
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} is one file, but the model has two transformers:"
            f" give a directory with {' and '.join(files)}"
        )
    encoders = 0
    for file, tensors in files.items():
        initial = read_lora(str(lora.init_from), family, file)
        _require_modules(initial.products, tensors, lora)
        for module, product in initial.products.items():
            _fill(tensors, module, product, lora)
        encoders += initial.text_encoders
    return encoders


def _require_modules(
    products: Mapping[str, Product], state: Mapping[str, Tensor], lora: Lora
) -> None:
    """Raise ValueError unless the LoRA has exactly the modules of ``state``."""
    modules = dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in state)
    targets = sorted({re.sub(r"\.\d+\.", ".*.", module) for module in products})
    hint = f"set lora.targets = {json.dumps(targets)}"
    if unknown := sorted(products.keys() - modules.keys()):
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has {unknown[0]!r}, which is not in lora.targets:"
            f" {hint}"
        )
    if missing := sorted(modules.keys() - products.keys()):
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has nothing for {len(missing)} of {len(modules)}"
            f" adapted modules, such as {missing[0]!r}: {hint}"
        )


def _fill(state: Mapping[str, Tensor], module: str, product: Product, lora: Lora) -> None:
    """Write one module's LoRA to ``state``. Raises ValueError if it does not fit."""
    down, up, strength = product
    rank = len(down)
    a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
    if (
        rank > lora.rank
        or down.shape[1:] != a.shape[1:]
        or up.shape != (b.shape[0], rank, *b.shape[2:])
    ):
        own = f"{up.shape[0]}x{down.shape[1]} of rank {rank}"
        expected = f"{b.shape[0]}x{a.shape[1]} of rank {lora.rank}"
        raise ValueError(
            f"lora.init_from: {module} is {own}, but {expected} is expected: raise lora.rank"
            " or use another LoRA"
        )
    a[:rank] = down
    b[:, :rank] = up * (strength / (lora.alpha / lora.rank))
