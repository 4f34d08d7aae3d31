"""Helpers for asynchronous tests with gRPC's asyncio client."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make pytest run an asynchronous test."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]  # pytest reads the fixtures from it
    return run


def new_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with its own connection."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def rpc_error(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
