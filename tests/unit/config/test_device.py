"""What is left of a machine, in and out of containers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from antiphon.resolve.device import detect_device

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024**2


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 100 MiB available, and a container in a container."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 102400 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    return tmp_path


def limit(folder: Path, *, limit_bytes: str, used_bytes: int, reclaimable_bytes: int) -> None:
    (folder / "memory.max").write_text(f"{limit_bytes}\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable_bytes}\n")


def memory_bytes(machine: Path) -> int:
    return detect_device(machine / "proc", machine / "groups").memory_bytes


def test_without_limits_what_is_available_counts(machine: Path) -> None:
    limit(machine / "groups", limit_bytes="max", used_bytes=1, reclaimable_bytes=0)
    assert memory_bytes(machine) == 100 * MIB


def test_the_tightest_container_counts_and_its_file_cache_does_not(machine: Path) -> None:
    outer = machine / "groups" / "outer"
    limit(outer, limit_bytes=str(50 * MIB), used_bytes=30 * MIB, reclaimable_bytes=4 * MIB)
    limit(outer / "inner", limit_bytes=str(90 * MIB), used_bytes=MIB, reclaimable_bytes=0)
    assert memory_bytes(machine) == 24 * MIB


def test_a_container_over_its_limit_has_nothing_left(machine: Path) -> None:
    outer = machine / "groups" / "outer"
    limit(outer, limit_bytes=str(MIB), used_bytes=2 * MIB, reclaimable_bytes=0)
    assert memory_bytes(machine) == 0


def test_cores_are_those_that_this_process_may_use(machine: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert detect_device(machine / "proc", machine / "groups").cores == cores
    (machine / "groups" / "outer" / "cpu.max").write_text("50000 100000\n")
    assert detect_device(machine / "proc", machine / "groups").cores == 1


@pytest.fixture
def old_machine(tmp_path: Path) -> Path:
    """A machine with version 1 of cgroups, where a container names its path on the host."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "groups" / "memory").mkdir(parents=True)
    (tmp_path / "groups" / "cpu,cpuacct").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 102400 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(
        "9:name=systemd:/docker/a\n4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/docker/a\n"
    )
    return tmp_path


def old_limit(folder: Path, *, limit_bytes: int, used_bytes: int, reclaimable_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_bytes}\n")
    stat = f"inactive_file 1\ntotal_inactive_file {reclaimable_bytes}\n"
    (folder / "memory.stat").write_text(stat)


def test_a_container_of_version_1_has_its_own_limit(old_machine: Path) -> None:
    memory = old_machine / "groups" / "memory"
    old_limit(memory, limit_bytes=50 * MIB, used_bytes=30 * MIB, reclaimable_bytes=5 * MIB)
    assert memory_bytes(old_machine) == 25 * MIB


def test_the_tightest_group_of_version_1_counts_where_they_are_all_seen(old_machine: Path) -> None:
    memory = old_machine / "groups" / "memory"
    old_limit(memory, limit_bytes=2**63 - 4096, used_bytes=MIB, reclaimable_bytes=0)
    old_limit(memory / "docker" / "a", limit_bytes=9 * MIB, used_bytes=2 * MIB, reclaimable_bytes=0)
    assert memory_bytes(old_machine) == 7 * MIB


def test_no_limit_in_version_1_is_a_number_beyond_all(old_machine: Path) -> None:
    memory = old_machine / "groups" / "memory"
    old_limit(memory, limit_bytes=2**63 - 4096, used_bytes=MIB, reclaimable_bytes=0)
    assert memory_bytes(old_machine) == 100 * MIB


@pytest.mark.parametrize(("quota_us", "limited"), [("100000", True), ("-1", False)])
def test_a_quota_of_version_1_limits_the_cores(
    old_machine: Path, quota_us: str, limited: bool
) -> None:
    cpu = old_machine / "groups" / "cpu,cpuacct"
    (cpu / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    cores = detect_device(old_machine / "proc", old_machine / "groups").cores
    assert cores == (1 if limited else len(os.sched_getaffinity(0)))


def test_this_machine_has_something() -> None:
    device = detect_device()
    assert device.cores >= 1
    assert device.memory_bytes > 0
