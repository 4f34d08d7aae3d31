"""Errors on the wire: ours to a gRPC status and back to the same class.

A status carries a google.rpc.ErrorInfo (domain "prelunet", reason as "IMAGE_ERROR"), because several errors share a
status code and a client should not have to read messages. Server and client share this module, so that the way there
and the way back cannot differ.
"""

import re

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from evaluator.errors import (
    OUTCOMES,
    DatasetError,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    Overloaded,
    PreluNetError,
    UsageError,
    outcome_of,
)

DOMAIN = "prelunet"
MAX_MESSAGE = 64 * 2**20  # bytes; twice the largest image, so that one slightly too large gets our message, not gRPC's
_MAX_TEXT = 600  # characters: texts quote the caller, and a status travels twice in trailers of less than 8 KiB

# Whose text is about what the caller sent. The others may name files of the server, so their text stays in its log.
_TOLD_TO_CALLERS = (UsageError, ImageError, DatasetError, ModelNotFound, Overloaded)


def _reason(kind: type[PreluNetError]) -> str:
    """Return the name of an error class as google.rpc.ErrorInfo wants it: ImageError → IMAGE_ERROR."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


_KINDS = {_reason(kind): kind for kind in OUTCOMES}


def may_be_told(error: BaseException) -> bool:
    """Say whether the error's text speaks only of what the caller sent."""
    return isinstance(error, _TOLD_TO_CALLERS)


def status_of(error: BaseException, incident: str) -> grpc.Status:
    """Return the gRPC status of an error.

    incident: the id under which the log holds an error whose text is not for callers.
    """
    name = outcome_of(error).grpc_status
    text = str(error)[:_MAX_TEXT]
    if not may_be_told(error):
        text = f"{_WITHOUT_DETAILS.get(name, 'an error of the server')}; its log has the details under id {incident}"
    status = Status(code=getattr(grpc.StatusCode, name).value[0], message=text)
    if isinstance(error, PreluNetError):
        status.details.append(_packed(ErrorInfo(reason=_reason(_table_row(error)), domain=DOMAIN)))
    told: grpc.Status = rpc_status.to_status(status)
    return told


_WITHOUT_DETAILS = {
    "FAILED_PRECONDITION": "the served model file is at fault",
    "UNAVAILABLE": "the server's machine is at fault",
    "CANCELLED": "the server stopped before the answer",
}


def _table_row(error: PreluNetError) -> type[PreluNetError]:
    """Return the class of the error table that this error belongs to."""
    return next((kind for kind in type(error).__mro__ if kind in OUTCOMES), PreluNetError)


def _packed(info: ErrorInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(info)
    return packed


def error_from(call: grpc.RpcError, address: str) -> PreluNetError:
    """Return our error for a failed call. address: the server's, named where the text alone would not help."""
    code, text = call.code(), call.details() or ""
    if kind := _kind_told_by(call):
        return kind(text)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:  # gRPC's own words
        return ImageError(f"{address}: the message is above the server's limit ({text}). Send a smaller image")
    if code in _CLIENT_SIDE:
        kind, what = _CLIENT_SIDE[code]
        return kind(f"{address}: {what} ({text})")
    return PreluNetError(f"{address}: {code.name}: {text}")


# What gRPC itself says when no status of ours arrives.
_CLIENT_SIDE: dict[grpc.StatusCode, tuple[type[PreluNetError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        EnvironmentFault,
        "no server answers there; start one with `prelunet serve --model NAME=MODEL.onnx`",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (EnvironmentFault, "no answer in time; give it more time (--timeout)"),
    grpc.StatusCode.UNIMPLEMENTED: (EnvironmentFault, "a gRPC server answers there, but not prelunet's"),
    grpc.StatusCode.CANCELLED: (Interrupted, "the call was cancelled"),
    grpc.StatusCode.UNKNOWN: (EnvironmentFault, "no answer of prelunet's; is it an address like 127.0.0.1:50051?"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (Overloaded, "the server has too much to do; try later"),
}


def _kind_told_by(call: grpc.RpcError) -> type[PreluNetError] | None:
    """Return the class that the status itself names, or None when it is no status of ours."""
    status = rpc_status.from_call(call)
    for detail in status.details if status else ():
        info = ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return _KINDS.get(info.reason)
    return None
