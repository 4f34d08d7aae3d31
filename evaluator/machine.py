"""What this process may have of its machine: memory and cores, less where a control group limits it."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def machine_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process can have: the machine's, or the limit of its control group when lower.

    root: where /proc and /sys are found. Groups of version 1 and 2 are read, and those above them, whose limits hold
    too; as seen in a container, the group's own folder may be the root of the tree.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, version in _groups("memory", root):
        text = _text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdecimal():  # else `max`: none
            limits.append(int(text))
    return min(limits)


def cores(root: Path = _ROOT) -> int:
    """Return how many threads of this process can run at once, at least 1.

    The cores that it is allowed on, or the share of time that its control group gives, rounded up, when lower: under a
    quota of 1.5 cores two threads do more than one. root: see `machine_memory`.
    """
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder, version in _groups("cpu", root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # else `max`, or -1: none
            limits.append(math.ceil(int(quota) / int(period)))
    return max(1, min(limits))


def cpuinfo_value(key: str, root: Path = _ROOT) -> str:
    """Return what the kernel says of the first processor under a key, as `model name` or `flags`; or nothing."""
    lines = (line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def supports_bf16(root: Path = _ROOT) -> bool:
    """Say whether this CPU's instructions know bfloat16 (AVX512_BF16 or AMX), as far as the kernel tells."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpuinfo_value("flags", root).split())


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders that can hold this process's limits, each with the version of control groups that it is of."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            yield base.joinpath(*parts[:depth]), version


def _text(file: Path) -> str:
    """Return what a file says, nothing where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
