"""What is left of a machine, in and out of containers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from antiphon.resolve.device import detect_device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIB = 1024**2


def machine(tmp_path: Path, *folders: str, cgroup: str) -> Path:
    """A machine with 100 MiB available, and a process in these groups."""
    for folder in ("proc/self", *(f"groups/{folder}" for folder in folders)):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 102400 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    return tmp_path


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A container in a container."""
    return machine(tmp_path, "outer/inner", cgroup="0::/outer/inner\n")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Version 1 of cgroups, where a container names its path on the host."""
    lines = "9:name=systemd:/docker/a\n4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/docker/a\n"
    return machine(tmp_path, "memory", "cpu,cpuacct", cgroup=lines)


Limit = tuple[str, int | str, int, int]
"""A group, its limit, what it uses, and how much of that is reclaimable."""


def memory_bytes(at: Path, limits: Sequence[Limit], names: tuple[str, str, str]) -> int:
    limit_file, used_file, stat = names
    for group, limit, used_bytes, reclaimable_bytes in limits:
        folder = at / "groups" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / used_file).write_text(f"{used_bytes}\n")
        (folder / "memory.stat").write_text(f"{stat} {reclaimable_bytes}\n")
    return detect_device(at / "proc", at / "groups").memory_bytes


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        pytest.param([("", "max", 1, 0)], 100 * MIB, id="no limit"),
        pytest.param(
            [("outer", 50 * MIB, 30 * MIB, 4 * MIB), ("outer/inner", 90 * MIB, MIB, 0)],
            24 * MIB,
            id="the tightest, without its file cache",
        ),
        pytest.param([("outer", MIB, 2 * MIB, 0)], 0, id="over its limit"),
    ],
)
def test_memory_is_what_the_tightest_group_leaves(
    nested: Path, limits: list[Limit], free: int
) -> None:
    names = ("memory.max", "memory.current", "anon 1\ninactive_file")
    assert memory_bytes(nested, limits, names) == free


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        pytest.param([("memory", 50 * MIB, 30 * MIB, 5 * MIB)], 25 * MIB, id="its own limit"),
        pytest.param(
            [("memory", 2**63 - 4096, MIB, 0), ("memory/docker/a", 9 * MIB, 2 * MIB, 0)],
            7 * MIB,
            id="the tightest, where all are seen",
        ),
        pytest.param([("memory", 2**63 - 4096, MIB, 0)], 100 * MIB, id="a number beyond all"),
    ],
)
def test_memory_is_what_groups_of_version_1_leave(
    old: Path, limits: list[Limit], free: int
) -> None:
    stat = "inactive_file 1\ntotal_inactive_file"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", stat)
    assert memory_bytes(old, limits, names) == free


def test_cores_are_those_that_this_process_may_use(nested: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert detect_device(nested / "proc", nested / "groups").cores == cores
    (nested / "groups" / "outer" / "cpu.max").write_text("50000 100000\n")
    assert detect_device(nested / "proc", nested / "groups").cores == 1


@pytest.mark.parametrize(("quota_us", "limited"), [("100000", True), ("-1", False)])
def test_a_quota_of_version_1_limits_the_cores(old: Path, quota_us: str, limited: bool) -> None:
    cpu = old / "groups" / "cpu,cpuacct"
    (cpu / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    cores = detect_device(old / "proc", old / "groups").cores
    assert cores == (1 if limited else len(os.sched_getaffinity(0)))


def test_this_machine_has_something() -> None:
    device = detect_device()
    assert device.cores >= 1
    assert device.memory_bytes > 0
