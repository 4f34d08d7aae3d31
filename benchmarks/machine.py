"""What a result file says of itself and of the machine that made it."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.machine import cores, cpu_fact

ROOT = Path(__file__).parent.parent
_WIDE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # what arithmetic can profit from


def header(script: str, words: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Return date, command, machine and versions of the packages that can change a number, of those that are there."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in packages if name in installed}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", _from_the_checkout(script), *words]),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def _from_the_checkout(script: str) -> str:
    """Return a benchmark's path as one types it, without the place of the checkout."""
    benchmarks = Path(__file__).resolve().parent
    return (Path(benchmarks.name) / Path(script).resolve().relative_to(benchmarks)).as_posix()


def write_result(output: Path | None, result: Mapping[str, Any], tables: str = "") -> None:
    """Write a result as JSON and, if there are any, its tables beside it in Markdown; nothing without a path."""
    if output is None:
        return
    write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    if tables:
        write_atomically(output.with_suffix(".md"), tables.encode())


def machine() -> dict[str, Any]:
    """Return processor, cores, its wide instructions, memory and platform."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "instructions": [name for name in _WIDE if name in cpu_fact("flags").split()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "platform": platform.machine(),
    }


def cpu() -> str:
    """Return the processor's name as the kernel gives it."""
    return cpu_fact("model name") or platform.processor()


@cache
def digest_of(*paths: str) -> str:
    """Return a digest of files, and of all Python files of folders, of this checkout."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def resident_mb() -> int:
    """Return the memory that this process has now, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024
