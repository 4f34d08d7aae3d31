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

SOONEST, LATEST = 0.05, 30.0  # seconds after which a caller may be told to come back
UNKNOWN = 1.0  # where nothing was answered yet
_RESERVE = 4  # one part in so many, on top of what may wait, for clients that have little or nothing inside
_REMEMBERED = 256  # views over which the pace is taken, older ones fade


class Pace:
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

    def left(self, answered: int) -> None:
        """Count an image that has left; answered: how many views, 0 where it left without an answer."""
        now = self._clock()
        kept = 1 - answered / _REMEMBERED if answered < _REMEMBERED else 0.0
        self._seconds = kept * self._seconds + now - self._since
        self._views = kept * self._views + answered
        self._since = now

    def seconds(self, views: int) -> float | None:
        """Return how long so many views take, None where nothing was answered yet."""
        return views * self._seconds / self._views if self._views else None


@dataclass(eq=False)
class _Visit:
    """What wants to be let in. inside: where it waits for that, done once it is counted."""

    client: str
    size: int
    views: int
    images: int = 1
    inside: "asyncio.Future[None] | None" = None


@dataclass
class _Held:
    """What waits, of all or of one client."""

    images: int = 0
    views: int = 0
    bytes: int = 0

    def count(self, sign: int, visit: _Visit) -> None:
        self.images += sign * visit.images
        self.views += sign * visit.views
        self.bytes += sign * visit.size


def with_reserve(most: int) -> int:
    """Return how much may be inside when so much may wait: more for clients that have little or nothing there."""
    return most + most // _RESERVE


class Door:
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
        self._pace = Pace()
        self._all = _Held()
        self._clients: dict[str, _Held] = {}
        self._outside: dict[_Visit, None] = {}  # in the order in which they came

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
    def admitted(self, size: int, views: int, client: str = "", images: int = 1) -> Iterator[None]:
        """Count images of `size` bytes and so many views, all together, among those that wait while the block runs.

        Raises Overloaded, which says when to try again, where as much waits already as may; whatever comes is let in
        where nothing waits.
        """
        visit = _Visit(client, size, views, images)
        if (reason := self._refused(visit, in_line=not self._outside)) is not None:
            raise self._refusal(reason)
        self._enter(visit)
        with self._leaving(visit):
            yield

    @asynccontextmanager
    async def entered(self, size: int, views: int, client: str = "") -> AsyncIterator[None]:
        """Do the same for one image, but wait where `admitted` refuses: for streams, which flow control holds up."""
        inside = asyncio.get_running_loop().create_future()
        visit = _Visit(client, size, views, inside=inside)
        self._outside[visit] = None
        self._let_in()
        try:
            await inside
        except BaseException:
            if visit in self._outside:
                del self._outside[visit]
                self._let_in()  # who stood behind it
            else:  # let in and cancelled at the same moment
                self._leave(visit, answered=0)
            raise
        with self._leaving(visit):
            yield

    def _let_in(self) -> None:
        """Let in who waits outside, as far as there is room; a client's own in the order in which they came."""
        held_up: set[str] = set()
        for visit in list(self._outside):
            assert visit.inside is not None, "who is refused does not wait"
            if visit.client in held_up or visit.inside.done():  # cancelled, and about to go away
                continue
            if self._refused(visit, in_line=not held_up) is None:
                del self._outside[visit]
                self._enter(visit)
                visit.inside.set_result(None)
            else:
                held_up.add(visit.client)

    def _refused(self, visit: _Visit, *, in_line: bool) -> str | None:
        """Return what there is too much of, `views` or `bytes`; None where there is room.

        in_line: nobody waits who came before.
        """
        if not self._all.images:
            return None
        own = self._clients.get(visit.client, _Held())
        clients = len(self._clients) + (visit.client not in self._clients)
        for reason, inside, its, more, most in (
            ("views", self._all.views, own.views, visit.views, self._queue.max_views),
            ("bytes", self._all.bytes, own.bytes, visit.size, self._queue.max_bytes),
        ):
            little = not own.images or its + more <= most // clients
            if inside + more > (with_reserve(most) if little else most if in_line else 0):
                return reason
        return None

    def _enter(self, visit: _Visit) -> None:
        if not self._all.images:
            self._pace.begin()
        self._clients.setdefault(visit.client, _Held()).count(1, visit)
        self._count(1, visit)

    @contextmanager
    def _leaving(self, visit: _Visit) -> Iterator[None]:
        answered = 0
        try:
            yield
            answered = visit.views
        finally:
            self._leave(visit, answered=answered)

    def _leave(self, visit: _Visit, *, answered: int) -> None:
        own = self._clients[visit.client]
        own.count(-1, visit)
        if not own.images:
            del self._clients[visit.client]
        self._count(-1, visit)
        self._pace.left(answered)
        self._let_in()

    def _refusal(self, reason: str) -> Overloaded:
        self._metrics.refused(reason)
        expected = self._pace.seconds(self._all.views)
        wait = UNKNOWN if expected is None else expected
        most = self._queue.max_views if reason == "views" else self._queue.max_bytes
        # Spread, or all that are refused now would come back together.
        wait = min(max(wait * random.uniform(0.5, 1.5), SOONEST), LATEST)  # noqa: S311 - no secret
        return Overloaded(
            f"{self._all.views} views of {self._all.bytes} bytes wait for model '{self._model}' already, and at most "
            f"{most} {reason} may. Try again in {wait:.2g} s",
            retry_after=wait,
        )

    def _count(self, sign: int, visit: _Visit) -> None:
        self._all.count(sign, visit)
        self._metrics.waiting_images.inc(sign * visit.images)
        self._metrics.waiting_views.inc(sign * visit.views)
        self._metrics.waiting_bytes.inc(sign * visit.size)
