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
from prelunet.evaluator.serving.scheduling.queue import DeviceQueue, ready_views
from prelunet.evaluator.serving.scheduling.request import Outcome, Request, as_reported, deliver


def device_name(placement: Placement) -> str:
    """Return the name of the device that a placement computes on; on a CPU all runtimes share the same cores."""
    return f"cuda-{placement.gpu}" if placement.device == "cuda" else "cpu"


class ServedDevice:
    """A device that any number of models share, and take turns on.

    name: of `device_name`; on_lost: called once, in any thread, when it gives nothing but errors from now on.
    """

    def __init__(self, name: str, queue: QueueOptions, on_lost: Callable[[DeviceLost], object]) -> None:
        self.device_queue = DeviceQueue(queue)
        # Not the threads that decode: an image that is done should not wait behind others that have just come; nor
        # behind heat maps, which take a hundred times as long.
        self._answer_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"answer-{name}")
        self._heatmap_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"draw-{name}")
        self._decode_pool = DecodePool(self.device_queue, name)
        self._compute = ComputeThread(
            self.device_queue, self._answer, on_lost, name, stage_ahead=name.startswith("cuda")
        )

    def _answer(self, requests: Sequence[Request]) -> None:
        """Have answers made: those with heat maps each by itself, all others together."""
        if plain := [request for request in requests if not request.keep_windows]:
            self._answer_pool.submit(self._make_answers, plain)
        for request in requests:
            if request.keep_windows:
                self._heatmap_pool.submit(self._make_answers, [request])

    def _make_answers(self, requests: Sequence[Request]) -> None:
        deliver([_outcome(request) for request in self.device_queue.finish(requests)])

    def close(self) -> None:
        """Finish what waits, let nothing more in, and end all threads."""
        self.device_queue.close()
        self._decode_pool.join()
        self._compute.join()
        self._answer_pool.shutdown()
        self._heatmap_pool.shutdown()


def _outcome(request: Request) -> Outcome:
    """Average the views of a request and make its answer; whatever is raised goes to who waits for it."""
    try:
        begun = time.monotonic()
        answer = request.build_result([result for result in request.results if result is not None])
        now = time.monotonic()
        timings = request.timings(now)
        _count(request.model.metrics, timings, now - begun)
    except BaseException as error:
        return Outcome(request, error=as_reported(request.model, error))
    return Outcome(request, (answer, timings))


def _count(metrics: ModelMetrics, timings: Timings, average: float) -> None:
    metrics.stage("queue", timings.queue_seconds)
    metrics.stage("decode", timings.decode_seconds)
    metrics.stage("compute", timings.compute_seconds)
    metrics.stage("average", average)
    metrics.request_seconds.observe(timings.total_seconds)
    metrics.last_answer.set_to_current_time()


# Encoded images to views: the threads that decode and resize, in fair order.


class DecodePool:
    """Threads that decode what waits for a device, one per core."""

    def __init__(self, device_queue: DeviceQueue, device: str) -> None:
        self._device_queue = device_queue
        self._threads = [
            threading.Thread(target=self._work, name=f"decode-{device}-{number}", daemon=True)
            for number in range(cores())
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (request := self._device_queue.next_image()) is not None:
            try:
                views = request.model.decode_views(request.image, request.protocol, request.caller.deadline)
                ready = ready_views(request, views)
                del views
            except BaseException as error:  # the caller's to handle; without this thread others would wait for ever
                self._device_queue.decode_failed(request, as_reported(request.model, error))
            else:
                self._device_queue.decoded(request, ready)
                del ready  # before this thread waits for the next
            del request

    def join(self) -> None:
        """Wait until all have ended, after `Waiting.close`."""
        for thread in self._threads:
            thread.join()
