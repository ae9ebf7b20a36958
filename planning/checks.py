"""Lines of ``sol-rl doctor`` on machines: each alone, and the nodes of a cluster compared.

A cluster may have hundreds of nodes: nodes of which the same is to be said share a line.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from configs.schema import RunConfig
from planning.facts import SMALL_RAY_DISK, SMALL_SHM, Facts, server_urls
from planning.placement import kinds_of

Outcome = Literal["ok", "failed", "note"]
CLOCK_S = 2.0
"""Largest tolerated clock difference; beyond it, events of a run are hard to order."""
SLOW_MB_S = 100.0
"""Links below this (about 1 Gbit/s) are reported: publishing a large model would take minutes."""
FEW = 4
"""Largest number of nodes that are named one by one."""
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked, the finding, and advice if something is wrong."""

    name: str
    outcome: Outcome
    found: str
    advice: str = ""

    def line(self) -> str:
        """Return the line that is printed."""
        todo = f": {self.advice}" if self.advice else ""
        return f"{self.outcome:6}  {self.name}: {self.found}{todo}"


def checked(name: str, problems: Sequence[str], good: str = "as configured") -> Check:
    """Return a failed check that names the problems, or a passed one if there are none."""
    return Check(name, "failed", "; ".join(problems)) if problems else Check(name, "ok", good)


def some_of(names: Sequence[str]) -> str:
    """Name all, or three and how many more."""
    if len(names) <= FEW:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3:,} more"


def by_reason(pairs: Iterable[tuple[T, str]]) -> dict[T, str]:
    """Return reason -> the machines with it, from (reason, machine)."""
    machines: dict[T, list[str]] = {}
    for reason, machine in pairs:
        machines.setdefault(reason, []).append(machine)
    return {reason: some_of(names) for reason, names in machines.items()}


def check_nodes(config: RunConfig | None, facts: Sequence[Facts]) -> list[Check]:
    """Check the nodes of a cluster against one another and against what the run needs."""
    checks = [*machine_checks(facts), _alike(facts), gpu_check(config, facts)]
    if config is not None:
        checks += [_everywhere(facts), *server_checks(config, facts), _shared(config, facts)]
    checks += [_clocks(facts), _bandwidth(facts), _shared_memory(facts), _ray_disk(facts)]
    return checks


def machine_checks(facts: Sequence[Facts]) -> list[Check]:
    """Return a line per machine, or per kind of machine if there are more than a few."""
    kinds: dict[Hashable, list[Facts]] = {}
    for number, each in enumerate(facts):
        kind = (each.cores, tuple(each.gpus.items()), each.driver, each.backends)
        kinds.setdefault(kind if len(facts) > FEW else number, []).append(each)
    return [_machines(alike) for alike in kinds.values()]


def _machines(facts: Sequence[Facts]) -> Check:
    first, several = facts[0], len(facts) > 1
    gpus = ", ".join(f"{count} x {name}" for name, count in first.gpus.items()) or "no GPU"
    where = f" (node {first.node[:8]})" if first.node and not several else ""
    driver = f", {first.driver}" if first.driver else ""
    return Check(
        f"{len(facts):,} machines" if several else f"machine {first.host}{where}",
        "ok",
        (f"{some_of([each.host for each in facts])}: " if several else "")
        + f"{first.cores} cores, {min(each.free_gb for each in facts):.1f} GB free"
        + f"{' or more' * several}, {gpus}{driver}; supported backends:"
        f" {', '.join(first.backends)}",
    )


def _alike(facts: Sequence[Facts]) -> Check:
    """Compare Python and package versions of all nodes with those of the first."""
    first, differences = facts[0], list[tuple[tuple[str, str], str]]()
    for other in facts[1:]:
        expected, actual = ({"python": each.python, **each.packages} for each in (first, other))
        differences += [
            ((f"{name} is {expected.get(name)} on {first.host}", str(actual.get(name))), other.host)
            for name in sorted({*expected, *actual})
            if expected.get(name) != actual.get(name)
        ]
    if differences:
        lines = [f"{one}, {other} on {on}" for (one, other), on in by_reason(differences).items()]
        return Check(
            "versions", "failed", "; ".join(lines), ("install the same versions on all nodes")
        )
    summary = f"python {first.python}, torch {first.packages.get('torch', 'not installed')}"
    return Check("versions", "ok", f"{summary} on {len(facts)} node{'s' * (len(facts) > 1)}")


def gpu_check(config: RunConfig | None, facts: Sequence[Facts]) -> Check:
    """Compare the number of GPUs with the configured shares; report missing packing kernels."""
    count = sum(sum(each.gpus.values()) for each in facts)
    reasons = by_reason((each.kernels, each.host) for each in facts if each.kernels)
    missing = [f"{on}: {why}" for why, on in reasons.items()]
    wanted = (
        sum(config.services.of(k).gpus * config.services.of(k).count for k in kinds_of(config))
        if config is not None
        else 0
    )
    if config is not None and (wanted > count or (config.layout is not None and not count)):
        requested = f"{wanted:g}" if wanted else "a layout on some"
        return Check(
            "GPUs",
            "failed",
            f"{count} available, but the configuration requests {requested}",
            "give --address of a cluster with enough GPUs, or a configuration for CPUs",
        )
    if missing:
        return Check("GPUs", "note", f"{count}; {'; '.join(missing)}", "exploring may be slow")
    return Check("GPUs", "ok", f"{count}, {wanted:g} requested" if config else f"{count}")


def _everywhere(facts: Sequence[Facts]) -> Check:
    found = by_reason((problem, each.host) for each in facts for problem in each.problems)
    lines = [f"{on}: {problem}" for problem, on in found.items()]
    return checked("model and scorers on every node", lines, "readable")


def server_checks(config: RunConfig, facts: Sequence[Facts]) -> list[Check]:
    """Check that every machine reaches the servers of scorers; none without such scorers."""
    checks = list[Check]()
    for url in server_urls(config):
        silent = [each for each in facts if url in each.servers]
        found = by_reason((each.servers[url], each.host) for each in silent)
        reasons = "; ".join(f"{why}, asked from {on}" for why, on in found.items())
        if len(silent) == len(facts):
            advice = f"check the URL, or start it: a run would wait {config.rewards.outage_s:g} s"
            checks.append(Check(f"server {url}", "failed", reasons, advice))
        elif silent:
            advice = "scoring would wait if its actors were there: services.reward.labels"
            checks.append(Check(f"server {url}", "note", reasons, advice))
        else:
            checks.append(Check(f"server {url}", "ok", "answers"))
    return checks


def _shared(config: RunConfig, facts: Sequence[Facts]) -> Check:
    name = "shared directory"
    blind = [each.host for each in facts if each.shared is False]
    refused = by_reason((each.writable, each.host) for each in facts if each.writable)
    if blind:
        advice = "mount the same directory on all nodes and set run_root to it"
        return Check(
            name,
            "failed",
            (f"{config.run_root} is a different directory on {some_of(blind)}"),
            advice,
        )
    if refused:
        where = "; ".join(f"{on} ({why})" for why, on in refused.items())
        return Check(name, "failed", f"not writable on {where}", "grant write access")
    if all(each.shared is None for each in facts):
        return Check(name, "failed", "run_root is not set", "set run_root=DIR, on shared storage")
    if unlocked := [each.host for each in facts if not each.locked]:
        return Check(
            name,
            "note",
            f"the driver's locks in {config.run_root} do not reach {some_of(unlocked)}",
            "a second driver of a run there is not refused: it takes the run over",
        )
    return Check(
        name,
        "ok",
        (f"{config.run_root}, readable and writable on {len(facts)} node{'s' * (len(facts) > 1)}"),
    )


def _clocks(facts: Sequence[Facts]) -> Check:
    worst = max(facts, key=lambda each: abs(each.clock))
    found = f"at most {abs(worst.clock):.2f} s apart ({worst.host})"
    late = abs(worst.clock) > CLOCK_S
    return Check("clocks", "failed" if late else "ok", found, "run an NTP client" if late else "")


def _bandwidth(facts: Sequence[Facts]) -> Check:
    known = [(each.bandwidth_mb_s, each.host) for each in facts if each.bandwidth_mb_s is not None]
    if not known:
        return Check("bandwidth", "note", "only one node: nothing is sent between machines")
    rate, host = min(known)
    slow = rate < SLOW_MB_S
    advice = "publishing is limited by this link: check it" if slow else ""
    return Check("bandwidth", "note" if slow else "ok", f"{rate:.0f} MB/s to {host}", advice)


def _shared_memory(facts: Sequence[Facts]) -> Check:
    found = by_reason((each.store_on_disk, each.host) for each in facts if each.store_on_disk)
    if found:
        where = ", ".join(f"{directory} on {hosts}" for directory, hosts in found.items())
        return Check("shared memory", "note", f"object store in {where}", SMALL_SHM)
    return Check("shared memory", "ok", "object stores are in memory")


def _ray_disk(facts: Sequence[Facts]) -> Check:
    found = by_reason((each.ray_disk, each.host) for each in facts if each.ray_disk)
    where = "; ".join(f"{what} on {hosts}" for what, hosts in found.items())
    if where:
        return Check("disk of Ray", "note", where, SMALL_RAY_DISK)
    return Check("disk of Ray", "ok", "has room")
