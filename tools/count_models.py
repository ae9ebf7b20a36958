"""Write ``planning/layouts/counted.json``: what ``sol-rl plan`` counts of the models of the shipped
presets. To be run again when what is counted, a preset or an architecture changes; minutes.

    python -m tools.count_models [MODEL ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from configs.load import MODELS, REFERENCE, load
from planning.counting import count, kept_rows, key_of, write_kept
from planning.make import described
from policy.precision.backends import BACKENDS

ARMS = ("sol_rl", "naive_quant")
"""Of the four, one that decodes what it explores as proxies, and one that trains on it."""
FORMATS = ("torch_nvfp4", "fp8", "bf16")


def main(models: Sequence[str]) -> None:
    """Count models in the formats that arms explore in on GPUs; the rows of others stay.

    Without any all models of the presets, and no other row stays.
    """
    rows = kept_rows() if models else {}
    for model in models or (*MODELS, *(f"reference-{name}" for name in REFERENCE)):
        configs = [load(f"{model}-{arm}-hpsv2") for arm in ARMS]
        with described(configs[0]) as (family, _):  # one, so that what they share is counted once
            for config in configs:
                for name in FORMATS:
                    rows[key_of(config, name)] = count(config, family, BACKENDS[name])
                    write_kept(rows)
                    print(f"{model} {config.arm} {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
