"""Admission control for one model: limits on unanswered images, and when to retry. Only for the event loop's thread."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from ...errors import Overloaded, UsageError
from ..observability.call_context import Call
from ..observability.metrics import ModelMetrics
from ..options import QueueOptions

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 0.05, 30.0  # seconds, the range of the retry delay
DEFAULT_RETRY_AFTER = 1.0  # seconds, before the first answer
_RESERVE = 4  # clients below their share may use 1/4 of the limit on top of it
_HELD = 2  # images that wait for admission may hold 1/2 of the limit of bytes
_DECAY_VIEWS = 256  # views over which the average decays


class ThroughputEstimate:
    """Average time per answered view, measured while any image is unanswered.

    It covers everything that delays answers: decoding, the device, and other models on the same device.
    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._seconds = 0.0
        self._views = 0.0

    def begin(self) -> None:
        """Start measuring: the first image is admitted."""
        self._since = self._clock()

    def record_departure(self, answered: int) -> None:
        """Count an image that has left. answered: its number of views, 0 if it left without an answer."""
        now = self._clock()
        kept = 1 - answered / _DECAY_VIEWS if answered < _DECAY_VIEWS else 0.0
        self._seconds = kept * self._seconds + now - self._since
        self._views = kept * self._views + answered
        self._since = now

    def seconds(self, views: int) -> float | None:
        """Return the expected time for `views` views, None before the first answer."""
        return views * self._seconds / self._views if self._views else None


class Ticket:
    """Images of one request, from its arrival until `AdmissionController.leave`.

    size, views: totals over its images, size in bytes.
    """

    __slots__ = ("client", "identity", "images", "share", "size", "views")

    def __init__(self, call: Call, size: int, views: int, images: int = 1) -> None:
        self.identity, self.share = call.identity, call.share
        self.client = (self.identity, call.peer)  # a proxy's connection has calls of several identities
        self.size, self.views, self.images = size, views, images


class Usage(Struct):
    """Images, views and bytes admitted and not yet answered, in total, of one client or of one identity.

    clients: of an identity, with admitted images.
    """

    images: int = 0
    views: int = 0
    bytes: int = 0
    clients: int = 0


_NONE = Usage()


def with_reserve(limit: int) -> int:
    return limit + limit // _RESERVE


class AdmissionController:
    """Counts the unanswered images of one model, waiting or being computed, and admits no more than the limits allow.

    When a limit is reached, an identity without an admitted image, or with less than its share (the limit divided by
    the number of identities), is still admitted, up to 1.25 times the limit, and so is a client with less than its part
    of that share. Otherwise the first client to send a thousand images would lock all others out, before fair queueing
    has any effect. Streams wait for admission in order: nobody takes the room that the first of them waits for, except
    by this rule. An identity whose token has a share of the limits gets no more; while it waits for that, others pass.
    Waiting streams hold an image each. Where these are too many bytes, images are refused of the
    identity that holds the most, on its connection with the most.

    used: by all clients together; waiters: requests waiting for admission, in order of arrival, and what each waits on.
    """

    def __init__(self, model: str, queue: QueueOptions, metrics: ModelMetrics) -> None:
        self._model = model
        self._queue = queue
        self._metrics = metrics
        self._throughput = ThroughputEstimate()
        self.used = Usage()
        self._clients: dict[tuple[str, str], Usage] = {}
        self._identities: dict[str, Usage] = {}
        self.waiters: dict[Ticket, asyncio.Future[None]] = {}
        metrics.waiting_images.set_function(lambda: self.used.images)
        metrics.waiting_views.set_function(lambda: self.used.views)
        metrics.waiting_bytes.set_function(lambda: self.used.bytes)

    def admit_or_refuse(self, ticket: Ticket) -> None:
        """Admit images until `leave`.

        Raises Overloaded, with the time after which to retry, when a limit is reached. If no image is unanswered, a
        request of any size is admitted, but for several images beyond the share of a token: UsageError.
        """
        if ticket.images > 1 and ticket.share is not None and self._exceeds(ticket.share, ticket.views, ticket.size):
            raise UsageError(
                f"{ticket.images} images with {ticket.views} views and {ticket.size} bytes are more than this token's "
                f"share, {ticket.share:g} of {self._queue.max_views} and {self._queue.max_bytes}. Send fewer in a call"
            )
        ticket.size = min(ticket.size, self._queue.max_bytes)  # alone it is admitted, but leaves the reserve to others
        first_in_line = not self.waiters or not self._room_awaited()
        if (reason := self._refusal_reason(ticket, first_in_line=first_in_line)) is not None:
            raise self._overloaded(reason)
        self._enter(ticket)

    async def admit_or_wait(self, ticket: Ticket) -> None:
        """Do the same for one image, but wait instead of raising: for streams, which flow control slows down.

        Raises Overloaded if waiting images are too many bytes.
        """
        behind = any(each.client == ticket.client for each in self._waiting())  # an earlier image of its client
        if behind or self._refusal_reason(ticket, first_in_line=not self._room_awaited()) is not None:
            await self._wait(ticket)
        else:
            self._enter(ticket)

    def leave(self, ticket: Ticket, *, answered: bool) -> None:
        """Forget admitted images, which have been answered or not."""
        self._count(-1, ticket)
        if not self._clients[ticket.client].images:
            del self._clients[ticket.client]
            self._identities[ticket.identity].clients -= 1
        if not self._identities[ticket.identity].images:
            del self._identities[ticket.identity]
        self._throughput.record_departure(ticket.views if answered else 0)
        if self.waiters:
            self._admit_waiters()

    async def _wait(self, ticket: Ticket) -> None:
        admission = self.waiters[ticket] = asyncio.get_running_loop().create_future()
        self._refuse_waiters()
        try:
            await admission
        except BaseException:
            if ticket in self.waiters:
                del self.waiters[ticket]
                self._admit_waiters()  # those behind it
            else:  # admitted and cancelled at the same moment
                self.leave(ticket, answered=False)
            raise

    def _admit_waiters(self) -> None:
        """Admit waiting tickets while there is room; those of one client in order of arrival."""
        blocked_clients: set[tuple[str, str]] = set()
        first_in_line = True
        for ticket, admission in list(self.waiters.items()):
            if ticket.client in blocked_clients or admission.done():  # done: cancelled, about to be removed
                continue
            if (reason := self._refusal_reason(ticket, first_in_line=first_in_line)) is None:
                del self.waiters[ticket]
                self._enter(ticket)
                admission.set_result(None)
            else:
                blocked_clients.add(ticket.client)
                first_in_line = first_in_line and reason == "share"  # it waits for its own images, not for room

    def _waiting(self) -> list[Ticket]:
        """Return the tickets that wait, without those that are cancelled or refused and about to be removed."""
        return [ticket for ticket, admission in self.waiters.items() if not admission.done()]

    def _refuse_waiters(self) -> None:
        """Refuse waiting tickets, the latest first, until the others are within the limit; one alone may exceed it."""
        held = self._waiting()
        while len(held) > 1 and sum(each.size for each in held) > self._queue.max_bytes // _HELD:
            of_identity, of_client = Counter[str](), Counter[tuple[str, str]]()
            for each in held:
                of_identity[each.identity] += each.size
                of_client[each.client] += each.size
            *_, place = max((of_identity[each.identity], of_client[each.client], at) for at, each in enumerate(held))
            self.waiters[held.pop(place)].set_exception(self._overloaded("bytes"))

    def _refusal_reason(self, ticket: Ticket, *, first_in_line: bool) -> str | None:
        """Return the limit that the ticket would exceed: `views`, `bytes` or `share`; None if it can be admitted.

        first_in_line: no ticket that came earlier is waiting.
        """
        used, limits = self.used, self._queue
        if not used.images:
            return None
        if self._above_share(ticket):
            return "share"
        wanted = (
            ("views", used.views + ticket.views, limits.max_views),
            ("bytes", used.bytes + ticket.size, limits.max_bytes),
        )
        if first_in_line and all(total <= limit for _, total, limit in wanted):
            return None
        if wanted[0][1] > with_reserve(limits.max_views):  # at once, as thousands may wait
            return "views"
        own, shared = self._clients.get(ticket.client, _NONE), self._identities.get(ticket.identity, _NONE)
        identities = len(self._identities) + (ticket.identity not in self._identities)
        clients = shared.clients + (ticket.client not in self._clients)
        for name, total, limit in wanted:
            requested, share = total - getattr(used, name), limit // identities
            of_identity, of_client = getattr(shared, name) + requested, getattr(own, name) + requested
            below = not shared.images or of_identity <= share or of_client <= share // clients
            if total > (with_reserve(limit) if below else limit) or not (below or first_in_line):
                return name
        return None

    def _room_awaited(self) -> bool:
        """Return whether a ticket waits for room, not for images of its own identity or for one of its client."""
        seen: set[tuple[str, str]] = set()
        for ticket in self._waiting():
            if ticket.client not in seen and not self._above_share(ticket):
                return True
            seen.add(ticket.client)
        return False

    def _above_share(self, ticket: Ticket) -> bool:
        """Return whether a ticket would exceed the share of its identity; one image alone never does."""
        used = self._identities.get(ticket.identity, _NONE)
        if (share := ticket.share) is None or used.images + ticket.images == 1:
            return False
        return self._exceeds(share, used.views + ticket.views, used.bytes + ticket.size)

    def _exceeds(self, share: float, views: int, size: int) -> bool:
        # The share is a decimal fraction: 0.29 of 100 is 29, not a little less.
        return views > round(share * self._queue.max_views, 6) or size > round(share * self._queue.max_bytes, 6)

    def _enter(self, ticket: Ticket) -> None:
        if not self.used.images:
            self._throughput.begin()
        shared = self._identities.setdefault(ticket.identity, Usage())
        shared.clients += ticket.client not in self._clients
        self._clients.setdefault(ticket.client, Usage())
        self._count(1, ticket)

    def _overloaded(self, reason: str) -> Overloaded:
        self._metrics.refused[reason].inc()
        expected = self._throughput.seconds(self.used.views)
        wait = DEFAULT_RETRY_AFTER if expected is None else expected
        # Jitter: otherwise all callers refused now would retry at the same time.
        wait = min(max(wait * random.uniform(0.5, 1.5), MIN_RETRY_AFTER), MAX_RETRY_AFTER)  # noqa: S311 - no secret
        limits = {"views": f"{self._queue.max_views} views", "bytes": f"{self._queue.max_bytes} bytes"}
        return Overloaded(
            f"model '{self._model}' already has {self.used.views} unanswered views ({self.used.bytes} bytes); "
            f"the limit is {limits.get(reason, 'the share of this token')}. Try again in {wait:.2g} s",
            retry_after=wait,
        )

    def _count(self, sign: int, ticket: Ticket) -> None:
        for usage in (self.used, self._clients[ticket.client], self._identities[ticket.identity]):
            usage.images += sign * ticket.images
            usage.views += sign * ticket.views
            usage.bytes += sign * ticket.size
