"""One device with its queue and its threads, which decode, compute and build answers."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...engine.runtimes import RUNTIMES
from ...engine.session import Placement
from ...errors import DeviceLost
from ...machine import cores
from ..decoding import DecodeProcess
from ..options import QueueOptions
from .executor import BatchExecutor
from .queue import DeviceQueue
from .request import Request, as_reported, deliver


def device_name(placement: Placement) -> str:
    """Return the name of a placement's device. All runtimes on a CPU share one, because they share its cores."""
    return f"{placement.device}-{placement.gpu}" if RUNTIMES[placement.device].gpu else "cpu"


def decode_processes() -> int:
    """Return the number of decoding processes: one more than an identity may take, so that others find one free."""
    return cores() + 1


class ServedDevice:
    """A device shared by any number of models.

    name: from `device_name`; on_lost: called once, in any thread, when the device is lost.
    """

    def __init__(self, name: str, queue: QueueOptions, on_lost: Callable[[DeviceLost], object]) -> None:
        self.device_queue = DeviceQueue(queue, process_share=decode_processes() - 1)
        # Separate from the decoding threads: a computed image should not wait behind images that have just arrived, nor
        # behind heat maps, which take a hundred times as long.
        on_gpu = name != "cpu"
        self._answer_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"answer-{name}") if on_gpu else None
        self._heatmap_pool = ThreadPoolExecutor(cores(), thread_name_prefix=f"draw-{name}")
        self._decode_threads = [
            threading.Thread(target=decode, name=f"decode-{name}-{number}", daemon=True)
            for decode, threads in ((self._decode, cores()), (self._decode_in_process, decode_processes()))
            for number in range(threads)
        ]
        for thread in self._decode_threads:
            thread.start()
        self._executor = BatchExecutor(self.device_queue, self._answer, on_lost, name, stage_ahead=on_gpu)

    def add_threads(self, lanes: int) -> None:
        self._executor.add_threads(lanes)

    def _decode_in_process(self) -> None:
        """Decode those images that may take long, or much memory, in a process of this thread."""
        process = DecodeProcess()
        try:
            self._decode(process)
        finally:
            process.close()

    def _decode(self, process: DecodeProcess | None = None) -> None:
        """Decode and resize queued images, in fair order; without a process those that are easy."""
        while (request := self.device_queue.next_image("thread" if process is None else "process")) is not None:
            self.device_queue.decode(request, process)
            del request  # free its pixels before waiting for the next image

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
        finished = self.device_queue.finish(requests)
        for request in finished:
            try:
                start = time.monotonic()
                answer = request.build_result(request)
                now = time.monotonic()
                timings, metrics = request.timings(now), request.model.metrics
                metrics.stage("queue", timings.queue_seconds)
                metrics.stage("decode", timings.decode_seconds)
                metrics.stage("compute", timings.compute_seconds)
                metrics.stage("average", now - start)
                trace = request.caller.trace
                metrics.request_seconds.observe(timings.total_seconds, trace.exemplar if trace else None)
                metrics.last_answer.set_to_current_time()
                request.answer = answer, timings
            except BaseException as error:
                request.error = as_reported(request.model, error)
        deliver(finished)

    def close(self) -> None:
        """Refuse new requests, finish those that wait, and end all threads."""
        self.device_queue.close()
        for thread in self._decode_threads:
            thread.join()
        self._executor.join()
        if self._answer_pool is not None:
            self._answer_pool.shutdown()
        self._heatmap_pool.shutdown()
