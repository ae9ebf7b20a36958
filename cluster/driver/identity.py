"""Policy identity check: verify that a rollout actor computes with the weights it acknowledged.

Checksums only show which bytes arrived. A denoiser may still use an old buffer, have a layer that
was not copied, or run a compiled graph that refers to other memory: it then explores with an
unknown policy, and nothing fails. So for every ``audit.identity_every``-th version the learner
generates a few steps of one seed from the packed weights themselves, and each rollout actor that
has loaded the version generates the same before its first task. Images explored since the last
check may be wrong, and nothing distinguishes them, so a difference ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ray import ObjectRef

from actors.calls import resolved
from actors.clients import EncoderClient, LearnerClient
from actors.messages import Probe, ProbeResult
from actors.rollout import RolloutActor
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from configs.prompts import Prompt
from configs.schema import RunConfig
from learner.distance import relative_distance
from policy.sampling.noise import stream_seed
from policy.types import Conditioning
from records.errors import RunFailed
from records.rundir import Event

STEPS = 2


@dataclass(frozen=True)
class ProbeReference:
    """The learner's result for a version, with the request and conditioning that produced it."""

    request: Probe
    conditioning: ObjectRef[Conditioning]
    answer: ProbeResult


class PolicyIdentity:
    """Compares every rollout actor that loads a version with the learner."""

    def __init__(
        self,
        config: RunConfig,
        encoder: EncoderClient,
        prompts: Sequence[Prompt],
        event: Event,
        note: Callable[[str], None],
    ):
        self._config, self._encoder, self._event, self._note = config, encoder, event, note
        self._prompt = prompts[0]
        self._worst: float | None = None

    async def expected(self, version: int, learner: LearnerClient) -> ProbeReference | None:
        """Return the learner's result for the version it exported last, or None if none is due."""
        plan = self._config.plan.explore
        if plan is None or version % self._config.audit.identity_every:
            return None
        # a compiled denoiser must be called with a batch size it is compiled for; the learner
        # generates one image only
        count = self._config.explore.chunk_size if self._config.explore.compile else 1
        seed = self._config.seed
        seeds = tuple(stream_seed(seed, "identity", version, n) for n in range(count))
        request = Probe(version, seeds, STEPS, self._config.explore.solver)
        (conditioning,) = await self._encoder.encode("identity", [[self._prompt]])
        single = replace(request, seeds=seeds[:1])
        return ProbeReference(request, conditioning, await learner.probe(single, conditioning))

    async def check(self, rollout: ActorPool, member: Member, expected: ProbeReference) -> None:
        """Compare an actor's latents with the learner's.

        A difference above the bound raises RunFailed, or is noted if ``audit.identity_action`` is
        'warn'.
        """
        result = await rollout.ask(
            member, RolloutActor.probe, expected.request, resolved(expected.conditioning)
        )
        answer, version = expected.answer, expected.request.version
        error = relative_distance(result.latents, answer.latents)
        bound = 0.0 if result.kind == answer.kind else answer.bound
        self._worst = max(error, self._worst or 0.0)
        details = {"version": version, "actor": member.index, "error": error, "bound": bound}
        if result.compiled is not None:
            compiled_error = relative_distance(result.compiled, answer.latents)
            details |= {"compiled_error": compiled_error, "compiled_bound": answer.bound}
            if error <= bound:  # else the failure of the uncompiled result is reported
                error, bound = compiled_error, answer.bound
        if error <= bound:
            self._event("identity_checked", kind="rollout", **details)
            return
        host = f" on {member.info.host}" if member.info else ""
        kinds = {"here": result.kind, "wanted": answer.kind}
        self._event("identity_failed", kind="rollout", **details, **kinds)
        text = (
            f"policy identity: rollout actor {member.index}{host} acknowledged version {version}"
            f" but does not compute with it: its latents differ from the learner's by {error:.3g},"
            f" allowed is {bound:.3g}"
        )
        if self._config.audit.identity_action == "warn":
            self._note(text)
            return
        raise RunFailed(
            f"{text}; images explored since the last check may be wrong: check that machine, and"
            " continue with --resume from an earlier checkpoint, or set audit.identity_action ="
            " 'warn'"
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the largest difference since the last call; no metric if nothing was checked."""
        worst, self._worst = self._worst, None
        return {} if worst is None else {"audit/identity_error": worst}
