"""One of several processes that serve the same models."""

import asyncio
import os
import signal
import socket
from contextlib import suppress

from ...errors import PreluNetError
from ..lifecycle import ServeResult, serve
from ..observability.logs import configure_logging, flush
from .link import Link
from .siblings import Siblings


def work(descriptor: int) -> None:
    """Serve until the parent says so or is gone. descriptor: of the socket to it."""
    ended = asyncio.run(_work(socket.socket(fileno=descriptor)))
    flush()
    if isinstance(ended, ServeResult) and ended.stuck:
        os._exit(0)  # a thread hangs; exiting normally would wait for it


async def _work(end: socket.socket) -> ServeResult | PreluNetError:
    siblings = Siblings()
    await siblings.link.open(end)
    linked = asyncio.create_task(_run(siblings.link))
    siblings.setup = setup = await siblings.link.call("setup")
    configure_logging(setup.log_format, setup.log_level, process=setup.number)
    ended: ServeResult | PreluNetError
    try:
        ended = await serve(setup.options, siblings.report, siblings)
    except PreluNetError as error:
        ended = error
    with suppress(ConnectionError):  # the parent is gone
        await siblings.link.call("ended", ended)
    linked.cancel()
    return ended


async def _run(link: Link) -> None:
    with suppress(Exception):
        await link.run()
    os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: finish the calls in flight, and end
