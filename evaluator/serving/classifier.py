"""One served model: encoded image in, answer out, with no computation on the event loop."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..answer import Answer, Timings
from ..contract import ModelContract
from ..engine.batching import MAX_PIXELS
from ..engine.classify import Classification, average_image, build_answer
from ..engine.heatmap import class_maps, draw_heat_maps, png_bytes
from ..engine.session import Session
from ..errors import DeadlinePassed
from ..imaging.decode_memory import ByteSemaphore, decode_semaphore
from ..imaging.limits import DecodeLimits
from ..imaging.views import ViewImage, cut_views
from ..protocols import EvaluationProtocol
from .decoding import SMALL_BYTES, DecodeProcess, PrepareOptions, prepare_image
from .observability.call_context import Caller
from .observability.metrics import ModelMetrics
from .options import ModelFile
from .scheduling.admission import AdmissionController
from .scheduling.device import ServedDevice
from .scheduling.request import Request, ScheduledModel

Result = TypeVar("Result")


def max_view_pixels(contract: ModelContract, protocol: EvaluationProtocol) -> int:
    """Return the limit of a view's pixels: that of a batch, or as many as the model's `multi-scale` needs."""
    return max(MAX_PIXELS, protocol.long_side_cap * max(contract.default_scales) ** 2)


class Classifier:
    """A session on a device, which may have other sessions too. Callers pass `admission` before they classify.

    file: of the session, whose name and version requests may have; admission: shared by the model's versions; metrics:
    of this model; limits: on images.

    Nothing closes it. Calls keep the classifier that they began with, so session and memory of a version that is no
    longer served are freed when its last call ends. Therefore it must not be part of a reference cycle.
    """

    def __init__(
        self,
        file: ModelFile,
        session: Session,
        device: ServedDevice,
        admission: AdmissionController,
        *,
        metrics: ModelMetrics,
        limits: DecodeLimits = DecodeLimits(),
    ) -> None:
        self.name, self.version, self.file = file.name, file.version, file.path.name
        self.session = session
        self.admission = admission
        self._device_queue = device.device_queue
        semaphore = decode_semaphore(gpu=session.circumstances.on_gpu)
        self._model = ScheduledModel(
            file.name, session, metrics, partial(_decode_views, session.contract, limits, semaphore)
        )

    async def answer(
        self,
        image: bytes,
        protocol: EvaluationProtocol,
        top: int,
        *,
        heatmap: bool,
        maps: bool = False,
        caller: Caller = Caller(),
    ) -> Answer:
        """Classify one encoded image and return its top classes; see `classify` for the errors.

        heatmap: draw heat maps; maps: return them as numbers.
        """

        def build_result(classified: Classification, request: Request) -> Answer:
            heat_maps = b""
            contract, size = self.session.contract, request.image_size
            if request.picture is not None:
                heat_maps = png_bytes(draw_heat_maps(request.picture, size, classified, contract, protocol))
            answer = build_answer(self.session, self.name, protocol, classified, top, heat_maps)
            answer = replace(answer, model={**answer.model, "version": self.version})
            return replace(answer, maps=class_maps(classified, size, contract, protocol)) if maps else answer

        answer, timings = await self._answered(
            image, protocol, caller, build_result, keep_windows=heatmap or maps, with_picture=heatmap
        )
        return replace(answer, timings=timings)

    async def classify(
        self,
        image: bytes,
        protocol: EvaluationProtocol,
        build_result: Callable[[Classification], Result],
        *,
        caller: Caller = Caller(),
    ) -> Result:
        """Classify one encoded image and return what `build_result`, called in a thread, makes of the result.

        Raises ImageError for bytes that are not an image, UsageError for too large a view, ContractError if the model
        outputs NaN, DeadlinePassed when the caller's deadline passes or is too close, OutOfMemory if the device has too
        little memory for a view, DeviceLost if it fails on every input, and Interrupted once the server has stopped.
        Cancellation drops work that has not started.
        """
        result, _ = await self._answered(image, protocol, caller, lambda classified, _: build_result(classified))
        return result

    async def _answered(
        self,
        image: bytes,
        protocol: EvaluationProtocol,
        caller: Caller,
        build_result: Callable[[Classification, Request], Result],
        *,
        keep_windows: bool = False,
        with_picture: bool = False,
    ) -> tuple[Result, Timings]:
        if (remaining := caller.remaining()) is not None and remaining <= 0:
            raise DeadlinePassed("the call's deadline has passed, so the image was not computed. Use a longer deadline")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[tuple[Result, Timings]] = loop.create_future()
        request = Request(
            self._model,
            image,
            protocol,
            caller,
            lambda request: build_result(average_image(protocol, request.complete_results()), request),
            reply,
            keep_windows,
            with_picture,
        )
        self._device_queue.add(request)
        # asyncio's loops and our deadlines use the same clock, time.monotonic().
        timer = None if caller.deadline is None else loop.call_at(caller.deadline, self._device_queue.expire, request)
        try:
            return await reply
        finally:
            if timer is not None:
                timer.cancel()
            self._device_queue.abandon(request)
            if caller.trace is not None:
                caller.trace.add_image(request.stages(time.monotonic()), request.failure)
            del request, reply  # an error's traceback refers to this frame: a cycle that keeps the image alive


def _decode_views(
    contract: ModelContract,
    limits: DecodeLimits,
    semaphore: ByteSemaphore,
    request: Request,
    process: DecodeProcess | None,
) -> list[ViewImage]:
    """Decode an image in this thread if it is easy, else in the given process."""
    protocol = request.protocol
    options = PrepareOptions(protocol, limits, max_view_pixels(contract, protocol), request.with_picture)
    if process is None:
        prepared = prepare_image(request.image, options)
    else:
        with semaphore.reservation(request.caller.deadline) as reserve:

            def reserve_if_large(size: int) -> None:
                if size > SMALL_BYTES:
                    reserve(size)

            prepared = process.prepare(request.image, options, reserve_if_large, lambda: request.ended is not None)
    request.image_size, request.picture = (prepared.height, prepared.width), prepared.picture
    return cut_views(prepared.resized, protocol)
