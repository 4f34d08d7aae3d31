"""A limit on the memory of messages that are still arriving, and on that of messages being decompressed.

gRPC keeps an unfinished message in memory and reports neither its size nor its progress, over any kind of socket. So
what is limited is the process: when it grows beyond the memory that the server has announced at its start, calls whose
messages are unfinished are refused.
"""

import asyncio
import math
import resource
import zlib
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import Overloaded, UsageError
from .observability.call_context import Call
from .observability.metrics import Metrics
from .options import ServerLimits

# Seconds between checks while calls wait for messages. One that waits for less is not refused; over loopback 2 GB may
# arrive in a second.
_INTERVAL = 0.02
_RETRY_AFTER = 1.0  # seconds
_MAX_RATIO, _ALWAYS = 8, 2**18  # images hardly become smaller; a form or JSON around a small one may
_MEMORY, _PAGE = Path("/proc/self/statm"), resource.getpagesize()


class _Wait(Struct, eq=False):
    """The wait of a call's task for a message, for some seconds. checked: already at a check."""

    call: Call
    task: "asyncio.Task[Any]"
    seconds: float
    begun: float
    checked: bool = False
    error: Exception | None = None


class ArrivingBytes:
    """Refuses calls whose messages are unfinished while the process is too large. Only for the event loop's thread.

    max_memory: of the process in bytes, infinity until the server has announced it.
    """

    def __init__(self, limits: ServerLimits = ServerLimits(), metrics: Metrics | None = None) -> None:
        self.max_memory = math.inf
        self._refusals = (metrics or Metrics()).refused["arriving"]
        self._waits: dict[_Wait, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._peak = 0  # bytes of the process at the latest refusal, 0 if it has shrunk since
        self._max_message = limits.max_message_bytes
        self._spared = limits.max_arriving_bytes // self._max_message  # unfinished messages that each may always have
        # One message at a time: several would take all cores and hold Python's lock by turns.
        self._decompressing, self._turn = ThreadPoolExecutor(1, thread_name_prefix="decompress"), asyncio.Lock()

    async def receive(self, call: Call, message: Awaitable[Any], seconds: float) -> Any:
        """Await the next message of a call.

        Raises Overloaded if the call is refused meanwhile, TimeoutError after these seconds, one check late at most.
        They begin once no other message of the call is in progress: until then its client may wait for the answer.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC and HTTP run each call in a task"
        loop = asyncio.get_running_loop()
        wait = _Wait(call, task, seconds, loop.time())
        self._waits[wait] = None
        if self._timer is None:
            self._timer = loop.call_later(_INTERVAL, self._check)
        try:
            return await message
        except asyncio.CancelledError:
            if wait.error is None:
                raise
            task.uncancel()
            raise wait.error from None
        finally:
            self._waits.pop(wait, None)

    def _check(self) -> None:
        """End waits that are over, and refuse unfinished messages each time that the process has grown too large."""
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        for wait in list(self._waits):
            if wait.call.in_progress > 0:
                wait.begun = now
            elif now - wait.begun > wait.seconds:
                self._end(wait, TimeoutError())
        self._refuse(process_memory(), self.max_memory)
        for wait in self._waits:
            wait.checked = True
        if self._waits:
            self._timer = loop.call_later(_INTERVAL, self._check)

    def _refuse(self, size: int, limit: float) -> None:
        """Refuse the unfinished messages of the client with the most, if the process has grown beyond its limit."""
        old = [wait for wait in self._waits if wait.checked]
        if size <= limit:
            self._peak = 0
        elif old and size > self._peak:
            self._peak = size
            # A stream that has got a message may be idle: it is not among the first.
            suspects = [wait for wait in old if not wait.call.bytes] or old
            identity, _ = Counter(wait.call.identity for wait in suspects).most_common(1)[0]
            for wait in [wait for wait in suspects if wait.call.identity == identity][self._spared :]:
                self._refusals.inc()
                text = (
                    f"this server has {size} bytes in memory, more than the {limit} of its start line, and most of the "
                    f"unfinished messages are from {identity}. Send fewer large messages at a time, or later"
                )
                self._end(wait, Overloaded(text, _RETRY_AFTER))

    def _end(self, wait: _Wait, error: Exception) -> None:
        wait.error = error
        wait.task.cancel()
        del self._waits[wait]

    async def decompressed(self, data: bytes) -> bytes:
        """Decompress a message once those that came before it are, and have been taken."""
        async with self._turn:  # else a busy event loop would find many of them decompressed
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._decompressing, decompress, data, self._max_message)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """Decompress a message, of gzip or deflate, to at most `max_bytes`, and to less if it is small."""
    limit = min(_MAX_RATIO * len(data) + _ALWAYS, max_bytes)
    inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)  # 32: either kind of header
    try:
        message = inflater.decompress(data, limit)
    except zlib.error as error:
        raise UsageError(f"this message is damaged: it cannot be decompressed ({error})") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise UsageError(
            f"this message is cut off, or larger than {limit} bytes when it is decompressed, more than its {len(data)} "
            "bytes may become; send such a message without compression"
        )
    return message


def process_memory() -> int:
    """Return the resident bytes of this process; 0 on systems without /proc."""
    try:
        return int(_MEMORY.read_text().split()[1]) * _PAGE
    except OSError:
        return 0
