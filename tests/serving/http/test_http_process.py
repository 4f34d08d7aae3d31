"""`prelunet serve` as a process without HTTP, and a port without file descriptors."""

import asyncio
import errno
import select
import socket
import subprocess
import sys
from pathlib import Path

from prelunet.evaluator.client import Client
from prelunet.evaluator.serving.http.listener import ConnectionLimits, Listener
from prelunet.evaluator.serving.http.metrics import metrics_app
from tests.serving.event_loop import async_test
from tests.serving.test_serving_process import model, serving  # noqa: F401 - `model` is a fixture

WITHOUT_FILES = """
import asyncio, os, resource, socket
from prelunet.evaluator.serving.http.listener import ConnectionLimits, Listener
from prelunet.evaluator.serving.http.metrics import metrics_app
from prelunet.evaluator.serving.observability.logs import configure_logging

async def main():
    app = metrics_app(lambda _: (b"", ""), lambda: True)
    listener = Listener(app, "127.0.0.1", 0, ConnectionLimits(9), option="--metrics-port")
    listener.open()
    client = socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    await asyncio.sleep(1.5)
    print(listener.connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while not listener.connections:
        await asyncio.sleep(0.01)
    await listener.close_within(1)

configure_logging()
asyncio.run(main())
"""


def test_when_no_file_descriptor_is_left_the_log_says_so_and_connections_wait() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0\n"
    assert 1 <= result.stderr.count("cannot accept a connection: Too many open files") <= 3, result.stderr


def test_without_the_option_there_is_no_http(model: Path) -> None:  # noqa: F811
    with serving(model, "--lame-duck", "0") as (_, line, address), Client(address) as client:
        assert client.ready()
        assert "http on" not in line


@async_test
async def test_a_client_that_connects_while_a_port_closes_is_refused_and_never_reset() -> None:
    app = metrics_app(lambda _: (b"", ""), lambda: True)
    listener = Listener(app, "127.0.0.1", 0, ConnectionLimits(9), option="--metrics-port")
    listener.open()
    address = ("127.0.0.1", int(listener.address.rpartition(":")[2]))
    closing = asyncio.create_task(listener.close())
    await asyncio.sleep(0)
    with socket.socket() as late:
        late.setblocking(False)
        late.connect_ex(address)
        assert not select.select([], [late], [], 0.2)[1], "the port is open still, but takes no new connection"
        await closing
        assert select.select([], [late], [], 10)[1]  # when the kernel has sent the SYN again
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


@async_test
async def test_a_connection_that_is_accepted_after_an_abort_does_not_keep_the_port_from_closing() -> None:
    app = metrics_app(lambda _: (b"", ""), lambda: True)
    listener = Listener(app, "127.0.0.1", 0, ConnectionLimits(9), option="--metrics-port")
    listener.open()
    with socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))):  # not accepted yet
        listener.abort()
        await asyncio.wait_for(listener.close(), 5)
    assert listener.connections == 0
