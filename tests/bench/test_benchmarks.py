"""Every benchmark runs at a tiny size and returns its ratios; the ring and the plain loop end with
one policy.

The ratios themselves are not asserted, because the machine may be shared.
"""

import argparse
import importlib.util
import json
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from bench import NAMES, benchmark
from bench.__main__ import broadcast, main
from bench.loop import CLOSE, _require_close, in_one_process, of_plain_arm
from bench.plan import CALIBRATED, shaped, sized
from bench.publish import Sender, learner, no_room, sizes
from bench.start import _name
from bench.timing import Options, Ratio, interleave, machine
from configs.load import load
from policy.precision.wire import unpack_into
from tests.cluster.hosts import HostedServices
from tests.cluster.runs import tiny_config
from tests.cores import set_cores

EXPLORER = {"architectures": ("sana-1.6b",), "backends": ("fp8",), "pixels": 64, "small": True}
BROADCASTS = ((3 * 2**20 + 5, (1, 2)),)
EXPECTED = {
    "ring": [("ring", "plain process"), ("ring (CPU time)", "plain process (CPU time)")],
    "loop": [("ring", "plain process"), ("ring", "plain process, one batch")],
    "scale": [("two actors", "one actor")],
    "publish": [(f"{size} GB to {n}", "memcpy") for size, n in (("0.00315", 1), ("0.00315", 2))],
    "pack": [
        (what, base) for what in ("pack", "pack with scale search") for base in ("memcpy", "sum")
    ],
    "explorer": [
        (f"sana-1.6b (small) {what} eager", f"sana-1.6b (small) {base} eager")
        for base, others in (("bf16", ("fp32", "fp8")), ("fp32", ("bf16", "fp8")))
        for what in others
    ],
    "rewards": [
        (name, "product")
        for name in (
            "jpeg_incompressibility",
            "shapes",
            "ocr",
            "clipscore",
            "pickscore",
            "hpsv2",
            "imagereward",
        )
        if name != "ocr" or importlib.util.find_spec("rapidocr_onnxruntime")
    ],
    "step": [("sampling step", "bare forward"), ("emulated_nvfp4", "fp32")],
    "start": [
        (what, "goal") for what in ("all actors answer", "all processes", "those of the run")
    ],
    "nodes": [(f"watching {count} nodes", "time") for count in (8, 32, 128)],
}
LONG = "scale", "start", "ring", "loop", "publish"
"""Benchmarks that start actors of their own, or whole runs."""
QUARTERS = "plan", "driver"
"""Benchmarks that take a quarter of an hour; their parts are tested in ``test_simulator``."""


@pytest.fixture
def options(tiny_sd3_dir, tmp_path, monkeypatch) -> Options:
    config = tiny_config(tiny_sd3_dir, tmp_path, "bench")
    monkeypatch.setattr("bench.ring.ActorServices", HostedServices)
    monkeypatch.setattr("bench.nodes.SECONDS", 0.1)
    return Options(config, repeats=1, pack_bytes=2**16, broadcasts=BROADCASTS, batch=2, **EXPLORER)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name in NAMES
        if name not in QUARTERS
    ],
)
def test_a_benchmark_gives_its_ratios(request, options, name):
    if name in LONG:
        request.getfixturevalue("ray_here")
    if name == "publish":
        options = replace(
            options,
            config=options.config.model_copy(
                update={"publish": options.config.publish.model_copy(update={"shard_mb": 1})}
            ),
        )
    ratios = benchmark(name)(options)
    assert [(ratio.what, ratio.base) for ratio in ratios] == EXPECTED[name]
    for ratio in ratios:
        # one repeat: the ratio is that of its two times
        assert ratio.value == pytest.approx(ratio.seconds / ratio.base_seconds) and ratio.value > 0
    goals = {
        "ring": [0.96, None],
        "loop": [None, 0.8],
        "scale": [1 / 1.56],
        "step": [1.03, None],
        "start": [1.0, 1.0, 1.0],
    }
    assert [ratio.goal for ratio in ratios] == goals.get(name, [None] * len(ratios))


@pytest.mark.parametrize(
    ("nbytes", "count", "available", "store", "message"),
    [
        (10**9, 4, 10.1e9, 2e9, None),  # four explorers: five copies, two for memcpy, 3 GB
        (10**9, 4, 9.9e9, 2e9, "needs 7 GB of memory and 3 GB beside it, 9.9 GB are free"),
        (
            67 * 10**8,
            1,
            90e9,
            6e9,
            "the object store has 6 GB: ray start --object-store-memory=9300000000",
        ),
    ],
)
def test_too_large_broadcasts_are_skipped_with_the_reason(nbytes, count, available, store, message):
    assert no_room(nbytes, count, available, store) == message


def test_a_plain_process_has_the_threads_of_all_replicas(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "bench")
    learner = config.services.learner.model_copy(update={"replicas": 3, "threads": 2})
    services = config.services.model_copy(update={"learner": learner})
    alone = in_one_process(config.model_copy(update={"services": services})).services.learner
    assert (alone.replicas, alone.threads, alone.regenerate_threads) == (1, 6, 6)


def test_replicas_share_the_cores(monkeypatch):
    set_cores(monkeypatch, 4)
    config = of_plain_arm(load("quickstart", ["services.learner.replicas=2"]))
    assert config.services.learner.threads == 2 and config.arm == "diffusionnft"


@pytest.mark.parametrize(("relative", "close"), [(0.0, True), (0.9, True), (1.1, False)])
def test_replicas_must_do_the_work_of_the_plain_loop(tmp_path, relative, close):
    update = {"x.lora_A": torch.ones(2), "x.lora_B": torch.tensor([3.0, 4.0])}
    moved = update | {"x.lora_B": torch.tensor([3.0, 4.0 + 5.0 * CLOSE * relative])}
    for at, tensors in (("ours", moved), ("theirs", update)):
        (tmp_path / at).mkdir()
        save_file(tensors, tmp_path / at / "adapter.safetensors")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    if close:
        _require_close(ours, theirs)
    else:
        with pytest.raises(RuntimeError, match="0.1% of the update away"):
            _require_close(ours, theirs)


def test_the_sender_sends_the_bytes_of_its_manifest():
    sender = Sender(2500, 1000)
    manifest = sender.export(3).manifest
    target = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes(2500).items()}
    unpack_into(manifest, [sender.shard(i)[1] for i in range(3)], target)
    whole = torch.cat(list(target.values()))
    assert len(whole) == 2500
    assert torch.equal(whole[1000:2000], whole[:1000])
    assert torch.equal(whole[2000:], whole[:500])
    assert sender.shard(2)[0] == 500 and manifest.version == 3 and whole.float().std() > 50


def test_the_sender_is_called_like_a_learner():
    """A group of one learner calls the sender, with as many shards in flight as in a run."""
    sender = learner(2500, 1000)
    assert (sender.pool.service.count, sender.pool.service.in_flight) == (1, 1)
    assert sender.client.any_replica is sender.pool and sender.client.sharding == "none"


def test_broadcasts_on_the_command_line():
    assert broadcast("6.7e9:1") == (6_700_000_000, (1,))
    assert broadcast("1e9:1,2,4") == (10**9, (1, 2, 4))
    for wrong in ("1e9", "1e9:", "x:1", "1e9:0"):
        with pytest.raises(argparse.ArgumentTypeError, match="BYTES:EXPLORERS"):
            broadcast(wrong)


@pytest.mark.parametrize(
    ("changes", "trains", "regenerates"),
    [([], 1, 1), (["services.learner.threads=2", "services.learner.regenerate_threads=1"], 2, 1)],
)
def test_layouts_are_measured_with_the_given_threads(changes, trains, regenerates):
    found = shaped(sized(load("quickstart", changes)), CALIBRATED).services
    assert (found.learner.threads, found.learner.regeneration_threads) == (trains, regenerates)
    assert found.rollout.threads == found.reward.threads == 1


def test_a_ratio_is_the_median_of_pairs():
    ratio = Ratio.of({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b", goal=1.5)
    assert (ratio.value, ratio.low, ratio.high, ratio.seconds, ratio.base_seconds) == (
        2.0,
        1.0,
        3.0,
        4.0,
        3.0,
    )
    assert "NOT met" in ratio.line() and "NOT" not in replace(ratio, goal=2.0).line()


def test_cases_take_turns_and_warm_up_is_left_out():
    order = []

    def slow(name: str, seconds: float):
        def run() -> None:
            order.append(name)
            time.sleep(seconds)

        return run

    times = interleave({"a": slow("a", 0.002), "b": slow("b", 0.0)}, repeats=2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert len(times["a"]) == len(times["b"]) == 2 and min(times["a"]) >= 0.002


def test_the_command_prints_the_machine_and_writes_json(capsys, tmp_path):
    out = tmp_path / "bench.json"
    assert main(["pack", "--repeats", "1", "--pack-bytes", "65536", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert machine()["cpu"] in printed and "pack with scale search / memcpy = " in printed
    assert [row["what"] for row in json.loads(out.read_text())["ratios"]["pack"]] == [
        what for what, _ in EXPECTED["pack"]
    ]


def test_a_wrong_configuration_is_one_line(capsys):
    assert main(["pack", "--preset", "quickstrat"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_processes_of_a_run_by_name():
    ray = "/lib/python3.11/site-packages/ray/"
    recorded = {
        "driver": (["python", "-m", "cluster"], True),
        "template": (["python", "-c", "from cluster.runtime.template import main; main()"], False),
        "LearnerActor": (["ray::LearnerActor.generate"], False),
        "IDLE": (["ray::IDLE", "", ""], False),
        "gcs_server": ([f"{ray}core/src/ray/gcs/gcs_server", f"--log={ray}logs"], False),
        "log_monitor.py": (["python", "-u", f"{ray}_private/log_monitor.py", "--x"], False),
    }
    assert {name: _name(*given) for name, given in recorded.items()} == {
        name: name for name in recorded
    }
