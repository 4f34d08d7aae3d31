"""Results of a long benchmark: each case is written as soon as it is measured, and never measured twice.

The file: {"part", "runs": [circumstances of each call], "cases": [{"run", "settings", "seconds", "result"}]}. A case is
identified by its settings and by everything that could change its result: device, tiny or not, package versions, and a
digest of the measured code. A case that failed, or was measured under other circumstances, is measured again.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from prelunet.evaluator.engine.runtimes.base import is_device_lost, is_out_of_memory
from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.machine import cores, cpuinfo_value

IDENTITY = ("device", "tiny", "gpu", "versions", "source")


def read_results(path: Path) -> dict[str, Any]:
    """Return the contents of a result file, or empty results if there is none."""
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


@dataclass
class Results:
    """The result file of the current call.

    circumstances: of this call; limit: seconds after which no further case starts; watch: returns clocks and power,
    which are recorded after each case.
    """

    path: Path
    part: str
    circumstances: dict[str, Any]
    limit: float
    watch: Callable[[], Mapping[str, Any]] = dict
    skipped: list[Mapping[str, Any]] = field(default_factory=list)  # settings of cases for which no time was left
    failed: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.data = read_results(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path.parent, os.W_OK):
            raise SystemExit(f"{self.path.parent}: not writable. Choose another --output")
        if self.data["part"] not in {None, self.part}:
            raise SystemExit(f"{self.path} holds results of part {self.data['part']}. Choose another --output")
        self.data["part"] = self.part
        self._run: int | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds since the part started."""
        return time.monotonic() - self.begun

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a case that was measured under these circumstances, or None."""
        for case in self.data["cases"]:
            if case["settings"] == settings and self._ours(case) and "error" not in case["result"]:
                return dict(case["result"])
        return None

    def measure(
        self, settings: Mapping[str, Any], work: Callable[[], Mapping[str, Any]], seconds: float
    ) -> dict[str, Any] | None:
        """Return the result of a case: from the file, or from `work`, whose result is then written.

        seconds: estimated maximum duration; if less time is left, the case is skipped and the result is None. Running
        out of memory is a result too; any other failure is written as an error.
        """
        settings = json.loads(json.dumps(settings))  # as they are read back
        if (stored := self.find(settings)) is not None:
            print(f"  kept      {_short(settings)}")
            return stored
        if self.elapsed + seconds > self.limit:
            self.skipped.append(settings)
            print(f"  no time   {_short(settings)} (about {seconds:.0f} s)")
            return None
        begun = time.monotonic()
        result = _guarded(work)
        took = time.monotonic() - begun
        self._write(settings, took, result)
        print(f"  {took:7.1f} s {_short(settings)}: {_short(result)}", flush=True)
        if "error" in result:
            self.failed.append(settings)
            if is_device_lost(result["error"]):
                raise SystemExit("the CUDA device is lost after this error: run the same command again to resume")
        return result

    def finish(self, lines: Iterable[str] = ()) -> int:
        """Print `lines`, the failed and the missing cases; return the exit code.

        0: all cases are measured, 1: one failed, 3: the time limit left some out.
        """
        print(f"{self.path}: {len(self.data['cases'])} cases, {self.elapsed:.0f} s", *lines, sep="\n")
        for settings in self.failed:
            print(f"failed: {settings}")
        if self.skipped:
            print(f"no time for {len(self.skipped)} cases: run the same command again to resume")
        return 1 if self.failed else 3 if self.skipped else 0

    def _write(self, settings: Mapping[str, Any], seconds: float, result: Mapping[str, Any]) -> None:
        if self._run is None:
            self._run = len(self.data["runs"])
            self.data["runs"].append(self.circumstances)
        self.circumstances["last"] = dict(self.watch())
        kept = [case for case in self.data["cases"] if not (case["settings"] == settings and self._ours(case))]
        kept.append({"run": self._run, "settings": settings, "seconds": round(seconds, 1), "result": result})
        self.data["cases"] = kept
        write_atomically(self.path, (json.dumps(self.data, indent=1) + "\n").encode())

    def _ours(self, case: Mapping[str, Any]) -> bool:
        run = self.data["runs"][case["run"]]
        return all(run.get(key) == self.circumstances.get(key) for key in IDENTITY)


def _guarded(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Run a case and turn exceptions into results: the runtimes' own exceptions have no common base."""
    try:
        return _plain(work())
    except Exception as error:
        if is_out_of_memory(error):
            return {"out_of_memory": True}
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"error": text[:300] + (f" … {text[-300:]}" if len(text) > 600 else text[300:])}


def _plain(value: Any) -> Any:
    """Return data as JSON stores it; numbers unknown to JSON become the texts `nan` and `inf`."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(values: Mapping[str, Any]) -> str:
    """Format scalar values on one line; lists and objects are only in the file."""
    plain = {key: value for key, value in values.items() if not isinstance(value, list | dict)}
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in plain.items()
    )


# Circumstances in a result file: command, machine and versions.


ROOT = Path(__file__).resolve().parents[2]
_WIDE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # instruction sets


def header(script: str, words: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Return date, command, machine, and versions of those packages that are installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in packages if name in installed}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", module_of(script), *words]),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def module_of(script: str) -> str:
    """Return the module name of a benchmark's file, such as `benchmarks.engine.run`."""
    return ".".join(Path(script).resolve().relative_to(ROOT).with_suffix("").parts)


def environment() -> dict[str, str]:
    """Return an environment in which a process imports this checkout, installed or not."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def write_result(output: Path | None, result: Mapping[str, Any], tables: str = "") -> None:
    """Write a result as JSON, and its tables beside it as Markdown; output: None writes nothing."""
    if output is None:
        return
    write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    if tables:
        write_atomically(output.with_suffix(".md"), tables.encode())


def machine() -> dict[str, Any]:
    """Return CPU, cores, vector instruction sets, memory and platform."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "instructions": [name for name in _WIDE if name in cpuinfo_value("flags").split()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "platform": platform.machine(),
    }


def cpu() -> str:
    """Return the name of the CPU as the kernel reports it."""
    return cpuinfo_value("model name") or platform.processor()


@cache
def digest_of(*paths: str) -> str:
    """Return a digest of files of this checkout; of folders all Python files count."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def resident_mb() -> int:
    """Return the resident memory of this process in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


# Markdown tables


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


def shuffled(names: Iterable[str], number: int) -> list[str]:
    """Return the order of round `number`; it differs by round, so that no one always follows the same other."""
    order = list(names)
    random.Random(number).shuffle(order)
    return order
