"""Many messages of a call in progress at a time: back pressure, and how a failure ends the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from .observability.logs import release_frames

Message = TypeVar("Message")
Result = TypeVar("Result")
_UNREAD_SECONDS = 10.0  # in which a client should read a message, or it may not get its call's error


async def answer_all(
    messages: AsyncIterator[Message],
    slots: asyncio.Semaphore,
    answer: Callable[[Message, Callable[[], None]], Coroutine[Any, Any, None]],
) -> None:
    """Answer each message in a task of its own; each takes a slot before it is read.

    So gRPC's flow control slows down a client that sends faster than the server answers.
    answer: frees the slots of the message; calls its second argument once the next may be read. Its first error, or one
    of `messages`, cancels the other tasks.
    """
    async with task_group() as group:
        with suppress(StopAsyncIteration):
            while await slots.acquire():
                admission = asyncio.Event()
                # Without a variable, which would hold the message until the next arrives.
                group.create_task(answer(await anext(messages), admission.set))
                await admission.wait()


async def uncancelled(write: Awaitable[object]) -> None:
    """Await a write; if this is cancelled, once the write is done.

    Of a write that is given up gRPC does not know whether it sent the call's metadata. A status behind it would be
    INTERNAL, or never arrive.
    """
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        with suppress(Exception):  # if the client is gone, gRPC fails the write at once
            await asyncio.wait_for(writing, _UNREAD_SECONDS)
        raise


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that raises its first failure, which has cancelled the other tasks, not an ExceptionGroup.

    A failure refers to its frames and so to images. Reference cycles through it would keep them until the next garbage
    collection, so none is left: with the ExceptionGroup as its context, with asyncio's frame, or with this one.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
        release_frames(failures)
    try:
        raise failure from failure.__cause__  # in the log without the cancellation of the other tasks
    finally:
        del failure


async def shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that continues if this is cancelled; nobody gets its error then."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs that nobody looked
    return await asyncio.shield(task)
