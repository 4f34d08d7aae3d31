"""Many requests of a stream at a time, answered in their order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


async def in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], Awaitable[Response]], most: int
) -> AsyncGenerator[Response, None]:
    """Yield the answer to each request, in the order of the requests.

    most: requests that are read and whose answer is not yet taken; no further one is read meanwhile.
    Raises what reading raises, once all that was read before is answered, and what `answer` raises. Closing the
    generator cancels what is unanswered.
    """
    slots = asyncio.Semaphore(most)
    answers: asyncio.Queue[asyncio.Future[Response] | None] = asyncio.Queue()

    async def read() -> None:
        try:
            await slots.acquire()
            async for request in requests:
                answers.put_nowait(asyncio.ensure_future(answer(request)))
                del request  # while the next is waited for
                await slots.acquire()
        finally:
            answers.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await answers.get()) is not None:
            yield await task
            slots.release()
        await reader
    finally:
        left: list[asyncio.Future[Any]] = [reader]
        while not answers.empty():
            left += filter(None, [answers.get_nowait()])
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
