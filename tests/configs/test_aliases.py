"""Old names of keys and values are accepted in every source of a configuration, with one warning
each.
"""

import json

import pytest

from analysis.compare.cells import Request, read_comparison
from configs import aliases
from configs.aliases import KEYS, VALUES
from configs.load import ConfigError, apply, load, parse
from configs.resume import config_for_measurement, differences
from records.rundir import RunDirectory

KEEP = "explore.keep_wide is now explore.modules_to_not_convert"
PATTERN = ("transformer_blocks.1.*",)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(aliases, "_said", set())


def in_old_names(tree: dict) -> dict:
    """Return the tree of a whole configuration with the names used before they changed."""
    for old, new in KEYS.items():
        table, key = new.split(".")
        tree[table][old.split(".")[1]] = tree[table].pop(key)
    for key, values in VALUES.items():
        table, field = key.split(".")
        names = {new: old for old, new in values.items()}
        tree[table][field] = names.get(tree[table][field], tree[table][field])
    return tree


def test_a_key_is_renamed_within_its_table():
    assert all(old.split(".")[0] == new.split(".")[0] for old, new in KEYS.items())


def test_an_override_with_an_old_name_prints_one_line(capsys):
    config = load("quickstart", ['explore.keep_wide=["transformer_blocks.1.*"]'])
    assert config.explore.modules_to_not_convert == PATTERN
    assert capsys.readouterr().err == f"{KEEP}\n"
    config = load("quickstart", ['explore={keep_wide = ["a"], solver = "dpm2"}'])
    assert (config.explore.modules_to_not_convert, config.explore.solver) == (("a",), "dpmpp_2m")
    # one warning per name
    assert capsys.readouterr().err == "explore.solver = 'dpm2' is now 'dpmpp_2m'\n"


@pytest.mark.parametrize("table", ["explore", "regenerate", "evaluate"])
def test_an_old_value_is_renamed_in_every_table(table):
    config = load("quickstart", [f"{table}.solver=dpm2"])
    assert getattr(config, table).solver == "dpmpp_2m"


def test_a_file_with_old_names_overrides_its_layers(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    head = 'layers = ["models/shapes", "rewards/shapes"]\nname = "mine"\n'
    file.write_text(f'{head}[explore]\nkeep_wide = ["x.*"]\n[publish]\nchunk_mb = 7\n')
    config = load(str(file))
    assert (config.explore.modules_to_not_convert, config.publish.shard_mb) == (("x.*",), 7)
    assert capsys.readouterr().err == f"{KEEP}; publish.chunk_mb is now publish.shard_mb\n"
    assert load(str(file), ["publish.shard_mb=8"]).publish.shard_mb == 8


def test_a_run_with_old_names_can_be_resumed(tmp_path, capsys):
    now = load("quickstart", ["regenerate.solver=dpmpp_2m"])
    run = RunDirectory(tmp_path)
    run.config_file.write_text(json.dumps({"config": in_old_names(now.model_dump(mode="json"))}))
    assert "dpm2" in run.config_file.read_text() and "keep_wide" in run.config_file.read_text()
    before = run.configuration()
    assert before == now and differences(before, now) == []
    assert capsys.readouterr().err.count("\n") == 1
    assert (
        config_for_measurement(before, ["explore.keep_wide=[]"]).explore.modules_to_not_convert
        == ()
    )


def test_a_comparison_with_old_names_is_read(tmp_path):
    file = tmp_path / "old.toml"
    file.write_text(
        'base = "quickstart"\nset = {publish = {chunk_mb = 3}}\n[[cells]]\nname = "one"\n'
        'set = {explore = {keep_wide = []}}\n[vary]\n"explore.solver" = ["dpm2", "euler"]\n'
    )
    found = read_comparison(Request(str(file)))
    configs = [parse(cell.tree_of(0, tmp_path)) for cell in found.running]
    assert [config.explore.solver for config in configs] == ["dpmpp_2m", "euler"]
    assert {config.publish.shard_mb for config in configs} == {3}
    assert {config.explore.modules_to_not_convert for config in configs} == {()}
    # cells keep the names by which their runs are found
    assert [cell.name for cell in found.cells] == [
        f"one-explore.solver-{solver}" for solver in ("dpm2", "euler")
    ]
    alone = read_comparison(Request(str(file), overrides=("explore.solver=dpm2",)))
    assert [cell.name for cell in alone.cells] == ["one"]


def test_both_names_at_once_are_refused(tmp_path):
    both = "explore.keep_wide is now explore.modules_to_not_convert, and both are given"
    file = tmp_path / "both.toml"
    file.write_text("[explore]\nkeep_wide = []\nmodules_to_not_convert = []\n")
    tree = load("quickstart").model_dump(mode="json")
    tree["explore"]["keep_wide"] = []
    overrides = ["explore.keep_wide=[]", "explore.modules_to_not_convert=[]"]
    for attempt in (
        lambda: load(str(file)),
        lambda: parse(tree),
        lambda: load("quickstart", overrides),
        lambda: apply({}, "explore={keep_wide=[], modules_to_not_convert=[]}"),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        (line,) = caught.value.lines
        assert both in line


def test_hints_suggest_new_names():
    for override, hint in (
        ("explore.modules_not_to_convert=[]", "did you mean 'modules_to_not_convert'?"),
        ("publish.shards_mb=1", "did you mean 'shard_mb'?"),
        ("explore.solver=dpm2m", "did you mean 'dpmpp_2m'?"),
    ):
        with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
            load("quickstart", [override])
