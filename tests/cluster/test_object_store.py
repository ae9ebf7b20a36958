"""Where the object store of a node is, read from a process's memory map."""

import pytest

from actors.object_store import mapped_on_disk

MOUNTS = """\
64 60 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
86 64 0:27 / /dev/shm rw,nosuid,nodev shared:5 - tmpfs shm rw,size=65536k
90 64 0:40 / /mnt/large\\040pages rw - hugetlbfs none rw
91 64 0:51 / / rw - overlay overlay rw,lowerdir=/a
"""
OTHER = "7fc000000000-7fc000001000 r--p 00000000 fe:00 77   /lib/libc.so.6\n"


def line(device: str, path: str) -> str:
    return f"7f8323800000-7f8477e20000 rw-s 00000000 {device} 2149440                    {path}\n"


@pytest.mark.parametrize(
    ("mapped", "directory"),
    [
        (line("fe:00", "/tmp/ray/plasmaKrbfBw (deleted)"), "/tmp/ray"),
        (line("00:33", "/tmp/ray/plasmaKrbfBw (deleted)"), "/tmp/ray"),
        # as some kernels name the disk below an overlay
        (line("08:01", "/tmp/my ray/plasmaKrbfBw (deleted)"), "/tmp/my ray"),
        (line("00:1b", "/dev/shm/plasmapkzeHR (deleted)"), None),
        # the device of an unlisted mount, but the usual directory
        (line("00:99", "/dev/shm/plasmapkzeHR (deleted)"), None),
        (line("00:28", "/mnt/large pages/plasmaXYZ012"), None),
        # an object for which the store, in memory, had no room
        (line("fe:00", "/tmp/ray/plasmaKrbfBw").replace("7f8477e20000", "7f8323840000"), None),
        ("", None),
    ],
)
def test_the_store_is_where_its_mapped_file_is(tmp_path, mapped, directory):
    (tmp_path / "maps").write_text(OTHER + mapped + OTHER)
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert mapped_on_disk(tmp_path) == directory


def test_nothing_is_said_where_the_process_cannot_be_read(tmp_path):
    assert mapped_on_disk(tmp_path) is None
