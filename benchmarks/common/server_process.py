"""A `prelunet serve` process of this checkout: how it is started, watched, asked for its metrics and ended."""

import json
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.results import environment
from prelunet.evaluator.engine.memory import parse_memory

PRELUNET = (sys.executable, "-c", "from prelunet.evaluator.cli import main; main()")
FAULT_INJECTION = (sys.executable, "-m", "benchmarks.reliability.fault_injection")
START_TIMEOUT = 120.0  # seconds for the start line
_PILLOW = '"logger": "PIL.'  # in its lines of the log
STOP_TIMEOUT = 60.0  # seconds for a process that was told to end, beside its own lame duck and grace


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended. code: negative where a signal ended it; output, log: stdout after the start line, stderr."""

    code: int
    output: str
    log: str

    @property
    def errors(self) -> list[str]:
        """Return the log lines from ERROR on, but for what Pillow says of a picture."""
        return [line for line in self.log.splitlines() if _level(line) in {"ERROR", "CRITICAL"} and _PILLOW not in line]

    @property
    def foreign(self) -> list[str]:
        """Return what libraries say of pictures: lines of Pillow, and what those in C write to stderr by themselves."""
        return [line for line in self.log.splitlines() if line.strip() and (_level(line) is None or _PILLOW in line)]


def _level(line: str) -> str | None:
    try:
        return str(json.loads(line)["level"])
    except (ValueError, KeyError, TypeError):
        return None


class ServerProcess:
    """A server, ready to answer when this is made; use it in a `with` block, which kills what is still there.

    models: name → file; options: of `prelunet serve`; log: the file that its stderr goes to; control: of
    fault_injection.py, None for the program as it is. ready_after: seconds until it was ready; promised_mb: the most
    memory that its start line says it takes.
    """

    def __init__(
        self, models: Mapping[str, Path], *options: str, log: Path, control: Path | None = None, device: str = "cpu"
    ) -> None:
        program = PRELUNET if control is None else (*FAULT_INJECTION, str(control))
        named = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
        fixed = ("--device", device, "--log-format", "json", "--metrics-port", "0")
        ports = () if "--port" in options else ("--port", "0")
        self._log = log
        begun = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*program, "serve", *named, *fixed, *ports, *options],
                stdout=subprocess.PIPE, stderr=stderr, env=environment(),
            )  # fmt: skip
        try:
            line = self._start_line()
        except BaseException:
            self.kill()
            raise
        self.ready_after = time.monotonic() - begun
        self.address, self._metrics = re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", line)
        told = re.search(r"memory at most (\S+)", line)
        self.promised_mb = (parse_memory(told[1]) or 0) / 2**20 if told else 0.0

    def _start_line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        there, _, _ = select.select([stdout], [], [], START_TIMEOUT)
        line = stdout.readline().decode() if there else ""
        if not line.startswith("serving on "):
            self.kill()
            raise RuntimeError(f"the server did not start: {line}{self._log.read_text(encoding='utf-8')[-2000:]}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended."""
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process at once, if it has not ended."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Ask the process to end and wait for it."""
        if self.alive:
            self.send(signal.SIGTERM)
        return self.ended(timeout=timeout)

    def ended(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Wait for the end; TimeoutExpired where it does not come."""
        output, _ = self.process.communicate(timeout=timeout)
        return ProcessExit(
            self.process.returncode, output.decode(), self._log.read_text(encoding="utf-8", errors="replace")
        )

    # What it is at the moment

    def metrics(self) -> "MetricsSnapshot":
        """Return what its metrics say now."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            return MetricsSnapshot(answer.read().decode())

    def rss_mb(self) -> float:
        """Return its resident memory in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def open_files(self) -> int:
        """Return how many file descriptors it has open."""
        return _entries(f"/proc/{self.process.pid}/fd")

    def threads(self) -> int:
        """Return how many threads it has."""
        return _entries(f"/proc/{self.process.pid}/task")


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


class MetricsSnapshot:
    """Metrics at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels; 0 where there is none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"prelunet_{name}" and all(sample.labels.get(key) == labels[key] for key in labels)
        )

    def left(self) -> dict[str, float]:
        """Return the gauges of what is under way that are not 0: empty where nothing is left of any call."""
        names = ("calls_now", "waiting_images", "waiting_views", "waiting_bytes")
        return {name: value for name in names if (value := self(name))}


def make_model(folder: Path, classes: int = 10) -> Path:
    """Write the demo net with random weights as a model file, by the verbs that a user would use."""
    model, checkpoint = folder / "demo.onnx", folder / "demo.safetensors"
    run_verb("init", "--arch", "demo", "--classes", str(classes), "-o", str(checkpoint))
    run_verb("export", str(checkpoint), "-o", str(model))
    return model


def run_verb(*words: str, timeout: float = 300, codes: Sequence[int] = (0,)) -> Any:
    """Run a verb of this checkout; RuntimeError where it does not end with one of these codes."""
    ran = subprocess.run(
        [*PRELUNET, *words], capture_output=True, text=True, timeout=timeout, check=False, env=environment()
    )
    if ran.returncode not in codes:
        raise RuntimeError(f"prelunet {' '.join(words)} ended with {ran.returncode}: {ran.stderr[-1000:]}")
    return ran
