"""``make lock``: write the files in ``requirements/``, with the hash of every package for pip.

Versions come from ``constraints.txt``; hashes of all files of a version come from the package index
that uv is configured to use. One set of files serves Linux on x86_64 and aarch64 with Python 3.11
to 3.14:

* ``torch.txt``: torch alone. Each index has builds of its own and pip has to choose among them;
  given hashes, it would prefer the index that publishes them.
* ``run.txt``: the dependencies of the program; ``dev.txt``: what tests, linters and viewers need in
  addition.
* ``cuda.txt``: the CUDA libraries that the index's torch builds depend on. A CPU build does not
  need them.
* ``gpu.txt``, ``ocr.txt`` and so on: what an extra needs in addition, for the image.
* ``gpu_source.txt``: TransformerEngine's binding to torch, which is compiled on the machine that
  installs it, with what is in the other files.

``--wheel FILE`` only adds the hash of a torch build from elsewhere, which is kept until the version
changes. The hash of the CPU build for Linux on x86_64 with Python 3.11 is included.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from records.atomic import write_text
from tools.audit import pinned

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "requirements"
HEAD = "# Written by `make lock`; versions are those of constraints.txt. {what}\n"
EXTRAS = ("base", "gpu", "ocr", "tensorboard", "wandb")
"""Each has a file; dev, which has three of them, is installed by itself."""
WHAT = {
    "torch.txt": "The builds of torch.",
    "run.txt": "What the program needs.",
    "dev.txt": "What tests, linters and viewers need on top of run.txt.",
    "cuda.txt": "Libraries that builds of torch for CUDA need on top of run.txt.",
    "gpu_source.txt": "What is compiled against the installed torch.",
    **{f"{name}.txt": f"What the extra `{name}` needs on top of the others." for name in EXTRAS},
}
COMPILED = "transformer-engine-torch"
"""It has no wheels. pyproject.toml states its dependencies, which it computes from torch."""
Lock = dict[tuple[str, str], set[str]]
"""Maps (name, version) to the sha256 hashes of its files, in hex."""


def read(text: str) -> Lock:
    """Parse the packages of a requirements file with hashes."""
    blocks = re.findall(r"^([\w.-]+)==([^\s;\\]+)((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
    return {
        (_canonical(name), version): set(re.findall(r"--hash=sha256:([0-9a-f]{64})", rest))
        for name, version, rest in blocks
    }


def format_lock(what: str, lock: Mapping[tuple[str, str], Iterable[str]]) -> str:
    """Format a requirements file with hashes, in alphabetical order."""
    blocks = [
        " \\\n    ".join(
            [f"{name}=={version}", *(f"--hash=sha256:{each}" for each in sorted(hashes))]
        )
        for (name, version), hashes in sorted(lock.items())
    ]
    return HEAD.format(what=what) + "\n".join(blocks) + "\n"


def split(run: Lock, extras: Mapping[str, Lock], named: Iterable[str]) -> dict[str, Lock]:
    """Return the packages of each file.

    ``run`` are the packages that the program needs; each of ``extras`` also includes those of one
    extra. A package that is not ``named`` in constraints.txt is a dependency of torch and goes to
    cuda.txt.
    """
    known = {_canonical(name) for name in named}
    resolved = {key: hashes for lock in (run, *extras.values()) for key, hashes in lock.items()}
    cuda = {key: hashes for key, hashes in resolved.items() if key[0] not in known}
    torch = {key: hashes for key, hashes in run.items() if key[0] == "torch"}
    files = {
        "torch.txt": torch,
        "run.txt": {key: hashes for key, hashes in run.items() if key not in torch | cuda},
        "cuda.txt": cuda,
    }
    for name, lock in extras.items():
        own = {key: hashes for key, hashes in lock.items() if key not in run | cuda}
        files[f"{name}.txt"] = {key: own[key] for key in own if key[0] != COMPILED}
        if len(own) > len(files[f"{name}.txt"]):
            files[f"{name}_source.txt"] = {key: own[key] for key in own if key[0] == COMPILED}
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; return 2 if that fails."""
    options = _parser().parse_args(arguments)
    try:
        files = with_wheels(options.wheel) if options.wheel else resolved()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        print(f"make lock: {str(reason).strip()}", file=sys.stderr)
        return 2
    for name, lock in files.items():
        write_text(LOCKS / name, format_lock(WHAT[name], lock))
        print(f"{name}: {len(lock)} packages")
    return 0


def resolved() -> dict[str, Lock]:
    """Return the packages that uv resolves, keeping hashes that were added earlier with --wheel."""
    uv = shutil.which("uv")
    if uv is None:
        raise ValueError("uv is not on the PATH: pip install uv")
    run, extras = _compiled(uv), {name: _compiled(uv, "--extra", name) for name in ("dev", *EXTRAS)}
    files = split(run, extras, pinned((ROOT / "constraints.txt").read_text()))
    existing = {key: hashes for lock in _present().values() for key, hashes in lock.items()}
    return {
        name: {key: hashes | existing.get(key, set()) for key, hashes in lock.items()}
        for name, lock in files.items()
    }


def with_wheels(wheels: Iterable[Path]) -> dict[str, Lock]:
    """Return the existing files with the hashes of ``wheels`` added.

    Raises ValueError if a wheel's package or version is not in ``requirements/``.
    """
    files = _present()
    for path in wheels:
        name, version = path.name.split("-")[:2]
        key = _canonical(name), version.partition("+")[0]  # +cpu and the like are other builds
        entries = [lock[key] for lock in files.values() if key in lock]
        if not entries:
            raise ValueError(f"{path.name}: {key[0]} {key[1]} is not in requirements/")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        for hashes in entries:
            hashes.add(digest)
    return files


def _present() -> dict[str, Lock]:
    paths = {name: LOCKS / name for name in WHAT}
    return {name: read(path.read_text()) for name, path in paths.items() if path.exists()}


def _compiled(uv: str, *extra: str) -> Lock:
    command = [uv, "pip", "compile", "pyproject.toml", *extra, "--generate-hashes", "--quiet"]
    command += ["--constraints", "constraints.txt", "--python-version", "3.11", "--no-annotate"]
    completed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return read(completed.stdout)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make lock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=("wheels that are not on the index"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
