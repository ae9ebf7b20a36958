"""Write ``planning/layouts/counted.json``, the model counts that ``sol-rl plan`` uses for presets.

Run it again when the counted quantities, a preset or an architecture changes. It takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from configs.load import EDITORS, MODELS, REFERENCE, load, rewards_of
from planning.counting import count, kept_rows, key_of, write_kept
from planning.plan import open_architecture
from policy.precision.backends import BACKENDS

ARMS = ("sol_rl", "naive_quant")
"""Two of the four arms: one decodes explored images as proxies, the other trains on them."""
FORMATS = ("torch_nvfp4", "fp8", "bf16")
ONE_GPU = ("sd35_medium-sol_rl-24gb", "z_image-sol_rl-24gb")
"""Presets that are single files, for models other than the default model."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Count models in every format that arms explore in on GPUs; write the rows of each at once."""
    parser = argparse.ArgumentParser(prog="python -m tools.count_models", description=__doc__)
    reference = (f"reference-{name}" for name in REFERENCE)
    every = (*MODELS, *EDITORS, *reference, *ONE_GPU)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="models to count; rows of others are kept (default: all, and no row is kept)",
    )
    models = parser.parse_args(arguments).models
    if unknown := set(models) - set(every):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; available: {', '.join(every)}")
    rows = dict(kept_rows()) if models else {}
    for model in models or every:
        several = [f"{model}-{arm}-{rewards_of(model)[-1]}" for arm in ARMS]
        configs = [load(name) for name in ([model] if model in ONE_GPU else several)]
        # one family for both arms, so that what they share is counted once
        with open_architecture(configs[0]) as (family, _):
            for config in configs:
                for name in FORMATS:
                    rows[key_of(config, name)] = count(config, family, BACKENDS[name])
                    write_kept(rows)
                    print(f"{model} {config.arm} {name}", flush=True)


if __name__ == "__main__":
    main()
