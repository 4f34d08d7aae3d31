"""Helpers for asynchronous tests."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

Item = TypeVar("Item")


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make pytest run an asynchronous test."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]  # pytest reads the fixtures from it
    return run


async def settled(rounds: int = 200) -> None:
    """Let every task run until it blocks."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def one_by_one(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Iterate over items asynchronously."""
    for item in items:
        yield item


def new_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with its own connection."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def rpc_error(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(condition: Callable[[], object]) -> None:
    """Wait until other threads or tasks make a condition true."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
