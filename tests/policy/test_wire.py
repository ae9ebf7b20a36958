"""Published bytes: they can be packed and unpacked, and damaged bytes are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.precision.manifest import WIRE_DTYPES, Entry, Manifest, WireError
from policy.precision.wire import assemble, unpack_into
from tests.sections import pack_section

SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SPEC = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(WIRE_DTYPES)), SHAPE),
    min_size=1,
    max_size=5,
)


def tensor_of(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    itemsize = WIRE_DTYPES[dtype].itemsize
    rng = np.random.default_rng([*shape, len(name)])
    raw = rng.integers(0, 120, size=(int(np.prod(shape)) * itemsize,), dtype=np.uint8)
    return (
        torch.from_numpy(raw).view(WIRE_DTYPES[dtype]).reshape(shape)
        if raw.size
        else torch.empty(shape, dtype=WIRE_DTYPES[dtype])
    )


def pack_tensors(
    named: dict[str, torch.Tensor], version: int, format: str, shard_bytes: int
) -> tuple[Manifest, list[np.ndarray]]:
    return assemble([pack_section(named, shard_bytes)], version, format)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sample_tensors() -> dict[str, torch.Tensor]:
    return {
        "w.codes": torch.arange(40, dtype=torch.uint8).view(5, 8),
        "w.amax": torch.tensor(2.5),
        "b": torch.arange(6).float(),
    }


def bits_flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor with every bit of its first element flipped."""
    flipped = tensor.clone().view(-1)
    flipped[:1].view(torch.uint8).bitwise_not_()
    return flipped.view(tensor.shape)


def zero_tensors(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in named.items()}


@given(SPEC, st.integers(1, 50))
def test_round_trip_restores_every_bit_in_place(spec, shard_bytes):
    named = {name: tensor_of(name, dtype, shape) for name, (dtype, shape) in spec.items()}
    manifest, shards = pack_tensors(named, 3, "nvfp4", shard_bytes)
    assert (
        sum(shard.nbytes for shard in shards)
        == manifest.nbytes
        == sum(len(bits(t)) for t in named.values())
    )
    assert all(shard.nbytes <= shard_bytes for shard in shards)
    targets = zero_tensors(named)
    pointers = {name: tensor.data_ptr() for name, tensor in targets.items()}
    for shard in shards:
        shard.flags.writeable = False  # as the object store returns them
    unpack_into(manifest, shards, targets)
    for name, tensor in named.items():
        assert bits(targets[name]) == bits(tensor)
        assert targets[name].data_ptr() == pointers[name]


@settings(max_examples=60)
@given(st.integers(0, 67), st.integers(0, 7), st.integers(7, 80))
def test_flipped_bit_is_refused_and_nothing_changes(position, bit, shard_bytes):
    named = sample_tensors()
    manifest, shards = pack_tensors(named, 9, "nvfp4", shard_bytes)
    index, inside = divmod(position, shard_bytes)
    shards[index][inside] ^= 1 << bit
    targets = zero_tensors(named)
    with pytest.raises(WireError, match=f"version 9: shard {index} is damaged"):
        unpack_into(manifest, shards, targets)
    assert all(not tensor.any() for tensor in targets.values())


def test_differences_to_the_manifest_are_named():
    named = sample_tensors()
    manifest, shards = pack_tensors(named, 1, "nvfp4", 32)
    cases = [
        (shards[:-1], zero_tensors(named), "2 shards arrived, but the manifest lists 3"),
        (
            [shards[0][:-1], *shards[1:]],
            zero_tensors(named),
            r"shard 0 is uint8 \[31\], but the manifest lists 32 bytes",
        ),
        ([shards[1], shards[0], shards[2]], zero_tensors(named), "shard 0 is damaged"),
        (shards, zero_tensors(named) | {"c": torch.zeros(2)}, "lacks 'c'"),
        (
            shards,
            {k: v for k, v in zero_tensors(named).items() if k != "b"},
            "has 'b', which is unknown here",
        ),
        (
            shards,
            zero_tensors(named) | {"b": torch.zeros(3, 2)},
            r"b is \[6\], but \[3, 2\] is expected",
        ),
        (
            shards,
            zero_tensors(named) | {"b": torch.zeros(6, dtype=torch.uint8)},
            "b is float32, but torch.uint8 is expected",
        ),
        (shards, zero_tensors(named) | {"b": torch.zeros(12)[::2]}, "b is not contiguous here"),
    ]
    for given_shards, targets, message in cases:
        before = {name: tensor.clone() for name, tensor in targets.items()}
        with pytest.raises(WireError, match=message):
            unpack_into(manifest, given_shards, targets)
        assert all(torch.equal(targets[name], tensor) for name, tensor in before.items())


def test_inconsistent_manifest_is_refused():
    named = sample_tensors()
    manifest, shards = pack_tensors(named, 1, "nvfp4", 32)
    for offset, nbytes in ((60, 24), (-4, 24), (44, 20)):
        entries = (*manifest.entries[:-1], Entry("b", "float32", (6,), offset, nbytes))
        with pytest.raises(
            WireError, match=f"b lies at {offset} . {nbytes} of 68 bytes, but it needs 24"
        ):
            unpack_into(replace(manifest, entries=entries), shards, zero_tensors(named))
    with pytest.raises(WireError, match="contains a name twice"):
        unpack_into(
            replace(manifest, entries=(*manifest.entries, manifest.entries[0])),
            shards,
            zero_tensors(named),
        )
    with pytest.raises(
        WireError, match=r"shard 0 is uint8 \[32\], but the manifest lists 30 bytes"
    ):
        unpack_into(replace(manifest, shard_sizes=(30, 34, 4)), shards, zero_tensors(named))
    with pytest.raises(WireError, match="a shard of 0 bytes"):
        unpack_into(replace(manifest, shard_sizes=(64, 0, 4)), shards, zero_tensors(named))
    with pytest.raises(
        WireError,
        match=(
            "version 1 is nvfp4 in version 0, but 1 is supported here: learner and rollout actors"
            " must run the same"
        ),
    ):
        unpack_into(replace(manifest, format_version=0), shards, zero_tensors(named))


def test_float_tensor_is_converted_to_the_dtype_of_its_target():
    manifest, shards = pack_tensors({"w": torch.tensor([1.0, 1.0 + 2**-9, -3.0])}, 0, "bf16", 64)
    target = torch.zeros(3, dtype=torch.bfloat16)
    pointer = target.data_ptr()
    unpack_into(manifest, shards, {"w": target})
    assert target.tolist() == [1.0, 1.0, -3.0] and target.data_ptr() == pointer


def test_parameters_are_loaded_in_place_without_gradient():
    parameter = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    manifest, shards = pack_tensors({"w": torch.arange(6.0).view(2, 3)}, 0, "fp32", 5)
    unpack_into(manifest, shards, {"w": parameter})
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_checksum_covers_contents_and_version():
    named = sample_tensors()
    checksums = {
        pack_tensors(named, version, "nvfp4", size)[0].checksum
        for version in (1, 2)
        for size in (32, 64)
    }
    assert len(checksums) == 4
    assert pack_tensors(named, 1, "nvfp4", 32)[0].checksum in checksums
    named["b"][0] = 1
    assert pack_tensors(named, 1, "nvfp4", 32)[0].checksum not in checksums


def test_unsupported_tensors_and_formats_are_refused():
    with pytest.raises(ValueError, match="w is torch.int64"):
        pack_tensors({"w": torch.arange(3)}, 0, "fp32", 8)
    with pytest.raises(ValueError, match="shards of 0 bytes"):
        pack_tensors({}, 0, "fp32", 0)
    with pytest.raises(
        ValueError, match="unknown wire format 'fp4': use one of nvfp4, fp8, bf16, fp32"
    ):
        pack_tensors({}, 0, "fp4", 8)
    assert pack_tensors({}, 0, "fp32", 8)[1] == []


CHANGED = st.sets(st.sampled_from(["w.codes", "w.amax", "b"]))


@given(CHANGED, st.integers(1, 80))
def test_changed_shards_are_sufficient(changed, shard_bytes):
    """Wherever shards begin and end, the shards that differ turn the old tensors into the new ones.
    Other tensors are not written. If one of these shards is missing, the update is refused before
    anything is written.
    """
    old = sample_tensors()
    new = {
        name: (bits_flipped(tensor) if name in changed else tensor) for name, tensor in old.items()
    }
    before, first = pack_tensors(old, 4, "nvfp4", shard_bytes)
    manifest, shards = pack_tensors(new, 5, "nvfp4", shard_bytes)
    needed = manifest.changed_since(before)
    assert bool(needed) == bool(changed)
    assert manifest.changed_since(None) == list(range(len(shards)))
    targets = zero_tensors(old)
    unpack_into(before, first, targets)
    for index in needed:
        fewer = [s if i in needed and i != index else None for i, s in enumerate(shards)]
        with pytest.raises(WireError, match=f"shard {index} was not sent, and version 4 is held"):
            unpack_into(manifest, fewer, targets, before)
    assert all(bits(targets[name]) == bits(tensor) for name, tensor in old.items())
    sent = [shard if index in needed else None for index, shard in enumerate(shards)]
    unpack_into(manifest, sent, targets, before)
    assert all(bits(targets[name]) == bits(tensor) for name, tensor in new.items())


def test_converted_tensor_is_never_updated_partially():
    """An element may be split between two shards while its target has fewer bits than the published
    tensor. Its unchanged half must be sent again, because the target no longer contains it.
    """
    old, new = (torch.tensor([1.0, 1.0 + step * 2**-9, 2.0]) for step in (0, 3))
    before, first = pack_tensors({"w": old}, 0, "bf16", 5)
    manifest, shards = pack_tensors({"w": new}, 1, "bf16", 5)
    assert manifest.changed_since(before) == [0, 1, 2]
    target = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    unpack_into(before, first, target)
    unpack_into(manifest, shards, target, before)
    assert torch.equal(target["w"], new.bfloat16())


def test_missing_shards_need_a_loaded_version_with_them():
    named = sample_tensors()
    manifest, shards = pack_tensors(named, 1, "nvfp4", 32)
    part = [None, *shards[1:]]
    with pytest.raises(WireError, match="shard 0 was not sent, and nothing is held here"):
        unpack_into(manifest, part, zero_tensors(named))
    other, _ = pack_tensors(named, 0, "nvfp4", 16)  # the same tensors in other shards
    assert manifest.changed_since(other) == [0, 1, 2]
    with pytest.raises(WireError, match="shard 0 was not sent"):
        unpack_into(manifest, part, zero_tensors(named), other)
