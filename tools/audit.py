"""``make audit``: are the installed packages those of ``constraints.txt``, are their files as they
were installed, and which of them have known vulnerabilities.

Vulnerabilities are looked up in OSV (osv.dev) by name and version; where that cannot be reached, a
line says so, and the rest is checked all the same. Exit code 1 for anything found.
"""

from __future__ import annotations

import argparse
import base64
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
    """Name to version of every ``name==version`` line."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {name.strip(): version.partition(";")[0].strip() for name, _, version in pairs}


def differing(wanted: dict[str, str]) -> list[str]:
    """A line per package that is installed in another version than the pinned one; a local part
    such as +cpu is no other version.
    """
    lines = []
    for name, version in wanted.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform, or an extra
        if found.partition("+")[0] != version.partition("+")[0]:
            lines.append(f"{name} {found} is installed, constraints.txt says {version}")
    return lines


def altered(names: Iterable[str]) -> list[str]:
    """A line per installed file that differs from the hash in its package's RECORD."""
    lines = []
    for name in names:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.hash is None:
                continue
            path = Path(str(file.locate()))
            if not path.is_file():
                lines.append(f"{name}: {file} is missing")
                continue
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, file.hash.mode).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                lines.append(f"{name}: {file} is not what was installed")
    return lines


def vulnerabilities(wanted: dict[str, str], index: str) -> list[str]:
    """A line per package with known vulnerabilities. Raises OSError where nobody can be asked,
    ValueError for an answer that is none.
    """
    named = [(name, version.partition("+")[0]) for name, version in wanted.items()]
    queries = [{"package": {"name": n, "ecosystem": "PyPI"}, "version": v} for n, v in named]
    request = urllib.request.Request(
        index, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        results = json.loads(answer.read(ANSWER_BYTES))["results"]
    if len(results) != len(named):
        raise ValueError(f"{len(results)} answers for {len(named)} packages")
    return [
        f"{name} {version}: {', '.join(each['id'] for each in result['vulns'])}"
        for (name, version), result in zip(named, results, strict=True)
        if result.get("vulns")
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print a line per check and per finding; 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default=INDEX, help="an OSV server")
    parser.add_argument("--files", action="store_true", help="compare every installed file, slowly")
    options = parser.parse_args(arguments)
    wanted = pinned(CONSTRAINTS.read_text())
    found = differing(wanted)
    print(f"{len(wanted)} packages are pinned, {len(found)} are installed in another version")
    if options.files:
        found += (changed := altered(wanted))
        print(f"files that are not as installed: {len(changed)}")
    try:
        found += (known := vulnerabilities(wanted, options.index))
        print(f"packages with known vulnerabilities: {len(known)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())
        print(
            f"vulnerabilities were not looked up: {options.index} ({type(error).__name__}: {why})"
        )
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
