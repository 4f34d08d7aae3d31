"""One image on its way through the server, and the scheduling state of its model."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any, Literal

from ...answer import Timings
from ...arrays import UInt8Array
from ...engine.classify import ViewResult
from ...engine.session import Session
from ...engine.shape_buckets import ShapeBuckets, build_shape_buckets
from ...errors import OutOfMemory
from ...imaging.header import read_header
from ...imaging.views import ViewImage
from ...protocols import EvaluationProtocol
from ...rpc.status import reason_for
from ..decoding import DecodeProcess
from ..observability.call_context import Caller
from ..observability.metrics import ModelMetrics

_RECENT_BATCHES = 8  # used to estimate the time of a model's next batch
# View pixels that take as long to create as decoding and resizing take for one encoded byte, or for one pixel of the
# image in each pass, whichever is more: 17 ns a byte, 4 ns a pixel and pass, 3 ns a view pixel.
_PIXELS_PER_BYTE, _PIXELS_PER_PIXEL = 6, 1.3
_UNKNOWN_PIXELS, _MAX_PIXELS = 2**24, 2**26  # of an image whose header states none; more are not decoded
Decoder = Literal["compute", "thread", "process"]

_numbers = itertools.count()


class BatchTimes:
    """Estimates the time of a model's batches from recent ones. Safe in the compute and staging threads."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=_RECENT_BATCHES)

    def record(self, pixels: int, seconds: float) -> None:
        """Record a batch. pixels: of its canvases."""
        self._batches.append((pixels, seconds))

    def expected(self, pixels: int) -> float:
        """Return a lower estimate of a batch's time in seconds, 0 before the first batch.

        A batch smaller than a measured one takes its share of that time, a larger one at least as long. The median,
        because single batches can be slow for unrelated reasons.
        """
        shares = [seconds * min(1.0, pixels / measured) for measured, seconds in tuple(self._batches)]
        return median(shares) if shares else 0.0

    def forget_oldest(self) -> None:
        """Forget the oldest batch. Otherwise, if all batches were expected to be too slow, none would run again."""
        if self._batches:
            self._batches.popleft()


def shape_buckets_of(session: Session) -> ShapeBuckets | None:
    """Return the shape buckets of a server's batches; None where a new shape costs nothing, as on a CPU.

    With a file for exact canvases an image fills its canvas, whatever its size, so only the crop has a bucket.
    """
    contract = session.contract
    if not session.circumstances.on_gpu:
        return None
    scales = contract.default_scales if contract.canvas != "exact" else ()
    return build_shape_buckets(contract.crop, scales, session.rules.canvas_step, contract.max_side)


@dataclass(eq=False)
class ScheduledModel:
    """A model and its scheduling state on its device.

    decode_views: returns the views of a request's image, in any thread, with the given process if it is not easy to
    decode; decoding: number of requests being decoded; ready_pixels, ready_windows: totals over the canvases of ready
    views; ready_since: arrival of the first of these views; batch_times: on all threads, and in a lane; canvas: of the
    last batch. The lock of `DeviceQueue` protects all fields that change, except the last two. key: in the fair queues;
    versions of a model, whose views must not share a batch, have the same name.
    """

    name: str
    session: Session
    metrics: ModelMetrics
    decode_views: Callable[["Request", DecodeProcess | None], list[ViewImage]]
    decoding: int = 0
    ready_pixels: int = 0
    ready_windows: int = 0
    ready_since: float = 0.0
    batch_times: tuple[BatchTimes, BatchTimes] = field(default_factory=lambda: (BatchTimes(), BatchTimes()))
    canvas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.key = f"{self.name} {next(_numbers)}"
        self.grid = lru_cache(4096)(self.session.contract.window_grid)
        self.shape_buckets = shape_buckets_of(self.session)

    def canvas_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the canvas of a view in a batch of equal shapes."""
        step = self.session.rules.canvas_step
        canvas = -(-height // step) * step, -(-width // step) * step
        return (self.shape_buckets.canvas(*canvas) if self.shape_buckets else None) or canvas

    def max_rows(self, height: int, width: int) -> int:
        """Return the number of such canvases in the largest batch."""
        rows, columns = self.grid(height, width)
        limit = self.session.rules.max_rows(height * width, rows * columns)
        if self.shape_buckets and self.shape_buckets.canvas(height, width):
            return self.shape_buckets.round_down_rows(limit)
        return limit

    def lanes(self, pixels: int, windows: int) -> int:
        """Return in how many lanes such canvases may be computed: 1 unless one in each lane fits the largest batch."""
        lanes = self.session.lanes
        return lanes if self.session.rules.max_rows(pixels, windows) >= lanes else 1

    @property
    def fills_batch(self) -> bool:
        return self.fills(self.ready_pixels, self.ready_windows)

    def fills(self, pixels: int, windows: int, batches: int = 1) -> bool:
        """Return whether this many pixels or windows fill `batches` of the largest batches."""
        rules = self.session.rules
        return pixels >= batches * rules.max_pixels or windows >= batches * rules.max_windows


@lru_cache(1024)
def views_and_pixels(protocol: EvaluationProtocol) -> tuple[int, int]:
    """Return the number of views of a protocol and an estimate of their pixels.

    Before decoding the shape of a whole image is unknown; it is taken as square.
    """
    views = protocol.views
    return len(views), sum((protocol.crop or view.scale) ** 2 for view in views)


@dataclass(eq=False)
class Request:
    """One image to classify, from its arrival to its answer.

    build_result: builds the answer from this request, in any thread; keep_windows: keep the window scores, for heat
    maps; with_picture: make `picture`, to draw them on; answer, error: its outcome, one of them once it is
    delivered; reply: gets the outcome, on its loop; image: encoded, emptied when the request ends; ended: time of that,
    None before; end_reason: answered, failed, expired or cancelled; easy: decoded in a thread of the server, not in
    another process; decode_cost: in view pixels. Times are of time.monotonic().
    """

    model: ScheduledModel
    image: bytes
    protocol: EvaluationProtocol
    caller: Caller
    build_result: Callable[["Request"], Any]
    reply: "asyncio.Future[Any]"
    keep_windows: bool = False
    with_picture: bool = False
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0  # decoding starts
    ready: float = 0.0  # decoded, waiting for the device
    batch_begun: float = 0.0  # its first batch starts
    batches: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each that has ended
    ended: float | None = None
    end_reason: str = ""
    answer: Any = None
    error: BaseException | None = None
    queued_views: set["ReadyView"] = field(default_factory=set)  # ready, in no batch yet
    results: list[ViewResult | None] = field(default_factory=list)
    decoder: Decoder = "process"  # chosen when it is queued
    image_size: tuple[int, int] = (0, 0)  # height and width, once decoded
    picture: UInt8Array | None = None  # at the size of a heat map's panel

    def __post_init__(self) -> None:
        self.path = (self.model.key, self.caller.identity, self.caller.client)  # in the fair queues
        self.views, self.pixels = views_and_pixels(self.protocol)
        header = read_header(self.image)
        self.easy = header.easy
        pixels = _UNKNOWN_PIXELS if header.pixels is None else min(header.pixels, _MAX_PIXELS)
        of_pixels = _PIXELS_PER_PIXEL * header.passes * pixels
        self.decode_cost = self.pixels + max(_PIXELS_PER_BYTE * len(self.image), of_pixels)

    def complete_results(self) -> list[ViewResult]:
        """Return the results of all views, once none is missing."""
        return [result for result in self.results if result is not None]

    @property
    def missing(self) -> int:
        """Return the number of decoded views without a result."""
        return self.results.count(None)

    @property
    def computed(self) -> float:
        """Return when its latest batch ended, 0 before the first."""
        return max((end for _, end in self.batches), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """Return the time in which at least one of its batches ran; lanes run several at once."""
        total = latest = 0.0
        for begin, end in sorted(self.batches):
            total += max(0.0, end - max(begin, latest))
            latest = max(latest, end)
        return total

    @property
    def decoded_bytes(self) -> float:
        """Return the estimated size of its views in bytes; a mirrored view shares the memory of the other."""
        return 3 * self.pixels / (2 if self.protocol.mirror else 1)

    def expired(self, now: float) -> bool:
        return self.caller.deadline is not None and self.caller.deadline <= now

    def ended_before(self, moment: float) -> bool:
        """Return whether it had ended or expired before a moment."""
        return self.expired(moment) or (self.ended is not None and self.ended < moment)

    def timings(self, now: float) -> Timings:
        """Return its timings, if it is answered now."""
        waited = self.begun - self.arrived + self.computed - self.ready - self.compute_seconds
        decode = self.ready - self.begun
        return Timings(max(0.0, waited), decode, self.compute_seconds, now - self.arrived, len(self.batches))

    def stages(self, now: float) -> list[tuple[str, float, float]]:
        """Return name, begin and end of each stage that it has reached; it leaves the last one now.

        It is in the queue twice: before it is decoded, and before it is computed.
        """
        answering = 0.0 if self.missing else self.computed
        names = ("queue", "decode", "queue", "compute", "answer")
        begins = [each for each in (self.arrived, self.begun, self.ready, self.batch_begun, answering) if each]
        return list(zip(names, begins, [*begins[1:], now], strict=False))

    @property
    def failure(self) -> str:
        """Return why it has no answer, such as IMAGE_ERROR or CANCELLED; empty if it has one."""
        if self.error is not None:
            return reason_for(self.error) or "INTERNAL"
        return "" if self.end_reason == "answered" else self.end_reason.upper()


@dataclass(eq=False, slots=True)
class ReadyView:
    """One view that is ready to be computed.

    index: in its request; pixels: of the view; canvas_pixels, windows: of its rounded-up canvas; lanes: in which it may
    be computed; bytes: its share of its image's memory.
    """

    request: Request
    index: int
    view: ViewImage
    pixels: int
    canvas_pixels: int
    windows: int
    lanes: int
    bytes: float


def as_reported(model: ScheduledModel, error: BaseException) -> BaseException:
    """Return an error as reported to callers: a MemoryError becomes OutOfMemory, because it is not a bug."""
    if not isinstance(error, MemoryError):
        return error
    out_of_memory = OutOfMemory(f"too little main memory for an image of model '{model.name}'. Use smaller scales")
    out_of_memory.__cause__ = error
    return out_of_memory


def deliver(requests: Iterable[Request]) -> None:
    """Deliver outcomes to their callers, from any thread; each event loop is woken once for all of its requests."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in requests:
        by_loop.setdefault(request.reply.get_loop(), []).append(request)
    for loop, own_requests in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_reply, own_requests)


def _reply(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.reply.done():  # the caller has left
            continue
        if request.error is not None:
            request.reply.set_exception(request.error)
        else:
            request.reply.set_result(request.answer)
