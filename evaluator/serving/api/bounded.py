"""Back pressure on streams: a message is read only once a slot is free for it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import TypeVar

Message = TypeVar("Message")


async def bounded(messages: AsyncIterator[Message], slots: asyncio.Semaphore) -> AsyncGenerator[Message, None]:
    """Yield messages; each takes a slot before it is read, which the caller frees once the message is answered.

    So gRPC's flow control slows down a client that sends faster than the server answers.
    """
    with suppress(StopAsyncIteration):
        while await slots.acquire():
            yield await anext(messages)  # without a variable, which would hold the message until the next arrives
