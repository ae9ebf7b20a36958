"""What a process may use of its machine, by the control groups that /proc names."""

import os

import pytest

from planning.machine import killed_for_memory, usable_cores, usable_memory

GB = 10**9


class Machine:
    """A /proc directory of a process, and the control groups that it names."""

    def __init__(self, root):
        self.root, self.process, self.mounts = root, root / "proc", list[str]()
        self.process.mkdir()

    def mount(self, kind: str, options: str, root: str = "/") -> None:
        directory = self.root / options
        line = f"31 30 0:29 {root} {directory} rw shared:9 - {kind} {kind} rw,{options}"
        self.mounts.append(line)
        self.write(self.process / "mountinfo", "\n".join(self.mounts))

    def belongs(self, *lines: str) -> None:
        self.write(self.process / "cgroup", "\n".join(lines))

    def limit(self, file: str, text: str) -> None:
        self.write(self.root / file, text)

    def write(self, file, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GB // 4096}
    monkeypatch.setattr("os.sysconf", lambda name: sizes[name])
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ("max 100000", "150000 100000", 2),
        ("400000 100000", "max 100000", 4),
        ("400000 100000", "800000 100000", 4),
        ("max 100000", "max 100000", 16),
        ("max 100000", "10000 100000", 1),
        ("9900000 100000", "nonsense", 16),
    ],
)
def test_cores_of_a_group_of_version_2(machine, outer, inner, cores):
    """The limits of all parents hold, a part of a core is one core."""
    machine.mount("cgroup2", "unified")
    machine.belongs("0::/pod/container")
    machine.limit("unified/pod/cpu.max", outer)
    machine.limit("unified/pod/container/cpu.max", inner)
    assert usable_cores(machine.process) == cores


def test_memory_of_a_group_of_version_2(machine):
    machine.mount("cgroup2", "unified")
    machine.belongs("0::/pod/container")
    assert usable_memory(machine.process) == 64 * GB // 4096 * 4096
    machine.limit("unified/pod/memory.max", str(8 * GB))
    for inner, usable in (("max", 8 * GB), (str(9 * GB), 8 * GB), (str(7 * GB), 7 * GB)):
        machine.limit("unified/pod/container/memory.max", inner)
        assert usable_memory(machine.process) == usable
    assert killed_for_memory(machine.process) == 0
    machine.limit("unified/pod/container/memory.events", "low 0\noom 5\noom_kill 3")
    assert killed_for_memory(machine.process) == 3


@pytest.mark.parametrize(
    ("root", "path"),
    # as the host sees it; with the container's directory mounted; in a namespace of groups
    [("/", "/docker/ab"), ("/docker/ab", "/docker/ab"), ("/docker", "/docker/ab"), ("/", "/../cd")],
)
def test_a_container_with_groups_of_version_1(machine, root, path):
    inside = path.removeprefix(root).strip("/")
    directory = "/" if inside.startswith("..") else f"/{inside}/"
    machine.limit("cd/memory.limit_in_bytes", str(GB))  # of another container
    machine.mount("cgroup", "cpu,cpuacct", root)
    machine.mount("cgroup", "memory", root)
    machine.mount("cgroup", "name=systemd", root)
    machine.belongs(
        f"7:cpu,cpuacct:{path}", f"5:memory:{path}", f"1:name=systemd:{path}", "0::/other"
    )
    machine.limit(f"cpu,cpuacct{directory}cpu.cfs_quota_us", "250000")
    machine.limit(f"cpu,cpuacct{directory}cpu.cfs_period_us", "100000")
    machine.limit(f"memory{directory}memory.limit_in_bytes", str(3 * GB))
    machine.limit(f"memory{directory}memory.oom_control", "under_oom 0\noom_kill 2")
    assert usable_cores(machine.process) == 3
    assert usable_memory(machine.process) == 3 * GB
    assert killed_for_memory(machine.process) == 2


def test_no_limit_in_version_1_is_none(machine):
    machine.mount("cgroup", "cpu")
    machine.mount("cgroup", "memory")
    machine.belongs("1:cpu:/", "4:memory:/")
    machine.limit("cpu/cpu.cfs_quota_us", "-1")
    machine.limit("cpu/cpu.cfs_period_us", "100000")
    machine.limit("memory/memory.limit_in_bytes", "9223372036854771712")
    assert usable_cores(machine.process) == 16
    assert usable_memory(machine.process) == 64 * GB // 4096 * 4096


def test_a_machine_without_groups(machine, tmp_path):
    for process in (machine.process, tmp_path / "nothing"):
        assert usable_cores(process) == 16
        assert usable_memory(process) == 64 * GB // 4096 * 4096
        assert killed_for_memory(process) == 0


def test_this_machine():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert 0 < usable_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
