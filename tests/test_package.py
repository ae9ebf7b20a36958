"""The package after installation: a wheel in its own environment, without the source tree."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [
    pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
]
DATA: dict[str, list[str]] = PROJECT["tool"]["setuptools"]["package-data"]
LEFT_OUT = {"shapes/README.md"}
SMALL = {
    "iterations": 1, "prompts.per_iteration": 2, "explore.pool_size": 8, "explore.chunk_size": 4,
    "explore.steps": 2, "selection.keep": 4, "regenerate.steps": 2, "evaluate.prompts": 2,
    "evaluate.noises": 1, "evaluate.steps": 2, "optimizer.batch_size": 8, "run_root": "out",
}  # fmt: skip
OVERRIDES = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from tracked files only."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *build, "-w", str(out), str(source)], check=True)
    (made,) = out.glob("*.whl")
    return made


@dataclass
class Installed:
    """An environment with the wheel and its dependencies, and an empty working directory."""

    python: Path
    here: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python.parent / arguments[0]), *arguments[1:]],
            cwd=self.here,
            env={**kept, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=900,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Install the wheel; the dependencies are those of this environment.

    A ``.pth`` file adds their directory, without its own ``.pth`` files, one of which adds the
    source tree.
    """
    there = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(there)], check=True)
    site = there / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    install = [sys.executable, "-m", "pip", "--python", str(there / "bin" / "python"), "install"]
    subprocess.run([*install, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield Installed(there / "bin" / "python", tmp_path_factory.mktemp("empty"))


def test_every_data_file_is_declared():
    declared = {
        f"{package}/{name}"
        for package in PACKAGES
        for pattern in (*DATA["*"], *DATA.get(package, ()))
        for name in glob.glob(pattern, root_dir=ROOT / package, recursive=True)
    }
    there = {name for name in tracked() if name.split("/")[0] in PACKAGES}
    assert {name for name in there if not name.endswith(".py")} - declared == LEFT_OUT


@pytest.mark.slow
def test_the_wheel_contains_exactly_the_files_of_the_packages(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    expected = {name for name in tracked() if name.split("/")[0] in PACKAGES}
    assert held == expected - LEFT_OUT
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_an_installed_package_trains_and_compares(installed: Installed):
    where = installed.run("python", "-c", "import cluster, configs; print(cluster.__file__)")
    assert str(ROOT) not in where.stdout and where.returncode == 0, where.stderr
    shown = installed.run("sol-rl", "config", "quickstart")
    assert json.loads(shown.stdout)["name"] == "quickstart", shown.stderr
    trained = installed.run("sol-rl", "train", "quickstart", *OVERRIDES)
    assert trained.returncode == 0, trained.stderr
    run = installed.here / "out" / "quickstart"
    assert (run / "report.html").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["evaluation", "iteration", "evaluation"]

    command = ("sol-rl", "compare", "quickstart", "--arms", "naive_quant", "--seeds", "1")
    compared = installed.run(*command, "--out", "compared", *OVERRIDES[:-2])
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert (installed.here / "compared" / "compare.html").stat().st_size > 1000


STAGE = """
import sys
from pathlib import Path
from cluster.jobs.submit import stage
from configs.load import load
print(stage(Path("sent"), "mine.toml", load("mine.toml")))
"""


@pytest.mark.slow
def test_submit_sends_the_installed_packages(installed: Installed):
    (installed.here / "mine.toml").write_text(
        'layers = ["models/shapes", "rewards/shapes"]\nname = "mine"\n'
    )
    staged = installed.run("python", "-c", STAGE)
    assert staged.returncode == 0 and staged.stdout.strip() == "submitted/mine.toml", staged.stderr
    assert {path.name for path in (installed.here / "sent").iterdir()} == {*PACKAGES, "submitted"}
    nobody = ("--address", "http://127.0.0.1:9", "--set", "run_root=/data")
    refused = installed.run("sol-rl", "submit", "mine.toml", *nobody)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "no Ray dashboard answers" in refused.stderr
