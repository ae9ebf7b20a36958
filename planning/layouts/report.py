"""Text and JSON output of a layout, its prediction and the comparison of the four arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from configs.schema import RunConfig
from learner.step_assignment import StepAssignment
from planning.assumptions import host_link, peer_link
from planning.durations import LINK
from planning.layouts.arms import SIMPLER, ratios
from planning.layouts.choose import Candidate, Choice
from planning.layouts.gpus import Gpus
from planning.layouts.predict import Prediction
from planning.layouts.spec import LayoutSpec, configured_layout
from planning.waiting import Waiting

IDLE = 0.15
HIDDEN = 0.05


@dataclass(frozen=True)
class Outlook:
    """The prediction for a plan, with everything else that is printed about it.

    ``unhidden``: seconds of an iteration if exploring took no time. ``found``: results of a
    simulation, if there was one. ``fullest_gb``: GB that the fullest GPU holds. ``gathered``:
    seconds by stage in which a sharded base is gathered. ``arms_not``: for each arm that is not in
    ``arms``, the reason.
    """

    gpus: Sequence[Gpus]
    prediction: Prediction
    bound: float
    unhidden: float
    arms: Mapping[str, Prediction]
    choice: Choice | None
    found: Findings | None = None
    fullest_gb: float = 0.0
    gathered: Mapping[str, float] = field(default_factory=dict[str, float])
    arms_not: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Findings:
    """Results of a simulated iteration.

    ``critical``: seconds by kind of work along the critical path. ``more``: seconds per iteration
    with one more GPU, by its kind. ``publish``: seconds of publishing. ``driver``: share of the
    time in which the driver sends.
    """

    critical: Mapping[str, float]
    more: Mapping[str, float]
    publish: float
    driver: float

    def lines(self, seconds: float, gpus: int) -> list[str]:
        """Return the lines for an iteration of ``seconds`` on ``gpus`` GPUs."""
        chain = ", ".join(f"{work} {each:.1f} s" for work, each in self.critical.items())
        lines = [
            f"  critical  {chain}",
            f"  cost      {gpu_hours(seconds, gpus):.0f} GPU-hours for 1,000 updates; publishing"
            f" takes {self.publish:.1f} s, the driver is busy {self.driver:.1%} of the time",
        ]
        for kind, faster in self.more.items():
            hours = gpu_hours(faster, gpus + 1)
            lines.append(f"  one more  {kind}: {faster:.1f} s per iteration, {hours:.0f} GPU-hours")
        return lines


def gpu_hours(seconds: float, gpus: int) -> float:
    """Return the GPU-hours of 1,000 updates of ``seconds`` each."""
    return 1000 * seconds * gpus / 3600


def outlook_lines(config: RunConfig, outlook: Outlook) -> list[str]:
    """Return the lines about the layout and its alternatives, seconds, arms and warnings."""
    return [
        *_layout(config, outlook),
        *_seconds(config, outlook),
        *_arms(config, outlook),
        *warnings(config, outlook),
    ]


def _layout(config: RunConfig, outlook: Outlook) -> list[str]:
    gpus = " and ".join(f"{each.count} x {each.kind}" for each in outlook.gpus)
    if outlook.choice is None:
        return [
            "",
            (f"layout      as configured, on {gpus}: {configured_layout(config).describe()}"),
        ]
    choice = outlook.choice
    lines = ["", f"layout      {choice.best.numbers.mode} on {gpus}: {choice.why}"]
    for each in choice.table:
        mark = "*" if each.numbers == choice.best.numbers else " "
        what = each.numbers.describe()
        lines.append(
            f"  {mark} {each.numbers.mode:<7}{each.seconds:9.1f} s, {each.gb:.1f} GB on the fullest"
            f" GPU: {what}{_not_chosen(each, choice, config)}"
            if each.prediction
            else f"    {each.numbers.mode:<7}        no: {each.why_not} ({what})"
        )
    return lines


def _not_chosen(each: Candidate, choice: Choice, config: RunConfig) -> str:
    """Return the reason why a layout that is predicted to be faster was not chosen, or ""."""
    if each.seconds >= choice.best.seconds or each.numbers == choice.best.numbers:
        return ""
    if config.layout is not None and config.layout.mode not in ("auto", each.numbers.mode):
        return "; not requested"
    if each.numbers.ahead == choice.best.numbers.ahead:
        return "; not chosen by the closed-form estimate"
    return "; explores with the previous policy, so only if explore_ahead = 1 is set"


def _seconds(config: RunConfig, outlook: Outlook) -> list[str]:
    found = outlook.prediction
    gpus = sum(each.count for each in outlook.gpus)
    simulated = outlook.found.lines(found.iteration, gpus) if outlook.found else []
    idle = ", ".join(f"{kind} {share:.0%}" for kind, share in found.idle.items())
    return [
        (
            f"predicted   {found.iteration:.1f} s per iteration,"
            f" {found.iteration / outlook.bound:.2f} x {outlook.bound:.1f} s for all of its work"
            f" spread evenly over these GPUs; samples to train on after {found.rollout:.1f} s"
        ),
        f"  idle      GPUs {found.mean_idle:.0%} of an iteration; of their time, actors: {idle}",
        *simulated,
        *_gathered(outlook),
        (
            f"  assumed   actors on one GPU take turns {_cost_of_turns(config, outlook)}; scorers"
            " compute in FP32 if they require it"
        ),
    ]


def _gathered(outlook: Outlook) -> list[str]:
    if not outlook.gathered:
        return []
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outlook.gathered.items())
    speeds = " or ".join(sorted({f"{peer_link(each.kind) / 1e9:g}" for each in outlook.gpus}))
    return [
        f"  gathering {stages} of them: the base is in shards, which each replica receives at"
        f" {speeds} GB/s on a node, {LINK / 1e9:g} over several; none hidden behind computing"
    ]


def _cost_of_turns(config: RunConfig, outlook: Outlook) -> str:
    numbers = outlook.choice.best.numbers if outlook.choice else configured_layout(config)
    if not numbers.leaves:
        return "at no cost"
    speeds = {f"{host_link(each.kind) / 1e9:g}" for each in outlook.gpus}
    return f"at no cost, except for moving weights at {' or '.join(sorted(speeds))} GB/s each way"


def _arms(config: RunConfig, outlook: Outlook) -> list[str]:
    if len(outlook.arms) + len(outlook.arms_not) < 2:
        return []
    lines = ["arms        on the same GPUs, each in its own layout: predicted seconds"]
    for arm, found in outlook.arms.items():
        lines.append(
            f"  {arm:<15}{found.iteration:9.1f} per iteration, {found.rollout:9.1f} of it rollouts"
            f" (exploring {found.explore:.1f})"
        )
    lines += [f"  {arm:<15}       no: {why}" for arm, why in outlook.arms_not.items()]
    found = ratios(config, dict(outlook.arms))
    if found is not None:
        paper = ""
        if found.paper:
            paper = f"; the paper on 8 x B200: {found.paper[0]:g} x and {found.paper[1]:g} x"
        lines.append(
            f"  sol_rl against naive_scaling: rollouts {found.rollout:.2f} x, iterations"
            f" {found.whole:.2f} x{paper}"
        )
    return lines


def warnings(config: RunConfig, outlook: Outlook) -> list[str]:
    """Return a line for each inefficiency: hidden exploring, a slower arm, waiting, idle GPUs."""
    prediction, lines = outlook.prediction, []
    if prediction.explore and outlook.unhidden > (1 - HIDDEN) * prediction.iteration:
        behind = "the learner" if prediction.idle.get("learner", 1) < 0.5 else "other stages"
        lines.append(
            f"hidden      exploring is hidden behind {behind}: if it took no time, an iteration"
            f" would take {outlook.unhidden:.1f} s instead of {prediction.iteration:.1f} s"
        )
    for simpler in SIMPLER.get(config.arm, ()):
        other = outlook.arms.get(simpler)
        if other is not None and other.iteration < prediction.iteration:
            lines.append(
                f"slower      {config.arm} is predicted to take {prediction.iteration:.1f} s per"
                f" iteration, the simpler {simpler} {other.iteration:.1f} s"
            )
    if (factor := _waiting(config, outlook)) > 1 + HIDDEN:
        lines.append(
            f"waiting     an update lasts {factor:.2f} times as long as its busiest replica"
            " computes: replicas wait for each other after each of"
            f" {config.optimizer.steps_per_iteration} optimizer steps, because they have unequal"
            " numbers of samples in them"
            + ("" if config.optimizer.deal == "even" else ": set optimizer.deal = 'even'")
        )
    idle = [(n, share, actors) for n, share, actors in prediction.gpu_idle if share > IDLE]
    if idle:
        parts = [
            f"{n} ({' + '.join(sorted(actors)) or 'unused'}) {share:.0%}"
            for n, share, actors in idle
        ]
        lines.append(f"idle        GPUs idle more than {IDLE:.0%}: {', '.join(parts)}")
    return lines


def _waiting(config: RunConfig, outlook: Outlook) -> float:
    """Return the factor by which an update takes longer because replicas wait for each other."""
    numbers = outlook.choice.best.numbers if outlook.choice else configured_layout(config)
    waiting = Waiting(config.selection.keep, StepAssignment.of(config.optimizer))
    replicas = numbers.groups["learner"].actors
    return waiting.longer(config.prompts.per_iteration, replicas, numbers.share)


def as_json(config: RunConfig, outlook: Outlook) -> dict[str, object]:
    """Return what ``sol-rl plan --json`` prints."""
    prediction, choice = outlook.prediction, outlook.choice
    numbers = choice.best.numbers if choice else configured_layout(config)
    ratio = ratios(config, dict(outlook.arms))
    return {
        "name": config.name,
        "arm": config.arm,
        "iteration_s": prediction.iteration,
        "bound_s": outlook.bound,
        "explore_s": prediction.explore,
        "rollout_s": prediction.rollout,
        "update_s": prediction.update,
        "layout": {
            "mode": numbers.mode,
            "gpus": sum(each.count for each in outlook.gpus),
            "kinds": {each.kind: each.count for each in outlook.gpus},
            "explore_ahead": numbers.ahead,
            "in_host_memory_between_turns": list(numbers.leaves),
            "services": {kind: asdict(group) for kind, group in numbers.groups.items()},
            "why": choice.why if choice else "by hand",
            "candidates": [_candidate(each) for each in choice.table] if choice else [],
        },
        "gathering_s": dict(outlook.gathered),
        "idle_share": dict(prediction.idle),
        "gpu_idle_share": [
            {"gpus": n, "idle_share": share, "actors": dict(actors)}
            for n, share, actors in prediction.gpu_idle
        ],
        "arms": {arm: each.iteration for arm, each in outlook.arms.items()},
        "arms_not": dict(outlook.arms_not),
        "arms_rollout_s": {arm: each.rollout for arm, each in outlook.arms.items()},
        "ratios": asdict(ratio) if ratio else None,
        "warnings": warnings(config, outlook),
        **_found(outlook),
    }


def _found(outlook: Outlook) -> dict[str, object]:
    findings, gpus = outlook.found, sum(each.count for each in outlook.gpus)
    if findings is None:
        return {}
    return {
        "critical_path_s": dict(findings.critical),
        "gpu_hours_per_1000_updates": gpu_hours(outlook.prediction.iteration, gpus),
        "one_more_gpu_s": dict(findings.more),
        "publish_s": findings.publish,
        "driver_share": findings.driver,
    }


def _candidate(each: Candidate) -> dict[str, object]:
    numbers: LayoutSpec = each.numbers
    return {
        "mode": numbers.mode,
        "explore_ahead": numbers.ahead,
        "numbers": numbers.describe(),
        "iteration_s": each.prediction.iteration if each.prediction else None,
        "memory_gb": each.gb,
        "why_not": each.why_not,
    }
