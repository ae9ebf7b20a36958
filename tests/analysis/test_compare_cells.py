"""The cells of a comparison, and the requests that are refused before anything starts."""

from collections import Counter
from pathlib import Path

import pytest

from analysis.compare.cells import UNUSED, read_comparison
from analysis.compare.request import COMPARISONS, Request
from configs.load import ConfigError, load, parse


def names(request: Request) -> list[str]:
    return [cell.name for cell in read_comparison(request).cells]


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
    assert configs["sol_rl-flow_grpo"].objective.name == "flow_grpo"
    assert configs["sol_rl-flow_grpo"].plan.solver == "flow_sde"
    assert configs["naive_quant-diffusion_nft"].arm == "naive_quant"
    one, other = (
        configs[name].model_dump() for name in ("sol_rl-diffusion_nft", "naive_quant-diffusion_nft")
    )
    assert {key for key in one if one[key] != other[key]} == {"arm", "name"}


def test_an_unused_varied_key_adds_no_cell():
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
    assert len(names(two)) == 4
    assert "sol_rl-selection.rule-random-explore.pool_size-48" in names(two)


def test_words_and_numbers_are_varied_together():
    vary = ("optimizer.gradient_checkpointing=auto,0.5,true",)
    cells = read_comparison(Request("quickstart", vary=vary)).cells
    given = [parse({**cell.tree, "name": "cell"}) for cell in cells]
    assert [config.optimizer.gradient_checkpointing for config in given] == ["auto", 0.5, True]


@pytest.mark.parametrize("arm", list(UNUSED))
def test_only_used_keys_change_the_plan_of_an_arm(arm):
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
    ("request_", "message"),
    [
        (Request("quickstart", arms=("solrl",)), "--arms solrl: one of"),
        (Request("quickstart", arms=("sol_rl", "sol_rl")), "given twice"),
        (Request("quickstart", objectives=("ppo",)), "--objectives ppo: one of"),
        (Request("quickstart", vary=("explore.steps",)), "expected key=value,value"),
        (Request("quickstart", vary=("explore.stepz=2",)), "did you mean 'steps'"),
        (Request("quickstart", vary=("evaluate.steps=5,10",)), "evaluate.steps: 5 in"),
        (
            Request("quickstart", arms=("sol_rl",), overrides=("arm=sol_rl",)),
            "give only one of them",
        ),
        (
            Request("quickstart", arms=("naive_quant",), objectives=("flow_grpo", "dance_grpo")),
            "'naive_quant' with objective",
        ),
        (Request("quickstart", baseline="awm"), "--baseline awm: no cell of this name"),
        (Request("quickstart", seeds=0), "--seeds 0"),
        (Request("small", arms=("sol_rl",)), "leave out --arms and --objectives"),
        (Request("nothing"), "no preset of that name"),
        (Request("quickstart", vary=(f"explore.steps={'1' * 5000}",)), "explore.steps = 1111"),
        (Request("quickstart", vary=(f"explore.steps={'[' * 9999}",)), "explore.steps = [[[["),
    ],
)
def test_invalid_comparisons_are_refused_before_anything_starts(request_, message):
    with pytest.raises(ConfigError) as error:
        read_comparison(request_)
    assert message in error.value.lines[0]


def test_another_objective_does_not_inherit_settings(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'base = "quickstart"\nset = {objective = {beta = 0.5}}\n[[cells]]\nname = "nft"\n'
        '[[cells]]\nname = "awm"\nlayers = ["objectives/awm"]\nset = {optimizer = {lr = 1e-4}}\n'
    )
    nft, awm = (
        parse(cell.tree_of(0, tmp_path))
        for cell in read_comparison(Request(str(file), overrides=("iterations=3",))).cells
    )
    assert nft.objective.beta == 0.5
    assert awm.objective.name == "awm"
    assert not hasattr(awm.objective, "beta")
    assert (nft.optimizer.lr, awm.optimizer.lr) == (1.5e-3, 1e-4)
    assert nft.iterations == awm.iterations == 3


def test_a_comparison_file_with_a_misspelt_key(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "quickstart"\n[[cells]]\nname = "a"\nlayer = ["objectives/awm"]\n')
    with pytest.raises(ConfigError, match="cells.0.layer"):
        read_comparison(Request(str(file)))


def test_the_shipped_comparisons_match_their_descriptions():
    small = read_comparison(Request("small"))
    assert small.seeds == (0, 1, 2, 3, 4) and all(cell.refused is None for cell in small.cells)
    configs = {cell.name: parse(cell.tree_of(0, Path("/x"))) for cell in small.cells}
    arms = ["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]
    paths = ["flow_grpo", "flow_grpo-selected", "dance_grpo", "dance_grpo-selected"]
    assert list(configs) == [*arms, "awm", *paths]
    assert [configs[name].arm for name in arms] == arms
    assert [configs[name].arm for name in paths] == ["diffusionnft", "sol_rl"] * 2
    assert [name for name, c in configs.items() if c.explore.paths] == paths[1::2]
    selected = [c for name, c in configs.items() if name not in ("flow_grpo", "dance_grpo")]
    assert {c.prompts.per_iteration for c in selected} == {4}
    # as in their papers: as many images as the others explore
    plain = [configs["flow_grpo"], configs["dance_grpo"]]
    assert all(c.prompts.per_iteration * c.selection.keep <= 4 * 96 for c in plain)
    assert configs["dance_grpo"].objective.one_noise_per_group
    own = {"name": True, "arm": True, "objective": True}
    own |= {"optimizer": {"lr", "steps_per_iteration"}, "prompts": {"per_iteration"}}
    own["explore"] = {"paths"}
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
