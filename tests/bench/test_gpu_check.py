"""The check for one GPU: how it runs without one, and how it treats failures and numbers."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.architectures import case_of
from bench.gpu_check import __main__ as command
from bench.gpu_check import compiled_training, gpu_tests, iteration, running
from bench.gpu_check.claims import CLAIMS, verdict
from bench.gpu_check.findings import Finding, Item, LeftOut, Outcome, Results, from_tree
from bench.gpu_check.iteration import config_of, no_room, weight_bytes
from bench.gpu_check.sections import SECTIONS, Section
from bench.gpu_check.setting import FAMILIES as PAPERS
from bench.gpu_check.setting import NEWER, Setting
from bench.gpu_check.shapes import FORMATS
from policy.families import FAMILIES
from policy.families.architectures import published, published_names
from policy.precision.backends import BACKENDS
from policy.precision.cost import COMPILED
from tests.graphs import captured_graphs

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "gpu.md"


# ---- all sections


def test_the_command_needs_neither_a_gpu_nor_ray(tmp_path):
    """Each section runs in its own process; further findings are checked below."""
    out, stubs = tmp_path / "check", tmp_path / "stubs"
    (stubs / "ray").mkdir(parents=True)
    (stubs / "ray" / "__init__.py").write_text("raise ImportError('there is no Ray here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--out", out, "--minutes", "9"]
        + ["--sections", "tests", "kernels"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(stubs), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "gpu.json").read_text())
    states = [(each["section"], each["state"], each["why"]) for each in found["sections"]]
    assert states == [("kernels", "done", ""), ("tests", "not checkable here", "")]
    assert not found["gpu"]
    assert {claim["said"] for claim in found["claims"].values()} == {"not checkable here"}
    assert SECTIONS["kernels"].title in done.stdout and (out / "gpu.html").stat().st_size > 1000


CLIPS = NEWER[:1]
"""Wan, whose iteration generates clips."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> tuple[Path, str]:
    """Run all sections without a GPU; return the results' directory and the printed text.

    Iterations are those of the paper's families and of one with clips. Compiled graphs are
    captured, but not compiled, which takes a minute; the slow test compiles them.
    """
    out, message = tmp_path_factory.mktemp("check"), io.StringIO()
    clips = mock.patch.object(iteration, "NEWER", CLIPS)
    with contextlib.redirect_stdout(message), clips, captured_graphs() as graphs:
        command.write(
            Results(command.machine(), False, [outcome_of(name) for name in SECTIONS]), out
        )
    assert len(graphs) > len(PAPERS)
    return out, message.getvalue()


def outcome_of(name: str) -> Outcome:
    outcome, until = Outcome(name), time.monotonic() + 600
    for item in SECTIONS[name].measure(Setting(False, until, once=True)):
        # as when sent between processes
        outcome.add(from_tree(json.loads(json.dumps(asdict(item)))))
    return outcome


@pytest.mark.skipif(torch.cuda.is_available(), reason="the form without a GPU")
def test_without_a_gpu_every_section_runs_its_cpu_part(checked):
    found = json.loads((checked[0] / "gpu.json").read_text())
    assert [each["section"] for each in found["sections"]] == [*SECTIONS]
    assert {each["section"] for each in found["sections"] if not each["findings"]} == {"tests"}
    assert {claim["said"] for claim in found["claims"].values()} == {"not checkable here"}


def test_findings_of_a_cpu_are_correct(checked):
    """No bits differ, no shape is refused, and a version and the weights have the bytes of the
    plan. Graphs that are only captured have the eager gradients.
    """
    found = json.loads((checked[0] / "gpu.json").read_text())
    values = {
        (each["section"], one["labels"].get("kind", one["labels"].get("form", ""))): one["value"]
        for each in found["sections"]
        for one in each["findings"]
    }
    assert values["kernels", "bits"] == 0
    assert values["weights", "bytes"] == values["memory", "weights"] == 1
    assert values["turns", "bits"] == 0
    (trained,) = (each for each in found["sections"] if each["section"] == "compiled")
    assert [one["beside"]["apart"] for one in trained["findings"]] == [0]
    (iterations,) = (each for each in found["sections"] if each["section"] == "iteration")
    ran = [one["labels"]["architecture"].split(" ")[0] for one in iterations["findings"]]
    assert ran == [*PAPERS, *CLIPS] and iterations["left_out"] == []


def test_every_layer_of_the_published_models_packs_once_and_multiplies_once(checked):
    """SANA's channels are contiguous, so that its 1x1 convolutions do not copy before packing."""
    found = json.loads((checked[0] / "gpu.json").read_text())
    (shapes,) = (each for each in found["sections"] if each["section"] == "shapes")
    assert len(shapes["findings"]) == len(published_names()) * len(FORMATS)
    for one in shapes["findings"]:
        assert one["value"] == 0, one
        assert one["beside"]["inputs"] >= 4


def test_every_described_family_has_an_iteration():
    """Each has an iteration, by its preset and in its small form."""
    described = {published(name)["family"] for name in published_names()}
    assert {published(name)["family"] for name in (*PAPERS, *NEWER)} == described
    variants = {name for name, family in FAMILIES.items() if family.edits}  # of those described
    assert FAMILIES.keys() - described == variants
    for name in (*PAPERS, *NEWER):
        with Setting(False, 0.0).case(name) as case:
            config = config_of(name, case, case.family, "fp8", False)
        assert config.model.family == published(name)["family"] and config.explore.backend == "fp8"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the form without a GPU")
def test_iterations_of_all_families_without_a_gpu_compiled():
    found = outcome_of("iteration")
    ran = [one.labels["architecture"].split(" ")[0] for one in found.findings]
    assert ran == [*PAPERS, *NEWER] and found.left_out == []


def test_the_tables_and_the_page_contain_all_findings(checked):
    out, message = checked
    page = (out / "gpu.html").read_text()
    for section in SECTIONS.values():
        assert section.title in page
        assert section.title in message or section is SECTIONS["tests"]
    assert "<svg" in page and page.count("not checkable here") >= len(CLAIMS)


# ---- claims


def test_claims_equal_those_of_the_documentation():
    """Claims equal the first part of the page, in order and word for word."""
    text = PAGE.read_text().partition("## Not run for other reasons")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", text, re.MULTILINE)
    stated = [row for row in rows if row not in ("claim", "---")]
    assert [*CLAIMS] == stated


def results(gpu: str, capability: str, *findings: tuple[str, Finding]) -> Results:
    outcomes: dict[str, Outcome] = {}
    for section, found in findings:
        outcomes.setdefault(section, Outcome(section)).add(found)
    return Results({"gpu": gpu, "capability": capability}, True, list(outcomes.values()))


def message(found: Results, start: str) -> str:
    (check,) = (check for text, check in CLAIMS.items() if text.startswith(start))
    return verdict(found, check).said


def step(speed: float, form: str = "by kernels", **beside: float) -> tuple[str, Finding]:
    labels = {"architecture": "flux.1-dev", "backend": "fp8", "form": form}
    return "steps", Finding("flux.1-dev fp8", speed, "x BF16", labels, beside)


@pytest.mark.parametrize(
    ("gpu", "speed", "verdict_"),
    [
        ("NVIDIA H200", 1.34, "confirmed"),  # 0.8 of 1.67 is 1.336
        ("NVIDIA H200", 1.33, "refuted"),
        ("NVIDIA H100", 1.34, "not checkable here"),
    ],
)
def test_the_goal_of_a_step_is_checked(gpu, speed, verdict_):
    found = results(gpu, "9.0", step(1.1, "packed by torch", bound=1.67), step(speed, bound=1.67))
    assert message(found, "on H200") == verdict_


def test_predictions_are_compared_with_measurements():
    good, bad = (step(speed, predicted=1.0) for speed in (1.14, 1.16))
    assert message(results("NVIDIA H100", "9.0", good), "the predicted seconds") == "confirmed"
    assert message(results("NVIDIA H100", "9.0", good, bad), "the predicted seconds") == "refuted"
    assert message(results("NVIDIA H100", "9.0"), "the predicted seconds") == "not checkable here"


@pytest.mark.parametrize(
    ("capability", "failed", "verdict_"),
    [("9.0", 0, "not checkable here"), ("10.3", 0, "confirmed"), ("10.3", 1, "refuted")],
)
def test_tests_settle_claims_on_their_gpu(capability, failed, verdict_):
    file = "tests/policy/test_nvfp4_hardware.py"
    ran = Finding(file, failed, "failed", {"file": file}, {"passed": 30.0}, "test_a")
    found = results("NVIDIA B300", capability, ("tests", ran))
    assert message(found, "`torch_nvfp4` layers") == verdict_


def test_bits_are_confirmed_by_gpus_and_refuted_by_a_cpu():
    wrong = Finding("fp8", 1e-6, "share", {"kind": "bits"})
    with_gpu = results("NVIDIA H100", "9.0", ("kernels", wrong))
    assert message(with_gpu, "the Triton kernels") == "refuted"
    assert message(Results({}, False, with_gpu.outcomes), "the Triton kernels") == "refuted"
    right = results("NVIDIA H100", "9.0", ("kernels", Finding("fp8", 0, "", {"kind": "bits"})))
    assert message(Results({}, False, right.outcomes), "the Triton kernels") == "not checkable here"


@pytest.mark.parametrize(
    ("regenerating", "training", "verdict_"),
    [(1.09, 1.24, "confirmed"), (1.11, 1.0, "refuted"), (1.0, 1.26, "refuted")],
)
def test_learner_passes_are_compared_with_their_goals(regenerating, training, verdict_):
    values = {"regenerating": regenerating, "training": training}
    found = [("lora", Finding(form, value, "x", {"form": form})) for form, value in values.items()]
    assert message(results("NVIDIA H100", "9.0", *found), "regenerating takes") == verdict_


@pytest.mark.parametrize(
    ("gain", "beside", "verdict_"),
    [
        (1.28, {"apart": 0.05, "predicted": 1.5}, "confirmed"),
        (1.27, {"apart": 0.0, "predicted": 1.5}, "refuted"),
        (1.6, {"apart": 0.051, "predicted": 1.5}, "refuted"),
        (1.5, {"apart": 0.01}, "not checkable here"),
        (1.5, {"apart": 0.06}, "refuted"),
    ],
)
def test_compiled_training_is_compared_with_eager_gradients_and_the_plan(gain, beside, verdict_):
    found = Finding("sana-1.6b, training compiled", gain, "x eager", {}, beside)
    assert message(results("NVIDIA H100", "9.0", ("compiled", found)), "compiled tr") == verdict_


def test_in_ten_minutes_two_models_can_be_compiled_for_training():
    """If every section takes the time that it is given."""
    share = SECTIONS["compiled"].share / sum(each.share for each in SECTIONS.values())
    assert share * 600 > 2 * compiled_training.LEAST_S


def test_the_predicted_gain_of_compiled_training_is_that_of_fewer_bytes_and_kernels(monkeypatch):
    """SANA at 64 x 64 pixels takes as long as its kernels need to be issued."""
    with case_of("sana-1.6b", 64, False) as case:
        assert compiled_training._predicted(case) == {}
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
        found = compiled_training._predicted(case)
    assert found == {"predicted": pytest.approx(1 / COMPILED["kernels"])}


@pytest.mark.parametrize(
    ("back", "left", "bits", "verdict_"),
    [
        (1.25, 0.02, 0, "confirmed"),
        (1.26, 0.0, 0, "refuted"),
        (1.0, 0.03, 0, "refuted"),
        (1.0, 0.0, 1, "refuted"),
    ],
)
def test_moving_weights_is_compared_with_the_plan(back, left, bits, verdict_):
    values = {"back": back, "out": 1.0, "left behind": left, "bits": bits}
    found = [
        ("turns", Finding(form, value, "s", {"form": form}, {"expected": 1.0}))
        for form, value in values.items()
    ]
    with_gpu = results("NVIDIA H100", "9.0", *found)
    assert message(with_gpu, "weights that leave a GPU") == verdict_
    without = Results({}, False, with_gpu.outcomes)
    assert message(without, "weights that leave a GPU") == (
        "refuted" if bits else "not checkable here"
    )


@pytest.mark.parametrize(("seconds", "said"), [(1.1, "confirmed"), (3.0, "refuted")])
def test_packing_and_loading_are_compared_with_the_plan(seconds, said):
    """Together: at most 1.5 times the 1.5 s that are planned for both."""
    labels = {"format": "nvfp4"}
    found = [
        ("weights", Finding(form, value, "s", {**labels, "form": form}, {"planned s": planned}))
        for form, value, planned in (
            ("packing all of it", 100.0, 1.0),
            ("packing the next version", seconds, 1.0),
            ("loading", 1.0, 0.5),
        )
    ]
    with_gpu = results("NVIDIA H100", "9.0", *found)
    assert message(with_gpu, "packing a version") == said
    assert message(Results({}, False, with_gpu.outcomes), "packing a version") == (
        "not checkable here"
    )


def test_cheap_decoding_can_only_be_refuted_without_weights():
    """The check cannot confirm the claim: how images rank depends on real weights."""
    quick, slow = (
        ("decode", Finding("sana, BF16", value, "x FP32", {"form": "bf16"})) for value in (2.0, 0.9)
    )
    start = "decoding proxies in BF16"
    assert message(results("NVIDIA H100", "9.0", quick), start) == "not checkable here"
    assert message(results("NVIDIA H100", "9.0", quick, slow), start) == "refuted"


def test_a_family_too_large_for_one_gpu_is_skipped_with_its_bytes():
    """FLUX.2, computed by hand: 32.2 billion weights in BF16, beside them in NVFP4, and the merged
    weights of attention, need more than 80 GB.
    """
    with Setting(True, 0.0).case("flux.2-dev") as case:
        needed = weight_bytes(case, BACKENDS["torch_nvfp4"], torch.bfloat16)
    assert 64.4e9 + 0.5625 * 31e9 < needed < 141e9
    left = no_room(case, needed, 79 * 10**9)
    assert left.why.endswith(f"its weights alone need {needed / 1e9:.0f} GB, 79 GB are free")


# ---- failures


def found_then_raises(setting: object) -> Iterator[Item]:
    yield Finding("one", 1.0, "s")
    raise ValueError("no such thing\nand more")


def found_then_dies(setting: object) -> Iterator[Item]:
    yield Finding("one", 1.0, "s")
    os._exit(7)


def found_then_hangs(setting: object) -> Iterator[Item]:
    yield LeftOut("two", "because")
    yield Finding("one", 1.0, "s")
    time.sleep(600)


@pytest.mark.parametrize(
    ("measure", "state", "why"),
    [
        (found_then_raises, "failed", r"ValueError: no such thing \(.*test_gpu_check.py:\d+\)"),
        (found_then_dies, "failed", "its process ended with code 7"),
        (found_then_hangs, "cut short", r"it did not end within \d+ s"),
    ],
)
def test_a_failed_section_keeps_its_findings(measure, state, why, monkeypatch):
    """The next section runs as well."""
    monkeypatch.setitem(SECTIONS, "bad", Section("Bad", 1, measure))
    monkeypatch.setattr(running, "GRACE_S", 2.0)
    outcome = running._one(multiprocessing.get_context("fork"), "bad", False, 1.0)
    assert outcome.state == state and re.fullmatch(why, outcome.why)
    assert outcome.findings == [Finding("one", 1.0, "s")]


def test_unused_time_goes_to_later_sections(monkeypatch):
    given = []
    monkeypatch.setattr(running, "_one", lambda context, name, gpu, limit: given.append(limit))
    for _ in running.run(["kernels", "steps", "tests"], False, 110.0):
        pass
    shares = [SECTIONS[name].share for name in ("kernels", "steps", "tests")]
    expected = [110 * shares[0] / sum(shares), 110 * shares[1] / sum(shares[1:]), 110.0]
    assert given == pytest.approx(expected, abs=1.0)  # seconds that the test itself takes
    late = list(running.run(["kernels"], False, 0.0))
    assert [(each.state, each.why) for each in late] == [("cut short", "no time was left")]


def test_missing_packages_are_one_line_with_the_install_command(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "diffusers" else real(name)
    )
    assert command.main([]) == 2
    assert capsys.readouterr().err == "gpu-check: needs diffusers: pip install diffusers\n"


def test_findings_survive_the_transfer_between_processes():
    for item in (Finding("a", 1.5, "s", {"b": "c"}, {"d": 2.0}, "e"), LeftOut("f", "g")):
        assert from_tree(json.loads(json.dumps(asdict(item)))) == item


def test_pytests_report_is_counted(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="good"/><testcase name="bad"><failure/></testcase>'
        '<testcase name="out"><skipped/></testcase><testcase name="setup"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    found = gpu_tests.finding_of("tests/a.py", report)
    assert (found.value, found.beside) == (2.0, {"passed": 1.0, "skipped": 1.0})
    assert found.note == "bad, setup"


def test_marked_files_are_found():
    found = gpu_tests.files()
    assert {"tests/policy/test_kernels.py", "tests/planning/test_plan_gpu.py"} <= set(found)
