"""Models on their devices without gRPC, and sessions that a test can hold, for the tests of what waits and runs."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import Classified
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.protocols import Protocol, make_protocol
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.call_context import Caller
from prelunet.evaluator.serving.options import ModelFile, QueueOptions
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.serving_harness import png

CONTRACT = fake_contract()
GPU_RULES = BatchRules(canvas_step=4, max_windows=1000, max_pixels=8 * 48 * 64, switch_pixels=10**6)
PATIENCE = 10.0  # seconds until a test that waits has failed


class HeldSession(FakeSession):
    """A fake whose batches each wait until they are let go.

    entered: how many were begun; fail: called with the canvases before they are computed.
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
        assert self._free or self._allowed.acquire(timeout=PATIENCE), "the test did not let go of a batch"
        self._fail(staged[0])
        return super().compute(staged)

    def let_go(self, batches: int = 1) -> None:
        """Let so many batches run."""
        self._allowed.release(batches)

    def free(self) -> None:
        """Let all batches run from now on."""
        self._free = True
        self._allowed.release(1000)


@contextmanager
def served(
    queue: QueueOptions = QueueOptions(),
    on_lost: Callable[[DeviceLost], object] = lambda _: None,
    late: int = 0,
    **sessions: Any,
) -> Iterator[Models]:
    """Serve sessions under their keywords; afterwards nothing of it is left.

    late: how many views were computed though nobody waited for them.
    """
    loaded = [(ModelFile(name, Path(f"{name}.onnx")), session) for name, session in sessions.items()]
    before = set(threading.enumerate())
    models = Models(loaded, DecodeLimits(), queue, on_lost=on_lost)
    try:
        yield models
    finally:
        for session in sessions.values():
            if isinstance(session, HeldSession):
                session.free()
        models.close()
    assert [
        thread.name for thread in threading.enumerate() if thread not in before and thread.name != "asyncio_0"
    ] == []
    for classifier in models.all():
        waiting, lane = classifier._waiting, classifier._lane
        assert (len(waiting._encoded), len(waiting._ready), waiting._decoding) == (0, 0, 0)
        assert (waiting._decoding_views, waiting._decoded_bytes) == (0, 0)
        assert (lane.unanswered, lane.decoding, lane.ready_pixels, lane.ready_windows) == (0, 0, 0, 0)
        assert (classifier._door.images, classifier._door.views, classifier._door.bytes) == (0, 0, 0)
        for gauge in ("images", "views", "bytes"):
            assert counted(models, f"waiting_{gauge}", classifier.name) == 0
        assert counted(models, "late_views_total", classifier.name) == late


def counted(models: Models, what: str, model: str, **labels: str) -> float:
    """Return what a metric says, 0 where nothing was counted yet."""
    return models.metrics.registry.get_sample_value(f"prelunet_{what}", {"model": model, **labels}) or 0.0


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true, which other threads make so."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "this should have happened"
        await asyncio.sleep(0.001)


def dense(*scales: int, mirror: bool = False) -> Protocol:
    """Return a protocol that shows an image of such a shorter side as it is."""
    return replace(make_protocol(f"dense-{'-'.join(map(str, scales))}", CONTRACT), mirror=mirror)


def ask(
    models: Models, image: bytes, protocol: Protocol, *, model: str = "fake", **caller: object
) -> "asyncio.Task[Classified]":
    """Ask for an image and go on."""
    classifier = models.get(model)

    async def asked() -> Classified:
        with classifier.admitted(len(image), len(protocol.views)):
            return await classifier.classify(image, protocol, lambda classified: classified, caller=Caller(**caller))

    return asyncio.create_task(asked())


def ready(models: Models) -> int:
    """Return how many views wait for the device."""
    return len(models.all()[0]._waiting._ready)


def all_decoded(models: Models, requests: int) -> bool:
    """Say whether so many requests are without an answer, and none has still to be decoded."""
    waiting, lanes = models.all()[0]._waiting, [classifier._lane for classifier in models.all()]
    return sum(lane.unanswered for lane in lanes) == requests and not (len(waiting._encoded) or waiting._decoding)


def soon(seconds: float) -> float:
    """Return a deadline."""
    return asyncio.get_running_loop().time() + seconds


async def occupied(models: Models, session: HeldSession, model: str = "fake") -> "asyncio.Task[Classified]":
    """Ask for one image and return when the device is busy with it, so that what follows has to wait."""
    entered = session.entered
    task = ask(models, png(28, 28, seed=9), dense(28), model=model)
    await until(lambda: session.entered > entered)
    return task


def with_models(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


class Gate:
    """Holds the threads that decode images of a given number of bytes."""

    def __init__(self, models: Models, held: set[int]) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.prepared = 0
        self._lane = models.get("fake")._lane
        self._prepare = self._lane.prepare
        self._held = held
        self._lane.prepare = self._prepared

    def _prepared(self, image: bytes, protocol: Protocol, deadline: float | None):
        self.prepared += 1
        if len(image) in self._held:
            self.entered.set()
            assert self.open.wait(30)
        return self._prepare(image, protocol, deadline)
