"""The parent of several processes that serve the same models on the same ports; it answers no call itself.

The kernel gives each new connection to one of the processes (SO_REUSEPORT), and no work moves between them. The parent
holds the ports, so that no other server can take part; it passes signals on, starts another process for one that died,
and has all processes load and unload the same models.
"""

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

from prometheus_client import Metric

from ...engine.load import MAX_LANES_BYTES, choose_cpu_device
from ...errors import EnvironmentFault, ModelRefused, NotReady, PreluNetError, UsageError
from ...machine import cores
from ..http.listener import bind
from ..lifecycle import SHUTDOWN_SIGNALS, ServeResult
from ..memory import PARENT_BYTES
from ..network import explain_bind_error, host_port
from ..options import ServeOptions
from .link import Link
from .siblings import Setup

CORES, MAX_PROCESSES = 4, 8  # for each process by default; processes by default at most
_MEMORY = 2**31  # of `--memory-limit`, for each process by default
_HEALTHY, _SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 1.0, 60.0  # seconds: see `_keep`
_METRICS_SECONDS = 2.0  # for the other processes to send their metrics; those that take longer are left out
_START = "import sys; from prelunet.evaluator.serving.processes.worker import work; work(*map(int, sys.argv[1:]))"

log = logging.getLogger(__name__)


def choose_processes(options: ServeOptions) -> int:
    """Return the number of processes: the given one, or by default as many as help.

    One on a GPU, whose memory each would take, with a Unix socket, which cannot be shared, on systems that do not share
    out connections, and where one process uses all cores: for a large model file, or on another device than `cpu`. Else
    one for every CORES cores (docs/performance.md), as far as the memory limit allows.
    Raises UsageError if the given number cannot share a Unix socket, or the system does not share out connections.
    """
    if options.processes > 1 and sys.platform != "linux":
        raise UsageError(
            f"--processes {options.processes}: only on Linux can processes share a port. Start servers on several ports"
        )
    sockets = options.unix_socket is not None or options.http.unix_socket is not None
    if options.processes > 1 and sockets:
        raise UsageError(f"--processes {options.processes}: a Unix socket belongs to one process. Use ports instead")
    if options.processes:
        return options.processes
    placement = options.placement
    possible = min(cores() // CORES, MAX_PROCESSES, (placement.memory or MAX_PROCESSES * _MEMORY) // _MEMORY)
    gpu = placement.device == "auto" and any(importlib.metadata.distributions(name="onnxruntime-gpu"))
    if possible < 2 or sockets or gpu or placement.device not in {"auto", "cpu"} or sys.platform != "linux":
        return 1
    files = [file.path for file in options.models]
    if options.models_folder is not None:
        files += options.models_folder.glob("*/*/model.onnx")
    with suppress(OSError, PreluNetError):  # loading reports it
        auto = placement.device == "auto"
        devices = {choose_cpu_device(file, placement.precision) if auto else placement.device for file in files}
        if devices == {"cpu"} and all(file.stat().st_size <= MAX_LANES_BYTES for file in files):
            return possible
    return 1


class Parent:
    """Keeps `count` processes running until a signal."""

    def __init__(self, options: ServeOptions, count: int, log_format: str, log_level: str) -> None:
        self._options, self._count, self._log = part_of(options, count), count, (log_format, log_level)
        self._ready: dict[int, Link] = {}  # of the processes that serve
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._links: dict[int, Link] = {}
        self._ended: dict[int, ServeResult | PreluNetError] = {}
        self._changing = asyncio.Lock()
        self._sighup_when_ready = set[int]()  # processes that were starting at a SIGHUP
        self._first_ready, self._stopping = asyncio.Event(), asyncio.Event()
        self._report: Callable[[str], None] = lambda _line: None
        self._shared = file_in_memory(count)  # the notes of `SharedCores`

    async def serve(self, report: Callable[[str], None]) -> ServeResult:
        """Serve until a signal; see `lifecycle.serve`. Raises the error of a process that cannot start."""
        self._report = report
        loop = asyncio.get_running_loop()
        for number in SHUTDOWN_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                loop.add_signal_handler(number, self._pass_on, number)
        with held_ports(self._options) as self._options:
            keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._count + 1)]
            # One ends by itself only if it cannot start; otherwise a signal has ended all.
            await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                self._pass_on(signal.SIGTERM)
            outcomes = await asyncio.gather(*keepers)
        results = []
        for outcome in outcomes:
            if isinstance(outcome, PreluNetError):
                raise outcome
            results.append(outcome)
        lost = next((each.lost for each in results if each.lost is not None), None)
        return ServeResult(sum(each.unfinished for each in results), lost)

    def _pass_on(self, number: signal.Signals) -> None:
        # With a folder of models SIGHUP means to look there again: one that still starts does so when it is ready.
        again = number == signal.SIGHUP and self._options.models_folder is not None
        if not again:
            self._stopping.set()
            self._first_ready.set()
        for name, process in self._processes.items():
            if again and name not in self._ready:
                self._sighup_when_ready.add(name)
            if not again or name in self._ready:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP if again else signal.SIGTERM)

    async def _keep(self, number: int) -> ServeResult | PreluNetError:
        """Keep a process running, and return how the last one ended; at the start an error is the server's.

        After a process that lived for less than _HEALTHY seconds the next one waits, twice as long each time.
        """
        pause, started = _SHORTEST_PAUSE, False
        if number > 1:
            await self._first_ready.wait()
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                code: int | str = await self._run(number)
            except OSError as error:  # too many processes, or too little memory for one
                code = error.strerror or str(error)
            started = started or number in self._ready
            self._ready.pop(number, None)
            ended = self._ended.pop(number, None)
            if self._stopping.is_set():
                return ended or ServeResult()
            if not started:
                return ended or EnvironmentFault(f"process {number} ended with status {code} at its start: see its log")
            pause = _SHORTEST_PAUSE if time.monotonic() - begun > _HEALTHY else min(2 * pause, _LONGEST_PAUSE)
            reason = ended.lost if isinstance(ended, ServeResult) else ended
            log.error(
                "process %d has ended, and another one starts in %g s: %s", number, pause, reason or f"status {code}"
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        return ServeResult()

    async def _run(self, number: int) -> int:
        """Run a process; return its exit status once it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), self._shared.fileno()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _START, *map(str, inherited),
                pass_fds=inherited, stdin=asyncio.subprocess.DEVNULL,
                process_group=0,  # else Ctrl-C would interrupt its imports, with a traceback
            )  # fmt: skip
        self._processes[number] = process
        self._sighup_when_ready.discard(number)
        if self._stopping.is_set():
            process.terminate()
        handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "setup": self._setup,
            "ready": self._on_ready,
            "ended": self._on_ended,
            "change": self._change,
            "metrics": self._metrics,
        }
        link = self._links[number] = Link({name: partial(handler, number) for name, handler in handlers.items()})
        await link.open(ours)
        await link.run()
        code = await process.wait()
        os.pwrite(self._shared.fileno(), b"\0", number - 1)  # it computes no more
        return code

    # What a process asks, with its number

    async def _setup(self, number: int) -> Setup:
        chosen = None
        async with self._changing:
            for link in list(self._ready.values()):
                with suppress(ConnectionError):
                    chosen = await link.call("chosen")
                    break
        return Setup(self._options, *self._log, number, first=not self._ready, chosen=chosen)

    async def _on_ready(self, number: int, start_line: str) -> None:
        self._ready[number] = self._links[number]
        if number in self._sighup_when_ready:
            with suppress(ProcessLookupError):
                self._processes[number].send_signal(signal.SIGHUP)
        self._first_ready.set()
        if len(self._ready) == self._count:
            self._report(start_line)
            self._report = lambda _line: None

    async def _on_ended(self, number: int, ended: ServeResult | PreluNetError) -> None:
        self._ended[number] = ended

    async def _change(self, number: int, change: str, model: str) -> None:
        """Load or unload a model in the process that was asked, which checks it, and then in the others.

        One that fails is replaced, as it would answer otherwise, unless all refuse the file: an older version may be
        served now. Raises NotReady while one starts: it could miss the change.
        """
        async with self._changing:
            if len(self._ready) < self._count:
                raise NotReady("a process of this server is starting, or cannot; try again in a few seconds", 2.0)
            refused = None
            try:
                await self._ready[number].call("change", change, model)
            except ModelRefused as error:
                refused = error
            others = {other: link for other, link in self._ready.items() if other != number}
            calls = [link.call("change", change, model) for link in others.values()]
            outcomes = dict(zip(others, await asyncio.gather(*calls, return_exceptions=True), strict=True))
            outcomes[number] = refused
            changed = any(not isinstance(outcome, Exception) for outcome in outcomes.values())
            for other, outcome in outcomes.items():
                if isinstance(outcome, Exception) and (changed or not isinstance(outcome, ModelRefused)):
                    log.error(
                        "process %d is replaced, because it could not %s model %s: %s", other, change, model, outcome
                    )
                    with suppress(ProcessLookupError):
                        self._processes[other].terminate()
            if refused is not None:
                raise refused

    async def _metrics(self, number: int) -> Mapping[int, list[Metric]]:
        """Return the metrics of the other processes that answer in time."""
        others = {other: link for other, link in self._ready.items() if other != number}
        calls = [asyncio.wait_for(link.call("metrics"), _METRICS_SECONDS) for link in others.values()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return {other: each for other, each in zip(others, found, strict=True) if isinstance(each, list)}


def file_in_memory(size: int) -> IO[bytes]:
    """Return a file of zeros; on disk only where Python was built without `memfd_create`, as some distributions do."""
    in_memory = hasattr(os, "memfd_create")
    created = os.fdopen(os.memfd_create("cores"), "r+b") if in_memory else TemporaryFile()  # noqa: SIM115
    created.truncate(size)
    return created


def part_of(options: ServeOptions, count: int) -> ServeOptions:
    """Return the options of one of so many processes, with its part of the memory and of the decoding processes."""
    placement, queue = replace(options.placement, spinning=False), options.queue
    if placement.memory is not None:
        placement = replace(placement, memory=max(1, (placement.memory - PARENT_BYTES) // count))
    queue = replace(queue, decode_processes=max(2, -(-queue.decode_processes // count)))
    return replace(options, processes=count, placement=placement, queue=queue)


@contextmanager
def held_ports(options: ServeOptions) -> Iterator[ServeOptions]:
    """Hold the ports for the processes; yield the options with their numbers.

    Raises EnvironmentFault for a port that another program uses, also one that would share it.
    """
    held: list[socket.socket] = []

    def hold(port: int, option: str) -> int:
        try:
            alone = bind(options.host, port)
            port = alone[0].getsockname()[1]
            for each in alone:
                each.close()
            shared = bind(options.host, port, shared=True)
            for each in shared:  # with it, another server could bind the port while nobody listens
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held.extend(shared)
        except (OSError, UnicodeError) as error:
            reason = explain_bind_error(options.host, port, option)
            raise EnvironmentFault(f"cannot listen on {host_port(options.host, port)} ({option}): {reason}") from error
        return port

    try:
        http, metrics = options.http, options.metrics_port
        port = hold(options.port, "--port")
        if http.port is not None:
            http = replace(http, port=hold(http.port, "--http-port"))
        if metrics is not None:
            metrics = hold(metrics, "--metrics-port")
        yield replace(options, port=port, http=http, metrics_port=metrics)
    finally:
        for each in held:
            each.close()
