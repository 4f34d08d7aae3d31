"""One image on its way through the server, and what is known of the model that it is for."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

from prelunet.evaluator.answer import Timings
from prelunet.evaluator.engine.classify import ViewResult
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import OutOfMemory
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.serving.observability.call_context import Caller
from prelunet.evaluator.serving.observability.metrics import ModelMetrics
from prelunet.evaluator.serving.scheduling.warm_up import shape_buckets_of

_RECENT_BATCHES = 8  # by which a model's speed is told
# Pixels of a view that take as long to make as one byte of an image to decode and resize: 17 ns, a pixel 3 ns. A JPEG
# of 12 Mpixel takes thirty times as long as one of 500x375, however few views are asked of both.
_PIXELS_PER_BYTE = 6


class BatchTimes:
    """How long a model's batches take, told from the last ones. Safe in the threads that compute and stage."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=_RECENT_BATCHES)

    def measured(self, pixels: int, seconds: float) -> None:
        """Count a batch. pixels: of its canvases."""
        self._batches.append((pixels, seconds))

    def expected(self, pixels: int) -> float:
        """Return the seconds that a batch takes at least, 0 where nothing is known.

        A smaller batch than a measured one takes its share, a larger one no less; the median, because single ones are
        slow for reasons of their own.
        """
        shares = [seconds * min(1.0, pixels / measured) for measured, seconds in tuple(self._batches)]
        return median(shares) if shares else 0.0

    def forget_oldest(self) -> None:
        """Forget the oldest batch: where no batch runs because all are expected to be slow, one has to try again."""
        if self._batches:
            self._batches.popleft()


@dataclass(eq=False)
class ScheduledModel:
    """A model on its device.

    prepare: gives the views of an encoded image, until a deadline, in any thread; unanswered: requests; decoding: of
    them those that a thread decodes now; ready_pixels, ready_windows: of the canvases of views that could be computed;
    ready_since: when the first of them came; closed: nothing more is let in. What changes does so under the lock of
    `DeviceQueue`, apart from speed and from canvas, the last batch's, which belongs to the compute thread.
    """

    name: str
    session: Session
    metrics: ModelMetrics
    decode_views: Callable[[bytes, EvaluationProtocol, float | None], list[ViewImage]]
    unanswered: int = 0
    decoding: int = 0
    ready_pixels: int = 0
    ready_windows: int = 0
    ready_since: float = 0.0
    closed: bool = False
    batch_times: BatchTimes = field(default_factory=BatchTimes)
    canvas: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.grid = lru_cache(4096)(self.session.contract.window_grid)
        self.shape_buckets = shape_buckets_of(self.session)

    def canvas_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the canvas of a view that shares it with none of another shape."""
        step = self.session.rules.canvas_step
        canvas = -(-height // step) * step, -(-width // step) * step
        return (self.shape_buckets.canvas(*canvas) if self.shape_buckets else None) or canvas

    def rows(self, height: int, width: int) -> int:
        """Return how many such canvases the largest batch has."""
        rows, columns = self.grid(height, width)
        most = self.session.rules.max_rows(height * width, rows * columns)
        return (
            self.shape_buckets.round_down_rows(most)
            if self.shape_buckets and self.shape_buckets.canvas(height, width)
            else most
        )

    def fills(self, pixels: int, windows: int, batches: int = 1) -> bool:
        """Say whether so much fills so many of the largest batches."""
        rules = self.session.rules
        return pixels >= batches * rules.max_pixels or windows >= batches * rules.max_windows


@lru_cache(1024)
def views_and_pixels(protocol: EvaluationProtocol) -> tuple[int, int]:
    """Return how many views a protocol has, and their pixels, as far as they can be told before decoding.

    Where the whole image is shown its shape is not known: a square then.
    """
    views = protocol.views
    return len(views), sum((protocol.crop or view.scale) ** 2 for view in views)


@dataclass(eq=False)
class Request:
    """An image and who waits for its answer.

    tell: makes the answer of the results, in any thread; reply: gets it, or the error, on its loop;
    image: emptied when the request is over; over: when it was answered or its caller left, and why: answered, failed,
    expired, cancelled; decoding: what that costs, in pixels of views. Times are those of time.monotonic().
    """

    model: ScheduledModel
    image: bytes
    protocol: EvaluationProtocol
    caller: Caller
    build_result: Callable[[Sequence[ViewResult]], Any]
    reply: "asyncio.Future[Any]"
    keep_windows: bool = False
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0  # to be decoded
    ready: float = 0.0  # for the device
    computed: float = 0.0  # the last of its batches, until now
    compute_seconds: float = 0.0
    batches: int = 0
    ended: float | None = None
    end_reason: str = ""
    queued_views: set["ReadyView"] = field(default_factory=set)  # views that are ready and in no batch
    results: list[ViewResult | None] = field(default_factory=list)
    missing: int = 0  # results

    def __post_init__(self) -> None:
        self.views, self.pixels = views_and_pixels(self.protocol)
        self.decoding = self.pixels + _PIXELS_PER_BYTE * len(self.image)

    @property
    def decoded_bytes(self) -> float:
        """Return about how many bytes its views will take; a mirrored one lies in the memory of its plain one."""
        return 3 * self.pixels / (2 if self.protocol.mirror else 1)

    def expired(self, now: float) -> bool:
        """Say whether its time is over."""
        return self.caller.deadline is not None and self.caller.deadline <= now

    def ended_before(self, moment: float) -> bool:
        """Say whether nobody waited for it any more at a moment."""
        return self.expired(moment) or (self.ended is not None and self.ended < moment)

    def timings(self, now: float) -> Timings:
        """Return where the time went until now, when it is answered."""
        waited = self.begun - self.arrived + self.computed - self.ready - self.compute_seconds
        decode = self.ready - self.begun
        return Timings(max(0.0, waited), decode, self.compute_seconds, now - self.arrived, self.batches)


@dataclass(eq=False, slots=True)
class ReadyView:
    """One view that could be computed, and its place in its request.

    pixels: its own; canvas_pixels, windows: of a canvas that is rounded up for it; bytes: its share of what its image
    takes.
    """

    request: Request
    index: int
    view: ViewImage
    pixels: int
    canvas_pixels: int
    windows: int
    bytes: float


@dataclass(frozen=True)
class Outcome:
    """What a request gets: an answer, or an error."""

    request: Request
    answer: Any = None
    error: BaseException | None = None


def as_reported(model: ScheduledModel, error: BaseException) -> BaseException:
    """Return an error as callers should hear of it: that memory lacks is no mistake of ours."""
    if not isinstance(error, MemoryError):
        return error
    out_of_memory = OutOfMemory(f"too little main memory for an image of model '{model.name}'. Take smaller scales")
    out_of_memory.__cause__ = error
    return out_of_memory


def deliver(outcomes: Iterable[Outcome]) -> None:
    """Hand outcomes to who waits, in any thread: each event loop is woken once for all that are its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.request.reply.get_loop(), []).append(outcome)
    for loop, own_outcomes in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_reply, own_outcomes)


def _reply(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.request.reply.done():  # the caller has left
            continue
        if outcome.error is not None:
            outcome.request.reply.set_exception(outcome.error)
        else:
            outcome.request.reply.set_result(outcome.answer)
