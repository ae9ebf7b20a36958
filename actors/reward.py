"""The reward service: scorers over one batch of images."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from actors.messages import ActorInfo, Images, Metadata, Scores
from actors.runtime import begin, begin_torch, identity, on_device
from configs.schema import RunConfig
from configs.section import Tree
from rewards import resolve
from rewards.cache import ScoreCache
from rewards.combine import WeightedScorer


@on_device("reward", "evaluate.batch_size and explore.chunk_size")
class RewardActor:
    """Holds the scorers of one service: those that share ``reward``, or one of its own.

    A scorer that fails marks its samples NaN and says why; the others' scores stand.
    """

    def __init__(self, tree: Tree, kind: str = "reward"):
        run = begin(tree)
        labels = run.scorers_of(kind)
        import_scorers(run, labels)
        self._device = None
        if run.services.of(kind).gpus or "torch" in sys.modules:  # scorers by rule need no torch
            self._device = begin_torch(run, kind)
        device = "cpu" if self._device is None else str(self._device)
        self._scorer = WeightedScorer.from_config(run.rewards, labels, device)
        self._cache = ScoreCache(self._scorer)

    def ready(self) -> ActorInfo:
        """Says who it is, once the scorers are loaded."""
        return identity(self._device)

    def score(
        self,
        images: Images,
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...] | None = None,
        cached: bool = False,
    ) -> Scores:
        """Raw scores of images or clips; ``prompts`` and ``metadata`` have an entry per image.

        ``labels``: only these scorers. ``cached``: images that this actor has scored before for
        the same prompt get the same scores again.
        """
        made = (self._cache if cached else self._scorer).attempt(images, prompts, metadata, labels)
        return Scores(made.scores, made.failures, made.parts, made.work)

    def compare(
        self, prompt: str, metadata: Metadata, labels: tuple[str, ...], *images: Images
    ) -> Scores:
        """Raw scores of all images of a prompt, given in parts, by scorers that compare them."""
        whole = np.concatenate(images)
        count = len(whole)
        made = self._scorer.attempt(whole, [prompt] * count, [metadata] * count, labels)
        return Scores(made.scores, made.failures, made.parts, made.work)

    def recheck(
        self,
        images: Images,
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...] | None = None,
    ) -> Scores:
        """``score`` with the images in reverse and without the cache; scores in the order given.

        A scorer that answers by position, or for the batch before, gives other numbers now.
        """
        reverse = slice(None, None, -1)
        made = self._scorer.attempt(images[reverse], prompts[reverse], metadata[reverse], labels)
        back = {label: values[reverse] for label, values in made.scores.items()}
        return Scores(back, made.failures, {}, made.work)


def import_scorers(run: RunConfig, labels: Iterable[str]) -> None:
    """Import the modules of the scorers, so that ``sys.modules`` tells whether they need torch.

    What cannot be imported is passed over: building the scorer says why, with advice.
    """
    for scorer in run.rewards.everyone:
        if scorer.label in labels:
            with suppress(Exception):
                importlib.import_module(resolve(scorer.name).partition(":")[0])
