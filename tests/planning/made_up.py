"""Models for tests of layouts, with made-up seconds and bytes close to those of the real ones."""

from configs.load import load
from configs.schema import RunConfig
from planning.layouts.costs import Costs
from planning.layouts.predict import Tasks

MODELS = {  # GPU-seconds on a B200: explore, regenerate, update
    "flux1": (229.0, 285.0, 855.0),
    "sd35_large": (514.0, 428.0, 1287.0),
    "sd35_medium": (53.0, 38.0, 98.6),
    "sana": (110.0, 60.0, 115.0),
}
GB = 10**9
SHARDS = ("regenerate.compile=false", "services.learner.shard=base")
"""The second is refused without the first."""
BYTES = {"rollout": 16e9, "reward": 4e9, "encoder": 10e9}


def tasks(explore: float, regenerate: float, update: float, score: float = 0.0) -> Tasks:
    return Tasks(192, 48, explore / 192, regenerate / 48, update / 48, {"reward": score})


def costs(model: str, learner: float = 34e9, **more: Tasks) -> Costs:
    kinds = {"B200": tasks(*MODELS[model]), **more}
    return Costs(
        kinds, dict.fromkeys(kinds, BYTES), lambda replicas: learner + 1e9 * (replicas > 1)
    )


def preset(model: str = "flux1", *overrides: str, arm: str = "sol_rl") -> RunConfig:
    return load(f"{model}-{arm}-hpsv2", overrides)
