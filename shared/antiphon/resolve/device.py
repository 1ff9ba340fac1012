"""CPU and memory that this process may use, within container limits."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class HostDevice(msgspec.Struct, frozen=True):
    """Where a model runs.

    Attributes:
        memory_bytes: Free memory before anything was loaded.
        lacking: Why the CPU kernels do not run in this process; None if they do. Only the worker
            sets it.
        arithmetic: What the numerics depend on here, by name: instruction set, version of the
            kernels. Only the worker sets it.
    """

    kind: str
    cores: int
    memory_bytes: int
    lacking: str | None = None
    arithmetic: dict[str, str] = {}


def detect_device(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostDevice:
    """Read the free CPU and memory of this machine, within the limits of its containers."""
    folders = _cgroup_folders(proc, cgroups)
    cores = min([len(os.sched_getaffinity(0)), *map(_cores, folders)])
    memory = min([_available_bytes(proc), *map(_room_bytes, folders)])
    return HostDevice(kind="cpu", cores=int(max(cores, 1)), memory_bytes=int(max(memory, 0)))


def _cgroup_folders(proc: Path, cgroups: Path) -> list[Path]:
    """The process's cgroups and all their parents, each of which may have the effective limit.

    A line of version 2 names no controller and is relative to the mount itself; version 1 has one
    mount per controller. In a container the path may be the host's, where only the mount exists.
    """
    folders: list[Path] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = cgroups / controllers
        folder = mount / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]
    return folders


def _available_bytes(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _room_bytes(folder: Path) -> float:
    """Unused memory of a cgroup; unlimited ones have the limit `max` or a huge number."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(folder / limit_file), _read(folder / used_file)
        if limit.isdecimal() and used.isdecimal():
            return int(limit) - int(used) + _reclaimable_bytes(folder, cached)
    return math.inf


def _reclaimable_bytes(folder: Path, cached: str) -> int:
    """Inactive file pages: they count as used but are reclaimed when memory is needed."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cached:
            return int(value)
    return 0


def _cores(folder: Path) -> float:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() else math.inf


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
