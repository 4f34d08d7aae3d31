"""How a server comes to its end: what signals and a lost device mean at each stage, and what is waited for."""

import asyncio
import logging
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.server import Server

Event: TypeAlias = signal.Signals | DeviceLost

CLOSING = 10.0  # seconds for threads to end once no call is left; a batch takes less, a device that hangs for ever
TOGETHER = 0.5  # seconds: `timeout` and some init programs send a signal twice, to the process and to its group
LOST_GRACE = 5.0  # seconds for answers to be sent when the device is gone: no other will come

log = logging.getLogger(__name__)


class Events:
    """What should end a server, in the order in which it came. To be made in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._heard = -TOGETHER
        self.lost: DeviceLost | None = None  # the first that came

    def listen(self) -> None:
        """Take SIGTERM and SIGINT of this process from now on; those that come together are one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if self._loop.time() - self._heard >= TOGETHER:
            self._heard = self._loop.time()
            self._queue.put_nowait(number)

    def tell(self, event: Event) -> None:
        """Add one, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        if isinstance(event, DeviceLost):
            self.lost = self.lost or event
            log.critical("a device is lost, so that this process has to end: %s", event)
        self._queue.put_nowait(event)

    @property
    def came(self) -> bool:
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
class Ended:
    """How a server ended.

    unfinished: calls that were cut off; lost: the error of a device that was lost; stuck: a thread of a model did not
    end, so that the process would wait for it for ever.
    """

    unfinished: int = 0
    lost: DeviceLost | None = None
    stuck: bool = False


async def until_ended(server: Server, models: Models, events: Events, *, lame_duck: float, grace: float) -> Ended:
    """Wait for a signal, or for the loss of a device, and stop the server.

    lame_duck: seconds after a signal in which new calls still work while health says NOT_SERVING, so that balancers
    have time to look elsewhere; grace: seconds after that for calls in flight, in the first of which new ones are
    refused before the port closes, so that none is cancelled that gRPC has accepted. A further signal ends either.
    """
    event = await events.next()
    server.tell_stopping()
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
    hurry = asyncio.create_task(_hurry(events))
    await server.refuse(hurry)
    unfinished = await server.stop(max(0.0, end - time.monotonic()), hurry)
    hurry.cancel()
    stuck = not await _closed(models)
    return Ended(unfinished, events.lost, stuck)


async def _hurry(events: Events) -> None:
    """Return when calls in flight are to be cut off: at a signal, or when a lost device's errors have been sent."""
    if isinstance(await events.next(), DeviceLost):
        await events.next(LOST_GRACE)


async def _closed(models: Models) -> bool:
    """Close the models; False when that takes too long, as when a device hangs."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def close() -> None:
        models.close()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    # Not one of asyncio's own threads: its end would be waited for.
    threading.Thread(target=close, name="closing", daemon=True).start()
    try:
        async with asyncio.timeout(CLOSING):
            await done.wait()
    except TimeoutError:
        return False
    return True
