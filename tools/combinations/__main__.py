"""Command line of ``make combinations``."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tools.combinations
from configs.rewards import Scorer
from configs.schema import RunConfig
from configs.section import Tree
from planning.layouts.gpus import Gpus
from records.errors import Stopped
from records.rundir import RunDirectory
from tools.combinations.draw import configured, drawn, operational
from tools.combinations.layouts import KINDS, draw_layout, simulated
from tools.combinations.machines import simulate_gpus, started
from tools.combinations.models import MODELS, changes, make
from tools.combinations.plans import try_plans
from tools.combinations.use import use

if TYPE_CHECKING:
    from tests.cluster.faults import FaultInjector
    from tests.cluster.nodes import Machines

SMALL = {
    "iterations": 2,
    "explore__pool_size": 4,
    "explore__chunk_size": 2,
    "selection__keep": 2,
    "evaluate__prompts": 1,
    "evaluate__noises": 2,
    "optimizer__batch_size": 4,
    "optimizer__lr": 1e-3,
    "logging__grid_prompts": 1,
}
BRIGHTNESS = "tests.cluster.scorers:Brightness"
ON_GPUS = {service: {"gpus": 0.1} for service in ("rollout", "learner", "encoder", "reward")}
BF16 = {"precision": "bf16"}
AUTOSCALE = {
    "services.autoscale.enabled": True,
    "services.autoscale.patience": 1,
    "services.autoscale.grow_above": 0.01,
    "services.autoscale.shrink_below": 0.99,
}
"""Settings with which the rollout pool grows or shrinks after every iteration."""
SHARD, HOST = "services.learner.shard=", 'between_turns="host"'
LONGEST_DELAY_S = 0.2
REPLACED_AFTER_S = 3.0
"""Seconds after which another node comes in the place of a lost one."""
STOPPED = 130


class Combinations:
    """Runs with random settings, on the Ray cluster that this process is connected to."""

    def __init__(self, out: Path, seed: int, gpus: Sequence[Gpus] = ()):
        """``gpus``: the simulated ones of all services, which this process does not have, by kind.

        With none, all services compute on CPUs.
        """
        self.out, self.seed, self.gpus = out, seed, gpus
        self.machines: Machines | None = None  # nodes that runs may lose
        self.faults = ""  # those of the last run
        self.models = {name: make(name, self.out) for name in MODELS}

    def try_one(self, index: int) -> str | None:
        """Try run ``index`` of the seed; return None, or what went wrong and with what settings."""
        from tests.cluster.faults import FaultInjector
        from tests.cluster.hosts import end_idle

        rng = random.Random(f"{self.seed} {index}")
        model = rng.choice(MODELS)
        base = self._base(model, rng.choice((1, 2)))
        if self.gpus:
            # only a layout tells services of GPUs of several kinds where they belong
            by_layout = bool(rng.randrange(2)) or len(self.gpus) > 1
            base |= {"layout": {}} if by_layout else {"services": ON_GPUS}
        if rng.randrange(2):  # something to combine
            base["rewards"]["scorers"].append({"name": BRIGHTNESS, "weight": 0.5})
        settings, faults = drawn(rng, base, gpus=bool(self.gpus)), FaultInjector()
        others: list[str] = []
        try:
            base["name"] = f"{index:04d}-first"
            asked, config = self._laid_out(rng, base, settings)
            settings += asked
            first = self._train(config, faults)
            if not self.gpus:  # the commands would compute on this process's CPU
                use(self.out / "runs" / base["name"], random.Random(f"use {self.seed} {index}"))
            base["name"] = f"{index:04d}-second"
            others, config = self._otherwise(rng, base, settings, config)
            faults = injector(rng, faults, self.machines, config)
            self.faults = ", ".join(map(str, faults.faults))
            if "layout" in base:
                end_idle()  # processes of the first run hold shares of the GPUs
            second = self._train(config, faults)
        except Stopped:
            raise  # the tool itself was asked to stop
        except Exception as error:
            return f"{type(error).__name__}: {error}; {described(model, settings, faults, others)}"
        if parts := [part for part in first if first[part] != second[part]]:
            return f"{', '.join(parts)} differ; {described(model, settings, faults, others)}"
        for run in (self.out / "runs").glob(f"{index:04d}-*"):
            shutil.rmtree(run, ignore_errors=True)
        return None

    def _otherwise(
        self, rng: random.Random, base: Tree, settings: Sequence[str], first: RunConfig
    ) -> tuple[list[str], RunConfig]:
        """Return (overrides that must not change the results of ``first``, the configuration)."""
        others = [*operational(rng, base, settings), *other_actors(rng, base)]
        if first.services.learner.replicas == 1:  # a base is shared by several
            others = [each for each in others if not each.startswith(SHARD)]
        if first.explore_ahead:  # both sides work at the same time
            others = [each for each in others if not each.endswith(HOST)]
        asked, config = self._laid_out(rng, base, [*settings, *others], first)
        return [*others, *asked], config

    def _laid_out(
        self,
        rng: random.Random,
        base: Tree,
        settings: Sequence[str],
        recorded: RunConfig | None = None,
    ) -> tuple[list[str], RunConfig]:
        """Return (overrides that ask for a layout, if any, and the configuration to train)."""
        if self.gpus and "layout" in base:
            return draw_layout(rng, base, settings, self.gpus, recorded)
        return [], configured(base, settings)

    def _train(self, config: RunConfig, faults: FaultInjector) -> dict[str, str]:
        from tests.cluster.outcomes import outcome

        shutil.rmtree(RunDirectory.of(config).path, ignore_errors=True)
        return outcome(trained(config, faults), config.iterations)

    def _base(self, name: str, scale: int) -> Tree:
        from tests.cluster.runs import tiny_config

        path = self.models[name]
        tree = tiny_config(path, self.out, "base", **SMALL).model_dump(exclude_unset=True)
        more = changes(name, path, self.out, scale)
        tree |= {"objective": {}, **more, "explore": {**tree["explore"], **more["explore"]}}
        if self.gpus:
            tree["regenerate"] |= BF16
            tree["explore"]["backend"] = "auto"
        return json.loads(json.dumps(tree))


def trained(config: RunConfig, faults: FaultInjector) -> RunDirectory:
    """Train a run to its end; resume it if ``faults`` stopped it."""
    from tests.cluster.hosts import end_idle
    from tests.cluster.runs import run_here

    try:
        return run_here(config, progress=faults)
    except Stopped:
        if not faults.done:  # somebody else stopped it
            raise
        if config.layout is not None:
            end_idle()  # they hold shares of the GPUs, which the layout needs
        return run_here(config, resume=True)


def other_actors(rng: random.Random, base: Tree) -> list[str]:
    """Return random numbers of actors and of tasks, which must not change results.

    In one run of three the rollout pool is scaled automatically, after every iteration.
    """
    actors = rng.choice((1, 3))
    settings: dict[str, Any] = {
        "services.rollout.actors": actors,
        "services.rollout.in_flight": rng.choice((1, 3)),
        "services.reward.actors": rng.choice((1, 2)),
    }
    scorer = Scorer(**rng.choice(base["rewards"]["scorers"]))
    if not rng.randrange(3):
        settings[f"services.scorers.{scorer.label}.actors"] = rng.choice((1, 2))
    if not rng.randrange(3):
        settings |= {**AUTOSCALE, "services.rollout.max_actors": actors + 1}
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def injector(
    rng: random.Random, undisturbed: FaultInjector, machines: Machines | None, config: RunConfig
) -> FaultInjector:
    """Return an injector that disturbs a run at a random moment of the undisturbed one.

    It kills a random actor or, in one run of three, stops the run by SIGTERM. Others are lost with
    the actor: all that share its GPU, or its node if there are several ``machines``.
    """
    from tests.cluster.faults import RUN, Fault, FaultInjector, Way

    iteration, moment = rng.choice(sorted(key for key in undisturbed.seen if key[0] >= 0))
    count = 1 + rng.randrange(undisturbed.seen[iteration, moment])
    delay = round(rng.uniform(0, LONGEST_DELAY_S), 3)
    kinds = [pool.kind for pool in undisturbed.session.services.pools]
    if rng.randrange(3):
        kind = rng.choice(kinds)
        ways: dict[Way, bool] = {
            "kill": True,
            "node": machines is not None,
            "gpu": config.services.of(kind).gpus > 0,
        }
        way: Way = rng.choice([each for each, possible in ways.items() if possible])
        fault = Fault(kind, way, iteration, moment, count, delay_s=delay)
        back = REPLACED_AFTER_S if machines else None
        return FaultInjector(fault, machines=machines, replaced_after_s=back)
    return FaultInjector(Fault(RUN, "term", iteration, moment, count, delay_s=delay))


def described(
    model: str, settings: Sequence[str], faults: FaultInjector, others: Sequence[str]
) -> str:
    """Return the settings and faults of a run as one line."""
    faulty = ", ".join(map(str, faults.faults)) or "no fault"
    return f"{model}: {' '.join([*settings, *others])}; {faulty}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the runs and print a line for each that went wrong; return 1 if any did."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.nodes > 1 and not options.simulated_gpu:
        parser.error("--nodes: needs --simulated-gpu")
    if len(options.simulated_gpu) > options.nodes:
        parser.error("--simulated-gpu: a node has GPUs of one kind; use --nodes")
    if options.plans:
        return try_plans(range(options.first, options.plans), options.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cluster.runtime import template
    from tests.cluster.hosts import end_idle
    from tests.cluster.runs import tiny_config

    out = Path(options.out or f"runs/combinations-{options.seed}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    kinds = [KINDS[capability] for capability in options.simulated_gpu]
    combinations = Combinations(out, options.seed, simulated(kinds))
    library = simulate_gpus(kinds[0], out) if kinds else None
    template.start(tiny_config(combinations.models["sd3"], out, "template"))
    wrong = 0
    with started(combinations.gpus, options.nodes, library) as combinations.machines:
        for index in range(options.first, options.runs):
            try:
                why = combinations.try_one(index)
            except (Stopped, KeyboardInterrupt):
                print(f"stopped in run {index}; continue with --first {index}")
                return STOPPED
            wrong += why is not None
            print(f"{index:4}  {why or f'same results; {combinations.faults}'}", flush=True)
            end_idle()
            if combinations.machines:
                combinations.machines.repair()
    print(f"{wrong} of {options.runs - options.first} runs went wrong")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make combinations", description=(tools.combinations.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=20, help="runs 0 to RUNS - 1")
    parser.add_argument(
        "--plans", type=int, default=0, help="plans 0 to PLANS - 1 of published models, and no runs"
    )
    parser.add_argument("--first", type=int, default=0, metavar="I", help="begin with number I")
    parser.add_argument("--seed", type=int, default=0, help="of settings and faults")
    parser.add_argument(
        "--simulated-gpu",
        nargs="+",
        default=[],
        choices=list(KINDS),
        help="services compute on simulated GPUs of these compute capabilities",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        choices=(1, 2, 4),
        help="with --simulated-gpu: nodes that share the GPUs; some are lost and replaced",
    )
    parser.add_argument("--out", metavar="DIR", help="directory (default: runs/combinations-SEED)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
