"""One server from start to end: take the ports, load the models, answer, stop."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc
from prometheus_client import ProcessCollector

from prelunet.evaluator.engine.memory import format_bytes
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import DeviceLost, EnvironmentFault, Interrupted
from prelunet.evaluator.imaging.decode_memory import decode_semaphore
from prelunet.evaluator.machine import machine_memory
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.memory import max_decode_memory, serving_memory
from prelunet.evaluator.serving.models import Models, load_models
from prelunet.evaluator.serving.network import is_loopback, raise_open_file_limit
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.observability.metrics_http import MetricsServer
from prelunet.evaluator.serving.options import RESERVED_FILES, ModelFile, ServeOptions, ServerLimits
from prelunet.evaluator.serving.server import Server

Event: TypeAlias = signal.Signals | DeviceLost

CLOSE_TIMEOUT = (
    10.0  # seconds for threads to end once no call is left; a batch takes less, a device that hangs for ever
)
SIGNAL_DEBOUNCE = 0.5  # seconds: `timeout` and some init programs send a signal twice, to the process and to its group
LOST_GRACE = 5.0  # seconds for answers to be sent when the device is gone: no other will come


class ShutdownEvents:
    """What should end a server, in the order in which it came. To be made in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._last_signal = -SIGNAL_DEBOUNCE
        self.lost: DeviceLost | None = None  # the first that came

    def install_signal_handlers(self) -> None:
        """Take SIGTERM and SIGINT of this process from now on; those that come together are one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._loop.time() - self._last_signal >= SIGNAL_DEBOUNCE:
            self._last_signal = self._loop.time()
            self._queue.put_nowait(number)

    def post(self, event: Event) -> None:
        """Add one, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        if isinstance(event, DeviceLost):
            self.lost = self.lost or event
            log.critical("a device is lost, so that this process has to end: %s", event)
        self._queue.put_nowait(event)

    @property
    def pending(self) -> bool:
        """Return whether there is one that nobody has taken."""
        return not self._queue.empty()

    async def next(self, seconds: float | None = None) -> Event | None:
        """Wait for the next one; None when the seconds are over."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None


@dataclass(frozen=True)
class ServeResult:
    """How a server ended.

    unfinished: calls that were cut off; lost: the error of a device that was lost; stuck: a thread of a model did not
    end, so that the process would wait for it for ever.
    """

    unfinished: int = 0
    lost: DeviceLost | None = None
    stuck: bool = False


async def wait_and_shut_down(
    server: Server, models: Models, events: ShutdownEvents, *, lame_duck: float, grace: float
) -> ServeResult:
    """Wait for a signal, or for the loss of a device, and stop the server.

    lame_duck: seconds after a signal in which new calls still work while health says NOT_SERVING, so that balancers
    have time to look elsewhere; grace: seconds after that for calls in flight, in the first of which new ones are
    refused before the port closes, so that none is cancelled that gRPC has accepted. A further signal ends either.
    """
    event = await events.next()
    server.set_not_serving()
    if isinstance(event, signal.Signals):
        log.info(
            "%s: stopping; health says NOT_SERVING, calls are taken for %g s more; another signal ends that",
            event.name, lame_duck,
        )  # fmt: skip
        await events.next(lame_duck)
    if events.lost is not None:
        grace = min(grace, LOST_GRACE)
    log.info("new calls are refused; %d in flight have %g s; another signal cuts them off", server.calls, grace)
    end = time.monotonic() + grace
    cutoff = asyncio.create_task(_wait_for_cutoff(events))
    await server.refuse(cutoff)
    unfinished = await server.stop(max(0.0, end - time.monotonic()), cutoff)
    cutoff.cancel()
    stuck = not await _close_in_time(models)
    return ServeResult(unfinished, events.lost, stuck)


async def _wait_for_cutoff(events: ShutdownEvents) -> None:
    """Return when calls in flight are to be cut off: at a signal, or when a lost device's errors have been sent."""
    if isinstance(await events.next(), DeviceLost):
        await events.next(LOST_GRACE)


async def _close_in_time(models: Models) -> bool:
    """Close the models; False when that takes too long, as when a device hangs."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def close() -> None:
        models.close()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    # Not one of asyncio's own threads: its end would be waited for.
    threading.Thread(target=close, name="closing", daemon=True).start()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await done.wait()
    except TimeoutError:
        return False
    return True


log = logging.getLogger(__name__)


async def serve(options: ServeOptions, report: Callable[[str], None]) -> ServeResult:
    """Serve until SIGTERM or SIGINT, or until a device is lost, then finish what is in flight.

    announce: told once, when every model is loaded and calls are answered, what is served where.
    Raises EnvironmentFault when the port, the device or open files cannot be had, ContractError for a file that is no
    model, UsageError when what is asked for takes more memory than it may.
    """
    limits = _cap_connections(options.limits)
    events, metrics = ShutdownEvents(), Metrics()
    events.install_signal_handlers()
    ProcessCollector(registry=metrics.registry)  # memory, processor time and open files of this process
    server, metrics_server = Server(options.host, options.port, limits, metrics), MetricsServer(metrics.text)
    _warn_if_exposed(options)
    try:
        if options.metrics_port is not None:
            await metrics_server.open(options.host, options.metrics_port)
            log.info("metrics on http://%s/metrics", metrics_server.address)
        await server.open()
        loaded = await _load(options, events)
        if loaded is None:
            return ServeResult()
        memory = _estimate_memory([session for _, session in loaded], options)
        models = Models(loaded, options.limits.image, options.queue, metrics, events.post)
        await server.start(models)
        _log_start(server.address, metrics_server.address, models, memory)
        report(_start_line(server.address, metrics_server.address, models, memory))
        ended = await wait_and_shut_down(server, models, events, lame_duck=options.lame_duck, grace=options.grace)
        _log("stopped", {"unfinished": ended.unfinished, "lost": ended.lost is not None})
        return ended
    finally:
        await server.stop(0)
        await metrics_server.close()


async def _load(options: ServeOptions, events: ShutdownEvents) -> list[tuple[ModelFile, Session]] | None:
    """Load the models one by one; None when the server was asked to stop meanwhile.

    On a GPU every canvas of the ladder runs once here, before anybody is told that the server is ready.
    """
    loaded: list[tuple[ModelFile, Session]] = []
    for number, file in enumerate(options.models, 1):
        if events.pending:
            break
        log.info("loading model %s, %d of %d", file.name, number, len(options.models))
        with suppress(Interrupted):  # told below
            loaded += await asyncio.to_thread(load_models, [file], options.placement, lambda: bool(events.pending))
    if events.pending:
        log.info("stopped while models were loaded")
        return None
    return loaded


def _warn_if_exposed(options: ServeOptions) -> None:
    """Say what an engineer would want to know before others find out."""
    if not is_loopback(options.host):
        log.warning(
            "listening on %s without TLS and without asking who calls: whoever reaches this port can use it and read "
            "along. Keep it behind something that asks",
            options.host,
        )


def _cap_connections(limits: ServerLimits) -> ServerLimits:
    """Return limits with no more connections than there are open files for; beyond, good calls would hang.

    Raises EnvironmentFault when there is no room for any.
    """
    wanted = limits.max_connections
    room = raise_open_file_limit(wanted)
    if room <= 0:
        raise EnvironmentFault(
            f"this process may open {RESERVED_FILES + room} files only, and a server takes {RESERVED_FILES} beside one for "
            "each connection: raise the limit (ulimit -n, ulimit -Hn)"
        )
    if room < wanted:
        log.warning(
            "this process may open files for %d connections only, so it takes %d instead of %d: raise the limit "
            "(ulimit -Hn) or give --max-connections",
            room, room, wanted,
        )  # fmt: skip
    return replace(limits, max_connections=room)


def _estimate_memory(sessions: list[Session], options: ServeOptions) -> int:
    """Tell how many bytes of main memory serving takes at most; UsageError when that is more than it may."""
    need = serving_memory(sessions, options)
    log.info("memory: at most %s", need)
    room = decode_semaphore(gpu=any(session.circumstances.on_gpu for session in sessions)).size
    if (largest := max_decode_memory(options.limits.image)) > room:
        log.info(
            "memory: an image that alone takes more than %s to decode is decoded by itself and takes up to %s more; "
            "a smaller --max-image-pixels refuses it",
            format_bytes(room), format_bytes(largest - room),
        )  # fmt: skip
    if need.total > (machine_bytes := machine_memory()):
        log.warning(
            "this machine has %s. If the queues are full of the largest images that is too little: give "
            "--memory-limit, or a smaller --queue-bytes",
            format_bytes(machine_bytes),
        )
    return need.total


def _log(message: str, fields: Mapping[str, object]) -> None:
    """Write a log line whose fields a program can read."""
    log.info(message, extra={"fields": fields})


def _log_start(address: str, metrics: str, models: Models, memory: int) -> None:
    """Log what the start line says: a line for each model, and one for the server."""
    for model in models.all():
        circumstances = model.session.circumstances
        fields = {
            "model": model.name,
            "sha256": model.session.model_sha256,
            "architecture": model.session.contract.name,
            "classes": len(model.session.contract.classes),
            "provider": circumstances.provider,
            "precision": circumstances.precision,
            "versions": ", ".join(f"{name} {version}" for name, version in circumstances.versions.items()),
        }
        _log("ready", fields)
    _log("serving", {"address": address, "metrics": metrics, "memory": memory, "grpcio": grpc.__version__})


def _start_line(address: str, metrics: str, models: Models, memory: int) -> str:
    """Say where, what, on which provider, in which precision and with which versions."""
    served = models.all()
    names = ", ".join(
        f"{model.name} ({model.session.contract.name}, {len(model.session.contract.classes)} classes, "
        f"sha256 {model.session.model_sha256[:12]}, {model.session.circumstances.precision})"
        for model in served
    )
    parts = [f"serving on {address}: {names}", f"{_circumstances(served)} grpcio {grpc.__version__}"]
    parts += [f"memory at most {format_bytes(memory)}"]
    return " | ".join([*parts, f"metrics on {metrics}"] if metrics else parts)


def _circumstances(served: Sequence[Classifier]) -> str:
    """Say what runs the models; where that differs, which ones each runs."""
    of_models: dict[str, list[str]] = {}
    for model in served:
        of_models.setdefault(str(model.session.circumstances), []).append(model.name)
    if len(of_models) == 1:
        return next(iter(of_models))
    return "; ".join(f"{', '.join(names)}: {circumstances}" for circumstances, names in of_models.items())
