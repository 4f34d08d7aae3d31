"""What every call goes through: counted and bounded, named by an id, its errors made a status, its end logged."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from prelunet.evaluator.errors import DeadlinePassed, Overloaded, UsageError
from prelunet.evaluator.rpc.status import reason_for, status_of
from prelunet.evaluator.serving.observability.call_context import REQUEST_ID, Call, request_id_from, set_current
from prelunet.evaluator.serving.observability.logs import log_call, log_incident
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ServerLimits

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

OUR_METHODS = ("/prelunet.v1.", "/inference.")  # beginnings of the methods that are ours
# What asks whether the server lives and is ready: who got no answer because it is busy might have it killed.
PROBES = tuple(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady"))
_RETRY_AFTER = 1.0  # seconds, for a call that is one too many; how long the others take, nobody knows
# By how much a client's time is over before the server's clock says so: a call takes a moment on its way, and gRPC
# sends a timeout rounded up, by 1 % at most.
_CLOCK_SKEW, _TIMEOUT_ROUNDING = 0.05, 0.01  # seconds, share
_CANCEL_DELAY = 0.1  # seconds in which gRPC cancels the call of a caller who has left; it takes a thread's turn
# A message of more bytes may have so many parts: 64 images and 32 scales are some 200. Below, any number of parts is
# decoded in less than a millisecond.
_SMALL_MESSAGE, _MAX_PARTS = 2**14, 1000


class CallsInFlight:
    """The calls in flight, of all clients: counted, bounded, and told to metrics and log when they end.

    most: so many may be in flight; metrics: of the server.
    """

    def __init__(self, limit: int = ServerLimits.max_calls, metrics: Metrics | None = None) -> None:
        self.count = 0
        self._limit = limit
        self._metrics = metrics or Metrics()

    def begin(self, call: Call, *, exempt: bool = False) -> bool:
        """Say whether a call may go on; it is in flight until gRPC is done with it, after its answer has been sent.

        always: it may, and takes no other call's place. Called in the task that gRPC runs it in, before its first
        message is read.

        No connection can have all places: gRPC itself begins no more than Limits.max_streams of its calls, an eighth of
        the places as they are by default. Whose connection it is, nobody knows yet here.
        """
        counted = not exempt and self.count < self._limit
        if counted:
            self.count += 1
            self._metrics.calls_now.inc()
        elif not exempt:
            self._metrics.refusals.labels("", "calls").inc()
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        task.add_done_callback(lambda _: self._end(call, counted=counted))
        return counted or exempt

    def _end(self, call: Call, *, counted: bool) -> None:
        call.status = call.status or "CANCELLED"  # its caller left, or its message was too large for gRPC
        seconds = time.monotonic() - call.begun
        # A method of no proto file gets no label: its name is the caller's, who could think of more and more.
        method = call.method if _is_known(call.method) else "unknown"
        self._metrics.calls.labels(method, call.status).inc()
        self._metrics.call_seconds.labels(method).observe(seconds)
        log_call(call, seconds)
        if counted:
            self._metrics.calls_now.dec()
            self.count -= 1  # last: a server that stops waits for this, and would lose the line

    def overloaded_error(self) -> Overloaded:
        """Return the error of a call that is one too many."""
        return Overloaded(f"{self._limit} calls are in flight already. Try again later", _RETRY_AFTER)


def _is_known(method: str) -> bool:
    """Say whether a proto file that is loaded has a method of this name."""
    try:
        found = descriptor_pool.Default().FindMethodByName(method.replace("/", "."))  # type: ignore[no-untyped-call]
    except KeyError:
        return False
    return method == f"{found.containing_service.full_name}/{found.name}"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Gives every call a status by the error table; those of health and reflection are not counted."""

    def __init__(
        self,
        calls: CallsInFlight,
        message_timeout: float = ServerLimits.message_timeout,
        stream_idle_timeout: float = ServerLimits.stream_idle_timeout,
    ) -> None:
        """arrival, stream_idle_timeout: seconds in which messages have to come, as in Limits."""
        self._calls = calls
        self._times = message_timeout, stream_idle_timeout

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wrap the method that is called."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        call = Call(path.removeprefix("/"), request_id_from(handler_call_details.invocation_metadata or ()))
        set_current(call)
        counted = handler is None or path.startswith(OUR_METHODS)
        if counted and not self._calls.begin(call, exempt=path in PROBES):
            return _refusal_handler(call, self._calls.overloaded_error())
        if handler is None:
            call.status = "UNIMPLEMENTED"  # as gRPC says now
            return None
        return _WrappedMethod(handler, call, *self._times).handler()


def _refusal_handler(call: Call, error: Exception) -> Handler:
    """Return a handler that refuses a call before any message of it is read; a stream can answer any kind of call."""

    async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
        async with _errors_to_status(call, context):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)


# By whether requests, and whether responses, are streams: the name of the method, and the handler that gRPC is given.
# It is always one that reads messages itself: gRPC would wait for the only message of a call for ever.
_HANDLER_KINDS = {
    (False, False): ("unary_unary", grpc.stream_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.stream_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class _WrappedMethod:
    """A method of one call: messages are decoded where a bad one gets a status of ours, errors become a status."""

    def __init__(
        self,
        handler: Any,
        call: Call,
        message_timeout: float,
        stream_idle_timeout: float = ServerLimits.stream_idle_timeout,
    ) -> None:
        self._message_timeout = message_timeout
        self._stream_idle_timeout = stream_idle_timeout
        kind, self._make = _HANDLER_KINDS[handler.request_streaming, handler.response_streaming]
        self._method = getattr(handler, kind)
        self._handler = handler
        self._call = call

    def handler(self) -> Handler:
        """Return the handler that gRPC runs instead; it is given the bytes of messages."""
        run: Any = self._stream if self._handler.response_streaming else self._single
        handler: Handler = self._make(run, None, self._handler.response_serializer)
        return handler

    async def _single(self, received: Any, context: Context) -> Any:
        async with _errors_to_status(self._call, context):
            answer = await self._method(await self._input(received, context), context)
            await self._send_request_id(context)  # not earlier: gRPC tries no call again from then on
            return answer

    async def _stream(self, received: Any, context: Context) -> None:
        async with _errors_to_status(self._call, context):
            answers = self._method(await self._input(received, context), context)
            if not inspect.isasyncgen(answers):  # a method that sends its answers itself
                await self._send_request_id(context)
                await answers
                return
            id_sent = False
            async with aclosing(answers):
                async for answer in answers:
                    if not id_sent:
                        await self._send_request_id(context)
                        id_sent = True
                    await context.write(answer)

    async def _input(self, received: AsyncIterator[bytes], context: Context) -> Any:
        """Return what a method is given: the message, or all that come.

        Of a call of one message no other is read; gRPC keeps the rest away and drops it when the call ends.
        """
        if self._handler.request_streaming:
            messages = _Messages(received, self._decode_message, self._message_timeout, self._stream_idle_timeout)
            self._call.message_done = messages.done
            return messages
        try:
            async with asyncio.timeout(self._message_timeout):
                data = await context.read()  # `received` is a generator, which is work to end where it is left
        except TimeoutError:
            raise DeadlinePassed(
                f"the message of this call did not come in {self._message_timeout:g} s; send it whole when the call begins"
            ) from None
        if not isinstance(data, bytes):  # the end
            await asyncio.sleep(_CANCEL_DELAY)  # a caller who has left looks like this at first
            raise UsageError("this call came without a message; send one")
        return self._decode_message(data)

    def _decode_message(self, data: bytes) -> Any:
        self._call.bytes += len(data)
        decode = self._handler.request_deserializer
        if decode is None:
            return data
        if len(data) > _SMALL_MESSAGE and exceeds_part_limit(data, decode(b"").DESCRIPTOR, _MAX_PARTS):
            raise UsageError(
                f"this message of {len(data)} bytes has more than {_MAX_PARTS} fields and numbers; one that is large "
                "should be so because of its images, encoded files as bytes"
            )
        try:
            return decode(data)
        except DecodeError:
            raise UsageError(
                "the bytes of the request are no message of this method; use the proto file of this server and send "
                "messages uncompressed"
            ) from None

    async def _send_request_id(self, context: Context) -> None:
        await context.send_initial_metadata(((REQUEST_ID, self._call.request_id),))


class _Messages:
    """The messages of a stream, decoded; each has to come in time, so that an idle stream does not keep its place.

    Time counts only while the server waits for a message and none is in progress: neither while it reads no further nor
    while the client may be waiting for an answer.
    """

    def __init__(
        self,
        received: AsyncIterator[bytes],
        decode: Callable[[bytes], Any],
        message_timeout: float,
        idle_timeout: float,
    ) -> None:
        """arrival: seconds for the first message; idle_timeout: for each other, from when none is in progress."""
        self._received = received
        self._decode = decode
        self._message_timeout = message_timeout
        self._idle_timeout = idle_timeout
        self._begun = False
        self._in_progress = 0
        self._timeout: asyncio.Timeout | None = None  # of the message that is waited for

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        seconds = self._idle_timeout if self._begun else self._message_timeout
        try:
            async with asyncio.timeout(None if self._in_progress else seconds) as self._timeout:
                data = await anext(self._received)
        except TimeoutError:
            raise DeadlinePassed(
                f"no message came in {seconds:g} s, and none is in progress; end a stream that has nothing to send, "
                "and open another later (--stream-idle-timeout of the server)"
                if self._begun
                else f"the first message of this stream did not come in {seconds:g} s; send it when the stream begins"
            ) from None
        finally:
            self._timeout = None
        self._begun = True
        self._in_progress += 1
        return self._decode(data)

    def done(self) -> None:
        """Note that a message is no longer in progress."""
        self._in_progress -= 1
        if self._timeout is not None and not self._in_progress:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._idle_timeout)


@asynccontextmanager
async def _errors_to_status(call: Call, context: Context) -> AsyncIterator[None]:
    """End a call with the status of its error, and note in `call` which it was."""
    call.peer = context.peer()
    try:
        yield
        call.status = context.code().name if context.code() else "OK"
    except grpc.aio.AbortError:  # a status is set already
        call.status = context.code().name
        raise
    except asyncio.CancelledError:
        call.status = _disconnect_status(call, context)
        raise
    except Exception as error:
        if _is_disconnect(error):
            call.status = _disconnect_status(call, context)
            raise asyncio.CancelledError from None
        status = status_of(error, log_incident(error))
        call.status, call.reason, call.error = status.code.name, reason_for(error), status.details
        try:
            await context.abort(status.code, status.details, (*status.trailing_metadata, (REQUEST_ID, call.request_id)))
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None


def _is_disconnect(error: Exception) -> bool:
    """Say whether an error only tells that nothing can be sent any more; gRPC's UsageError is a mistake of ours."""
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)


def _disconnect_status(call: Call, context: Context) -> str:
    """Return the status of a call whose caller waits no longer: given up, or out of time."""
    remaining = context.time_remaining()
    apart = _CLOCK_SKEW + _TIMEOUT_ROUNDING * (time.monotonic() - call.begun)
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= apart else "CANCELLED"


# How many parts the bytes of a message have, told before they are decoded.
#
# Decoding holds Python's only lock, in whatever thread it runs, and each part becomes an object many times its size: 60
# MB of empty inputs hold up every call for 3 s and take 2.7 GB. A message of ours is large because of its images, and
# those are few parts. Wire format: protobuf.dev/programming-guides/encoding.


_MAX_VARINT_BYTES = 10  # bytes of a number, of 7 bits each
_OPAQUE_TYPES = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def exceeds_part_limit(data: bytes, kind: Descriptor, limit: int) -> bool:
    """Say whether a message has more parts than `limit`: fields at any depth, and numbers in a list of them.

    Takes time by the number of parts up to `limit`, not by the number of bytes. Of bytes that are no message it may say
    either; decoding tells.
    """
    count, place = 0, 0
    open_ = [(len(data), kind)]  # the messages around this place, by their ends
    while open_ and count <= limit:
        end, around = open_[-1]
        if place >= end:
            open_.pop()
            place = end  # not further: what looks like one of our messages may be some bytes of an unknown group
            continue
        count += 1
        tag, place = _varint(data, place)
        match tag & 7:
            case 0:  # a number
                _, place = _varint(data, place)
            case 1:  # of 8 bytes
                place += 8
            case 5:  # of 4 bytes
                place += 4
            case 2:  # as long as it says
                length, place = _varint(data, place)
                field = around.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    open_.append((place + length, field.message_type))
                    continue
                if field is not None and field.type not in _OPAQUE_TYPES:
                    count += length  # numbers, each of a byte or more
                place += length
    return count > limit


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it; one that does not end is cut, as no message has any."""
    number = 0
    for index, byte in enumerate(data[place : place + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, place + index + 1
    return number, place + _MAX_VARINT_BYTES
