"""One device and everything that works for it: what waits, and the threads that decode, compute and answer."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from prelunet.evaluator.answer import Timings
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.machine import cores
from prelunet.evaluator.serving.observability.metrics import ModelMetrics
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling.executor import ComputeThread
from prelunet.evaluator.serving.scheduling.queue import Waiting, ready_views
from prelunet.evaluator.serving.scheduling.request import Outcome, Request, deliver, known


def device_of(placement: Placement) -> str:
    """Return the name of the device that a placement computes on; on a CPU all runtimes share the same cores."""
    return f"cuda-{placement.gpu}" if placement.device == "cuda" else "cpu"


class ServedDevice:
    """A device that any number of models share, and take turns on.

    name: of `device_of`; on_lost: called once, in any thread, when it gives nothing but errors from now on.
    """

    def __init__(self, name: str, queue: QueueOptions, on_lost: Callable[[DeviceLost], object]) -> None:
        self.waiting = Waiting(queue)
        # Not the threads that decode: an image that is done should not wait behind others that have just come; nor
        # behind heat maps, which take a hundred times as long.
        self._answering = ThreadPoolExecutor(cores(), thread_name_prefix=f"answer-{name}")
        self._drawing = ThreadPoolExecutor(cores(), thread_name_prefix=f"draw-{name}")
        self._preparers = Preparers(self.waiting, name)
        self._compute = ComputeThread(self.waiting, self._answer, on_lost, name, ahead=name.startswith("cuda"))

    def _answer(self, requests: Sequence[Request]) -> None:
        """Have answers made: those with heat maps each by itself, all others together."""
        if plain := [request for request in requests if not request.keep_windows]:
            self._answering.submit(self._make_answers, plain)
        for request in requests:
            if request.keep_windows:
                self._drawing.submit(self._make_answers, [request])

    def _make_answers(self, requests: Sequence[Request]) -> None:
        deliver([_outcome(request) for request in self.waiting.finish(requests)])

    def close(self) -> None:
        """Finish what waits, let nothing more in, and end all threads."""
        self.waiting.close()
        self._preparers.join()
        self._compute.join()
        self._answering.shutdown()
        self._drawing.shutdown()


def _outcome(request: Request) -> Outcome:
    """Average the views of a request and make its answer; whatever is raised goes to who waits for it."""
    try:
        begun = time.monotonic()
        answer = request.tell([result for result in request.results if result is not None])
        now = time.monotonic()
        timings = request.timings(now)
        _count(request.lane.metrics, timings, now - begun)
    except BaseException as error:
        return Outcome(request, error=known(request.lane, error))
    return Outcome(request, (answer, timings))


def _count(metrics: ModelMetrics, timings: Timings, average: float) -> None:
    metrics.stage("queue", timings.queue_seconds)
    metrics.stage("decode", timings.decode_seconds)
    metrics.stage("compute", timings.compute_seconds)
    metrics.stage("average", average)
    metrics.request_seconds.observe(timings.total_seconds)
    metrics.last_answer.set_to_current_time()


# Encoded images to views: the threads that decode and resize, in fair order.


class Preparers:
    """Threads that decode what waits for a device, one per core."""

    def __init__(self, waiting: Waiting, device: str) -> None:
        self._waiting = waiting
        self._threads = [
            threading.Thread(target=self._work, name=f"decode-{device}-{number}", daemon=True)
            for number in range(cores())
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (request := self._waiting.next_image()) is not None:
            try:
                views = request.lane.prepare(request.image, request.protocol, request.caller.deadline)
                ready = ready_views(request, views)
                del views
            except BaseException as error:  # the caller's to handle; without this thread others would wait for ever
                self._waiting.refused(request, known(request.lane, error))
            else:
                self._waiting.decoded(request, ready)
                del ready  # before this thread waits for the next
            del request

    def join(self) -> None:
        """Wait until all have ended, after `Waiting.close`."""
        for thread in self._threads:
            thread.join()
