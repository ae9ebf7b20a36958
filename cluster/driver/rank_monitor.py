"""What is done when the cheap ranking no longer agrees with full quality: a note, or more bits.

What is decided after iteration i holds for the policy version that its update publishes, i + 1, and
for all after it: a chunk names a version, a version is packed for one precision, so that it does
not matter which actor explores what and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypedDict

from configs.running import Audit
from policy.precision.backends import finer_backend
from records.rundir import Event

SIGNS, TAU = "audit/sign_agreement", "audit/random_kendall_tau"


class MonitorState(TypedDict, total=False):
    """What a checkpoint keeps."""

    backend: str | None
    backend_before: str | None
    below: int


class RankMonitor:
    """Compares each iteration's agreement with the thresholds of ``[audit]``; knows in which
    precision versions are published.
    """

    def __init__(self, settings: Audit, finest: str, event: Event, note: Callable[[str], None]):
        """``finest``: the regenerating precision. ``event`` and ``note`` are told, the one in
        fields, the other in words.
        """
        self._settings, self._finest, self._event, self._note = settings, finest, event, note
        self.restore({})

    def restore(self, state: MonitorState) -> None:
        """Go back to ``state``; to the beginning when it is empty."""
        # of the next version to be published; None: as rollout actors are configured
        self.backend = state.get("backend")
        self.backend_before = state.get("backend_before")  # of the version before that
        self.below = state.get("below") or 0  # iterations in a row

    @property
    def state(self) -> MonitorState:
        """What a checkpoint keeps."""
        return {"backend": self.backend, "backend_before": self.backend_before, "below": self.below}

    def observe(
        self,
        index: int,
        agreement: Mapping[str, float],
        explored: str | None,
        newest: str | None,
        available: Collection[str],
    ) -> dict[str, float]:
        """After iteration ``index``: count, and after ``patience`` iterations in a row below a
        threshold do what is configured.

        ``explored`` is the precision that explored it, ``newest`` that of the newest version. Where
        they differ, a move is under way and the iteration is not counted; nor is one in which
        nothing could be ranked. Returns metrics.
        """
        # before anything is decided: a decision holds from the next version on
        self.backend_before = self.backend
        if not self._settings.watches:
            return {}
        failing = self._failing(agreement)
        if explored == newest and failing is not None:
            self.below = self.below + 1 if failing else 0
        counted = {"audit/below": float(self.below)}
        if self.below >= self._settings.patience:
            self.below = 0
            self._act(index, failing or {}, explored, available)
        return counted

    def _failing(self, agreement: Mapping[str, float]) -> dict[str, float] | None:
        """What is below its threshold; None when none of it was measured."""
        thresholds = {SIGNS: self._settings.min_sign_agreement, TAU: self._settings.min_tau}
        measured = {
            key: least
            for key, least in thresholds.items()
            if least is not None and key in agreement
        }
        return (
            {key: agreement[key] for key, least in measured.items() if agreement[key] < least}
            if measured
            else None
        )

    def _act(
        self,
        index: int,
        failing: Mapping[str, float],
        explored: str | None,
        available: Collection[str],
    ) -> None:
        patience = self._settings.patience
        words = " and ".join(f"{key} = {value:.3f}" for key, value in failing.items())
        said = (
            f"iteration {index}: {words} is below its threshold, {patience}"
            f" iteration{'s' if patience > 1 else ''} in a row"
        )
        self._event("audit_low", iteration=index, backend=explored, patience=patience, **failing)
        # None: rollout actors do not say what they run, so there is nothing to be finer than
        if self._settings.action == "warn" or explored is None:
            self._note(
                f"{said}: the cheap ranking may mislead; raise explore.steps, or set audit.action ="
                " 'finer_backend'"
            )
            return
        finer = finer_backend(explored, available, self._finest)
        if finer is None:
            self._note(
                f"{said}: {explored} is the finest precision here up to regenerate.precision: raise"
                " explore.steps"
            )
            return
        self.backend = finer
        self._event(
            "backend_moved", iteration=index, before=explored, after=finer, version=index + 1
        )
        self._note(
            f"{said}: exploring in {finer} instead of {explored} from policy version {index + 1} on"
        )
