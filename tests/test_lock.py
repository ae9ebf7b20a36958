"""The files in requirements/, and the command that writes them."""

import hashlib
import re
from pathlib import Path

import pytest

from tools import lock
from tools.audit import pinned

ROOT = Path(__file__).parent.parent
FILES = {name: lock.read((ROOT / "requirements" / name).read_text()) for name in lock.WHAT}
IN_DEV = ("base", "tensorboard", "wandb")
A, B, C = (letter * 64 for letter in "abc")


def test_every_pinned_version_is_locked_once_with_hashes():
    found = [key for packages in FILES.values() for key in packages]
    constraints = pinned((ROOT / "constraints.txt").read_text())
    expected = {(re.sub(r"[-_.]+", "-", name).lower(), at) for name, at in constraints.items()}
    together = ("torch.txt", "run.txt", "cuda.txt", "gpu.txt", "gpu_source.txt", "ocr.txt")
    for other in ("dev.txt", "base.txt"):  # dev has the packages of base, tensorboard and wandb
        keys = [key for name in (*together, other) for key in FILES[name]]
        assert len(keys) == len(set(keys))
    assert all(FILES[f"{name}.txt"].keys() < FILES["dev.txt"].keys() for name in IN_DEV)
    assert set(found) - set(FILES["cuda.txt"]) == expected
    assert all(hashes for packages in FILES.values() for hashes in packages.values())


def test_cuda_packages_are_locked_separately():
    assert [name for name, _ in FILES["torch.txt"]] == ["torch"]
    assert all(name.startswith(("nvidia-", "cuda-")) for name, _ in FILES["cuda.txt"])
    assert {"ray", "diffusers", "setuptools"} <= {name for name, _ in FILES["run.txt"]}
    assert {"pytest", "ruff", "pyright"} <= {name for name, _ in FILES["dev.txt"]}


def test_lock_files_are_read_back():
    packages = {("a", "1"): {A, B}, ("b-c", "2.0.post1"): {C}}
    text = lock.format_lock("Words.", packages)
    assert text.splitlines()[1:3] == ["a==1 \\", f"    --hash=sha256:{A} \\"]
    assert lock.read(text) == packages


def test_markers_and_names_as_a_resolver_writes_them_are_read():
    text = f"Some_Name==1.2 ; sys_platform == 'linux' \\\n    --hash=sha256:{A}\nother==3\n"
    assert lock.read(text) == {("some-name", "1.2"): {A}, ("other", "3"): set()}


def test_packages_are_assigned_to_lock_files():
    run = {("torch", "1"): {A}, ("numpy", "2"): {B}, ("nvidia-x", "3"): {C}}
    compiled = {("engine", "5"): {B}, (lock.COMPILED, "5"): {A}, ("cuda-y", "6"): {C}}
    extras = {"dev": {**run, ("pytest", "4"): {A}}, "gpu": {**run, **compiled}}
    named = ["torch", "NumPy", "pytest", "engine", lock.COMPILED]
    assert lock.split(run, extras, named) == {
        "torch.txt": {("torch", "1"): {A}},
        "run.txt": {("numpy", "2"): {B}},
        "dev.txt": {("pytest", "4"): {A}},
        "cuda.txt": {("nvidia-x", "3"): {C}, ("cuda-y", "6"): {C}},
        "gpu.txt": {("engine", "5"): {B}},
        "gpu_source.txt": {(lock.COMPILED, "5"): {A}},
    }


def test_the_hash_of_a_wheel_is_added(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    (tmp_path / "torch.txt").write_text(lock.format_lock("", {("torch", "2.13.0"): {A}}))
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"a build")
    assert lock.main(["--wheel", str(wheel)]) == 0
    found = lock.read((tmp_path / "torch.txt").read_text())
    assert found == {("torch", "2.13.0"): {A, hashlib.sha256(b"a build").hexdigest()}}
    other = tmp_path / "torch-2.14.0-cp311-cp311-linux_x86_64.whl"
    other.write_bytes(b"")
    assert lock.main(["--wheel", str(other)]) == 2
    assert capsys.readouterr().err.endswith("whl: torch 2.14.0 is not in requirements/\n")


@pytest.mark.parametrize("what", ["no uv", "no such file"])
def test_lock_errors_are_one_line(what, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = [] if what == "no uv" else ["--wheel", str(tmp_path / "torch-1-x.whl")]
    assert lock.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
