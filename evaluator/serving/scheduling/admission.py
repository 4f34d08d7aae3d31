"""The door of one model: how much may wait, and when to come back. On the event loop's own thread only."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.serving.observability.metrics import ModelMetrics
from prelunet.evaluator.serving.options import QueueOptions

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 0.05, 30.0  # seconds after which a caller may be told to come back
DEFAULT_RETRY_AFTER = 1.0  # where nothing was answered yet
_RESERVE = 4  # one part in so many, on top of what may wait, for clients that have little or nothing inside
_DECAY_VIEWS = 256  # views over which the pace is taken, older ones fade


class ThroughputEstimate:
    """How long a view takes from one answer to the next, measured while anything waits.

    So it tells of everything that slows answers down: decoding, the device, and other models that share it.
    clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._seconds = 0.0
        self._views = 0.0

    def begin(self) -> None:
        """Begin to measure: something waits from now on."""
        self._since = self._clock()

    def record_departure(self, answered: int) -> None:
        """Count an image that has left; answered: how many views, 0 where it left without an answer."""
        now = self._clock()
        kept = 1 - answered / _DECAY_VIEWS if answered < _DECAY_VIEWS else 0.0
        self._seconds = kept * self._seconds + now - self._since
        self._views = kept * self._views + answered
        self._since = now

    def seconds(self, views: int) -> float | None:
        """Return how long so many views take, None where nothing was answered yet."""
        return views * self._seconds / self._views if self._views else None


@dataclass(eq=False)
class _Ticket:
    """What wants to be let in. inside: where it waits for that, done once it is counted."""

    client: str
    size: int
    views: int
    images: int = 1
    inside: "asyncio.Future[None] | None" = None


@dataclass
class _Usage:
    """What waits, of all or of one client."""

    images: int = 0
    views: int = 0
    bytes: int = 0

    def count(self, sign: int, ticket: _Ticket) -> None:
        self.images += sign * ticket.images
        self.views += sign * ticket.views
        self.bytes += sign * ticket.size


def with_reserve(limit: int) -> int:
    """Return how much may be inside when so much may wait: more for clients that have little or nothing there."""
    return limit + limit // _RESERVE


class AdmissionController:
    """Counts what waits for one model, and lets no more in than may wait.

    Where as much waits as may, a client that has nothing inside, or less than its share (the bound by the number of
    clients), is let in all the same, until a quarter more than may wait does: else whoever came first with a thousand
    images would keep all others out, before anybody asks whose turn it is. Those who wait outside stand in line:
    nobody takes the room that the first of them waits for, unless by that rule.
    """

    def __init__(self, model: str, queue: QueueOptions, metrics: ModelMetrics) -> None:
        self._model = model
        self._queue = queue
        self._metrics = metrics
        self._throughput = ThroughputEstimate()
        self._all = _Usage()
        self._clients: dict[str, _Usage] = {}
        self._waiters: dict[_Ticket, None] = {}  # in the order in which they came

    @property
    def images(self) -> int:
        """Return how many images are inside."""
        return self._all.images

    @property
    def views(self) -> int:
        """Return how many views are inside."""
        return self._all.views

    @property
    def bytes(self) -> int:
        """Return how many bytes of encoded images are inside."""
        return self._all.bytes

    @contextmanager
    def admit_or_refuse(self, size: int, views: int, client: str = "", images: int = 1) -> Iterator[None]:
        """Count images of `size` bytes and so many views, all together, among those that wait while the block runs.

        Raises Overloaded, which says when to try again, where as much waits already as may; whatever comes is let in
        where nothing waits.
        """
        ticket = _Ticket(client, size, views, images)
        if (reason := self._refusal_reason(ticket, first_in_line=not self._waiters)) is not None:
            raise self._overloaded(reason)
        self._enter(ticket)
        with self._leaving(ticket):
            yield

    @asynccontextmanager
    async def admit_or_wait(self, size: int, views: int, client: str = "") -> AsyncIterator[None]:
        """Do the same for one image, but wait where `admit_or_refuse` refuses: for streams, which flow control holds
        up.
        """
        inside = asyncio.get_running_loop().create_future()
        ticket = _Ticket(client, size, views, inside=inside)
        self._waiters[ticket] = None
        self._admit_waiters()
        try:
            await inside
        except BaseException:
            if ticket in self._waiters:
                del self._waiters[ticket]
                self._admit_waiters()  # who stood behind it
            else:  # let in and cancelled at the same moment
                self._leave(ticket, answered=0)
            raise
        with self._leaving(ticket):
            yield

    def _admit_waiters(self) -> None:
        """Let in who waits outside, as far as there is room; a client's own in the order in which they came."""
        blocked_clients: set[str] = set()
        for ticket in list(self._waiters):
            assert ticket.inside is not None, "who is refused does not wait"
            if ticket.client in blocked_clients or ticket.inside.done():  # cancelled, and about to go away
                continue
            if self._refusal_reason(ticket, first_in_line=not blocked_clients) is None:
                del self._waiters[ticket]
                self._enter(ticket)
                ticket.inside.set_result(None)
            else:
                blocked_clients.add(ticket.client)

    def _refusal_reason(self, ticket: _Ticket, *, first_in_line: bool) -> str | None:
        """Return what there is too much of, `views` or `bytes`; None where there is room.

        first_in_line: nobody waits who came before.
        """
        if not self._all.images:
            return None
        own = self._clients.get(ticket.client, _Usage())
        clients = len(self._clients) + (ticket.client not in self._clients)
        for reason, inside, its, more, limit in (
            ("views", self._all.views, own.views, ticket.views, self._queue.max_views),
            ("bytes", self._all.bytes, own.bytes, ticket.size, self._queue.max_bytes),
        ):
            little = not own.images or its + more <= limit // clients
            if inside + more > (with_reserve(limit) if little else limit if first_in_line else 0):
                return reason
        return None

    def _enter(self, ticket: _Ticket) -> None:
        if not self._all.images:
            self._throughput.begin()
        self._clients.setdefault(ticket.client, _Usage()).count(1, ticket)
        self._count(1, ticket)

    @contextmanager
    def _leaving(self, ticket: _Ticket) -> Iterator[None]:
        answered = 0
        try:
            yield
            answered = ticket.views
        finally:
            self._leave(ticket, answered=answered)

    def _leave(self, ticket: _Ticket, *, answered: int) -> None:
        own = self._clients[ticket.client]
        own.count(-1, ticket)
        if not own.images:
            del self._clients[ticket.client]
        self._count(-1, ticket)
        self._throughput.record_departure(answered)
        self._admit_waiters()

    def _overloaded(self, reason: str) -> Overloaded:
        self._metrics.refused(reason)
        expected = self._throughput.seconds(self._all.views)
        wait = DEFAULT_RETRY_AFTER if expected is None else expected
        limit = self._queue.max_views if reason == "views" else self._queue.max_bytes
        # Spread, or all that are refused now would come back together.
        wait = min(max(wait * random.uniform(0.5, 1.5), MIN_RETRY_AFTER), MAX_RETRY_AFTER)  # noqa: S311 - no secret
        return Overloaded(
            f"{self._all.views} views of {self._all.bytes} bytes wait for model '{self._model}' already, and at most "
            f"{limit} {reason} may. Try again in {wait:.2g} s",
            retry_after=wait,
        )

    def _count(self, sign: int, ticket: _Ticket) -> None:
        self._all.count(sign, ticket)
        self._metrics.waiting_images.inc(sign * ticket.images)
        self._metrics.waiting_views.inc(sign * ticket.views)
        self._metrics.waiting_bytes.inc(sign * ticket.size)
