"""Scorers outside the shared actors: a server that fails or is slow, and two with conflicting
packages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from cluster.driver.scoring import Scored, Scoring
from cluster.driver.services import ActorServices
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.reward_harness import IMAGES, MEAN, PROMPTS, Harness, config
from tests.rewards.server import Server, serving


@pytest.fixture(scope="module")
def served(ray_here) -> Iterator[tuple[Server, Harness]]:
    """Start a server that scores by the mean, and actors that query it once per try, for 1 s."""
    with serving() as server:
        server.slow_s = 1.6
        settings = {"url": server.url, "timeout_s": 1.0, "retries": 0}
        with Harness(
            config([MEAN, {"name": "http", "settings": settings}], {"deadline_s": 20.0})
        ) as harness:
            yield server, harness


@pytest.mark.parametrize(
    ("trouble", "why"),
    [(500, "answered 500 Internal Server Error"), ("slow", "did not answer (timed out)")],
)
def test_a_failing_or_slow_server_is_retried_by_another_actor_and_counted(served, trouble, why):
    server, harness = served
    before = len(harness.events)
    server.answers = [trouble]
    scored, scoring = harness.score()
    assert scored.rewards.tolist() == [0, 2, 4, 6] and scoring.tally.dropped == 0  # the mean twice
    failed, recovered = (
        next(event for event in harness.events[before:] if event.startswith(kind))
        for kind in ("chunk_reissued", "chunk_recovered")
    )
    assert why in failed
    assert re.findall(r"'actor': (\d)", failed) != re.findall(r"'actor': (\d)", recovered)
    server.answers = [trouble] * 2
    scored, scoring = harness.score()
    assert scored.values["mean"].tolist() == [0, 1, 2, 3] and np.isnan(scored.values["http"]).all()
    assert np.isnan(scored.rewards).all() and len(scored.rewards) == 4 == scoring.tally.dropped
    with pytest.raises(RunFailed, match="scoring failed for 4 of 4 images, .*max_failed_share"):
        scoring.tally.check_share()


@pytest.mark.slow
def test_two_scorers_with_conflicting_packages_run_in_their_own_environments(ray_here, tmp_path):
    """The mix has two versions of one package, each in the environment of its scorer's actors.

    The driver has neither.
    """
    for version in (1, 2):
        package = tmp_path / f"v{version}" / "paint"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"import numpy as np\nVERSION = {version}\ndef scorer():\n    return lambda images,"
            " prompts, metadata: np.full(len(images), float(VERSION), np.float32)\n"
        )
    envs = {
        f"v{v}": {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path / f"v{v}")}}}
        for v in (1, 2)
    }
    mix = [{"name": "paint:scorer", "alias": f"v{v}", "weight": 10.0**v} for v in (1, 2)]
    run = config(mix, own=envs)
    run = run.model_copy(update={"run_root": str(tmp_path / "runs")})

    async def use() -> Scored:
        services = ActorServices(run, RunDirectory.of(run), lambda *_, **__: None)
        services.only("reward")
        await services.start()
        try:
            return await Scoring(run.rewards, services.reward).score(
                "x", ray.put(IMAGES), PROMPTS, (0,)
            )
        finally:
            await services.stop()

    assert asyncio.run(use()).rewards.tolist() == [210.0] * 4  # 10 x 1 + 100 x 2
