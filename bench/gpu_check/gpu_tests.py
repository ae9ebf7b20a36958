"""The tests marked ``gpu``, run by pytest in a process per file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pytest", "hypothesis")


def files() -> list[str]:
    """Return the test files with a test marked ``gpu``, relative to the repository root."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in paths if "mark.gpu" in file.read_text()]


def measure(setting: Setting) -> Iterator[Item]:
    """Yield the numbers of failed, passed and skipped tests per file."""
    if not setting.gpu:
        yield LeftOut("the tests that are marked gpu", "there is no GPU; `make test` has the rest")
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield LeftOut("all tests", f"{', '.join(missing)} is not installed")
        return
    with tempfile.TemporaryDirectory(prefix="sol-rl-gpu-tests-") as scratch:
        report = Path(scratch) / "junit.xml"
        for file in files():  # one by one, so that a hang loses the results of one file only
            if setting.left < 5.0:
                yield LeftOut(file, "no time was left")
                continue
            yield _file(file, report, setting.left)


def command(file: str, report: Path) -> Sequence[str]:
    """Return the pytest command for one file.

    The project's addopts are disabled, as some need plug-ins that may not be installed.
    """
    options = ["-o", "addopts=", "-m", "gpu and not slow", "-q", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", file]


def _file(file: str, report: Path, seconds: float) -> Item:
    """Run the tests of one file within a timeout."""
    report.unlink(missing_ok=True)
    try:
        completed = subprocess.run(
            command(file, report), cwd=ROOT, timeout=seconds, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return LeftOut(file, f"it did not end within {seconds:.0f} s")
    if not report.exists():
        last_line = (completed.stdout + completed.stderr).strip().splitlines()[-1:]
        return Finding(file, 1.0, "failed", {"file": file}, note=" ".join(last_line))
    return finding_of(file, report)


def finding_of(file: str, report: Path) -> Finding:
    """Return the finding of pytest's report in JUnit XML format."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    tags = ("failure", "error")
    failed = [case for case in cases if any(case.find(tag) is not None for tag in tags)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    named = ", ".join(str(case.get("name")) for case in failed)
    counts = {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped)}
    beside = {name: float(count) for name, count in counts.items()}
    return Finding(file, float(len(failed)), "failed", {"file": file}, beside, named)
