"""Command ``sol-rl config``."""

from __future__ import annotations

import argparse
import json

from cli.common import DONE, add_config
from configs.load import ConfigError, load, preset_names

HELP = "print a configuration with all defaults, or the names of the presets"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub, required=False)
    sub.add_argument("--list", action="store_true", help="print all preset names")


def run(options: argparse.Namespace) -> int:
    """Print the configuration that a run would use, or the names of the presets."""
    if options.list:
        print("\n".join(preset_names()))
        return DONE
    if options.config is None:
        raise ConfigError("config: give a preset name or a TOML file, or --list")
    config = load(options.config, options.overrides)
    shown = {**config.model_dump(mode="json"), "plan": config.plan.model_dump(mode="json")}
    print(json.dumps(shown, indent=2))
    return DONE
