"""An HTTP server for Prometheus metrics: `GET /metrics` and nothing else.

It runs on the event loop and limits the size of a request, its total time and the number of connections. The servers of
the standard library and of prometheus-client wait for slow clients line by line, and for any number of them.
"""

import asyncio
import socket
import time
from collections.abc import Callable

from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.serving.network import explain_bind_error, host_port, is_wildcard

MAX_REQUEST = 8192  # bytes of request line and headers
MAX_CONNECTIONS = 16  # at once; Prometheus needs one
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_TIMEOUT = 10.0  # seconds to receive a request and send its response
CLOSE_TIMEOUT = 1.0  # seconds to finish responses when the port closes; they take some milliseconds
_POLL_INTERVAL = 0.01  # seconds between checks for open connections


class MetricsServer:
    """The HTTP server of the metrics.

    text: returns the current metrics, called in a thread; request_timeout: in seconds.
    """

    def __init__(self, text: Callable[[], bytes], *, request_timeout: float = REQUEST_TIMEOUT) -> None:
        self._text = text
        self._request_timeout = request_timeout
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, bool] = {}  # whether the server waits for the client; oldest first
        self._answering = 0
        self.address = ""

    async def open(self, host: str, port: int) -> None:
        """Listen on the port; 0 selects a free one. Raises EnvironmentFault if that fails."""
        try:
            if is_wildcard(host) and socket.has_dualstack_ipv6():
                # asyncio itself would listen on IPv6 only, where gRPC listens on both.
                listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
                self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_REQUEST)
            else:
                self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST)
        except OSError as error:
            reason = explain_bind_error(host, port, "--metrics-port")
            raise EnvironmentFault(f"cannot listen on {host_port(host, port)} for metrics: {reason}") from error
        self.address = host_port(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close the port, finish responses in progress, and abort all other connections."""
        if self._server is None:
            return
        self._server.close()
        end = time.monotonic() + CLOSE_TIMEOUT
        while self._answering and time.monotonic() < end:
            await asyncio.sleep(_POLL_INTERVAL)
        for client in self._clients:
            client.transport.abort()
        while self._clients:
            await asyncio.sleep(_POLL_INTERVAL)

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._clients)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        if not self._make_room():
            writer.transport.abort()
            return
        self._clients[writer] = True
        try:
            async with asyncio.timeout(self._request_timeout):
                request = await reader.readuntil(b"\r\n\r\n")
                self._answering += 1
                try:
                    self._clients[writer] = False
                    answer = await self._answer(request)
                    self._clients[writer] = True
                    writer.write(answer)
                    writer.close()
                    await writer.wait_closed()  # otherwise an unread response would stay in memory forever
                finally:
                    self._answering -= 1
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            writer.transport.abort()  # no valid request in time
        finally:
            self._clients.pop(writer, None)
            writer.close()

    def _make_room(self) -> bool:
        """Return whether one more connection fits, after aborting the oldest that the server waits for if necessary.

        Otherwise idle connections could lock out everybody else.
        """
        if self.connections < MAX_CONNECTIONS:
            return True
        oldest = next((client for client, waiting in self._clients.items() if waiting), None)
        if oldest is None:
            return False
        del self._clients[oldest]
        oldest.transport.abort()
        return True

    async def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", b"not found; the metrics are at /metrics\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"method not allowed; use GET\n", "Allow: GET")
        return _response("200 OK", await asyncio.to_thread(self._text), f"Content-Type: {CONTENT_TYPE}")


def _response(status: str, body: bytes, header: str = "Content-Type: text/plain") -> bytes:
    lines = (f"HTTP/1.1 {status}", header, f"Content-Length: {len(body)}", "Connection: close", "", "")
    return "\r\n".join(lines).encode() + body
