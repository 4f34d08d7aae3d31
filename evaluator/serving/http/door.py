"""The second door: HTTP requests get the limits, tokens, deadlines, log lines and metrics of gRPC calls."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from ...errors import DeadlinePassed, Overloaded, PermissionDenied, UsageError, error_status
from ..calls import CallsInFlight, record_error
from ..network import peer_name
from ..observability.call_context import REQUEST_ID, Call
from ..options import ServerLimits
from ..proxies import parse_address
from .listener import Connection

TIMEOUT_HEADER = "x-request-timeout"  # seconds from the arrival of the headers to the answer
DEFAULT_TIMEOUT, MAX_TIMEOUT = 60.0, 3600.0  # seconds
JSON = "application/json"
_Timeout: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
_COMPRESSIONS = ("gzip", "deflate")


class JsonResponse(Response):
    """A response in JSON. content: plain data or structs."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        """Return the content as JSON; NaN, which JSON does not have, is null."""
        return msgspec.json.encode(content)


class InferenceError(Struct, forbid_unknown_fields=True):
    """What is wrong, and how to fix it."""

    error: str


class Error(Struct, forbid_unknown_fields=True):
    """What is wrong, and how to fix it.

    code: name of the gRPC status; reason: as in google.rpc.ErrorInfo, e.g. IMAGE_ERROR; request_id: as the header
    x-request-id.
    """

    error: str
    code: str
    reason: str
    request_id: str


class HttpCall(Struct):
    """A request that has been admitted. call: has its deadline; parameters: of its path; body: all, decompressed."""

    call: Call
    parameters: dict[str, str]
    query: QueryParams
    headers: Headers
    body: bytes

    def take_body(self) -> bytes:
        """Return the body, which is not kept: an image may wait for long."""
        body, self.body = self.body, b""
        return body


Endpoint: TypeAlias = Callable[[HttpCall], Awaitable[Response]]


class HttpDoor:
    """The ASGI application of the HTTP port.

    router: of the routes, whose endpoints are plain or made by `endpoint_of`; host_names: that requests may name
    besides addresses, also as *.example.org; ready: whether the server accepts new work, as reported by health. While
    it does not, each response closes its connection, so that the client's next request may reach another server.
    """

    def __init__(
        self, calls: CallsInFlight, host_names: Sequence[str] = (), ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.router, self.ready = Router(redirect_slashes=False), ready
        self._calls, self._limits, self._arriving = calls, calls.limits, calls.arriving
        self._host_names = frozenset(name.lower() for name in ("localhost", *host_names))
        self._domains = tuple(name[1:] for name in self._host_names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        connection: Connection = scope["state"]["connection"]
        headers = Headers(scope=scope)
        call = self._calls.arrived("unknown", peer_name(*(scope["client"] or ("", 0))), headers.items())
        scope.update({"app": self, "call": call})  # `app`: the router raises errors
        sending = _Sending(send, call, connection, self._limits, self.ready)
        connection.begin()
        try:
            self._check_head(scope, headers)
            await self.router(scope, receive, sending.send)
        except (asyncio.CancelledError, ClientDisconnect):
            call.status = "CANCELLED"  # the client has left, or the server cuts off its calls
        except Exception as error:
            if call.method == "unknown":
                self._calls.record(call)
            response = error_response(call, error, v2=scope["path"].startswith("/v2"))
            await response(scope, receive, sending.send)
        finally:
            connection.end()

    def _check_head(self, scope: Scope, headers: Headers) -> None:
        """Refuse requests that another program might take for two, or that a web page sends in a foreign name."""
        if scope["http_version"] not in {"1.0", "1.1"}:
            raise HTTPException(505, "this server speaks HTTP/1.1", {"Connection": "close"})
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.max_metadata:
            raise HTTPException(431, f"the headers exceed this server's limit of {self._limits.max_metadata} bytes")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise HTTPException(400, "a body has either a length or chunks, not both", {"Connection": "close"})
        host = headers.get("host", "localhost").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        # No attacker's name server can redirect an address (DNS rebinding).
        known = name in self._host_names or name.endswith(self._domains)
        if not known and parse_address(name.strip("[]")) is None:
            raise HTTPException(
                421, f"this server is not known as '{name[:100]}'; its operator can allow it: --http-host-names"
            )
        if scope["method"] not in {"GET", "HEAD"} and _is_of_another_site(headers):
            raise PermissionDenied(
                "a web page of another site may not call this server. If it is this server's own page behind a proxy, "
                "let the proxy use HTTPS, or pass on the header Host unchanged"
            )

    def endpoint_of(self, method: str, answer: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a route that does what a gRPC method does, with its scope and limits.

        method: as in "prelunet.v1.PreluNetService/Classify".
        """

        async def endpoint(request: Request) -> Response:
            call: Call = request.scope["call"]
            connection: Connection = request.scope["state"]["connection"]
            call.method = method
            self._calls.begin(call)
            call.deadline = call.begun + _timeout(request.headers)
            content = await self._content(call, request)
            admitted = HttpCall(call, request.path_params, request.query_params, request.headers, content)
            del content
            try:
                connection.cancel_if_lost()
                async with asyncio.timeout_at(call.deadline):  # of time.monotonic(), which is the loop's clock too
                    response = await answer(admitted)
            except TimeoutError:
                continues = "; the model is still being loaded or unloaded" if "RepositoryModel" in method else ""
                raise DeadlinePassed(
                    f"the time for this request is over{continues}; allow more in the header {TIMEOUT_HEADER}"
                ) from None
            finally:
                connection.answering = None
            call.status = "OK"
            return response

        return endpoint

    async def _content(self, call: Call, request: Request) -> bytes:
        """Return the body of a request, decompressed."""
        seconds = min(self._limits.message_timeout, call.deadline - time.monotonic())
        try:
            content: bytes = await self._arriving.receive(call, _read(request, self._limits.max_message_bytes), seconds)
        except TimeoutError:
            raise DeadlinePassed(f"the body of this request did not arrive within {seconds:g} s") from None
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding in _COMPRESSIONS:
            content = await self._arriving.decompressed(content)
        elif encoding != "identity":
            raise HTTPException(415, f"Content-Encoding should be one of {', '.join(_COMPRESSIONS)}")
        call.bytes = call.message_bytes = len(content)
        return content


async def _read(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises HTTPException if it is too large, at once if its length is known."""
    too_large = HTTPException(413, f"the body exceeds this server's limit of {limit} bytes")
    if int(request.headers.get("content-length", "0")) > limit:  # h11 has checked the number
        raise too_large
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise too_large
    return bytes(data)


class _Sending:
    """Sends a response: in time, with the headers that all responses have.

    It closes the connection if the server is not ready, unless its client still sends the body: many would not read it.
    """

    def __init__(
        self, send: Send, call: Call, connection: Connection, limits: ServerLimits, ready: Callable[[], bool]
    ) -> None:
        self._send, self._call, self._connection, self._ready = send, call, connection, ready
        self._seconds = limits.message_timeout
        self._headers = [(REQUEST_ID.encode(), call.request_id.encode()), (b"x-content-type-options", b"nosniff")]
        self._head: Message | None = None  # to be sent with the first part of the body

    async def send(self, message: Message) -> None:
        """Send a part of a response; return once the client has read most of it."""
        if message["type"] == "http.response.start":
            closes = self._connection.body_received and not self._ready()
            close = [(b"connection", b"close")] if closes else []
            self._head = {**message, "headers": [*message["headers"], *self._headers, *close]}
            return
        try:
            with self._connection.batch:
                if self._head is not None:
                    await self._send(self._head)
                    self._head = None
                await self._send({**message, "more_body": True})
            if self._connection.flow.write_paused:
                async with asyncio.timeout(self._seconds):
                    await self._connection.flow.drain()
            await self._send({"type": "http.response.body", "more_body": message.get("more_body", False)})
        except TimeoutError:
            self._call.status = "CANCELLED"
            self._connection.transport.abort()


# Errors of HTTP itself: our text for the router's, and gRPC's words for the status.
_TEXTS = {
    "Not Found": "no such path; GET /openapi.json lists all",
    "Method Not Allowed": "no such method; the header Allow lists this path's",
}
_CODES = {404: "NOT_FOUND", 413: "RESOURCE_EXHAUSTED"}


def error_response(call: Call, error: Exception, *, v2: bool) -> Response:
    """Return the response for an error, and note the error. v2: in the form of the Open Inference Protocol."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        call.status, call.error = _CODES.get(status, "INVALID_ARGUMENT"), _TEXTS.get(error.detail, error.detail)
    else:
        record_error(call, error)
        status = error_status(error).http_status
        if isinstance(error, Overloaded) and error.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    content = InferenceError(call.error) if v2 else Error(call.error, call.status, call.reason, call.request_id)
    return JsonResponse(content, status, headers)


def _is_of_another_site(headers: Headers) -> bool:
    """Return whether a page of another origin sent a request; no browser omits both headers from one that changes data.

    Browsers send `Sec-Fetch-Site` to HTTPS and to this machine, and it is right whatever a proxy makes of `Host`.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in {"same-origin", "none"}
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _timeout(headers: Headers) -> float:
    """Return the seconds that a request may take."""
    text = headers.get(TIMEOUT_HEADER, str(DEFAULT_TIMEOUT))
    try:
        return msgspec.convert(text, _Timeout, strict=False)
    except msgspec.ValidationError:
        raise UsageError(
            f"header {TIMEOUT_HEADER} should be a number of seconds up to {MAX_TIMEOUT:g}: '{text[:100]}'"
        ) from None
