"""The runner of all benchmarks: their command line, and cases whose results are written one by one.

A result file of the runner: {"part", "runs": [circumstances of each call], "cases": [{"run", "settings", "seconds",
"result"}]}. No case is measured twice: it is identified by its settings and by everything that could change its result
(`IDENTITY`). A case that failed, or was measured under other circumstances, is measured again.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.results import read_results, write_result
from prelunet.evaluator.engine.runtimes.base import is_device_lost, is_out_of_memory

_REPEATED = {"error", "not_available"}  # keys of results that are measured again
# Keys of the circumstances; source: digest of the code.
IDENTITY = ("device", "tiny", "gpu", "versions", "source", "threads", "pictures", "seed")


def command_line(
    description: str | None, *, output: Path | None = None, limit: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser with --output, and with --limit and --tiny if the benchmark has a time limit in seconds."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=output,
                        help="JSON file to write; tables, if any, are written beside it as .md")  # fmt: skip
    if limit is not None:
        parser.add_argument(
            "--limit",
            type=float,
            default=limit,
            help="seconds after which no new case starts; 0 only writes the tables",
        )
        parser.add_argument("--tiny", action="store_true", help="rehearsal with small nets and few repeats")
    return parser


@dataclass(frozen=True)
class Case:
    """One measurement. settings: what identifies it in the file; seconds: estimated maximum duration."""

    settings: Mapping[str, Any]
    work: Callable[[], Mapping[str, Any]]
    seconds: float = 30


@dataclass
class Runner:
    """Measures the cases of one call that its result file does not hold yet.

    circumstances: `results.circumstances` of this call; limit: seconds after which no further case starts; watch:
    returns clocks and power, which are recorded after each case.
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

    def run(self, cases: Iterable[Case]) -> None:
        """Measure all cases."""
        for case in cases:
            self.measure(case)

    def measure(self, case: Case) -> dict[str, Any] | None:
        """Return the result of a case: from the file, or measured now and written; None if no time is left for it.

        Running out of memory is a result too; any other failure is written as an error.
        """
        settings = json.loads(json.dumps(case.settings))  # as they are read back
        for stored in self.data["cases"]:
            if stored["settings"] == settings and self._ours(stored) and not stored["result"].keys() & _REPEATED:
                print(f"  kept      {_short(settings)}")
                return dict(stored["result"])
        if time.monotonic() - self.begun + case.seconds > self.limit:
            self.skipped.append(settings)
            print(f"  no time   {_short(settings)} (about {case.seconds:.0f} s)")
            return None
        begun = time.monotonic()
        result = _guarded(case.work)
        took = time.monotonic() - begun
        self._write(settings, took, result)
        print(f"  {took:7.1f} s {_short(settings)}: {_short(result)}", flush=True)
        if "error" in result:
            self.failed.append(settings)
            if is_device_lost(result["error"]):
                raise SystemExit("the CUDA device is lost after this error: run the same command again to resume")
        return result

    def finish(self, tables: str = "", lines: Iterable[str] = ()) -> int:
        """Write the tables, print them, `lines`, and the failed and the missing cases; return the exit code.

        0: all cases are measured, 1: one failed, 3: the time limit left some out.
        """
        if tables:
            write_result(self.path, self.data, tables)
            print(tables)
        seconds = time.monotonic() - self.begun
        print(f"{self.path}: {len(self.data['cases'])} cases, {seconds:.0f} s", *lines, sep="\n")
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
        write_result(self.path, self.data)

    def _ours(self, case: Mapping[str, Any]) -> bool:
        run = self.data["runs"][case["run"]]
        return all(run.get(key) == self.circumstances.get(key) for key in IDENTITY)


def _guarded(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Run a case and turn exceptions into results: the runtimes' own exceptions have no common base."""
    try:
        return {key: _plain(value) for key, value in work().items()}
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
