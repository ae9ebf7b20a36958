"""An iteration of every family on a simulated GPU (``tests.simulated_gpu``).

The same code as on a real GPU runs: kernels for packing, weights that are loaded on, and moved
from, a device. Operands on two devices are errors, results must be those of the CPU, and the host
must not wait for the GPU within the steps of sampling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.install import build, missing
from tests.tiny_families import NAMES, TWINS, VIDEO

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch_nvfp4": ("flux", {"explore": {"backend": "torch_nvfp4"}}),
    "emulated_nvfp4": ("sana", {"explore": {"backend": "emulated_nvfp4"}}),
    "packed base": ("flux", {"lora": {"base": "nf4"}}),
    "weights away": ("flux", {"services": {"learner": {"between_turns": "host"}}}),
    "recomputed blocks": ("flux", {"optimizer": {"gradient_checkpointing": True}}),
    "awm": ("sd3", {"objective": {"name": "awm"}}),
    "paths": ("sd3", {"objective": {"name": "flow_grpo"}}),
}
QUICK = [*(name for name in NAMES if name not in TWINS.values()), *OPTIONS]
STEPS = 3
ROUNDING = 1e-5
"""Relative difference of a tensor: 2^-24 for each of at most 100 operations in a row.

Backward passes are composed of other operators on a GPU, as CPUs have fused ones. In FP32, an
operand that was not conjugated changed the trained weights by 3e-2.
"""
PROXIES = {"torch_nvfp4": 0.05}
"""The same for proxy images: products in BF16 flip codes of the next layer's input."""
PER_STEP = ("qwen_image", "qwen_image_edit", "z_image")
"""Families that read the length of their prompts from a mask in each step."""


def run_cases(names: list[str], request: Any, scratch: Path) -> dict[str, dict[str, Any]]:
    """Run the cases of these names in one process, and return its findings."""
    cases: list[list[Any]] = []
    for name in names:
        family, settings = OPTIONS.get(name, (name, {}))
        directory = request.getfixturevalue(f"tiny_{family}_dir")
        cases.append([name, family, str(directory), settings])
    command = [sys.executable, "-m", "tests.simulated_gpu.iteration", str(build(scratch))]
    done = subprocess.run([*command, json.dumps(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def quick(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    return run_cases(QUICK, request, tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name", QUICK)
def test_results_are_those_of_the_cpu(quick, name):
    check(name, quick[name])


@pytest.mark.slow
def test_second_twins_give_the_results_of_the_cpu(request, tmp_path):
    for name, row in run_cases([*TWINS.values()], request, tmp_path).items():
        check(name, row)


def check(name: str, row: dict[str, Any]) -> None:
    """Check the results of a case, and how often it waited for the GPU."""
    limits = {
        key: PROXIES.get(name, ROUNDING) if "proxies" in key else ROUNDING for key in row["apart"]
    }
    far = {key: value for key, value in row["apart"].items() if value > limits[key]}
    assert far == {}
    for stage in ("explore", "regenerate"):
        assert sum(row["waits"][stage].values()) == expected_waits(name, stage), row["waits"][stage]


def expected_waits(name: str, stage: str) -> int:
    """Return how often the host waits for the GPU while images are sampled."""
    if name == "paths" and stage == "regenerate":
        return 3 + 2 * STEPS  # initial and final latents, images, and each state and its density
    clips = {"explore": 3, "regenerate": 2}[stage] if name in VIDEO else 1  # or all images at once
    return 1 + clips + (STEPS if name in PER_STEP else 0)


@pytest.mark.slow
def test_gpu_check_runs_as_where_there_is_a_gpu(tmp_path):
    """``make gpu-check`` measures only where there is a GPU, and most of it has run on one once."""
    command = [sys.executable, "-m", "tests.simulated_gpu.check", str(build(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9 and all(row["items"] >= 3 for row in rows)
    assert [row for row in rows if row["left"]] == []
