"""Encoded images to views: the threads that decode and resize, in fair order."""

import threading

from prelunet.evaluator.machine import cores
from prelunet.evaluator.serving.request import known
from prelunet.evaluator.serving.waiting import Waiting, ready_views


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
