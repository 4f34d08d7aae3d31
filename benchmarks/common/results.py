"""What a result file holds: its circumstances (date, commit, command, machine, versions), and tables in Markdown."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.machine import cores, cpuinfo_value

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # that can change a speed

Item = TypeVar("Item")


def circumstances(
    script: str, options: argparse.Namespace, packages: Sequence[str], words: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return date, commit, command, machine, and versions of those packages that are installed.

    script: `__file__` of the benchmark; words: its command line, by default that of the process. Absolute paths among
    the options are replaced by the names of their options.
    """
    words = sys.argv[1:] if words is None else words
    for name, value in vars(options).items():
        if isinstance(value, Path) and value.is_absolute():
            words = [word.replace(str(value), name.upper()) for word in words]
    module = ".".join(Path(script).resolve().relative_to(ROOT).with_suffix("").parts)
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in packages if name in installed}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *words]),
        "machine": {
            "cpu": cpu(),
            "cores": cores(),
            "instructions": [name for name in INSTRUCTIONS if name in cpuinfo_value("flags").split()],
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "platform": platform.machine(),
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` if tracked files differ from it; None without git.

    Results and docs do not count: a benchmark writes them, and they change no number of the next one.
    """
    if (git := shutil.which("git")) is None:
        return None
    head, changed = (
        subprocess.run([git, "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (
            ["rev-parse", "--short=12", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs"],
        )
    )
    return f"{head}{'-dirty' * bool(changed)}" or None


def cpu() -> str:
    """Return the name of the CPU as the kernel reports it."""
    return cpuinfo_value("model name") or platform.processor()


def resident_mb(process: int | str = "self", *, peak: bool = False) -> float:
    """Return the resident memory of a process in MB, now or at its peak; `getrusage` has that of the parent, too."""
    key, lines = "VmHWM:" if peak else "VmRSS:", Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def read_results(path: Path) -> dict[str, Any]:
    """Return the contents of a result file of the runner, or empty results if there is none."""
    if not path.exists():
        return {"part": None, "runs": [], "cases": []}
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        valid = isinstance(data["cases"], list) and isinstance(data["runs"], list) and "part" in data
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a result file ({type(error).__name__}: {error}). Move it away") from error
    if not valid:
        raise SystemExit(f"{path}: not a result file. Move it away")
    return data


def latest(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the newest result of each case of the runner; older ones were measured under other circumstances."""
    return list({json.dumps(case["settings"], sort_keys=True): case for case in data["cases"]}.values())


def write_result(output: Path | None, result: Mapping[str, Any], tables: str = "") -> None:
    """Write a result as JSON, and its tables beside it as Markdown; output: None writes nothing."""
    if output is None:
        return
    write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    if tables:
        write_atomically(output.with_suffix(".md"), tables.encode())


def environment() -> dict[str, str]:
    """Return an environment in which a process imports this checkout, installed or not."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@cache
def digest_of(*paths: str) -> str:
    """Return a digest of files of this checkout; of folders all Python files count."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def significant(value: float, digits: int = 4) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits}g}")


def shuffled(names: Iterable[Item], number: int) -> list[Item]:
    """Return the order of round `number`; it differs by round, so that no one always follows the same other."""
    order = list(names)
    random.Random(number).shuffle(order)
    return order


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; `cell` formats the values."""
    lines = [header, ["---"] * len(header), *(list(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Format a value: three digits, – for None, yes or no, 2x256x341 for a list."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def described_run(run: Mapping[str, Any]) -> str:
    """Return date, machine, versions and command of a run in one sentence, with a warning if it was a rehearsal."""
    machine, rehearsal = run["machine"], "**A rehearsal: the numbers mean nothing.** " if run.get("tiny") else ""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    if machine["instructions"]:
        where += f" ({', '.join(machine['instructions'])})"
    return f"{rehearsal}{run['date']}, {where}; {versions}. Command: `{run['command']}`."
