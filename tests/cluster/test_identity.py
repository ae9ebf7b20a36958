"""The policy identity check.

Invariants: correct actors agree bit for bit, and the check changes no bit of the run; an actor that
acknowledges weights but computes with others ends the run, as its own images show. Checksums cannot
detect these faults: all bytes arrive, verified and acknowledged.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import tests.cluster.local as local
from actors.messages import WeightsId
from actors.rollout import RolloutActor
from learner.distance import relative_distance
from learner.identity import bare_copy
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.local import play
from tests.cluster.runs import run_here, tiny_config
from tests.learner.tiny import tiny_trainer
from tests.tiny_families import SETTINGS

slow = pytest.mark.slow


class Faulty(RolloutActor):
    """A rollout actor that fails at every load from the second on, when it holds older weights."""

    loads = 0

    def load(self, backend: str | None, manifest: Any, sent: Any, *shards: Any) -> Any:
        self.loads += 1
        if self.loads == 1:
            return self.first(super().load(backend, manifest, sent, *shards))
        return self.later(backend, manifest, sent, shards)

    def first(self, acknowledged: Any) -> Any:
        return acknowledged

    def later(self, backend: str | None, manifest: Any, sent: Any, shards: Any) -> Any:
        acknowledged = RolloutActor.load(self, backend, manifest, sent, *shards)
        self.fail()
        return acknowledged

    def fail(self) -> None: ...

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Packed codes of the quantized layers, in order."""
        layers = self._explorer._layers.values()
        return [layer.wire_targets()["codes"] for layer in layers]


class OldBuffer(Faulty):
    """Copies everything into memory that is not used for computing."""

    def first(self, acknowledged: Any) -> Any:
        explorer = self._explorer
        explorer._denoiser = copy.deepcopy(explorer.transformer)  # as a captured graph would
        return acknowledged


class OneLayerNotCopied(Faulty):
    def first(self, acknowledged: Any) -> Any:
        self.kept = self.layer().clone()
        return acknowledged

    def layer(self) -> torch.Tensor:
        return dict(self._explorer.transformer.named_buffers())[
            "transformer_blocks.0.attn.to_out.0.codes"
        ]

    def fail(self) -> None:
        self.layer().copy_(self.kept)


class OneTensorSwapped(Faulty):
    def fail(self) -> None:
        first = self.buffers[0]
        other = next(b for b in self.buffers[1:] if b.shape == first.shape)
        first.copy_(other)


class OneVersionBehind(Faulty):
    """Copies the version before, and reports the new one."""

    def first(self, acknowledged: Any) -> Any:
        self.kept = [tensor.clone() for tensor in self._explorer.transformer.buffers()]
        return acknowledged

    def fail(self) -> None:
        for tensor, old in zip(self._explorer.transformer.buffers(), self.kept, strict=True):
            tensor.copy_(old)


class NothingCopied(Faulty):
    """Acknowledges what it was sent, and ignores it."""

    def later(self, backend: str | None, manifest: Any, sent: Any, shards: Any) -> Any:
        self._explorer._loaded = manifest
        return WeightsId(manifest.version, manifest.checksum, backend)


def config_of(model: Any, root: Any, **changes: Any) -> Any:
    every = {"audit__identity_every": 1, "lora__alpha": 64, "explore__chunk_size": 8}
    return tiny_config(model, root, "identity", **{**every, **changes})


@pytest.fixture(scope="module")
def plain(tiny_sd3_dir, tmp_path_factory):
    """Run two iterations without the check."""
    root = tmp_path_factory.mktemp("plain")
    return play(config_of(tiny_sd3_dir, root, audit__identity_every=0), root, stop=2)


def test_correct_actors_agree_bit_for_bit_and_the_check_changes_nothing(
    plain, tiny_sd3_dir, tmp_path
):
    checked = play(config_of(tiny_sd3_dir, tmp_path), tmp_path, explorers=2, stop=2)
    assert [row["audit/identity_error"] for row in checked.rows.values()] == [0.0, 0.0]
    assert checked.files() == plain.files() and checked.chosen == plain.chosen
    recorded = [e for e in checked.events if e["event"] == "identity_checked"]
    assert sorted((e["version"], e["actor"]) for e in recorded) == [
        (version, actor) for version in (0, 1, 2) for actor in (0, 1)
    ]
    assert "audit/identity_error" not in plain.rows[0]


def test_versions_between_are_not_checked(tiny_sd3_dir, tmp_path):
    config = config_of(tiny_sd3_dir, tmp_path, audit__identity_every=2)
    played = play(config, tmp_path, stop=2)
    recorded = [e["version"] for e in played.events if e["event"] == "identity_checked"]
    assert recorded == [0, 2]


@pytest.mark.parametrize(
    ("fault", "ahead"),
    [
        (OldBuffer, 0),
        (OneLayerNotCopied, 0),
        pytest.param(OneTensorSwapped, 0, marks=slow),
        pytest.param(OneVersionBehind, 0, marks=slow),
        (NothingCopied, 0),
        (OldBuffer, 1),
    ],
)
def test_an_actor_with_wrong_weights_ends_the_run(
    fault, ahead, tiny_sd3_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(local, "RolloutActor", fault)
    config = config_of(tiny_sd3_dir, tmp_path, explore_ahead=ahead)
    with pytest.raises(
        RunFailed,
        match=r"policy identity: rollout actor 0 on .* acknowledged version 1 but does not compute"
        r" with it: its latents differ from the learner's by .*, allowed is 0;",
    ):
        play(config, tmp_path, stop=3)


def test_with_identity_action_warn_the_run_continues_with_a_warning(
    tiny_sd3_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(local, "RolloutActor", OldBuffer)
    config = config_of(tiny_sd3_dir, tmp_path, audit__identity_action="warn")
    played = play(config, tmp_path, stop=2)
    assert played.rows[0]["audit/identity_error"] > 1e-3
    assert [e["version"] for e in played.events if e["event"] == "identity_failed"] == [1, 2]


def test_a_compiling_learner_also_computes_the_reference(plain, tiny_sd3_dir, tmp_path, graphs):
    """It computes them from its own weights without adapters, eagerly.

    Nothing is fused in the graphs here, so that the run has the bits of an eager one.
    """
    played = play(config_of(tiny_sd3_dir, tmp_path, regenerate__compile=True), tmp_path, stop=2)
    assert [row["audit/identity_error"] for row in played.rows.values()] == [0.0, 0.0]
    assert played.files() == plain.files() and graphs


def test_compiled_rollout_actors_are_checked_eagerly_and_compiled(
    plain, tiny_sd3_dir, tmp_path, graphs
):
    """Nothing is fused in the graphs here, so that both have the bits of the learner."""
    played = play(config_of(tiny_sd3_dir, tmp_path, explore__compile=True), tmp_path, stop=2)
    recorded = [e for e in played.events if e["event"] == "identity_checked"]
    assert [(e["error"], e["bound"]) for e in recorded] == [(0.0, 0.0)] * 3
    assert all(0 <= e["compiled_error"] < e["compiled_bound"] < 0.1 for e in recorded)
    assert played.files() == plain.files() and graphs


@pytest.mark.parametrize(
    ("fault", "allowed"), [(OneLayerNotCopied, r"0;"), (OldBuffer, r"\d\S*[1-9]\S*;")]
)
def test_compiled_actors_match_weights_exactly_and_graphs_up_to_rounding(
    fault, allowed, tiny_sd3_dir, tmp_path, graphs, monkeypatch
):
    monkeypatch.setattr(local, "RolloutActor", fault)
    config = config_of(tiny_sd3_dir, tmp_path, explore__compile=True)
    with pytest.raises(RunFailed, match=rf"differ from the learner's by .*, allowed is {allowed}"):
        play(config, tmp_path, stop=3)


@pytest.mark.parametrize("backend", ["fp8", "bf16", pytest.param("fp32", marks=slow)])
def test_every_backend_on_this_machine_agrees(backend, tiny_sd3_dir, tmp_path):
    precision = "bf16" if backend == "bf16" else "fp32"
    config = config_of(
        tiny_sd3_dir, tmp_path, explore__backend=backend, regenerate__precision=precision
    )
    played = play(config, tmp_path, stop=1)
    assert played.rows[0]["audit/identity_error"] == 0.0


@pytest.mark.parametrize("family", ["sd3", pytest.param("wan", marks=slow)])
def test_rollout_actors_of_another_dtype_than_the_learner_agree(family, request, tmp_path):
    """SD3's embedding of positions is a buffer, which is loaded in BF16 too; Wan keeps some layers
    in FP32 in any model. Converting the learner's FP32 weights got both wrong.
    """
    directory = request.getfixturevalue(f"tiny_{family}_dir")
    config = config_of(
        directory,
        tmp_path,
        model__family=family,
        **{f"model__{key}": value for key, value in SETTINGS[family].items()},
        explore__backend="bf16",
        regenerate__precision="fp32",
    )
    played = play(config, tmp_path, stop=1)
    assert played.rows[0]["audit/identity_error"] == 0.0


def test_another_kind_of_device_may_differ_only_by_rounding(tiny_sd3_dir, tmp_path, monkeypatch):
    """The limit lies between the effect of rounding and that of another version of the weights."""
    seen: list[Any] = []

    class Elsewhere(RolloutActor):
        def probe(self, request: Any, conditioning: Any) -> Any:
            answer = super().probe(request, conditioning)
            moved = answer.latents * np.float32(1 + 2**-22)
            seen.append((answer.latents, moved))
            return type(answer)(moved, "another kind")

    monkeypatch.setattr(local, "RolloutActor", Elsewhere)
    played = play(config_of(tiny_sd3_dir, tmp_path), tmp_path, stop=2)
    recorded = [e for e in played.events if e["event"] == "identity_checked"]
    assert all(0 < e["error"] <= e["bound"] for e in recorded)
    assert all(
        e["error"] == pytest.approx(relative_distance(b, a))
        for e, (a, b) in zip(recorded, seen, strict=True)
    )


def test_the_bare_copy_shares_memory_and_does_not_change_the_learner(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir)
    held = trainer.transformer.state_dict(keep_vars=True)
    before = {key: (id(tensor), tensor.clone()) for key, tensor in held.items()}
    twin = bare_copy(trainer.transformer)
    assert not any("lora" in name for name, _ in twin.named_parameters())
    pointers = {p.data_ptr() for p in trainer.transformer.parameters()}
    assert all(p.data_ptr() in pointers for p in twin.parameters())
    after = trainer.transformer.state_dict(keep_vars=True)
    assert all(id(after[k]) == i and torch.equal(after[k], v) for k, (i, v) in before.items())


def test_relative_distance_of_known_latents():
    a = np.array([3.0, 4.0], np.float32)
    assert relative_distance(a, a) == 0.0
    assert relative_distance(np.array([3.0, 4.5], np.float32), a) == pytest.approx(0.1)
    assert relative_distance(np.array([np.nan, 4.0], np.float32), a) == float("inf")
    assert relative_distance(a, np.zeros(2, np.float32)) == float("inf")
    assert relative_distance(a[:1], a) == float("inf")


@pytest.mark.slow
def test_real_rollout_actors_with_old_weights_end_the_run(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    """Rollout actors on Ray use an old buffer: the run ends before the new version explores
    anything.
    """
    monkeypatch.setattr("cluster.driver.services.RolloutActor", OldBuffer)
    config = config_of(tiny_sd3_dir, tmp_path)
    with pytest.raises(RunFailed, match=r"policy identity: rollout actor \d on .* version 1 but"):
        run_here(config)
    events = RunDirectory.of(config).events()
    names = [event["event"] for event in events]
    assert names.count("identity_checked") == 2 and "identity_failed" in names
    assert "policy identity" in next(e["why"] for e in events if e["event"] == "run_failed")
    assert not any(row["kind"] == "iteration" for row in RunDirectory.of(config).metrics())
