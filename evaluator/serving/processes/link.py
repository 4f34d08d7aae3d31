"""Calls between a server's parent and one of its processes, in both directions over one socket."""

import asyncio
import itertools
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from ...errors import PreluNetError


class Link:
    """One end. handlers: what the other end may call, by name.

    Messages are pickled, which only programs of one trust domain may exchange: both ends belong to one server. Each is
    (number, name, arguments) for a call, and (number, None, (result, error)) for its outcome.
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
                number, name, content = pickle.loads(await self._reader.readexactly(length))  # noqa: S301
                if name is not None:
                    task = asyncio.create_task(self._answer(number, name, content))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif not (waiting := self._waiting.pop(number)).done():  # else its caller has left
                    waiting.set_result(content)
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
        self._send(number, name, arguments)
        await asyncio.wait({waiting})
        if waiting.cancelled():
            raise ConnectionError("the process at the other end has ended")
        result, error = waiting.result()
        if error is not None:
            raise error
        return result

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        outcome: tuple[Any, Exception | None]
        try:
            outcome = await self._handlers[name](*arguments), None
        except PreluNetError as error:
            outcome = None, error
        except Exception as error:  # of classes that may not survive the way
            outcome = None, RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(ConnectionError):
            self._send(number, None, outcome)

    def _send(self, *message: Any) -> None:
        if self._writer.is_closing():
            raise ConnectionError("the process at the other end has ended")
        content = pickle.dumps(message)
        self._writer.write(len(content).to_bytes(4) + content)
