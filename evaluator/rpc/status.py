"""Errors on the wire: ours to a gRPC status and back to the same class.

A status carries a google.rpc.ErrorInfo (domain "prelunet", reason as "IMAGE_ERROR"), because several errors share a
status code and a client should not have to read messages; where it is known when to try again, a google.rpc.RetryInfo
too. Server and client share this module, so that the way there
and the way back cannot differ.
"""

import re

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from prelunet.evaluator.errors import (
    ERROR_STATUSES,
    DatasetError,
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    NotReady,
    Overloaded,
    PreluNetError,
    UsageError,
    error_status,
)

DOMAIN = "prelunet"
MAX_MESSAGE_BYTES = (
    64 * 2**20
)  # bytes; twice the largest image, so that one slightly too large gets our message, not gRPC's
_MAX_TEXT = 1200  # bytes: texts quote the caller, and a status travels twice in trailers of less than 8 KiB

# Whose text is about what the caller sent. The others may name files of the server, so their text stays in its log.
_CLIENT_VISIBLE = (UsageError, ImageError, DatasetError, ModelNotFound, Overloaded, DeadlinePassed, NotReady)


def _reason(kind: type[PreluNetError]) -> str:
    """Return the name of an error class as google.rpc.ErrorInfo wants it: ImageError → IMAGE_ERROR."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


_ERROR_CLASSES = {_reason(kind): kind for kind in ERROR_STATUSES}


def is_client_visible(error: BaseException) -> bool:
    """Say whether the error's text speaks only of what the caller sent."""
    return isinstance(error, _CLIENT_VISIBLE)


def client_message(error: BaseException, incident: str) -> str:
    """Return what a caller may read of an error; incident: as for `status_of`."""
    if is_client_visible(error):
        return str(error).encode(errors="replace")[:_MAX_TEXT].decode(errors="ignore")
    name = error_status(error).grpc_status
    return f"{_WITHOUT_DETAILS.get(name, 'an error of the server')}; its log has the details under id {incident}"


def reason_for(error: BaseException) -> str:
    """Return the machine-readable name of an error's row in the table, as "IMAGE_ERROR"; empty for our mistakes."""
    return _reason(_table_row(error)) if isinstance(error, PreluNetError) else ""


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    code: grpc.StatusCode = getattr(grpc.StatusCode, error_status(error).grpc_status)
    return code


def status_of(error: BaseException, incident: str) -> grpc.Status:
    """Return the gRPC status of an error.

    incident: the id under which the log holds an error whose text is not for callers.
    """
    status = Status(code=code_of(error).value[0], message=client_message(error, incident))
    if reason := reason_for(error):
        status.details.append(_packed(ErrorInfo(reason=reason, domain=DOMAIN)))
    if isinstance(error, Overloaded) and error.retry_after is not None:
        wait = Duration()
        wait.FromMilliseconds(round(1000 * error.retry_after))
        status.details.append(_packed(RetryInfo(retry_delay=wait)))
    told: grpc.Status = rpc_status.to_status(status)
    return told


_WITHOUT_DETAILS = {
    "FAILED_PRECONDITION": "the served model file is at fault",
    "UNAVAILABLE": "the server's machine is at fault; try again later, or another server",
    "RESOURCE_EXHAUSTED": "the device has too little memory for a view of this image; ask for smaller scales",
    "CANCELLED": "the server stopped before the answer",
}


def _table_row(error: PreluNetError) -> type[PreluNetError]:
    """Return the class of the error table that this error belongs to."""
    return next((kind for kind in type(error).__mro__ if kind in ERROR_STATUSES), PreluNetError)


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def error_from(call: grpc.RpcError, address: str) -> PreluNetError:
    """Return our error for a failed call. address: the server's, named where the text alone would not help."""
    code, text = call.code(), call.details() or ""
    if (told := error_for_reason(*_error_info(call), text)) is not None:
        return told
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:  # gRPC's own words
        if text.startswith("CLIENT: Received"):  # found out here, in what the server sent
            return UsageError(f"{address}: {_RESPONSE_TOO_LARGE} ({text})")
        return ImageError(f"{address}: the message is above the server's limit ({text}). Send a smaller image")
    if code == grpc.StatusCode.UNAVAILABLE:
        return EnvironmentFault(f"{address}: {_explain_unavailable(text)} ({text})")
    if code in _CLIENT_SIDE:
        kind, what = _CLIENT_SIDE[code]
        return kind(f"{address}: {what} ({text})")
    return PreluNetError(f"{address}: {code.name}: {text}")


_RESPONSE_TOO_LARGE = (
    "the answer is larger than this client takes. Ask for less (a smaller `top_k`, no heat map); a client of your own "
    "takes more with the channel option `grpc.max_receive_message_length`"
)

# What gRPC itself says when no status of ours arrives.
_CLIENT_SIDE: dict[grpc.StatusCode, tuple[type[PreluNetError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlinePassed, "no answer in time; give it more time (--timeout)"),
    grpc.StatusCode.UNIMPLEMENTED: (EnvironmentFault, "a gRPC server answers there, but not prelunet's"),
    grpc.StatusCode.CANCELLED: (Interrupted, "the call was broken off, as by a server that stops; try again"),
    grpc.StatusCode.UNKNOWN: (EnvironmentFault, "no answer of prelunet's; is it an address like 127.0.0.1:50051?"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (Overloaded, "the server has too much to do; try later"),
}

# How gRPC (1.81) begins where no connection could be made: one address of several, or the only one.
_NO_CONNECTION = ("connections to all backends failing", "failed to connect to all addresses")
_NOT_HTTP2 = "Failed parsing HTTP/2"
# What it says of an UNAVAILABLE of its own, and what that means; the first that fits.
_UNAVAILABLE = (
    ("errors resolving", "no machine of that name is known; is the address right?"),
    (_NOT_HTTP2, "what listens there is no gRPC server; is it another port?"),
    (
        "Connection refused",
        "nothing listens there: connection refused. Start a server with `prelunet serve --model NAME=MODEL.onnx`, or "
        "try again once it has started",
    ),
    ("No such file", "nothing listens there. Start a server, or try again once it has started"),
    (
        "Connection reset",
        "the connection was closed by the other side, as by a server that stops or has all the connections that it "
        "takes; try again",
    ),
    ("Socket closed", "the connection was closed before the answer, as by a server that stops; try again"),
    ("GOAWAY", "the server ended the connection before the answer, as one does that stops; try again"),
    ("ping timeout", "the server's machine does not answer any more; try again"),
    *(
        (beginning, "no connection could be made; is the address right, and the machine up?")
        for beginning in _NO_CONNECTION
    ),
)


def _explain_unavailable(text: str) -> str:
    """Return what an UNAVAILABLE means that has no status of ours. text: gRPC's own."""
    found = (words for said, words in _UNAVAILABLE if said in text)
    return next(found, "the call was broken off, or there is no way to the server; try again")


def is_unreachable(call: grpc.RpcError) -> bool:
    """Say whether a call failed because no server could be reached, so that none has seen it."""
    text = call.details() or ""
    unavailable = call.code() == grpc.StatusCode.UNAVAILABLE
    return unavailable and text.startswith(_NO_CONNECTION) and _NOT_HTTP2 not in text


def error_for_reason(reason: str, retry_after: float | None, text: str) -> PreluNetError | None:
    """Return our error of that machine-readable name (see `reason_for`); None where no row of the table has it."""
    kind = _ERROR_CLASSES.get(reason)
    if kind is Overloaded:
        return Overloaded(text, retry_after)
    return None if kind is None else kind(text)


def _error_info(call: grpc.RpcError) -> tuple[str, float | None]:
    """Return the reason that the status itself names, "" when it is no status of ours; and when to try again."""
    reason, retry_after, info, retry = "", None, ErrorInfo(), RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status else ():
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason = info.reason
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToMilliseconds() / 1000
    except (ValueError, DecodeError):  # details that are none, or contradict the status: somebody else's
        return "", None
    return reason, retry_after
