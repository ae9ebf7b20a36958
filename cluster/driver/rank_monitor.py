"""Monitor of rank agreement: warn, or explore in a finer precision, when it falls too low.

It also reports activations that saturate, which can lower it.

A decision after iteration i applies from the policy version that its update publishes, i + 1, on:
a chunk names a version, and a version is packed for one precision, so that results do not depend
on which actor explores which chunk and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypedDict

from configs.running import Audit
from policy.precision.backends import finer_backend
from records.rundir import Event

SIGNS, TAU = "audit/sign_agreement", "audit/random_kendall_tau"


class MonitorState(TypedDict, total=False):
    """State of the monitor that a checkpoint stores."""

    backend: str | None
    backend_before: str | None
    below: int


class RankMonitor:
    """Compares each iteration's rank agreement with the thresholds of ``[audit]``.

    ``backend`` is the precision in which the next version will be published; None: the one that
    rollout actors are configured with.
    """

    def __init__(self, settings: Audit, finest: str, event: Event, note: Callable[[str], None]):
        """``finest``: the regenerating precision, the finest that exploring may move to.

        Decisions are reported to ``event`` as fields and to ``note`` as text.
        """
        self._settings, self._finest, self._event, self._note = settings, finest, event, note
        self._saturation_noted = False
        self.restore({})

    def restore(self, state: MonitorState) -> None:
        """Restore ``state``, or the initial state if it is empty."""
        # of the next version to be published; None: as rollout actors are configured
        self.backend = state.get("backend")
        self.backend_before = state.get("backend_before")  # of the version before that
        self.below = state.get("below") or 0  # iterations in a row

    @property
    def state(self) -> MonitorState:
        """State that a checkpoint stores."""
        return {"backend": self.backend, "backend_before": self.backend_before, "below": self.below}

    def observe(
        self,
        index: int,
        agreement: Mapping[str, float],
        explored: str | None,
        newest: str | None,
        available: Collection[str],
    ) -> dict[str, float]:
        """Check the agreement of iteration ``index``, and return metrics.

        After ``patience`` iterations in a row below a threshold, the configured action is carried
        out. ``explored`` is the precision that explored the iteration, ``newest`` that of the
        newest version, ``available`` those that all rollout actors can run. If ``explored`` and
        ``newest`` differ, a change of precision is in progress and the iteration is not counted;
        neither is one in which nothing could be ranked.
        """
        # before anything is decided: a decision applies from the next version on
        self.backend_before = self.backend
        if not self._settings.has_threshold:
            return {}
        failing = self._failing(agreement)
        if explored == newest and failing is not None:
            self.below = self.below + 1 if failing else 0
        counted = {"audit/below": float(self.below)}
        if self.below >= self._settings.patience:
            self.below = 0
            self._act(index, failing or {}, explored, available)
        return counted

    def observe_saturation(self, index: int, share: float | None) -> None:
        """Report that a ``share`` of the activations of iteration ``index`` was clipped, if any."""
        if not share:
            return
        self._event("activations_saturated", iteration=index, share=share)
        if not self._saturation_noted:  # the event and the metric say it of each iteration
            self._note(
                f"iteration {index}: {share:.2%} of the quantized layers' inputs outgrew the range"
                " that the step before had predicted, and were clipped: if the rank agreement"
                ' falls, set explore.activation_amax = "power_of_two"'
            )
        self._saturation_noted = True

    def _failing(self, agreement: Mapping[str, float]) -> dict[str, float] | None:
        """Return the metrics below their thresholds, or None if none of them was measured."""
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
        text = (
            f"iteration {index}: {words} is below its threshold, {patience}"
            f" iteration{'s' if patience > 1 else ''} in a row"
        )
        self._event("audit_low", iteration=index, backend=explored, patience=patience, **failing)
        # None: rollout actors do not report their precision, so no finer one can be chosen
        if self._settings.action == "warn" or explored is None:
            self._note(
                f"{text}: the cheap ranking may mislead; raise explore.steps, or set audit.action ="
                " 'finer_backend'"
            )
            return
        finer = finer_backend(explored, available, self._finest)
        if finer is None:
            self._note(
                f"{text}: {explored} is the finest precision supported here up to"
                " regenerate.precision: raise explore.steps"
            )
            return
        self.backend = finer
        self._event(
            "backend_moved", iteration=index, before=explored, after=finer, version=index + 1
        )
        self._note(
            f"{text}: exploring in {finer} instead of {explored} from policy version {index + 1} on"
        )
