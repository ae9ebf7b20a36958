"""``deploy/Dockerfile``: what it installs, and its commands with a pip that prints its arguments.

Building the image itself takes the network and half an hour: docs/cluster.md says where it was.
"""

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.cluster.head import ROOT
from tools import lock

TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
LOCKS = {path.stem: lock.read(path.read_text()) for path in (ROOT / "requirements").glob("*.txt")}
INSTALL = "install --require-hashes --no-deps"


def test_python_of_the_image_is_one_that_the_program_supports():
    assert [line for line in TEXT.splitlines() if line.startswith("USER ")][-1] == "USER ray"
    (base,) = re.findall(r"^ARG BASE=debian:(\w+)-slim$", TEXT, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"bookworm": "3.11", "trixie": "3.13"}[base] in SpecifierSet(project["requires-python"])
    assert {"python3-dev", "g++", "wget", "rsync"} <= set(TEXT.split())


def test_transformer_engine_is_compiled_with_headers_for_the_cuda_of_torch():
    """The wheels that torch needs lack two sets of headers, which have wheels of their own."""
    assert {name for name, _ in LOCKS["gpu_source"]} == {"transformer-engine-torch"}
    versions = {name: Version(at) for packages in LOCKS.values() for name, at in packages}
    release = versions["nvidia-cuda-runtime"].release[:2]
    for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl"):
        assert versions[name].release[:2] == release
    (core, binding) = (versions[f"transformer-engine-{name}"] for name in ("cu13", "torch"))
    assert release[0] == 13 and core == binding == versions["transformer-engine"]
    assert {"NVTE_BUILD_USE_NVIDIA_WHEELS=1", "NVTE_PYTORCH_FORCE_BUILD=TRUE"} <= set(TEXT.split())


@pytest.mark.parametrize(
    ("extras", "files"),
    [("", []), ("ocr", ["ocr"]), ("gpu,ocr", ["gpu", "gpu_source", "ocr"]), ("gpus", None)],
)
def test_commands_of_the_image_write_only_to_paths_of_its_user(tmp_path, extras, files):
    """Those after USER run, with a stand-in for pip that fails if a named file is missing."""
    home, copied, tools = tmp_path / "home", tmp_path / "sol-rl", tmp_path / "bin"
    for folder in (home, tools):
        folder.mkdir()
    lines = TEXT.splitlines()
    assert "COPY --chown=ray:users requirements /tmp/sol-rl" in lines
    shutil.copytree(ROOT / "requirements", copied)
    pip = 'for each; do case $each in *.txt) cat "$each" >/dev/null || exit 1;; esac; done'
    (tools / "pip").write_text(f'#!/bin/sh\n{pip}\necho "$@" >> "$HOME/calls"\n')
    (tools / "pip").chmod(0o755)
    copied.chmod(0o555)
    env = {"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin", "EXTRAS": extras}
    own = lines[lines.index("USER ray") : lines.index("USER root")]
    codes = []
    for entry in (line.removeprefix("RUN ") for line in own if line.startswith("RUN ")):
        command = entry.replace("/tmp/sol-rl", shlex.quote(str(copied)))
        done = subprocess.run(["sh", "-c", command], cwd="/", env=env, capture_output=True)
        codes.append(done.returncode)
    calls = (home / "calls").read_text().splitlines()
    always = ("torch", "run", "cuda", "base", "tensorboard", "wandb")  # as `make setup`
    assert calls[:2] == [" ".join([INSTALL, *(f"-r {name}.txt" for name in always)]), "check"]
    if files is None:
        assert codes == [0, 1] and calls[2:] == []
        return
    each = [f"{INSTALL} --no-build-isolation -r {name}.txt" for name in files]
    assert codes == [0, 0] and calls[2:] == [*each, "check"]
