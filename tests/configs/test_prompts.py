"""Prompt files in the public formats, and the order in which a run uses the prompts."""

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, load, preset_names
from configs.prompts import (
    Prompt,
    changed_files,
    digest,
    digests,
    prompts_of_iteration,
    read_prompts,
    refuse_overlap,
)
from configs.sections import Prompts

GENEVAL = (
    '{"tag": "counting", "include": [{"class": "wine glass", "count": 2}], "exclude": [{"class":'
    ' "wine glass", "count": 3}], "prompt": "a photo of two wine glasses"}'
)


def test_text_and_geneval_lines(tmp_path):
    text, lines = tmp_path / "train.txt", tmp_path / "train_metadata.jsonl"
    text.write_text("\ufeffa cat\n\n  a dog in Zürich \n", encoding="utf-8")
    assert read_prompts(str(text)) == [Prompt("a cat"), Prompt("a dog in Zürich")]
    lines.write_text(GENEVAL + "\n")
    (prompt,) = read_prompts(str(lines))
    assert prompt.text == "a photo of two wine glasses"
    assert prompt.metadata["include"] == [{"class": "wine glass", "count": 2}]
    assert prompt.metadata["tag"] == "counting"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "contains no prompt"),
        ("a.txt", b"caf\xe9\n", "not UTF-8 at byte 3"),
        ("a.jsonl", b"{'prompt': 1}\n", "a.jsonl:1: not JSON"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"text": "y"}\n',
            "a.jsonl:2: 'prompt' is missing or not a string",
        ),
        ("a.jsonl", b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}\n", "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"prompt": "x", "n": ' + b"[" * 100_000 + b"\n", "a.jsonl:1: not JSON"),
        (
            "a.jsonl",
            b'{"prompt": "half \\ud83d"}\n',
            "a.jsonl:1: 'prompt' is missing or not a string",
        ),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_prompts(str(tmp_path / name))
    assert len(error.value.lines) == 1 and message in error.value.lines[0]


def test_json_lines_end_at_line_feeds_only(tmp_path):
    """A string in it may contain other characters that some readers treat as line ends."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a cat\u2028a dog"}\r\n{"prompt": "b"}', "utf-8")
    found = [prompt.text for prompt in read_prompts(str(tmp_path / "a.jsonl"))]
    assert found == ["a cat\u2028a dog", "b"]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(str(tmp_path / "no.txt"))


def test_digests_are_of_the_prompts_as_read_and_in_order(tmp_path):
    names = {
        "a.txt": "a cat\na dog\n",
        "b.jsonl": '{"prompt": "a cat"}\n\n{"prompt": "a dog"}\n',
        "c.txt": "a dog\na cat\n",
        "d.jsonl": '{"prompt": "a cat", "tag": 1}\n{"prompt": "a dog"}\n',
    }
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    found = {
        name: digests(Prompts(train=str(tmp_path / name), test=str(tmp_path / "a.txt")))
        for name in names
    }
    assert found["a.txt"] == found["b.jsonl"] and found["a.txt"]["train"] == found["a.txt"]["test"]
    # another order, or other metadata, make other prompts
    assert len({each["train"] for each in found.values()}) == 3
    assert len({each["test"] for each in found.values()}) == 1
    now = Prompts(train=str(tmp_path / "c.txt"), test=str(tmp_path / "a.txt"))
    assert changed_files(now, found["a.txt"]) == [f"prompts.train = {now.train!r}"]
    assert changed_files(now, found["c.txt"]) == [] == changed_files(now, {})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7])
def test_a_digest_is_that_of_one_json_list(monkeypatch, count):
    """However many prompts are hashed at a time; runs of earlier versions have the same digest."""
    prompts = [Prompt(f"café {number}", {"b": number, "a": [1]}) for number in range(count)]
    whole = json.dumps([[each.text, each.metadata] for each in prompts], sort_keys=True)
    for at_a_time in (1, 2, 3, 100):
        monkeypatch.setattr("configs.prompts.DIGEST_PROMPTS", at_a_time)
        assert digest(prompts) == xxhash.xxh3_128_hexdigest(whole.encode())


@given(count=st.integers(1, 40), per=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_a_pass_over_the_prompts_uses_each_at_most_once(count, per, seed):
    if count >= per:
        length = count // per
        walked = [
            i for k in range(length, 2 * length) for i in prompts_of_iteration(count, per, k, seed)
        ]
        assert len(set(walked)) == len(walked) == length * per
    else:
        walked = [i for k in range(count) for i in prompts_of_iteration(count, per, k, seed)]
        assert all(walked.count(i) == per for i in range(count))


def test_the_order_depends_on_the_seed_and_on_the_pass():
    one, two = prompts_of_iteration(50, 50, 0, 1), prompts_of_iteration(50, 50, 0, 2)
    assert one != two
    assert one != prompts_of_iteration(50, 50, 1, 1)
    assert one == prompts_of_iteration(50, 50, 0, 1)


def test_held_out_prompts_are_not_trained_on():
    """Case and repeated spaces are ignored in the comparison."""
    train = [Prompt("A red circle"), Prompt("two cats")]
    recorded = Prompts(train="a", test="b")
    refuse_overlap(recorded, train, [Prompt("a red square")])
    with pytest.raises(ConfigError, match="1 of 2 held-out prompts are among .*, such as 'a  RED"):
        refuse_overlap(recorded, train, [Prompt("a  RED circle "), Prompt("x")])
    refuse_overlap(Prompts(train="a", test="b", allow_overlap=True), train, train)


def test_no_preset_evaluates_on_training_prompts():
    """Presets of the reference code name prompt files that it does not ship, and presets of editing
    models need prompts with images, of which none ship.
    """
    for name in preset_names():
        prompts = load(name).prompts
        if name.endswith("-vlm_edit"):
            assert (prompts.train, prompts.test) == ("edits/train.jsonl", "edits/test.jsonl")
            continue
        if name.startswith("reference-"):
            assert prompts.train == "pickscore/train.txt", prompts
            continue
        refuse_overlap(prompts, read_prompts(prompts.train), read_prompts(prompts.test))
