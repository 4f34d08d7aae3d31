"""The memory and the cores that this process can use, including limits of control groups; amounts of memory as text."""

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import UsageError

_ROOT = Path("/")

MAX_MEMORY = 2**60
_UNITS = "MGT"
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<unit>[MGTmgt])(?:iB|(?P<decimal>B))?", re.ASCII)

_INT8_FLAGS = frozenset({"avx_vnni", "avx512_vnni", "amx_int8"})
# The flags of /proc/cpuinfo that oneDNN, which computes for OpenVINO and torch, still makes use of under a value of
# ONEDNN_MAX_CPU_ISA; the values that are not listed allow all.
_USED_BY_ONEDNN = {
    "SSE41": "",
    "AVX": "",
    "AVX2": "",
    "AVX2_VNNI": "avx_vnni",
    "AVX2_VNNI_2": "avx_vnni",
    "AVX512_CORE": "avx512f",
    "AVX512_CORE_VNNI": "avx512f avx512_vnni",
    "AVX512_CORE_BF16": "avx512f avx512_vnni avx512_bf16",
    "AVX512_CORE_FP16": "avx512f avx512_vnni avx512_bf16",
}


def machine_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process can use: the machine's memory, or a lower limit of its control group.

    root: folder that contains /proc and /sys. Reads cgroups v1 and v2 and their parents, whose limits apply too. In a
    container, the group's own folder may be the root of the tree.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, version in _groups("memory", root):
        text = _text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdecimal():  # else `max`: none
            limits.append(int(text))
    return min(limits)


def cores(root: Path = _ROOT) -> int:
    """Return the number of threads of this process that can run at once, at least 1.

    This is the number of cores in its affinity mask, or the CPU quota of its control group, rounded up, if lower:
    under a quota of 1.5 cores two threads do more than one. root: see `machine_memory`.
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
    """Return a value of /proc/cpuinfo for the first processor, e.g. `model name` or `flags`; empty if absent."""
    lines = (line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def has_processor_flags(*flags: str, root: Path = _ROOT) -> bool:
    """Whether oneDNN has at least one of these instruction sets here, named as in the flags of /proc/cpuinfo."""
    present = cpuinfo_value("flags", root)
    used = _USED_BY_ONEDNN.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), present)
    return bool({*flags} & {*present.split()} & {*used.split()})


def supports_bf16(root: Path = _ROOT) -> bool:
    """Whether this CPU has bfloat16 instructions (AVX512_BF16 or AMX), according to the kernel."""
    return has_processor_flags("avx512_bf16", "amx_bf16", root=root)


def supports_int8() -> bool:
    """Whether this CPU adds products of 8-bit numbers in 32 bits (VNNI or AMX).

    Others add two products in 16 bits, where the sum of two large ones overflows.
    """
    return has_processor_flags(*_INT8_FLAGS)


def onnxruntime_supports_int8() -> bool:
    """Whether onnxruntime adds products of 8-bit numbers in 32 bits by default: `supports_int8` asks about oneDNN.

    Only x86 also has instructions that add in 16 bits.
    """
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return not is_x86 or not _INT8_FLAGS.isdisjoint(cpuinfo_value("flags").split())


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders that can hold this process's limits, each with its cgroup version."""
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
    """Return a file's text, empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def parse_memory(text: str | None, option: str = "--memory-limit") -> int | None:
    """Parse an amount of memory to bytes: 900M, 6G or 1.5GiB in powers of 1024, 6GB in powers of 1000; None for None.

    Raises UsageError for anything else, so that 6 or 6Gb is not misread. option: named in the error.
    """
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text)
    value = 0
    if match:
        power = _UNITS.index(match["unit"].upper()) + 2
        value = int(float(match["number"]) * (1000 if match["decimal"] else 1024) ** power)
    if not match or not 1 <= value <= MAX_MEMORY:
        raise UsageError(
            f"{option} {text}: not an amount of memory. Write it with its unit: 900M, 6G or 1.5GiB in powers of "
            "1024, 6GB in powers of 1000"
        )
    return value


def format_bytes(value: int) -> str:
    """Format an amount of memory to three digits, rounded up, in the units that `parse_memory` reads: 1.17G."""
    for power, unit in reversed(list(enumerate(_UNITS, 2))):
        if value >= 1024**power or power == 2:
            amount = value / 1024**power
            digits = 2 if amount <= 9.99 else 1 if amount <= 99.9 else 0
            return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}{unit}"
    raise AssertionError("unreachable: the smallest unit always applies")
