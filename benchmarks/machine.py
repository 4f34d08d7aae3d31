"""What a result file says of the machine that made it."""

import os
import platform
from pathlib import Path
from typing import Any

_WIDE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # what arithmetic can profit from


def machine() -> dict[str, Any]:
    """Return processor, cores, its wide instructions, memory and platform."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "instructions": [name for name in _WIDE if name in _cpuinfo("flags").split()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "platform": platform.machine(),
    }


def cpu() -> str:
    """Return the processor's name as the kernel gives it."""
    return _cpuinfo("model name") or platform.processor()


def _cpuinfo(key: str) -> str:
    """Return the first value of a key in the kernel's list of processors, or nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")


def memory_mb(*, peak: bool) -> int:
    """Return the memory of this process in MB, now or at its peak, from the kernel.

    Not `resource.getrusage`: there a new process starts with the peak of the one that started it.
    """
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024
