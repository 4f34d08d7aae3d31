"""The synchronous client."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..answer import Answer
from ..errors import ModelNotFound, PreluNetError
from ..image_input import ImageInput
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from ..rpc.convert import answer_from_message, report_from_message
from ..rpc.credentials import Credentials
from ..rpc.status import is_misconfigured
from .calls import MAX_PENDING, PROBE_TIMEOUT, UNANSWERED, Call, ClientSettings, ManyImages, Timeout
from .channel import open_channel
from .messages import (
    ClassifyOptions,
    EvaluateOptions,
    EvaluationProgress,
    ServedModel,
    classify_request,
    evaluate_start,
    labelled_image,
    progress_from_message,
    served_model_from_message,
)

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


class Client:
    """A connection to a server. Use it in a `with` block, from any number of threads.

    address: host:port, or dns:///host:port for a name of several servers, which then take turns;
    timeout: seconds for one call, including retries, None for no limit; 60 s by default;
    retries: whether to wait for a server that is absent, loading or stopping, and to repeat a call that may succeed
    later, up to four times; credentials: for TLS and tokens.

    Every method raises the server's error as one of `prelunet`'s, and EnvironmentFault with the address if
    no server can be reached. `request_id` (1 to 128 letters, digits, '.', '_', ':' and '-') appears in the server's log
    and in the errors of the call.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: Timeout = "default",
        retries: bool = True,
        credentials: Credentials = Credentials(),
    ) -> None:
        self._settings = settings = ClientSettings(address, timeout, credentials, retries=retries)
        self._channel = open_channel(grpc, address, settings.credentials, settings.options())
        self._stub: Any = pb_grpc.PreluNetServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._settings.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end with Interrupted."""
        self._settings.closed = True
        self._channel.close()

    def classify(
        self,
        image: ImageInput,
        *,
        timeout: Timeout = "default",
        request_id: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Answer:
        """Classify one image. A file is sent as it is, pixels as a PNG.

        image: path of an image file, its bytes, a Pillow image, or an array: uint8 (H, W, 3), RGB, or (H, W), gray;
        timeout: seconds to the answer, instead of the client's; options: see `ClassifyOptions`.
        """
        call = Call(self._settings, timeout, request_id)
        return answer_from_message(self._unary("Classify", classify_request(image, **options), call))

    def classify_many(
        self,
        images: Iterable[Any],
        *,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Classify many images, up to `max_pending` at a time; yield the answers as they arrive, in any order.

        images: (id, image) pairs, where an id can be anything, or images alone, which get the ids 0, 1, 2, ...; each
        image as for `classify`; read in another thread. Yields (id, answer), or (id, error) for an image without an
        answer; the other images continue.
        max_pending: maximum number of images held; no more are read while this many are unanswered or their answers
        are not taken; timeout: seconds for all images; each one also has the client's timeout; options: see
        `ClassifyOptions`.

        An exception of `images` is raised after the answers to the images before it. What all further images would
        meet is raised, too: no server, or a token that is refused.
        """
        many = ManyImages(self._settings, images, options, max_pending, timeout, request_id)
        return self._answers(many, images)

    def _answers(
        self, many: ManyImages, images: Iterable[Any]
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        events: SimpleQueue[Any] = SimpleQueue()  # what `_read` puts, and calls that have ended
        room, left = threading.Semaphore(many.max_pending), threading.Event()
        reading = threading.Thread(target=_read, args=(many, images, events, room, left), daemon=True)
        reading.start()
        calls: dict[Any, Any] = {}  # in flight, with the ids of their images
        end: BaseException | None = None  # why there are no more images
        try:
            while calls or end is None:
                try:
                    event = events.get(timeout=many.call.left())
                except Empty:
                    raise many.timed_out() from None
                if isinstance(event, BaseException) and not isinstance(event, grpc.Future):  # a call is both
                    end = event
                    continue
                key, result = event if isinstance(event, tuple) else (calls.pop(event), self._outcome(event, many))
                if isinstance(result, pb.ClassifyRequest):
                    self._try_connection(many.call)
                    with self._errors(many.call):
                        call = self._stub.Classify.future(result, **many.arguments())
                    calls[call] = key
                    call.add_done_callback(events.put)
                    continue
                room.release()
                yield key, result
            many.raise_end(end)
        finally:
            left.set()
            room.release()
            for call in calls:
                call.cancel()

    def _outcome(self, call: Any, many: ManyImages) -> Answer | PreluNetError:
        try:
            with self._errors(many.call):
                return answer_from_message(call.result())
        except PreluNetError as error:
            return many.error_of_image(error)

    def evaluate(
        self,
        dataset: "Dataset",
        *,
        progress: Callable[[EvaluationProgress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> dict[str, Any]:
        """Send a labeled dataset and return its report, the same as that of `prelunet validate` and `report`.

        Unlike theirs, it lists only the first refused images, at most 1000 and 1 MiB of names and reasons.
        progress: called with the progress about once a second; timeout: seconds for the whole call, None for no limit;
        options: see `EvaluateOptions`. Images are read in another thread. The call waits for a server up to the
        client's timeout; once begun, it is never repeated. Raises DatasetError for an image that cannot be read.
        """
        call = Call(self._settings, timeout, request_id)
        start, report, unreadable = evaluate_start(dataset, **options), None, list[Exception]()

        def messages() -> Iterator[pb.EvaluateRequest]:
            yield start
            try:
                yield from (labelled_image(dataset, sample) for sample in dataset.samples)
            except Exception as error:  # gRPC would only report that something failed here
                unreadable.append(error)

        self._unary("ListModels", pb.ListModelsRequest(), call, self._settings.seconds("default"))  # is there a server?
        try:
            with self._errors(call):
                responses = self._stub.Evaluate(messages(), **call.arguments())
                try:
                    for response in responses:
                        if response.HasField("report"):
                            report = response.report
                        elif progress is not None and response.HasField("progress"):
                            progress(progress_from_message(response.progress))
                finally:
                    responses.cancel()
        finally:
            if unreadable:  # takes precedence over the server's error
                raise unreadable[0]
        if report is None:
            raise call.invalid_response("the evaluation ended without a report")
        return report_from_message(report)

    def models(self, *, timeout: Timeout = "default", request_id: str | None = None) -> list[ServedModel]:
        """Return the served models, in the server's order."""
        call = Call(self._settings, timeout, request_id)
        listed = self._unary("ListModels", pb.ListModelsRequest(), call).models
        found = []
        for model in listed:
            with suppress(ModelNotFound):  # unloaded meanwhile
                response = self._unary("GetModel", pb.GetModelRequest(name=model.name), call)
                found.append(served_model_from_message(response.model))
        return found

    def ready(self, *, timeout: Timeout = "default") -> bool:
        """Whether the server accepts calls; False if it reports that it does not, or does not answer in time."""
        call = Call(self._settings, timeout, None)
        try:
            response = self._health.Check(health_pb2.HealthCheckRequest(), **call.arguments())
        except grpc.RpcError as failed:
            if failed.code() in UNANSWERED:
                return False
            raise call.error(failed) from failed
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _unary(self, method: str, request: object, call: Call, limit: float | None = None) -> Any:
        self._try_connection(call)
        with self._errors(call):
            return getattr(self._stub, method)(request, **call.arguments(limit))

    def _try_connection(self, call: Call) -> None:
        """Before a client's first call, raise the error of a connection that waiting would not bring about."""
        if not self._settings.probed:
            self._settings.probed = True
            failed = self._no_connection(call.left(PROBE_TIMEOUT))
            if failed is not None and is_misconfigured(failed):
                self._settings.probed = False
                raise call.error(failed) from failed
            if self._settings.closed:
                raise call.interrupted()

    def _no_connection(self, timeout: float | None) -> grpc.RpcError | None:
        """Return why there is no connection to a server that accepts calls, None if there is or if it is not known."""
        try:
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as failed:
            return failed if failed.code() == grpc.StatusCode.UNAVAILABLE else None
        except ValueError:  # of a closed channel
            if not self._settings.closed:
                raise
        return None

    @contextmanager
    def _errors(self, call: Call) -> Iterator[None]:
        """Convert gRPC's errors. A call that waits for a server in vain gets the reason, not only that time is up."""
        try:
            yield
        except grpc.RpcError as failed:
            if self._settings.retries and failed.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                failed = self._no_connection(PROBE_TIMEOUT) or failed
            raise call.error(failed) from failed
        except ValueError:  # "Cannot invoke RPC on closed channel!"
            if self._settings.closed:
                raise call.interrupted() from None
            raise


def _read(
    many: ManyImages,
    images: Iterable[Any],
    events: "SimpleQueue[Any]",
    room: threading.Semaphore,
    left: threading.Event,
) -> None:
    """Build requests while there is room and the caller has not left; at last, put why there are no more."""
    try:
        built = map(many.build, count(), images)
        while room.acquire() and not left.is_set():
            events.put(next(built))
    except BaseException as end:
        events.put(end)
