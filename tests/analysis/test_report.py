"""report.html shows the contents of the run directory, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from analysis.report import charts
from analysis.report.data import actor_of
from analysis.report.events import lanes_of, running_times
from analysis.report.page import build_report
from tests.analysis.page import Page, page_of, rewrite
from tests.analysis.synthetic import PROMPTS, START, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


def test_the_headline_has_the_result_with_its_errors(page: Page):
    for message in (
        "quickstart",
        "finished",
        "0.667",
        "± 0.020 standard error",
        "after 20 iterations",
        "0.785",
        "± 0.018 standard error",
        "+0.118 ± 0.021",
        "5.6 standard errors above zero",
        "20 of 20",
        "1,920",
        "Arm sol_rl: 96 seeds per prompt explored in emulated_nvfp4 at 6 steps, 24 regenerated in"
        " fp32 at 10 steps",
    ):
        assert message in page.text, message


def test_every_image_is_in_the_page_byte_for_byte_with_its_caption(run: Path, page: Page):
    inside = {attributes["src"] for attributes in page.all("img")}
    files = sorted((run / "images").glob("step_*/*.png"))
    assert len(files) == 2 * len(PROMPTS) * 4
    assert inside == {
        "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in files
    }
    # 32 pixels: displayed with hard edges
    assert all(attributes["class"] == "tiny" for attributes in page.all("img"))
    alts = [attributes["alt"] or "" for attributes in page.all("img")]
    assert (
        sum(alt.startswith("before: ") for alt in alts)
        == sum(alt.startswith("after 20: ") for alt in alts)
        == len(PROMPTS) * 4
    )
    assert all(any(prompt in alt for alt in alts) for prompt in PROMPTS)
    assert all(prompt in page.text for prompt in PROMPTS)


def test_image_rewards_are_those_of_the_evaluation(run: Path, page: Page):
    rewards = json.loads((run / "evaluations" / "step_000020.json").read_text())["rewards"]
    assert f"after 20: {PROMPTS[2]}, noise 1, reward {charts.number(rewards[2][1])}" in [
        image["alt"] for image in page.all("img")
    ]
    before = json.loads((run / "evaluations" / "step_000000.json").read_text())["rewards"]
    better = sum(np.mean(after) > np.mean(old) for after, old in zip(rewards, before, strict=True))
    assert f"better {better}" in page.text
    assert f"worse {128 - better}" in page.text


def test_markup_in_the_data_stays_text(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2, ending="run_failed")
    config = json.loads((run / "config.json").read_text())
    config["config"]["name"] = '<script>alert("name")</script>'
    config["versions"]["<i>torch"] = '"><img src=x>'
    (run / "config.json").write_text(json.dumps(config))
    evil = [
        {
            "time": START + 3,
            "event": "<b>odd",
            "kind": "<u>",
            "actor": '"0',
            "why": "<svg onload=1>",
            "<x>": "</table>",
        }
    ]
    rewrite(run / "events.jsonl", lambda rows: rows[:3] + evil + rows[3:])
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [row | {"reward/eval/<s>": 0.5, "time/<q>_s": 1.0, "<em>": 2} for row in rows],
    )
    page = page_of(run)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "b>odd", "u", "i", "x", "em", "q", "s"}
    assert all(
        (image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img")
    )
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    for message in (
        '<script>alert("name")</script>',
        "<i>torch",
        "<svg onload=1>",
        '<u>-"0',
        "a red <circle>",
        "two <b>purple</b> & orange",
    ):
        assert message in page.text, message


def test_nothing_is_loaded_from_anywhere(run: Path, page: Page):
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {
        tag for tag, _ in page.tags
    }
    addresses = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "xlink:href", "srcset")
    ]
    assert addresses and all((value or "").startswith("data:") for value in addresses)
    text = (run / "report.html").read_text()
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(
        attributes["content"] for attributes in page.all("meta") if "http-equiv" in attributes
    )
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert any(attributes.get("name") == "viewport" for attributes in page.all("meta"))
    assert "prefers-color-scheme:dark" in style


def test_curves_have_a_mark_for_every_value(run: Path, page: Page):
    text = (run / "report.html").read_text()
    titles = re.findall(r"<title>([^<]*)</title>", text)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, label in (
        ("reward/train_mean", "samples trained on"),
        ("explore/reward_best", "best"),
        ("explore/contrast", "contrast"),
        ("audit/kendall_tau", "Kendall tau"),
        ("loss/kl", "loss/kl"),
        ("weights/codes_changed", "weights/codes_changed"),
    ):
        expected = [
            f"{label}, {charts.number(row['iteration'])}: {charts.number(row[name], 4)}"
            for row in rows
            if name in row
        ]
        assert len(expected) == 20
        assert [title for title in titles if title.startswith(label + ", ")] == expected


def test_times_add_up(run: Path, page: Page):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "iteration"]
    total = sum(row["time/explore_s"] for row in rows)
    # stages, other work and the time between iterations add up to the elapsed time
    whole = rows[-1]["seconds"]
    assert (
        f"explore {100 * total / whole:.0f} % {int(total) // 60} min {round(total) % 60:02d} s"
        in page.text
    )
    assert "87 images explored per second by 2 rollout actors" in page.text


def test_actors_have_lanes_and_their_events_are_listed(page: Page):
    for message in (
        "6 started",
        "2 died",
        "2 replaced",
        "2 tasks retried",
        "20 versions published",
        "1 min 21 s actor died rollout-1",
        "the actor died unexpectedly",
        "no answer for 900 s: counts as hung",
        "ChunkKey(7, 2, 1, 7)",
    ):
        assert message in page.text, message
    marks = [
        attributes
        for attributes in page.all("span")
        if (attributes.get("class") or "").startswith("mark bad")
    ]
    assert [mark["title"].split(":")[0] for mark in marks] == ["1 min 21 s", "2 min 39 s"]  # type: ignore[union-attr]
    # 80.8 s and 159.4 s of 236 s
    assert [mark["style"] for mark in marks] == ["left:34.24%", "left:67.54%"]


def test_configuration_versions_and_quantization_are_there(page: Page):
    for message in (
        '"pool_size": 96',
        '"lr": 0.0015',
        "2.13.0+cpu",
        "589,824",
        "linear layer of a block",
        "last layer",
    ):
        assert message in page.text, message


def test_the_same_run_gives_the_same_page(run: Path):
    first = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == first
    assert not list(run.glob(".report*"))


# ---- events


def test_a_pause_before_a_resume_is_not_shown():
    events = [
        {"event": name, "time": when}
        for name, when in (
            ("run_started", 100.0),
            ("actor_started", 103.0),
            ("run_stopped", 110.0),
            ("run_resumed", 5000.0),
            ("run_finished", 5004.0),
        )
    ]
    assert running_times(events) == [0.0, 3.0, 10.0, 10.0, 14.0]
    assert running_times([{"event": "x"}, {"event": "y", "time": 7.0}]) == [0.0, 0.0]


def test_a_long_reason_is_shortened_in_the_table_and_complete_when_unfolded(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=8)
    why = (
        "The actor is dead because its worker process has died. "
        + "Some common causes include: many. " * 8
        + "The last word."
    )
    rewrite(
        run / "events.jsonl",
        lambda rows: [row | ({"why": why} if row["event"] == "actor_died" else {}) for row in rows],
    )
    page = page_of(run)
    assert page.text.count("The last word.") == 1
    assert (
        "incarnation 0 · pid 4001 · The actor is dead because its worker process has died. Some"
        " common causes include: many. Some common causes …" in page.text
    )


def test_lifetimes_of_actors_follow_from_events():
    def of(actor: int, name: str, kind: str = "rollout") -> dict:
        return {"event": name, "kind": kind, "actor": actor}

    events = [
        of(10, "actor_started"),
        of(2, "actor_started"),
        of(2, "actor_died"),
        of(2, "actor_replaced"),
        of(10, "actor_benched"),
        of(0, "chunk_reissued", "reward"),
        {"event": "run_finished"},
    ]
    lanes = lanes_of(events, [1.0, 2.0, 5.0, 6.0, 8.0, 9.0, 12.0])
    assert list(lanes) == ["rollout-2", "rollout-10", "reward-0"]
    assert lanes["rollout-2"].lives == [(2.0, 5.0), (6.0, 12.0)]
    assert lanes["rollout-10"].lives == [(1.0, 8.0)]
    assert lanes["reward-0"].lives == [(0.0, 12.0)]  # its start is not recorded
    assert [(when, tone) for when, tone, _ in lanes["rollout-2"].marks] == [
        (5.0, "bad"),
        (6.0, "good"),
    ]
    assert actor_of({"event": "x", "kind": "rollout", "actor": 7}) == "rollout-7"
    assert actor_of({"event": "x", "kind": "rollout"}) is None
