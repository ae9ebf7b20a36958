"""Actor processes forked from one process: what they share, and what is their own."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import ray

from actors.rollout import RolloutActor
from cluster.runtime import allocator, launcher, template
from cluster.runtime.launcher import SOCKET
from cluster.runtime.template import MODELS, RAYLET, Template
from configs.load import load
from tests.cluster import bare_template
from tests.cluster.runs import tiny_config

WORKER = """
import json, os, sys, threading
report = {
    "arguments": sys.argv[1:], "directory": os.getcwd(), "environment": dict(os.environ),
    "niceness": os.getpriority(os.PRIO_PROCESS, 0), "leads": os.getpgrp() == os.getpid(),
    "name": __name__, "imported": sorted({"diffusers", "peft", "ray"} & set(sys.modules)),
    "threads": len(os.listdir("/proc/self/task")), "parent": os.getppid(),
    "mapped": [n for n in ("libjemalloc", "libtriton") if n in open("/proc/self/maps").read()],
}
print(json.dumps(report), flush=True)
"""


def launch(
    folder: Path, path: str, niceness: int = 0, **more: str
) -> tuple[dict[str, object], str]:
    """Return the report of a worker that is started as Ray would start it, and its standard
    error.
    """
    (folder / "worker.py").write_text(WORKER)
    program = [sys.executable, "-IS", launcher.__file__, str(folder / "worker.py"), "--a", "b c"]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as errors:
        subprocess.run(
            program,
            env={SOCKET: path, "OWN": "1", "LC_ALL": "C.UTF-8", **more},
            cwd=folder,
            stdout=out,
            stderr=errors,
            check=True,
            preexec_fn=lambda: os.nice(niceness),
        )
        deadline = time.monotonic() + 60
        while not (recorded := (folder / "out").read_text()).endswith("\n"):
            assert time.monotonic() < deadline
        return json.loads(recorded), (folder / "err").read_text()


def test_a_fork_has_the_requested_process_properties(ray_here, tmp_path):
    """Ray kills a worker with its process group, and lowers its priority before it starts."""
    (made,) = template._running
    before = os.getpriority(os.PRIO_PROCESS, 0)
    recorded, errors = launch(tmp_path, made.path, niceness=3)
    assert recorded == {
        "arguments": ["--a", "b c"],
        "directory": str(tmp_path),
        "environment": {SOCKET: made.path, "OWN": "1", "LC_ALL": "C.UTF-8"},
        "niceness": min(before + 3, 19),
        "leads": True,
        "name": "__main__",
        "imported": ["diffusers", "peft", "ray"],
        "threads": 1,
        "parent": recorded["parent"],
        # libraries that CPUs do not need take no memory, though torch would import them
        "mapped": ["libjemalloc"] if allocator.variables() else [],
    }
    assert errors == "" and psutil.Process(recorded["parent"]).ppid() == made.pid


def test_without_a_template_the_launcher_starts_a_new_process(tmp_path):
    recorded, errors = launch(tmp_path, str(tmp_path / "nobody"))
    assert recorded["imported"] == [] and recorded["arguments"] == ["--a", "b c"]
    assert errors.startswith(f"no fork from {tmp_path}/nobody: ") and errors.count("\n") == 1


def test_the_template_ends_with_its_driver(tiny_sd3_dir, tmp_path, monkeypatch):
    """A killed driver closes its end of the pipe as well. This one imports nothing first, and its
    directory of temporary files is too long for a socket.
    """
    monkeypatch.setattr(template, "__name__", bare_template.__name__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / (60 * "x")))
    made = Template(tiny_config(tiny_sd3_dir, tmp_path, "template"))
    recorded, errors = launch(tmp_path, made.path)
    assert (recorded["imported"], errors) == (["ray"], "")
    own = psutil.Process(recorded["parent"])
    assert own.ppid() == made.pid
    made.alive.close()
    assert psutil.Process(made.pid).wait(60) == 0
    assert not os.path.exists(os.path.dirname(made.path))
    own.wait(60)


def cut_short(path: str, sent: bytes) -> None:
    """Kill a launcher when it has sent this much of its request."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        if sent:
            socket.send_fds(connection, [sent], [0, 1, 2])


def descriptors(pid: int) -> int:
    """Return the number of descriptors of an idle template."""
    looks = []
    for _ in range(40):
        looks.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.025)
    return min(looks)


def test_killed_launchers_do_not_affect_the_template(tiny_sd3_dir, tmp_path, monkeypatch):
    """They die at any point of their request, and before its answer.

    Ray kills workers that it no longer needs.
    """
    monkeypatch.setattr(template, "__name__", bare_template.__name__)
    made = Template(tiny_config(tiny_sd3_dir, tmp_path, "killed"))
    body = json.dumps({"environment": {}}).encode()
    whole = len(body).to_bytes(launcher.LENGTH, "big") + body
    for each in (b"", whole[:2], whole[: launcher.LENGTH], whole[:-1], whole):
        cut_short(made.path, each)
    for _ in range(2):  # the second one asks the template of its Ray, which the first one started
        recorded, errors = launch(tmp_path, made.path)
        assert (recorded["imported"], errors) == (["ray"], "")
        cut_short(f"{os.path.dirname(made.path)}/0", whole[: launcher.LENGTH])
    own = psutil.Process(recorded["parent"])
    # standard streams that were sent with it are closed
    before = descriptors(own.pid)
    cut_short(f"{os.path.dirname(made.path)}/0", whole[:-1])
    launch(tmp_path, made.path)
    assert descriptors(own.pid) == before
    made.alive.close()
    assert psutil.Process(made.pid).wait(60) == 0
    own.wait(60)
    assert not os.path.exists(os.path.dirname(made.path))


CANNOT = """
from cluster.runtime import template

def main():
    template.import_for = lambda config: 1 / 0
    template.main()
"""


def test_a_template_that_cannot_import_leaves_no_folder(tiny_sd3_dir, tmp_path, monkeypatch):
    """Each actor then imports by itself, and reports what is wrong."""
    (tmp_path / "cannot_import.py").write_text(CANNOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(template, "__name__", "cannot_import")
    made = Template(tiny_config(tiny_sd3_dir, tmp_path, "cannot"))
    assert psutil.Process(made.pid).wait(60) == 1
    assert not os.path.exists(os.path.dirname(made.path))
    recorded, errors = launch(tmp_path, made.path)
    assert (recorded["imported"], errors.count("\n")) == ([], 1)


def test_each_ray_instance_has_its_own_template(tiny_sd3_dir, tmp_path, monkeypatch):
    """Ray reads its variables about actors once, when it is imported."""
    monkeypatch.setattr(template, "__name__", bare_template.__name__)
    made = Template(tiny_config(tiny_sd3_dir, tmp_path, "rays"))
    with subprocess.Popen(["sleep", "600"]) as raylet:
        its = {RAYLET: str(raylet.pid), "RAY_JOB_ID": "01000000"}
        first, second = (launch(tmp_path, made.path, **its)[0]["parent"] for _ in range(2))
        other = launch(tmp_path, made.path, **its | {"RAY_JOB_ID": "02000000"})[0]["parent"]
        assert first == second != other
        raylet.kill()
    assert psutil.wait_procs([psutil.Process(first), psutil.Process(other)], 60)[1] == []
    assert psutil.Process(made.pid).status() != psutil.STATUS_ZOMBIE
    recorded, errors = launch(tmp_path, made.path, **its)
    assert "no fork from" in errors and recorded["imported"] == []


def test_actors_on_cpus_are_forks(monkeypatch):
    config = load("quickstart", ["services.encoder.gpus=1"])
    assert template.runtime_env(config, "rollout") == {} or template._running
    monkeypatch.setattr(template, "_running", [type("Made", (), {"path": "/here"})])
    assert template.runtime_env(config, "rollout")["env_vars"] == {SOCKET: "/here"}
    assert template.runtime_env(config, "selector") == template.fork_runtime_env() != {}
    assert template.runtime_env(config, "encoder") == {}
    on_gpus = load("quickstart", [f"services.{kind}.gpus=1" for kind in MODELS])
    monkeypatch.setattr(template, "_running", [])
    template.start(on_gpus)
    assert template._running == []


def test_ray_starts_a_rollout_actor_as_a_fork(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "forked")
    env = template.runtime_env(config, "rollout")
    tree = config.model_dump(mode="json")
    actor = ray.remote(RolloutActor).options(num_cpus=0, runtime_env=env).remote(tree)
    try:
        pid = ray.get(actor.ready.remote()).pid
        template_of_ray = psutil.Process(pid).parent()
        assert template_of_ray.ppid() == template._running[0].pid
        assert ray.get(actor.__ray_call__.remote(lambda _: __import__("os").getpgrp())) == pid
    finally:
        ray.kill(actor)
    assert psutil.Process(template._running[0].pid).status() != psutil.STATUS_ZOMBIE
