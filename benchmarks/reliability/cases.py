"""What all cases share: a named claim, its verdict, and a test bed that provides servers and pictures."""

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.common.server_process import PRELUNET, PreluNetServer
from benchmarks.reliability.fault_injection import write_control
from benchmarks.reliability.traffic.pictures import Picture, good_pictures

Json = dict[str, Any]
NAME = "demo"  # of the served model
FAULT_INJECTION = (sys.executable, "-m", "benchmarks.reliability.fault_injection")
# Conditions that may fail on a busy machine.
TIMING_CONDITIONS = frozenset(
    {"at_once", "latency_kept", "latency_bounded", "first_calls_are_not_slow", "answered_in_time"}
)


def claim(
    name: str,
    sentence: str,
    settings: Mapping[str, Any],
    seconds: float,
    test: Callable[[], Coroutine[Any, Any, Json]],
) -> Case:
    """Return the case of a claim.

    name: unique; sentence: true or false; settings: what the numbers depend on; seconds: approximate duration; test:
    returns a `verdict`.
    """
    return Case({"case": name, **settings}, lambda: {"claim": sentence, **asyncio.run(test())}, seconds)


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
    def easy_pictures(self) -> list[bytes]:
        """Return those that need no decoding process, whose start takes up to a second."""
        return [picture.data for picture in self.pictures if not picture.what.startswith("WEBP")]

    @property
    def model(self) -> Path:
        """Return the model file; the first access writes it."""
        if self.model_file is None:
            self.model_file = Rig("cpu", tiny=True, files=self.folder).model_file("A")
        return self.model_file

    def reduced(self, count: int, at_most: int) -> int:
        """Return `count`, limited to `at_most` in a rehearsal."""
        return min(count, at_most) if self.tiny else count

    def control(self, **faults: Any) -> Path:
        """Write a new control file for fault_injection.py and return its path."""
        path = self.folder / f"control-{next(self._numbers)}.json"
        write_control(path, **faults)
        return path

    def serve(self, *options: str, device: str = "cpu", control: Path | None = None) -> PreluNetServer:
        """Start a server with the model; by default it logs only warnings and errors and has no lame-duck period.

        control: control file of fault_injection.py; None runs the unmodified program.
        """
        program = PRELUNET if control is None else (*FAULT_INJECTION, str(control))
        defaults = {"--log-level": "warning", "--lame-duck": "0"}
        words = [word for name, value in defaults.items() if name not in options for word in (name, value)]
        words += ["--device", device, "--log-format", "json", "--metrics-port", "0", *options]
        log = self.folder / f"server-{next(self._numbers)}.log"
        return PreluNetServer({NAME: self.model}, *words, log=log, program=program)
