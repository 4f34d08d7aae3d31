"""The life of a server: open the ports, load the models, serve, shut down."""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import grpc
from msgspec import Struct
from prometheus_client import ProcessCollector

from ..engine.session import Session
from ..errors import DeviceLost, EnvironmentFault, UsageError, import_from_extra
from ..imaging.decode import silence_decoders
from ..imaging.decode_memory import limit_decoding
from ..machine import format_bytes, machine_memory
from ..rpc.tls import is_loopback, warn_of_readers
from .access import AccessControl
from .arriving import ArrivingBytes
from .calls import CallsInFlight
from .http.listener import Listener
from .http.metrics import METRICS_CLOSE_TIMEOUT, METRICS_LIMITS, metrics_app
from .memory import fit_limits, serving_memory
from .models import Models, load_model
from .network import raise_open_file_limit
from .observability.logs import CallLog
from .observability.metrics import Metrics
from .options import RESERVED_FILES, ServeOptions, ServerLimits
from .processes.siblings import Siblings
from .repository import Repository
from .server import Server
from .watched_files import Certificates, in_thread, poll_forever, unfinished_threads

ShutdownEvent: TypeAlias = signal.Signals | DeviceLost

# Seconds for threads to end after the last call. A batch takes less; on a device that hangs they never end.
CLOSE_TIMEOUT = 10.0
# All that would end a process at once, without a chance to finish its calls.
SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
SIGNAL_DEBOUNCE = 0.5  # seconds: `timeout` and some init programs signal both the process and its group
LOST_GRACE = 5.0  # seconds to send answers when the device is lost: there will be no others
_TRACING = "prelunet.evaluator.serving.observability.tracing"  # requires an extra

log = logging.getLogger(__name__)


class ShutdownEvents:
    """A queue of the events that shut down a server. Created in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[ShutdownEvent] = asyncio.Queue()
        self._last_signal = -SIGNAL_DEBOUNCE
        self.came = asyncio.Event()  # set by the first event
        self.lost: DeviceLost | None = None  # the first one

    @property
    def begun(self) -> bool:
        return self.came.is_set()

    def install_signal_handlers(self) -> None:
        """Handle SHUTDOWN_SIGNALS from now on; those within SIGNAL_DEBOUNCE count as one."""
        for number in SHUTDOWN_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._loop.time() - self._last_signal >= SIGNAL_DEBOUNCE:
            self._last_signal = self._loop.time()
            self._add(number)

    def post(self, event: ShutdownEvent) -> None:
        """Add an event, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: ShutdownEvent) -> None:
        if isinstance(event, DeviceLost):
            self.lost = self.lost or event
            log.critical("a device is lost, so this process must exit: %s", event)
        self.came.set()
        self._queue.put_nowait(event)

    async def next(self, seconds: float | None = None) -> ShutdownEvent | None:
        """Wait for the next event, at most `seconds`; None after that."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None


class ServeResult(Struct, frozen=True):
    """How a server ended.

    unfinished: number of calls that were cut off; lost: the error of a lost device; stuck: a thread did not end, so a
    normal process exit would wait for it forever.
    """

    unfinished: int = 0
    lost: DeviceLost | None = None
    stuck: bool = False


async def wait_and_shut_down(
    server: Server, models: Models, events: ShutdownEvents, *, lame_duck: float, grace: float
) -> ServeResult:
    """Wait for a signal or a lost device, then shut down the server.

    lame_duck: seconds after a signal during which new calls still work and health reports NOT_SERVING, so that load
    balancers can switch to other servers; grace: seconds after that for calls in flight. At the start of the grace
    period new calls are refused before the port closes, so that no call accepted by gRPC is cancelled. Another signal
    ends either period.
    """
    event = await events.next()
    server.set_not_serving()
    if isinstance(event, signal.Signals):
        log.info(
            "%s: shutting down; health reports NOT_SERVING, new calls are accepted for %g s or until another signal",
            event.name, lame_duck,
        )  # fmt: skip
        await events.next(lame_duck)
    if events.lost is not None:
        grace = min(grace, LOST_GRACE)
    log.info(
        "new calls are refused; %d in flight have %g s to finish; another signal cuts them off", server.calls, grace
    )
    end = time.monotonic() + grace
    cutoff = asyncio.create_task(_wait_for_cutoff(events))
    await server.refuse(cutoff)
    unfinished = await server.stop(max(0.0, end - time.monotonic()), cutoff)
    cutoff.cancel()
    stuck = not await _close_in_time(models)
    return ServeResult(unfinished, events.lost, stuck)


async def _wait_for_cutoff(events: ShutdownEvents) -> None:
    """Return when calls in flight should be cut off: at a signal, or LOST_GRACE after the loss of a device."""
    if isinstance(await events.next(), DeviceLost):
        await events.next(LOST_GRACE)


async def _close_in_time(models: Models) -> bool:
    """Close the models and wait for threads that load or read; False if that takes longer than CLOSE_TIMEOUT.

    A device or a network file system may hang.
    """
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await in_thread(models.close)
            while unfinished_threads():
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True


async def serve(options: ServeOptions, report: Callable[[str], None], siblings: Siblings | None = None) -> ServeResult:
    """Serve until SIGTERM, SIGINT or the loss of a device, then finish the calls in flight.

    report: called once with the start line, when all models are loaded and calls are answered; siblings: the other
    processes of this server, which share its ports.
    Raises EnvironmentFault if the port, the device or enough open files are unavailable, ContractError for a
    `--model` that is none, UsageError if serving needs more memory than the limit, or for files of TLS or tokens that
    cannot be used, and the errors of `Repository.start`.
    """
    _check_exposure(options)
    fitted = fit_limits(options, options.placement.memory)
    limit_decoding(options.placement.memory)
    metrics = Metrics() if siblings is None else siblings.metrics
    events, call_log = ShutdownEvents(), CallLog(sampled=options.log_sampling)
    tracing = import_from_extra(_TRACING).Tracing() if options.tracing else None
    silence_decoders()
    ProcessCollector(registry=metrics.registry)  # memory, CPU time and open files of this process
    certificates = Certificates(options.access, metrics) if options.access.tls_files else None
    access = AccessControl(options.access.token_file, metrics) if options.access.token_file is not None else None
    # Before this, while files may block, a signal ends the process at once, unless it is the first one of a container.
    events.install_signal_handlers()
    calls = CallsInFlight(_cap_connections(fitted.limits, 1 + options.http.enabled), metrics, call_log, tracing, access)
    ports = _Ports(options, calls, certificates, siblings)
    server = None
    tasks = [asyncio.create_task(poll_forever(each.files)) for each in (certificates, access) if each is not None]
    try:
        if siblings is None or siblings.setup.first:
            server = await ports.open()
        models = Models((), options.limits.image, fitted.queue, metrics, events.post)
        repository = None
        if options.models_folder is not None:
            repository = Repository(
                options.models_folder,
                models,
                options,
                lambda: events.begun,
                None if siblings is None else siblings.setup.chosen,
            )
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, repository.retry)
        if not await _load(options, models, repository, events):
            log.info("stopped while loading models")
            return ServeResult(lost=events.lost, stuck=not await _close_in_time(models))
        processes = 1 if siblings is None else options.processes
        memory = _estimate_memory([model.session for model in models.all()], options, processes)
        if siblings is not None and repository is not None:
            siblings.share(repository)
        server = server or await ports.open()
        await server.start(models, repository)
        models.on_change.append(partial(_limit_memory, calls.arriving, models, options))
        _limit_memory(calls.arriving, models, options)
        if repository is not None:
            gc.freeze()  # the collections of `Repository.watch` then skip what was loaded before
            tasks.append(asyncio.create_task(repository.watch()))
        addresses = {"http": server.http_url, "metrics": ports.metrics_address}
        log.info("serving", extra={"fields": {"address": server.address, **addresses, "memory": memory}})
        report(start_line(server.address, addresses, models, memory, processes))
        ended = await wait_and_shut_down(server, models, events, lame_duck=options.lame_duck, grace=options.grace)
        log.info("stopped", extra={"fields": {"unfinished": ended.unfinished, "lost": ended.lost is not None}})
        return ended
    finally:
        for task in tasks:
            task.cancel()
        await ports.stop()
        call_log.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        await ports.close_metrics()


class _Ports:
    """The ports of a server, once they are open.

    metrics_address: host:port, "" without metrics.
    """

    def __init__(
        self, options: ServeOptions, calls: CallsInFlight, certificates: Certificates | None, siblings: Siblings | None
    ) -> None:
        self._options, self._calls, self._certificates, self._siblings = options, calls, certificates, siblings
        self._server: Server | None = None
        self._metrics: Listener | None = None
        self.metrics_address = ""

    async def open(self) -> Server:
        """Bind all ports, and answer on those for gRPC and metrics; see `Server.open`."""
        options, shared = self._options, self._siblings is not None
        self._server = server = Server(
            options.host, options.port, self._calls,
            certificates=self._certificates, http=options.http, unix_socket=options.unix_socket, shared=shared,
        )  # fmt: skip
        if options.metrics_port is not None:
            text = self._calls.metrics.text if self._siblings is None else self._siblings.metrics_text
            self._metrics = Listener(
                metrics_app(text, lambda: server.serving), options.host, options.metrics_port, METRICS_LIMITS,
                option="--metrics-port", shared=shared,
            )  # fmt: skip
            self._metrics.open()
            self.metrics_address = self._metrics.address
            log.info("metrics on http://%s/metrics", self.metrics_address)
        await server.open()
        return server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def close_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.close_within(METRICS_CLOSE_TIMEOUT)


def _check_exposure(options: ServeOptions) -> None:
    """Warn about what others on the network or on this machine could misuse; UsageError for a server without TLS."""
    host, access = options.host, options.access
    for file in (access.tls_key, access.token_file):
        if file is not None and file.exists():
            warn_of_readers(file)
    if is_loopback(host) or (options.unix_socket is not None and options.http.port is None):
        return
    missing = []
    if access.tls_cert is None:
        if not access.insecure:
            raise UsageError(
                f"--host {host}: without TLS, others on the network could read images and tokens. Give --tls-cert and "
                "--tls-key, or --insecure if a proxy or the network itself protects the connections"
            )
        missing.append("TLS, so that traffic can be read on the way")
    if access.token_file is None and access.tls_client_ca is None:
        missing.append("tokens or client certificates, so that anyone who can reach this port can use the server")
    if missing:
        log.warning("listening on %s without %s", host, ", and without ".join(missing))


async def _load(options: ServeOptions, models: Models, repository: Repository | None, events: ShutdownEvents) -> bool:
    """Load the models one by one; return False as soon as a shutdown event comes.

    On a GPU this runs each canvas, before the server reports that it is ready.
    """

    async def load_all() -> None:
        for number, file in enumerate(options.models, 1):
            log.info("loading model %s, %d of %d", file.name, number, len(options.models))
            models.add(file, await in_thread(load_model, file, options.placement, lambda: events.begun))
        if repository is not None:
            await repository.start()

    loading, stopping = asyncio.create_task(load_all()), asyncio.create_task(events.came.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not events.begun:
            await loading  # raises its errors
        return not events.begun
    finally:
        loading.cancel()
        stopping.cancel()


def _cap_connections(limits: ServerLimits, ports: int) -> ServerLimits:
    """Return the limits, with no more connections per port than the open-file limit allows, or calls would hang.

    Raises EnvironmentFault if it allows none.
    """
    requested = limits.max_connections
    available = raise_open_file_limit(ports * requested) // ports
    if available <= 0:
        raise EnvironmentFault(
            f"this process may open only {RESERVED_FILES + available} files, but a server needs {RESERVED_FILES} and "
            "one for each connection: raise the limit (ulimit -n, ulimit -Hn)"
        )
    if available < requested:
        log.warning(
            "the open-file limit allows %d connections, so the server accepts %d instead of %d: raise the limit "
            "(ulimit -Hn) or give --max-connections",
            available, available, requested,
        )  # fmt: skip
    return replace(limits, max_connections=available)


def _limit_memory(arriving: ArrivingBytes, models: Models, options: ServeOptions) -> None:
    """Have unfinished messages refused beyond the memory that is announced; called after each change of the models.

    Decoding is not counted: most of its memory is that of other processes.
    """
    if sessions := models.sessions():
        need = serving_memory(sessions, options, max(1, len(models.all())))
        arriving.max_memory = need.total - need.parts["decoding"]


def _estimate_memory(sessions: list[Session], options: ServeOptions, processes: int) -> int:
    """Log and return the bytes of main memory that serving takes at most; UsageError if over the limit.

    processes: that each take as much.
    """
    if not sessions:  # all are unloaded in the other processes
        return 0
    need = serving_memory(sessions, options)
    log.info("memory: at most %s", need)
    if processes * need.total > (machine_bytes := machine_memory()):
        log.warning(
            "this machine has %s of memory, too little if the queues are full of the largest images: give "
            "--memory-limit or a smaller --queue-bytes",
            format_bytes(machine_bytes),
        )
    return processes * need.total


def start_line(address: str, others: Mapping[str, str], models: Models, memory: int, processes: int = 1) -> str:
    """Return the start line: address, models, provider, precision, versions, memory, and the other addresses if any.

    processes: number of those that serve, which together take the memory.
    """
    served = models.all()
    names = ", ".join(
        f"{model.name} ({model.session.contract.name}, {len(model.session.contract.classes)} classes, "
        f"sha256 {model.session.model_sha256[:12]}, {model.session.circumstances.precision})"
        for model in served
    )
    circumstances = "; ".join(dict.fromkeys(str(model.session.circumstances) for model in served))
    parts = [f"serving on {address}: {names}", f"{circumstances} grpcio {grpc.__version__}"]
    parts += [f"memory at most {format_bytes(memory)}", *[f"{processes} processes"] * (processes > 1)]
    return " | ".join([*parts, *(f"{name} on {other}" for name, other in others.items() if other)])
