"""Encoded images that wait to be decoded, in fair order, and what is being decoded.

Easy images are decoded in threads of the server, all others in processes. The owner, `Waiting`, holds its lock.
"""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from .fair_queue import FairQueue
from .request import Decoder, Request


class DecodeQueue:
    """process_share: decoding processes that the images of one identity may take at once.

    waiting: images, by what decodes them; decoding: requests being decoded; views, bytes: of these, estimated.
    """

    def __init__(self, process_share: float) -> None:
        self._process_share = process_share
        self._processes: Counter[str] = Counter()  # taken, by identity
        self.waiting: dict[Decoder, FairQueue[Request]] = {"thread": FairQueue(), "process": FairQueue()}
        self.decoding = self.views = 0
        self.bytes = 0.0

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.waiting.values())

    def withdraw(self, request: Request) -> bool:
        """Remove an image that is not to be decoded; False if it does not wait."""
        if request not in (waiting := self.waiting[request.decoder]):
            return False
        waiting.withdraw(request)
        return True

    def first(self, decoder: Decoder) -> Request | None:
        """Return the next image; those of identities that have all the processes they may wait."""
        taken = self._processes.items() if decoder == "process" else ()
        return self.waiting[decoder].first([each for each, number in taken if number >= self._process_share])

    def begin(self, request: Request) -> None:
        """Take an image, which is decoded from now on until `end`."""
        self.waiting[request.decoder].take(request)
        request.begun = time.monotonic()
        self._count(request, 1)

    def end(self, request: Request) -> None:
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        request.model.decoding += sign
        if request.decoder == "process":
            self._processes[request.call.identity] += sign
            self._processes += Counter()  # forgets who has none
        self.decoding += sign
        self.views += sign * request.plan.views
        self.bytes += sign * request.decoded_bytes
