"""What a client may ask of a server, in plain types: neither protobuf nor HTTP. Both front ends only translate.

Classify, ModelInfer, POST /v1/classify, POST /v2/…/infer      classify, classify_all
ClassifyStream                                                 classify for each message, waiting for room
ModelStreamInfer                                               classify_all for each message
Evaluate                                                       evaluate
the lists and descriptions of models                           list_models, get_model, models, problems
RepositoryModelLoad, RepositoryModelUnload                     folder
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from ..errors import ImageError, UsageError
from ..imaging.decode import check_bytes
from ..reporting.report import Report
from .answers import ListModelsResponse, Model, list_models_response, model_response
from .concurrency import task_group
from .evaluation import LabelledImage, ProgressCallback, evaluate
from .models import Models
from .observability.call_context import Call
from .options import ServerLimits
from .repository import Repository, Version
from .scheduling.admission import Ticket
from .scheduling.model import Plan, RequestOptions, ServedModel
from .scheduling.request import Answered, Request, Write

_FIXED = "this server's models are fixed at its start; it changes those of a folder: prelunet serve --models DIR"


class DataPlane:
    """Answers calls, on the event loop's thread; nothing is computed there.

    models: that are served; repository: None if they are fixed; ready: whether the server accepts new work, as reported
    by health; max_images: of one evaluation.
    """

    def __init__(
        self,
        models: Models,
        repository: Repository | None = None,
        ready: Callable[[], bool] = lambda: True,
        max_images: int = ServerLimits.max_evaluation_images,
    ) -> None:
        self.models, self._repository, self.ready = models, repository, ready
        self._max_images = max_images

    def problems(self) -> Mapping[Version, str]:
        """Return what is wrong with versions in the server's folder."""
        return {} if self._repository is None else self._repository.problems()

    def list_models(self) -> ListModelsResponse:
        """List the served models, and what is wrong with others."""
        return list_models_response(self.models.all(), self.problems())

    def get_model(self, name: str) -> Model:
        """Describe a served model. Raises ModelNotFound."""
        return model_response(self.models.get(name))

    def folder(self) -> Repository:
        """Return the folder of models, which loads and unloads them. Raises UsageError if the models are fixed."""
        if self._repository is None:
            raise UsageError(_FIXED)
        return self._repository

    async def classify(
        self,
        image: bytes,
        model: str,
        options: RequestOptions,
        call: Call,
        write: Write | None = None,
        on_admitted: Callable[[], None] | None = None,
    ) -> Answered:
        """Classify one encoded image.

        write: of the answer's `written`; on_admitted: for an image of a stream, which waits for room in the queue;
        called once it has that. Without it the image is refused instead: Overloaded. Raises ModelNotFound, UsageError
        for what the model cannot do or too large a view, ImageError for bytes that are not an image, ContractError if
        the model outputs NaN, DeadlinePassed when the call's deadline passes or is too close, OutOfMemory if the device
        has too little memory for a view, DeviceLost if it fails on every input, and Interrupted once the server has
        stopped. Cancellation drops work that has not started.
        """
        served = self.models.get(model)
        return await _classify(served, served.plan(options), call, image, write=write, on_admitted=on_admitted)

    async def classify_all(
        self,
        images: Sequence[bytes],
        served: ServedModel,
        options: RequestOptions,
        call: Call,
        timeout: float,
        name: str,
    ) -> list[Answered]:
        """Classify the images of a request, which are admitted or refused together; the first failure ends the others.

        timeout: in seconds, beside the call's deadline; name: of the list of images, for the error of one.
        Raises the same errors.
        """
        plan, deadline = served.plan(options), min(call.deadline, time.monotonic() + timeout)
        views = len(images) * plan.views
        call.record_views(served.name, views)
        for index, image in enumerate(images):
            with _naming(f"{name}[{index}]"):
                check_bytes(image, plan.prepare.limits)
        ticket = Ticket(call, sum(map(len, images)), views, len(images))
        answers: list[Answered] = []
        served.admission.admit_or_refuse(ticket)
        try:
            async with task_group() as group:
                tasks = [
                    group.create_task(_named(f"{name}[{index}]", _answer(served, plan, call, image, deadline)))
                    for index, image in enumerate(images)
                ]
                del images  # the tasks hold them, and a traceback would, too
            answers = [task.result() for task in tasks]
            return answers
        finally:
            served.admission.leave(ticket, answered=bool(answers))

    async def evaluate(
        self,
        dataset: str,
        images: AsyncIterator[LabelledImage],
        model: str,
        options: RequestOptions,
        call: Call,
        on_progress: ProgressCallback | None = None,
    ) -> Report:
        """Classify the images of a labeled dataset and return its report; see `evaluation.evaluate`."""
        served = self.models.get(model)
        plan = served.plan(options)
        return await evaluate(
            partial(_classify, served, plan, call), served, plan.protocol, dataset, images,
            call=call, on_progress=on_progress, max_images=self._max_images,
        )  # fmt: skip


async def _classify(
    served: ServedModel,
    plan: Plan,
    call: Call,
    image: bytes,
    on_admitted: Callable[[], None] | None,
    *,
    write: Write | None = None,
) -> Answered:
    call.record_views(served.name, plan.views)
    check_bytes(image, plan.prepare.limits)  # before it takes room in the queue
    ticket, answer = Ticket(call, len(image), plan.views), None
    if on_admitted is None:
        served.admission.admit_or_refuse(ticket)
    else:
        await served.admission.admit_or_wait(ticket)
    try:
        if on_admitted is not None:
            on_admitted()
        answer = await _answer(served, plan, call, image, call.deadline, write)
        return answer
    finally:
        served.admission.leave(ticket, answered=answer is not None)
        del image  # an error's traceback refers to this frame


async def _answer(
    served: ServedModel, plan: Plan, call: Call, image: bytes, deadline: float, write: Write | None = None
) -> Answered:
    """Have an admitted image computed. deadline: of time.monotonic(), which is the clock of asyncio's loops, too."""
    loop = asyncio.get_running_loop()
    request = Request(served, plan, image, call, deadline, loop.create_future(), write=write)
    del image  # the request has it until it ends
    served.waiting.add(request)
    timer = loop.call_at(deadline, served.waiting.expire, request) if deadline < math.inf else None
    try:
        return await request.reply
    finally:
        if timer is not None:
            timer.cancel()
        served.waiting.abandon(request)
        if call.trace is not None:
            call.trace.add_image(request.stages(time.monotonic()), request.failure)
        del request  # an error's traceback refers to this frame: a cycle


async def _named(name: str, answer: Awaitable[Answered]) -> Answered:
    with _naming(name):
        return await answer


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name one of several images in an error that is about it."""
    try:
        yield
    except (ImageError, UsageError) as error:
        raise type(error)(f"{name}: {error}") from error
