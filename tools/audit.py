"""``make audit``: check installed packages for wrong versions, altered files and vulnerabilities.

Reports packages that are installed in another version than the one pinned in ``constraints.txt``,
with ``--files`` also installed files that were altered, and pinned versions with known
vulnerabilities. Vulnerabilities are looked up in OSV (osv.dev) by name and version; if OSV cannot
be reached, one line says so and the other checks still run. The exit code is 1 if there is any
finding.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import sys
import urllib.request
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

INDEX = "https://api.osv.dev/v1/querybatch"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
ANSWER_BYTES = 16 * 2**20


def pinned(text: str) -> dict[str, str]:
    """Return the name and version of every ``name==version`` line in ``text``."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {name.strip(): version.partition(";")[0].strip() for name, _, version in pairs}


def version_mismatches(requested: dict[str, str]) -> list[str]:
    """Return one line per package that is installed in another version than the pinned one.

    Local version labels, such as ``+cpu``, are ignored. Packages that are not installed are
    skipped.
    """
    lines = []
    for name, version in requested.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform, or an extra
        if installed.partition("+")[0] != version.partition("+")[0]:
            lines.append(f"{name} {installed} is installed, but constraints.txt pins {version}")
    return lines


def altered_files(names: Iterable[str]) -> list[str]:
    """Return one line per installed file that is missing or differs from the hash in its RECORD."""
    lines = []
    for name in names:
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        # not by ``installed.files``, which leaves out missing files from Python 3.12 on
        for file, recorded, _ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
            mode, _, expected = recorded.partition("=")
            if not expected:
                continue
            path = Path(str(installed.locate_file(file)))
            if not path.is_file():
                lines.append(f"{name}: {file} is missing")
                continue
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, mode).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != expected:
                lines.append(f"{name}: {file} differs from the installed file")
    return lines


def vulnerabilities(requested: dict[str, str], index: str) -> list[str]:
    """Return one line per package that has known vulnerabilities.

    ``index`` is the URL of an OSV server. Raises OSError if it cannot be reached and ValueError if
    its response does not have one result per package.
    """
    packages = [(name, version.partition("+")[0]) for name, version in requested.items()]
    queries = [{"package": {"name": n, "ecosystem": "PyPI"}, "version": v} for n, v in packages]
    request = urllib.request.Request(
        index, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        results = json.loads(response.read(ANSWER_BYTES))["results"]
    if len(results) != len(packages):
        raise ValueError(f"{len(results)} answers for {len(packages)} packages")
    return [
        f"{name} {version}: {', '.join(vulnerability['id'] for vulnerability in result['vulns'])}"
        for (name, version), result in zip(packages, results, strict=True)
        if result.get("vulns")
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print one line per check and per finding; return 1 if there is any finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default=INDEX, help="an OSV server")
    parser.add_argument(
        "--files", action="store_true", help=("compare every installed file (slow)")
    )
    options = parser.parse_args(arguments)
    requested = pinned(CONSTRAINTS.read_text())
    findings = version_mismatches(requested)
    print(
        f"{len(requested)} packages are pinned, {len(findings)} of them are installed in another"
        " version"
    )
    if options.files:
        findings += (changed := altered_files(requested))
        print(f"changed files: {len(changed)}")
    try:
        findings += (known := vulnerabilities(requested, options.index))
        print(f"packages with known vulnerabilities: {len(known)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())
        print(
            f"vulnerabilities were not looked up: {options.index} ({type(error).__name__}: {why})"
        )
    for line in findings:
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
