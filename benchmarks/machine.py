"""What a result file says of the machine that made it."""

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return processor, cores and platform."""
    return {"cpu": cpu(), "cores": os.cpu_count(), "platform": platform.machine()}


def cpu() -> str:
    """Return the processor's name as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
