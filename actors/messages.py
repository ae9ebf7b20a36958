"""The messages between processes, and the answers that clients return.

Walk of one chunk: the driver sends an ``ExploreChunk`` to a rollout actor and gets references to
its images and samples (``Explored``), hands the image reference to a reward actor, gets ``Scores``,
and when all of a prompt's chunks are scored asks the selector for a ``Chosen``. Images, samples and
weights travel by reference, from the actor that made them to the one that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # neither: the selector answers in messages, and starts without torch
    from ray import ObjectRef

    from policy.precision.manifest import Manifest
    from policy.types import Conditioning

Images: TypeAlias = NDArray[np.uint8]  # [B, 3, H, W], or clips: [B, F, 3, H, W]
Floats: TypeAlias = NDArray[np.float32]
Shard: TypeAlias = NDArray[np.uint8]  # [bytes], a piece of packed weights
Metadata: TypeAlias = dict[str, object]  # of a prompt: all that its line has beside the text
Samples: TypeAlias = dict[str, np.ndarray]
"""Arrays with one row per sample: "latents" float32 [B, *latent], and what else the learner records
for its objective. Nobody between its maker and the learner looks in.
"""


@dataclass(frozen=True)
class ActorInfo:
    """What an actor says of itself once its models are loaded. None: not said by its kind."""

    pid: int
    host: str
    node: str | None = None  # Ray's node id
    backend: str | None = None  # precision that it explores in
    why: str | None = None  # why in that one
    runs: tuple[str, ...] = ()  # every precision that it could explore in
    cold: bool | None = None  # whether its first task takes longer, because it compiles
    trainable: int | None = None  # parameters
    device: str | None = None  # as CUDA calls it, or "cpu"
    capability: str | None = None  # CUDA's compute capability, such as "9.0"
    torch: str | None = None  # versions, as are the next two
    cuda: str | None = None  # that torch was built for
    driver: str | None = None
    gpu: str | None = None  # CUDA's UUID of the one that it is on
    allocator: str | None = None  # what hands out its host memory: "jemalloc", "glibc 2.36"

    def event_fields(self) -> dict[str, str | int]:
        """The fields of its ``actor_started`` event."""
        told = ((part.name, getattr(self, part.name)) for part in fields(self))
        return {name: value for name, value in told if isinstance(value, str | int)}


@dataclass(frozen=True, order=True)
class ChunkKey:
    """Names a task of exploration. Same key, same result, on any actor and however often."""

    iteration: int
    prompt: int  # position within the iteration, 0 .. prompts.per_iteration - 1
    chunk: int  # position within the prompt's seeds
    version: int  # policy version that must compute it


@dataclass(frozen=True)
class ExploreChunk:
    """Generate one image per seed with the rollout actor's current weights."""

    key: ChunkKey
    seeds: tuple[int, ...]  # [B] 64-bit, one initial noise each
    steps: int
    solver: str
    return_latents: bool  # True where the explored samples themselves are trained on
    start: int | None = None  # seed of the one initial noise of all paths; None: each its own


@dataclass(frozen=True)
class Explored:
    """The answer to an ``ExploreChunk`` of B seeds."""

    images: ObjectRef[Images]
    samples: ObjectRef[Samples]  # [B, ...] each; empty unless ``return_latents``


@dataclass(frozen=True)
class GenerateRequest:
    """Generate at full precision. R rows of conditioning serve B / R seeds each, in order."""

    seeds: tuple[int, ...]  # [B] 64-bit, one initial noise each
    steps: int
    solver: str | None  # None: that of the objective
    weights: str | None = None  # current, old, ema or base; None: the policy that is sampled
    guidance: float | None = None  # classifier-free, 1: none; None: that of regenerating
    start: int | None = None  # seed of the one initial noise of all paths; None: each its own


@dataclass(frozen=True)
class Generated:
    """The answer to a ``GenerateRequest``."""

    images: ObjectRef[Images]
    samples: ObjectRef[Samples]  # [B, ...] each


@dataclass(frozen=True)
class Scores:
    """Raw scores of B images per scorer label. NaN marks an image whose scoring failed; it is never
    a reward.
    """

    values: dict[str, Floats]  # label -> [B]
    failures: tuple[str, ...] = ()  # one line per scorer that failed
    parts: dict[str, Floats] = field(default_factory=dict[str, Floats])  # "label/part" -> [B]
    # label -> images, or frames, that its scorer was asked for, and the seconds that it took
    work: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])


@dataclass(frozen=True)
class Chosen:
    """Which of a prompt's N explored seeds to train on, and which to audit."""

    train: tuple[int, ...]  # [K] indices into the prompt's seeds, ascending
    audit: tuple[int, ...] = ()  # random indices, some of ``train`` among them


@dataclass(frozen=True)
class SampleRows:
    """Samples of a training group: some rows of what one call returned."""

    samples: ObjectRef[Samples]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt's K samples, with their rewards at the quality that is trained on."""

    prompt: int  # position within the iteration
    rewards: Floats  # [K]
    conditioning: ObjectRef[Conditioning]  # 1 row
    samples: tuple[SampleRows, ...]  # K rows in all, in the order of ``rewards``


@dataclass(frozen=True)
class Portion:
    """The part of a prompt's K samples that one replica of the learner trains on."""

    prompt: int
    rows: range  # within 0 .. K
    conditioning: ObjectRef[Conditioning]  # 1 row
    samples: tuple[SampleRows, ...]  # of ``rows``, in order


@dataclass(frozen=True)
class UpdateRequest:
    """What one replica trains on."""

    iteration: int
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class AllRewards:
    """The rewards of an iteration, which each replica gets beside its request: an advantage may
    compare a reward with those of other prompts. One array for all prompts.
    """

    prompts: tuple[int, ...]  # ascending
    counts: tuple[int, ...]  # K of each
    rewards: Floats  # [sum of counts], prompt after prompt

    def by_prompt(self) -> dict[int, Floats]:
        """Rewards [K] by prompt."""
        parts = np.split(self.rewards, np.cumsum(self.counts)[:-1])
        return dict(zip(self.prompts, parts, strict=True))


@dataclass(frozen=True)
class Exported:
    """The policy, packed: its shards are then fetched one by one."""

    manifest: Manifest
    statistics: Mapping[str, float]  # compared with the version before, by metric name


class WeightsId(NamedTuple):
    """Identifies published weights; a version packed in two precisions has two."""

    version: int
    checksum: str  # of the manifest, hence of every shard
    backend: str | None  # precision that they are packed for; None: rollout actors do not say


@dataclass(frozen=True)
class Probe:
    """A few images that learner and rollout actors both generate from the same packed weights."""

    version: int
    seeds: tuple[int, ...]  # [B] 64-bit
    steps: int
    solver: str


@dataclass(frozen=True)
class Probed:
    """The answer to a ``Probe``."""

    latents: Floats  # [B, *latent]
    kind: str  # device and arithmetic: where these are equal, the latents must be so to the bit
    bound: float = 0.0  # relative distance that rounding on another kind may make; of the learner
    compiled: Floats | None = None  # of the first seed by compiled blocks, where there are any


@dataclass(frozen=True)
class Moved:
    """What an actor moved between its GPU and host memory, as its turn began or ended."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Rendezvous:
    """Where replicas of the learner find each other: an address of the first one's node."""

    host: str
    port: int
    timeout_s: float  # longest wait for another replica, now and later
