"""report.html says what the run directory says, whatever is missing from it, and loads nothing from anywhere."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cluster import charts
from cluster.pictures import before_after, data_uri, find_pictures, grid, load_step, png_bytes, save_pictures
from cluster.report import build_report
from cluster.report_data import actor_of, read_run
from cluster.report_events import lanes_of, running_times
from tests.cluster.synthetic import PROMPTS, START, evaluation, pictures, write_run

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Text, tags and attributes of a page; fails on tags that are closed in the wrong order or left open."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (self.open[-3:], tag, self.getpos())
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title"):
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(run: Path) -> Page:
    return Page(build_report(run).read_text(encoding="utf-8"))


def rewrite(path: Path, change) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


# ---- the page of a whole run


def test_the_headline_has_the_result_with_its_errors(page: Page):
    for said in ("quickstart", "finished", "0.667", "± 0.020 standard error", "after 20 iterations", "0.785", "± 0.018 standard error",
                 "+0.118 ± 0.021", "5.6 standard errors above zero", "20 of 20", "1,920",
                 "Arm sol_rl: 96 noises per prompt explored in emulated_nvfp4 at 6 steps, 24 regenerated in fp32 at 10 steps"):  # fmt: skip
        assert said in page.text, said


def test_every_picture_is_in_the_page_byte_for_byte_with_its_caption(run: Path, page: Page):
    inside = {attributes["src"] for attributes in page.all("img")}
    files = sorted((run / "images").glob("step_*/*.png"))
    assert len(files) == 2 * len(PROMPTS) * 4
    assert inside == {"data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in files}
    assert all(attributes["class"] == "tiny" for attributes in page.all("img"))  # 32 pixels: shown with hard edges
    alts = [attributes["alt"] or "" for attributes in page.all("img")]
    assert sum(alt.startswith("before: ") for alt in alts) == sum(alt.startswith("after 20: ") for alt in alts) == len(PROMPTS) * 4
    assert all(any(prompt in alt for alt in alts) for prompt in PROMPTS)
    assert all(prompt in page.text for prompt in PROMPTS)


def test_picture_rewards_are_those_of_the_evaluation(run: Path, page: Page):
    rewards = json.loads((run / "evaluations" / "step_000020.json").read_text())["rewards"]
    assert f"after 20: {PROMPTS[2]}, noise 1, reward {charts.number(rewards[2][1])}" in [image["alt"] for image in page.all("img")]
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
    evil = [{"time": START + 3, "event": "<b>odd", "kind": "<u>", "actor": '"0', "why": "<svg onload=1>", "<x>": "</table>"}]
    rewrite(run / "events.jsonl", lambda rows: rows[:3] + evil + rows[3:])
    rewrite(run / "metrics.jsonl", lambda rows: [row | {"reward/eval/<s>": 0.5, "time/<q>_s": 1.0, "<em>": 2} for row in rows])
    page = page_of(run)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "b>odd", "u", "i", "x", "em", "q", "s"}
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    for said in (
        '<script>alert("name")</script>',
        "<i>torch",
        "<svg onload=1>",
        '<u>-"0',
        "a red <circle>",
        "two <b>purple</b> & orange",
    ):
        assert said in page.text, said


def test_nothing_is_loaded_from_anywhere(run: Path, page: Page):
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    addresses = [
        value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href", "xlink:href", "srcset")
    ]
    assert addresses and all((value or "").startswith("data:") for value in addresses)
    text = (run / "report.html").read_text()
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(attributes["content"] for attributes in page.all("meta") if "http-equiv" in attributes)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert any(attributes.get("name") == "viewport" for attributes in page.all("meta"))
    assert "prefers-color-scheme:dark" in style


def test_curves_have_a_mark_for_every_value(run: Path, page: Page):
    text = (run / "report.html").read_text()
    titles = re.findall(r"<title>([^<]*)</title>", text)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, label in (("reward/train_mean", "samples trained on"), ("explore/reward_best", "best"), ("explore/contrast", "contrast"),
                        ("audit/kendall_tau", "Kendall tau"), ("loss/kl", "loss/kl"), ("weights/codes_changed", "weights/codes_changed")):  # fmt: skip
        expected = [f"{label}, {charts.number(row['iteration'])}: {charts.number(row[name], 4)}" for row in rows if name in row]
        assert len(expected) == 20
        assert [title for title in titles if title.startswith(label + ", ")] == expected


def test_times_add_up(run: Path, page: Page):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "iteration"]
    total = sum(row["time/explore_s"] for row in rows)
    whole = rows[-1]["seconds"]  # stages, other, and what lies between iterations make up the clock's time
    assert f"explore {100 * total / whole:.0f} % {int(total) // 60} min {round(total) % 60:02d} s" in page.text
    assert "87 pictures explored per second by 2 rollout actors" in page.text


def test_actors_have_lanes_and_what_befell_them_is_listed(page: Page):
    for said in ("6 started", "2 died", "2 replaced", "2 units given out again", "20 versions published", "1 min 21 s actor died rollout-1",
                 "the actor died unexpectedly", "no answer for 900 s: counts as hung", "ChunkKey(7, 2, 1, 7)"):  # fmt: skip
        assert said in page.text, said
    marks = [attributes for attributes in page.all("span") if (attributes.get("class") or "").startswith("mark bad")]
    assert [mark["title"].split(":")[0] for mark in marks] == ["1 min 21 s", "2 min 39 s"]  # type: ignore[union-attr]
    assert [mark["style"] for mark in marks] == ["left:34.24%", "left:67.54%"]  # 80.8 s and 159.4 s of 236 s


def test_configuration_versions_and_quantisation_are_there(page: Page):
    for said in ('"pool_size": 96', '"lr": 0.0015', "2.13.0+cpu", "589,824", "linear layer of a block", "kept wide: last layer"):
        assert said in page.text, said


def test_the_same_run_gives_the_same_page(run: Path):
    first = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == first
    assert not list(run.glob(".report*"))


# ---- what is missing


def test_a_run_that_failed_says_why(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=3, ending="run_failed"))
    assert "The run failed. prompt 'a red <circle>' is left with 3 scored pictures of 96" in page.text
    assert "failed" in page.text and "no end recorded" not in page.text


def test_a_run_without_iterations_says_so(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=0, ending=None))
    for said in ("No iteration has ended, so there are no curves yet.", "no end recorded", "0 of 20", "The evaluation after training is still to come.",
                 "The pictures after training are still to come."):  # fmt: skip
        assert said in page.text, said
    assert len(page.all("img")) == len(PROMPTS) * 4


def test_a_run_of_one_iteration(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=1))
    assert "1 of 20" in page.text and "after 1 iterations" in page.text


def test_a_run_going_on(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=4, ending=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "iteration", "iteration": 4, "rew')  # being written just now
    page = page_of(run)
    assert "4 of 20" in page.text and "could not be read" not in page.text


def test_only_a_configuration(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"config": {"name": "early"}}')
    page = page_of(tmp_path)
    for said in ("early", "Held-out prompts have not been scored yet.", "No rewards have been recorded yet.", "No events were recorded.",
                 "No pictures have been made yet."):  # fmt: skip
        assert said in page.text, said


def test_no_configuration_and_damaged_lines(tmp_path: Path):
    rows = [
        json.dumps(evaluation(0, 0.5, 0.1)),
        "{broken",
        "[1, 2]",
        json.dumps({"kind": "iteration", "iteration": 0, "reward/train_mean": 0.4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    page = page_of(tmp_path)
    assert "config.json is missing." in page.text
    assert "metrics.jsonl: 2 lines could not be read and are left out." in page.text
    assert tmp_path.name in page.text and "0.500" in page.text


def test_a_directory_that_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nothing-here is no run directory: it has none of config\.json"):
        build_report(tmp_path / "nothing-here")
    assert not (tmp_path / "nothing-here").exists()


def test_numbers_that_are_none_and_nan(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=5)

    def damage(rows: list[dict]) -> list[dict]:
        for row in rows:
            if row["kind"] == "iteration":
                row["loss/policy"] = None
                row["grad_norm"] = math.nan if row["iteration"] == 2 else 1.0
                row["audit/kendall_tau"] = math.nan
                row["time/explore_s"] = math.inf
        rows[-1] |= {"eval/gain": None, "eval/gain_stderr": None, "eval/stderr": None}
        return rows

    rewrite(run / "metrics.jsonl", damage)
    text = build_report(run).read_text()
    page = Page(text)
    coordinates = re.findall(r'(?:points|x1?|x2|y1?|y2|cx|cy|width|height|left)[=:]"?([^";]*)', text)
    assert not any("nan" in value or "inf" in value for value in coordinates)
    assert "Policy loss" not in page.text
    assert "+0.118 difference of the two means, not paired." in page.text
    assert "no standard error" in page.text
    assert text.count("<polyline") >= 1
    grad = text[
        text.index("grad_norm by iteration") if "grad_norm by iteration" in text else text.index("Gradient norm by iteration") :
    ]
    assert grad[: grad.index("</svg>")].count("<polyline") == 2  # the line is broken where the value was not finite


def test_a_lost_evaluation_reward_is_not_a_gain_of_zero(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1)
    rewrite(run / "metrics.jsonl", lambda rows: rows[:-1] + [evaluation(1, math.nan, math.nan)])
    assert "The gain is unknown" in page_of(run).text


def test_an_arm_that_explores_nothing(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    config = json.loads((run / "config.json").read_text())
    config["config"]["arm"] = "diffusionnft"
    (run / "config.json").write_text(json.dumps(config))
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [{k: v for k, v in row.items() if not k.startswith(("explore", "audit"))} for row in rows],
    )
    page = page_of(run)
    assert "24 noises per prompt at 10 steps, all trained on" in page.text
    assert "This run explored nothing: all noises were trained on." in page.text
    assert "Nothing to compare" in page.text


def test_random_audits_have_a_chart_of_their_own_and_are_the_ones_put_in_words(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [row | ({"audit/random_kendall_tau": 0.5} if row["kind"] == "iteration" else {}) for row in rows],
    )
    page = page_of(run)
    assert "Random noises" in page.text
    assert "Of any two random noises of a prompt, the cheap pictures put 75 % in the right order." in page.text  # (1 + tau) / 2


def test_several_scorers_each_have_a_curve_and_a_row(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [row | ({"reward/eval/jpeg": -3.5 + row["iteration"]} if row["kind"] == "evaluation" else {}) for row in rows],
    )
    page = page_of(run)
    assert "Scorer shapes" in page.text and "Scorer jpeg" in page.text
    assert "jpeg −3.500 −1.500 +2" in page.text


def test_evaluations_of_other_weights_are_not_mixed_in(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    rewrite(run / "metrics.jsonl", lambda rows: rows[:1] + [evaluation(1, 0.111, 0.1) | {"weights": "old"}] + rows[1:])
    assert [row["reward/eval_mean"] for row in read_run(run).evaluations] == [0.6667, 0.7849]


def test_rows_written_again_after_a_resume_count_once(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: rows + [next(r for r in rows if r["kind"] == "iteration" and r["iteration"] == 1) | {"loss/kl": 7.0}],
    )
    kept = read_run(run).iterations
    assert [row["iteration"] for row in kept] == [0, 1, 2] and kept[1]["loss/kl"] == 7.0


def test_a_long_run_stays_small(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1500)
    page = build_report(run)
    assert page.stat().st_size < 3_000_000
    assert "Numbers of every 5th iteration" in Page(page.read_text()).text


# ---- events


def test_a_pause_before_a_resume_takes_no_time_in_the_picture():
    events = [{"event": name, "time": when} for name, when in
              (("run_started", 100.0), ("actor_started", 103.0), ("run_stopped", 110.0), ("run_resumed", 5000.0), ("run_finished", 5004.0))]  # fmt: skip
    assert running_times(events) == [0.0, 3.0, 10.0, 10.0, 14.0]
    assert running_times([{"event": "x"}, {"event": "y", "time": 7.0}]) == [0.0, 0.0]


def test_a_long_reason_is_cut_in_the_table_and_whole_behind_the_fold(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=8)
    why = "The actor is dead because its worker process has died. " + "Some common causes include: many. " * 8 + "The last word."
    rewrite(run / "events.jsonl", lambda rows: [row | ({"why": why} if row["event"] == "actor_died" else {}) for row in rows])
    page = page_of(run)
    assert page.text.count("The last word.") == 1
    assert (
        "incarnation 0 · pid 4001 · The actor is dead because its worker process has died. Some common causes include: many. Some common causes …"
        in page.text
    )


def test_lives_of_actors():
    def of(actor: int, name: str, kind: str = "rollout") -> dict:
        return {"event": name, "kind": kind, "actor": actor}

    events = [of(10, "actor_started"), of(2, "actor_started"), of(2, "actor_died"), of(2, "actor_replaced"), of(10, "actor_benched"),
              of(0, "chunk_reissued", "reward"), {"event": "run_finished"}]  # fmt: skip
    lanes = lanes_of(events, [1.0, 2.0, 5.0, 6.0, 8.0, 9.0, 12.0])
    assert list(lanes) == ["rollout-2", "rollout-10", "reward-0"]
    assert lanes["rollout-2"].lives == [(2.0, 5.0), (6.0, 12.0)]
    assert lanes["rollout-10"].lives == [(1.0, 8.0)]
    assert lanes["reward-0"].lives == [(0.0, 12.0)]  # its start is not recorded
    assert [(when, tone) for when, tone, _ in lanes["rollout-2"].marks] == [(5.0, "bad"), (6.0, "good")]
    assert actor_of({"event": "x", "actor": "rollout-7"}) == "rollout-7" and actor_of({"event": "x", "kind": "rollout"}) is None


# ---- charts


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "–"), (0, "0"), (0.66667, "0.667"), (-0.05, "−0.0500"), (12.345, "12.3"), (1920, "1,920"), (3.0, "3"),
     (1234.5, "1,234"), (2.5e7, "2.50e+07"), (1e-6, "1.00e-06"), (0.9996, "1.00")],
)  # fmt: skip
def test_number(value: float | None, text: str):
    assert charts.number(value) == text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0.31, 0.98, [0.4, 0.6, 0.8]), (-0.5, 1.5, [-0.5, 0, 0.5, 1, 1.5]), (0, 20, [0, 5, 10, 15, 20]), (3, 3, [3])],
)  # fmt: skip
def test_nice_ticks(low: float, high: float, ticks: list[float]):
    assert charts.nice_ticks(low, high) == pytest.approx(ticks)


def test_span_shows_everything_and_is_never_empty():
    assert charts.span([]) == (0.0, 1.0)
    assert charts.span([math.nan, 0.0, 0.0]) == (0.0, 1.0)
    assert charts.span([2.0]) == pytest.approx((1.8, 2.2))
    assert charts.span([0.2, 0.7], include=(0.0, 1.0)) == (0.0, 1.0)
    assert charts.span([0.0, 1.0], pad=0.1) == pytest.approx((-0.1, 1.1))


def test_a_line_is_drawn_where_its_numbers_are():
    svg = charts.line_chart([charts.Series("a", [(0, 0.0), (10, 1.0)])], include_y=(0.0, 1.0), label="x", size=(400, 210))
    # left 46, right 12, top 10, bottom 34 of 400 x 210; x has 2 % of air at either side: (0 + 0.2) / 10.4 * 342 + 46 = 52.58
    assert '<polyline class="line-1" points="52.58,176.00 381.42,10.00"/>' in svg


def test_ticks_that_lie_close_are_told_apart():
    svg = charts.scatter([(-0.871, -0.869), (-0.856, -0.856)], label="x", x_label="before", y_label="after")
    texts = re.findall(r'text-anchor="(?:middle|end)">(−[\d.]+)</text>', svg)
    assert len(texts) >= 6 and max(texts.count(text) for text in texts) == 2  # once on each axis
    assert "−0.865" in texts


def test_bars_stack_and_more_than_sixty_are_averaged():
    one = charts.stacked_bars([charts.Stack(0, {"a": 1.0, "b": 3.0}, 4.0)], [("a", 1), ("b", 2)], label="x")
    heights = [float(value) for value in re.findall(r'<rect[^>]* height="([\d.]+)"', one)]
    assert heights[1] / heights[0] == pytest.approx(3, abs=0.05)  # 0.6 units of each bar are left as a gap
    many = charts.stacked_bars([charts.Stack(i, {"a": 1.0 + (i % 2)}) for i in range(100)], [("a", 1)], label="x")
    assert many.count("<rect") == 50
    assert "iteration 0: a 1.50 s" in many


def test_a_scatter_counts_above_and_below():
    svg = charts.scatter(
        [(0.1, 0.5), (0.5, 0.4), (0.3, 0.3), (math.nan, 1)],
        label="x",
        x_label="before",
        y_label="after",
        names=["<p>", "q", "r", "s"],
    )
    assert [svg.count(f'class="point fill-{colour}"') for colour in (2, 5, 8)] == [1, 1, 1]
    assert "&lt;p&gt;: 0.100 → 0.500" in svg


def test_thin_keeps_both_ends():
    found = charts.thin([(float(i), 0.0) for i in range(1001)], 5)
    assert [x for x, _ in found] == [0, 250, 500, 750, 1000]


# ---- pictures


def test_pictures_come_back_as_they_were(tmp_path: Path):
    images = pictures(90)
    assert save_pictures(tmp_path, 7, [*PROMPTS, "one prompt more than pictures"], images) == tmp_path / "step_000007"
    assert np.array_equal(load_step(tmp_path, 7), images)
    found = find_pictures(tmp_path)
    assert found.prompts == dict(enumerate(PROMPTS)) and [step.step for step in found.steps] == [7]
    assert found.noises(3) == [0, 1, 2, 3]
    save_pictures(tmp_path, 7, PROMPTS[:2], images[:2, :1])  # again: replaced, nothing left over
    assert len(list((tmp_path / "step_000007").iterdir())) == 2
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "step_000007" / "1_0.png").unlink()
    (tmp_path / "step_000007" / "1_1.png").write_bytes(png_bytes(images[0, 0]))
    with pytest.raises(FileNotFoundError, match="0_1.png is missing"):
        load_step(tmp_path, 7)
    with pytest.raises(FileNotFoundError, match="no pictures of step 8"):
        load_step(tmp_path, 8)


@pytest.mark.parametrize(
    ("images", "prompts", "says"),
    [
        (np.zeros((1, 1, 3, 4, 4), np.float32), ["a"], "float32"),
        (np.zeros((1, 3, 4, 4), np.uint8), ["a"], r"\[1, 3, 4, 4\]"),
        (np.zeros((2, 1, 3, 4, 4), np.uint8), ["a"], "1 prompts for pictures of 2"),
    ],
)
def test_pictures_of_the_wrong_shape_are_refused(tmp_path: Path, images: np.ndarray, prompts: list[str], says: str):
    with pytest.raises(ValueError, match=says):
        save_pictures(tmp_path / "images", 0, prompts, images)
    assert not (tmp_path / "images").exists()


def test_a_damaged_picture_is_a_gap(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1)
    (run / "images" / "step_000001" / "0_0.png").write_bytes(b"not a picture")
    (run / "images" / "step_000001" / "0_1.png").unlink()
    page = page_of(run)
    assert len(page.all("img")) == 2 * len(PROMPTS) * 4 - 2
    assert len([span for span in page.all("span") if span.get("class") == "hole"]) == 2


def test_large_pictures_are_reduced_before_they_go_into_the_page(tmp_path: Path):
    path = tmp_path / "x.png"
    path.write_bytes(png_bytes(np.full((3, 512, 1024), 90, np.uint8)))
    address, width, height = data_uri(path)
    assert (width, height) == (256, 128) and address.startswith("data:image/jpeg;base64,")
    path.write_bytes(png_bytes(np.full((3, 256, 256), 90, np.uint8)))
    assert data_uri(path)[0].startswith("data:image/png;base64,")


def test_grid_places_every_pixel():
    images = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 1, 1)
    sheet = grid(images, gap=1, scale=2)
    assert sheet.shape == (3, 5, 8)
    assert np.array_equal(sheet[:, 0, 0], images[0, 0, :, 0, 0]) and np.array_equal(sheet[:, 4, 7], images[1, 2, :, 0, 0])
    assert (sheet[:, 2] == 255).all() and (sheet[:, :, 2] == 255).all()


def test_before_after_picture_for_a_readme(run: Path, tmp_path: Path):
    sheet = before_after(run / "images", prompts=2, noises=3, height=64)
    # scale 2: three pictures of 64 with gaps of 2 are 196 wide; two of them, three margins of 24; 26 above, 64 + 30 per prompt, 8 below
    assert sheet.size == (2 * 196 + 3 * 24, 26 + 2 * 94 + 8)
    first = np.asarray(sheet)[26 + 26, 24 + 196 + 24]
    assert np.array_equal(first, load_step(run / "images", 20)[0, 0, :, 0, 0])
    with pytest.raises(FileNotFoundError, match="pictures of 1 step"):
        save_pictures(tmp_path, 0, PROMPTS, pictures(1))
        before_after(tmp_path)
    assert isinstance(sheet, Image.Image)
