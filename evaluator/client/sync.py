"""The synchronous client."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ..rpc.credentials import Credentials
from .aio import AsyncClient
from .backends import BlockingBackend, each, run
from .calls import DEFAULT_RETRY_POLICY, RetryPolicy, Timeout

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _BlockingClient(AsyncClient):
    """A client whose coroutines block instead of suspending."""

    _backend = BlockingBackend()


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["Client", _P], _T]:
    """Return the method of `Client` that does the same as a method of `AsyncClient`."""

    @wraps(method)
    def blocking(self: "Client", /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return run(method(self._async, *arguments, **options))

    return blocking


def _iterating(
    method: Callable[Concatenate[AsyncClient, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate["Client", _P], Generator[_T, None, None]]:
    """Return the method of `Client` that yields the same as a method of `AsyncClient`."""

    @wraps(method)
    def iterating(self: "Client", /, *arguments: _P.args, **options: _P.kwargs) -> Generator[_T, None, None]:
        return each(method(self._async, *arguments, **options))

    return iterating


class Client:
    """A connection to a server. Use it in a `with` block, from any number of threads.

    address: host:port, or dns:///host:port for a name of several servers, which then take turns;
    timeout: seconds for one call, including retries and the wait for its turn, None for no limit; by default 60 s from
    the moment when the call is first sent, so that bursts of any size are answered;
    retries: what is retried, and when; credentials: for TLS and tokens.

    Every method raises the server's error as a class of `evaluator.errors`, and EnvironmentFault with the address if
    no server can be reached. The model's name can be omitted if the server has only one. `request_id` (1 to 128
    letters, digits, '.', '_', ':' and '-') appears in the server's log and in the errors of the call.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: Timeout = "default",
        retries: RetryPolicy = DEFAULT_RETRY_POLICY,
        credentials: Credentials = Credentials(),
    ) -> None:
        self._async = _BlockingClient(address, timeout=timeout, retries=retries, credentials=credentials)
        run(self._async.__aenter__())

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._async.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    close = _blocking(AsyncClient.close)
    classify = _blocking(AsyncClient.classify)
    evaluate = _blocking(AsyncClient.evaluate)
    models = _blocking(AsyncClient.models)
    ready = _blocking(AsyncClient.ready)
    classify_many = _iterating(AsyncClient.classify_many)
