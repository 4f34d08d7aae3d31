"""Start, watch and stop a server process, ours or another, and read the metrics of ours."""

import json
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.results import environment, resident_mb
from prelunet.evaluator.machine import parse_memory

PRELUNET = (sys.executable, "-c", "from prelunet.evaluator.cli import main; main()")
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
    """A server on loopback. Use it in a `with` block, which kills the process.

    address: HOST:PORT; log: file for stderr, and for stdout unless that is read.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, address: str = "", env: Mapping[str, str], read_stdout: bool = False
    ) -> None:
        self.address, self._log = address, log
        with log.open("wb") as file:
            stdout = subprocess.PIPE if read_stdout else file
            self.process = subprocess.Popen(command, stdout=stdout, stderr=file, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.kill()

    def is_alive(self) -> bool:
        """Return whether the process is still running."""
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """Return what the process has written to its log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self.is_alive():
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Send SIGTERM and wait for the end."""
        if self.is_alive():
            self.process.terminate()
        return self.wait(timeout=timeout)

    def wait(self, *, timeout: float = STOP_TIMEOUT) -> ProcessExit:
        """Wait for the process to end; raises TimeoutExpired."""
        output, _ = self.process.communicate(timeout=timeout)
        return ProcessExit(self.process.returncode, (output or b"").decode(), self.log)

    def rss_mb(self) -> float:
        """Return its resident memory in MB."""
        return resident_mb(self.process.pid)

    def cpu_seconds(self) -> float:
        """Return its CPU time in seconds, including child processes."""
        seconds = 0.0
        for folder in self._tree():
            with suppress(OSError):  # the process may end at any moment
                seconds += time.clock_gettime(~int(folder.name) << 3 | 2)  # its clock_getcpuclockid(3)
        return seconds

    def thread_seconds(self) -> dict[str, float]:
        """Return the CPU time in seconds of its living threads by the first word of their name."""
        seconds: dict[str, float] = defaultdict(float)
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):
                name = "main" if task.name == str(self.process.pid) else (task / "comm").read_text().strip()
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                seconds[name.partition("-")[0]] += nanoseconds / 1e9
        return dict(seconds)

    def tree_mb(self) -> float:
        """Return the memory of the process and its child processes in MB; what they share counts once."""
        size = 0
        for folder in self._tree():
            with suppress(OSError):
                (line,) = re.findall(r"^Pss: +(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                size += int(line)
        return size / 1024

    def _tree(self) -> Iterator[Path]:
        """Iterate over the folders in /proc of the process and its child processes."""
        waiting = [self.process.pid]
        while waiting:
            folder = Path(f"/proc/{waiting.pop()}")
            yield folder
            with suppress(OSError):
                waiting += [int(pid) for task in folder.glob("task/*/children") for pid in task.read_text().split()]

    def children(self) -> list[int]:
        """Return its child processes, of any generation, including those that ended and were not waited for."""
        return [int(folder.name) for folder in self._tree()][1:]

    def open_files(self) -> int:
        """Return the number of its open file descriptors, without that of each child process."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())) + 1 - sum(1 for _ in self._tree())

    def threads(self) -> int:
        """Return the number of its threads."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


class PreluNetServer(ServerProcess):
    """A `prelunet serve` process of this checkout; the constructor returns when it is ready.

    models: name → file; options: of `prelunet serve`; program: what to run instead of `prelunet`. http: address of its
    HTTP port, "" without; ready_after: seconds until it was ready; promised_mb: the memory limit that its start line
    states.
    """

    def __init__(self, models: Mapping[str, Path], *options: str, log: Path, program: Sequence[str] = PRELUNET) -> None:
        named = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
        port = () if "--port" in options else ("--port", "0")
        alone = () if "--processes" in options else ("--processes", "1")
        begun = time.monotonic()
        super().__init__([*program, "serve", *named, *port, *alone, *options], log, env=environment(), read_stdout=True)
        stdout = self.process.stdout
        assert stdout is not None
        try:
            readable, _, _ = select.select([stdout], [], [], START_TIMEOUT)
            line = stdout.readline().decode() if readable else ""
            if not line.startswith("serving on "):
                raise RuntimeError(f"the server did not start: {line}{self.log[-2000:]}")
        except BaseException:
            self.kill()
            raise
        self.ready_after = time.monotonic() - begun
        ports = dict(re.findall(r"(serving|http|metrics) on (?:https?://)?(\d+\.\d+\.\d+\.\d+:\d+)", line))
        self.address, self.http, self._metrics = (ports.get(name, "") for name in ("serving", "http", "metrics"))
        stated = re.search(r"memory at most (\S+)", line)
        self.promised_mb = (parse_memory(stated[1]) or 0) / 2**20 if stated else 0.0

    def metrics(self) -> "MetricsSnapshot":
        """Read its metrics; it must run with --metrics-port."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as answer:
            return MetricsSnapshot(answer.read().decode())


def free_port() -> int:
    """Return an unused port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


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
