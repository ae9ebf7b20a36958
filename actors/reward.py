"""The reward service: scorers over one batch of images."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from actors.messages import ActorInfo, Images, Metadata, Scores
from actors.runtime import identity, load_config, on_device, setup_torch
from configs.schema import RunConfig
from configs.section import Tree
from rewards import resolve
from rewards.cache import ScoreCache
from rewards.combine import WeightedScorer


@on_device("reward", "evaluate.batch_size and explore.chunk_size")
class RewardActor:
    """Actor with the scorers of one service: those that share ``reward``, or a single one.

    A scorer that fails gives NaN for its images and a message; other scores are unaffected.
    """

    def __init__(self, tree: Tree, kind: str = "reward"):
        run = load_config(tree)
        labels = run.scorers_of(kind)
        import_scorers(run, labels)
        self._device = None
        if run.services.of(kind).gpus or "torch" in sys.modules:  # rule-based scorers need no torch
            self._device = setup_torch(run, kind)
        device = "cpu" if self._device is None else str(self._device)
        self._scorer = WeightedScorer.from_config(run.rewards, labels, device)
        self._cache = ScoreCache(self._scorer)

    def ready(self) -> ActorInfo:
        """Describe the actor; the scorers are loaded by then."""
        return identity(self._device)

    def score(
        self,
        images: Images,
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...] | None = None,
        cached: bool = False,
    ) -> Scores:
        """Score images or clips; ``prompts`` and ``metadata`` have one entry per image.

        ``labels`` limits the scorers. With ``cached``, an image that this actor has already scored
        for the same prompt gets the same scores again.
        """
        scorer = self._cache if cached else self._scorer
        result = scorer.attempt(images, prompts, metadata, labels)
        return Scores(result.scores, result.failures, result.unreachable, result.parts, result.work)

    def compare(
        self, prompt: str, metadata: Metadata, labels: tuple[str, ...], *images: Images
    ) -> Scores:
        """Score all images of a prompt, passed in parts, by scorers that compare them."""
        whole = np.concatenate(images)
        count = len(whole)
        result = self._scorer.attempt(whole, [prompt] * count, [metadata] * count, labels)
        return Scores(result.scores, result.failures, result.unreachable, result.parts, result.work)

    def recheck(
        self,
        images: Images,
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...] | None = None,
    ) -> Scores:
        """Score the images in reverse order without the cache; return scores in the given order.

        This exposes a scorer whose scores depend on the position, or belong to an earlier batch.
        """
        reverse = slice(None, None, -1)
        result = self._scorer.attempt(images[reverse], prompts[reverse], metadata[reverse], labels)
        scores = {label: values[reverse] for label, values in result.scores.items()}
        return Scores(scores, result.failures, result.unreachable, {}, result.work)


def import_scorers(run: RunConfig, labels: Iterable[str]) -> None:
    """Import the modules of the scorers, so that ``sys.modules`` shows whether they need torch.

    A module that cannot be imported is skipped: building the scorer then raises with advice.
    """
    for scorer in run.rewards.all_scorers:
        if scorer.label in labels:
            with suppress(Exception):
                importlib.import_module(resolve(scorer.name).partition(":")[0])
