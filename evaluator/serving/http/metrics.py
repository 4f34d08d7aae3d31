"""The port of Prometheus metrics, `GET /metrics`, and probes, `GET /ready` and `/liveness`, which need no TLS."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .listener import Connection, ConnectionLimits

TIMEOUT = 10.0  # seconds to receive a request, to answer it, and for the client to read the response
METRICS_LIMITS = ConnectionLimits(16, 2**13, TIMEOUT, TIMEOUT)  # Prometheus needs one connection
METRICS_CLOSE_TIMEOUT = 1.0  # seconds to finish responses when the port closes; they take some milliseconds


def metrics_app(
    text: Callable[[str], tuple[bytes, str]], ready: Callable[[], bool], timeout: float = TIMEOUT
) -> ASGIApp:
    """Return the application of the port.

    text: returns the current metrics and their media type, given the header `Accept`, called in a thread; ready:
    whether the server accepts calls; timeout: in seconds.
    """

    async def metrics(request: Request) -> Response:
        content, media_type = await asyncio.to_thread(text, request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    async def readiness(_request: Request) -> Response:
        text, status = ("ready\n", 200) if ready() else ("not ready\n", 503)
        return PlainTextResponse(text, status)

    async def liveness(_request: Request) -> Response:
        return PlainTextResponse("live\n")

    routes = [Route("/metrics", metrics), Route("/ready", readiness), Route("/liveness", liveness)]
    router = Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        connection.begin()
        try:
            async with asyncio.timeout(timeout):
                await router(scope, receive, send_and_close)
        except (TimeoutError, asyncio.CancelledError):
            connection.transport.abort()
        finally:
            connection.end()

    return app
