"""The synchronous client."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from prelunet.evaluator.answer import Answer
from prelunet.evaluator.client.calls import DEFAULT_RETRY_POLICY, Call, ClientSettings, RetryPolicy, Timeout
from prelunet.evaluator.client.channel import CHANNEL_OPTIONS
from prelunet.evaluator.client.messages import (
    HEALTH,
    EvaluationProgress,
    EvaluationResponses,
    ServedModel,
    classify_request,
    evaluate_start,
    is_serving,
    is_unanswered,
    labelled_image,
    served_model_from_message,
)
from prelunet.evaluator.client.streams import MAX_PENDING, PendingImages, Result
from prelunet.evaluator.errors import PreluNetError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.convert import answer_from_message

if TYPE_CHECKING:
    from prelunet.evaluator.datasets.dataset import Dataset


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
        self._settings = ClientSettings(address, timeout, retries)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.PreluNetServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

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

    def classify(  # noqa: PLR0913 - one argument per option
        self,
        image: bytes,
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        timeout: Timeout = "client",
        request_id: str | None = None,
    ) -> Answer:
        """Classify one encoded image.

        protocol: name, "" for the model's default; scales: shorter sides in pixels, None for the protocol's;
        mirror: whether to add a mirrored copy of each view, None for the protocol's choice;
        top_k: 1 to the number of classes, None for 5, or all if there are fewer;
        heatmap: draw a heat map of each of the top five classes; apply_exif: apply EXIF orientation;
        timeout: seconds, instead of the client's timeout.
        """
        request = classify_request(
            image,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        return answer_from_message(_unary_call(self._stub.Classify, request, call))

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
        request = partial(
            classify_request,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        return self._stream(
            PendingImages(self._settings, request, self._settings.deadline(timeout), request_id, max_pending), images
        )

    def _stream(
        self, pending: PendingImages, images: Iterable[Any]
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Yield the answers; a stream is open while there is something to send or to wait for."""
        exchange = Exchange(pending, images)
        try:
            while exchange.wait_for_work():
                if results := exchange.take_results():
                    yield from map(_to_answer, results)
                    continue
                stream = self._stub.ClassifyStream(exchange.open_stream(), **pending.call.begin())
                try:
                    for response in stream:
                        yield from map(_to_answer, exchange.answer_received(response))
                    exchange.stream_ended()
                except grpc.RpcError as failed:
                    exchange.stream_failed(failed)
                finally:
                    stream.cancel()
            pending.raise_error()
        finally:
            exchange.stop()

    def evaluate(  # noqa: PLR0913 - one argument per option
        self,
        dataset: "Dataset",
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        apply_exif: bool = False,
        progress: Callable[[EvaluationProgress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Send a labelled dataset and return its report, the same as that of `prelunet validate` and `report`.

        Unlike theirs, it lists only the first refused images, at most 1000 and 1 MiB of names and reasons.
        progress: called with the progress about once a second; timeout: seconds for the whole call, None for no limit.
        The other arguments are those of `classify`. Nothing is retried after the first image has been read.
        Raises DatasetError for an image that cannot be read.
        """
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        start = evaluate_start(
            dataset, model=model, protocol=protocol, scales=scales, mirror=mirror, apply_exif=apply_exif
        )
        while True:
            requests, evaluation = LabelledImages(dataset, start), EvaluationResponses(call, progress)
            stream = self._stub.Evaluate(iter(requests), **call.begin())
            try:
                for response in stream:
                    evaluation.read(response)
            except grpc.RpcError as failed:
                requests.raise_local_error()  # takes precedence over the server's error
                pause = call.pause_after(failed, repeatable=not requests.begun)
            else:
                requests.raise_local_error()
                return evaluation.report()
            finally:
                stream.cancel()
            time.sleep(pause)

    def models(self, *, timeout: Timeout = "client", request_id: str | None = None) -> list[ServedModel]:
        """Return the served models, in the server's order."""
        deadline = self._settings.deadline(timeout)

        def send(method: Callable[..., Any], request: object) -> Any:
            return _unary_call(method, request, Call(self._settings, deadline, request_id))

        listed = send(self._stub.ListModels, pb.ListModelsRequest()).models
        requests = (pb.GetModelRequest(name=model.name) for model in listed)
        return [served_model_from_message(send(self._stub.GetModel, request).model) for request in requests]

    def ready(self, *, timeout: Timeout = "client") -> bool:
        """Whether the server accepts calls; False if it reports that it does not, or does not answer in time."""
        call = Call(self._settings, self._settings.deadline(timeout), None)
        try:
            return is_serving(self._health.Check(HEALTH, **call.begin()))
        except grpc.RpcError as failed:
            if is_unanswered(failed):
                return False
            raise call.failure_of(failed).error from failed


def _unary_call(method: Callable[..., Any], request: object, call: Call) -> Any:
    """Make a unary call, with retries."""
    while True:
        try:
            response = method(request, **call.begin())
        except grpc.RpcError as failed:
            pause = call.pause_after(failed)
        else:
            call.answer_received()
            return response
        time.sleep(pause)


def _to_answer(result: Result) -> tuple[Any, Answer | PreluNetError]:
    key, outcome = result
    return key, answer_from_message(outcome) if isinstance(outcome, pb.ClassifyResponse) else outcome


# The streams of `Client`: images and requests between threads.


class Exchange:
    """`PendingImages` shared by three threads: the caller's reads results, gRPC's sends, and one reads images.

    images: the caller's iterable; read in its own thread, because a broken stream may be reopened while the iterable
    still produces the next image.
    """

    def __init__(self, pending: PendingImages, images: Iterable[object]) -> None:
        self._pending = pending
        self._changed = threading.Condition()
        self._stopped = False
        self._stream = 0
        threading.Thread(target=self._take, args=(images,), name="prelunet-images", daemon=True).start()

    def _take(self, images: Iterable[object]) -> None:
        """Add images while there is room, until there are no more."""
        error: BaseException | None = None
        try:
            iterator = iter(images)
            while self._has_room():
                item = next(iterator)
                with self._changed:
                    self._pending.add(item)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:  # raise_error raises it in the caller's thread
            error = raised
        with self._changed:
            self._pending.finish(error)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until there is room for an image; False once the caller has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.has_room or self._stopped)
            return not self._stopped

    def wait_for_work(self) -> bool:
        """Wait until there is something to send or a result to take; False when all is done."""
        with self._changed:
            while (pause := self._pending.seconds_until_work()) != 0.0:
                self._changed.wait(pause)
            return not self._pending.done

    def open_stream(self) -> Iterator[pb.ClassifyStreamRequest]:
        """Return the requests of a new stream, for gRPC's thread; this ends the requests of the previous stream."""
        with self._changed:
            self._stream += 1
            return self._requests(self._stream)

    def _requests(self, stream: int) -> Iterator[pb.ClassifyStreamRequest]:
        while (request := self._next_request(stream)) is not None:
            yield request

    def _next_request(self, stream: int) -> pb.ClassifyStreamRequest | None:
        """Wait for a request of this stream; None when it should send no more requests."""
        with self._changed:
            while self._stream == stream and not self._pending.idle:
                if (request := self._pending.next_request()) is not None:
                    return request
                self._changed.wait(self._pending.seconds_until_due())
            return None

    def answer_received(self, response: pb.ClassifyStreamResponse) -> list[Result]:
        """Handle a response and return the results."""
        with self._changed:
            self._pending.answer_received(response)
            return self._take_results()

    def stream_ended(self) -> None:
        """Handle the end of the stream by the server; its requests end too."""
        with self._changed:
            self._close_stream()
            self._pending.stream_ended()

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Handle a broken stream, whose requests end too; raise the error if it should not be reopened."""
        with self._changed:
            self._close_stream()  # first: further images belong to the next stream
            self._pending.stream_failed(failed)

    def take_results(self) -> list[Result]:
        """Return and clear the results."""
        with self._changed:
            return self._take_results()

    def _take_results(self) -> list[Result]:
        self._changed.notify_all()  # there may be room now
        return self._pending.take_results()

    def stop(self) -> None:
        """Read no more images; the reading thread ends at the latest when the next image arrives."""
        with self._changed:
            self._stopped = True
            self._close_stream()

    def _close_stream(self) -> None:
        self._stream += 1
        self._changed.notify_all()


class LabelledImages:
    """The messages of one evaluation, and the error that occurred while reading images.

    gRPC iterates over them in its own thread and would only report that something failed there. begun: whether an
    image has been requested.
    """

    def __init__(self, dataset: "Dataset", start: pb.EvaluateRequest) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[pb.EvaluateRequest]:
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield labelled_image(self._dataset, sample)
        except Exception as error:
            self._error = error  # raise_local_error raises it in the caller's thread; ending the stream ends the call

    def raise_local_error(self) -> None:
        """Raise the error of this side, if there is one."""
        if self._error is not None:
            raise self._error
