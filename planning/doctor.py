"""The checks of ``sol-rl doctor``: facts about machines, turned into ``Check`` lines."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from configs.load import ConfigError
from configs.paths import exists, is_dir
from configs.prompts import read_prompts, refuse_overlap
from configs.schema import RunConfig
from planning.checks import Check, checked, gpu_check, machine_checks, server_checks
from planning.facts import GB, Facts
from planning.layouts.limits import ACTOR_GB, refuse_on_this_machine
from planning.placement import kinds_of
from planning.preflight import check_model, check_prompts, check_scorers, problems_of
from records.sinks import check_sinks

LEAST_DISK_GB = 1.0


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
    return [checked(name, problems_of(config, check)) for name, check in checks.items()]


def check_this_machine(config: RunConfig | None, facts: Facts) -> list[Check]:
    """Check that this machine can hold all actors of a run."""
    checks = [*machine_checks([facts]), gpu_check(config, [facts])]
    if config is None:
        return checks
    checks += server_checks(config, [facts])
    checks.append(
        checked("actors", problems_of(config, refuse_on_this_machine), f"{facts.cores} cores")
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


def check_token(joined: bool, home: Path | None = None) -> Check:
    """Check that Ray's token keeps strangers from submitting work, which would run their code.

    ``joined`` is True for a cluster that was joined, False for a Ray started locally. ``home``
    replaces the home directory in which the token file is searched.
    """
    mode, name = os.environ.get("RAY_AUTH_MODE", ""), "token"
    file = _token_file(home)
    exists = file is not None and os.path.isfile(file)  # False also if permission is denied
    given = exists or bool(os.environ.get("RAY_AUTH_TOKEN"))  # KubeRay gives it in the variable
    off = mode not in ("", "token")
    if off and not joined:
        return Check(name, "note", "Ray's token is off; a local Ray listens on loopback")
    if off or (joined and not given):  # a cluster with a token would have refused this process
        advice = "RAY_AUTH_MODE=token, or a firewall around the head (docs/security.md)"
        return Check(name, "note", "off: anyone who can reach the dashboard can run code", advice)
    if file is None and not given:
        return Check(name, "failed", "this user has no home directory for it", "set HOME=DIR")
    if file and exists and stat.S_IMODE(file.stat().st_mode) & 0o077:
        return Check(name, "note", f"{file} is readable by other users", f"chmod 600 {file}")
    return Check(name, "ok", "requested" if given else "none needed yet")


def _token_file(home: Path | None) -> Path | None:
    """Return the file of Ray's token; None if it would be in a home that this user lacks."""
    if given := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(given)
    try:
        return (home or Path.home()) / ".ray/auth_token"
    except RuntimeError:
        return None


def json_of(checks: Sequence[Check]) -> dict[str, object]:
    """Return the report as ``--json`` prints it."""
    return {
        "ok": all(check.outcome != "failed" for check in checks),
        "checks": [asdict(check) for check in checks],
    }
