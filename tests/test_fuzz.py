"""Random invalid inputs of every kind: a few here, many in the slow tests and in ``python -m
tools.fuzz``.
"""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.main import COMMANDS, main
from tools.fuzz import invariants
from tools.fuzz.__main__ import fuzz, run
from tools.fuzz.commands import commands
from tools.fuzz.damage import REMOVED, Change
from tools.fuzz.inputs import keys
from tools.fuzz.invariants import InvariantViolation, command, digest, finite, outcome
from tools.fuzz.seams import seams
from tools.fuzz.target import Target, copied, example_run
from tools.fuzz.targets import targets

FEW, MANY = 20, 1500
SOL_RL = Path(sys.executable).with_name("sol-rl")


@pytest.mark.parametrize("name", sorted(targets()))
def test_the_fuzzer_finds_no_failure_in_a_few_inputs(name):
    assert fuzz(targets()[name], FEW, seed=0) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_fuzzer_finds_no_failure_in_many_inputs(capsys):
    assert run(sorted(targets()), MANY, seed=1) == 0, capsys.readouterr().out


def test_only_a_silent_command_is_a_hang(monkeypatch):
    monkeypatch.setattr(invariants, "LONGEST_S", 0.2)
    out = io.StringIO()
    with invariants.time_limit(out):
        for _ in range(10):
            time.sleep(0.05)
            out.write("line\n")
    out.write("earlier output does not count")
    with pytest.raises(InvariantViolation, match="no answer"), invariants.time_limit(out):
        time.sleep(5)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(["train", "quickstart", "--resume"], marks=pytest.mark.slow),
        pytest.param(["evaluate", "RUN", "--prompts", "nowhere.txt"], marks=pytest.mark.slow),
        ["status", "--address", "127.0.0.1:1"],
    ],
    ids=["train", "evaluate", "status"],
)
def test_a_process_refuses_the_fuzzers_inputs(tmp_path, monkeypatch, capfd, given):
    """The patches that keep the fuzzer's commands from starting processes do not change their
    outcome.
    """
    run = copied(example_run(), tmp_path / "run")
    words = [str(run) if word == "RUN" else word for word in given]
    monkeypatch.chdir(tmp_path)
    # a process warns of an old name once, and an earlier test may have caused that
    monkeypatch.setattr("configs.aliases._said", set())
    with seams():
        assert main(words) == 2
    here = capfd.readouterr().err
    there = subprocess.run([SOL_RL, *words], capture_output=True, text=True, timeout=120)
    assert (there.returncode, there.stderr) == (2, here)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    "given",
    [
        ["train", "quickstart"],
        ["evaluate", "RUN"],
        ["compare", "quickstart", "--set", "run_root=here"],
        ["fidelity", "quickstart", "--seeds", "48", "--out", "here"],
        ["status", "--address", "auto"],
    ],
    ids=lambda given: given[0],
)
def test_commands_that_would_start_something_are_stopped(tmp_path, monkeypatch, given):
    run = copied(example_run(), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    before = digest(run)
    assert outcome(*(str(run) if word == "RUN" else word for word in given))[0] is None
    assert digest(run) == before


def test_the_fuzzer_tries_all_options_of_every_command():
    """Options are read from the parser, and every one that takes a value has a valid value."""
    assert set(commands()) == set(COMMANDS)
    taking = {a.option_strings[0][2:] for c in commands().values() for a in c if a.option_strings}
    assert {"set", "resume", "runs", "checkpoint", "address", "out", "gpus"} <= taking


def test_a_mutation_changes_one_file(tmp_path):
    """A mutation changes its own file as described, and leaves all other files as they were."""
    for number, how in enumerate(["gone", "directory", "loop", "empty"]):
        there = copied(example_run(), tmp_path / str(number))
        before = digest(there)
        Change("config.json", how).make(there)
        name = str(there / "config.json")
        after = digest(there)
        assert {k: v for k, v in after.items() if k != name} == {
            k: v for k, v in before.items() if k != name
        }
        assert after.get(name, "gone")[:9] != before[name][:9]
    there = copied(example_run(), tmp_path / "run")
    Change("config.json", "value", ((None, "config", "seed"), REMOVED)).make(there)
    assert "seed" not in json.loads((there / "config.json").read_text())["config"]


def test_violated_invariants_are_found():
    """Each invariant is violated once, and the fuzzer reports it."""
    from hypothesis import strategies as st

    def broken(folder, given):
        if given > 1000:
            raise InvariantViolation(str(given))

    with pytest.raises(InvariantViolation, match=r"^1001\b"):  # made small
        fuzz(Target(st.integers(), broken), 500, seed=0)
    with pytest.raises(InvariantViolation, match="lr = inf was accepted"):
        finite({"optimizer": {"lr": float("inf")}})
    with pytest.raises(InvariantViolation, match="exit code 2"):
        command("config", "no-such-preset", codes=(0,))


def test_the_fuzzer_tries_every_key():
    names = keys()
    assert len(names) > 150
    assert {"seed", "optimizer.lr", "services.rollout.deadline_s", "rewards.scorers"} <= set(names)
