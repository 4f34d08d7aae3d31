"""What all cases share: a named claim, its verdict, and a test bed that provides servers and pictures."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common.server_process import ServerProcess, make_model
from benchmarks.reliability.fault_injection import write_control
from benchmarks.reliability.pictures import Picture, good_pictures

Json = dict[str, Any]
NAME = "demo"  # of the served model
# Conditions that may fail on a busy machine.
TIMING_CONDITIONS = frozenset({"at_once", "latency_kept", "latency_bounded", "first_calls_are_not_slow"})


@dataclass(frozen=True)
class Case:
    """One claim and its test.

    name: unique; claim: a sentence that is true or false; settings: what the numbers depend on; seconds: approximate
    duration; work: runs the test and returns a `verdict`.
    """

    name: str
    claim: str
    settings: Mapping[str, Any]
    seconds: float
    work: Callable[[], Mapping[str, Any]]


def verdict(conditions: Mapping[str, bool], **numbers: Any) -> Json:
    """Return the result of a case: whether all conditions hold, the names of those that do not, and the numbers."""
    broken = [name for name, held in conditions.items() if not held]
    return {"held": not broken, **({"broken": broken} if broken else {}), **numbers}


@dataclass
class ServerTestBed:
    """Model file, pictures and a folder for logs. Use it in a `with` block.

    seed: of everything random; tiny: rehearsal with few repeats; soak_seconds: duration of the soak case; model_file:
    file to serve, None for the demo net with random weights.
    """

    seed: int = 1
    tiny: bool = False
    soak_seconds: float = 60.0
    model_file: Path | None = None
    _numbers: Any = field(default_factory=itertools.count)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="prelunet-reliability-")
        self.folder = Path(self._folder.name)
        self.pictures: list[Picture] = good_pictures(self.seed)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._folder.cleanup()

    @property
    def model(self) -> Path:
        """Return the model file; the first access writes it."""
        if self.model_file is None:
            self.model_file = make_model(self.folder)
        return self.model_file

    def reduced(self, count: int, at_most: int) -> int:
        """Return `count`, limited to `at_most` in a rehearsal."""
        return min(count, at_most) if self.tiny else count

    def serve(self, *options: str, device: str = "cpu") -> ServerProcess:
        """Start a server with the model; by default it logs only warnings and errors and has no lame-duck period."""
        return self._serve(None, options, device)

    def control(self, **faults: Any) -> Path:
        """Write a new control file for fault_injection.py and return its path."""
        path = self.folder / f"control-{next(self._numbers)}.json"
        write_control(path, **faults)
        return path

    def serve_with_faults(self, control: Path, *options: str) -> ServerProcess:
        """Start a server that injects the faults of a control file."""
        return self._serve(control, options, "cpu")

    def _serve(self, control: Path | None, options: tuple[str, ...], device: str) -> ServerProcess:
        defaults = {"--log-level": "warning", "--lame-duck": "0"}
        words = [word for name, value in defaults.items() if name not in options for word in (name, value)]
        log = self.folder / f"server-{next(self._numbers)}.log"
        return ServerProcess({NAME: self.model}, *words, *options, log=log, control=control, device=device)
