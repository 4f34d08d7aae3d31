"""The synchronous client."""

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from prelunet.evaluator.answer import Answer
from prelunet.evaluator.client.aio import AsyncClient
from prelunet.evaluator.client.backends import BlockingBackend, each, run
from prelunet.evaluator.client.calls import DEFAULT_RETRY_POLICY, RetryPolicy
from prelunet.evaluator.client.streams import MAX_PENDING
from prelunet.evaluator.errors import PreluNetError

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


class Client:
    """A connection to a server. Use it in a `with` block, from any number of threads.

    address: host:port, or dns:///host:port for a name of several servers, which then take turns;
    timeout: seconds for one call, including retries, None for no limit;
    retries: what is retried, and when.

    Every method raises the server's error as a class of `evaluator.errors`, and EnvironmentFault with the address if
    no server can be reached. The model's name can be omitted if the server has only one. `request_id` (1 to 128
    letters, digits, '.', '_', ':' and '-') appears in the server's log and in the errors of the call.
    """

    def __init__(
        self, address: str, *, timeout: float | None = 60.0, retries: RetryPolicy = DEFAULT_RETRY_POLICY
    ) -> None:
        self._async = _BlockingClient(address, timeout=timeout, retries=retries)
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

    def classify_many(  # noqa: PLR0913 - one argument per option
        self,
        images: Iterable[Any],
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Classify many encoded images over one stream; yield the answers as they arrive, in any order.

        images: (id, image) pairs, where an id can be anything, or images alone, which get the ids 0, 1, 2, ...; read
        in another thread. Yields (id, answer), or (id, error) for a refused image; the other images continue.
        max_pending: maximum number of images held; no more are read while this many are unanswered or their answers
        are not taken. timeout: seconds for all images. The other arguments are those of `classify`.

        A broken stream is reopened for the unanswered images, and an image that met a transient error is sent again,
        as far as the client's retries allow. An exception of `images` is raised after the answers to the images before
        it.
        """
        return each(
            self._async.classify_many(
                images,
                model=model,
                protocol=protocol,
                scales=scales,
                mirror=mirror,
                top_k=top_k,
                heatmap=heatmap,
                apply_exif=apply_exif,
                max_pending=max_pending,
                timeout=timeout,
                request_id=request_id,
            )
        )
