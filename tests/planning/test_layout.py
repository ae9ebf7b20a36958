"""The choice of layouts: golden numbers, invariants, and messages where none fits.

Seconds and bytes of the models are made up, close to those of the real ones, so that nothing is
counted.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import ConfigError, load
from configs.resume import differences
from planning.layouts.choose import choose
from planning.layouts.costs import Costs
from planning.layouts.gpus import Gpus, assign_gpus, gpus_of
from planning.layouts.limits import refuse_on_this_machine, refuse_too_many
from planning.layouts.predict import bound, fill, predict
from planning.layouts.resolve import keep_layout, needs_layout
from planning.layouts.spec import Group, LayoutSpec, as_started, configured_layout, with_layout
from planning.placement import ACCELERATOR, WHOLE, Node, needs_of, place
from tests.cores import set_cores
from tests.planning.made_up import BYTES, MODELS, SHARDS, costs, preset, tasks

# ---- arithmetic


def test_tasks_go_to_the_slot_that_ends_first():
    """Two free slots of 3 s, and one of 2 s that is busy until 4: 3, 3, 6, 6, 6 and 8."""
    assert fill([(2, 0, 3), (1, 4, 2)], 6) == (8, [4, 2])
    assert fill([(2, 0, 3)], 5) == (9, [5]) and fill([], 3) == (0, [])


def test_shares_are_laid_largest_first_on_the_fullest_gpu():
    groups = {"learner": Group(6, 0.52), "rollout": Group(10, 0.36), "reward": Group(6, 0.066)}
    laid = assign_gpus(
        LayoutSpec("", {**groups, "encoder": Group(1, 0.04)}), [Gpus("B200", 8, 180)]
    )
    found = {(each.count, tuple(sorted(each.actors.items()))) for each in laid or []}
    both = (("learner", 1), ("reward", 1), ("rollout", 1))
    assert found == {(1, (("encoder", 1), *both)), (5, both), (2, (("rollout", 2),))}
    assert assign_gpus(LayoutSpec("", {"learner": Group(9, 0.52)}), [Gpus("B200", 8, 180)]) is None
    assert assign_gpus(LayoutSpec("", {"learner": Group(2, 4)}), [Gpus("B200", 7, 180)]) is None


def test_a_split_layout_with_known_numbers():
    """Six rollout actors, one learner: regenerating overlaps with at least 47/48 of exploring."""
    numbers = LayoutSpec("", {"rollout": Group(6, 1), "learner": Group(1, 1)})
    gpus, there = [Gpus("B200", 8, 180)], {"B200": tasks(229, 285, 855)}
    found = predict(numbers, assign_gpus(numbers, gpus) or [], there)
    assert found.iteration == pytest.approx(285 + 855)
    assert found.explore == pytest.approx(229 / 6) and found.update == pytest.approx(855)
    assert found.idle["rollout"] == pytest.approx(1 - 229 / 6 / 1140)
    assert sorted((n, round(share, 3)) for n, share, _ in found.gpu_idle) == [
        (1, 0.0),
        (1, 1.0),
        (6, 0.967),
    ]
    assert bound(there, gpus) == pytest.approx(1369 / 8)


# ---- golden choices


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_every_gpu_works_if_there_is_a_prompt_for_each(model, gpus):
    choice = choose(preset(model), [Gpus("B200", gpus, 180)], costs(model))
    numbers, found = choice.best.numbers, choice.best.prediction
    assert (numbers.mode, numbers.ahead) == ("shared", 0) and found is not None
    assert numbers.groups["learner"] == Group(gpus, 0.52, 4.0)
    assert numbers.groups["rollout"] == Group(gpus, 0.36, 2.0)
    assert found.iteration <= 1.05 * choice.bound and found.mean_idle < 0.05


def test_more_gpus_than_prompts_get_replicas_that_share_samples():
    gpus = [Gpus("B200", 64, 180)]
    for model in MODELS:
        choice = choose(preset(model), gpus, costs(model))
        numbers = choice.best.numbers
        assert (numbers.mode, numbers.share, numbers.ahead) == ("shared", "samples", 0)
        assert numbers.groups["learner"].actors == numbers.groups["rollout"].actors == 64
        # three or four chunks per GPU, and a quarter of a prompt after the last
        assert choice.best.seconds <= 1.1 * choice.bound
        resolved = with_layout(preset(model), numbers)
        assert resolved.services.learner.share == "samples"
    even = choose(preset("flux1"), [Gpus("B200", 48, 180)], costs("flux1")).best.numbers
    assert even.share == "prompts"


def test_replicas_of_whole_prompts_leave_gpus_to_rollout_actors_that_explore_ahead():
    gpus = [Gpus("B200", 64, 180)]
    whole = "services.learner.share=prompts"
    choice = choose(preset("flux1", whole), gpus, costs("flux1"))
    assert choice.best.numbers.describe() == (
        "48 learner at 1 GPU, 16 rollout at 0.8 GPU, 16 reward at 0.1099 GPU,"
        " 1 encoder at 0.081 GPU, explore_ahead = 1"
    )
    assert choice.best.seconds == pytest.approx((285 + 855) / 48)
    assert "explore ahead, with the policy of the previous iteration" in choice.why
    on_policy = choose(preset("flux1", "explore_ahead=0", whole), gpus, costs("flux1")).best
    assert on_policy.numbers.ahead == 0 and on_policy.seconds > choice.best.seconds
    sana = choose(preset("sana", whole), gpus, costs("sana"))
    # two on the GPUs without a learner
    assert sana.best.numbers.groups["rollout"].actors == 48 + 2 * 16
    assert sana.best.seconds <= 1.15 * sana.bound


def test_requested_modes_are_respected():
    gpus = [Gpus("B200", 8, 180)]
    split = choose(preset("flux1", "layout.mode=split"), gpus, costs("flux1")).best
    assert split.numbers.mode == "split" and split.numbers.groups["learner"].gpus == 1
    actors = {kind: group.actors for kind, group in split.numbers.groups.items()}
    assert (actors["rollout"], actors["learner"], split.numbers.ahead) == (2, 6, 1)
    assert split.seconds == pytest.approx((285 + 855) / 6)
    shared = choose(preset("flux1", "layout.mode=shared"), gpus, costs("flux1"))
    assert shared.best.numbers.mode == "shared" and shared.why == "as requested"
    assert {each.numbers.mode for each in shared.table} == {"shared", "split"}


def test_rollout_actors_on_blackwell_and_learners_on_hopper():
    """With one B200 and eight H200, the B200 explores and everything else is on the H200."""
    slow = tasks(229 * 4.5, 285 * 2.27, 855 * 2.27)
    gpus = [Gpus("B200", 1, 180), Gpus("H200", 8, 141)]
    choice = choose(preset("flux1"), gpus, costs("flux1", H200=slow))
    groups = choice.best.numbers.groups
    assert groups["rollout"] == Group(1, 0.8, 2.0, "B200")
    assert groups["learner"] == Group(8, 1.0, 4.0, "H200")
    assert choice.best.seconds == pytest.approx((285 + 855) * 2.27 / 8, rel=0.01)
    alone = [each for each in choice.table if each.numbers.mode == "shared"]
    kinds = {each.numbers.groups["learner"].accelerator for each in alone}
    assert kinds == {"B200", "H200"}
    assert all(each.seconds > choice.best.seconds for each in alone)


def test_rollout_actors_are_only_on_gpus_that_run_the_configured_format():
    """Even where other GPUs would make an iteration shorter; learners may be on any."""
    gpus, nvfp4 = [Gpus("B200", 1, 180), Gpus("H200", 8, 141)], "explore.backend=torch_nvfp4"
    quick = costs("flux1", H200=tasks(1.0, 285, 855))
    for override, kinds in ((nvfp4, {"B200"}), ("explore.backend=fp8", {"B200", "H200"})):
        choice = choose(preset("flux1", override), gpus, quick)
        rollouts = {each.numbers.groups["rollout"].accelerator for each in choice.table}
        assert rollouts == kinds
    with pytest.raises(ConfigError) as error:
        choose(preset("flux1", nvfp4), gpus[1:], quick)
    assert str(error.value) == (
        "explore.backend: 'torch_nvfp4' does not run on H200: use auto, or fp8, emulated_nvfp4,"
        " bf16, fp32"
    )
    # the arm explores at full precision, whatever the format
    assert choose(preset("flux1", nvfp4, arm="naive_scaling"), gpus[1:], quick).best.prediction


def test_an_arm_without_rollout_actors_uses_learners_only():
    gpus = [Gpus("B200", 8, 180)]
    numbers = choose(preset(arm="diffusionnft"), gpus, costs("flux1")).best.numbers
    assert "rollout" not in numbers.groups
    # one scorer on each GPU, never two
    both = {"learner": 1, "reward": 1}
    laid = [(each.count, each.actors) for each in assign_gpus(numbers, gpus) or []]
    assert sorted(laid, key=repr) == [(1, {**both, "encoder": 1}), (7, both)]
    # where the encoder does not fit beside a learner, it is on a GPU without one: 66 + 4 + 10 GB
    gpus = [Gpus("H100", 8, 80)]
    seconds = costs("flux1", 66e9, H100=tasks(*MODELS["flux1"]))
    best = choose(preset(arm="diffusionnft"), gpus, seconds).best
    laid = [(each.count, each.actors) for each in assign_gpus(best.numbers, gpus) or []]
    assert sorted(laid, key=repr) == [(1, {"reward": 1, "encoder": 1}), (7, {"learner": 1})]


# ---- numbers given by hand


def test_explicit_numbers_take_precedence():
    gpus = [Gpus("B200", 8, 180)]
    old = [
        *("services.rollout.actors=6", "services.rollout.gpus=1", "services.learner.gpus=1"),
        *("services.reward.gpus=0.5", "services.encoder.gpus=0.5"),
    ]
    found = choose(preset("flux1", *old), gpus, costs("flux1")).best.numbers.groups
    assert {kind: (group.actors, group.gpus) for kind, group in found.items() if group.gpus} == {
        "rollout": (6, 1),
        "learner": (1, 1),
        "reward": (1, 0.5),
        "encoder": (1, 0.5),
    }
    three = choose(preset("flux1", "services.learner.replicas=3"), gpus, costs("flux1"))
    assert three.best.numbers.groups["learner"].actors == 3


def test_chosen_numbers_are_written_and_kept():
    config, gpus = preset("flux1"), [Gpus("B200", 8, 180)]
    choice = choose(config, gpus, costs("flux1"))
    resolved = with_layout(config, choice.best.numbers)
    assert resolved.services.learner.replicas == resolved.services.rollout.actors == 8
    assert resolved.services.rollout.gpus == 0.36 and resolved.explore_ahead == 0
    again = choose(resolved, [Gpus("B200", 16, 180)], costs("flux1"))
    assert again.best.numbers.groups == configured_layout(resolved).groups


def test_a_layout_is_needed_only_if_values_are_missing():
    """No layout is chosen without [layout], on CPUs by hand, or where every number is given."""
    assert needs_layout(preset("flux1")) and not needs_layout(load("quickstart"))
    cpus = [f"services.{kind}.gpus=0" for kind in ("rollout", "learner", "reward", "encoder")]
    assert not needs_layout(preset("flux1", *cpus)) and needs_layout(preset("flux1", *cpus[:3]))
    config = preset("flux1")
    chosen = choose(config, [Gpus("B200", 8, 180)], costs("flux1")).best.numbers
    assert not needs_layout(with_layout(config, chosen))


# ---- what does not fit


def test_layouts_that_do_not_fit_are_excluded():
    """With 60 GB they do not all fit, but the learner on one GPU and the rollout actor on another
    do.
    """
    gpus = [Gpus("B200", 4, 60)]
    choice = choose(preset("flux1"), gpus, costs("flux1"))
    assert choice.best.numbers.mode == "split" and choice.why == "the only one that fits"
    left_out = next(each for each in choice.table if each.numbers.mode == "shared")
    assert left_out.why_not == (
        "encoder + learner + reward + rollout: 68.0 GB on a B200 of 60 GB, 8.0 GB short"
    )


@pytest.mark.parametrize(
    ("count", "memory", "message"),
    [
        (1, 60, "8.0 GB short; nearest layout that fits: split on 2 x B200"),
        (8, 20, "15.0 GB short; nearest layout that fits: GPUs of at least 35 GB"),
    ],
)
def test_if_nothing_fits_one_line_says_what_is_missing_and_what_would_fit(count, memory, message):
    with pytest.raises(ConfigError) as error:
        choose(preset("flux1"), [Gpus("B200", count, memory)], costs("flux1"))
    (line,) = error.value.lines
    assert "black-forest-labs/FLUX.1-dev does not fit on" in line and message in line
    assert f"{count} x B200 of {memory} GB" in line


def test_a_sharded_base_needs_at_least_two_replicas():
    """A learner of 100 GB fits only if each of two replicas holds half.

    One GPU has no room for two replicas, because each needs a GPU.
    """
    there = {"B200": tasks(*MODELS["flux1"])}
    parts = Costs(there, {"B200": BYTES}, lambda replicas: 100e9 / replicas)
    config = preset("flux1", "layout.mode=shared", *SHARDS)
    choice = choose(config, [Gpus("B200", 2, 90)], parts)
    assert choice.best.numbers.groups["learner"].actors == 2
    for count, memory in ((1, 900), (1, 90)):
        with pytest.raises(
            ConfigError, match="replicas that share the base .* one GPU each, at least two"
        ):
            choose(config, [Gpus("B200", count, memory)], parts)


def test_gpus_of_nodes():
    nodes = [
        Node("a", 96, 8, {ACCELERATOR: "B200"}, 1600),
        Node("b", 64, 4.5, {ACCELERATOR: "B200"}, 1000),
        Node("c", 32, 2, {ACCELERATOR: "H200"}),
        Node("d", 8),
    ]
    found = gpus_of(nodes, {"B200": 180, "H200": 141})
    assert found == [Gpus("B200", 12, 180, 12, 200), Gpus("H200", 2, 141, 16)]
    with pytest.raises(ConfigError, match="unknown GPU T4"):
        gpus_of([Node("a", 8, 1, {ACCELERATOR: "T4"})], {"B200": 180})


def test_too_many_actors_for_a_machine_are_refused(monkeypatch):
    """They are compared with this machine or with the sum of a cluster's nodes, before Ray is
    started.
    """
    set_cores(monkeypatch, 2)
    most = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 24_000_000_000 // 4096}
    monkeypatch.setattr("os.sysconf", lambda name: most[name])
    many = load("quickstart", ["services.rollout.actors=100000"])
    with pytest.raises(ConfigError) as error:
        refuse_on_this_machine(many)
    assert error.value.lines == [
        "services.rollout.actors = 100000: this machine has 2 cores and 24.0 GB; an actor needs"
        " 0.25 GB before it loads a model, and a core can start at most 64 actors: lower it to"
        " 96 or less"
    ]
    refuse_on_this_machine(load("quickstart", ["services.rollout.actors=96"]))
    with pytest.raises(ConfigError, match="need 50000, there are 128: at most 256 can be placed"):
        refuse_too_many(many, 0, 0, [Node("a", 64), Node("b", 64)])


# ---- --resume


def test_a_resumed_run_keeps_its_replicas_on_the_current_gpus():
    gpus = [Gpus("B200", 8, 180)]
    started = with_layout(
        preset("flux1"), choose(preset("flux1"), gpus, costs("flux1")).best.numbers
    )
    assert differences(started, as_started(preset("flux1"), started)) == []
    kept = keep_layout(preset("flux1"), started)
    again = choose(kept, [Gpus("B200", 16, 180)], costs("flux1")).best.numbers
    # eight replicas are as fast with GPUs of their own, and then fewer actors suffice
    actors = {kind: group.actors for kind, group in again.groups.items()}
    assert (again.mode, actors["learner"], actors["rollout"]) == ("split", 8, 8)
    assert differences(started, with_layout(kept, again)) == []
    large = choose(preset("flux1"), [Gpus("B200", 64, 180)], costs("flux1")).best.numbers
    started_large = with_layout(preset("flux1"), large)
    small = choose(
        keep_layout(preset("flux1"), started_large), [Gpus("B200", 72, 180)], costs("flux1")
    ).best
    assert small.numbers.share == "samples" and small.numbers.groups["learner"].actors == 64
    other = as_started(preset("flux1", "services.learner.replicas=4"), started)
    assert differences(started, other) == ["services.learner.replicas: 8 -> 4"]


def test_a_run_that_explores_ahead_is_not_resumed_in_turns():
    started = preset("flux1").model_copy(update={"explore_ahead": 1})
    with pytest.raises(ConfigError, match="leave out between_turns = 'host'"):
        keep_layout(preset("flux1", "services.rollout.between_turns=host"), started)
    assert keep_layout(preset("flux1"), started).explore_ahead == 1


def test_an_elastic_run_resumes_with_other_replicas():
    gpus = [Gpus("B200", 8, 180)]
    started = with_layout(
        preset("flux1"), choose(preset("flux1"), gpus, costs("flux1")).best.numbers
    )
    four, elastic = [Gpus("B200", 4, 180)], preset("flux1", "services.learner.elastic=true")
    with pytest.raises(
        ConfigError, match=r"replicas = 8 need a GPU of one kind each; with .*elastic = true"
    ):
        choose(keep_layout(preset("flux1"), started), four, costs("flux1"))
    for present, count in ((four, 4), (gpus, 8), ([Gpus("B200", 16, 180)], 16)):
        again = choose(keep_layout(elastic, started), present, costs("flux1")).best.numbers
        assert again.groups["learner"].actors == count
        assert differences(started, with_layout(elastic, again)) == []
    # what else affects results is still compared
    other = preset("flux1", "services.learner.elastic=true", "optimizer.lr=0.5")
    (line,) = differences(started, with_layout(other, again))
    assert line.startswith("optimizer.lr: ")


# ---- invariants


@settings(max_examples=12)
@given(
    st.integers(1, 64),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["auto", "shared", "split"]),
    st.sampled_from(["sol_rl", "naive_quant", "diffusionnft"]),
)
def test_every_actor_of_a_layout_can_be_placed(count, model, mode, arm):
    """Shares of a GPU never exceed 1, and nodes of eight GPUs hold all actors on GPUs."""
    config, gpus = preset(model, f"layout.mode={mode}", arm=arm), [Gpus("B200", count, 180)]
    if mode == "split" and count == 1 and arm != "diffusionnft":
        with pytest.raises(ConfigError, match="layout.mode = 'split'"):
            choose(config, gpus, costs(model))
        return
    numbers = choose(config, gpus, costs(model)).best.numbers
    laid = assign_gpus(numbers, gpus)
    assert laid is not None and sum(each.count for each in laid) == count
    for each in laid:
        shares = sum(round(numbers.groups[k].gpus * WHOLE) * n for k, n in each.actors.items())
        assert shares <= WHOLE
    for kind, group in numbers.groups.items():
        if group.gpus:
            assert sum(each.count * each.actors.get(kind, 0) for each in laid) == group.actors
    resolved = with_layout(config, numbers)
    needs = needs_of(resolved)
    nodes = [Node(f"n{i}", 96, min(8, count - 8 * i)) for i in range(-(-count // 8))]
    assert place(needs, nodes).keys() == {need.actor for need in needs}


@settings(max_examples=8)
@given(st.integers(1, 63), st.sampled_from(sorted(MODELS)))
def test_an_additional_gpu_is_never_predicted_slower(count, model):
    fewer, more = (
        choose(preset(model), [Gpus("B200", n, 180)], costs(model)).best.seconds
        for n in (count, count + 1)
    )
    assert more <= fewer * (1 + 1e-9)


@settings(max_examples=12)
@given(
    st.integers(2, 64),
    st.fixed_dictionaries(
        {},
        optional={
            "services.learner.replicas": st.integers(1, 8),
            "services.rollout.actors": st.integers(1, 12),
            "services.rollout.gpus": st.sampled_from([0.2, 0.36, 1.0]),
            "services.learner.gpus": st.sampled_from([0.6, 1.0]),
            "services.learner.share": st.sampled_from(["prompts", "samples"]),
            "explore_ahead": st.sampled_from([0, 1]),
        },
    ),
)
def test_explicit_values_are_kept(count, given):
    config = preset("sana", *(f"{key}={value}" for key, value in given.items()))
    try:
        best = choose(config, [Gpus("B200", count, 180)], costs("sana")).best
    except ConfigError as error:
        assert "does not fit" in str(error)
        return
    resolved = with_layout(config, best.numbers).model_dump()
    for key, value in given.items():
        node = resolved
        for part in key.split("."):
            node = node[part]
        assert node == value
