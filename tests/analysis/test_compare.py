"""The comparison's cells and arithmetic: what is run, what is refused, and numbers that were worked
out by hand.
"""

import json
import math
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from analysis.compare.cells import UNUSED, read_comparison
from analysis.compare.command import compare_existing
from analysis.compare.data import REWARD, measure, remarks, summarise
from analysis.compare.groups import group
from analysis.compare.request import COMPARISONS, Request
from analysis.compare.statistics import Mean, Moment, mean_of, paired, speed_up, time_to
from analysis.compare.table import tables
from configs.load import ConfigError, load, parse
from configs.toml_text import to_toml
from tests.analysis.fake_train import write
from tests.analysis.page import Page
from tests.analysis.synthetic import write_run

SECONDS = {"explore": 2.0, "regenerate": 1.0, "update": 4.0, "publish": 0.5, "iteration": 8.0}


def names(request: Request) -> list[str]:
    return [cell.name for cell in read_comparison(request).cells]


def configuration(root: Path, name: str, seed: int = 0, *overrides: str):
    return load("compare_small", [f"run_root={root}", f"name={name}", f"seed={seed}", *overrides])


# ---- arithmetic


def test_mean_and_standard_error_by_hand():
    # deviations -1, 0, 1: s^2 = 2 / 2 = 1, standard error 1 / sqrt(3)
    assert mean_of([1.0, 2.0, 3.0]) == Mean(2.0, pytest.approx(1 / math.sqrt(3), rel=1e-15), 3)
    assert mean_of([5.0]).mean == 5.0 and math.isnan(mean_of([5.0]).error)
    assert mean_of([]).count == 0 and math.isnan(mean_of([]).mean)


def test_pairing_takes_away_what_seeds_have_in_common():
    """Seeds that move both by 1, 5, -3 leave differences 0.1, 0.2, 0.3: mean 0.2, s = 0.1, standard
    error 0.1 / sqrt(3).
    """
    shifts = {0: 1.0, 1: 5.0, 2: -3.0, 9: 0.0}
    ours = {seed: shift + 0.1 * (seed + 1) for seed, shift in shifts.items() if seed < 3} | {
        7: 99.0
    }
    found = paired(ours, shifts)
    assert found.count == 3  # seed 7 has no partner
    assert found.mean == pytest.approx(0.2, abs=1e-12) and found.error == pytest.approx(
        0.1 / math.sqrt(3), abs=1e-12
    )
    assert mean_of([ours[seed] for seed in range(3)]).error > 20 * found.error


def test_speed_up_is_a_ratio_of_means():
    assert speed_up(Mean(169.0, 1.0, 3), Mean(274.0, 2.0, 3)) == pytest.approx(
        1.62, abs=0.002
    )  # the method's paper, FLUX.1
    assert math.isnan(speed_up(mean_of([]), mean_of([1.0])))


def curve(*points: tuple[float, float]) -> list[Moment]:
    return [Moment(i, mean_of([s]), mean_of([g]), mean_of([g])) for i, (s, g) in enumerate(points)]


def test_time_to_a_gain_lies_on_the_straight_line_between_evaluations():
    found = curve((0, 0.0), (10, 0.2), (20, 0.1), (30, 0.4))
    assert time_to(found, 0.05) == pytest.approx(2.5)
    assert time_to(found, 0.2) == pytest.approx(
        10.0
    )  # first reached there; that it falls again later is another matter
    assert time_to(found, 0.25) == pytest.approx(25.0)
    assert time_to(found, 0.4) == pytest.approx(30.0)
    assert time_to(found, 0.41) is None
    assert (
        time_to(found, 0.0) is None
        and time_to(found, -1.0) is None
        and time_to(found, math.nan) is None
    )
    assert (
        time_to(curve((0, 0.0), (30, 0.4)), 0.1) is None
    )  # two points: the way between them was not seen


# ---- cells


def test_cells_are_arms_times_objectives_and_impossible_pairs_say_why():
    found = read_comparison(
        Request(
            "quickstart",
            arms=("sol_rl", "naive_quant"),
            objectives=("diffusion_nft", "flow_grpo"),
            seeds=2,
            overrides=("seed=5",),
        )
    )
    assert found.seeds == (5, 6) and found.baseline == "sol_rl-diffusion_nft"
    assert {cell.name: cell.refused is None for cell in found.cells} == {
        "sol_rl-diffusion_nft": True,
        "sol_rl-flow_grpo": True,
        "naive_quant-diffusion_nft": True,
        "naive_quant-flow_grpo": False,
    }
    assert "'naive_quant' with objective 'flow_grpo'" in str(found.cells[-1].refused)
    configs = {cell.name: parse(cell.tree_of(5, Path("/x"))) for cell in found.running}
    assert (
        configs["sol_rl-flow_grpo"].objective.name == "flow_grpo"
        and configs["sol_rl-flow_grpo"].plan.solver == "flow_sde"
    )
    assert configs["naive_quant-diffusion_nft"].arm == "naive_quant"
    one, other = (
        configs[name].model_dump() for name in ("sol_rl-diffusion_nft", "naive_quant-diffusion_nft")
    )
    assert {key for key in one if one[key] != other[key]} == {"arm", "name"}


def test_a_varied_key_that_an_arm_does_not_use_makes_no_second_cell():
    request = Request(
        "quickstart", arms=("sol_rl", "diffusionnft", "naive_scaling"), vary=("explore.steps=2,4",)
    )
    assert names(request) == [
        "sol_rl-explore.steps-2",
        "sol_rl-explore.steps-4",
        "diffusionnft",
        "naive_scaling",
    ]
    two = Request(
        "quickstart", vary=("selection.rule=best_worst,random", "explore.pool_size=48,96")
    )
    assert len(names(two)) == 4 and "sol_rl-selection.rule-random-explore.pool_size-48" in names(
        two
    )


@pytest.mark.parametrize("arm", list(UNUSED))
def test_unused_keys_leave_the_plan_of_the_arm_as_it_is_and_used_ones_do_not(arm):
    def plan(*overrides: str):
        return load("quickstart", [f"arm={arm}", *overrides]).plan

    for key, value in (
        ("explore.steps", 3),
        ("explore.backend", "bf16"),
        ("explore.solver", "euler"),
        ("explore.pool_size", 48),
    ):
        used = len(names(Request("quickstart", arms=(arm,), vary=(f"{key}={value}",)))[0]) > len(
            arm
        )
        assert used == (plan(f"{key}={value}") != plan()), key


def test_pools_too_small_for_the_selection_are_refused_cell_by_cell():
    cells = read_comparison(Request("quickstart", vary=("explore.pool_size=12,48",))).cells
    assert "cannot be kept" in str(cells[0].refused) and cells[1].refused is None


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("quickstart", arms=("solrl",)), "--arms solrl: one of"),
        (Request("quickstart", arms=("sol_rl", "sol_rl")), "given twice"),
        (Request("quickstart", objectives=("ppo",)), "--objectives ppo: one of"),
        (Request("quickstart", vary=("explore.steps",)), "expected key=value,value"),
        (Request("quickstart", vary=("explore.stepz=2",)), "did you mean 'steps'"),
        (Request("quickstart", vary=("evaluate.steps=5,10",)), "evaluate.steps: 5 in"),
        (Request("quickstart", arms=("sol_rl",), overrides=("arm=sol_rl",)), "give one of the two"),
        (
            Request("quickstart", arms=("naive_quant",), objectives=("flow_grpo", "dance_grpo")),
            "'naive_quant' with objective",
        ),
        (Request("quickstart", baseline="awm"), "--baseline awm: no such cell"),
        (Request("quickstart", seeds=0), "--seeds 0"),
        (Request("small", arms=("sol_rl",)), "leave --arms and --objectives out"),
        (Request("nothing"), "no preset of that name"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(request_, said):
    with pytest.raises(ConfigError) as error:
        read_comparison(request_)
    assert said in error.value.lines[0]


def test_another_objective_does_not_inherit_the_settings_of_the_one_below(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "quickstart"\nset = {objective = {beta = 0.5}}\n[[cells]]\nname = "nft"\n'
        '[[cells]]\nname = "awm"\nlayers = ["objectives/awm"]\nset = {optimizer = {lr = 1e-4}}\n'
    )
    nft, awm = (
        parse(cell.tree_of(0, tmp_path))
        for cell in read_comparison(Request(str(file), overrides=("iterations=3",))).cells
    )
    assert (
        nft.objective.beta == 0.5
        and awm.objective.name == "awm"
        and not hasattr(awm.objective, "beta")
    )
    assert (nft.optimizer.lr, awm.optimizer.lr) == (
        1.5e-3,
        1e-4,
    ) and nft.iterations == awm.iterations == 3


def test_a_comparison_file_with_a_misspelt_key(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "quickstart"\n[[cells]]\nname = "a"\nlayer = ["objectives/awm"]\n')
    with pytest.raises(ConfigError, match="cells.0.layer"):
        read_comparison(Request(str(file)))


def test_the_shipped_comparisons_are_what_they_say():
    small = read_comparison(Request("small"))
    assert small.seeds == (0, 1, 2, 3, 4) and all(cell.refused is None for cell in small.cells)
    configs = {cell.name: parse(cell.tree_of(0, Path("/x"))) for cell in small.cells}
    arms = ["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]
    paths = ["flow_grpo", "flow_grpo-selected", "dance_grpo", "dance_grpo-selected"]
    assert list(configs) == [*arms, "awm", *paths]
    assert [configs[name].arm for name in arms] == arms
    assert [configs[name].arm for name in paths] == ["diffusionnft", "sol_rl"] * 2
    selected = [c for name, c in configs.items() if name not in ("flow_grpo", "dance_grpo")]
    assert {c.prompts.per_iteration for c in selected} == {4}
    # as their papers do: no more images than the others explore
    plain = [configs["flow_grpo"], configs["dance_grpo"]]
    assert all(c.prompts.per_iteration * c.selection.keep <= 4 * 96 for c in plain)
    assert configs["dance_grpo"].objective.one_noise_per_group
    own = {"name": True, "arm": True, "objective": True}
    own |= {"optimizer": {"lr", "steps_per_iteration"}, "prompts": {"per_iteration"}}
    same = [config.model_dump(exclude=own) for config in configs.values()]
    assert all(one == same[0] for one in same)
    nft = [configs[name] for name in arms]
    assert len({(config.optimizer.lr, config.objective) for config in nft}) == 1
    search = read_comparison(Request("small_search"))
    tried = [parse(cell.tree_of(search.seeds[0], Path("/x"))) for cell in search.cells]
    assert Counter(c.objective.name for c in tried) == dict.fromkeys(
        {c.objective.name for c in configs.values()}, 6
    )  # the same effort
    assert (
        {c.prompts.test for c in tried}
        == {"shapes/prompts/tune.jsonl"}
        != {c.prompts.test for c in configs.values()}
    )
    assert set(search.seeds).isdisjoint(small.seeds)
    settings = [(c.optimizer.lr, c.objective) for c in tried]
    found = [c for name, c in configs.items() if not name.endswith("-selected")]
    assert all((c.optimizer.lr, c.objective) in settings for c in found)
    assert {path.stem for path in COMPARISONS.glob("*.toml")} >= {"small", "small_search", "time"}


def test_a_configuration_written_as_toml_reads_back_the_same():
    tree = {
        "a": 'quote " back \\ and \x7f ü \U0001f600',
        "b": {"c": [1, 2.5, 1e-20, True], "d.e": {"f": []}},
        "g": -3,
        "h": 1e300,
    }
    assert tomllib.loads(to_toml(tree | {"none": None})) == tree


# ---- results


@pytest.fixture
def results(tmp_path):
    """Two cells, three seeds: gains after four updates of 0.04 + 0.01 seed and twice that."""
    cells = []
    for name, factor, explore in (("slow", 1.0, 6.0), ("quick", 2.0, 1.0)):
        runs = []
        for seed in range(3):
            gains = [factor * (0.01 * i + 0.0025 * seed * i) for i in range(1, 5)]
            seconds = SECONDS | {"explore": explore, "iteration": 6.0 + explore}
            runs.append(
                measure(
                    write(
                        configuration(tmp_path, f"{name}{seed}", seed, "iterations=4"),
                        gains,
                        seconds,
                    ),
                    seed,
                )
            )
        cells.append((name, name, None, runs))
    return summarise([*cells, ("odd", "odd", "it cannot be", [])], "slow")


def test_a_cell_s_numbers_by_hand(results):
    slow, quick, odd = results
    # final gains 0.04, 0.05, 0.06 and twice that; bases 0.50, 0.51, 0.52; s = 0.01 and 0.02
    # (rewards are float64: 1e-12)
    assert slow.gain[REWARD].mean == pytest.approx(0.05, abs=1e-12)
    assert slow.gain[REWARD].error == pytest.approx(0.01 / math.sqrt(3), abs=1e-12)
    assert slow.base[REWARD].mean == pytest.approx(0.51, abs=1e-12)
    assert quick.score[REWARD].mean == pytest.approx(0.61, abs=1e-12)
    # scores 0.58, 0.61, 0.64: s = 0.03; the difference of gains, paired, is 0.04, 0.05, 0.06
    assert quick.score[REWARD].error == pytest.approx(0.03 / math.sqrt(3), abs=1e-12)
    assert quick.against[REWARD] == Mean(
        pytest.approx(0.05, abs=1e-12), pytest.approx(0.01 / math.sqrt(3), abs=1e-12), 3
    )
    assert slow.against[REWARD].mean == 0 and slow.within == pytest.approx(0.02)
    assert quick.speed_ups == {"rollout": pytest.approx(7 / 2), "iteration": pytest.approx(12 / 7)}
    assert quick.stages["other"].mean == pytest.approx(7 - 1 - 1 - 4 - 0.5)
    # the goal is 0.05; slow gains 0.0125 an iteration of 12 s, quick 0.025 in 7 s
    assert slow.reach == {share: pytest.approx(share * 48) for share in (0.25, 0.5, 0.75, 1.0)}
    assert quick.reach == {share: pytest.approx(share * 14) for share in (0.25, 0.5, 0.75, 1.0)}
    assert odd.refused and odd.counted == () and odd.reach[1.0] is None


def test_the_tables_say_it_in_the_paper_s_form(results):
    scores, seconds, times = tables(results, "slow")
    assert scores.heads[2] == "reward (base 0.5100)"
    assert scores.rows[0] == ("slow", "3", "0.5600 ± 0.0115 (+0.0500 ± 0.0058)", "0.0200", "-")
    assert scores.rows[1] == (
        "quick",
        "3",
        "0.6100 ± 0.0173 (+0.1000 ± 0.0115)",
        "0.0200",
        "+0.0500 ± 0.0058",
    )
    assert scores.rows[2] == ("odd", "refused", "-", "-", "-")
    assert seconds.rows[1] == (
        "quick",
        "1.00",
        "1.00",
        "4.00",
        "0.50",
        "0.50",
        "2.00",
        "3.50x",
        "7.00 ± 0.00",
        "1.71x",
    )
    assert (
        times.heads[4] == "100 % (0.0500)"
        and times.rows[0][4] == "48.0"
        and times.rows[1][4] == "14.0 (3.43x)"
    )


def test_what_was_explored_ahead_is_part_of_the_rollout(tmp_path):
    """Exploring 2 s in its turn or 1.5 s of them ahead: the same rollout of 2 + 1 s. An iteration
    of 8 s is the same whole.
    """
    ahead = SECONDS | {"explore": 0.5, "explore_ahead": 1.5}
    runs = [
        measure(write(configuration(tmp_path, name), [0.1, 0.2, 0.3], each), 0)
        for name, each in (("a", SECONDS), ("b", ahead))
    ]
    plain, other = summarise([("a", "a", None, runs[:1]), ("b", "b", None, runs[1:])], "a")
    assert other.stages["rollout"].mean == pytest.approx(3.0) and other.stages[
        "explore"
    ].mean == pytest.approx(0.5)
    assert (
        other.speed_ups
        == plain.speed_ups
        == {"rollout": pytest.approx(1.0), "iteration": pytest.approx(1.0)}
    )


def test_remarks_on_what_would_mislead(tmp_path):
    def run(name: str, seed: int, gains: list[float], **how):
        return measure(write(configuration(tmp_path, name, seed), gains, SECONDS, **how), seed)

    good = [run("a0", 0, [0.1, 0.2]), run("a1", 1, [0.1, 0.2])]
    other = [run("b0", 0, [0.1]), run("b1", 1, [0.3, 0.3], ending="run_failed")]
    shifted = [
        measure(write(configuration(tmp_path, "c0", 3), [0.1, 0.2], SECONDS), 0)
    ]  # base 0.53 under seed 0
    cells = [
        ("a", "a", None, good),
        ("b", "b", None, other),
        ("c", "c", None, shifted),
        ("d", "d", "no such pair", []),
    ]
    results = summarise(cells, "a")
    said = "\n".join(remarks(results, "a"))
    assert "d: refused: no such pair" in said
    assert "b, seed 1: not counted: failed: said so" in said
    assert "not at equal numbers of updates: a 2; b 1; c 2" in said
    assert (
        "c: its evaluation before training is not the baseline's" in said
        and "b: its evaluation" not in said
    )
    assert results[1].against[REWARD].count == 1 and tables(results, "a")[0].rows[1][1] == "1 of 2"
    none = summarise([("a", "a", None, [run("z", 0, [-0.1, -0.2])])], "a")
    assert remarks(none, "a") == [
        "the baseline gained nothing, so there is no time to reach parts of its gain"
    ]


def test_run_directories_are_grouped_by_what_can_change_results(tmp_path):
    for name, seed, more in (
        ("a", 0, []),
        ("b", 1, ["services.rollout.actors=5"]),
        ("c", 0, ["explore.steps=3"]),
        ("d", 0, ["arm=diffusionnft"]),
    ):
        write(configuration(tmp_path, name, seed, *more), [0.1, 0.2], SECONDS)
    found = group([tmp_path])
    assert {title: [path.name for _, path in runs] for title, (_, runs) in found.items()} == {
        "sol_rl · explore.steps = 6": ["a", "b"],
        "sol_rl · explore.steps = 3": ["c"],
        "diffusionnft · explore.steps = 6": ["d"],
    }
    write(configuration(tmp_path, "again", 0, "logging.grid_prompts=2"), [0.1], SECONDS)
    with pytest.raises(ConfigError, match="the same configuration and run seed"):
        group([tmp_path])


def test_runs_that_were_evaluated_differently_are_not_compared(tmp_path):
    one = write(configuration(tmp_path, "a"), [0.1], SECONDS)
    other = write(configuration(tmp_path, "b", 0, "evaluate.noises=4"), [0.1], SECONDS)
    with pytest.raises(ConfigError, match="evaluate.noises: 2 in .*, 4 in "):
        group([one, other])
    with pytest.raises(ConfigError, match="no run here"):
        group([tmp_path / "nothing"])


def test_existing_runs_give_a_page_and_numbers(tmp_path):
    write_run(tmp_path / "quickstart")  # evaluated at both ends only
    text = compare_existing([tmp_path / "quickstart"], None, tmp_path / "out")
    assert any(line.startswith("| sol_rl ") and "0.7849 (+0.1182)" in line for line in text)
    assert any("no evaluations during training" in line for line in text)
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    (cell,) = numbers["cells"]
    assert cell["gain"][REWARD] == {
        "mean": pytest.approx(0.1182, abs=1e-9),
        "error": None,
        "count": 1,
    }
    assert cell["reach"] == {"0.25": None, "0.5": None, "0.75": None, "1": None}
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert "0.7849 (+0.1182)" in page.text and len(page.all("svg")) == 2
    assert not [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href")
    ]
    with pytest.raises(ConfigError, match="no such cell; there are: sol_rl"):
        compare_existing([tmp_path / "quickstart"], "awm", tmp_path / "out")


def test_a_page_of_several_cells_has_a_band_for_each_and_escapes_names(tmp_path):
    for seed in range(2):
        write(configuration(tmp_path, f"a{seed}", seed), [0.1, 0.2 + 0.1 * seed], SECONDS)
        write(
            configuration(tmp_path, f"b{seed}", seed, "explore.modules_to_not_convert=['<b>']"),
            [0.1, 0.3],
            SECONDS,
        )
    compare_existing([tmp_path], None, tmp_path / "out")
    page = Page((tmp_path / "out" / "compare.html").read_text())
    bands = [polygon for polygon in page.all("polygon") if "band" in (polygon["class"] or "")]
    assert len(bands) == 4 and not page.all("b>") and "'<b>'" in page.text
