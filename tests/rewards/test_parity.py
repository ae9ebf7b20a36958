"""Learned scorers compared with other implementations on the same random weights.

The quick suite compares small models, `make test-slow` the full ones. Where a peer package is not
installed the comparison is skipped; `make parity` installs them, and fails instead.
"""

from __future__ import annotations

import pytest
import torch

from tests.rewards import parity, peers


@pytest.mark.parametrize("size", ["small", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", parity.CASES)
def test_scores_equal_those_of_the_peer(name, size):
    """Both compute the same formula in FP32, summed in another order.

    Errors grow like the square root of the depth times 6e-8 of values of order one (PickScore: of
    order 100 / 26), well below the bound of 1e-5.
    """
    package = parity.CASES[name][1]
    if package and (why := peers.missing(package)):
        pytest.skip(why)
    result = parity.run(name, size)
    assert result.problem is None and result.pairs == (25 if size == "small" else 5)


def test_constant_and_distant_peers_fail_the_comparison():
    far = parity.Parity("a", "b", "small", 25, 2e-5, 1.0)
    constant = parity.Parity("a", "b", "small", 25, 0.0, 0.0009)
    nothing = parity.Parity("a", "b", "small", 25, float("nan"), 1.0)
    assert "differs from b by 2.00e-05" in str(far.problem)
    assert "proves nothing" in str(constant.problem)
    assert nothing.problem
    assert parity.Parity("a", "b", "small", 25, 9e-6, 1.0).problem is None


def test_renaming_weights_is_reversible():
    import open_clip

    model = open_clip.CLIP(**parity.TINY)
    peers.randomise(model, 5)
    state = model.state_dict()
    back = peers.to_open_clip(peers.to_transformers(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_command_prints_a_line_per_peer_and_fails_where_one_is_over_its_bound(
    monkeypatch, capsys
):
    from tools import parity as command

    monkeypatch.setattr(command, "install", lambda flags: None)
    monkeypatch.setattr(
        parity, "run", lambda name, size: parity.Parity(name, "a peer", size, 25, 3e-6, 0.5)
    )
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["scorer", *parity.CASES, "all"]
    assert all("3.0e-06" in line for line in lines[1:-1])
    monkeypatch.setattr(
        parity,
        "run",
        lambda name, size: parity.Parity(
            name, "a peer", size, 25, 3e-5 if size == "full" else 0.0, 0.5
        ),
    )
    assert command.main(["hpsv2", "--full"]) == 1
    assert "hpsv2 differs from a peer by 3.00e-05, more than 1e-05" in capsys.readouterr().out


def test_a_slightly_wrong_scale_is_detected(monkeypatch, capsys):
    """PickScore over 26.001 instead of 26: scores of up to 100 / 26 differ by up to 100 / 26 - 100
    / 26.001 = 1.5e-4.
    """
    from tools import parity as command

    monkeypatch.setattr(command, "install", lambda flags: None)
    monkeypatch.setattr("rewards.pickscore.SCALE", 26.001)
    assert command.main(["pickscore"]) == 1
    message = capsys.readouterr().out
    assert "NOT met" in message
    assert "pickscore differs from open_clip by" in message
    assert "more than 1e-05" in message
