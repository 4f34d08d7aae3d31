"""Intercept every call: limit the calls in flight, assign a request id, convert errors to a status, log the end."""

import asyncio
import inspect
import random
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from ...errors import DeadlinePassed, UsageError
from ..access import AccessControl
from ..observability.call_context import (
    REQUEST_ID,
    Call,
    Context,
    current_call,
    request_id_from,
)
from ..options import ServerLimits
from .arriving import ArrivingBytes
from .calls import OUR_METHODS, PROBES, CallsInFlight, access_error, record_error

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# A client's deadline passes earlier than the server's copy of it, by at most this much: the call takes time to arrive,
# and gRPC rounds the timeout up when it sends it, by at most 1 %.
_CLOCK_SKEW, _TIMEOUT_ROUNDING = 0.05, 0.01  # seconds, share
_CANCEL_DELAY = 0.1  # seconds in which gRPC cancels the call of a client that has left; it waits for a thread's turn
# A larger message may have at most `_MAX_PARTS` parts; 64 images and 32 scales have about 200. A smaller one is decoded
# in less than a millisecond, whatever its number of parts.
_SMALL_MESSAGE, _MAX_PARTS = 2**14, 1000


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method. Calls of health and reflection are not counted or limited. access: None without tokens."""

    def __init__(
        self,
        calls: CallsInFlight,
        limits: ServerLimits = ServerLimits(),
        arriving: ArrivingBytes | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self._calls = calls
        self._limits = limits
        self._arriving = arriving or ArrivingBytes(limits)
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the called method."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        metadata = handler_call_details.invocation_metadata or ()
        call = Call(path.removeprefix("/"), request_id_from(metadata))
        if self._limits.proxies.networks:
            call.identify = partial(self._limits.proxies.identity, metadata)
        current_call.set(call)
        refusal = access_error(self._access, call, metadata, known=handler is not None)
        counted, exempt = handler is None or path.startswith(OUR_METHODS), path in PROBES
        if counted or refusal is not None:
            refusal = self._calls.begin(call, metadata, exempt=exempt or refusal is not None) or refusal
        if (error := refusal) is not None:

            async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
                async with _errors_to_status(call, context):
                    raise error

            return grpc.stream_stream_rpc_method_handler(refuse)  # can answer any kind of call, before its message
        if handler is None:
            call.status = "UNIMPLEMENTED"  # which gRPC answers
            return None
        calls = self._calls if counted and not exempt else None
        return WrappedMethod(handler, call, self._limits, calls, self._arriving).handler()


class WrappedMethod:
    """The method of one call: decodes messages, so that a malformed one gets our status, and converts its errors.

    calls: admit the call, None if it is exempt from their limit.
    """

    def __init__(
        self,
        handler: Any,
        call: Call,
        limits: ServerLimits = ServerLimits(),
        calls: CallsInFlight | None = None,
        arriving: ArrivingBytes | None = None,
    ) -> None:
        self._calls = calls
        self._receive = partial((arriving or ArrivingBytes(limits)).receive, call)
        self._limits = limits
        self._method = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        self._handler = handler
        self._call = call

    def handler(self) -> Handler:
        """Return the handler for gRPC, which receives messages as bytes.

        The request is always a stream: gRPC itself would wait for the message of a unary call forever.
        """
        serializer = self._handler.response_serializer
        if self._handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._stream, None, serializer)
        return grpc.stream_unary_rpc_method_handler(self._single, None, serializer)

    async def _single(self, received: Any, context: Context) -> Any:
        async with _errors_to_status(self._call, context):
            return await self._method(await self._input(received, context), context)

    async def _stream(self, received: Any, context: Context) -> None:
        async with _errors_to_status(self._call, context):
            answers = self._method(await self._input(received, context), context)
            if not inspect.isasyncgen(answers):  # the method writes its answers itself
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

    async def _input(self, received: AsyncIterator[bytes], context: Context) -> Any:
        """Return the argument of the method: the message, or an iterator over the messages of a stream.

        Only one message of a unary call is read; gRPC holds back further ones and drops them when the call ends.
        """
        if self._calls is not None:
            self._calls.admit(self._call)
        if self._handler.request_streaming:
            messages = _Messages(received, self._receive, self._decode_message, self._limits)
            self._call.message_done = messages.done
            return messages
        try:
            async with asyncio.timeout(self._limits.message_timeout):
                data = await self._receive(context.read())  # not `received`, a generator: abandoning it costs time
        except TimeoutError:
            raise DeadlinePassed(
                f"the message of this call did not arrive within {self._limits.message_timeout:g} s; send all of it "
                "when the call starts"
            ) from None
        if not isinstance(data, bytes):  # end of the stream
            await asyncio.sleep(_CANCEL_DELAY)  # at first, a client that has left looks the same
            raise UsageError("this call has no message; send one")
        return await self._decode_message(data)

    async def _decode_message(self, data: bytes) -> Any:
        if data.startswith(_COMPRESSED):
            data = await asyncio.to_thread(decompressed, data, self._limits.max_message_bytes)
        self._call.message_bytes = len(data)
        self._call.bytes += len(data)
        decode = self._handler.request_deserializer
        if decode is None:
            return data
        if len(data) > _SMALL_MESSAGE and exceeds_part_limit(data, decode(b"").DESCRIPTOR, _MAX_PARTS):
            raise UsageError(
                f"this message of {len(data)} bytes has more than {_MAX_PARTS} fields and numbers; send each image as "
                "its encoded file, in one bytes field"
            )
        try:
            return decode(data)
        except DecodeError:
            raise UsageError(
                "the request cannot be decoded as a message of this method; use this server's proto file, and compress "
                "messages with gzip or deflate if at all"
            ) from None


# Compressed messages arrive as they are (`network.channel_options`). No message of ours begins like one: 0x1f is of
# an unknown type, and 0x78 the field 15, which none has.
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # RFC 1952, 2.3.1; RFC 1950, 2.2


def decompressed(data: bytes, limit: int) -> bytes:
    """Decompress a message, of gzip or deflate, to at most `limit` bytes."""
    inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)  # 32: either kind of header
    try:
        message = inflater.decompress(data, limit)
    except zlib.error as error:
        raise UsageError(f"this message is damaged: it cannot be decompressed ({error})") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise UsageError(f"this message is cut off, or larger than {limit} bytes when it is decompressed")
    return message


class _Messages:
    """The decoded messages of a stream, with a timeout for each, so that an idle stream does not stay in flight.

    The clock runs only while the server waits for a message and no message is in progress. It stands still while the
    server does not read, and while the client may be waiting for an answer. A timeout may be a tenth longer, chosen for
    each stream: a thousand streams that began together must not end together, which takes half a second.
    """

    def __init__(
        self,
        received: AsyncIterator[bytes],
        receive: Callable[[Awaitable[Any]], Awaitable[Any]],
        decode: Callable[[bytes], Awaitable[Any]],
        limits: ServerLimits,
    ) -> None:
        self._received = received
        self._receive = receive
        self._decode = decode
        self._limits = limits
        self._patience = random.uniform(1.0, 1.1)  # noqa: S311 - no secret
        self._begun = False
        self._in_progress = 0
        self._timeout: asyncio.Timeout | None = None  # of the current wait for a message

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        seconds = self._limits.stream_idle_timeout if self._begun else self._limits.message_timeout
        try:
            async with asyncio.timeout(None if self._in_progress else self._patience * seconds) as self._timeout:
                data = await self._receive(anext(self._received))
        except TimeoutError:
            raise DeadlinePassed(
                f"no message arrived within {seconds:g} s, and none is in progress; end a stream that has nothing to "
                "send, and open a new one later (server option --stream-idle-timeout)"
                if self._begun
                else f"the first message of this stream did not arrive within {seconds:g} s; send it at the start"
            ) from None
        finally:
            self._timeout = None
        self._begun = True
        self._in_progress += 1
        return await self._decode(data)

    def done(self) -> None:
        """Record that a message is no longer in progress."""
        self._in_progress -= 1
        if self._timeout is not None and not self._in_progress:
            seconds = self._patience * self._limits.stream_idle_timeout
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)


@asynccontextmanager
async def _errors_to_status(call: Call, context: Context) -> AsyncIterator[None]:
    """End a call with the status of its error, and record the status in `call`."""
    call.peer = context.peer()
    # Not in the initial metadata, which would be sent in a packet of its own.
    context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
    try:
        yield
        call.status = context.code().name if context.code() else "OK"
    except grpc.aio.AbortError:  # the status is already set
        call.status = context.code().name
        raise
    except asyncio.CancelledError:
        call.status = disconnect_status(call, context)
        raise
    except Exception as error:
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
