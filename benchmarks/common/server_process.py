"""Start, watch and stop a `prelunet serve` process of this checkout, and read its metrics."""

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
_PILLOW = '"logger": "PIL.'  # in log lines that come from Pillow
STOP_TIMEOUT = 60.0  # seconds after SIGTERM, in addition to lame-duck and grace periods


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended. code: negative after a signal; output: stdout after the start line; log: stderr."""

    code: int
    output: str
    log: str

    @property
    def errors(self) -> list[str]:
        """Return the log lines of level ERROR and above, except Pillow's about pictures."""
        return [line for line in self.log.splitlines() if _level(line) in {"ERROR", "CRITICAL"} and _PILLOW not in line]

    @property
    def foreign(self) -> list[str]:
        """Return the lines of libraries: Pillow's, and what C libraries write to stderr."""
        return [line for line in self.log.splitlines() if line.strip() and (_level(line) is None or _PILLOW in line)]


def _level(line: str) -> str | None:
    try:
        return str(json.loads(line)["level"])
    except (ValueError, KeyError, TypeError):
        return None


class ServerProcess:
    """A running server; the constructor returns when it is ready. Use it in a `with` block, which kills the process.

    models: name → file; options: of `prelunet serve`; log: file for stderr; control: control file of
    fault_injection.py, None for the unmodified program. ready_after: seconds until it was ready; promised_mb: the
    memory limit that its start line states.
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
        stated = re.search(r"memory at most (\S+)", line)
        self.promised_mb = (parse_memory(stated[1]) or 0) / 2**20 if stated else 0.0

    def _start_line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], START_TIMEOUT)
        line = stdout.readline().decode() if readable else ""
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
        """Return whether the process is still running."""
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Send SIGTERM and wait for the end."""
        if self.alive:
            self.send(signal.SIGTERM)
        return self.wait(timeout=timeout)

    def wait(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Wait for the process to end; raises TimeoutExpired."""
        output, _ = self.process.communicate(timeout=timeout)
        return ProcessExit(
            self.process.returncode, output.decode(), self._log.read_text(encoding="utf-8", errors="replace")
        )

    def metrics(self) -> "MetricsSnapshot":
        """Read its metrics."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            return MetricsSnapshot(answer.read().decode())

    def rss_mb(self) -> float:
        """Return its resident memory in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def open_files(self) -> int:
        """Return the number of its open file descriptors."""
        return _entries(f"/proc/{self.process.pid}/fd")

    def threads(self) -> int:
        """Return the number of its threads."""
        return _entries(f"/proc/{self.process.pid}/task")


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


class MetricsSnapshot:
    """The metrics at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and these labels; 0 if there are none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"prelunet_{name}" and all(sample.labels.get(key) == labels[key] for key in labels)
        )

    def in_flight(self) -> dict[str, float]:
        """Return the gauges of calls in flight and waiting that are not 0; empty when no call is left."""
        names = ("calls_now", "waiting_images", "waiting_views", "waiting_bytes")
        return {name: value for name in names if (value := self(name))}


def make_model(folder: Path, classes: int = 10) -> Path:
    """Write a model file of the demo net with random weights, using `prelunet init` and `export`."""
    model, checkpoint = folder / "demo.onnx", folder / "demo.safetensors"
    run_verb("init", "--arch", "demo", "--classes", str(classes), "-o", str(checkpoint))
    run_verb("export", str(checkpoint), "-o", str(model))
    return model


def run_verb(*words: str, timeout: float = 300, codes: Sequence[int] = (0,)) -> Any:
    """Run a verb of this checkout; raises RuntimeError unless it exits with one of `codes`."""
    process = subprocess.run(
        [*PRELUNET, *words], capture_output=True, text=True, timeout=timeout, check=False, env=environment()
    )
    if process.returncode not in codes:
        raise RuntimeError(f"prelunet {' '.join(words)} exited with {process.returncode}: {process.stderr[-1000:]}")
    return process
