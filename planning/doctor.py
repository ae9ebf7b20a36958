"""The checks of ``sol-rl doctor``: facts about machines, turned into ``Check`` lines."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from configs.load import ConfigError
from configs.paths import exists, is_dir
from configs.prompts import read_prompts, refuse_overlap
from configs.schema import RunConfig
from planning.facts import GB, SMALL_SHM, Facts, server_urls
from planning.layouts.limits import ACTOR_GB, refuse_on_this_machine
from planning.placement import kinds_of
from planning.preflight import check_model, check_prompts, check_scorers, problems_of
from records.sinks import check_sinks

Outcome = Literal["ok", "failed", "note"]
LEAST_DISK_GB = 1.0
CLOCK_S = 2.0
"""Largest tolerated clock difference; beyond it, events of a run are hard to order."""
SLOW_MB_S = 100.0
"""Links below this (about 1 Gbit/s) are reported: publishing a large model would take minutes."""


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


# ---- from facts to lines


def check_configuration(config: RunConfig) -> list[Check]:
    """Check a configuration on the driver's machine: prompts, model, scorers, metrics port etc."""

    def prompts(config: RunConfig) -> None:
        train, test = (read_prompts(p) for p in (config.prompts.train, config.prompts.test))
        refuse_overlap(config.prompts, train, test)
        check_prompts(config, [*train, *test])

    def port(config: RunConfig) -> None:
        addr = (config.logging.prometheus_host, config.logging.prometheus_port)
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(addr)
        # TypeError and UnicodeError: not a valid host name
        except (OSError, TypeError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{addr[0]}:{addr[1]} cannot be served ({why}): set logging.prometheus_port to a"
                " free port, and logging.prometheus_host to an address of this machine"
            ) from None

    checks: dict[str, Callable[[RunConfig], None]] = {
        "prompts": prompts,
        "model": check_model,
        "scorers": check_scorers,
        "logging": check_sinks,
    }
    if config.logging.prometheus_port:
        checks["metrics port"] = port
    return [_checked(name, problems_of(config, check)) for name, check in checks.items()]


def _checked(name: str, problems: Sequence[str], good: str = "as configured") -> Check:
    return Check(name, "failed", "; ".join(problems)) if problems else Check(name, "ok", good)


def check_this_machine(config: RunConfig | None, facts: Facts) -> list[Check]:
    """Check that this machine can hold all actors of a run."""
    checks = [_machine(facts), _gpus(config, [facts])]
    if config is None:
        return checks
    checks += _servers(config, [facts])
    checks.append(
        _checked("actors", problems_of(config, refuse_on_this_machine), f"{facts.cores} cores")
    )
    count = sum(config.services.of(kind).count for kind in kinds_of(config))
    needed, name = count * ACTOR_GB, "free memory"
    found = f"{facts.free_gb:.1f} GB; {count} actors take {needed:.1f} GB before they load a model"
    short = facts.free_gb < needed
    checks.append(
        Check(name, "failed" if short else "ok", found, "end other programs" if short else "")
    )
    return checks


def check_run_root_writable(config: RunConfig) -> Check:
    """Check that the run root is writable and has enough free disk space."""
    path = Path(config.run_root or "runs").absolute()
    try:
        existing = next(each for each in (path, *path.parents) if exists(each))
        free = shutil.disk_usage(existing).free / GB
    except OSError as error:  # permission denied, or a name that is too long
        reason = f"{str(path)[:200]}: {error.strerror or error}"
        return Check("run root", "failed", reason, "set run_root=DIR")
    if not is_dir(existing):
        return Check("run root", "failed", f"{existing} is not a directory", "set run_root=DIR")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check("run root", "failed", f"{existing} cannot be written", "set run_root=DIR")
    if free < LEAST_DISK_GB:
        return Check(
            "run root", "failed", f"{free:.1f} GB free at {existing}", ("free disk space there")
        )
    return Check("run root", "ok", f"{path}, {free:.1f} GB free")


def check_nodes(config: RunConfig | None, facts: Sequence[Facts]) -> list[Check]:
    """Check the nodes of a cluster against one another and against what the run needs."""
    checks = [_machine(each) for each in facts]
    checks += [_alike(facts), _gpus(config, facts)]
    if config is not None:
        checks += [_everywhere(facts), *_servers(config, facts), _shared(config, facts)]
    checks += [_clocks(facts), _bandwidth(facts), _shared_memory(facts)]
    return checks


def _machine(facts: Facts) -> Check:
    gpus = ", ".join(f"{count} x {name}" for name, count in facts.gpus.items()) or "no GPU"
    where = f" (node {facts.node[:8]})" if facts.node else ""
    driver = f", {facts.driver}" if facts.driver else ""
    return Check(
        f"machine {facts.host}{where}",
        "ok",
        f"{facts.cores} cores, {facts.free_gb:.1f} GB free, {gpus}{driver}; supported backends:"
        f" {', '.join(facts.backends)}",
    )


def _alike(facts: Sequence[Facts]) -> Check:
    """Compare Python and package versions of all nodes with those of the first."""
    first, differences = facts[0], list[str]()
    for other in facts[1:]:
        expected, actual = ({"python": each.python, **each.packages} for each in (first, other))
        differences += [
            f"{name} is {expected.get(name)} on {first.host}, {actual.get(name)} on {other.host}"
            for name in sorted({*expected, *actual})
            if expected.get(name) != actual.get(name)
        ]
    if differences:
        return Check(
            "versions", "failed", "; ".join(differences), ("install the same versions on all nodes")
        )
    summary = f"python {first.python}, torch {first.packages.get('torch', 'not installed')}"
    return Check("versions", "ok", f"{summary} on {len(facts)} node{'s' * (len(facts) > 1)}")


def _gpus(config: RunConfig | None, facts: Sequence[Facts]) -> Check:
    """Compare the number of GPUs with the configured shares; report missing packing kernels."""
    count = sum(sum(each.gpus.values()) for each in facts)
    missing = [f"{each.host}: {each.kernels}" for each in facts if each.kernels]
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
    lines = [f"{each.host}: {problem}" for each in facts for problem in each.problems]
    return _checked("model and scorers on every node", lines, "readable")


def _servers(config: RunConfig, facts: Sequence[Facts]) -> list[Check]:
    """Check that every machine reaches the servers of scorers; none without such scorers."""
    checks = list[Check]()
    for url in server_urls(config):
        silent = [each for each in facts if url in each.servers]
        reasons = "; ".join(f"{each.servers[url]}, asked from {each.host}" for each in silent)
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
    locked = [f"{each.host} ({each.writable})" for each in facts if each.writable]
    if blind:
        advice = "mount the same directory on all nodes and set run_root to it"
        return Check(
            name,
            "failed",
            (f"{config.run_root} is a different directory on {', '.join(blind)}"),
            advice,
        )
    if locked:
        return Check(name, "failed", f"not writable on {', '.join(locked)}", "grant write access")
    if all(each.shared is None for each in facts):
        return Check(name, "failed", "run_root is not set", "set run_root=DIR, on shared storage")
    if unlocked := [each.host for each in facts if not each.locked]:
        return Check(
            name,
            "note",
            f"the driver's locks in {config.run_root} do not reach {', '.join(unlocked)}",
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
    on_disk = [f"{each.store_on_disk} on {each.host}" for each in facts if each.store_on_disk]
    if on_disk:
        return Check("shared memory", "note", f"object store in {', '.join(on_disk)}", SMALL_SHM)
    return Check("shared memory", "ok", "object stores are in memory")


def check_token(joined: bool, home: Path | None = None) -> Check:
    """Check that Ray's token keeps strangers from submitting work, which would run their code.

    ``joined`` is True for a cluster that was joined, False for a Ray started locally. ``home``
    replaces the home directory in which the token file is searched.
    """
    mode, name = os.environ.get("RAY_AUTH_MODE", ""), "token"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray/auth_token")
    exists = os.path.isfile(file)  # False also if permission is denied
    given = exists or bool(os.environ.get("RAY_AUTH_TOKEN"))  # KubeRay gives it in the variable
    off = mode not in ("", "token")
    if off and not joined:
        return Check(name, "note", "Ray's token is off; a local Ray listens on loopback")
    if off or (joined and not given):  # a cluster with a token would have refused this process
        advice = "RAY_AUTH_MODE=token, or a firewall around the head (docs/security.md)"
        return Check(name, "note", "off: anyone who can reach the dashboard can run code", advice)
    if exists and stat.S_IMODE(file.stat().st_mode) & 0o077:
        return Check(name, "note", f"{file} is readable by other users", f"chmod 600 {file}")
    return Check(name, "ok", "requested" if given else "none needed yet")


def json_of(checks: Sequence[Check]) -> dict[str, object]:
    """Return the report as ``--json`` prints it."""
    return {
        "ok": all(check.outcome != "failed" for check in checks),
        "checks": [asdict(check) for check in checks],
    }
