"""Whatever a user can hand over, made wrong at random: a few inputs of each kind here, many in the
slow form and in ``python -m tools.fuzz``.
"""

import pytest

from tools.fuzz.__main__ import fuzz, run
from tools.fuzz.inputs import keys
from tools.fuzz.promises import Wrong, command, finite
from tools.fuzz.target import Target
from tools.fuzz.targets import targets

FEW, MANY = 30, 1500


@pytest.mark.parametrize("name", sorted(targets()))
def test_a_few_inputs_of_each_kind(name):
    assert fuzz(targets()[name], FEW, seed=0) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_inputs(capsys):
    assert run(sorted(targets()), MANY, seed=1) == 0, capsys.readouterr().out


def test_what_is_wrong_is_found():
    """Each promise is broken once: the fuzzer must say so."""
    from hypothesis import strategies as st

    def broken(folder, given):
        if given > 1000:
            raise Wrong(str(given))

    with pytest.raises(Wrong, match=r"^1001\b"):  # made small
        fuzz(Target(st.integers(), broken), 500, seed=0)
    with pytest.raises(Wrong, match="lr = inf was accepted"):
        finite({"optimizer": {"lr": float("inf")}})
    with pytest.raises(Wrong, match="exit code 2"):
        command("config", "no-such-preset", codes=(0,))


def test_every_key_is_tried():
    names = keys()
    assert len(names) > 150
    assert {"seed", "optimizer.lr", "services.rollout.deadline_s", "rewards.scorers"} <= set(names)
