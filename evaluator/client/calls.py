"""The parts of a call that do no I/O, shared by both clients: deadline, metadata, errors."""

import re
import time
from typing import Any, Literal, TypeAlias

import grpc

from ..errors import (
    DeadlinePassed,
    ImageError,
    Interrupted,
    PermissionDenied,
    PreluNetError,
    Unauthenticated,
    UsageError,
)
from ..image_input import is_image
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..rpc.credentials import Credentials
from ..rpc.status import error_from, is_unreachable
from .channel import channel_options, checked_address
from .messages import ClassifyOptions, classify_request

Timeout: TypeAlias = float | Literal["default"] | None
"""Seconds for a call, including retries; None for no limit. "default": of a call, the client's; of a client, 60 s."""

MAX_PENDING = 32  # images of `classify_many`
PROBE_TIMEOUT = 1.0  # seconds to find out why a server cannot be reached
UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)  # a health check without a server
_DEFAULT_TIMEOUT = 60.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TIMEOUT = 1e9  # seconds; gRPC counts nanoseconds in 64 bits


class ClientSettings:
    """The settings of a client for all its calls; shared by its threads.

    closed: no further call may begin; probed: whether the connection was tried; credentials: None without TLS.
    """

    def __init__(self, address: str, timeout: Timeout, credentials: Credentials, *, retries: bool) -> None:
        if not isinstance(retries, bool):
            raise UsageError(f"retries is {retries!r}, but it must be True or False")
        self.address = checked_address(address)
        self.retries = retries
        self.credentials = credentials.of_channel()
        self.closed = False
        self.probed = not retries  # then every call fails as soon as the connection does
        self._token = credentials.of_calls(self.address)
        self._timeout = _DEFAULT_TIMEOUT if timeout == "default" else _checked(timeout)

    def options(self) -> list[tuple[str, Any]]:
        """Return the options of the channel."""
        return channel_options(retries=self.retries)

    def metadata(self, request_id: str | None) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        named = () if request_id is None else (("x-request-id", request_id),)
        return named if self._token is None else (*named, *self._token.metadata())

    def seconds(self, timeout: Timeout) -> float | None:
        """Return a timeout in seconds, None for no limit."""
        return self._timeout if timeout == "default" else _checked(timeout)


class Call:
    """One call of a client, or several that share a deadline and a request id."""

    def __init__(self, settings: ClientSettings, timeout: Timeout, request_id: str | None) -> None:
        seconds = settings.seconds(timeout)
        if request_id is not None and not (isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)):
            raise UsageError(
                f"request_id is {request_id!a}, but it must consist of 1 to 128 letters, digits, '.', '_', ':' and '-'"
            )
        self.settings = settings
        self._request_id = request_id
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.check_open()

    def check_open(self) -> None:
        """Raise UsageError if the client is closed."""
        if self.settings.closed:
            raise UsageError("the client is closed; make the call inside its `with` block")

    def left(self, limit: float | None = None) -> float | None:
        """Return the seconds until the deadline, at most `limit`; None for no limit."""
        if self._deadline is None:
            return limit
        left = max(0.0, self._deadline - time.monotonic())
        return left if limit is None else min(left, limit)

    def arguments(self, limit: float | None = None) -> dict[str, Any]:
        """Return gRPC's arguments besides the request. limit: in seconds, besides the deadline."""
        self.check_open()
        return {"timeout": self.left(limit), "metadata": self.settings.metadata(self._request_id)}

    def error(self, failed: grpc.RpcError) -> PreluNetError:
        """Return our error for a call that failed."""
        if failed.code() == grpc.StatusCode.CANCELLED and self.settings.closed:
            return self.interrupted()
        return self.named(error_from(failed, self.settings.address))

    def interrupted(self) -> PreluNetError:
        """Return the error of a call whose client was closed."""
        return self.named(Interrupted(f"{self.settings.address}: the client was closed before the answer arrived"))

    def invalid_response(self, what: str) -> PreluNetError:
        """Return the error for a server that violates the protocol."""
        text = f"{self.settings.address}: {what}. Do client and server have the same version?"
        return self.named(PreluNetError(text))

    def named(self, error: PreluNetError) -> PreluNetError:
        """Return an error with the request id, if there is one, at the end of its text."""
        if self._request_id is not None:
            error.args = (f"{error} (request id {self._request_id})", *error.args[1:])
        return error


class ManyImages:
    """One `classify_many`: builds its requests and judges its errors. max_pending: maximum number of images held."""

    def __init__(
        self,
        settings: ClientSettings,
        images: object,
        options: ClassifyOptions,
        max_pending: int,
        timeout: float | None,
        request_id: str | None,
    ) -> None:
        if is_image(images):
            raise UsageError(f"images is a {type(images).__name__}, but it must be several images, as in [image]")
        if max_pending < 1:
            raise UsageError(f"max_pending is {max_pending}, but it must be at least 1")
        classify_request(b"", **options)  # report an invalid option now, not with the first image
        self.max_pending = max_pending
        self.call = Call(settings, timeout, request_id)
        self._options = options

    def build(self, number: int, item: Any) -> tuple[Any, pb.ClassifyRequest | PreluNetError]:
        """Return the id of an item of the caller's iterable with its request, or with the error of its image.

        item: (id, image), or an image, whose id is its number.
        """
        key, image = item if isinstance(item, tuple) and len(item) == 2 else (number, item)
        try:
            return key, classify_request(image, **self._options)
        except ImageError as error:
            return key, _alone(self.call.named(error))
        except UsageError as error:
            raise UsageError(f"image {number} of classify_many: {error}, or (id, image)") from error

    def arguments(self) -> dict[str, Any]:
        """Return gRPC's arguments for one image, which has the client's timeout, too."""
        return self.call.arguments(self.call.settings.seconds("default"))

    def error_of_image(self, error: PreluNetError) -> PreluNetError:
        """Return the error of one image; raise one that all further images would meet."""
        if self.call.left() == 0:
            raise self.timed_out()
        absent = isinstance(error.__cause__, grpc.RpcError) and is_unreachable(error.__cause__)
        if absent or self.call.settings.closed or isinstance(error, Unauthenticated | PermissionDenied):
            raise error
        return _alone(error)

    def raise_end(self, end: BaseException | None) -> None:
        """Raise why the caller's iterable ended, unless it had no more images."""
        if end is not None and not isinstance(end, StopIteration | StopAsyncIteration):
            raise end

    def timed_out(self) -> PreluNetError:
        """Return the error for a deadline that has passed."""
        text = "the timeout for all images has passed; give a longer one, or None for no limit"
        return self.call.named(DeadlinePassed(text))


def _alone(error: PreluNetError) -> PreluNetError:
    """Return an error without what it refers to: a caller may keep the errors of many images."""
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None  # it refers to the call, which is the cause itself
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _checked(timeout: float | None) -> float | None:
    """Return the timeout as a float; UsageError if it is invalid."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_TIMEOUT:
        raise UsageError(f"timeout is {timeout!r}, but it must be a number of seconds above 0, or None for no limit")
    return float(timeout)
