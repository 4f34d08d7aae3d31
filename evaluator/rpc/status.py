"""Convert our errors to gRPC statuses and back to the same class.

A status carries a google.rpc.ErrorInfo (domain "prelunet", reason such as "IMAGE_ERROR"): several errors share a
status code, and a client should not have to parse messages. If the retry delay is known, the status also carries a
google.rpc.RetryInfo. Server and client share this module, so the two directions cannot diverge.
"""

import re
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from ..errors import (
    ERROR_STATUSES,
    DatasetError,
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    ModelRefused,
    NotReady,
    OutOfMemory,
    Overloaded,
    PermissionDenied,
    PreluNetError,
    Unauthenticated,
    UsageError,
    error_status,
)

DOMAIN = "prelunet"
# Twice the largest image: the sender of a slightly too large one gets our message, not gRPC's.
MAX_MESSAGE_BYTES = 64 * 2**20
_MAX_TEXT = 1200  # bytes: texts quote the caller, and a status is sent twice in trailers of less than 8 KiB

# Errors whose text is about the client's request. Others may name server files, so their text goes only to the log.
_CLIENT_VISIBLE = (
    UsageError, ImageError, DatasetError, ModelNotFound, ModelRefused, Overloaded, DeadlinePassed, NotReady,
    Unauthenticated, PermissionDenied,
)  # fmt: skip


def _reason(kind: type[PreluNetError]) -> str:
    """Return the name of an error class in the form of google.rpc.ErrorInfo: ImageError → IMAGE_ERROR."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


_ERROR_CLASSES = {_reason(kind): kind for kind in ERROR_STATUSES}


def is_client_visible(error: BaseException) -> bool:
    """Return whether the error's text is only about the caller's request."""
    return isinstance(error, _CLIENT_VISIBLE)


def client_message(error: BaseException, incident: str) -> str:
    """Return the part of an error's text that a client may read; incident: see `status_of`."""
    if is_client_visible(error):
        return str(error).encode(errors="replace")[:_MAX_TEXT].decode(errors="ignore")
    name = error_status(error).grpc_status
    summary = _WITHOUT_DETAILS.get(name, "internal server error")
    return f"{summary}; the server's log has the details under id {incident}"


def reason_for(error: BaseException) -> str:
    """Return the machine-readable reason of an error, such as "IMAGE_ERROR"; empty for internal errors."""
    if not isinstance(error, PreluNetError):
        return ""
    return _reason(next((kind for kind in type(error).__mro__ if kind in ERROR_STATUSES), PreluNetError))


def code_of(error: BaseException) -> grpc.StatusCode:
    code: grpc.StatusCode = getattr(grpc.StatusCode, error_status(error).grpc_status)
    return code


def status_of(error: BaseException, incident: str) -> grpc.Status:
    """Return the gRPC status of an error.

    incident: id of the log entry that has the text of an error that clients must not see.
    """
    status = Status(code=code_of(error).value[0], message=client_message(error, incident))
    if reason := reason_for(error):
        status.details.append(_packed(ErrorInfo(reason=reason, domain=DOMAIN)))
    pushback: int | None = None  # milliseconds for gRPC's own retries (gRFC A6)
    if isinstance(error, OutOfMemory):
        pushback = -1  # no retry: it has the code of Overloaded, but would fail again
    elif isinstance(error, Overloaded | NotReady) and error.retry_after is not None:
        pushback, delay = round(1000 * error.retry_after), Duration()
        delay.FromMilliseconds(pushback)
        status.details.append(_packed(RetryInfo(retry_delay=delay)))
    converted: Any = rpc_status.to_status(status)
    pushed = () if pushback is None else (("grpc-retry-pushback-ms", str(pushback)),)
    grpc_status: grpc.Status = converted._replace(trailing_metadata=(*converted.trailing_metadata, *pushed))
    return grpc_status


_WITHOUT_DETAILS = {
    "FAILED_PRECONDITION": "the served model file is faulty",
    "UNAVAILABLE": "the server's machine has failed; try again later or use another server",
    "RESOURCE_EXHAUSTED": "the device has too little memory for a view of this image; request smaller scales",
    "CANCELLED": "the server stopped before it answered",
}


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def error_from(call: grpc.RpcError, address: str) -> PreluNetError:
    """Return our error for a failed call. address: the server's, quoted if the text alone would not help."""
    code, text = call.code(), call.details() or ""
    if (named := error_for_reason(*_error_info(call), text)) is not None:
        return named
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:  # gRPC's own words
        if "CLIENT: Received" in text:  # raised by this client for the server's response
            return UsageError(f"{address}: {_RESPONSE_TOO_LARGE} ({text})")
        return ImageError(f"{address}: the message exceeds the server's limit ({text}). Send a smaller image")
    if code == grpc.StatusCode.UNAVAILABLE:
        explanations = (explanation for pattern, explanation in _UNAVAILABLE if re.search(pattern, text))
        unexplained = "the call was interrupted, or the server cannot be reached; try again"
        kind = NotReady if _UNHEALTHY in text else EnvironmentFault
        return kind(f"{address}: {next(explanations, unexplained)} ({text})")
    if code in _CLIENT_SIDE:
        other, explanation = _CLIENT_SIDE[code]
        return other(f"{address}: {explanation} ({text})")
    return PreluNetError(f"{address}: {code.name}: {text}")


_RESPONSE_TOO_LARGE = (
    "the response exceeds this client's message limit. Request less (a smaller `top_k`, no heat map), or use your own "
    "gRPC client with a higher channel option `grpc.max_receive_message_length`"
)

# Statuses that gRPC itself sets when none of ours arrives.
_CLIENT_SIDE: dict[grpc.StatusCode, tuple[type[PreluNetError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlinePassed, "no answer in time; allow more time (--timeout)"),
    grpc.StatusCode.UNIMPLEMENTED: (EnvironmentFault, "a gRPC server answered, but it is not a prelunet server"),
    grpc.StatusCode.CANCELLED: (Interrupted, "the call was cancelled, perhaps by a server that is stopping; try again"),
    grpc.StatusCode.UNKNOWN: (EnvironmentFault, "not a prelunet answer; the address should be like 127.0.0.1:50051"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (Overloaded, "the server is overloaded; try again later"),
}

# Beginning of gRPC's (1.81) text when it cannot connect: to any of several addresses, to the only one.
_NO_CONNECTION = ("connections to all backends failing", "failed to connect to all addresses")
_UNHEALTHY = "backend unhealthy"  # connected, but its health is NOT_SERVING
_NOT_HTTP2 = "Failed parsing HTTP/2"
_TLS_FAILED = "Tls handshake failed|Hostname Verification|security handshaker"
# Pattern in gRPC's text for its own UNAVAILABLE, and our explanation; the first match counts.
_UNAVAILABLE = (
    (_UNHEALTHY, "the server is loading its models or stopping; try again later"),
    ("errors resolving", "the host name cannot be resolved; check the address"),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS on this port; connect without TLS, or to its port with TLS"),
    ("certificate has expired", "the server's certificate has expired; its operator has to renew it"),
    ("certificate is not yet valid", "the server's certificate is not valid yet; check the clocks of both machines"),
    (
        "Hostname Verification",
        "the server's certificate is of another host; connect to a name or address that it contains",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is of an unknown authority; give the file of its authority (--tls-ca)",
    ),
    (_TLS_FAILED, "no TLS connection; check the versions and certificates of both sides"),
    (
        "(failing|addresses).*(Socket closed|Handshake read failed)",
        "the connection was closed before a call. The server may require TLS (--tls-ca) or a client certificate "
        "(--tls-cert, --tls-key), or it is stopping or at its connection limit; then try again",
    ),
    (_NOT_HTTP2, "the program that listens there is not a gRPC server; check the port"),
    (
        "Connection refused",
        "nothing listens there: connection refused. Start a server with `prelunet serve --model NAME=MODEL.onnx`, or "
        "try again once it has started",
    ),
    ("No such file", "nothing listens there. Start a server, or try again once it has started"),
    (
        "Connection reset|Socket closed|GOAWAY",
        "the server closed the connection, perhaps because it is stopping or at its connection limit; try again",
    ),
    ("ping timeout", "the server's machine no longer responds; try again"),
    *((beginning, "cannot connect; check the address, and that the machine is up") for beginning in _NO_CONNECTION),
)


def is_unreachable(call: grpc.RpcError) -> bool:
    """Return whether a call failed because no server could be reached, so none has seen it."""
    text = call.details() or ""
    unavailable = call.code() == grpc.StatusCode.UNAVAILABLE
    return unavailable and text.startswith(_NO_CONNECTION) and not re.search(f"{_NOT_HTTP2}|{_TLS_FAILED}", text)


def is_misconfigured(call: grpc.RpcError) -> bool:
    """Return whether a call failed because of its address or TLS, which waiting does not change."""
    permanent = f"errors resolving|{_NOT_HTTP2}|{_TLS_FAILED}"
    return call.code() == grpc.StatusCode.UNAVAILABLE and re.search(permanent, call.details() or "") is not None


def error_for_reason(reason: str, retry_after: float | None, text: str) -> PreluNetError | None:
    """Return our error for a machine-readable reason (see `reason_for`); None if the table has no such reason."""
    kind = _ERROR_CLASSES.get(reason)
    if kind is Overloaded or kind is NotReady:
        return kind(text, retry_after)
    return None if kind is None else kind(text)


def _error_info(call: grpc.RpcError) -> tuple[str, float | None]:
    """Return the reason from the status, "" if it is not one of ours, and the retry delay in seconds."""
    reason, retry_after, info, retry = "", None, ErrorInfo(), RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status else ():
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason = info.reason
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToMilliseconds() / 1000
    except (ValueError, DecodeError):  # malformed details, or details that contradict the status: not ours
        return "", None
    return reason, retry_after
