"""What this process may use of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class Device(msgspec.Struct, frozen=True):
    """Where a model runs. `memory_bytes` is what was free before anything was loaded."""

    kind: str
    cores: int
    memory_bytes: int


def this_device(proc: Path = PROC, cgroups: Path = CGROUPS) -> Device:
    """Read what is left of this machine, within the limits of its containers."""
    folders = _cgroup_folders(proc, cgroups)
    cores = min([len(os.sched_getaffinity(0)), *map(_cores, folders)])
    memory = min([_available_bytes(proc), *map(_room_bytes, folders)])
    return Device(kind="cpu", cores=int(max(cores, 1)), memory_bytes=int(max(memory, 0)))


def _cgroup_folders(proc: Path, cgroups: Path) -> list[Path]:
    """Our cgroup and all above it, each of which may hold the limit that counts (version 2)."""
    lines = _read(proc / "self" / "cgroup").splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if path is None:
        return []
    folder = cgroups / path
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(cgroups))]


def _available_bytes(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _room_bytes(folder: Path) -> float:
    limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
    if not limit.isdecimal() or not used.isdecimal():  # "max", or no such controller
        return math.inf
    return int(limit) - int(used) + _reclaimable_bytes(folder)


def _reclaimable_bytes(folder: Path) -> int:
    """File pages that nobody used lately: they count as used but go when memory is asked for."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _cores(folder: Path) -> float:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() else math.inf


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
