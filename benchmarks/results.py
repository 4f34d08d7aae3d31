"""Results of a long benchmark: each case is written as soon as it is measured, and is not measured twice.

The file: {"part", "runs": [circumstances of each call], "cases": [{"run", "settings", "seconds", "result"}]}. A case is
known by its settings and by what could change its result: device, tiny or not, versions of all packages, and a digest
of the code that is measured. One that failed, or that was measured under other circumstances, is measured again.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prelunet.evaluator.engine.runtimes.base import is_lost, lacks_memory
from prelunet.evaluator.files import write_atomically

IDENTITY = ("device", "tiny", "gpu", "versions", "source")


def read_results(path: Path) -> dict[str, Any]:
    """Return the contents of a result file; an empty one where there is none."""
    if not path.exists():
        return {"part": None, "runs": [], "cases": []}
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(data["cases"], list) and isinstance(data["runs"], list) and "part" in data
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: no result file ({type(error).__name__}: {error}). Move it away") from error
    if not known:
        raise SystemExit(f"{path}: no result file. Move it away")
    return data


@dataclass
class Results:
    """The file that is being written.

    circumstances: of this call; limit: seconds after which no further case is begun; watch: gives clocks and power,
    which are noted after each case.
    """

    path: Path
    part: str
    circumstances: dict[str, Any]
    limit: float
    watch: Callable[[], Mapping[str, Any]] = dict
    left: list[Mapping[str, Any]] = field(default_factory=list)  # settings for which there was no time
    failed: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.data = read_results(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path.parent, os.W_OK):
            raise SystemExit(f"{self.path.parent}: cannot be written. Choose another --output")
        if self.data["part"] not in {None, self.part}:
            raise SystemExit(f"{self.path} holds results of part {self.data['part']}; give another --output")
        self.data["part"] = self.part
        self._run: int | None = None

    @property
    def spent(self) -> float:
        """Return the seconds since the part began."""
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
        """Return the result of a case: the one in the file, or what `work` finds, which is then written.

        seconds: how long it will take at most, as far as one can tell; where that is not left, it is not begun, and the
        result is None. Memory that does not suffice is a result too; any other failure is written as an error.
        """
        settings = json.loads(json.dumps(settings))  # as they will be read
        if (known := self.find(settings)) is not None:
            print(f"  kept      {_short(settings)}")
            return known
        if self.spent + seconds > self.limit:
            self.left.append(settings)
            print(f"  no time   {_short(settings)} (about {seconds:.0f} s)")
            return None
        begun = time.monotonic()
        result = _guarded(work)
        took = time.monotonic() - begun
        self._write(settings, took, result)
        print(f"  {took:7.1f} s {_short(settings)}: {_short(result)}", flush=True)
        if "error" in result:
            self.failed.append(settings)
            if is_lost(result["error"]):
                raise SystemExit("CUDA gives nothing but errors after this one: call the same part again to go on")
        return result

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
    """Call, and turn what goes wrong into a result: the runtimes' own exceptions have no common base."""
    try:
        return _plain(work())
    except Exception as error:
        if lacks_memory(error):
            return {"out_of_memory": True}
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"error": text[:300] + (f" … {text[-300:]}" if len(text) > 600 else text[300:])}


def _plain(value: Any) -> Any:
    """Return data as it will be read; numbers that JSON does not know as texts, `nan` and `inf`."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(values: Mapping[str, Any]) -> str:
    """Return the plain values on one line; lists and objects are for the file."""
    plain = {key: value for key, value in values.items() if not isinstance(value, list | dict)}
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in plain.items()
    )
