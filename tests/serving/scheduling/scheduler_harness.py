"""Models on devices without gRPC, and sessions that a test can block, for tests of the scheduler."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import Classification
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.decoding import DecodeProcess
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.observability.metrics import Metrics, ModelMetrics
from prelunet.evaluator.serving.options import ModelFile, QueueOptions
from prelunet.evaluator.serving.scheduling.admission import AdmissionController, Ticket, Usage
from prelunet.evaluator.serving.scheduling.model import RequestOptions, ServedModel
from prelunet.evaluator.serving.scheduling.request import ReadyView, Request
from prelunet.evaluator.serving.scheduling.waiting import Waiting
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import until
from tests.serving.serving_harness import png

CONTRACT = fake_contract()
GPU_RULES = BatchRules(canvas_step=4, max_windows=1000, max_pixels=8 * 48 * 64, switch_pixels=10**6)
# Options of a session on a GPU whose full batch has three views of 32x41 pixels.
STAGING: dict[str, Any] = {
    "provider": "CUDAExecutionProvider",
    "rules": replace(GPU_RULES, max_pixels=3 * 32 * 44),
}
TIMEOUT = 10.0  # seconds before a waiting test fails


class SteppedSession(FakeSession):
    """A fake whose batches each wait until they are released.

    entered: number of batches started; fail: called with the canvases of each batch before it is computed.
    """

    def __init__(self, *arguments: Any, fail: Callable[[np.ndarray], None] = lambda _: None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.entered = 0
        self.computing: list[threading.Thread] = []
        self._fail = fail
        self._allowed = threading.Semaphore(0)
        self._free = False

    def compute(self, staged: Any) -> Outputs:
        self.entered += 1
        self.computing.append(threading.current_thread())
        assert self._free or self._allowed.acquire(timeout=TIMEOUT), "the test did not release a batch"
        self._fail(staged[0])
        return super().compute(staged)

    def release_batches(self, batches: int = 1) -> None:
        """Let this many batches run."""
        self._allowed.release(batches)

    def release_all(self) -> None:
        """Let all batches run from now on."""
        self._free = True
        self._allowed.release(1000)


@contextmanager
def serve_models(
    queue: QueueOptions = QueueOptions(turn_cost=0),
    on_lost: Callable[[DeviceLost], object] = lambda _: None,
    late: int = 0,
    **sessions: Any,
) -> Iterator[Models]:
    """Serve sessions under their keywords; checks afterwards that nothing is left.

    queue: by default no image is small, so that images are decoded while a batch is held.
    late: expected number of views computed after their caller had left.
    """
    loaded = [(ModelFile(name, Path(f"{name}.onnx")), session) for name, session in sessions.items()]
    before = set(threading.enumerate())
    models = Models(loaded, DecodeLimits(), queue, on_lost=on_lost)
    try:
        yield models
    finally:
        for session in sessions.values():
            if isinstance(session, SteppedSession):
                session.release_all()
        models.close()
    assert [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith("asyncio_")
    ] == []
    for model in models.all():
        images, ready = model.waiting.images, model.waiting.ready
        assert (list(images), images.decoding, images.views, images.bytes) == ([], 0, 0, 0)
        assert (len(ready), ready.bytes, ready.running, ready.planning) == (0, 0, 0, False)
        assert (model.decoding, model.ready_pixels, model.ready_windows) == (0, 0, 0)
        assert model.admission.used == Usage()
        for gauge in ("images", "views", "bytes"):
            assert metric_value(models, f"waiting_{gauge}", model.name) == 0
        assert metric_value(models, "late_views_total", model.name) == late


def metric_value(models: Models, what: str, model: str, **labels: str) -> float:
    """Return the value of a metric; 0 if it does not exist yet."""
    return models.metrics.registry.get_sample_value(f"prelunet_{what}", {"model": model, **labels}) or 0.0


def dense_protocol(*scales: int, mirror: bool = False) -> EvaluationProtocol:
    """Return a protocol with these scales; an image with that shorter side is not resized."""
    return replace(build_protocol(f"dense-{'-'.join(map(str, scales))}", CONTRACT), mirror=mirror)


def call_of(client: str = "", *, identity: str = "", share: float | None = None, deadline: float = math.inf) -> Call:
    """Return a call. client: its connection; identity: the name of its token, by default the client's address."""
    return Call(peer=client, identity=identity, share=share, deadline=deadline)


def start_classify(
    models: Models,
    image: bytes,
    protocol: EvaluationProtocol,
    *,
    model: str = "fake",
    client: str = "",
    deadline: float = math.inf,
) -> "asyncio.Task[Classification]":
    """Start classifying an image, without waiting for the answer."""
    options = RequestOptions(protocol.name, mirror=protocol.mirror)

    async def classify() -> Classification:
        return (await DataPlane(models).classify(image, model, options, call_of(client, deadline=deadline))).classified

    return asyncio.create_task(classify())


def ready_view_count(models: Models) -> int:
    """Return the number of views waiting for the device."""
    return len(models.all()[0].waiting.ready)


def all_decoded(models: Models, requests: int) -> bool:
    """Return whether this many images are unanswered and all of them are decoded."""
    images = models.all()[0].waiting.images
    return sum(model.admission.used.images for model in models.all()) == requests and not (
        list(images) or images.decoding
    )


def deadline_in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def occupy_device(models: Models, session: SteppedSession, model: str = "fake") -> "asyncio.Task[Classification]":
    """Start classifying an image and return when it occupies the device, so that later images wait."""
    entered = session.entered
    task = start_classify(models, png(28, 28, seed=9), dense_protocol(28), model=model)
    await until(lambda: session.entered > entered)
    return task


async def stage_batch(
    models: Models, session: SteppedSession
) -> "tuple[asyncio.Task[Classification], list[asyncio.Task[Classification]]]":
    """Occupy the device of a session created with STAGING, and stage a batch of three requests behind it.

    Returns the request on the device and the three.
    """
    first = await occupy_device(models, session)
    tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32), client=f"{seed}") for seed in range(3)]
    await until(lambda: all_decoded(models, 4) and not ready_view_count(models))
    return first, tasks


class DecodeGate:
    """Blocks the threads that decode images of given sizes in bytes for the model `fake`.

    threads: name of that of each image so far.
    """

    def __init__(self, held: set[int]) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self._held = held
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "DecodeGate":
        decode = Request.decode

        def gated(request: Request, process: DecodeProcess | None) -> list[ReadyView]:
            if request.model.name != "fake":
                return decode(request, process)
            self.threads.append(threading.current_thread().name)
            if len(request.image) in self._held:
                self.entered.set()
                assert self.open.wait(30)
            return decode(request, process)

        self._patch.setattr(Request, "decode", gated)
        return self

    def __exit__(self, *_error: object) -> None:
        self.open.set()
        self._patch.undo()


# Parts of a server, without threads


def build_model(
    session: Any = None,
    *,
    name: str = "fake",
    queue: QueueOptions = QueueOptions(turn_cost=0),
    process_share: float = math.inf,
) -> ServedModel:
    """Return a model on a device of its own, whose queues nobody serves."""
    session, metrics = session or FakeSession(), ModelMetrics(Metrics(), name)
    waiting = Waiting(queue, process_share, decoders=session.circumstances.on_gpu)
    admission = AdmissionController(name, queue, metrics)
    return ServedModel(ModelFile(name, Path(f"{name}.onnx")), session, waiting, admission, metrics)


def build_request(
    model: ServedModel, image: bytes, protocol: EvaluationProtocol, client: str = "", deadline: float = math.inf
) -> Request:
    """Return a request whose answer nobody awaits."""
    reply = asyncio.get_running_loop().create_future()
    plan = model.plan(RequestOptions(protocol.name, mirror=protocol.mirror))
    return Request(model, plan, image, call_of(client), deadline, reply)


def build_admission(max_views: int = 1024, max_bytes: int | None = None) -> tuple[AdmissionController, Metrics]:
    metrics = Metrics()
    return AdmissionController("fake", QueueOptions(max_views, max_bytes), ModelMetrics(metrics, "fake")), metrics


@contextmanager
def admitted(
    admission: AdmissionController, size: int, views: int, call: Call | None = None, images: int = 1
) -> Iterator[None]:
    """Admit images, or raise, for as long as the block runs; they are answered if it does not fail."""
    ticket, answered = Ticket(call or Call(), size, views, images), False
    admission.admit_or_refuse(ticket)
    try:
        yield
        answered = True
    finally:
        admission.leave(ticket, answered=answered)


@asynccontextmanager
async def admitted_later(
    admission: AdmissionController, size: int, views: int, call: Call | None = None
) -> AsyncIterator[None]:
    """Wait until an image is admitted; it is for as long as the block runs."""
    ticket, answered = Ticket(call or Call(), size, views), False
    await admission.admit_or_wait(ticket)
    try:
        yield
        answered = True
    finally:
        admission.leave(ticket, answered=answered)
