"""One of several processes that serve the same models."""

import asyncio
import mmap
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace

from ...errors import PreluNetError
from ..lifecycle import ServeResult, serve
from ..observability.logs import configure_logging, flush
from ..scheduling.shared_cores import SharedCores
from .link import Link
from .siblings import Siblings


def work(descriptor: int, notes: int) -> None:
    """Serve until the parent says so or is gone. descriptor: of the socket to it; notes: of those of `SharedCores`."""
    ended = asyncio.run(_work(socket.socket(fileno=descriptor), mmap.mmap(notes, 0)))
    flush()
    if isinstance(ended, ServeResult) and ended.stuck:
        os._exit(0)  # a thread hangs; exiting normally would wait for it


async def _work(end: socket.socket, notes: mmap.mmap) -> ServeResult | PreluNetError:
    siblings = Siblings()
    await siblings.link.open(end)
    linked = asyncio.create_task(_run(siblings.link))
    siblings.setup = setup = await siblings.link.call("setup")
    configure_logging(setup.log_format, setup.log_level, process=setup.number)
    ended: ServeResult | PreluNetError
    try:
        queue = replace(setup.options.queue, cores=SharedCores(notes, setup.number))
        ended = await serve(replace(setup.options, queue=queue), siblings.report, siblings)
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
