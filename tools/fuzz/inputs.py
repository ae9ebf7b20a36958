"""Hypothesis strategies for inputs: words, JSON, and files that are damaged or replaced."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st
from pydantic import BaseModel

from configs.schema import RunConfig

HOSTILE = (
    "", " ", "inf", "-inf", "nan", "1e999", "-1", "0", "1", "0.5", "true", "false", "2", "1e-400",
    "99999999999999999999999", "-9223372036854775809", "1e308", "0x10", "[]", "[1, 2]", "[[]]",
    "{}", "{a = 1}", "{a = {b = []}}", "''", "'x'", "'\\u0000'", "\"\\u202e\"", "'../../x'", "'/'",
    "'" + "a" * 5000 + "'", "1979-05-27", "07:32:00", "[inf]", "[nan, nan]", "None", "null", "\x00",
    "'auto'", "'%s%n'", "{name = 'x'}", "[{}]", "[{name = 1}]", "[{name = 'http'}]", "'\udcff'",
)  # fmt: skip
words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 2**63, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Return every dotted key of a configuration."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += keys(part, f"{prefix}{name}.")
    return found


def spoiled(text: bytes) -> st.SearchStrategy[bytes]:
    """Strategy for ``text`` with pieces removed, duplicated, overwritten or inserted."""
    pieces = st.binary(max_size=12) | st.just(text[:40])
    edit = st.tuples(st.integers(0, len(text)), st.integers(0, 40), pieces)
    return st.lists(edit, min_size=1, max_size=4).map(lambda edits: spliced(text, edits))


def spliced(text: bytes, edits: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Apply edits in order: each (start, length, piece) replaces a range of bytes by the piece."""
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    return text


TOML = b"""layers = ["models/shapes", "rewards/shapes"]
name = "mine"
seed = 3
[explore]
pool_size = 48
solver = "dpmpp_2m"
[optimizer]
lr = 1e-3
betas = [0.9, 0.99]
[[rewards.scorers]]
name = "shapes"
weight = 1.0
settings = { a = [1, 2] }
[services.rollout]
labels = { pool = "two" }
"""


def safetensors_of(header: object, body: bytes, length: int | None) -> bytes:
    """Return a safetensors file; ``length`` replaces the length of the header that it declares."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


tensors = st.dictionaries(
    st.sampled_from(
        ["transformer.a.lora_A.weight", "transformer.a.lora_B.weight", "x", "__metadata__"]
    ),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I64", "F99", "F4"]),
            "shape": st.lists(st.integers(-1, 2**40), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 2**40), min_size=1, max_size=2),
        }
    )
    | json_values,
    max_size=3,
)
safetensors = st.one_of(
    st.builds(
        safetensors_of,
        tensors,
        st.binary(max_size=64),
        st.none() | st.sampled_from([0, 2**63, 100_000_001, 7]),
    ),
    st.binary(max_size=64),
)

lora_tensors = st.dictionaries(
    st.builds(
        "".join,
        st.tuples(
            st.sampled_from(
                [
                    *("transformer.", "diffusion_model.", "lora_unet_", "lora_transformer_", ""),
                    *("base_model.model.", "text_encoder.", "lora_te1_", "lycoris_"),
                ]
            ),
            st.sampled_from(
                [
                    *("transformer_blocks.0.attn.to_q", "blocks.0.self_attn.q", "single_blocks.0"),
                    *("double_blocks_0_img_attn_qkv", "blocks_0_cross_attn_o", "head.head", "a"),
                    *("double_blocks.0.processor.qkv_lora1", "layers.0.attention.qkv"),
                    *("single_blocks_0_linear1", "time_projection.1", "noise_refiner.0", "norm"),
                ]
            ),
            st.sampled_from(
                [
                    *(".lora_A.weight", ".lora_B.weight", ".lora_down.weight", ".lora_up.weight"),
                    *(".down.weight", ".up.weight", ".alpha", ".diff", ".diff_b", ".dora_scale"),
                    *(".lora_A.default.weight", ".lora_B.bias", ".lokr_w1", ".scale", ""),
                ]
            ),
        ),
    ),
    st.lists(st.integers(0, 4), max_size=3),
    max_size=6,
)
"""Strategy for shapes by name, with the names that programs give the matrices of a LoRA."""


def of_files(paths: list[Path], under: Path) -> st.SearchStrategy[tuple[str, bytes]]:
    """Strategy for (name, bytes) of one of the files, damaged or replaced."""
    return st.one_of(
        [
            st.tuples(
                st.just(str(path.relative_to(under))),
                st.one_of(
                    spoiled(path.read_bytes()[:20000]),
                    st.binary(max_size=30),
                    json_values.map(lambda value: json.dumps(value).encode()),
                ),
            )
            for path in paths
        ]
    )
