"""The policy identity check: does a rollout actor compute with the weights that it acknowledged?

Checksums say which bytes arrived. A denoiser may still go on with an old buffer, with one layer not
copied, or with a compiled graph that holds other memory: it then explores with a policy that nobody
knows, and nothing fails. So for every ``audit.identity_every``-th version the learner generates a
few steps of one seed from the packed weights themselves, and each rollout actor that has loaded the
version generates the same before its first task. What explored since the last check cannot be told
from what is right, so a difference ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ray import ObjectRef

from actors.calls import resolved
from actors.clients import EncoderClient, LearnerClient
from actors.messages import Probe, Probed
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
class Expected:
    """What the learner made of a version."""

    request: Probe
    conditioning: ObjectRef[Conditioning]
    answer: Probed


class PolicyIdentity:
    """Asks the learner once per version, and every rollout actor that loads it."""

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

    async def expected(self, version: int, learner: LearnerClient) -> Expected | None:
        """What the learner makes of the version that it exported last; None where none is due."""
        plan = self._config.plan.explore
        if plan is None or version % self._config.audit.identity_every:
            return None
        # a compiled denoiser must be asked in a form that it is compiled for; the learner draws one
        count = self._config.explore.chunk_size if self._config.explore.compile else 1
        seed = self._config.seed
        seeds = tuple(stream_seed(seed, "identity", version, n) for n in range(count))
        request = Probe(version, seeds, STEPS, self._config.explore.solver)
        (conditioning,) = await self._encoder.encode("identity", [[self._prompt]])
        one = replace(request, seeds=seeds[:1])
        return Expected(request, conditioning, await learner.probe(one, conditioning))

    async def check(self, rollout: ActorPool, member: Member, expected: Expected) -> None:
        """Raises RunFailed when the actor computes something else than the learner does."""
        found = await rollout.ask(
            member, RolloutActor.probe, expected.request, resolved(expected.conditioning)
        )
        answer, version = expected.answer, expected.request.version
        error = relative_distance(found.latents, answer.latents)
        bound = 0.0 if found.kind == answer.kind else answer.bound
        self._worst = max(error, self._worst or 0.0)
        told = {"version": version, "actor": member.index, "error": error, "bound": bound}
        if found.compiled is not None:
            apart = relative_distance(found.compiled, answer.latents)
            told |= {"compiled_error": apart, "compiled_bound": answer.bound}
            if error <= bound:  # else that is what is told
                error, bound = apart, answer.bound
        if error <= bound:
            self._event("identity_checked", kind="rollout", **told)
            return
        host = f" on {member.info.host}" if member.info else ""
        kinds = {"here": found.kind, "wanted": answer.kind}
        self._event("identity_failed", kind="rollout", **told, **kinds)
        said = (
            f"policy identity: rollout actor {member.index}{host} acknowledged version {version}"
            f" but does not compute with it: its latents differ from the learner's by {error:.3g},"
            f" allowed is {bound:.3g}"
        )
        if self._config.audit.identity_action == "warn":
            self._note(said)
            return
        raise RunFailed(
            f"{said}; nothing explored since the last check can be trusted: look at that machine,"
            " and continue with --resume from a checkpoint before, or with audit.identity_action ="
            " 'warn'"
        )

    def take_metrics(self) -> dict[str, float]:
        """The largest difference since this was last asked; nothing where nothing was checked."""
        worst, self._worst = self._worst, None
        return {} if worst is None else {"audit/identity_error": worst}
