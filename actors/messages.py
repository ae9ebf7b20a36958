"""The messages between processes, and the answers that clients return.

For each chunk the driver sends an ``ExploreChunk`` to a rollout actor and receives references to
images and samples (``Explored``). It passes the reference to the images on to a reward actor and
receives ``Scores``. When all chunks of a prompt are scored, the selector answers with
``SelectedSeeds``. Images, samples and weights are passed by reference from the actor that created
them to the one that needs them; the driver never holds pixels but for a few images that it shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the selector uses this module and must start without Ray's or torch's types
    from ray import ObjectRef

    from policy.precision.manifest import Manifest
    from policy.types import Conditioning

Images: TypeAlias = NDArray[np.uint8]  # [B, 3, H, W], or clips: [B, F, 3, H, W]
Floats: TypeAlias = NDArray[np.float32]
Shard: TypeAlias = NDArray[np.uint8]  # [bytes], a piece of packed weights
Metadata: TypeAlias = dict[str, object]  # of a prompt: the fields of its line except the text
Samples: TypeAlias = dict[str, np.ndarray]
"""Arrays with one row per sample: "latents" float32 [B, *latent], and whatever else the learner
records for its objective. Only the actor that created them and the learner read them.
"""


@dataclass(frozen=True)
class ActorInfo:
    """An actor's description of itself, after its models are loaded. None: not applicable."""

    pid: int
    host: str
    node: str | None = None  # Ray's node id
    backend: str | None = None  # precision in which it explores
    why: str | None = None  # reason for that precision
    runs: tuple[str, ...] = ()  # all precisions in which it could explore
    cold: bool | None = None  # True if its first task takes longer because it compiles
    trainable: int | None = None  # number of trained parameters
    left_out: int | None = None  # layers of text encoders in the initial LoRA, which it ignores
    device: str | None = None  # CUDA's device name, or "cpu"
    capability: str | None = None  # CUDA's compute capability, such as "9.0"
    torch: str | None = None  # version of torch
    cuda: str | None = None  # CUDA version that torch was built for
    driver: str | None = None  # version of the NVIDIA driver
    gpu: str | None = None  # CUDA's UUID of its GPU
    allocator: str | None = None  # allocator of host memory, such as "jemalloc" or "glibc 2.36"
    store_on_disk: str | None = None  # directory of the node's object store; None: in memory

    def event_fields(self) -> dict[str, str | int]:
        """Return the fields of the actor's ``actor_started`` event."""
        values = ((part.name, getattr(self, part.name)) for part in fields(self))
        return {name: value for name, value in values if isinstance(value, str | int)}


@dataclass(frozen=True, order=True)
class ChunkKey:
    """Identifies a task of exploration: the same key gives the same result on any actor."""

    iteration: int
    prompt: int  # position within the iteration, 0 .. prompts.per_iteration - 1
    chunk: int  # position within the prompt's seeds
    version: int  # policy version that must compute it


@dataclass(frozen=True)
class ExploreChunk:
    """Request for one image per seed with the rollout actor's current weights."""

    key: ChunkKey
    seeds: tuple[int, ...]  # [B] 64-bit, one initial noise each
    steps: int
    solver: str
    return_latents: bool  # True if the explored samples themselves are trained on
    start: int | None = None  # seed of an initial noise shared by all paths; None: one per seed


@dataclass(frozen=True)
class Explored:
    """The answer to an ``ExploreChunk`` of B seeds."""

    images: ObjectRef[Images]
    samples: ObjectRef[Samples]  # [B, ...] each; empty unless ``return_latents``
    # share of the activations, per layer and pass, that exceeded the amax of the previous pass, by
    # which they were packed; None if each is packed by its own
    saturated: float | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """Request for images at full precision. Each of R rows of conditioning serves B / R seeds."""

    seeds: tuple[int, ...]  # [B] 64-bit, one initial noise each
    steps: int
    solver: str | None  # None: the solver of the objective
    weights: str | None = None  # current, old, ema or base; None: the sampling policy
    guidance: float | None = None  # classifier-free, 1 is off; None: ``guidance.regenerate``
    start: int | None = None  # seed of an initial noise shared by all paths; None: one per seed


@dataclass(frozen=True)
class Generated:
    """The answer to a ``GenerateRequest``."""

    images: ObjectRef[Images]
    samples: ObjectRef[Samples]  # [B, ...] each


@dataclass(frozen=True)
class Scores:
    """Raw scores of B images per scorer label.

    NaN marks an image whose scoring failed; it never becomes a reward.
    """

    values: dict[str, Floats]  # label -> [B]
    failures: tuple[str, ...] = ()  # one line per scorer that failed
    # label -> that line, of scorers whose server cannot be reached
    unreachable: dict[str, str] = field(default_factory=dict[str, str])
    parts: dict[str, Floats] = field(default_factory=dict[str, Floats])  # "label/part" -> [B]
    # label -> number of images or frames that its scorer scored, and the seconds it took
    work: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])


@dataclass(frozen=True)
class SelectedSeeds:
    """The selected ones of a prompt's N explored seeds: to train on, and to audit."""

    train: tuple[int, ...]  # [K] indices into the prompt's seeds, ascending
    audit: tuple[int, ...] = ()  # random indices, possibly also in ``train``


@dataclass(frozen=True)
class SampleRows:
    """Samples of a training group: some rows of the samples that one call returned."""

    samples: ObjectRef[Samples]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TrainingGroup:
    """One prompt's K samples with the rewards of the images that are trained on."""

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
    """The portions that one replica trains on."""

    iteration: int
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class AllRewards:
    """The rewards of all prompts of an iteration, in one array.

    Every replica receives them besides its request, because an advantage may compare a reward with
    those of other prompts.
    """

    prompts: tuple[int, ...]  # ascending
    counts: tuple[int, ...]  # K of each
    rewards: Floats  # [sum of counts], prompt after prompt

    def by_prompt(self) -> dict[int, Floats]:
        """Return the rewards [K] of each prompt."""
        parts = np.split(self.rewards, np.cumsum(self.counts)[:-1])
        return dict(zip(self.prompts, parts, strict=True))


@dataclass(frozen=True)
class Exported:
    """The packed policy; its shards are then fetched one by one."""

    manifest: Manifest
    statistics: Mapping[str, float]  # changes since the previous version, by metric name


class WeightsId(NamedTuple):
    """Identifies published weights; a version packed in two precisions has two."""

    version: int
    checksum: str  # of the manifest, which contains the checksums of all shards
    backend: str | None  # precision they are packed for; None: the one that actors configure


@dataclass(frozen=True)
class Probe:
    """Request for a few images that learner and rollout actors generate from the same weights."""

    version: int
    seeds: tuple[int, ...]  # [B] 64-bit
    steps: int
    solver: str


@dataclass(frozen=True)
class ProbeResult:
    """The answer to a ``Probe``."""

    latents: Floats  # [B, *latent]
    kind: str  # device and arithmetic; if these are equal, the latents must be bit-identical
    bound: float = 0.0  # relative difference allowed between kinds; set by the learner
    compiled: Floats | None = None  # latents of the first seed by compiled blocks, if any


@dataclass(frozen=True)
class Moved:
    """Bytes that an actor moved between GPU and host memory when its turn began or ended."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Rendezvous:
    """Address, on the first replica's node, at which the replicas of the learner connect."""

    host: str
    port: int
    timeout_s: float  # timeout of every wait for another replica
