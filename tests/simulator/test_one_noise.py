"""Which initial noise the driver requests. The simulated actors record the requests."""

from collections import defaultdict

import pytest

from configs.load import parse
from policy.sampling.noise import stream_seed
from simulator import actors
from simulator.run import simulate
from simulator.services import Hardware
from tests.simulator.test_simulator import DURATIONS, KEEP, POOL, PROMPTS, config

HARDWARE = Hardware({"one": DURATIONS}, [], cores=2)
SHARED = {"name": "dance_grpo", "window": {"size": 3}, "shared_noise": True}


@pytest.fixture
def requests(monkeypatch):
    """The recorded (kind, seeds, start, solver) of every task, in the order of the requests."""
    result = []
    for kind, method in ((actors.Rollout, "explore"), (actors.Learner, "generate")):
        monkeypatch.setattr(kind, method, recorded(getattr(kind, method), method, result))
    return result


def recorded(original, name, result):
    def record(self, request, conditioning):
        result.append((name, request.seeds, request.start, request.solver))
        return original(self, request, conditioning)

    return record


def run_of(**more):
    tree = config(actors=2, replicas=2).model_dump(mode="json")
    tree["regenerate"]["solver"] = None
    tree["services"]["learner"]["share"] = "samples"  # several tasks regenerate one prompt
    for key, value in more.items():
        tree[key] = tree[key] | value if isinstance(value, dict) and key != "objective" else value
    return parse(tree)


def test_all_paths_of_a_prompt_start_at_its_first_seed(requests):
    explore = {"paths": True, "steps": 6}
    run = run_of(objective=SHARED, explore=explore, audit={"random_seeds": 8})
    simulate(run, HARDWARE, 1)
    firsts = [stream_seed(run.seed, "explore", 0, p, 0) for p in range(PROMPTS)]
    pools = {seed: set() for seed in firsts}
    regenerated = defaultdict(set)
    for name, seeds, start, solver in requests:
        if start is None:
            assert name == "generate" and solver == "dpmpp_2m"  # held-out images
            continue
        assert solver == "dance_sde"
        (pools if name == "explore" else regenerated)[start].update(seeds)
    assert all(len(pool) == POOL and first in pool for first, pool in pools.items())
    assert set(regenerated) == set(firsts)
    assert all(len(seeds) >= KEEP and seeds <= pools[first] for first, seeds in regenerated.items())


def test_paths_without_exploring_start_at_the_first_trained_seed(requests):
    simulate(run_of(objective=SHARED, arm="diffusionnft"), HARDWARE, 1)
    starts = {start for name, _, start, solver in requests if solver == "dance_sde"}
    assert starts == {stream_seed(0, "explore", 0, p, 0) for p in range(PROMPTS)}


def test_requests_name_no_start_without_shared_noise(requests):
    explore = {"paths": True, "steps": 6}
    objective = {"name": "flow_grpo", "window": {"size": 3}}
    simulate(run_of(objective=objective, explore=explore), HARDWARE, 1)
    assert {start for _, _, start, _ in requests} == {None}
    assert {solver for name, _, _, solver in requests if name == "explore"} == {"flow_sde"}
