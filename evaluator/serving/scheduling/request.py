"""One image on its way through the server, from its arrival to its answer."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct, field

from ...answer import ClassMap, Timings
from ...arrays import UInt8Array
from ...engine.classify import Classification, ViewResult, average_image
from ...engine.heatmap import class_maps, draw_heat_maps, png_bytes
from ...errors import OutOfMemory
from ...imaging.decode_memory import decode_semaphore
from ...imaging.header import read_header
from ...imaging.views import ViewImage, cut_views
from ...rpc.status import reason_for
from ..decoding import SMALL_BYTES, DecodeProcess, prepare_image
from ..observability.call_context import Call
from .model import Plan, ServedModel

# View pixels that take as long to create as decoding and resizing take for one encoded byte, or for one pixel of the
# image in each pass, whichever is more: 17 ns a byte, 4 ns a pixel and pass, 3 ns a view pixel.
_PIXELS_PER_BYTE, _PIXELS_PER_PIXEL = 6, 1.3
_UNKNOWN_PIXELS, _MAX_PIXELS = 2**24, 2**26  # of an image whose header states none; more are not decoded
_MAX_KEPT_PARTS = 4096  # kept of a plan: images of mixed sizes have many window grids
Decoder = Literal["thread", "process"]
Part = TypeVar("Part")


class Answered(Struct, eq=False):
    """The answer to one image.

    heatmap: a PNG file, empty unless requested; maps: empty unless requested; written: as `Write` made it, empty
    without one.
    """

    model: ServedModel
    plan: Plan
    classified: Classification
    timings: Timings
    heatmap: bytes = b""
    maps: tuple[ClassMap, ...] = ()
    written: bytes = b""

    def constant_part(self, build: "Callable[[Answered], Part]") -> Part:
        """Return a part of the answer that is equal for all images of the same plan and window grids.

        It is kept. build: makes it; a function of a module, not a lambda, as it is part of the key.
        """
        parts: dict[object, Part] = self.plan.parts
        key = build, self.classified.capped, *(seen.windows for seen in self.classified.views)
        found = parts.get(key)
        if found is None:
            if len(parts) >= _MAX_KEPT_PARTS:
                parts.clear()
            found = parts[key] = build(self)
        return found


# Writes an answer as a front end sends it, in the thread that has computed it.
Write: TypeAlias = Callable[[Answered], bytes]


class Request(Struct, eq=False, weakref=True):
    """One image to classify.

    image: encoded, emptied when the request ends; deadline: of time.monotonic(); reply: gets the answer,
    on its loop; write: of a front end, None if it takes the answer as it is; keep_windows: keep the window scores, for
    heat maps; path: in the fair queues; decoder: a thread of the server if the image is easy, else a process;
    decode_cost: in view pixels; ended: time of its end, None before; end_reason: answered, failed, expired or
    cancelled; answer, error: its outcome, one of them once it is delivered; batches: begin and end of each that has
    ended; queued_views: ready, in no batch yet; image_size: height and width, once decoded; picture: of the image at
    the size of a heat map's panel. Times are of time.monotonic(), 0 until then: decoding starts (begun), views are
    ready, the first batch starts.
    """

    model: ServedModel
    plan: Plan
    image: bytes
    call: Call
    deadline: float
    reply: "asyncio.Future[Answered]"
    write: Write | None = None
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    ready: float = 0.0
    batch_begun: float = 0.0
    batches: list[tuple[float, float]] = []
    ended: float | None = None
    end_reason: str = ""
    answer: Answered | None = None
    error: BaseException | None = None
    queued_views: "set[ReadyView]" = set()
    results: list[ViewResult | None] = []
    image_size: tuple[int, int] = (0, 0)
    picture: UInt8Array | None = None
    keep_windows: bool = False
    path: tuple[str, ...] = ()
    decoder: Decoder = "thread"
    decode_cost: float = 0.0

    def __post_init__(self) -> None:
        model, plan, image, call = self.model, self.plan, self.image, self.call
        self.keep_windows = plan.heatmap or plan.maps
        self.path = (model.key, call.identity, call.peer)
        header = read_header(image)
        self.decoder = "thread" if header.easy else "process"
        pixels = _UNKNOWN_PIXELS if header.pixels is None else min(header.pixels, _MAX_PIXELS)
        of_pixels = _PIXELS_PER_PIXEL * header.passes * pixels
        self.decode_cost = plan.pixels + max(_PIXELS_PER_BYTE * len(image), of_pixels)

    @property
    def decoded_bytes(self) -> float:
        """Return the estimated size of its views in bytes; a mirrored view shares the memory of the other."""
        return 3 * self.plan.pixels / (2 if self.plan.protocol.mirror else 1)

    def decode(self, process: DecodeProcess | None) -> "list[ReadyView]":
        """Decode the image, in this thread or in a process, and return its views."""
        if process is None:
            prepared = prepare_image(self.image, self.plan.prepare)
        else:
            semaphore = decode_semaphore(gpu=self.model.session.circumstances.on_gpu)
            with semaphore.reservation(self.deadline if self.deadline < math.inf else None) as reserve:

                def reserve_if_large(size: int) -> None:
                    if size > SMALL_BYTES:
                        reserve(size)

                prepared = process.prepare(
                    self.image, self.plan.prepare, reserve_if_large, lambda: self.ended is not None
                )
        self.image_size, self.picture = (prepared.height, prepared.width), prepared.picture
        views = cut_views(prepared.resized, self.plan.protocol)
        return [ReadyView(self, index, view) for index, view in enumerate(views)]

    @property
    def missing(self) -> bool:
        """Return whether a decoded view has no result yet."""
        return None in self.results

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

    def ended_before(self, moment: float) -> bool:
        """Return whether it had ended or expired before a moment."""
        return self.deadline <= moment or (self.ended is not None and self.ended < moment)

    def build_answer(self) -> Answered:
        """Average the results of all views, draw or compute heat maps, and write all. Raises ContractError for NaN."""
        results = [result for result in self.results if result is not None]
        plan, contract, size = self.plan, self.model.session.contract, self.image_size
        classified = average_image(plan.protocol, results)
        picture, maps = b"", tuple[ClassMap, ...]()
        if self.picture is not None:
            picture = png_bytes(draw_heat_maps(self.picture, size, classified, contract, plan.protocol))
        if plan.maps:
            maps = class_maps(classified, size, contract, plan.protocol)
        answer = Answered(self.model, plan, classified, self._timings(time.monotonic()), picture, maps)
        if self.write is not None:
            answer.written = self.write(answer)
        return answer

    def _timings(self, now: float) -> Timings:
        """Return its timings, if it is answered now."""
        compute = self.compute_seconds
        waited = self.begun - self.arrived + self.computed - self.ready - compute
        return Timings(max(0.0, waited), self.ready - self.begun, compute, now - self.arrived, len(self.batches))

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


class ReadyView:
    """One view that is ready to be computed.

    index: in its request; pixels: of the view; canvas_pixels, windows: of its rounded-up canvas; lanes: in which it may
    be computed; bytes: its share of its image's memory.
    """

    __slots__ = ("bytes", "canvas_pixels", "index", "lanes", "pixels", "request", "view", "windows")

    def __init__(self, request: Request, index: int, view: ViewImage) -> None:
        height, width = view.image.shape[:2]
        self.request, self.index, self.view, self.pixels = request, index, view, height * width
        self.canvas_pixels, self.windows, self.lanes = request.model.canvas_of(height, width)
        self.bytes = view.image.nbytes / (2 if request.plan.protocol.mirror else 1)


def as_reported(model: ServedModel, error: BaseException) -> BaseException:
    """Return an error as reported to callers: a MemoryError becomes OutOfMemory, because it is not a bug."""
    if not isinstance(error, MemoryError):
        return error
    out_of_memory = OutOfMemory(f"too little main memory for an image of model '{model.name}'. Use smaller scales")
    out_of_memory.__cause__ = error
    return out_of_memory


def deliver(requests: Sequence[Request]) -> None:
    """Deliver outcomes to their callers, all of one event loop, from any thread."""
    if requests:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            requests[0].reply.get_loop().call_soon_threadsafe(_reply, requests)


def _reply(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.reply.done():  # the caller has left
            continue
        if request.error is not None:
            request.reply.set_exception(request.error)
        elif request.answer is not None:
            request.reply.set_result(request.answer)
