"""A served version of a model: what it takes to answer a request, and its scheduling state on its device."""

import itertools
import math
from collections import OrderedDict, deque
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median
from typing import Any

from msgspec import Struct, structs

from ...answer import resolve_top_k
from ...contract import ModelContract
from ...engine.batching import Batch
from ...engine.session import Session
from ...engine.shape_buckets import ShapeBuckets, build_shape_buckets
from ...imaging.limits import DecodeLimits
from ...protocols import (
    EvaluationProtocol,
    ProtocolOverrides,
    build_protocol,
    default_protocol_name,
    supported_protocols,
)
from ..decoding import PrepareOptions
from ..observability.metrics import ModelMetrics
from ..options import ModelFile
from .admission import AdmissionController

_RECENT_BATCHES = 8  # used to estimate the time of a model's next batch
_MAX_PLANS = 1000  # kept of a model
_MAX_SHAPES = 4096  # of views, kept of a model
# Changes of shape for each to a shape that is not prepared, assumed when batches are planned. Simulated for net A with
# 16 prepared shapes: four gives 1.3 times the calls of one.
_CHANGES_PER_NEW_SHAPE = 4

_numbers = itertools.count()


class RequestOptions(Struct, frozen=True):
    """How a client wants an image classified; the defaults are the model's.

    protocol: name; scales: shorter sides in pixels that replace the protocol's; top: number of best classes; heatmap,
    maps: return heat maps of the five best classes, as a picture, as numbers.
    """

    protocol: str = ""
    scales: tuple[int, ...] | None = None
    mirror: bool | None = None
    apply_exif: bool = False
    top: int | None = None
    heatmap: bool = False
    maps: bool = False


class Plan(Struct, frozen=True, eq=False):
    """What all requests that ask the same of a model have in common.

    top: number of best classes; heatmap, maps: as in `RequestOptions`; prepare: how to decode an image; views: of an
    image; pixels, multiply_adds: an estimate of theirs, infinity if unknown; parts: of answers, kept by
    `Answered.constant_part`.
    """

    protocol: EvaluationProtocol
    top: int
    heatmap: bool
    maps: bool
    prepare: PrepareOptions
    views: int
    pixels: int
    multiply_adds: float
    parts: dict[Any, Any] = {}


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


class ServedModel:
    """A version of a model on its device.

    file: last component of its path; waiting: the `Waiting` of its device, which knows this module; admission: of all
    versions of a model; key: of its flow in the fair queues, since versions, whose views must not share a batch, have
    the same name; decoding: number of requests being decoded; ready_pixels, ready_windows: totals over the canvases of
    ready views; ready_since: arrival of the first of these views; plan: returns that of a request; canvas_of: returns
    pixels, windows and lanes of a view's canvas; planning_rules: of batches, with the expected cost of a change of
    shape; batch_times: on all threads, and in a lane; canvas: of the last batch. The lock of `Waiting` protects all
    fields that change, except the last two; what `in_prepared_shape` changes belongs to the thread that forms batches.

    Nothing closes it. Calls keep the version that they began with, so session and memory of a version that is no longer
    served are freed when its last call ends. Therefore it must not be part of a reference cycle.
    """

    def __init__(
        self,
        file: ModelFile,
        session: Session,
        waiting: Any,
        admission: AdmissionController,
        metrics: ModelMetrics,
        *,
        limits: DecodeLimits = DecodeLimits(),
        max_view_pixels: int | None = None,
    ) -> None:
        self.name, self.version, self.file = file.name, file.version, file.path.name
        self.session, self.waiting, self.admission, self.metrics = session, waiting, admission, metrics
        self.key = f"{self.name} {next(_numbers)}"
        self.decoding = self.ready_pixels = self.ready_windows = 0
        self.ready_since = 0.0
        self.batch_times = BatchTimes(), BatchTimes()
        self.canvas: tuple[int, ...] | None = None
        self.shape_buckets = shape_buckets_of(session)
        self.planning_rules = session.rules
        if session.prepared_shapes > 1:
            expected = session.rules.switch_pixels // _CHANGES_PER_NEW_SHAPE
            self.planning_rules = replace(session.rules, switch_pixels=expected)
        self._prepared = OrderedDict[tuple[int, int, int], None]()  # the shape of the last batch comes last
        self._in_vain = 0
        max_view_pixels = max_view_pixels or largest_own_view(session.contract)
        # Not methods: their caches would refer to this object, and it to them.
        self.plan = lru_cache(_MAX_PLANS)(partial(_plan, session.contract, limits, max_view_pixels))
        self.canvas_of = lru_cache(_MAX_SHAPES)(partial(_canvas_of, session, self.shape_buckets))

    def max_rows(self, height: int, width: int) -> int:
        """Return the number of such canvases in the largest batch."""
        rows, columns = self.session.contract.window_grid(height, width)
        limit = self.session.rules.max_rows(height * width, rows * columns)
        if self.shape_buckets and self.shape_buckets.canvas(height, width):
            return self.shape_buckets.round_down_rows(limit)
        return limit

    def in_prepared_shape(self, batch: Batch) -> Batch:
        """Return a batch, on a GPU in a larger shape if that is prepared and the batch's own would cost more.

        The pixels that are computed in vain in larger shapes are summed up until they exceed the cost of a new shape,
        which is then paid (the ski-rental rule).
        """
        if self.shape_buckets is None:
            return batch
        own = batch.rows, batch.height, batch.width
        ragged = self.session.contract.canvas == "ragged"  # else an image fills its canvas
        fitting = [
            shape
            for shape in self._prepared
            if shape[0] >= own[0] and (shape[1:] == own[1:] or (ragged and shape[1] >= own[1] and shape[2] >= own[2]))
        ]
        shape = min(fitting, key=math.prod, default=own)
        self._in_vain += math.prod(shape) - math.prod(own)
        if self._in_vain > self.session.rules.switch_pixels:
            shape, self._in_vain = own, 0
        self._prepared[shape] = None
        self._prepared.move_to_end(shape)
        if len(self._prepared) > self.session.prepared_shapes:
            self._prepared.popitem(last=False)
        rows, height, width = shape
        return structs.replace(batch, rows=rows, height=height, width=width)

    @property
    def fills_batch(self) -> bool:
        return self.fills(self.ready_pixels, self.ready_windows)

    def fills(self, pixels: int, windows: int, batches: int = 1) -> bool:
        """Return whether this many pixels or windows fill `batches` of the largest batches."""
        rules = self.session.rules
        return pixels >= batches * rules.max_pixels or windows >= batches * rules.max_windows


def _plan(contract: ModelContract, limits: DecodeLimits, max_view_pixels: int, options: RequestOptions) -> Plan:
    """Return the plan of a request; UsageError if the model cannot do what it asks."""
    overrides = ProtocolOverrides(scales=options.scales, mirror=options.mirror, apply_exif=options.apply_exif)
    protocol = build_protocol(options.protocol or default_protocol_name(contract), contract, overrides)
    prepare = PrepareOptions(protocol, limits, max_view_pixels, options.heatmap)
    top = resolve_top_k(options.top, len(contract.classes))
    # Before decoding the shape of a whole image is unknown; it is taken as square.
    pixels = sum((protocol.crop or view.scale) ** 2 for view in protocol.views)
    of_crop = contract.multiply_adds(contract.crop, contract.crop)
    work = math.inf if of_crop is None else of_crop * pixels / contract.crop**2
    return Plan(protocol, top, options.heatmap, options.maps, prepare, len(protocol.views), pixels, work)


def _canvas_of(session: Session, shape_buckets: ShapeBuckets | None, height: int, width: int) -> tuple[int, int, int]:
    """Return pixels, windows and lanes of a view's canvas in a batch of equal shapes."""
    step = session.rules.canvas_step
    canvas = -(-height // step) * step, -(-width // step) * step
    canvas = (shape_buckets.canvas(*canvas) if shape_buckets else None) or canvas
    pixels, windows = math.prod(canvas), math.prod(session.contract.window_grid(*canvas))
    # Together the lanes take no more memory than the largest batch. With few of them most threads would have no work.
    lanes = min(session.lanes, session.rules.max_rows(pixels, windows))
    return pixels, windows, lanes if 2 * lanes > session.lanes else 1


def largest_own_view(contract: ModelContract) -> int:
    """Return the pixels of the largest view that a protocol of the model itself can have."""
    protocols = [build_protocol(name, contract) for name in supported_protocols(contract)]
    return max(each.long_side_cap * max(each.scales) ** 2 for each in protocols)


def shape_buckets_of(session: Session) -> ShapeBuckets | None:
    """Return the shape buckets of a server's batches; None where a new shape costs nothing, as on a CPU.

    With a file for exact canvases an image fills its canvas, whatever its size, so only the crop has a bucket.
    """
    contract = session.contract
    if not session.circumstances.on_gpu:
        return None
    scales = contract.default_scales if contract.canvas != "exact" else ()
    return build_shape_buckets(contract.crop, scales, session.rules.canvas_step, contract.max_side)
