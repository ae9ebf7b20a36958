"""Number of blocks whose activations are recomputed: as few as fit, where that is predicted to be
faster.
"""

import re

import pytest

from cluster.driver import layout
from configs.load import ConfigError, load
from planning.assumptions import Assumptions
from planning.layouts import recomputation
from planning.layouts.choose import DoesNotFit
from planning.layouts.gpus import Gpus
from planning.layouts.recomputation import ROOM, with_recomputation
from planning.placement import ACCELERATOR, Node
from planning.plan import make_plan

KEY = "optimizer.gradient_checkpointing"
EIGHT = [Gpus("B200", 8, 180.0)]


class Best:
    def __init__(self, seconds: float, gb: float):
        self.best = self
        self.seconds, self.gb = seconds, gb


@pytest.fixture
def needs(monkeypatch):
    """Replace the memory of the fullest GPU and the seconds of an iteration by given numbers.

    The memory is for recomputing nothing and everything; the family is ignored.
    """

    def set_to(none: float, every: float, seconds: float = 20.0) -> None:
        def choose(config, gpus, costs):
            share = config.optimizer.recomputed
            gb = none + share * (every - none)
            if gb > gpus[0].memory_gb:
                raise DoesNotFit("too large", gb, gb - gpus[0].memory_gb)
            return Best(100 + share * seconds, gb)

        monkeypatch.setattr(recomputation, "costs_of", lambda *_: None)
        monkeypatch.setattr(recomputation, "choose", choose)

    return set_to


def chosen(*overrides: str, gpus=EIGHT) -> float:
    config = load("flux1-sol_rl-hpsv2", [f"{KEY}=auto", *overrides])
    return with_recomputation(config, None, gpus).optimizer.gradient_checkpointing


@pytest.mark.parametrize(
    ("none", "share"),
    [
        (ROOM * 180, False),  # nine tenths of the memory, and nothing is recomputed
        (ROOM * 180 + 1, 0.25),
        (ROOM * 180 + 200, 0.75),  # 211 GB at one half
        (1000.0, True),
    ],
)
def test_the_fewest_blocks_that_fit_are_recomputed(needs, none, share):
    needs(none, 60.0)
    assert chosen() == share


def test_all_blocks_are_recomputed_if_nothing_fits(needs):
    needs(1000.0, 999.0)  # the layout reports what is short
    assert chosen() is True
    needs(10.0, 5.0)
    assert chosen(gpus=[]) is True
    by_hand = [f"services.{kind}.gpus=1" for kind in ("learner", "rollout", "encoder", "reward")]
    assert chosen(*by_hand, "services.learner.replicas=1", "services.rollout.actors=6") is True


def test_all_blocks_are_recomputed_if_not_slower(needs):
    needs(10.0, 5.0, seconds=0.0)
    assert chosen() is True


def test_explicit_shares_are_kept():
    config = load("flux1-sol_rl-hpsv2", [f"{KEY}=0.5"])
    assert with_recomputation(config, None, EIGHT) is config


@pytest.mark.parametrize("given", ["2", "-0.5", "often", "[1]"])
def test_an_invalid_share_is_one_line(given):
    with pytest.raises(ConfigError) as error:
        load("quickstart", [f"{KEY}={given}"])
    (line,) = error.value.lines
    assert line.startswith(KEY) and "use true, false, a share of the blocks" in line


def test_settings_as_shares():
    found = [load("quickstart", [f"{KEY}={v}"]).optimizer.recomputed for v in ("false", "true")]
    assert found == [0.0, 1.0]
    assert load("quickstart", [f"{KEY}=0.25"]).optimizer.recomputed == 0.25
    assert load("quickstart", [f"{KEY}=auto"]).optimizer.recomputed == 1.0


def test_a_run_reports_the_chosen_share(needs, monkeypatch):
    """It has a line of its own, after the layout's line, which lists the layouts that were not
    chosen.
    """
    needs(ROOM * 180 + 1, 60.0)
    nodes = [Node("one", 96, 8, {ACCELERATOR: "B200"})]
    monkeypatch.setattr(layout, "all_nodes", lambda: nodes)
    monkeypatch.setattr(layout, "free_nodes", lambda: nodes)
    message: list[str] = []
    config = layout.choose_cluster_layout(
        load("flux1-sol_rl-hpsv2", [f"{KEY}=auto"]), message.append
    )
    assert config.optimizer.gradient_checkpointing == 0.25
    line, *more = message
    assert more == [f"{KEY} = 0.25: the fastest that fits the memory"]
    taken, others = line.split("; others would take: ")
    mine = re.fullmatch(r"layout: shared, the fastest by prediction, ([\d.]+) s per .*", taken)
    assert mine is not None and "8 learner at 0.52 GPU" in taken
    recorded = [each.removesuffix(" s").rpartition(" ") for each in others.split(", ")]
    assert [kind for kind, *_ in recorded] == [
        "shared exploring ahead",
        "split exploring ahead",
        "split",
    ]
    seconds = [float(mine[1]), *(float(each) for *_, each in recorded)]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_flux_on_b200_recomputes_nothing():
    """FLUX.1's training pass has 3/2 of the operations if all blocks are recomputed."""
    given = Assumptions(accelerator="B200", gpus=8)
    every = make_plan(load("flux1-sol_rl-hpsv2"), given)
    auto = make_plan(load("flux1-sol_rl-hpsv2", [f"{KEY}=auto"]), given)
    assert auto.config.optimizer.gradient_checkpointing is False
    assert auto.outlook.prediction.iteration < 0.91 * every.outlook.prediction.iteration
    assert auto.outlook.fullest_gb < ROOM * 180
