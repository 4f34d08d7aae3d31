"""One device with its queue and its threads, which decode, compute and build answers."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ...engine.runtimes import RUNTIMES
from ...engine.session import Placement
from ...errors import DeviceLost
from ...machine import cores
from ..decoding import DecodeProcess
from ..options import QueueOptions
from .executor import BatchExecutor
from .request import Decoder, Request, as_reported, deliver
from .waiting import Waiting


def device_name(placement: Placement) -> str:
    """Return the name of a placement's device. All runtimes on a CPU share one, because they share its cores."""
    return f"{placement.device}-{placement.gpu}" if RUNTIMES[placement.device].gpu else "cpu"


class ServedDevice:
    """A device shared by any number of models.

    name: from `device_name`; on_lost: called once, in any thread, when the device is lost; executor: of its batches.
    """

    def __init__(self, name: str, queue: QueueOptions, on_lost: Callable[[DeviceLost], object]) -> None:
        gpu = name != "cpu"
        threads, processes = queue.decode_threads * gpu, queue.decode_processes
        self.waiting = Waiting(queue, process_share=processes - 1, decoders=gpu)  # so that others find one free
        # Separate from the decoding threads: a computed image should not wait behind images that have just arrived, nor
        # behind heat maps, which take a hundred times as long.
        self._answer_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"answer-{name}") if gpu else None
        self._heatmap_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"draw-{name}")
        self.executor = BatchExecutor(self.waiting, self._answer, on_lost, name, gpu=gpu)
        for number in range(threads):
            self.executor.start(f"decode-{name}-{number}", partial(self._decode, "thread", None))
        for number in range(processes):
            self.executor.start(f"decode-{name}-{number}", partial(self._decode, "process", DecodeProcess()))

    def _decode(self, decoder: Decoder, process: DecodeProcess | None) -> None:
        """Decode and resize queued images in fair order: those that may take long, or much memory, in a process."""
        try:
            while (request := self._next_image(decoder)) is not None:
                requests = [request]
                del request
                self.executor.decode(requests, process)
        finally:
            if process is not None:
                process.close()

    def _next_image(self, decoder: Decoder) -> Request | None:
        """Wait for the next image and for room for its views; None when the queue is closed and empty."""
        waiting = self.waiting
        idle = waiting.decoders[decoder]
        with waiting.lock:
            while (request := waiting.take_image(decoder)) is None:
                if waiting.closed and not waiting.images.waiting[decoder]:
                    return None
                idle.wait()
            if waiting.images.waiting[decoder]:
                idle.wake()  # there may be room for the next image too
            return request

    def _answer(self, requests: Sequence[Request]) -> None:
        """Build answers: heat maps each in a pool, all others here, or in a pool where a GPU must not wait for them."""
        if plain := [request for request in requests if not request.keep_windows]:
            if self._answer_pool is None:
                self._build_answers(plain)
            else:
                self._answer_pool.submit(self._build_answers, plain)
        for request in requests:
            if request.keep_windows:
                self._heatmap_pool.submit(self._build_answers, [request])

    def _build_answers(self, requests: Sequence[Request]) -> None:
        """Average the views of each request, build its answer or error, and deliver all of them together."""
        finished = self.waiting.finish(requests)
        for request in finished:
            try:
                start = time.monotonic()
                request.answer = answer = request.build_answer()
                trace = request.call.trace
                exemplar = trace.exemplar if trace else None
                request.model.metrics.answered(answer.timings, time.monotonic() - start, exemplar)
            except BaseException as error:
                request.answer, request.error = None, as_reported(request.model, error)
        deliver(finished)

    def close(self) -> None:
        """Refuse new requests, finish those that wait, and end all threads."""
        self.waiting.close()
        self.executor.join()
        if self._answer_pool is not None:
            self._answer_pool.shutdown()
        self._heatmap_pool.shutdown()
