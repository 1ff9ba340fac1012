"""CPU and memory that this process may use, within container limits."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import msgspec

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


INTERPRETER = "interpreter"
"""The kind of the device for developing: GPU kernels in Triton's interpreter, on the CPU."""


class PlanMemory(msgspec.Struct, frozen=True):
    """Bytes of a GPU for a backend of attention that plans steps on the host."""

    steps: int
    """For parts of rows, and for plans of steps that are launched one by one."""
    latent_graph: int
    """Of each captured step of a model with latent attention."""


class HostDevice(msgspec.Struct, frozen=True):
    """Where a model runs; only the worker sets the last five fields."""

    kind: str
    """cpu, cuda or interpreter."""
    cores: int
    memory_bytes: int
    """Free memory, of a GPU its own, before anything was loaded."""
    lacking: str | None = None
    """Why the CPU kernels do not run in this process; None if they do."""
    arithmetic: dict[str, str] = {}
    """What the numerics depend on here, by name: instruction set, version of the kernels."""
    lacking_fp8: str | None = "only kernels of a GPU multiply fp8"
    """Why weights do not stay in fp8 here; None if they do."""
    lacking_int8: str | None = None
    """Why activations are not rounded to int8 here; None if they are where a checkpoint says so."""
    plan_memory: PlanMemory | None = None
    """Of FlashInfer, where its kernels may attend; None: they do not."""


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
    if (available := _number(proc / "meminfo", "MemAvailable")) is not None:
        return available * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _room_bytes(folder: Path) -> float:
    """Unused memory of a cgroup; unlimited ones have the limit `max` or a huge number."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(folder / limit_file), _read(folder / used_file)
        if limit.isdecimal() and used.isdecimal():
            # Inactive file pages count as used but are reclaimed when memory is needed.
            return int(limit) - int(used) + (_number(folder / "memory.stat", cached) or 0)
    return math.inf


def _number(file: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:?\s+(\d+)", _read(file), re.MULTILINE)
    return int(found[1]) if found else None


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
