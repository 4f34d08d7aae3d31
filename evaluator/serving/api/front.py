"""What every gRPC call passes: its limits, its token, its message, the status of its error, and its log line."""

import asyncio
import inspect
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from ...errors import DeadlinePassed, NotReady, UsageError
from ..calls import OUR_METHODS, PROBES, CallsInFlight, record_error
from ..observability.call_context import REQUEST_ID, Call, Context, Metadata

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# A client's deadline passes earlier than the server's copy of it, by at most this much: the call takes time to arrive,
# and gRPC rounds the timeout up when it sends it, by at most 1 %.
_CLOCK_SKEW, _TIMEOUT_ROUNDING = 0.05, 0.01  # seconds, share
_CANCEL_DELAY = 0.1  # seconds in which gRPC cancels the call of a client that has left; it waits for a thread's turn
# A larger message may have at most `_MAX_PARTS` parts; 64 images and 32 scales have about 200. A smaller one is decoded
# in less than a millisecond, whatever its number of parts.
_SMALL_MESSAGE, _MAX_PARTS = 2**14, 1000
# Seconds after which refused callers may try again. Of gRPC's five attempts, one may meet a server that stops, and then
# the port is closed; the others outlast 15 s of loading.
_RETRY_AFTER_STOP, _RETRY_AFTER_LOADING = 1.0, 5.0
# Compressed messages arrive as they are (`network.channel_options`). No message of ours begins like one: 0x1f is of
# an unknown type, and 0x78 the field 15, which none has.
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # RFC 1952, 2.3.1; RFC 1950, 2.2


class Front(grpc.GenericRpcHandler):
    """The services of a gRPC server, with what every call of theirs passes. Health and reflection have no limits.

    refusal_message: the error of calls of our methods, except probes; empty while they are answered; stopping: they are
    refused because the server stops; refused_count: number of these; refusals_released: they wait until it is set.
    """

    def __init__(self, calls: CallsInFlight) -> None:
        self.calls = calls
        self._services: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, Handler] = {}  # by path, those that have been called
        self.refusal_message = ""
        self.stopping = False
        self.refused_count = 0
        self.refusals_released = asyncio.Event()
        self.refusals_released.set()

    def add_generic_rpc_handlers(self, services: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add services, which come before those added earlier; called by gRPC's generated code."""
        self._services[:0] = services
        self._methods.clear()

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """Do nothing, like grpc.aio's server."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler of a method, also of one that does not exist: its calls are logged, too."""
        path = handler_call_details.method
        if (known := self._methods.get(path)) is not None:
            return known
        candidates = (each.service(handler_call_details) for each in self._services)
        handler = next((each for each in candidates if each is not None), None)
        wrapped = Method(self, path, handler).handler()
        if handler is not None:
            self._methods[path] = wrapped
        return wrapped

    async def refuse(self, path: str) -> None:
        """Raise NotReady if calls of a method are refused now."""
        if not path.startswith(OUR_METHODS) or path in PROBES:
            return
        refusal = NotReady(self.refusal_message, _RETRY_AFTER_STOP if self.stopping else _RETRY_AFTER_LOADING)
        if self.stopping:
            self.refused_count += 1
            self.calls.metrics.refused["stopping"].inc()
        await self.refusals_released.wait()
        raise refusal


class Method:
    """A method behind what every call passes. handler: of gRPC's generated code, None if there is no such method.

    Messages are decoded here, so that a malformed one gets our status.
    """

    def __init__(self, front: Front, path: str, handler: Any) -> None:
        self._front, self._path, self._handler = front, path, handler
        self._known = handler is not None
        if handler is not None:
            self._function = (
                handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
            )
            self._decode = handler.request_deserializer
        self._limits, self._arriving = front.calls.limits, front.calls.arriving

    def handler(self) -> Handler:
        """Return the handler for gRPC, which receives messages as bytes.

        The request is always a stream: gRPC itself would wait for the message of a unary call forever.
        """
        if not self._known or self._handler.response_streaming:  # a stream of answers can also end without one
            return grpc.stream_stream_rpc_method_handler(self._answer, None, _serialized)
        return grpc.stream_unary_rpc_method_handler(self._answer)

    async def _answer(self, received: Any, context: Context) -> Any:
        """Answer a call: with the message that this returns, or with those that are written meanwhile."""
        call = self._new_call(context)
        try:
            self._front.calls.begin(call, known=self._known)
            if self._front.refusal_message:
                await self._front.refuse(self._path)
            if not self._known:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no such method")
            answer = self._function(await self._input(call, received, context), context)
            if not inspect.isasyncgen(answer):  # a method that streams may also write its answers itself
                return _serialized(await answer)
            async with aclosing(answer):
                async for each in answer:
                    await context.write(each)
        except BaseException as error:
            if await _ended_by(call, context, error):
                raise
        finally:
            if not call.status:
                call.status = context.code().name if context.code() else "OK"

    def _new_call(self, context: Context) -> Call:
        remaining = context.time_remaining()
        metadata = cast("Metadata", context.invocation_metadata() or ())  # names are in lower case
        call = self._front.calls.arrived(self._path[1:], context.peer(), metadata)
        if remaining is not None:
            call.deadline = call.begun + remaining
        # Not in the initial metadata, which would be sent in a packet of its own.
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        return call

    async def _input(self, call: Call, received: AsyncIterator[bytes], context: Context) -> Any:
        """Return the argument of the method: the message, or an iterator over the messages of a stream.

        Only one message of a unary call is read; gRPC holds back further ones and drops them when the call ends.
        """
        if self._handler.request_streaming:
            return self._messages(call, received)
        seconds = self._limits.message_timeout
        try:
            data = await self._arriving.receive(call, context.read(), seconds)  # `received`, a generator, costs time
        except TimeoutError:
            raise DeadlinePassed(
                f"the message of this call did not arrive within {seconds:g} s; send all of it when the call starts"
            ) from None
        if not isinstance(data, bytes):  # end of the stream
            await asyncio.sleep(_CANCEL_DELAY)  # at first, a client that has left looks the same
            raise UsageError("this call has no message; send one")
        return await self._decoded(call, data)

    async def _messages(self, call: Call, received: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
        """Yield the messages of a stream, with a timeout for each, so that an idle stream does not stay in flight.

        A timeout may be a tenth longer, chosen for each stream: a thousand streams that began together must not end
        together, which takes half a second.
        """
        patience, seconds, begun = random.uniform(1.0, 1.1), self._limits.message_timeout, False  # noqa: S311 - no secret
        while True:
            try:  # without a variable, which would hold a message until the next arrives
                yield await self._decoded(
                    call, await self._arriving.receive(call, anext(received), patience * seconds), in_stream=True
                )
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlinePassed(
                    f"no message arrived within {seconds:g} s, and none is in progress; end a stream that has nothing "
                    "to send, and open a new one later (server option --stream-idle-timeout)"
                    if begun
                    else f"the first message of this stream did not arrive within {seconds:g} s; send it at the start"
                ) from None
            begun, seconds = True, self._limits.stream_idle_timeout

    async def _decoded(self, call: Call, data: bytes, *, in_stream: bool = False) -> Any:
        call.in_progress += in_stream
        if data.startswith(_COMPRESSED):
            data = await self._arriving.decompressed(data)
        call.message_bytes = len(data)
        call.bytes += len(data)
        if self._decode is None:
            return data
        if len(data) > _SMALL_MESSAGE and exceeds_part_limit(data, self._decode(b"").DESCRIPTOR, _MAX_PARTS):
            raise UsageError(
                f"this message of {len(data)} bytes has more than {_MAX_PARTS} fields and numbers; send each image as "
                "its encoded file, in one bytes field"
            )
        try:
            return self._decode(data)
        except DecodeError:
            raise UsageError(
                "the request cannot be decoded as a message of this method; use this server's proto file, and compress "
                "messages with gzip or deflate if at all"
            ) from None


async def _ended_by(call: Call, context: Context, error: BaseException) -> bool:
    """Note the error that ends a call; return whether gRPC's handler should raise it.

    Otherwise ends the call with the error's status. Nothing here may raise the error itself, which would then refer to
    this frame, and that to it: a cycle that keeps an image alive.
    """
    if isinstance(error, asyncio.CancelledError):
        call.status = disconnect_status(call, context)
        return True
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):  # the status is already set
        return True
    # Most errors of gRPC only mean that the client is gone; its UsageError is a bug of ours.
    if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
        call.status = disconnect_status(call, context)
        raise asyncio.CancelledError from None
    status = record_error(call, error)
    try:
        await context.abort(status.code, status.details, (*status.trailing_metadata, (REQUEST_ID, call.request_id)))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def disconnect_status(call: Call, context: Context) -> str:
    """Return the status of a call whose client no longer waits: cancelled or past its deadline."""
    remaining = context.time_remaining()
    tolerance = _CLOCK_SKEW + _TIMEOUT_ROUNDING * (time.monotonic() - call.begun)
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= tolerance else "CANCELLED"


def _serialized(answer: Any) -> Any:
    return answer if answer is None or isinstance(answer, bytes) else answer.SerializeToString()


# Count the parts of a message before decoding it.
#
# Decoding holds the GIL, in whatever thread it runs, and each part becomes an object many times its encoded size: 60 MB
# of empty inputs block every call for 3 s and take 2.7 GB. A legitimate message is large because of its images, which
# are few parts. Wire format: protobuf.dev/programming-guides/encoding.


_MAX_VARINT_BYTES = 10  # with 7 bits of the number in each
_OPAQUE_TYPES = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def exceeds_part_limit(data: bytes, kind: Descriptor, limit: int) -> bool:
    """Return whether a message has more than `limit` parts: fields at any depth, and numbers in packed lists.

    Takes time proportional to the number of parts, up to `limit`, not to the number of bytes. The result for malformed
    bytes is arbitrary; decoding reports them.
    """
    count, offset = 0, 0
    open_ = [(len(data), kind)]  # (end, type) of each message that encloses the offset
    while open_ and count <= limit:
        end, enclosing = open_[-1]
        if offset >= end:
            open_.pop()
            offset = end  # not beyond: the apparent message may be bytes of an unknown group
            continue
        count += 1
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:  # varint
                _, offset = _varint(data, offset)
            case 1:  # 8 bytes
                offset += 8
            case 5:  # 4 bytes
                offset += 4
            case 2:  # length-delimited
                length, offset = _varint(data, offset)
                field = enclosing.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    open_.append((offset + length, field.message_type))
                    continue
                if field is not None and field.type not in _OPAQUE_TYPES:
                    count += length  # packed numbers, each of at least one byte
                offset += length
    return count > limit


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it; an overlong one, invalid in any message, is cut."""
    number = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, offset + index + 1
    return number, offset + _MAX_VARINT_BYTES
