"""Calls between a server's parent and one of its processes, in both directions over one socket."""

import asyncio
import itertools
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct


class _Call(Struct, frozen=True):
    number: int
    name: str
    arguments: tuple[Any, ...]


class _Outcome(Struct, frozen=True):
    number: int
    result: Any
    error: Exception | None = None


class Link:
    """One end. handlers: what the other end may call, by name.

    Messages are pickled, which only programs of one trust domain may exchange: both ends belong to one server.
    """

    def __init__(self, handlers: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        self._handlers = handlers
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self, end: socket.socket) -> None:
        """Use this socket; called before anything else."""
        self._reader, self._writer = await asyncio.open_connection(sock=end)

    async def run(self) -> None:
        """Answer calls until the other end is closed; calls that wait for it fail then."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(4))
                message = pickle.loads(await self._reader.readexactly(length))  # noqa: S301
                if isinstance(message, _Call):
                    task = asyncio.create_task(self._answer(message))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif not (waiting := self._waiting.pop(message.number)).done():
                    waiting.set_result(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
            for waiting in self._waiting.values():
                waiting.cancel()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Have the other end call a handler; return its result or raise its error.

        Raises ConnectionError if the other end is closed before it answers.
        """
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(_Call(number, name, arguments))
        await asyncio.wait({waiting})
        if waiting.cancelled():
            raise ConnectionError("the process at the other end has ended")
        outcome: _Outcome = waiting.result()
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    async def _answer(self, call: _Call) -> None:
        try:
            outcome = _Outcome(call.number, await self._handlers[call.name](*call.arguments))
        except Exception as error:
            outcome = _Outcome(call.number, None, error)
        with suppress(ConnectionError):
            self._send(outcome)

    def _send(self, message: _Call | _Outcome) -> None:
        content = pickle.dumps(message)
        if self._writer.is_closing():
            raise ConnectionError("the process at the other end has ended")
        self._writer.write(len(content).to_bytes(4) + content)
