"""The peak memory of this process."""

import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    Read from the kernel if possible, because `getrusage` starts with the peak of the parent process.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
