"""Command ``sol-rl doctor``."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from cli.common import (
    DONE,
    USER_ERROR,
    add_cluster,
    add_config,
    address_given,
    is_dashboard,
    say,
    show,
)
from configs.load import ConfigError, load

HELP = "check the machine or the cluster that a run would use, one line per check"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(
        sub,
        required=False,
        what=("configuration of the run to check for (default: check the machine only)"),
    )
    add_cluster(sub)
    sub.add_argument("--json", action="store_true", help="print the checks as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print a line per check; return exit code 2 if one failed."""
    if options.overrides and options.config is None:
        raise ConfigError("--set needs a configuration")
    config = load(options.config, options.overrides) if options.config is not None else None
    address = address_given(options.address)
    if is_dashboard(address):
        from cluster.jobs.submit import check_through_job

        shown = ["--json"] if options.json else []
        return check_through_job(address, options.config, options.overrides, shown, show, say)
    from planning import doctor
    from planning.facts import examine, silent_servers

    checks = doctor.check_configuration(config) if config else []
    if address:
        from cluster.jobs.doctor import check_cluster
        from cluster.jobs.live_runs import connected

        with connected(address):
            checks += check_cluster(config)
    else:
        servers = silent_servers(config) if config else {}
        checks += doctor.check_this_machine(config, replace(examine(), servers=servers))
        checks += [doctor.check_run_root_writable(config)] if config else []
        checks.append(doctor.check_token(joined=False))
    if options.json:
        print(json.dumps(doctor.json_of(checks), indent=2))
    else:
        print("\n".join(check.line() for check in checks))
    return USER_ERROR if any(check.outcome == "failed" for check in checks) else DONE
